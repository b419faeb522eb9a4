"""Account for one step: the state of each rollout and of each session. Pure: no I/O, and the caller's clock.

Invariants, checked by `reconcile`:

- planned = completed + agent_error + infra_error + timed_out + cancelled, each rollout in exactly one class;
- only the first settlement of a rollout counts: later results are counted as duplicate or late and have no effect;
- each opened session is closed, or listed as unclosed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from agent_wrapper.contract import Outcome
from rollout_backend.core.policy import GroupState
from rollout_backend.core.reasons import SCORER_FAILED
from rollout_backend.errors import LedgerError

CONTAINER_LOST = "container_lost"  # reason of a lost agent whose heartbeats stopped
TERMINATED = "terminated"  # reason of a lost agent whose container the runtime stopped
NO_RESULT = "no_result"  # reason of a timed-out agent without any result
STORE_UNAVAILABLE = "store_unavailable"  # reason of a timed-out rollout whose result S3 could not confirm or rule out
RUN_FAILED = "run_failed"  # the step was aborted
TASK_BLOCKED = "task_blocked"  # see `step.task_blocklist`
_NOT_LOST = frozenset({RUN_FAILED, TASK_BLOCKED, SCORER_FAILED})


class Phase(StrEnum):
    PLANNED = "planned"  # waiting for a free session
    DISPATCHING = "dispatching"  # being invoked
    RUNNING = "running"  # accepted by the agent
    SCORING = "scoring"  # the result has arrived, and its reward is being computed
    SETTLED = "settled"


class ResultStatus(StrEnum):
    """How the ledger counts an incoming result."""

    FIRST = "first"
    DUPLICATE = "duplicate"  # a result has already settled the rollout
    LATE = "late"  # the rollout was settled without a result: timed out or cancelled
    UNKNOWN = "unknown"  # the rollout was not planned in this step


@dataclass(frozen=True)
class PlannedRollout:
    rollout_id: str
    task_id: str
    is_replacement: bool = False  # replaces a rollout that the infrastructure lost


@dataclass
class LedgerEntry:
    """The state of one rollout."""

    planned: PlannedRollout
    phase: Phase = Phase.PLANNED
    attempts: int = 0
    session_id: str | None = None  # session of the current attempt
    session_ids: list[str] = field(default_factory=list)  # of all attempts, unless the runtime opened none
    deadline: float | None = None  # loop time after which no result can arrive
    outcome: Outcome | None = None
    reason: str = ""
    message: str = ""
    by_result: bool = False  # settled by a result, not by a timeout or cancellation
    trainable: bool = False
    planned_at: float = 0.0  # these times are by the ledger's clock
    first_invoked_at: float | None = None  # first invoke that was not throttled
    invoked_at: float | None = None  # last invoke
    accepted_at: float | None = None  # the agent accepted the last invoke
    arrived_at: float | None = None  # the result arrived
    settled_at: float | None = None

    @property
    def last_session_id(self) -> str | None:
        """Return the session of the last attempt that may have opened one."""
        return self.session_ids[-1] if self.session_ids else None

    @property
    def lost(self) -> bool:
        """True if the infrastructure, not the agent, caused the loss.

        False if the step was aborted, the task is blocked, or the scorer failed: a new rollout would not help.
        """
        if self.outcome is Outcome.INFRA_ERROR:
            return self.reason not in _NOT_LOST
        return self.outcome is Outcome.TIMED_OUT and self.reason == NO_RESULT

    @property
    def delivered(self) -> bool:
        """True if a result arrived, even one with an agent error."""
        return self.by_result and not self.lost and self.reason != SCORER_FAILED

    def describe(self) -> str:
        end = f"{self.outcome} {self.reason}".rstrip() if self.outcome else "open"
        return (
            f"{self.planned.rollout_id}: {self.phase}, {end}, "
            f"attempts {self.attempts}, session {self.last_session_id or 'none'}"
        )


@dataclass
class CallTally:
    """The runtime's responses to one kind of a step's calls. Times are in seconds of any monotonic clock."""

    refusals: int = 0  # calls refused for lack of capacity: 429, 402, 5xx
    grants: int = 0  # all other answered calls
    _first_at: float = 0.0
    _last_at: float = 0.0
    _granted: int = 0  # grants since the first refusal
    _granted_between: int = 0  # grants between the first and the last refusal

    def refused(self, now: float) -> None:
        if not self.refusals:
            self._first_at = now
        self.refusals += 1
        self._last_at, self._granted_between = now, self._granted

    def granted(self, now: float) -> None:
        self.grants += 1
        if self.refusals:
            self._granted += 1

    @property
    def seconds(self) -> float:
        """Return the time between the first and the last refusal."""
        return self._last_at - self._first_at

    @property
    def granted_per_s(self) -> float | None:
        """Return the rate of grants between the first and the last refusal; None if these are less than 1 s apart."""
        return self._granted_between / self.seconds if self.seconds >= 1 else None


@dataclass
class Ledger:
    step: int
    now: Callable[[], float] = lambda: 0.0  # unix seconds
    entries: dict[str, LedgerEntry] = field(default_factory=dict)
    duplicates: int = 0
    late: int = 0
    unknown: int = 0
    superseded: int = 0  # failure markers of abandoned attempts, which have no effect
    sessions_opened: int = 0
    open_sessions: set[str] = field(default_factory=set)
    unclosed_sessions: dict[str, str] = field(default_factory=dict)  # session id -> why it could not be closed
    settled: list[LedgerEntry] = field(default_factory=list)  # in the order of settlement
    groups: dict[str, GroupState] = field(default_factory=dict)  # by task, with current counts
    running: dict[str, LedgerEntry] = field(default_factory=dict)  # in the order in which their agents accepted
    invokes: CallTally = field(default_factory=CallTally)
    stops: CallTally = field(default_factory=CallTally)
    _phases: Counter[Phase] = field(default_factory=Counter)
    _outcomes: Counter[Outcome] = field(default_factory=Counter)
    _changed: dict[str, None] = field(default_factory=dict)  # groups that changed since `take_changed_groups`

    # --- rollouts -----------------------------------------------------------------------------------------

    def plan(self, rollouts: Iterable[PlannedRollout]) -> None:
        for rollout in rollouts:
            if rollout.rollout_id in self.entries:
                raise LedgerError(f"rollout {rollout.rollout_id!r} is planned twice in step {self.step}")
            self.entries[rollout.rollout_id] = LedgerEntry(rollout, planned_at=self.now())
            self._phases[Phase.PLANNED] += 1
            group = self._group(rollout.task_id)
            group.open[rollout.rollout_id] = None
            group.replacements += rollout.is_replacement

    def start_attempt(self, rollout_id: str, session_id: str, deadline: float) -> int:
        """Record an attempt in a new session, and return its number, counted from 1."""
        entry = self.entries[rollout_id]
        self._enter(entry, Phase.DISPATCHING)
        entry.attempts += 1
        entry.deadline = deadline
        entry.invoked_at, entry.accepted_at = self.now(), None
        if entry.attempts == 1:  # set again if the first invoke was throttled
            entry.first_invoked_at = entry.invoked_at
        self._open(entry, session_id)
        return entry.attempts

    def undo_attempt(self, rollout_id: str) -> None:
        """Undo an attempt whose invoke was throttled. The next attempt reuses its number and session."""
        entry = self.entries[rollout_id]
        entry.attempts -= 1
        self.abandon_attempt(rollout_id)

    def accept(self, rollout_id: str) -> None:
        """Record that the agent runs, or that it ran if its result has already arrived."""
        entry = self.entries[rollout_id]
        entry.accepted_at = self.now()
        if entry.phase is Phase.DISPATCHING:
            self._enter(entry, Phase.RUNNING)

    def adopt(self, rollout_id: str, session_id: str, invoked_at: float, deadline: float) -> bool:
        """Record an attempt of an earlier trainer whose agent may still be running.

        Return False if its result has already arrived: it may have been announced while the step started.
        """
        entry = self.entries[rollout_id]
        if not self.awaits_result(rollout_id):
            return False
        self._enter(entry, Phase.RUNNING)
        entry.deadline = deadline
        entry.first_invoked_at = entry.invoked_at = invoked_at
        self._open(entry, session_id)
        return True

    def abandon_attempt(self, rollout_id: str) -> None:
        """Abandon the current attempt: its results no longer count, and the rollout waits for its next attempt."""
        entry = self.entries[rollout_id]
        entry.session_id, entry.deadline = None, None
        if self.awaits_result(rollout_id):
            self._enter(entry, Phase.PLANNED)

    def is_open(self, rollout_id: str) -> bool:
        """Return whether the rollout is planned and unsettled."""
        entry = self.entries.get(rollout_id)
        return entry is not None and entry.outcome is None

    def awaits_result(self, rollout_id: str) -> bool:
        """Return whether the rollout is open and none of its results has arrived."""
        return self.is_open(rollout_id) and self.entries[rollout_id].phase is not Phase.SCORING

    def start_scoring(self, rollout_id: str, session_id: str) -> None:
        """Record that a result has arrived and its reward is being computed. `session_id` belongs to its attempt."""
        entry = self.entries[rollout_id]
        if not entry.session_ids:
            entry.session_ids.append(session_id)
        entry.deadline, entry.arrived_at = None, self.now()
        self._enter(entry, Phase.SCORING)

    def record_result(
        self,
        rollout_id: str,
        outcome: Outcome,
        reason: str = "",
        message: str = "",
        *,
        session_id: str = "",
        trainable: bool = False,
    ) -> ResultStatus:
        """Record a result. Only the first result of an open rollout settles it.

        `session_id` belongs to the result's attempt, which an earlier trainer may have started.
        """
        if not self.is_open(rollout_id):
            return self._count_extra(rollout_id)
        entry = self.entries[rollout_id]
        if session_id and not entry.session_ids:
            entry.session_ids.append(session_id)
        self._settle(entry, outcome, reason, message, by_result=True, trainable=trainable)
        return ResultStatus.FIRST

    def record_duplicate(self, rollout_id: str) -> None:
        """Record an announcement whose rollout is settled or was never planned, or whose attempt was abandoned."""
        if self.awaits_result(rollout_id):
            self.superseded += 1
        else:
            self._count_extra(rollout_id)

    def _count_extra(self, rollout_id: str) -> ResultStatus:
        """Count a result whose rollout already has one, was settled without one, or was never planned."""
        entry = self.entries.get(rollout_id)
        if entry is None:
            self.unknown += 1
            return ResultStatus.UNKNOWN
        if entry.outcome is None or entry.by_result:
            self.duplicates += 1
            return ResultStatus.DUPLICATE
        self.late += 1
        return ResultStatus.LATE

    def settle(self, rollout_id: str, outcome: Outcome, reason: str, message: str = "") -> bool:
        """Settle a rollout without a result. Return False if it is already settled."""
        entry = self.entries[rollout_id]
        if entry.outcome is not None:
            return False
        self._settle(entry, outcome, reason, message)
        return True

    def _settle(
        self,
        entry: LedgerEntry,
        outcome: Outcome,
        reason: str,
        message: str,
        *,
        by_result: bool = False,
        trainable: bool = False,
    ) -> None:
        self._enter(entry, Phase.SETTLED)
        entry.outcome, entry.reason, entry.message = outcome, reason, message
        entry.by_result, entry.trainable = by_result, trainable
        entry.settled_at = self.now()
        if by_result and entry.arrived_at is None:
            entry.arrived_at = entry.settled_at
        self._outcomes[outcome] += 1
        self.settled.append(entry)
        group = self._group(entry.planned.task_id)
        group.open.pop(entry.planned.rollout_id, None)
        group.trainable += trainable
        group.lost += entry.lost

    def _enter(self, entry: LedgerEntry, phase: Phase) -> None:
        self._phases[entry.phase] -= 1
        self._phases[phase] += 1
        entry.phase = phase
        if phase is Phase.RUNNING:
            self.running[entry.planned.rollout_id] = entry
        else:
            self.running.pop(entry.planned.rollout_id, None)

    def _group(self, task_id: str) -> GroupState:
        """Return the group of a task for modification."""
        self._changed[task_id] = None
        return self.groups.setdefault(task_id, GroupState(task_id, needed=1))

    def take_changed_groups(self) -> list[GroupState]:
        """Return the groups whose counts changed since the last call."""
        changed, self._changed = self._changed, {}
        return [self.groups[task_id] for task_id in changed]

    @property
    def open(self) -> int:
        """Return the number of unsettled rollouts."""
        return len(self.entries) - self._phases[Phase.SETTLED]

    def open_entries(self) -> Iterator[LedgerEntry]:
        return (entry for entry in self.entries.values() if entry.outcome is None)

    # --- sessions -----------------------------------------------------------------------------------------

    def _open(self, entry: LedgerEntry, session_id: str) -> None:
        entry.session_id = session_id
        if session_id not in entry.session_ids:
            entry.session_ids.append(session_id)
        if session_id not in self.open_sessions:
            self.sessions_opened += 1
            self.open_sessions.add(session_id)

    def session_never_opened(self, rollout_id: str, session_id: str) -> None:
        """Record that the rollout's invoke was refused before a session started."""
        self.entries[rollout_id].session_ids.remove(session_id)
        self.sessions_opened -= 1
        self.open_sessions.discard(session_id)

    def session_closed(self, session_id: str) -> None:
        self.open_sessions.discard(session_id)

    def session_unclosed(self, session_id: str, why: str) -> None:
        """Record a session that could not be closed. The runtime's idle timeout ends it, and the report names it."""
        self.open_sessions.discard(session_id)
        self.unclosed_sessions[session_id] = why

    # --- the balance --------------------------------------------------------------------------------------

    def counts(self) -> dict[Outcome, int]:
        return {outcome: self._outcomes[outcome] for outcome in Outcome}

    def phases(self) -> dict[Phase, int]:
        return {phase: self._phases[phase] for phase in Phase}

    def reconcile(self) -> None:
        """Raise LedgerError, which lists every rollout, if an invariant is broken."""
        faults = []
        settled = sum(entry.outcome is not None for entry in self.entries.values())
        if settled != len(self.entries):
            faults.append(f"planned {len(self.entries)}, settled {settled}")
        revived = sum(
            entry.outcome is not None and entry.phase is not Phase.SETTLED for entry in self.entries.values()
        )
        if revived:
            faults.append(f"{revived} settled rollouts are at work again")
        if self.open_sessions:
            faults.append(f"{len(self.open_sessions)} sessions open: {', '.join(sorted(self.open_sessions))}")
        if faults:
            lines = [f"step {self.step} does not reconcile: {'; '.join(faults)}"]
            lines += [f"  {entry.describe()}" for entry in self.entries.values()]
            raise LedgerError("\n".join(lines))
