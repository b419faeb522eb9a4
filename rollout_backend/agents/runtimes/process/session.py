"""Start and follow one session: a supervisor that runs the agent's command on one payload."""

import asyncio
import contextlib
import errno
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agent_wrapper.contract import PAYLOAD_VARIABLE
from agent_wrapper.shared.processes import describe_exit, home_variables
from rollout_backend.agents.runtimes.process import supervisor
from rollout_backend.agents.runtimes.process.control import pipe_of
from rollout_backend.agents.runtimes.process.supervisor import Order, ProcessEnd
from rollout_backend.base.child_process import describe_sigkill, last_lines, oom_kills
from rollout_backend.base.disk import call_disk
from rollout_backend.base.logs import report_failure
from rollout_backend.config import ProcessConfig
from rollout_backend.core.reasons import AGENT_ENDED
from rollout_backend.errors import InvokeRejected, OutcomeUnknown, RuntimeCallError, RuntimeUnavailable

_FULL = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC)
_OUT_OF_MEMORY = re.compile(r"out of memory|cannot allocate memory|MemoryError|bad_alloc", re.IGNORECASE)
# Prefix of the backend's settings, which may be secrets.
_OWN_SETTINGS = "ROLLOUT__"
_TAIL_LINES, _TAIL_S = 20, 5.0
# The time limit for starting the supervisor, which takes 0.1 s.
_START_S = 60.0
_LINE_CHARS = 2000


class ProcessSession:
    """A session. Its `task` runs until the session ends; `started` holds the RuntimeCallError of a failed start."""

    def __init__(
        self,
        config: ProcessConfig,
        folder: Path,
        session_id: str,
        argv: Sequence[str],
        payload: bytes = b"",
        lifetime_s: float | None = None,
        ends_with_starter: bool = False,
    ) -> None:
        self.log = log_of(folder, session_id)
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.end: ProcessEnd | None = None
        """How the session ended. None if it has not ended, or if its supervisor was killed."""
        self._config = config
        self._pipe = pipe_of(folder, session_id)
        self._argv = [*argv]
        self._payload = payload
        self._lifetime_s = lifetime_s or config.max_lifetime_s
        self._ends_with_starter = ends_with_starter
        self._oom_kills = oom_kills()
        # The end of the log, once the session has ended.
        self._tail: list[str] = []
        self.task = asyncio.create_task(self._run())
        self.task.add_done_callback(report_failure(f"session {session_id}"))

    async def _run(self) -> None:
        scratch = ""
        try:
            await call_disk(self._make_pipe)
            # The payload holds a key, so it stays out of the run directory.
            scratch = tempfile.mkdtemp(prefix="rollout-")
            async with _supervised(self._order(Path(scratch))) as reports:
                _check_started(json.loads(await reports.readline() or "null"))
                self.started.set_result(None)
                self.end = json.loads(await reports.readline() or "null")
            with contextlib.suppress(TimeoutError):
                self._tail = await call_disk(lambda: last_lines(self.log, _TAIL_LINES), _TAIL_S)
        except RuntimeCallError as error:
            await self._fail(error)
        except OSError as error:
            await self._fail(RuntimeUnavailable(f"no process can be started here: {error}", never_opened=True))
        # The supervisor removes it, unless it was killed.
        shutil.rmtree(scratch, ignore_errors=True)

    def _make_pipe(self) -> None:
        # The folder is private, because agents may print their keys.
        self.log.parent.mkdir(0o700, parents=True, exist_ok=True)
        os.mkfifo(self._pipe, 0o600)

    async def _fail(self, error: RuntimeCallError) -> None:
        # The next invoke of this session makes the pipe again.
        with contextlib.suppress(OSError):
            await call_disk(self._pipe.unlink, _TAIL_S)
        if not self.started.done():
            self.started.set_exception(error)
            # Mark the exception as retrieved, even if the invoke was cancelled.
            self.started.exception()

    def _order(self, scratch: Path) -> Order:
        config, file = self._config, scratch / "payload.json"
        file.write_bytes(self._payload)
        return Order(
            argv=self._argv,
            env={**environment(config), **self._home(scratch), PAYLOAD_VARIABLE: str(file)},
            cwd=str(config.working_dir),
            log=str(self.log),
            pipe=str(self._pipe),
            scratch=str(scratch),
            memory_bytes=config.memory_bytes,
            nice=config.nice,
            grace_s=config.grace_s,
            lifetime_s=self._lifetime_s,
            ends_with_starter=self._ends_with_starter,
        )

    def _home(self, scratch: Path) -> dict[str, str]:
        """Return the variables for the session's private folders, except those that the settings set."""
        if self._config.keep_home:
            return {"TMPDIR": str(scratch)}
        own, real = home_variables(scratch), os.environ.get("HOME")
        if real is not None:
            # Agents need the credentials to write results.
            Path(own["HOME"], ".aws").symlink_to(Path(real, ".aws"))
            own["PYTHONUSERBASE"] = os.environ.get("PYTHONUSERBASE") or str(Path(real, ".local"))
        return {name: value for name, value in own.items() if name not in self._config.environment}

    def reason(self) -> str:
        """Return the ledger's reason for a session that ended without a result."""
        if self.end is not None and self.end["why"] == "memory":
            return "out_of_memory"
        if self.end is not None and self.end["why"] == "ended" and self.end["code"] == 0:
            # The wrapper exits with 0 only after it has published a result.
            return AGENT_ENDED
        failed = self.end is None or self.end["code"] != 0
        full = failed and any(map(_OUT_OF_MEMORY.search, self._tail))
        return "out_of_memory" if full else "container_lost"

    def describe_end(self) -> str:
        """Describe how the session ended, with the last line of its log."""
        last = (self._tail or ["its log is empty"])[-1].strip()[-_LINE_CHARS:]
        end = self.end
        if end is None:
            how = "its supervisor was killed"
        elif end["why"] == "lifetime":
            how = f"it ran for {self._lifetime_s:g} s, its maximum"
        elif end["why"] == "memory":
            how = f"its processes used more than {self._config.memory_bytes} bytes (runtime.memory_bytes)"
        elif end["code"] == -signal.SIGKILL:
            how = f"it was {describe_sigkill(self._oom_kills, oom_kills())}"
        else:
            how = f"it {describe_exit(end['code'])}"
        return f"{how}: {last}"


def log_of(folder: Path, session_id: str) -> Path:
    """Return the path of a session's log."""
    return folder / f"{session_id}.log"


def environment(config: ProcessConfig) -> Mapping[str, str]:
    """Return the environment for the agents."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OWN_SETTINGS)}
    return {**inherited, "PYTHONUNBUFFERED": "1", **config.environment}


@asynccontextmanager
async def _supervised(order: Order) -> AsyncIterator[asyncio.StreamReader]:
    """Start a supervisor, and yield the stream of its reports. The supervisor outlives this context."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    ours, its = os.pipe()
    try:
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours, "rb", buffering=0)
        )
    except BaseException:
        os.close(its)
        raise
    try:
        try:
            starter = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", supervisor.__file__),
                stdin=asyncio.subprocess.PIPE,
                stdout=its,
                start_new_session=True,
            )
        finally:
            os.close(its)
        try:
            async with asyncio.timeout(_START_S):
                await starter.communicate(json.dumps(order).encode())
        except TimeoutError as error:
            raise OutcomeUnknown(f"the session's supervisor did not start within {_START_S:g} s") from error
        yield reader
    finally:
        transport.close()


def _check_started(answer: dict[str, Any] | None) -> None:
    """Raise RuntimeCallError if the supervisor could not start the agent."""
    if answer is None:
        raise OutcomeUnknown("the session's supervisor ended before it answered")
    if "error" not in answer:
        return
    text = f"the agent cannot be started: {answer['error']}"
    if answer["errno"] in _FULL:
        raise RuntimeUnavailable(text, never_opened=True)
    raise InvokeRejected(text, reason="container_error")
