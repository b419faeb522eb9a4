"""The gateways of all trainers, one at a time, and the journal that they share.

A gateway ends with its trainer. The next trainer's gateway continues with the journal, unless that is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agent_wrapper.contract import ModelEndpoint, RolloutRequest
from agent_wrapper.shared.trajectory import TrajectoryUnavailable
from rollout_backend.core.session_ends import HeartbeatReport
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.errors import ServingError
from rollout_backend.model.gateway.sessions import journal_folder
from rollout_backend.model.model_call import ApiError
from tests.simulation.agent_sources import AgentSources
from tests.simulation.environment import Environment
from tests.simulation.session import Session
from tests.simulation.trainer import Trainer

HEARTBEAT_S = 5.0
_RESTART_EVERY_S, _RESTART_S = 90.0, 40.0
_CALL_S = 90.0  # limit of a call to a gateway, as `GatewayFleet` sets it


@dataclass
class Journal:
    """The answered calls of each session, and the revoked sessions."""

    journal_id: str
    calls: dict[str, list[int]] = field(default_factory=dict)
    revoked: set[str] = field(default_factory=set)
    # By session, of the job runtime: `status` and `at`, then also `rewards`.
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)


class Gateway:
    """What agents reach: the current trainer's gateway, if that trainer is alive."""

    def __init__(self, env: Environment, trainers: Mapping[int, Trainer], sessions: Mapping[str, Session]) -> None:
        self.env = env
        self.trainer: Trainer | None = None
        self.started_at = 0.0
        self.journal = Journal("journal-0")
        self.keys: dict[str, SessionClaims] = {}  # by session
        self.adopted: set[str] = set()  # sessions of earlier trainers that this one keeps running
        self.weights = ""  # what the engines serve: the trainer that trained them, and after which step
        self._trainers = trainers
        self._sessions = sessions
        # No heartbeat arrives from the first time to the second.
        self._cut_off = env.draw_times(60, 100) if env.chance("cut_off") else (0.0, 0.0)
        self.heard_by: set[int] = set()  # the numbers of the trainers that any heartbeat has reached
        self._restarts_at = env.own_random("away").uniform(10, 60)

    def start(self, trainer: Trainer, weights: str) -> None:
        """Start the trainer's gateway, with the weights of its checkpoint."""
        self.weights = weights
        self.trainer = trainer
        self.started_at = self.env.now()
        self.adopted = set()

    def lose_journal(self, trainer: Trainer) -> None:
        self.env.note("the gateway's journal is lost")
        self.journal = Journal(f"journal-{trainer.number}")

    def remembers(self, session_id: str) -> bool:
        """Return whether the journal has all calls of the session."""
        return self.keys[session_id].journal_id == self.journal.journal_id

    async def is_reached(self, request: RolloutRequest, patience_s: float, to_seal: bool = False) -> bool:
        """Wait until the gateway serves this session. Return False if it does not in time, or refuses the session."""
        until, claims = self.env.now() + patience_s, self.keys[request.session_id]
        while not self._serves(claims, to_seal):
            if self.env.now() >= until:
                return False
            await asyncio.sleep(1.0)
        try:
            journal_folder.check_journal(claims, self.journal.journal_id)
        except ApiError:
            return False
        return request.session_id not in self.journal.revoked

    @property
    def is_up(self) -> bool:
        return self.trainer is not None and self.trainer.alive and not self.is_away

    @property
    def is_away(self) -> bool:
        since = self.env.now() - self._restarts_at
        return bool(self.env.faults.gateway_away) and since >= 0 and since % _RESTART_EVERY_S < _RESTART_S

    async def answers(self, patience_s: float) -> bool:
        """Wait until the gateway answers at all. Return False if it does not in time."""
        until = self.env.now() + patience_s
        while not self.is_up:
            if self.env.now() >= until:
                return False
            await asyncio.sleep(1.0)
        return True

    def _serves(self, claims: SessionClaims, to_seal: bool) -> bool:
        if self.trainer is None or not self.is_up:
            return False
        own = claims.trainer_incarnation == str(self.trainer.number)
        return to_seal or own or claims.session_id in self.adopted

    def report(self, session_id: str, **fields: Any) -> None:
        """Record what the session's agent reports, as the registry of a gateway does."""
        known = self.journal.reports.get(session_id, {"at": self.env.now()})
        self.journal.reports[session_id] = {**known, **fields}

    def hear(self, trainer: Trainer) -> HeartbeatReport:
        """Return the sessions whose heartbeats arrived since the last call. Wrappers send them until they publish."""
        now = self.env.now()
        beats = set()
        if self.env.situation.protocol != "rollout":  # only the wrapper sends heartbeats
            return HeartbeatReport(frozenset())
        for session in self._sessions.values():
            started_by = self._trainers[int(self.keys[session.id].trainer_incarnation)]
            if started_by.machine != trainer.machine:  # heartbeats go to the gateway that started the session
                continue
            if now < session.beats_at or session.task.done():
                continue
            arrives = not self._cut_off[0] <= now < self._cut_off[1] and not self.env.chance("beat_lost")
            session.beats_at = now + (HEARTBEAT_S if arrives else HEARTBEAT_S / 3)
            if arrives:
                session.heard_by = trainer.number
                beats.add(session.id)
        if beats:
            self.heard_by.add(trainer.number)
        return HeartbeatReport(frozenset(beats))


class SimGateway:
    """Replaces `GatewayFleet`, for one trainer."""

    def __init__(self, gateway: Gateway, trainer: Trainer, sources: AgentSources) -> None:
        self._gateway = gateway
        self._trainer = trainer
        self._sources = sources

    @property
    def identity(self) -> str:
        return self._gateway.journal.journal_id

    def endpoint(self, claims: SessionClaims) -> ModelEndpoint:
        own = {"journal_id": self._gateway.journal.journal_id, "trainer_incarnation": str(self._trainer.number)}
        self._gateway.keys[claims.session_id] = claims.model_copy(update=own)
        return ModelEndpoint(base_url="https://g/v1", api_key="k", name="m", trajectory_url="https://g/t")

    async def revoke(self, sessions: Iterable[str]) -> None:
        self._trainer.require_alive()
        await self._answer()
        journal = self._gateway.journal
        for session_id in [*sessions]:
            journal.revoked.add(session_id)
            journal.reports.pop(session_id, None)

    async def adopt(self, sessions: Collection[str]) -> None:
        self._trainer.require_alive()
        await self._answer()
        self._gateway.adopted.update(sessions)
        for session_id in sorted(sessions):
            self._gateway.env.note(f"adopted: {self._gateway.keys[session_id].rollout_id}")

    async def seal(self, request: RolloutRequest) -> list[int]:
        """Close a session, and return its calls. Raises TrajectoryUnavailable, or Killed."""
        self._trainer.require_alive()
        try:
            await self._answer()
        except ServingError as error:
            raise TrajectoryUnavailable(str(error)) from None
        if not await self._gateway.is_reached(request, 0.0, to_seal=True):
            raise TrajectoryUnavailable("the session is lost")
        return self._gateway.journal.calls.get(request.session_id, [])

    async def reports(self) -> dict[str, Any]:
        """Return all reports without their rewards; none if no answer comes."""
        self._trainer.require_alive()
        try:
            await self._answer()
        except ServingError:
            return {}
        return {session_id: _summary(self._gateway, session_id) for session_id in self._gateway.journal.reports}

    async def report_of(self, session_id: str) -> dict[str, Any] | None:
        """Return the report of a session. Raises ServingError if no answer comes, or Killed."""
        self._trainer.require_alive()
        await self._answer()
        self._sources.polled(session_id)
        report = self._gateway.journal.reports.get(session_id)
        if report is not None and "rewards" in report:
            self._sources.rewards_read.add(session_id)
        return report and {**_summary(self._gateway, session_id), "rewards": report.get("rewards")}

    async def heard(self) -> list[HeartbeatReport | None]:
        self._trainer.require_alive()
        try:
            if self._gateway.is_away:
                return [None]
            await self._answer()
        except ServingError:
            return [None]
        return [self._gateway.hear(self._trainer)]

    async def _answer(self) -> None:
        """Raises ServingError if no answer comes, or Killed. Calls of a gateway that restarts are repeated."""
        while self._gateway.is_away:
            await asyncio.sleep(1.0)
            self._trainer.require_alive()
        if self._gateway.env.is_silent("gateway"):
            await asyncio.sleep(_CALL_S)
            self._trainer.require_alive()
            raise ServingError("a gateway gave no answer")


def _summary(gateway: Gateway, session_id: str) -> dict[str, Any]:
    report = gateway.journal.reports[session_id]
    return {
        "status": report["status"],
        "has_rewards": "rewards" in report,
        "age_s": gateway.env.now() - report["at"],
    }
