"""Manage the sessions of one agent: start a fresh process for each, ping it, and end it.

Invariants:

- A session id has at most one process at a time, and a process serves one session id.
- A session that was stopped, died or timed out is closed immediately. As on AWS, its id stays valid: the next invoke
  with this id starts a fresh process.
- A process that has left the pool gets SIGTERM and, after `grace_s`, SIGKILL, with all its children.
"""

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from pydantic import BaseModel, Field

from agent_wrapper.app import LOCAL_PORT
from rollout_backend.base.names import derived_name
from rollout_backend.core.reasons import NOT_SERVING_TEXT
from rollout_backend.errors import StartupError
from rollout_backend.model.serving.server_process import SERVER_PORTS, ServerProcess, free_port
from rollout_backend.run.dispatch.rate_limiter import TokenBucket
from rollout_backend.workbench.local.spawner import Spawner

# These ports are below the ephemeral range.
_PORTS = range(SERVER_PORTS.stop, 32_000)
COUNTERS = ("started", "failed", "stopped", "died", "idle", "expired", "throttled", "refused", "killed", "peak")
# A synchronous request may take 15 minutes.
_REQUEST_S = 900.0
_PING_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


class EmulatorLimits(BaseModel, frozen=True, extra="forbid"):
    """Quotas and timeouts of the emulator. The defaults are AWS's, or what a laptop can run."""

    max_sessions: int = Field(default=256, ge=1)
    invoke_per_s: float = Field(default=200.0, gt=0)
    stop_per_s: float = Field(default=200.0, gt=0)
    calls_per_s: float | None = Field(default=None, gt=0)
    """Rate of invokes and stops together, as older accounts count them. None: separate rates."""
    new_sessions_per_s: float | None = Field(default=None, gt=0)
    """None: as fast as the machine can start them. AWS: 25."""
    startup_timeout_s: float = Field(default=120.0, gt=0)
    idle_timeout_s: float = Field(default=900.0, gt=0)
    max_life_s: float = Field(default=28_800.0, gt=0)
    grace_s: float = Field(default=5.0, gt=0)
    """Seconds from SIGTERM to SIGKILL."""
    ping_every_s: float = Field(default=2.0, gt=0)
    parallel_starts: int = Field(default=4, ge=1)
    """Number of processes that start concurrently; more would slow each other down."""
    start_wait_s: float = Field(default=20.0, gt=0)
    """Maximum seconds for which a session waits to start. After them it is refused (429), before its caller's
    timeout."""


class ServiceError(Exception):
    """An error of the data plane, with AWS's error code and a message."""

    STATUS = {  # noqa: RUF012
        "ValidationException": 400,
        "ServiceQuotaExceededException": 402,
        "MissingAuthenticationTokenException": 403,
        "AccessDeniedException": 403,
        "ResourceNotFoundException": 404,
        "ConflictException": 409,
        "RetryableConflictException": 409,
        "RuntimeClientError": 424,
        "ThrottlingException": 429,
        "InternalServerException": 500,
        "ServiceUnavailableException": 503,
    }

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.status = self.STATUS[code]


@dataclass(eq=False)
class RuntimeSession:
    """One session. Times are unix seconds, like a container's `time_of_last_update`."""

    id: str
    log: Path
    ready: asyncio.Future[None]
    since: float
    last_request: float
    status: str = "starting"
    """`starting`, then the status of the last ping: Healthy, HealthyBusy, or unresponsive."""
    updated: float = 0.0
    """`time_of_last_update` in the last ping."""
    requests: int = 0
    """Number of requests in flight."""
    port: int = 0
    process: ServerProcess | None = None
    task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def idle_s(self, now: float) -> float:
        """Return the seconds since the last activity that the session reported; 0 while it is busy."""
        if self.requests or (self.status == "HealthyBusy" and self.updated):
            return 0.0
        return now - max(self.last_request, self.updated)

    def log_tail(self) -> str:
        return self.process.log_tail() if self.process else ""


class SessionPool:
    def __init__(
        self,
        spawner: Spawner,
        limits: EmulatorLimits,
        log_dir: Path,
        clock: Callable[[], float],
        on_end: Callable[[RuntimeSession, str], object],
    ) -> None:
        """`clock` returns unix seconds, and applies to idle times, lifetimes and start timeouts. `on_end` is called
        with each session that was up and ended without a stop, and with the reason, as in `COUNTERS`."""
        self.counters: Counter[str] = Counter()
        # The last spawner starts new sessions.
        self._spawners = [spawner]
        self._limits = limits
        self._log_dir = log_dir
        self._clock = clock
        self._on_end = on_end
        self._open: dict[str, RuntimeSession] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._starts = asyncio.Semaphore(limits.parallel_starts)
        self._new = TokenBucket(limits.new_sessions_per_s) if limits.new_sessions_per_s else None
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=_REQUEST_S),
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def open(self, session_id: str) -> RuntimeSession:
        """Return the session with this id. Start it if it does not exist.

        Raises:
            ServiceError: 402 above `max_sessions`, 429 above `new_sessions_per_s`, 424 if the session does not start.
        """
        session = self._open.get(session_id)
        if session is None:
            session = self._begin(session_id)
        await asyncio.shield(session.ready)
        return session

    async def request(self, session: RuntimeSession, body: bytes, headers: dict[str, str]) -> aiohttp.ClientResponse:
        """Send an invocation to the session's process. The caller reads the answer and then calls `release`.

        Raises:
            ServiceError: 424 if the process answers with an error or not at all.
        """
        session.requests += 1
        try:
            response = await self._http.post(
                f"{session.url}/invocations", data=body, headers=headers, allow_redirects=False
            )
            if response.status >= 400:
                text = (await response.text(errors="replace"))[:2000]
                raise ServiceError(
                    "RuntimeClientError",
                    f"Received error ({response.status}) from runtime: {text}. See {session.log}",
                )
        except (aiohttp.ClientError, TimeoutError) as error:
            self.release(session)
            raise ServiceError(
                "RuntimeClientError",
                f"The runtime did not answer ({type(error).__name__} {error}). {session.log_tail()}",
            ) from None
        except BaseException:
            self.release(session)
            raise
        return response

    def release(self, session: RuntimeSession) -> None:
        session.requests -= 1
        session.last_request = self._clock()

    def stop(self, session_id: str) -> None:
        """Close the session. Its process ends in the background.

        Raises:
            ServiceError: 404 if the session does not exist.
        """
        session = self._open.pop(session_id, None)
        if session is None:
            raise ServiceError("ResourceNotFoundException", f"Session {session_id} is not running")
        assert session.task is not None
        session.task.cancel()

    async def close(self) -> None:
        """End every process. Return once all have ended."""
        for session_id in list(self._open):
            self.stop(session_id)
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._http.close()
        for spawner in self._spawners:
            await spawner.close()

    def use(self, spawner: Spawner, limits: EmulatorLimits) -> None:
        """Start new sessions with another spawner. Running sessions are not affected."""
        self._spawners.append(spawner)
        self._limits = limits

    def snapshot(self) -> dict[str, Any]:
        """Return the open sessions, the number of processes that are ending, and the counters, as plain values."""
        return {
            "sessions": [
                {
                    "id": session.id,
                    "pid": session.process.pid if session.process else None,
                    "url": session.url,
                    "status": session.status,
                    "since": session.since,
                    "requests": session.requests,
                }
                for session in self._open.values()
            ],
            "ending": len(self._tasks) - len(self._open),
            "counters": {name: self.counters[name] for name in COUNTERS},
        }

    def _begin(self, session_id: str) -> RuntimeSession:
        if len(self._open) >= self._limits.max_sessions:
            self.counters["refused"] += 1
            raise ServiceError(
                "ServiceQuotaExceededException", f"{len(self._open)} sessions are active, as many as are allowed"
            )
        if self._new is not None and not self._new.try_take(time.monotonic()):
            self.counters["throttled"] += 1
            raise ServiceError("ThrottlingException", "Too many new sessions: rate exceeded")
        # An id may contain characters that a file name cannot.
        log = self._log_dir / f"{derived_name(session_id, 'A-Za-z0-9._-', 200)}.log"
        now = self._clock()
        session = RuntimeSession(session_id, log, asyncio.get_running_loop().create_future(), now, now)
        self._open[session_id] = session
        self.counters["peak"] = max(self.counters["peak"], len(self._open))
        session.task = asyncio.create_task(self._run(session))
        self._tasks.add(session.task)
        session.task.add_done_callback(lambda task: self._gone(session, task))
        return session

    async def _run(self, session: RuntimeSession) -> None:
        """Run a session from start to end. A cancellation stops it."""
        end = "stopped"
        try:
            async with asyncio.timeout(self._limits.start_wait_s):
                await self._starts.acquire()
            try:
                await self._start(session)
            finally:
                self._starts.release()
            self.counters["started"] += 1
            session.ready.set_result(None)
            end = await self._watch(session)
            self._on_end(session, end)
        except StartupError as error:
            end = "failed"
            session.ready.set_exception(ServiceError("RuntimeClientError", str(error)))
        except TimeoutError:
            end = "throttled"
            text = f"Too many sessions are starting: this one waited for {self._limits.start_wait_s:g} s"
            session.ready.set_exception(ServiceError("ThrottlingException", text))
        finally:
            self.counters[end] += 1
            self._leave(session)
            if session.process is not None:
                await session.process.stop(self._limits.grace_s)
                self.counters["killed"] += end != "died" and session.process.returncode == -signal.SIGKILL

    async def _start(self, session: RuntimeSession) -> None:
        session.port = free_port(among=_PORTS)
        env = {"PORT": str(session.port), LOCAL_PORT: str(session.port), "HOST": "127.0.0.1"}
        session.process = await self._spawners[-1].spawn(f"session {session.id}", env, session.log)
        deadline = self._clock() + self._limits.startup_timeout_s
        while not await self._ping(session):
            if not session.process.running:
                code = session.process.returncode
                how = f"{NOT_SERVING_TEXT} It" if code == 0 else "The runtime"
                raise StartupError(f"{how} ended with code {code} before it answered /ping. {session.log_tail()}")
            if self._clock() > deadline:
                raise StartupError(
                    f"Runtime initialization time exceeded: no answer to /ping on {session.url} (env PORT) within "
                    f"{self._limits.startup_timeout_s:g} s. {session.log_tail()}"
                )
            await asyncio.sleep(0.03)

    async def _watch(self, session: RuntimeSession) -> str:
        """Wait until the session has to end, and return the reason."""
        assert session.process is not None
        ended = asyncio.ensure_future(session.process.wait())
        try:
            while True:
                done, _ = await asyncio.wait({ended}, timeout=self._limits.ping_every_s)
                if done:
                    return "died"
                if not await self._ping(session):
                    session.status = "unresponsive"
                if session.idle_s(self._clock()) > self._limits.idle_timeout_s:
                    return "idle"
                if self._clock() - session.since > self._limits.max_life_s:
                    return "expired"
        finally:
            ended.cancel()

    async def _ping(self, session: RuntimeSession) -> bool:
        try:
            async with self._http.get(
                f"{session.url}/ping", timeout=_PING_TIMEOUT, allow_redirects=False
            ) as response:
                answer = await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return False
        if response.status != 200 or not isinstance(answer, dict):
            return False
        session.status = str(answer.get("status", "Healthy"))
        # AWS ends even a busy session at the idle timeout if its ping omits this field.
        updated = answer.get("time_of_last_update")
        session.updated = float(updated) if isinstance(updated, (int, float)) else 0.0
        return True

    def _leave(self, session: RuntimeSession) -> None:
        # A newer session may have the same id.
        if self._open.get(session.id) is session:
            del self._open[session.id]
        if not session.ready.done():
            session.ready.set_exception(
                ServiceError("RuntimeClientError", f"Session {session.id} was stopped while it was starting")
            )

    def _gone(self, session: RuntimeSession, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        # The task may have been cancelled before it started.
        self._leave(session)
        # Mark the exception as retrieved; otherwise asyncio logs it.
        session.ready.exception()
