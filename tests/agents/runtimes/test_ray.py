"""A Ray cluster whose head hangs or fails. What a healthy one does: `test_process_contract.py`."""

import asyncio
import threading

import pytest
import ray

from builders import background, eventually
from rollout_backend.agents.runtimes.ray import RayRuntime
from rollout_backend.config import RayConfig
from rollout_backend.core.session_ends import SessionEnd
from rollout_backend.errors import OutcomeUnknown


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    config = RayConfig(command=["true"], working_dir=tmp_path, start_timeout_s=0.2)
    return RayRuntime(config, tmp_path)


@pytest.fixture
def hangs():
    """A call of the head, which hangs, and then knows no session."""
    free = threading.Event()

    def call(*_, **__):
        free.wait(300)
        raise ValueError("there is no such actor")

    yield call
    free.set()


async def test_calls_that_hang_leave_the_threads_that_resolve_names_to_others(runtime, hangs, monkeypatch):
    monkeypatch.setattr(ray, "get_actor", hangs)
    stops = [asyncio.create_task(runtime.stop(f"session-{i}")) for i in range(64)]
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        assert await asyncio.get_running_loop().getaddrinfo("localhost", 80)
    for stop in stops:
        stop.cancel()
    await asyncio.gather(*stops, return_exceptions=True)


async def test_a_start_without_an_answer_may_have_started_the_session(runtime, hangs, monkeypatch):
    class Actor:
        def options(self, **_):
            return self

        remote = staticmethod(hangs)

    monkeypatch.setattr(ray, "remote", lambda _: Actor())
    with pytest.raises(OutcomeUnknown, match="the head of the Ray cluster did not answer"):
        await runtime.invoke("session", b"{}")


async def test_the_run_survives_a_head_that_fails_while_earlier_sessions_are_looked_up(runtime, monkeypatch):
    asked, ends = [], []

    def list_named_actors(_):
        asked.append(1)
        raise ray.exceptions.RaySystemError("timed out")

    monkeypatch.setattr(ray.util, "list_named_actors", list_named_actors)
    async with background(runtime.watch_sessions("run", ends.append)):
        await eventually(lambda: len(asked) == 2)
        runtime._ends.put_nowait(end := SessionEnd("session", "container_lost", "it is lost"))
        await eventually(lambda: ends == [end])
