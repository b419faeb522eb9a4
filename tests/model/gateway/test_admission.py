import asyncio
import heapq
import itertools
import random
from contextlib import AsyncExitStack

import pytest
from aiohttp import web
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from builders import Clock, background, eventually, served, until, user
from rollout_backend.model.gateway.admission import Admission
from rollout_backend.model.gateway.engine.engines import Engines
from rollout_backend.model.gateway.stats import EngineLoad
from rollout_backend.model.serving.server_process import free_port
from rollout_backend.workbench.local.scripted import ScriptedEngine

FULL = EngineLoad(running=64, waiting=8, free=0)


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def admission(clock) -> Admission:
    return Admission(max_calls=100, max_queued_per_engine=10, clock=clock)


class Calls:
    """Calls of many sessions, in virtual order: each holds its place until `end`."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.admitted: list[str] = []
        self._held: dict[str, asyncio.Event] = {}
        self._tasks: list[asyncio.Task] = []

    async def begin(self, name: str, choices: int = 1) -> None:
        """Begin a call of the session that the name's first letter names."""
        self._held[name] = asyncio.Event()
        self._tasks.append(asyncio.create_task(self._hold(name, choices)))
        await settle()

    async def _hold(self, name: str, choices: int) -> None:
        async with self._admission.place(name[0], choices):
            self.admitted.append(name)
            await self._held[name].wait()

    async def end(self, name: str) -> None:
        self._held[name].set()
        await settle()

    async def cancel(self, name: str) -> None:
        self._tasks[[*self._held].index(name)].cancel()
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("load", "calls"),
    [
        (None, 100),  # only the limit applies
        (FULL, 2),  # 8 wait, 10 may
        (EngineLoad(running=60, waiting=0, free=4), 14),  # free places are filled before calls queue
        (EngineLoad(running=60, waiting=0, free=1000), 100),
    ],
)
async def test_calls_start_until_the_queue_is_full_or_the_limit_is_reached_and_the_others_wait(
    admission, load, calls
):
    if load is not None:
        admission.observe({"an engine": load})
    made = Calls(admission)
    for i in range(120):
        await made.begin(f"{chr(1000 + i)}")
    assert (admission.in_flight, admission.waiting) == (calls, 120 - calls)
    await made.end(made.admitted[0])
    assert made.admitted == [chr(1000 + i) for i in range(calls + 1)]


async def test_a_call_that_ended_since_the_last_poll_is_not_counted(admission):
    admission.observe({"an engine": FULL})
    made = Calls(admission)
    for i in range(50):
        await made.begin(f"a{i}")
        await made.end(f"a{i}")
    assert len(made.admitted) == 50


async def test_calls_that_wait_start_once_the_engines_queue_is_shorter_or_their_load_is_unknown(admission, clock):
    made, full = Calls(admission), EngineLoad(running=64, waiting=500, free=0)
    admission.observe({"an engine": full})
    await made.begin("a")
    assert made.admitted == []
    admission.observe({"an engine": FULL})
    await settle()
    assert made.admitted == ["a"]
    admission.observe({"an engine": full})
    await made.begin("b")
    assert made.admitted == ["a"]
    clock.now += 10.1
    admission.serve()
    await settle()
    assert made.admitted == ["a", "b"]


async def test_sessions_take_turns_and_the_calls_of_each_are_in_order(clock):
    made = Calls(Admission(1, 10, clock=clock))
    for name in ("a1", "a2", "a3", "a4", "b1", "c1", "c2"):
        await made.begin(name)
    await made.cancel("a2")
    for number in range(6):
        await made.end(made.admitted[number])
    assert made.admitted == ["a1", "a3", "b1", "c1", "a4", "c2"]


async def test_a_session_waits_for_itself_beyond_its_share(clock):
    admission = Admission(8, 10, 2, clock)
    made = Calls(admission)
    await made.begin("a1", 16)
    for name in ("a2", "b1", "b2", "b3"):
        await made.begin(name)
    assert made.admitted == ["a1"]
    await made.end("a1")
    assert made.admitted == ["a1", "a2", "b1", "b2"]
    await made.begin("a3")
    await made.begin("a4")
    assert made.admitted == ["a1", "a2", "b1", "b2", "a3"]
    await made.end("b1")
    assert made.admitted[-1] == "b3"


async def test_a_step_of_4096_sessions_loses_no_call_and_the_longest_wait_is_what_the_capacity_implies(clock):
    """Each session makes five calls of 8 s, one at a time; its tools take 5 s. All times are virtual."""
    rng, admission = random.Random(1), Admission(1024, 512, clock=clock)
    events, waits, number = [], [], itertools.count()

    async def sleep(seconds: float) -> None:
        until = asyncio.get_running_loop().create_future()
        heapq.heappush(events, (clock.now + seconds, next(number), until))
        await until

    async def session(name: int) -> None:
        await sleep(rng.uniform(0, 5))
        for _ in range(5):
            arrived = clock.now
            async with admission.place(name):
                waits.append(clock.now - arrived)
                await sleep(rng.expovariate(1 / 8))
            await sleep(rng.expovariate(1 / 5))

    sessions = [asyncio.create_task(session(i)) for i in range(4096)]
    await settle()
    while events:
        clock.now, _, until = heapq.heappop(events)
        until.set_result(None)
        await settle()
    await asyncio.gather(*sessions)
    assert len(waits) == 5 * 4096
    assert max(waits) < 60  # 4,096 calls of 8 s, 1,024 at a time, take 32 s


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
    caplog.set_level("INFO", "rollout_backend.model.gateway.engine.engines")
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


def test_a_call_waits_in_the_gateway_while_the_engines_queue_is_full(serve, in_thread):
    body = {"model": "scripted", "messages": [user("Hello")]}
    with LoadedEngine(["Yes?"]) as engine:
        gateway = serve(engine.url, gateway={"max_queued_per_engine": 4}, load_poll_s=0.02)
        engine.waiting = 50
        engine.wait_for_looks()
        call = in_thread(gateway.post, body)
        until(lambda: gateway.stats().calls_waiting == 1)
        assert engine.requests == []
        engine.waiting = 0
        assert call.result(120).status_code == 200
        stats = gateway.stats()
        assert stats.errors == {}
        assert stats.engine_waiting == {engine.url: 0}
        assert stats.engine_running.keys() == {engine.url}
        assert gateway.trajectory().unanswered_calls == 0


def test_a_call_that_finds_no_place_in_time_says_which_limits_there_are(serve):
    body = {"model": "scripted", "messages": [user("Hello")]}
    with LoadedEngine(["Yes?"]) as engine:
        gateway = serve(engine.url, gateway={"max_queued_per_engine": 4}, load_poll_s=0.02, model_call_s=0.1)
        engine.waiting = 50
        engine.wait_for_looks()
        refused = gateway.post(body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_capacity")
        assert "gateway.max_queued_per_engine" in refused.text
        assert int(refused.headers["retry-after"]) >= 1
        assert engine.requests == []
        assert gateway.trajectory().unanswered_calls == 1
