"""The sessions of one agent: a fresh process each, awaited, pinged, and ended.

What must always hold:

- One session id has one process at a time, and a process serves one session id in its whole life.
- A session that was stopped, died or ran out of time is gone at once; its id stays valid, and the next invoke of it
  starts a fresh process. So does AWS.
- A process that has left the pool is sent SIGTERM, and after `grace_s` SIGKILL, with all that it started.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from pydantic import BaseModel, ConfigDict, Field

from rollout_backend.errors import StartupError
from rollout_backend.local.spawner import Spawner
from rollout_backend.process import SERVER_PORTS, ServerProcess

SESSION_HEADER = "X-Amzn-Bedrock-AgentCore-Runtime-Session-Id"
_PORTS = range(SERVER_PORTS.stop, 32_000)  # below the ports that the system hands to outgoing connections
COUNTERS = ("started", "failed", "stopped", "died", "idle", "expired", "throttled", "refused", "peak")
_REQUEST_S = 900.0  # a synchronous request may take 15 minutes
_PING_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


class Limits(BaseModel):
    """What AgentCore bounds, and how strictly. The defaults are AWS's where a laptop can bear them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_sessions: int = Field(default=256, ge=1)
    invoke_per_s: float = Field(default=200.0, gt=0)
    stop_per_s: float = Field(default=200.0, gt=0)
    new_sessions_per_s: float | None = Field(default=None, gt=0)
    """None: as fast as the machine starts them. AWS: 400 per minute."""
    startup_timeout_s: float = Field(default=120.0, gt=0)
    idle_timeout_s: float = Field(default=900.0, gt=0)
    max_life_s: float = Field(default=28_800.0, gt=0)
    grace_s: float = Field(default=5.0, gt=0)
    """From SIGTERM to SIGKILL."""
    ping_every_s: float = Field(default=2.0, gt=0)
    parallel_starts: int = Field(default=4, ge=1)
    """Processes being started at once; more only slow each other down."""


class ServiceError(Exception):
    """An error of the data plane, as the caller gets it: AWS's name for it and a message."""

    STATUS = {  # noqa: RUF012
        "ValidationException": 400,
        "ServiceQuotaExceededException": 402,
        "MissingAuthenticationTokenException": 403,
        "ResourceNotFoundException": 404,
        "ConflictException": 409,
        "RuntimeClientError": 424,
        "ThrottlingException": 429,
    }

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.status = self.STATUS[code]


class TokenBucket:
    """Admits `per_s` calls a second, with a burst of one second's worth."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._size = max(1.0, per_s)
        self._tokens = self._size
        self._at = time.monotonic()

    def take(self) -> bool:
        now = time.monotonic()
        self._tokens = min(self._size, self._tokens + (now - self._at) * self._per_s)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


@dataclass(eq=False)
class Session:
    """One session. Times are unix seconds, as a container's own `time_of_last_update` is."""

    id: str
    log: Path
    ready: asyncio.Future[None]
    since: float = field(default_factory=time.time)
    status: str = "starting"  # then what its last ping said: Healthy, HealthyBusy, or unresponsive
    updated: float = 0.0  # time_of_last_update of its last ping
    last_request: float = field(default_factory=time.time)
    requests: int = 0  # being answered now
    port: int = 0
    process: ServerProcess | None = None
    life: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def idle_s(self) -> float:
        """Seconds since it last did anything, by its own account; 0 while it is at work."""
        if self.requests or (self.status == "HealthyBusy" and self.updated):
            return 0.0
        return time.time() - max(self.last_request, self.updated)

    def tail(self) -> str:
        return self.process.tail() if self.process else ""


class SessionPool:
    def __init__(self, spawner: Spawner, limits: Limits, log_dir: Path) -> None:
        self.counters: Counter[str] = Counter()
        self._spawners = [spawner]  # the last one starts new sessions
        self._limits = limits
        self._log_dir = log_dir
        self._open: dict[str, Session] = {}
        self._lives: set[asyncio.Task[None]] = set()
        self._starts = asyncio.Semaphore(limits.parallel_starts)
        self._new = TokenBucket(limits.new_sessions_per_s) if limits.new_sessions_per_s else None
        self._ports = _free_ports()
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=_REQUEST_S), trust_env=False
        )

    async def open(self, session_id: str) -> Session:
        """The session of this id, started if there is none.

        Raises:
            ServiceError: 402 above `max_sessions`, 429 above `new_sessions_per_s`, 424 if it does not come up.
        """
        session = self._open.get(session_id)
        if session is None:
            session = self._begin(session_id)
        await asyncio.shield(session.ready)
        return session

    async def request(self, session: Session, body: bytes, headers: dict[str, str]) -> aiohttp.ClientResponse:
        """Sends an invocation to the session's process. The caller reads the answer and then calls `release`.

        Raises:
            ServiceError: 424 if it answers with an error, or not at all.
        """
        session.requests += 1
        try:
            response = await self._http.post(f"{session.url}/invocations", data=body, headers=headers)
            if response.status >= 400:
                text = (await response.text(errors="replace"))[:2000]
                raise ServiceError(
                    "RuntimeClientError",
                    f"Received error ({response.status}) from runtime: {text}. See {session.log}",
                )
        except (aiohttp.ClientError, TimeoutError) as error:
            self.release(session)
            raise ServiceError(
                "RuntimeClientError", f"The runtime did not answer ({type(error).__name__} {error}). {session.tail()}"
            ) from None
        except BaseException:
            self.release(session)
            raise
        return response

    def release(self, session: Session) -> None:
        session.requests -= 1
        session.last_request = time.time()

    def stop(self, session_id: str) -> None:
        """Takes the session out and lets its process be ended.

        Raises:
            ServiceError: 404 if there is no such session.
        """
        session = self._open.pop(session_id, None)
        if session is None:
            raise ServiceError("ResourceNotFoundException", f"Session {session_id} is not running")
        assert session.life is not None
        session.life.cancel()

    async def close(self) -> None:
        """Ends every process. Returns once all are gone."""
        for session_id in list(self._open):
            self.stop(session_id)
        while self._lives:
            await asyncio.wait(self._lives)
        await self._http.close()
        for spawner in self._spawners:
            await spawner.close()

    def use(self, spawner: Spawner, limits: Limits) -> None:
        """Starts new sessions by another spawner from now on. Those that run go on."""
        self._spawners.append(spawner)
        self._limits = limits

    def snapshot(self) -> dict[str, Any]:
        """Plain values: the open sessions, how many processes are being ended, and what happened so far."""
        return {
            "sessions": [
                {
                    "id": session.id,
                    "pid": session.process.pid if session.process else None,
                    "status": session.status,
                    "since": session.since,
                }
                for session in self._open.values()
            ],
            "ending": len(self._lives) - len(self._open),
            "counters": {name: self.counters[name] for name in COUNTERS},
        }

    def _begin(self, session_id: str) -> Session:
        if len(self._open) >= self._limits.max_sessions:
            self.counters["refused"] += 1
            raise ServiceError(
                "ServiceQuotaExceededException", f"{len(self._open)} sessions are active, as many as are allowed"
            )
        if self._new is not None and not self._new.take():
            self.counters["throttled"] += 1
            raise ServiceError("ThrottlingException", "Too many new sessions: rate exceeded")
        # An id may hold characters that a file name cannot.
        log = self._log_dir / f"{re.sub(r'[^A-Za-z0-9._-]', '_', session_id)}.log"
        session = Session(session_id, log, asyncio.get_running_loop().create_future())
        self._open[session_id] = session
        self.counters["peak"] = max(self.counters["peak"], len(self._open))
        session.life = asyncio.create_task(self._live(session))
        self._lives.add(session.life)
        session.life.add_done_callback(lambda life: self._gone(session, life))
        return session

    async def _live(self, session: Session) -> None:
        """The whole life of a session. Being cancelled is being stopped."""
        end = "stopped"
        try:
            async with self._starts:
                await self._start(session)
            self.counters["started"] += 1
            session.ready.set_result(None)
            end = await self._watch(session)
        except StartupError as error:
            end = "failed"
            session.ready.set_exception(ServiceError("RuntimeClientError", str(error)))
        finally:
            self.counters[end] += 1
            self._leave(session)
            if session.process is not None:
                await session.process.stop(self._limits.grace_s)

    async def _start(self, session: Session) -> None:
        session.port = next(self._ports)
        env = {"PORT": str(session.port), "HOST": "127.0.0.1"}
        session.process = await self._spawners[-1].spawn(f"session {session.id}", env, session.log)
        deadline = time.monotonic() + self._limits.startup_timeout_s
        while not await self._ping(session):
            if not session.process.running:
                code = session.process.returncode
                raise StartupError(f"The runtime ended with code {code} before it answered /ping. {session.tail()}")
            if time.monotonic() > deadline:
                raise StartupError(
                    f"Runtime initialization time exceeded: no answer to /ping on {session.url} (env PORT) within "
                    f"{self._limits.startup_timeout_s:g} s. {session.tail()}"
                )
            await asyncio.sleep(0.03)

    async def _watch(self, session: Session) -> str:
        """Waits for what ends a session, and says what it was."""
        assert session.process is not None
        ended = asyncio.ensure_future(session.process.wait())
        try:
            while True:
                done, _ = await asyncio.wait({ended}, timeout=self._limits.ping_every_s)
                if done:
                    return "died"
                if not await self._ping(session):
                    session.status = "unresponsive"
                if session.idle_s() > self._limits.idle_timeout_s:
                    return "idle"
                if time.time() - session.since > self._limits.max_life_s:
                    return "expired"
        finally:
            ended.cancel()

    async def _ping(self, session: Session) -> bool:
        try:
            async with self._http.get(f"{session.url}/ping", timeout=_PING_TIMEOUT) as response:
                answer = await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return False
        if response.status != 200 or not isinstance(answer, dict):
            return False
        session.status = str(answer.get("status", "Healthy"))
        # AWS ends even a busy session at the idle timeout if its ping leaves this out.
        updated = answer.get("time_of_last_update")
        session.updated = float(updated) if isinstance(updated, (int, float)) else 0.0
        return True

    def _leave(self, session: Session) -> None:
        if self._open.get(session.id) is session:  # not a fresh one of the same id
            del self._open[session.id]
        if not session.ready.done():
            session.ready.set_exception(
                ServiceError("RuntimeClientError", f"Session {session.id} was stopped while it was starting")
            )

    def _gone(self, session: Session, life: asyncio.Task[None]) -> None:
        self._lives.discard(life)
        self._leave(session)  # of a life that was cancelled before its first line
        session.ready.exception()  # whoever waited has it; asyncio need not complain that nobody did


def _free_ports() -> Iterator[int]:
    start = random.randrange(len(_PORTS))  # noqa: S311  # another stand-in may run beside this one
    for i in itertools.count(start):
        port = _PORTS[i % len(_PORTS)]
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        yield port
