"""The agent runtime: starts a session with its first invoke, and a new one if a stopped session's id is used again.

It throttles, has quotas and conflicts, fails, and loses responses after a call has had its effect.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

from agent_wrapper.contract import REQUEST_FIELD, RolloutRequest
from rollout_backend.errors import (
    InvokeRejected,
    OutcomeUnknown,
    QuotaExceeded,
    RuntimeConflict,
    RuntimeUnavailable,
    Throttled,
)
from tests.simulation.agent_sources import AgentSources, is_poll, request_in
from tests.simulation.agents import Agents
from tests.simulation.capacity import Limits
from tests.simulation.environment import Environment
from tests.simulation.session import Session
from tests.simulation.session_audit import SessionAudit
from tests.simulation.trainer import Trainer

_PATIENCE = 10


class Runtime:
    """The open sessions, and what the runtime grants."""

    def __init__(
        self,
        env: Environment,
        limits: Limits,
        agents: Agents,
        audit: SessionAudit,
        sources: AgentSources,
        sessions: dict[str, Session],
    ) -> None:
        self.env = env
        self.limits = limits
        self.audit = audit
        self.sources = sources
        self.sessions = sessions
        self._agents = agents
        self._requests: dict[str, RolloutRequest] = {}  # by session
        self._poisoned: dict[str, bool] = {}  # by task
        self._repairs = 0

    def open(self, request: RolloutRequest) -> None:
        """Start a session and its agent, unless it runs."""
        if request.session_id in self.sessions:
            return
        self._requests[request.session_id] = request
        self.audit.starts(request)
        self.env.note(f"session starts: {request.rollout_id} attempt {request.attempt}")
        self._start(request, self._agents.run(request))

    def poll(self, session_id: str) -> bytes:
        """Ask a container for its agent's result. A session that has ended gets a new container, without an agent."""
        if session_id not in self.sessions:
            self.sources.replace_container(session_id)
            if session_id in self.audit.stopped:
                self.env.evidence.used_twice.append(session_id)
            self._start(self._requests[session_id], _idle())
        return self.sources.poll(session_id)

    def _start(self, request: RolloutRequest, container: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(container)
        session = Session(request.session_id, task, request)
        self.sessions[request.session_id] = session
        task.add_done_callback(lambda _: self._gone(session))

    def _gone(self, session: Session) -> None:
        if self.sessions.get(session.id) is session and session.stopping:
            del self.sessions[session.id]

    def accept(self, session_id: str) -> None:
        """The trainer receives the response to an invoke."""
        session = self.sessions[session_id]
        session.accepted = True
        own = self.env.own_random(f"{session_id} accepts")
        if session.heard_by is not None and own.random() < self.env.faults.dies_at_invoke:
            self._agents.die(session.request)
            session.task.cancel()

    def stop(self, session_id: str) -> None:
        """End a session. Its agent may not notice."""
        self.audit.stops(session_id)
        session = self.sessions.pop(session_id, None)
        if session is not None:
            session.stopping = True
            if not self.env.chance("stop_unheard"):
                session.task.cancel()

    def is_poisoned(self, task: str) -> bool:
        """Return whether no container starts for this task."""
        if task not in self._poisoned:
            self._poisoned[task] = self.env.chance("poison")
        return self._poisoned[task]

    def repair(self) -> None:
        """Let every task's container start from now on, as if a user had fixed the cause of the circuit breaker. Once
        the breaker has opened `_PATIENCE` times, the user has also found a runtime that is always available."""
        self._poisoned = dict.fromkeys(self._poisoned, False)
        self._repairs += 1

    def fails(self, fault: str) -> bool:
        return self.env.chance(fault) and self._repairs < _PATIENCE


async def _idle() -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError


class SimRuntime:
    """Replaces an `AgentRuntime`, for one trainer."""

    def __init__(self, runtime: Runtime, trainer: Trainer, max_sessions: int = 256) -> None:
        self._runtime = runtime
        self._env = runtime.env
        self._trainer = trainer
        self._max_sessions = max_sessions

    def hold(self, payload: Mapping[str, Any]) -> AbstractContextManager[object]:
        return nullcontext()

    async def wait_ready(self, payload: Mapping[str, Any], run_id: str) -> None: ...

    def log_location(self, session_id: str | None) -> str:
        return ""

    def adopt(self, session_id: str, payload: Callable[[], bytes]) -> None: ...

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        self._runtime.audit.asked_for.add(session_id)
        await self._env.passes(0.5)
        self._trainer.require_alive()
        body = json.loads(payload)
        if is_poll(body):
            return await self._poll(session_id)
        request = RolloutRequest.parse(request_in(body) or body[REQUEST_FIELD])
        is_silent = self._env.is_silent("runtime")
        if is_silent and self._env.is_lost():
            await _idle()
        self._refuse_in_outage(request)
        self._refuse(body["q"])
        self._runtime.open(request)
        if is_silent:
            await _idle()
        await self._env.passes(1.0)
        self._trainer.require_alive()
        if self._env.chance("cut_after"):
            raise OutcomeUnknown("the answer was lost")
        if self._runtime.sources.protocol == "sagemaker-job-runtime":
            await self._answers(session_id)
        if session_id in self._runtime.sessions:
            self._runtime.accept(session_id)
        return self._runtime.sources.accept(request)

    async def _answers(self, session_id: str) -> None:
        """Wait until the agent answers its invoke. Raises RuntimeCallError if it has failed or its session has ended,
        or Killed."""
        session = self._runtime.sessions.get(session_id)
        if session is None:
            raise OutcomeUnknown("the session has ended")
        answer = self._runtime.sources.answer_of(session_id)
        ends: set[asyncio.Future[Any]] = {answer, session.task}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        self._trainer.require_alive()
        session.noticed = not answer.done() or answer.result()
        if not answer.done():
            raise OutcomeUnknown("the connection was closed")
        if answer.result():
            raise InvokeRejected("500", reason="runtime_error")

    async def _poll(self, session_id: str) -> bytes:
        is_silent = self._env.is_silent("runtime")
        if is_silent and self._env.is_lost():
            await _idle()
        refusal = self._runtime.limits.refusal(self._env.now())
        if refusal is not None:
            raise refusal.make()
        self._refuse()
        answer = self._runtime.poll(session_id)
        if is_silent:
            await _idle()
        self._trainer.require_alive()
        if self._env.chance("cut_after"):
            raise OutcomeUnknown("the answer was lost")
        self._runtime.sources.polled(session_id)
        return answer

    def _refuse_in_outage(self, request: RolloutRequest) -> None:
        limits = self._runtime.limits
        refusal = limits.refusal(self._env.now())
        if refusal is not None and limits.outage is not None:
            limits.outage.invokes += 1
            if refusal.after:
                self._runtime.open(request)
            raise refusal.make()

    def _refuse(self, task: str | None = None) -> None:
        """Refuse an invoke for a task, or a poll."""
        self._runtime.limits.take(self._env.now())
        if self._env.chance("throttled"):
            raise Throttled("slow down")
        full = len(self._runtime.sessions) >= self._max_sessions
        if task is not None and (self._env.chance("quota") or full):
            raise QuotaExceeded("too many sessions")
        if self._env.chance("conflict"):
            raise RuntimeConflict("another call is in progress")
        if self._runtime.fails("unavailable"):
            raise RuntimeUnavailable("503", refused=self._env.random.random() < 0.5)
        if task is not None and (self._runtime.fails("container") or self._runtime.is_poisoned(task)):
            raise InvokeRejected("424", reason="container_error")

    async def stop(self, session_id: str) -> None:
        await self._env.passes(0.3)
        self._trainer.require_alive()
        is_silent = self._env.is_silent("runtime")
        if is_silent and self._env.is_lost():
            await _idle()
        refusal, outage = self._runtime.limits.refusal(self._env.now()), self._runtime.limits.outage
        if refusal is not None and refusal.stops:
            if outage is not None and self._env.faults.silent_after_outage:
                outage.silent_stops[session_id] = 2
            raise refusal.make()
        if outage is not None and outage.silent_stops[session_id]:
            outage.silent_stops[session_id] -= 1
            await _idle()
        self._runtime.limits.take(self._env.now())
        if self._env.chance("stop_refused"):
            raise self._env.random.choice([Throttled("slow down"), RuntimeConflict("busy"), OutcomeUnknown("cut")])
        self._runtime.stop(session_id)
        if is_silent:
            await _idle()
