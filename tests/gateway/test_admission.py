import asyncio
import math
from contextlib import AsyncExitStack

import pytest
from aiohttp import web
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from builders import Clock, background, eventually, served, until, user
from rollout_backend.gateway.admission import Admission
from rollout_backend.gateway.engine.engines import Engines
from rollout_backend.gateway.stats import EngineLoad
from rollout_backend.local.scripted import ScriptedEngine
from rollout_backend.serving.server_process import free_port

FULL = EngineLoad(running=64, waiting=8, free=0)


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def admission(clock) -> Admission:
    return Admission(max_calls=100, max_queued_per_engine=10, clock=clock)


def admitted(admission, limit: int = 1000) -> int:
    """Return how many calls are admitted before the first refusal."""
    for entered in range(limit):
        if admission.check() is not None:
            return entered
        admission.began()
    return limit


@pytest.mark.parametrize(
    ("load", "calls"),
    [
        (None, 100),  # only the limit applies
        (FULL, 2),  # 8 wait, 10 may
        (EngineLoad(running=60, waiting=0, free=4), 14),  # free places are filled before calls queue
        (EngineLoad(running=60, waiting=0, free=1000), 100),
    ],
)
def test_calls_are_admitted_until_the_queue_is_full_or_the_limit_is_reached(admission, load, calls):
    if load is not None:
        admission.observe({"an engine": load})
    assert admitted(admission) == calls
    refusal = admission.check()
    assert refusal is not None
    assert (refusal.status, refusal.code, refusal.retry_after_s) == (429, "rate_limit_exceeded", 1)
    admission.ended()
    assert admission.check() is None


def test_a_call_that_ended_since_the_last_poll_is_not_counted(admission):
    admission.observe({"an engine": FULL})
    for _ in range(50):
        assert admission.check() is None
        admission.began()
        admission.ended(0.1)


def test_an_old_load_is_ignored(admission, clock):
    admission.observe({"an engine": EngineLoad(running=64, waiting=500, free=0)})
    assert admission.check() is not None
    clock.now += 10.1
    assert admission.check() is None


def test_retry_after_follows_from_the_queue_and_spreads_refused_calls(admission, clock):
    admission.began()
    admission.ended(21.0)  # each stays 21 s, and 84 are inside: 4 leave each second
    admission.observe({"an engine": EngineLoad(running=64, waiting=20, free=0)})
    waits = [admission.check().retry_after_s for _ in range(40)]
    assert waits == sorted(waits)
    assert waits[0] == math.ceil((20 + 1 - 10) / 4)
    assert waits[-1] - waits[0] in (9, 10)  # 4 each second
    clock.now += 5  # they have returned meanwhile
    admission.observe({"an engine": EngineLoad(running=64, waiting=20, free=0)})
    assert admission.check().retry_after_s <= waits[-1] - 4


def test_retry_after_is_at_most_a_minute(admission):
    admission.began()
    admission.ended(300.0)
    admission.observe({"an engine": EngineLoad(running=1, waiting=5000, free=0)})
    assert {admission.check().retry_after_s for _ in range(200)} == {60}


# --- polling the loads ------------------------------------------------------------------------------------


@pytest.fixture
async def site():
    """Serve GET requests: `pages` maps a path to JSON, or to a status."""
    async with AsyncExitStack() as stack:

        async def start(pages: dict) -> str:
            async def page(request: web.Request) -> web.Response:
                found = pages.get(request.path, 404)
                return web.Response(status=found) if isinstance(found, int) else web.json_response(found)

            return await stack.enter_async_context(served(page))

        yield start


def loads(*ranks: tuple[int, int]) -> dict:
    """Return SGLang's answer at /v1/loads."""
    return {
        "timestamp": "2026-01-01T00:00:00+00:00",
        "version": "0.5.23",
        "loads": [
            {"dp_rank": i, "num_running_reqs": running, "num_waiting_reqs": waiting, "max_running_requests": 64}
            for i, (running, waiting) in enumerate(ranks)
        ],
    }


async def first_look(url: str) -> dict[str, EngineLoad]:
    seen: asyncio.Queue = asyncio.Queue()
    async with background(Engines(url).poll(seen.put_nowait, 0.01)):
        return await asyncio.wait_for(seen.get(), 120)


async def test_engines_are_listed_by_the_router_and_polled_one_by_one(site):
    a = await site({"/v1/loads": loads((64, 5))})
    b = await site({"/v1/loads": loads((1, 0), (2, 3))})
    silent = await site({})
    sick = await site({"/v1/loads": loads((9, 9))})
    dead = f"http://127.0.0.1:{free_port()}"
    workers = [{"id": url, "url": url, "is_healthy": url != sick} for url in (a, silent, dead, b, sick)]
    router = await site({"/workers": {"workers": workers, "total": 5}})
    assert await first_look(router) == {a: EngineLoad(64, 5), b: EngineLoad(3, 3, free=125)}


@pytest.mark.parametrize("page", [404, {"loads": "many"}, {"loads": [{"num_running_reqs": 1}]}, []])
async def test_an_engine_without_a_load_is_asked_again(site, page, caplog):
    """It was only starting."""
    caplog.set_level("INFO", "rollout_backend.gateway.engine.engines")
    pages, looks = {"/v1/loads": page}, []
    async with background(Engines(await site(pages)).poll(looks.append, 0.01)):
        await eventually(lambda: "gateway.max_concurrent_calls" in caplog.text)
        assert looks == []
        pages["/v1/loads"] = loads((1, 1))
        await eventually(lambda: len(looks) > 0)
        assert [*looks[0].values()] == [EngineLoad(1, 1, free=63)]


async def test_the_known_engines_are_kept_while_the_router_does_not_answer(site):
    engine = await site({"/v1/loads": loads((1, 0))})
    pages = {"/workers": {"workers": [{"id": engine, "url": engine, "is_healthy": True}], "total": 1}}
    looks, engines = [], Engines(await site(pages))
    async with background(engines.poll(looks.append, 0.01)):
        await eventually(lambda: len(looks) > 0)
        assert engines.urls == [engine]
        pages["/workers"] = 500
        await eventually(lambda: len(looks) > 10)
        assert engines.urls == [engine]
        pages["/workers"] = {"workers": [], "total": 0}
        await eventually(lambda: engines.urls == [])


class LoadedEngine(ScriptedEngine):
    """Reports how many requests wait in it."""

    waiting = 0
    looks = 0

    def _app(self):
        app = super()._app()
        app.router.routes.append(Route("/v1/loads", self._loads))
        return app

    async def _loads(self, _: Request) -> JSONResponse:
        self.looks += 1
        return JSONResponse(loads((64, self.waiting)))

    def wait_for_looks(self) -> None:
        """Wait until a gateway has seen the current load: it polls again only after it has used the last answer."""
        enough = self.looks + 2
        until(lambda: self.looks >= enough)


def test_a_gateway_refuses_calls_that_would_only_wait(serve):
    body = {"model": "scripted", "messages": [user("Hello")]}
    with LoadedEngine(["Yes?"]) as engine:
        gateway = serve(engine.url, gateway={"max_queued_per_engine": 4}, load_poll_s=0.02)
        engine.waiting = 50
        engine.wait_for_looks()
        refused = gateway.post(body)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert "wait for an engine" in refused.json()["error"]["message"]
        engine.waiting = 0
        engine.wait_for_looks()
        assert gateway.post(body).status_code == 200
        stats = gateway.stats()
        assert stats.errors == {"rate_limit_exceeded": 1}
        assert stats.engine_waiting == {engine.url: 0}
        assert stats.engine_running.keys() == {engine.url}
        assert gateway.trajectory().unanswered_calls == 0
