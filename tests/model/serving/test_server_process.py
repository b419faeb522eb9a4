"""`ServerProcess`, against real processes, and ports that are still free when a server starts."""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_backend.base import disk
from rollout_backend.base.child_process import describe_sigkill, oom_kills
from rollout_backend.errors import StartupError
from rollout_backend.model.serving import server_process
from rollout_backend.model.serving.server_process import SERVER_PORTS, ServerKilled, ServerProcess, free_port


async def test_stop_cancelled_as_the_process_ends_stays_cancelled(tmp_path, monkeypatch):
    """If the cancellation were swallowed, a fleet would wait forever for its supervisor."""
    process = ServerProcess("server", [sys.executable, "-c", "input()"], tmp_path / "log", stdin=b"")
    await process.start()
    waiting, ended = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def wait():
        waiting.set()
        return await ended

    real, process._process.wait = process._process.wait, wait
    stopping = asyncio.create_task(process.stop())
    await waiting.wait()
    ended.set_result(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await real()


async def test_a_start_that_is_cancelled_leaves_no_process(tmp_path, monkeypatch):
    guarding = asyncio.Event()

    async def guard(self, pid):
        guarding.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(ServerProcess, "_guard", guard)
    process = ServerProcess("server", [sys.executable, "-c", "input()"], tmp_path / "log", stdin=b"")
    starting = asyncio.create_task(process.start())
    await guarding.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not process.running


async def test_a_log_on_a_disk_that_never_answers_costs_the_output_alone(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(disk, "DISK_S", 0.05)
    # Nobody opens the other end of the pipe.
    os.mkfifo(log := tmp_path / "log")
    process = ServerProcess("server", [sys.executable, "-c", "input()"], log, stdin=b"")
    await process.start()
    assert "its disk does not answer: the output is lost" in caplog.text
    assert await process.wait() == 1


async def test_a_stopped_process_gets_no_signal_later(tmp_path, monkeypatch):
    process = ServerProcess("server", ["true"], tmp_path / "log")
    await process.start()
    await process.stop()
    monkeypatch.setattr(os, "killpg", None)
    await process.stop()


# --- ports ------------------------------------------------------------------------------------------------


def test_free_port_is_outside_the_ephemeral_range():
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert low > SERVER_PORTS.start + 1000, "this machine's kernel leaves us none"
    assert not [port for port in (free_port() for _ in range(100)) if low <= port <= high]


def test_taken_port_is_skipped(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        monkeypatch.setattr(server_process.random.SystemRandom, "choices", lambda self, among, k: [number] * k)
        assert free_port() != number


@pytest.mark.skipif(sys.platform != "linux", reason="ports are reserved on Linux only")
def test_port_of_another_process_is_not_returned_before_it_is_in_use():
    """An engine listens a minute after it was started. A gateway on its port would answer its health check."""
    few = range(free_port(), SERVER_PORTS.stop)[:1]
    draw = f"print(free_port(among={few})); [free_port() for _ in range(300)]"
    program = f"from rollout_backend.model.serving.server_process import free_port; {draw}"
    argv = [sys.executable, "-W", "always::ResourceWarning", "-c", program]
    drawn = subprocess.run(argv, check=True, capture_output=True, text=True)
    assert int(drawn.stdout) not in few
    assert drawn.stderr == "", "reserved ports cause warnings at exit"


# --- how it ended -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("raise SystemExit('RuntimeError: Not enough memory.')", "ended with code 1 before it was up. It ran out of"),
        ("raise SystemExit('torch.OutOfMemoryError: CUDA out of memory')", "It ran out of memory. Lower the setting"),
        ("import os; os.kill(os.getpid(), 9)", "It was killed by SIGKILL, "),
        ("raise SystemExit('no such file')", "ended with code 1 before it was up. Its log"),
        ("import signal; signal.pause()", "was not healthy after 0 s (a.startup_timeout_s). Its log"),
    ],
    ids=["SGLang", "torch", "the kernel", "another cause", "no answer"],
)
async def test_the_cause_of_a_failed_start_is_named(tmp_path, program, words):
    process = ServerProcess(
        "server", [sys.executable, "-S", "-c", program], tmp_path / "log", memory_advice="Lower the setting"
    )
    await process.start()

    async def never() -> bool:
        return False

    with pytest.raises(StartupError) as ended:
        await process.wait_healthy(never, 0 if "healthy" in words else 60, "a.startup_timeout_s")
    await process.stop()
    assert words in str(ended.value)
    assert isinstance(ended.value, ServerKilled) == ("SIGKILL" in words)  # then another start may succeed


def test_a_kill_is_blamed_on_the_lack_of_memory_only_if_the_kernel_has_counted_one(tmp_path):
    counters = tmp_path / "vmstat"
    counters.write_text("nr_free_pages 5\noom_kill 3\n")
    assert oom_kills(counters) == 3
    assert oom_kills(tmp_path / "none") == 0
    assert "since its start the kernel has killed a process for lack of memory" in describe_sigkill(2, 3)
    assert describe_sigkill(3, 3) == "killed by SIGKILL, perhaps for lack of memory"
