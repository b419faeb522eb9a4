"""Account for the rollouts and sessions of one step. Pure: no I/O, and the caller's clock.

Invariants, checked by `reconcile`:

- planned = completed + agent_error + infra_error + timed_out + cancelled, each rollout in exactly one class;
- only the first settlement of a rollout counts: later results are counted as duplicate or late and have no effect;
- each opened session is closed, or listed as unclosed.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush

from agent_wrapper.contract import Outcome
from rollout_backend.core.policy import GroupState
from rollout_backend.core.reasons import SCORER_FAILED
from rollout_backend.core.session_ends import SessionEnd
from rollout_backend.errors import LedgerError

# An agent is lost if its heartbeats stop, if the runtime stops its container, or if it never reached a gateway.
CONTAINER_LOST = "container_lost"
TERMINATED = "terminated"
MODEL_UNREACHABLE = "model_unreachable"
# A rollout has timed out if S3 holds no result, or can neither confirm one nor rule it out.
NO_RESULT = "no_result"
STORE_UNAVAILABLE = "store_unavailable"
# The step was aborted, or its blocklist blocks the task: see `step.task_blocklist`.
RUN_FAILED = "run_failed"
TASK_BLOCKED = "task_blocked"
_NOT_LOST = frozenset({RUN_FAILED, TASK_BLOCKED, SCORER_FAILED})


class Phase(StrEnum):
    """A planned rollout waits for a free session. A scoring one has a result, and waits for its reward."""

    PLANNED = "planned"
    DISPATCHING = "dispatching"
    RUNNING = "running"
    SCORING = "scoring"
    SETTLED = "settled"


@dataclass(eq=False)
class LedgerEntry:
    """The state of one rollout. Its methods record events and update the ledger's counts.

    Times that end in `_at` are in unix seconds, except for `opened_at`. No result can arrive after `deadline` (loop
    seconds). `attempts` counts this trainer's attempts; `attempt` numbers the current one over all trainers, from 1.
    """

    rollout_id: str
    task_id: str
    ledger: "Ledger" = field(repr=False)
    planned_at: float
    is_replacement: bool = False
    phase: Phase = Phase.PLANNED
    attempts: int = 0
    attempt: int = 0
    adopted: bool = False
    """True if an earlier trainer made the current attempt."""
    session_id: str | None = None
    session_ids: list[str] = field(default_factory=list)
    """Sessions of all attempts, without those that the runtime never opened."""
    opened_at: float | None = None
    """Loop seconds of the first invoke that may have opened the last attempt's session."""
    began: float | None = None
    """Loop seconds of the last invoke, or from when the agent accepted it."""
    took: float | None = None
    """Seconds from `opened_at` until its result arrived or it was settled."""
    deadline: float | None = None
    session_end: SessionEnd | None = None
    outcome: Outcome | None = None
    reason: str = ""
    message: str = ""
    by_result: bool = False
    trainable: bool = False
    # `first_invoked_at` skips throttled invokes; `invoked_at` and `accepted_at` belong to the last invoke.
    first_invoked_at: float | None = None
    invoked_at: float | None = None
    accepted_at: float | None = None
    arrived_at: float | None = None
    settled_at: float | None = None

    @property
    def awaits_result(self) -> bool:
        """Return whether the rollout is open and none of its results has arrived."""
        return self.outcome is None and self.phase is not Phase.SCORING

    @property
    def due_at(self) -> float | None:
        """Return the loop time from which the result is overdue: the deadline, or any time once the session has
        ended. None if no result is awaited."""
        if not self.awaits_result or self.deadline is None:
            return None
        return self.deadline if self.session_end is None else -math.inf

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
            f"{self.rollout_id}: {self.phase}, {end}, "
            f"attempts {self.attempts}, session {self.last_session_id or 'none'}"
        )

    # --- events -------------------------------------------------------------------------------------------

    def start_attempt(self, session_id: str, attempt: int, deadline: float) -> None:
        """Record that a session is being invoked: a new one, or one that was refused before."""
        self.attempts += 1
        self.attempt, self.deadline, self.began = attempt, deadline, self.ledger.clock()
        if session_id not in self.ledger.open_sessions:
            self.opened_at = self.began
        self.invoked_at, self.accepted_at = self.ledger.now(), None
        if self.attempts == 1:
            self.first_invoked_at = self.invoked_at
        self._open(session_id, Phase.DISPATCHING)
        self.ledger.watch(self)

    def refuse_attempt(self) -> None:
        """Record that the invoke was refused for now. The next attempt reuses its number and session. A failure
        marker of that session counts, because a refused invoke may have opened it."""
        refused = self.attempt
        self.attempts -= 1
        if self.attempts == 0:
            self.first_invoked_at = None
        self.abandon_attempt()
        self.attempt = refused

    def accept(self) -> None:
        """Record that the agent runs, or that it ran if its result has already arrived."""
        self.accepted_at = self.ledger.now()
        if self.phase is Phase.DISPATCHING:
            assert self.began is not None
            assert self.deadline is not None
            # The invoke may have waited for the run's lease, and for the container.
            began, self.began = self.began, self.ledger.clock()
            self.deadline += self.began - began
            self._enter(Phase.RUNNING)
            self.ledger.watch(self)

    def end_session(self, end: SessionEnd) -> None:
        """Record that a session ended without a stop. Its result may be in S3."""
        if end.session_id == self.session_id:
            self.session_end = end
            self.ledger.watch(self)

    def adopt(self, session_id: str, attempt: int, invoked_at: float, deadline: float) -> None:
        """Record an attempt of an earlier trainer whose agent may still run, unless its result has just arrived."""
        if self.awaits_result:
            self.adopted, self.attempt, self.deadline = True, attempt, deadline
            self.first_invoked_at = self.invoked_at = invoked_at
            self._open(session_id, Phase.RUNNING)
            self.ledger.watch(self)

    def keep_adopted(self) -> None:
        """Record that the adopted agent still runs: S3 holds no result of it."""
        assert self.invoked_at is not None
        self.opened_at = self.began = self.ledger.clock() - (self.ledger.now() - self.invoked_at)

    def abandon_attempt(self) -> None:
        """Drop the current attempt, whose failure marker no longer counts. The rollout waits for its next attempt."""
        self.attempt, self.session_id, self.deadline, self.adopted = 0, None, None, False
        self.session_end = None
        if self.awaits_result:
            self._enter(Phase.PLANNED)

    def start_scoring(self, session_id: str) -> None:
        """Record that a result has arrived and its reward is being computed. `session_id` belongs to its attempt."""
        self.session_ids = self.session_ids or [session_id]
        self.deadline, self.arrived_at = None, self.ledger.now()
        self._end_attempt()
        self._enter(Phase.SCORING)

    def deliver(
        self, outcome: Outcome, reason: str = "", message: str = "", *, session_id: str = "", trainable: bool = False
    ) -> bool:
        """Settle the rollout by its result. Return False if it is settled already.

        `session_id` belongs to the result's attempt, which an earlier trainer may have started.
        """
        if self.outcome is not None:
            self.ledger.count_extra(self.rollout_id)
            return False
        if session_id and not self.session_ids:
            self.session_ids.append(session_id)
        self.by_result, self.trainable = True, trainable
        self.settle(outcome, reason, message)
        self.arrived_at = self.settled_at if self.arrived_at is None else self.arrived_at
        return True

    def settle(self, outcome: Outcome, reason: str, message: str = "") -> bool:
        """Settle the rollout. Return False if it is settled already."""
        if self.outcome is not None:
            return False
        self.outcome, self.reason, self.message = outcome, reason, message
        self.settled_at = self.ledger.now()
        self._end_attempt()
        self._enter(Phase.SETTLED)
        return True

    def _open(self, session_id: str, phase: Phase) -> None:
        self.session_id = session_id
        if session_id not in self.session_ids:
            self.session_ids.append(session_id)
        self.ledger.session_opened(session_id)
        self._enter(phase)

    def _end_attempt(self) -> None:
        if self.opened_at is not None and self.took is None:
            self.took = self.ledger.clock() - self.opened_at

    def _enter(self, phase: Phase) -> None:
        before, self.phase = self.phase, phase
        self.ledger.count(self, before)


@dataclass
class CallTally:
    """Counts the runtime's responses to a step's invokes or stops. A refusal is a call refused for lack of capacity
    (429, 402, 5xx); a grant is any other answered call. Times are in seconds of any monotonic clock."""

    refusals: int = 0
    grants: int = 0
    _first_at: float = 0.0
    _last_at: float = 0.0
    _granted: int = 0
    _granted_between: int = 0

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
    # `groups` is by task id. `now` returns unix seconds, and `clock` the event loop's time.
    groups: Mapping[str, GroupState]
    now: Callable[[], float] = lambda: 0.0
    clock: Callable[[], float] = lambda: 0.0
    entries: dict[str, LedgerEntry] = field(default_factory=dict)
    duplicates: int = 0
    late: int = 0
    unknown: int = 0
    superseded: int = 0
    """Number of failure markers of abandoned attempts. They have no effect."""
    sessions_opened: int = 0
    open_sessions: set[str] = field(default_factory=set)
    unconfirmed_stops: int = 0
    """Number of stops of sessions that the runtime did not know. Their containers may still run."""
    unclosed_sessions: dict[str, str] = field(default_factory=dict)
    # Both are in the order in which rollouts settled, or started to run.
    settled: list[LedgerEntry] = field(default_factory=list)
    running: dict[str, LedgerEntry] = field(default_factory=dict)
    invokes: CallTally = field(default_factory=CallTally)
    stops: CallTally = field(default_factory=CallTally)
    _phases: Counter[Phase] = field(default_factory=Counter)
    _outcomes: Counter[Outcome] = field(default_factory=Counter)
    _changed: dict[str, None] = field(default_factory=dict)
    # A heap of times and rollout ids. `take_overdue` skips entries that are out of date.
    _due: list[tuple[float, str]] = field(default_factory=list)

    # --- rollouts -----------------------------------------------------------------------------------------

    def plan(self, rollout_id: str, task_id: str, *, is_replacement: bool = False) -> LedgerEntry:
        """Plan a rollout of a group."""
        if rollout_id in self.entries:
            raise LedgerError(f"rollout {rollout_id!r} is planned twice in step {self.step}")
        entry = LedgerEntry(rollout_id, task_id, self, self.now(), is_replacement)
        self.entries[rollout_id] = entry
        self._phases[Phase.PLANNED] += 1
        group = self._group(task_id)
        group.open[rollout_id] = None
        group.replacements += is_replacement
        return entry

    def count(self, entry: LedgerEntry, before: Phase) -> None:
        """Count an entry that has left the phase `before`."""
        self._phases[before] -= 1
        self._phases[entry.phase] += 1
        if entry.phase is Phase.RUNNING:
            self.running[entry.rollout_id] = entry
        else:
            self.running.pop(entry.rollout_id, None)
        if entry.phase is Phase.SETTLED:
            assert entry.outcome is not None
            self._outcomes[entry.outcome] += 1
            self.settled.append(entry)
            group = self._group(entry.task_id)
            group.open.pop(entry.rollout_id, None)
            group.trainable += entry.trainable
            group.lost += entry.lost

    def awaits_result(self, rollout_id: str) -> bool:
        """Return whether the rollout is planned and open, and no result of it has arrived."""
        entry = self.entries.get(rollout_id)
        return entry is not None and entry.awaits_result

    def count_extra(self, rollout_id: str) -> None:
        """Count an unused result. Its rollout already has one, was settled without one or was never planned, or its
        attempt was abandoned."""
        entry = self.entries.get(rollout_id)
        if entry is None:
            self.unknown += 1
        elif entry.awaits_result:
            self.superseded += 1
        elif entry.outcome is None or entry.by_result:
            self.duplicates += 1
        else:
            self.late += 1

    def watch(self, entry: LedgerEntry) -> None:
        """Let `take_overdue` return a rollout when its result is overdue. Call again for a returned rollout that is
        still open."""
        if entry.due_at is not None:
            heappush(self._due, (entry.due_at, entry.rollout_id))

    def take_overdue(self, now: float) -> tuple[list[LedgerEntry], float]:
        """Return the overdue rollouts, each once, and the time at which the next one becomes overdue."""
        overdue: dict[str, LedgerEntry] = {}
        while self._due:
            at, rollout_id = self._due[0]
            entry = self.entries[rollout_id]
            if at == entry.due_at and at > now:
                return list(overdue.values()), at
            heappop(self._due)
            if at == entry.due_at:
                overdue[rollout_id] = entry
        return list(overdue.values()), math.inf

    def _group(self, task_id: str) -> GroupState:
        """Return the group of a task for modification."""
        self._changed[task_id] = None
        return self.groups[task_id]

    def take_changed_groups(self) -> list[str]:
        """Return the tasks of the groups whose counts changed since the last call."""
        changed, self._changed = self._changed, {}
        return list(changed)

    @property
    def open(self) -> int:
        """Return the number of unsettled rollouts."""
        return len(self.entries) - self._phases[Phase.SETTLED]

    def open_entries(self) -> Iterator[LedgerEntry]:
        return (entry for entry in self.entries.values() if entry.outcome is None)

    # --- sessions -----------------------------------------------------------------------------------------

    def session_opened(self, session_id: str) -> None:
        """Record that a session may be open from now on."""
        if session_id not in self.open_sessions:
            self.sessions_opened += 1
            self.open_sessions.add(session_id)

    def session_never_opened(self, rollout_id: str, session_id: str) -> None:
        """Record that the rollout's invoke was refused before a session started."""
        self.entries[rollout_id].session_ids.remove(session_id)
        self.sessions_opened -= 1
        self.open_sessions.discard(session_id)

    def session_closed(self, session_id: str, *, confirmed: bool = True) -> None:
        """Record a stop. Without `confirmed`, the runtime did not know the session."""
        self.unconfirmed_stops += not confirmed
        self.open_sessions.discard(session_id)

    def session_unclosed(self, session_id: str, why: str) -> None:
        """Record a session that could not be closed. The runtime's idle timeout ends it, and the report names it."""
        self.open_sessions.discard(session_id)
        self.unclosed_sessions[session_id] = why

    # --- totals -------------------------------------------------------------------------------------------

    def counts(self) -> dict[Outcome, int]:
        return {outcome: self._outcomes[outcome] for outcome in Outcome}

    def phases(self) -> dict[Phase, int]:
        return {phase: self._phases[phase] for phase in Phase}

    def reconcile(self, name: str = "") -> None:
        """Raise LedgerError, which lists every rollout, if an invariant is broken.

        `name` is the step's number as the trainer counts it."""
        faults = []
        settled = sum(entry.outcome is not None for entry in self.entries.values())
        if settled != len(self.entries):
            faults.append(f"planned {len(self.entries)}, settled {settled}")
        revived = sum(
            entry.outcome is not None and entry.phase is not Phase.SETTLED for entry in self.entries.values()
        )
        if revived:
            faults.append(f"{revived} settled rollouts left the phase {Phase.SETTLED}")
        if self.open_sessions:
            faults.append(f"{len(self.open_sessions)} sessions open: {', '.join(sorted(self.open_sessions))}")
        if faults:
            lines = [f"step {name or self.step} does not reconcile: {'; '.join(faults)}"]
            lines += [f"  {entry.describe()}" for entry in self.entries.values()]
            raise LedgerError("\n".join(lines))
