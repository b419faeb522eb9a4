"""Run agents as processes on this machine, one per session, which runs one payload and exits.

Invariants:

- A session outlives this process, like a container does. The run's next trainer or its janitor stops it.
- A session that ends without a stop is reported immediately, whether or not it published a result.
"""

import asyncio
import json
import os
import shlex
import shutil
import threading
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from agent_wrapper.shared.threads import in_thread
from rollout_backend.agents.runtimes.base import AgentRuntime, CleanupSpec
from rollout_backend.agents.runtimes.process.control import (
    KILL_S,
    SESSION_ID,
    is_open,
    open_sessions,
    pipe_of,
    send_stop,
    session_stopper,
)
from rollout_backend.agents.runtimes.process.session import ProcessSession, environment, log_of
from rollout_backend.base.disk import call_disk
from rollout_backend.config import ProcessConfig
from rollout_backend.core.session_ends import SessionEnd
from rollout_backend.errors import InvokeRejected, OutcomeUnknown, PreflightError, QuotaExceeded, StartupError

# Number of ended sessions to remember. A repeated invoke follows within minutes.
_KEPT_ENDS = 10_000
_IMPORT_S = 120.0
# The interval of polling sessions that an earlier trainer started.
_POLL_S = 1.0


class CommandRuntime(AgentRuntime):
    """A runtime that runs a command for each session of one run. `folder` is that of the sessions' logs."""

    def __init__(self, config: ProcessConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        # Starts of running sessions, and the last `_KEPT_ENDS` finished ones, in order.
        self._starts: dict[str, asyncio.Future[None]] = {}
        self._finished: dict[str, None] = {}
        self._ends: asyncio.Queue[SessionEnd] = asyncio.Queue()

    @abstractmethod
    def _start(self, session_id: str, payload: bytes) -> asyncio.Future[None]:
        """Start a session, which calls `_finish` at its end. The future holds the RuntimeCallError of a failed
        start."""

    def _finish(self, session_id: str, end: SessionEnd | None) -> None:
        """Note that a session that had started has ended. Report `end`; None if the session was stopped."""
        del self._starts[session_id]
        self._finished[session_id] = None
        if len(self._finished) > _KEPT_ENDS:
            del self._finished[next(iter(self._finished))]
        if end is not None:
            self._ends.put_nowait(end)

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        if not SESSION_ID.fullmatch(session_id):
            raise InvokeRejected(f"the session id {session_id!r} is no file name")
        if session_id in self._finished:
            return _status("finished")
        if session_id in self._starts:
            await asyncio.shield(self._starts[session_id])
            return _status("running")
        if len(self._starts) >= self._config.max_sessions:
            raise QuotaExceeded(f"{len(self._starts)} sessions run, as many as runtime.max_sessions allows")
        start = self._starts[session_id] = self._start(session_id, payload)
        # After a cancellation, the start continues until the session is stopped.
        await asyncio.shield(start)
        return _status("accepted")

    def limits(self) -> ProcessConfig:
        return self._config

    def describe(self) -> dict[str, str]:
        return {"command": shlex.join(self._config.argv), "working_dir": str(self._config.working_dir)}

    def log_location(self, session_id: str | None) -> str:
        return str(self._folder if session_id is None else log_of(self._folder, session_id))


class ProcessRuntime(CommandRuntime):
    """The processes of one run."""

    def __init__(self, config: ProcessConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self._sessions: dict[str, ProcessSession] = {}
        self._earlier = {*open_sessions(folder)}
        self._stop_other = session_stopper(self.cleanup_spec().options)

    @classmethod
    async def open(cls, config: ProcessConfig, on_status: Callable[[str], object] = lambda text: None) -> Self:
        folder = (config.session_logs or Path("sessions")).absolute()
        try:
            return await call_disk(lambda: cls(config, folder))
        except TimeoutError as error:
            raise StartupError(f"runtime.session_logs: {folder} cannot be read: {error.strerror}") from None

    # --- before the first session -------------------------------------------------------------------------

    async def check(self, session_s: float = 0.0) -> None:
        config = self._config
        if not config.working_dir.is_dir():
            raise PreflightError(f"runtime.working_dir: there is no folder {config.working_dir}: correct it")
        there = next(each for each in (self._folder, *self._folder.parents) if each.exists())
        if not (there.is_dir() and os.access(there, os.W_OK)):
            raise PreflightError(f"runtime.session_logs: {self._folder} cannot be written: set another folder")
        self._check_memory()
        program, setting = config.argv[0], "python" if config.app else "command"
        if shutil.which(program, path=environment(config).get("PATH")) is None:
            raise PreflightError(
                f"runtime.{setting}: there is no program {program!r} that can be run: correct it, or install it"
            )
        if config.app is not None:
            await self._check_import(config.app)

    def _check_memory(self) -> None:
        limit = self._config.memory_bytes
        if limit is None:
            return
        if not Path(f"/proc/self/task/{threading.get_native_id()}/children").exists():
            raise PreflightError("runtime.memory_bytes: this system does not list a process's children: leave it out")
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if limit > memory:
            raise PreflightError(f"runtime.memory_bytes: {limit} is more than this machine has, {memory}: lower it")

    async def _check_import(self, app: str) -> None:
        """Import the app as a session does, with the same environment and limits."""
        module, _, name = app.partition(":")
        argv = [self._config.argv[0], "-c", f"from {module} import {name} as app; app.run"]
        with TemporaryDirectory() as folder:
            session = ProcessSession(self._config, Path(folder), "import", argv, lifetime_s=_IMPORT_S)
            await session.task
            how = session.describe_end()
        if (error := session.started.exception()) is not None:
            raise PreflightError(f"runtime.app: {app} cannot be imported: {error}")
        if session.end is None or session.end["code"] != 0:
            raise PreflightError(f"runtime.app: {app} cannot be imported in {self._config.working_dir}: {how}")

    def cleanup_spec(self) -> CleanupSpec:
        return CleanupSpec(
            "rollout_backend.agents.runtimes.process.control.session_stopper",
            {"folder": str(self._folder), "grace_s": self._config.grace_s},
        )

    # --- sessions -----------------------------------------------------------------------------------------

    def _start(self, session_id: str, payload: bytes) -> asyncio.Future[None]:
        session = ProcessSession(self._config, self._folder, session_id, self._config.argv, payload)
        self._sessions[session_id] = session
        session.task.add_done_callback(lambda _: self._on_end(session_id, session))
        return session.started

    def _on_end(self, session_id: str, session: ProcessSession) -> None:
        del self._sessions[session_id]
        if session.task.cancelled() or session.started.exception() is not None:
            del self._starts[session_id]
        elif session.end is not None and session.end["why"] == "stopped":
            self._finish(session_id, None)
        else:
            message = f"session {session_id} ended without a result: {session.describe_end()}. Log: {session.log}"
            self._finish(session_id, SessionEnd(session_id, session.reason(), message))

    async def stop(self, session_id: str) -> None:
        session = self._sessions.get(session_id)
        try:
            async with asyncio.timeout(self._config.grace_s + KILL_S):
                if session is None:
                    # The session is unknown, or an earlier trainer started it.
                    await in_thread(lambda: self._stop_other(session_id), "stop")
                    return
                await asyncio.wait({session.started})
                await in_thread(lambda: send_stop(pipe_of(self._folder, session_id)), "stop")
                await asyncio.wait({session.task})
        except OSError as error:
            raise OutcomeUnknown(f"session {session_id} has not ended: {error or 'it takes too long'}") from None

    async def watch_sessions(self, run_id: str, on_end: Callable[[SessionEnd], None]) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_earlier(on_end))
            while True:
                on_end(await self._ends.get())

    async def _watch_earlier(self, on_end: Callable[[SessionEnd], None]) -> None:
        """Report the ends of sessions that an earlier trainer started."""
        while self._earlier:
            lasting = await in_thread(
                lambda: {each for each in self._earlier if is_open(pipe_of(self._folder, each))}, "sessions"
            )
            for session_id in self._earlier - lasting:
                log = log_of(self._folder, session_id)
                message = f"session {session_id}, of an earlier trainer, ended without a result. Log: {log}"
                on_end(SessionEnd(session_id, "container_lost", message))
            self._earlier = lasting
            await asyncio.sleep(_POLL_S)

    async def aclose(self) -> None:
        """Leave sessions running; each step has stopped its own."""
        tasks = [session.task for session in self._sessions.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _status(status: str) -> bytes:
    return json.dumps({"status": status}).encode()
