"""Observes what trainers and agents do with sessions, and records violations in `Evidence`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping

from agent_wrapper.contract import RolloutRequest, manifest_key
from tests.simulation.environment import Environment
from tests.simulation.gateway import Gateway
from tests.simulation.run_holder import RunHolder
from tests.simulation.s3 import Bucket
from tests.simulation.session import Session

_REVOKED_WITHIN_S = 2.0


class SessionAudit:
    """The sessions of all trainers, from the first invoke that names them."""

    def __init__(
        self,
        env: Environment,
        bucket: Bucket,
        gateway: Gateway,
        holder: RunHolder,
        sessions: Mapping[str, Session],
    ) -> None:
        self.asked_for: set[str] = set()  # ids of sessions that an invoke named, even if it failed
        self.started: list[tuple[float, str]] = []  # each start of a session: when, and its rollout's key
        self.session_started: dict[str, float] = {}  # by session: its first start
        self.weights: defaultdict[str, set[str]] = defaultdict(set)  # by session: served when it began or sampled
        self.died: dict[str, float] = {}  # sessions that ended silently, and when
        self.closed_at: dict[str, float] = {}  # sessions that a trainer has logged as closed, and when
        self.stopped: set[str] = set()  # ids of sessions that were sent a stop
        self.unlogged: set[int] = set()  # steps of whose sessions a trainer has lost records
        self.log_lost = False  # a trainer cannot know all sessions that were invoked
        self.env = env
        self._evidence = env.evidence
        self._bucket = bucket
        self._gateway = gateway
        self._holder = holder
        self._sessions = sessions

    def starts(self, request: RolloutRequest) -> None:
        """Record that a session starts."""
        rollout_id = request.rollout_id
        step, sessions = request.step, self._sessions.values()
        others = [each for each in sessions if each.request.rollout_id == rollout_id and each.request.step == step]
        self._evidence.wasted += [rollout_id for other in others if self._can_complete(other)]
        manifest = self._bucket.objects[manifest_key("", request.run_id, request.step)]
        if f'"{rollout_id}"' not in manifest.decode():
            self._evidence.unrecorded.append(rollout_id)
        self._holder.started(f"trainer-{self._gateway.keys[request.session_id].trainer_incarnation}", rollout_id)
        self.died.pop(request.session_id, None)  # a repeated invoke has opened it again
        if request.session_id in self.stopped:
            self._evidence.used_twice.append(request.session_id)
        self.started.append((self.env.now(), request.key))
        self.weights[request.session_id].add(self._gateway.weights)
        self.session_started.setdefault(request.session_id, self.env.now())

    def samples(self, request: RolloutRequest) -> None:
        """Record that the session's agent got a response to a model call."""
        self.weights[request.session_id].add(self._gateway.weights)
        closed_at = self.closed_at.get(request.session_id, math.inf)
        late_revoke = self.env.faults.silent_gateway or self.env.faults.gateway_away
        # The next trainer may adopt a session of which no record says that it was closed.
        adopted = request.step in self.unlogged
        if self.env.now() > closed_at + _REVOKED_WITHIN_S and not (late_revoke or adopted):
            self._evidence.sampled_on.append(request.rollout_id)

    def closes(self, session_id: str, awaits_result: Callable[[str], bool]) -> None:
        """Record that a trainer closes a session. `awaits_result`: whether no result of a rollout has arrived."""
        session = self._sessions.get(session_id)
        if session is not None and self._can_complete(session) and awaits_result(session.request.rollout_id):
            self._evidence.wasted.append(session.request.rollout_id)
        self.closed_at.setdefault(session_id, self.env.now())

    def stops(self, session_id: str) -> None:
        """Record that a stop reaches the runtime."""
        self.stopped.add(session_id)
        # A trainer that is killed while it reports an incomplete log has recorded sessions without an invoke.
        if session_id not in self.asked_for and not (self.log_lost or self.unlogged):
            self._evidence.stopped_in_vain.append(session_id)

    def _can_complete(self, session: Session) -> bool:
        """Return whether its rollout can still complete, and the trainer can know it."""
        return (
            session.accepted
            and not session.noticed
            and not session.task.done()
            and session.id not in self.closed_at
            and session.request.step not in self.unlogged
            and self.env.wall() < session.request.deadline
            and self._gateway.remembers(session.id)
        )
