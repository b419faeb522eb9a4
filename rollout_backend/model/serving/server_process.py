"""Run a server as a child process: start it, wait until it is healthy, watch it, and stop it with its children.

The child runs in a separate session, so Ctrl-C in the terminal reaches only this process, which then stops the child.
If this process is killed, the kernel sends the child SIGTERM, and its `process_group_guard` sends SIGKILL (on Linux).
The child's output goes to a log file. Every error message names that file.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import random
import re
import resource
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from agent_wrapper.shared.processes import wait_killed
from rollout_backend.base.addresses import bound_port, host_port
from rollout_backend.base.child_process import describe_sigkill, last_lines, oom_kills, open_log
from rollout_backend.base.disk import call_disk
from rollout_backend.errors import StartupError
from rollout_backend.model.serving import process_group_guard

log = logging.getLogger(__name__)

_GUARD_S = 30.0
_TAIL_LINES = 15
_TAIL_S = 5.0
_SEARCHED_LINES = 100
_OUT_OF_MEMORY = re.compile(r"out of memory|not enough memory|cannot allocate memory|MemoryError", re.IGNORECASE)
_OPEN_FILES = 65_536
# Lower ports are often a program's default, and higher ones are for sessions.
SERVER_PORTS = range(15_000, 26_000)

# A reservation is an abstract Unix socket named after the port: it belongs to the same network as the port, and ends
# with this process. The oldest are dropped, because each holds a descriptor and its server listens by then. These are
# descriptors, because sockets would warn at exit that they are open.
_reserved: deque[int] = deque(maxlen=256)


class ServerKilled(StartupError):
    """A server process got SIGKILL before it was up, for example because memory was low. A retry may succeed."""


def free_port(host: str = "127.0.0.1", among: range = SERVER_PORTS) -> int:
    """Return a port on which no process listens and that no process of this package has reserved.

    A server may need a minute until it listens. Until then, another server on its port would answer its health check.
    If `among` is outside the ephemeral range, the kernel cannot assign the port to an outgoing connection in the
    meantime.
    """
    fixed = among[: max(0, _first_ephemeral_port() - among.start)]
    drawn = random.SystemRandom().choices(fixed, k=1000 if fixed else 0)
    for port in (*drawn, *[0] * 100):
        with contextlib.suppress(OSError):
            number = bound_port(host, port, reuse=False)
            if _reserve(number):
                return number
    raise StartupError(f"no port is free on {host}")


def _reserve(port: int) -> bool:
    if sys.platform != "linux":
        return True
    reservation = socket.socket(socket.AF_UNIX)
    try:
        reservation.bind(f"\0rollout-backend-port-{port}")
    except OSError:
        reservation.close()
        return False
    if len(_reserved) == _reserved.maxlen:
        os.close(_reserved.popleft())
    _reserved.append(reservation.detach())
    return True


def _first_ephemeral_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        # The file exists only on Linux.
        return 0


def require_port(host: str, port: int, what: str, setting: str) -> int:
    """Return `port`, or a free port if it is 0.

    Raises:
        StartupError: the port is taken. The message names the server, `what`, and the setting to change.
    """
    if port == 0:
        return free_port(host)
    try:
        return bound_port(host, port, reuse=True)
    except OSError as error:
        where = host_port(host, port)
        raise StartupError(
            f"{what} cannot listen on {where} ({error.strerror}): set {setting} to another port, or to 0"
        ) from None


class ServerProcess:
    """A server as a child process. It cannot be restarted: create a new one."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        *,
        memory_advice: str = "Give this machine more memory",
    ) -> None:
        """`memory_advice` tells users what to do if the server runs out of memory."""
        self.name = name
        self.argv = list(argv)
        self.log = log
        self._env = dict(env) if env is not None else None
        self._stdin = stdin
        self._memory_advice = memory_advice
        self._process: asyncio.subprocess.Process | None = None
        self._oom_kills = oom_kills()
        self._stopped = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def returncode(self) -> int | None:
        return self._process.returncode if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the program. Raises StartupError if it cannot be executed."""
        with await open_log(self.log) as output:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self.argv,
                    stdin=asyncio.subprocess.PIPE if self._stdin is not None else asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=self._env,
                    start_new_session=True,
                    preexec_fn=_prepare_child,
                )
            except OSError as error:
                raise StartupError(f"{self.name}: cannot start {self.argv[0]}: {error.strerror}") from None
        try:
            await self._guard(self._process.pid)
            if self._stdin is not None and self._process.stdin is not None:
                # If the program has ended already, `wait_healthy` reports how.
                with contextlib.suppress(ConnectionError):
                    self._process.stdin.write(self._stdin)
                    await self._process.stdin.drain()
                self._process.stdin.close()
        except BaseException:
            # A cancelled caller does not know that the program runs.
            await self.stop(0.0)
            raise

    async def wait_healthy(self, healthy: Callable[[], Awaitable[bool]], timeout_s: float, setting: str = "") -> None:
        """Call `healthy` until it returns true. `setting` is the name of the timeout.

        Raises:
            StartupError: the process ended, or `timeout_s` passed; the message includes the end of its log.
            ServerKilled: the process got SIGKILL.
        """
        deadline = time.monotonic() + timeout_s
        while not await healthy():
            if not self.running:
                end = await self.describe_log(with_cause=True)
                ended = ServerKilled if self.returncode == -signal.SIGKILL else StartupError
                raise ended(f"{self.name} ended with code {self.returncode} before it was up. {end}")
            if time.monotonic() > deadline:
                limit = f"{timeout_s:g} s ({setting})" if setting else f"{timeout_s:g} s"
                raise StartupError(f"{self.name} was not healthy after {limit}. {await self.describe_log()}")
            await asyncio.sleep(0.1)

    async def wait(self) -> int:
        """Return the exit code once the process has ended."""
        assert self._process is not None, "not started"
        return await self._process.wait()

    async def wait_ended(self) -> str:
        """Wait until the process has ended. Return how it ended, with the end of its log."""
        return f"ended with code {await self.wait()}. {await self.describe_log(with_cause=True)}"

    async def stop(self, grace_s: float = 5.0) -> None:
        """Send SIGTERM to the process and its children, and SIGKILL after `grace_s`. Does nothing if it never ran.

        A process that outlives SIGKILL, for example because a driver holds it, is logged and left running.
        """
        # After a stop, another process group may have its number.
        if self._process is None or self._stopped:
            return
        self._signal(signal.SIGTERM)
        try:
            # `wait_for` of Python 3.11 can swallow a cancellation.
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            # Kill children that outlived the process, and the process itself after a cancellation.
            self._signal(signal.SIGKILL)
            await asyncio.shield(wait_killed(self._process, self.name))
            self._stopped = True

    async def describe_log(self, with_cause: bool = False) -> str:
        """Return the end of the log like `log_tail`, but without blocking. With `with_cause`, a known cause of the
        process's end comes first."""
        try:
            return await call_disk(lambda: (self._cause() if with_cause else "") + self.log_tail(), _TAIL_S)
        except TimeoutError:
            return f"Its log, {self.log}, cannot be read: the disk does not answer"

    def log_tail(self) -> str:
        """Return the end of the log, with its path, for an error message. Blocks."""
        lines = last_lines(self.log, _TAIL_LINES)
        if not lines:
            return f"Its log, {self.log}, is empty"
        return f"Its log, {self.log}, ends:\n" + "\n".join(f"    {line}" for line in lines)

    def _cause(self) -> str:
        """Return a sentence on the cause if the process ran out of memory, otherwise an empty string."""
        if any(_OUT_OF_MEMORY.search(line) for line in last_lines(self.log, _SEARCHED_LINES)):
            return f"It ran out of memory. {self._memory_advice}. "
        if self.returncode == -signal.SIGKILL:
            return f"It was {describe_sigkill(self._oom_kills, oom_kills())}. {self._memory_advice}. "
        return ""

    async def _guard(self, pid: int) -> None:
        """Start the guard, which takes 20 ms. Its environment holds no secret."""
        guard = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", process_group_guard.__file__, str(pid), str(os.getpid())),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(_GUARD_S):
                await guard.wait()
        except TimeoutError:
            log.warning("%s: its guard is slow to start, and may not end it if this process is killed", self.name)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _prepare_child() -> None:
    """Prepare the child: it must end with this process, and may hold thousands of connections."""
    if sys.platform == "linux":
        # 1 is PR_SET_PDEATHSIG.
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    # A shell's limit may be 1024.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
