"""The contract of `AgentRuntime`, for agents as processes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollout_backend.config import ProcessConfig
from rollout_backend.testing.runtime_contract import Call, Fault, RuntimeContract, Service

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


class ProcessService(Service):
    """Processes that run until they are stopped, each with a child that has left the process group."""

    def __init__(self, folder: Path) -> None:
        self.marker = f"CONTRACT_TEST={folder}"
        self.config = ProcessConfig(
            command=["sh", "-c", "setsid sleep 600 & exec sleep 600"],
            working_dir=folder,
            session_logs=folder / "sessions",
            max_sessions=4,
            environment=dict([self.marker.split("=", 1)]),
        )

        def other(**settings: object) -> ProcessConfig:
            return ProcessConfig.model_validate({**self.config.model_dump(), **settings})

        self.broken = {
            r"runtime\.working_dir: there is no folder": other(working_dir=folder / "missing"),
            r"runtime\.command: there is no program 'no-such-program'": other(command="no-such-program"),
            r"runtime\.python: there is no program": other(command=(), app="a:b", python="/no/python"),
            r"runtime\.app: nothing:app cannot be imported .*No module named 'nothing'": other(
                command=(), app="nothing:app"
            ),
            r"runtime\.session_logs: .* cannot be written": other(session_logs="/dev/null/sessions"),
        }

    async def sessions(self) -> Collection[str]:
        return {name for pid in _processes(self.marker) if (name := _session_of(pid))}

    async def crash(self, session_id: str) -> None:
        for pid in _processes(self.marker):
            if _session_of(pid) == session_id:
                os.kill(pid, signal.SIGKILL)

    @asynccontextmanager
    async def failing(self, fault: Fault, call: Call) -> AsyncIterator[None]:
        """Let a file take the place of the folder of the sessions."""
        assert fault is Fault.UNAVAILABLE
        folder = self.config.session_logs
        assert folder is not None
        folder.mkdir(exist_ok=True)
        aside = folder.rename(folder.with_name("aside"))
        folder.touch()
        try:
            yield
        finally:
            folder.unlink()
            aside.rename(folder)


def _processes(marker: str) -> Iterator[int]:
    """Yield the processes that have this variable in their environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marker.encode() in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def _session_of(pid: int) -> str:
    """Return the session of a process by its log; nothing if it ended meanwhile."""
    try:
        return Path(os.readlink(f"/proc/{pid}/fd/1")).stem
    except OSError:
        return ""


class TestProcessRuntime(RuntimeContract):
    faults = (Fault.UNAVAILABLE,)
    capacity = 4
    reports_ends = True

    @asynccontextmanager
    async def serve(self, folder: Path) -> AsyncIterator[Service]:
        service = ProcessService(folder)
        try:
            yield service
        finally:
            for pid in _processes(service.marker):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
