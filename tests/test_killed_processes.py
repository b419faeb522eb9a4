"""A killed process that does not end, as while a driver holds it, blocks no restart and no end of a run."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_wrapper.command import run_to_end
from agent_wrapper.shared import processes
from rollout_backend.base.child_process import run_child
from rollout_backend.config import ScoringConfig
from rollout_backend.model.serving.server_process import ServerProcess
from rollout_backend.run.scoring.worker_pool import WorkerPool
from rollout_backend.workbench.deploy import image
from rollout_backend.workbench.local.spawner import PreforkSpawner

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
async def _held(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Let nobody see a process end."""
    waited: set[asyncio.subprocess.Process] = set()
    end = asyncio.subprocess.Process.wait

    async def wait(self: asyncio.subprocess.Process) -> int:
        waited.add(self)
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(processes, "KILLED_S", 0.1)
    at_sigterm = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(image, "_END_S", 0.1)
    monkeypatch.setattr(asyncio.subprocess.Process, "wait", wait)
    yield
    signal.signal(signal.SIGTERM, at_sigterm)
    await asyncio.gather(*map(end, waited))


async def stop_a_server(folder: Path) -> None:
    server = ServerProcess("engine", SLEEP, folder / "engine.log")
    server._guard = lambda pid: asyncio.sleep(0)  # type: ignore[assignment, method-assign]
    await server.start()
    await server.stop(0.1)


async def end_a_scorer(folder: Path) -> None:
    pool = WorkerPool(ScoringConfig(function="json:loads"), folder / "scorer.log")
    worker = pool._add_worker()
    await asyncio.wait([worker._starting])
    await pool.close()


async def end_a_child(folder: Path) -> None:
    with pytest.raises(TimeoutError):
        await run_child(SLEEP, 0.1)


async def end_a_command(folder: Path) -> None:
    running = asyncio.create_task(run_to_end(SLEEP, env={}, cwd=folder))
    await asyncio.wait([running], timeout=0.5)
    running.cancel()
    await asyncio.wait([running])


async def end_a_build(folder: Path) -> None:
    # An ignored signal is ignored in children too.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    running = asyncio.create_task(image._run(SLEEP, 60.0))
    await asyncio.wait([running], timeout=0.5)
    running.cancel()
    await asyncio.wait([running])


async def end_a_spawner(folder: Path) -> None:
    spawner = PreforkSpawner(sys.executable, folder / "agent.py", [], {}, folder / "spawner.log")
    await asyncio.wait([spawner.warm()], timeout=0.5)
    await spawner.close()


ENDS = [stop_a_server, end_a_scorer, end_a_child, end_a_command, end_a_build, end_a_spawner]


@pytest.mark.usefixtures("_held")
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
async def test_a_process_that_outlives_sigkill_is_logged_and_left(caplog, tmp_path, end):
    async with asyncio.timeout(60):
        await end(tmp_path)
    assert "has not ended 0.1 s after SIGKILL" in caplog.text
