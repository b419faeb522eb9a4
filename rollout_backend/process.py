"""One server process of ours: started, awaited until healthy, watched, and ended with all its children.

It runs in a session of its own, so a Ctrl-C in the terminal reaches us and we end it in order; if we die without a
word the kernel tells it to end, and its `group_guard` makes it (on Linux). Its output goes to a log file, which every
error message names.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import resource
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from rollout_backend import group_guard
from rollout_backend.errors import StartupError

_TAIL_LINES = 15
_FILES = 65_536
SERVER_PORTS = range(15_000, 26_000)  # below it programs have ports of their own by custom; above are sessions'


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on at this moment.

    One of those that the kernel gives to nobody by itself, where there are such: the others may be an outgoing
    connection's before the server that this one is for listens, which for an engine is a minute later.
    """
    ours = SERVER_PORTS[: max(0, _lowest_given_by_the_kernel() - SERVER_PORTS.start)]
    asked = random.SystemRandom().sample(ours, 32) if len(ours) >= 1000 else []
    for port in (*asked, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    raise StartupError(f"no port is free on {host}")


def _lowest_given_by_the_kernel() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:  # not Linux
        return 0


def require_port(host: str, port: int, what: str, setting: str) -> int:
    """`port`, or a free one for 0.

    Raises:
        StartupError: somebody else listens there; `what` and `setting` tell the user what to change.
    """
    if port == 0:
        return free_port(host)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StartupError(
                f"{what} cannot listen on {host}:{port} ({error.strerror}): set {setting} to another port, or to 0"
            ) from None
    return port


class ServerProcess:
    """A child process that serves. Not restartable: make a new one."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
    ) -> None:
        self.name = name
        self.argv = list(argv)
        self.log = log
        self._env = dict(env) if env is not None else None
        self._stdin = stdin
        self._process: asyncio.subprocess.Process | None = None

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
        """Raises StartupError if the program cannot be started at all."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self.argv,
                    stdin=asyncio.subprocess.PIPE if self._stdin is not None else asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._env,
                    start_new_session=True,
                    preexec_fn=_prepare_child,
                )
            except OSError as error:
                raise StartupError(f"{self.name}: cannot start {self.argv[0]}: {error.strerror}") from None
        await self._guard(self._process.pid)
        if self._stdin is not None and self._process.stdin is not None:
            with contextlib.suppress(ConnectionError):  # it died at once; wait_healthy tells how
                self._process.stdin.write(self._stdin)
                await self._process.stdin.drain()
            self._process.stdin.close()

    async def wait_healthy(self, healthy: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
        """Asks `healthy` until it says yes.

        Raises:
            StartupError: the process ended, or `timeout_s` passed; the message carries the end of its log.
        """
        deadline = time.monotonic() + timeout_s
        while not await healthy():
            if not self.running:
                raise StartupError(f"{self.name} ended with code {self.returncode} before it was up. {self.tail()}")
            if time.monotonic() > deadline:
                raise StartupError(f"{self.name} was not healthy after {timeout_s:g} s. {self.tail()}")
            await asyncio.sleep(0.1)

    async def wait(self) -> int:
        """Returns its exit code once it has ended."""
        assert self._process is not None, "not started"
        return await self._process.wait()

    async def stop(self, grace_s: float = 5.0) -> None:
        """SIGTERM to it and to its children, SIGKILL after `grace_s`. Does nothing if it never ran."""
        if self._process is None:
            return
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            pass
        finally:
            self._signal(signal.SIGKILL)  # children that outlived it, and itself if we are being cancelled
            await asyncio.shield(self._process.wait())

    def tail(self) -> str:
        """The end of its log, with the log's path, for an error message."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        except OSError:
            lines = []
        return f"Its log, {self.log}, ends:\n" + "\n".join(f"    {line}" for line in lines or ["(empty)"])

    async def _guard(self, pid: int) -> None:
        """Takes 20 ms. What the guard starts with is no more than an interpreter may need: it knows no secret."""
        guard = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", group_guard.__file__, str(pid), str(os.getpid())),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
            start_new_session=True,
        )
        await guard.wait()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _prepare_child() -> None:
    """Runs in the child before its program: it ends when we do, and may hold thousands of connections."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a shell's own may be 1024
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
