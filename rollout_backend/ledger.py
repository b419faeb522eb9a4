"""The books of one step: the life of each rollout and of each session. Pure: it waits for nothing and calls nobody.

What must always hold, and is checked by `reconcile`:

- planned = completed + agent_error + infra_error + timed_out + cancelled, each rollout in exactly one class;
- the first settlement stands: whatever comes for a settled rollout is counted as a duplicate or as late, and changes
  nothing;
- each session that was opened is closed, or named as one that would not close.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from agent_wrapper.contract import Outcome
from rollout_backend.errors import LedgerError

NO_RESULT = "no_result"  # why an agent that was never heard of again is timed out
RUN_FAILED = "run_failed"  # the step was aborted
TASK_SET_ASIDE = "task_set_aside"  # see `collect.set_aside`
_NOT_ITS_OWN = frozenset({RUN_FAILED, TASK_SET_ASIDE})


class Phase(StrEnum):
    PLANNED = "planned"  # waits for a free session
    DISPATCHING = "dispatching"  # an invoke is under way
    RUNNING = "running"  # the agent has accepted it
    SETTLED = "settled"


class Arrival(StrEnum):
    """What a result is when it comes in."""

    FIRST = "first"
    DUPLICATE = "duplicate"  # the rollout was settled by a result already
    LATE = "late"  # the rollout was settled without one: timed out, cancelled, given up
    UNKNOWN = "unknown"  # this step never planned it


@dataclass(frozen=True)
class PlannedRollout:
    rollout_id: str
    task_id: str
    replaces: bool = False  # planned later, in the place of one lost to the infrastructure


@dataclass
class Entry:
    """One line of the books."""

    planned: PlannedRollout
    phase: Phase = Phase.PLANNED
    attempts: int = 0
    session_id: str | None = None  # of the current attempt
    deadline: float | None = None  # loop seconds after which nothing can come any more
    outcome: Outcome | None = None
    reason: str = ""
    message: str = ""
    by_result: bool = False  # settled by a result that arrived, not by us
    trainable: bool = False

    @property
    def lost(self) -> bool:
        """Whether it ended for want of infrastructure: infra_error, or a silent death. Not what the whole step's end,
        or its task's being set aside, took with it."""
        if self.outcome is Outcome.INFRA_ERROR:
            return self.reason not in _NOT_ITS_OWN
        return self.outcome is Outcome.TIMED_OUT and self.reason == NO_RESULT

    @property
    def let_through(self) -> bool:
        """Whether a result of it came, whatever its agent made of it."""
        return self.by_result and not self.lost

    def describe(self) -> str:
        end = f"{self.outcome} {self.reason}".rstrip() if self.outcome else "open"
        return (
            f"{self.planned.rollout_id}: {self.phase}, {end}, "
            f"attempts {self.attempts}, session {self.session_id or 'none'}"
        )


@dataclass
class Ledger:
    step: int
    entries: dict[str, Entry] = field(default_factory=dict)
    duplicates: int = 0
    late: int = 0
    unknown: int = 0
    superseded: int = 0  # notices of attempts that were given up before: another attempt decides
    sessions_opened: int = 0
    open_sessions: set[str] = field(default_factory=set)
    unclosed_sessions: dict[str, str] = field(default_factory=dict)  # session id -> why it would not close
    settled: list[Entry] = field(default_factory=list)  # in the order in which they ended

    # --- rollouts -----------------------------------------------------------------------------------------

    def plan(self, rollouts: Iterable[PlannedRollout]) -> None:
        for rollout in rollouts:
            if rollout.rollout_id in self.entries:
                raise LedgerError(f"rollout {rollout.rollout_id!r} is planned twice in step {self.step}")
            self.entries[rollout.rollout_id] = Entry(rollout)

    def attempt(self, rollout_id: str, session_id: str, deadline: float) -> int:
        """Books one more attempt, in a session of its own, and tells its number, from 1."""
        entry = self.entries[rollout_id]
        entry.phase = Phase.DISPATCHING
        entry.attempts += 1
        entry.session_id = session_id
        entry.deadline = deadline
        self.sessions_opened += 1
        self.open_sessions.add(session_id)
        return entry.attempts

    def accept(self, rollout_id: str) -> None:
        """The agent runs. A result may have overtaken this: then there is nothing to book."""
        entry = self.entries[rollout_id]
        if entry.phase is Phase.DISPATCHING:
            entry.phase = Phase.RUNNING

    def adopt(self, rollout_id: str, session_id: str, deadline: float) -> None:
        """Books an attempt that an earlier take has made, and whose agent may still be at work."""
        entry = self.entries[rollout_id]
        entry.phase = Phase.RUNNING
        entry.session_id = session_id
        entry.deadline = deadline
        self.sessions_opened += 1
        self.open_sessions.add(session_id)

    def lose(self, rollout_id: str) -> None:
        """An adopted attempt came to nothing: the rollout is to be submitted as any other."""
        entry = self.entries[rollout_id]
        entry.phase, entry.session_id, entry.deadline = Phase.PLANNED, None, None

    def give_up(self, rollout_id: str) -> None:
        """The current attempt came to nothing. What its session may still say does not count."""
        self.entries[rollout_id].session_id = None

    def wants(self, rollout_id: str) -> bool:
        entry = self.entries.get(rollout_id)
        return entry is not None and entry.outcome is None

    def arrive(
        self, rollout_id: str, outcome: Outcome, reason: str = "", message: str = "", *, trainable: bool = False
    ) -> Arrival:
        """Books a result that came in. Only the first one for an open rollout settles it."""
        entry = self.entries.get(rollout_id)
        if entry is None:
            self.unknown += 1
            return Arrival.UNKNOWN
        if entry.outcome is not None:
            if entry.by_result:
                self.duplicates += 1
                return Arrival.DUPLICATE
            self.late += 1
            return Arrival.LATE
        self._settle(entry, outcome, reason, message)
        entry.by_result = True
        entry.trainable = trainable
        return Arrival.FIRST

    def again(self, rollout_id: str) -> None:
        """Books an announcement of what is not wanted: its rollout is settled, nobody planned it, or it is of an
        attempt that was given up."""
        if self.wants(rollout_id):
            self.superseded += 1
        else:
            self.arrive(rollout_id, Outcome.COMPLETED)

    def settle(self, rollout_id: str, outcome: Outcome, reason: str, message: str = "") -> bool:
        """Ends a rollout from this side. False if it had ended before, which stands."""
        entry = self.entries[rollout_id]
        if entry.outcome is not None:
            return False
        self._settle(entry, outcome, reason, message)
        return True

    def _settle(self, entry: Entry, outcome: Outcome, reason: str, message: str) -> None:
        entry.phase = Phase.SETTLED
        entry.outcome = outcome
        entry.reason = reason
        entry.message = message
        self.settled.append(entry)

    def open_entries(self) -> Iterator[Entry]:
        return (entry for entry in self.entries.values() if entry.outcome is None)

    # --- sessions -----------------------------------------------------------------------------------------

    def session_closed(self, session_id: str) -> None:
        self.open_sessions.discard(session_id)

    def session_unclosed(self, session_id: str, why: str) -> None:
        """It would not close. The runtime's idle timeout will end it; the report names it."""
        self.open_sessions.discard(session_id)
        self.unclosed_sessions[session_id] = why

    # --- the balance --------------------------------------------------------------------------------------

    def counts(self) -> dict[Outcome, int]:
        found = Counter(entry.outcome for entry in self.entries.values() if entry.outcome is not None)
        return {outcome: found[outcome] for outcome in Outcome}

    def phases(self) -> dict[Phase, int]:
        found = Counter(entry.phase for entry in self.entries.values())
        return {phase: found[phase] for phase in Phase}

    def reconcile(self) -> None:
        """Raises LedgerError, with every line of the books, unless they balance."""
        faults = []
        settled = sum(self.counts().values())
        if settled != len(self.entries):
            faults.append(f"planned {len(self.entries)}, settled {settled}")
        if self.open_sessions:
            faults.append(f"{len(self.open_sessions)} sessions open: {', '.join(sorted(self.open_sessions))}")
        if faults:
            lines = [f"step {self.step} does not reconcile: {'; '.join(faults)}"]
            lines += [f"  {entry.describe()}" for entry in self.entries.values()]
            raise LedgerError("\n".join(lines))
