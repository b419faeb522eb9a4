"""Rollouts through the whole backend while the servers of verl's CPU replica sleep, as during training.

A sleeping server has released its memory, and a request that generates on it crashes it, as on a GPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import pytest_asyncio

from agent_wrapper.contract import Outcome, Rollout
from builders import eventually
from rollout_backend.config import load_config
from rollout_backend.core.tasks import Task
from rollout_backend.manager import RolloutManager
from rollout_backend.model.gateway.engine.client import EngineClient
from rollout_backend.model.gateway.engine.engines import Engines
from rollout_backend.model.gateway.engine.protocol import EngineRequest
from rollout_backend.model.rendering.token_bytes import StopStrings
from rollout_backend.workbench.local.cloud import LocalCloud
from rollout_backend.workbench.local.session_pool import EmulatorLimits
from rollout_backend.workbench.local.tiny_model import make_tiny_model
from verl_cpu.replica_server import SGLangServer
from verl_cpu.replica_settings import ServerSettings, model_of

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

HERE = Path(__file__).parent
GROUP = 3
TIMEOUTS = {"model_call_s": 5, "agent_s": 60, "publish_grace_s": 20, "collection_s": 600, "session_key_s": 900}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(work: Path) -> AsyncIterator[SGLangServer]:
    model = model_of(
        SimpleNamespace(max_model_len=256, enable_rollout_routing_replay=False),
        SimpleNamespace(path=make_tiny_model(work / "model")),
    )
    server = SGLangServer("server", model, ServerSettings(threads=1).serving("float32"), work / "server.log")
    await server.launch()
    yield server
    await server.close()


def url_of(server: SGLangServer) -> str:
    return f"http://{server.address()}"


async def version_of_a_token(server: SGLangServer) -> str:
    body = {"input_ids": [1, 40, 41], "sampling_params": {"max_new_tokens": 1}}
    async with httpx.AsyncClient(timeout=60) as http:
        reply = await http.post(f"{url_of(server)}/generate", json=body)
        return str(reply.json()["meta_info"]["weight_version"])


@pytest.mark.slow
async def test_verl_may_release_memory_right_after_stop_strings(server: SGLangServer) -> None:
    """verl's asynchronous modes pause and release; the pause waits for requests whose stream is open alone."""
    routing = Engines(url_of(server))
    routing.urls = (url_of(server),)
    client = EngineClient(routing, 60)
    stops = StopStrings(["x"], dict.fromkeys(range(1000), b"x"))
    await client.start()
    try:
        for _ in range(4):
            params = {"max_new_tokens": 200, "ignore_eos": True}
            calls = [client.generate(EngineRequest([1, 40, 41], params, str(n), stops=stops)) for n in range(8)]
            assert {call.finish_reason for call in await asyncio.gather(*calls)} == {"stop"}
            await server.abort_all_requests()
            await server.release_kv_cache()  # ends the server if a request runs
            await server.resume_kv_cache()
            await server.resume_generation()
    finally:
        await client.close()


# --- asleep -----------------------------------------------------------------------------------------------


class Backend:
    """A manager that uses that server. Its agents wait for `go` before their second model call."""

    def __init__(self, manager: RolloutManager, server: SGLangServer, seen: Path) -> None:
        self.manager = manager
        self.server = server
        self.seen = seen

    async def sleep(self) -> None:
        """Put the server to sleep, as verl's trainer does between two batches."""
        await self.manager.pause_engines()
        await self.server.sleep()

    async def wake(self, model: Path, version: int) -> None:
        await self.server.wake_up(["weights"])
        await self.server.update_weights(model, version)
        await self.server.wake_up(["kv_cache"])
        await self.manager.resume_engines()

    async def at_work(self, name: str) -> None:
        await eventually(lambda: sum(file.read_text() == name for file in self.seen.iterdir()) == GROUP)

    async def answered_503(self) -> int:
        progress = await self.manager.progress()
        assert progress.gateway is not None
        return progress.gateway.errors.get("engine_unavailable", 0)

    def go(self, yes: bool = True) -> None:
        file = self.seen / "go"
        file.touch() if yes else file.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def environ() -> Iterator[Callable[[dict[str, str]], None]]:
    with pytest.MonkeyPatch.context() as patch:
        yield lambda more: [patch.setenv(name, value) for name, value in more.items()] and None


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(server: SGLangServer, work: Path, environ: Any) -> AsyncIterator[Backend]:
    seen = work / "seen"
    seen.mkdir()
    agent = HERE / "trainer_agent.py"
    async with LocalCloud(
        agent, run_dir=work / "cloud", env={"SEEN": str(seen)}, limits=EmulatorLimits(grace_s=2.0)
    ) as cloud:
        environ(cloud.environ)
        config = load_config(
            base={
                **cloud.settings(),
                "model": {"path": str(work / "model"), "context_length": 256},
                "sampling": {"max_tokens": 8},
                "serving": {"kind": "external", "urls": [url_of(server)]},
                "group": {"size": GROUP},
                "timeouts": TIMEOUTS,
                "output_dir": str(work / "runs"),
            }
        )
        async with RolloutManager(config) as manager:
            yield Backend(manager, server, seen)


def task(name: str) -> Task:
    return Task(name, {"name": name, "rewards": [0.0, 0.5, 1.0], "do": dict.fromkeys("012", "wait for go")})


def versions(rollout: Rollout) -> list[set[str]]:
    turns = [turn for segment in rollout.segments for turn in segment.turns]
    return [{span.version for span in turn.weight_versions} for turn in turns]


@pytest.mark.slow
async def test_calls_to_a_sleeping_server_are_held_then_answered_503_and_lose_no_rollout(server, backend, work):
    """Training takes longer than a model call may: calls are held, answered 503, retried, and answered when awake."""
    await server.update_weights(work / "model", 6)
    backend.go(False)
    collecting = asyncio.create_task(backend.manager.collect([task("held")]))
    await backend.at_work("held")
    await backend.sleep()
    before = await backend.answered_503()
    backend.go()

    async def all_answered() -> bool:  # each after model_call_s, with Retry-After, so the SDK retries
        return await backend.answered_503() >= before + GROUP

    await eventually(all_answered)
    await backend.wake(work / "model", 7)
    result = await collecting
    assert result.report.outcomes[Outcome.COMPLETED] == GROUP
    assert len(result.groups[0].rollouts) == GROUP
    for rollout in result.rollouts:
        assert versions(rollout) == [{"6"}, {"7"}]
    report = result.report
    assert set(report.weight_versions) == {"6", "7"}
    assert report.staleness is not None
    assert report.staleness.max == 1
    assert 0 < report.staleness.mean < 1
    assert report.balanced


@pytest.mark.slow
async def test_verl_may_release_the_memory_as_soon_as_the_engines_are_paused(server, backend, work):
    """SGLang stays busy briefly after its last response, and runs a call for seconds after its client disconnects."""
    async with httpx.AsyncClient(timeout=60) as http:
        sampling = {"max_new_tokens": 250, "ignore_eos": True}
        body = {"input_ids": [1, 40, 41], "sampling_params": sampling}
        calls = [asyncio.create_task(http.post(f"{url_of(server)}/generate", json=body)) for _ in range(4)]
        while not await running(http, server):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        calls.pop().cancel()  # its client has left
        await backend.sleep()
        endings = {call.json()["meta_info"]["finish_reason"]["type"] for call in await asyncio.gather(*calls)}
    assert endings == {"abort"}
    await backend.wake(work / "model", 9)
    assert await version_of_a_token(server) == "9"


async def running(http: httpx.AsyncClient, server: SGLangServer) -> int:
    page = (await http.get(f"{url_of(server)}/v1/loads?include=core")).json()
    return sum(load["num_running_reqs"] for load in page["loads"])
