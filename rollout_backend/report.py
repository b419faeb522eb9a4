"""What a step came to: its rollouts, its groups, and its books in a form that can be kept and compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

from pydantic import BaseModel, ConfigDict

from agent_wrapper.contract import Outcome, Rollout
from rollout_backend.ledger import Ledger
from rollout_backend.tasks import Task


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GroupReport(_Frozen):
    task_id: str
    planned: int
    outcomes: dict[Outcome, int]
    rewards: tuple[float, ...]  # of the trainable rollouts
    usable: bool

    @property
    def mean_reward(self) -> float | None:
        return sum(self.rewards) / len(self.rewards) if self.rewards else None


class Latency(_Frozen):
    """Seconds until rollouts were in our hands, over a step. Two clocks are compared: keep them in time."""

    p50: float
    p99: float
    max: float


class StepReport(_Frozen):
    run_id: str
    step: int
    planned: int
    replacements: int  # of those planned
    outcomes: dict[Outcome, int]
    reasons: dict[str, int]  # "outcome: reason" of what did not complete
    trainable: int
    groups: tuple[GroupReport, ...]
    duplicates: int
    late: int
    unknown: int
    refused: int  # messages put into quarantine
    attempts: int
    sessions_opened: int
    sessions_open: int
    unclosed_sessions: dict[str, str]
    sampled_tokens: int
    given_tokens: int
    broken_histories: int  # segments beyond each rollout's first
    latency: Latency | None  # since the announcement, which follows the PUT at once; by SQS's clock
    lag: (
        Latency | None
    )  # since the agent returned, by its container's clock: with what was sampled fetched, and the PUT
    seconds: float
    deadline_reached: bool

    @property
    def balanced(self) -> bool:
        """Whether the first invariant holds, sessions that would not close included."""
        settled = sum(self.outcomes.values())
        return settled == self.planned and self.sessions_open == 0 and not self.unclosed_sessions


@dataclass(frozen=True)
class StepFailure:
    """A rollout that did not complete, and where to look."""

    rollout_id: str
    task_id: str
    outcome: Outcome
    reason: str
    message: str
    session_id: str | None
    attempts: int


@dataclass(frozen=True)
class GroupResult:
    task: Task
    rollouts: tuple[Rollout, ...]  # the trainable ones
    usable: bool


@dataclass(frozen=True)
class StepResult:
    """`rollouts` is every result that arrived, failed ones included; `groups` holds what may be trained."""

    step: int
    rollouts: tuple[Rollout, ...]
    groups: tuple[GroupResult, ...]
    failures: tuple[StepFailure, ...]
    report: StepReport


def failures_of(ledger: Ledger) -> tuple[StepFailure, ...]:
    return tuple(
        StepFailure(
            rollout_id=rollout_id,
            task_id=entry.planned.task_id,
            outcome=entry.outcome,
            reason=entry.reason,
            message=entry.message,
            session_id=entry.session_id,
            attempts=entry.attempts,
        )
        for rollout_id, entry in ledger.entries.items()
        if entry.outcome is not None and entry.outcome is not Outcome.COMPLETED
    )


def make_report(
    run_id: str,
    ledger: Ledger,
    groups: Sequence[GroupResult],
    rollouts: Sequence[Rollout],
    latencies: Sequence[float],
    lags: Sequence[float],
    *,
    refused: int,
    seconds: float,
    deadline_reached: bool,
) -> StepReport:
    entries = list(ledger.entries.values())
    by_task: dict[str, Counter[Outcome]] = {}
    for entry in entries:
        if entry.outcome is not None:
            by_task.setdefault(entry.planned.task_id, Counter())[entry.outcome] += 1
    segments = [segment for rollout in rollouts for segment in rollout.segments]
    sampled = sum(segment.sampled_tokens for segment in segments)
    return StepReport(
        run_id=run_id,
        step=ledger.step,
        planned=len(entries),
        replacements=sum(entry.planned.replaces for entry in entries),
        outcomes=ledger.counts(),
        reasons=dict(
            Counter(
                f"{entry.outcome}: {entry.reason}"
                for entry in entries
                if entry.outcome is not None and entry.outcome is not Outcome.COMPLETED
            )
        ),
        trainable=sum(entry.trainable for entry in entries),
        groups=tuple(
            GroupReport(
                task_id=group.task.task_id,
                planned=sum(by_task.get(group.task.task_id, Counter()).values()),
                outcomes=dict(by_task.get(group.task.task_id, Counter())),
                rewards=tuple(rollout.reward for rollout in group.rollouts if rollout.reward is not None),
                usable=group.usable,
            )
            for group in groups
        ),
        duplicates=ledger.duplicates,
        late=ledger.late,
        unknown=ledger.unknown,
        refused=refused,
        attempts=sum(entry.attempts for entry in entries),
        sessions_opened=ledger.sessions_opened,
        sessions_open=len(ledger.open_sessions),
        unclosed_sessions=dict(ledger.unclosed_sessions),
        sampled_tokens=sampled,
        given_tokens=sum(len(segment.token_ids) for segment in segments) - sampled,
        broken_histories=sum(max(0, len(rollout.segments) - 1) for rollout in rollouts),
        latency=_latency(latencies),
        lag=_latency(lags),
        seconds=seconds,
        deadline_reached=deadline_reached,
    )


def _latency(seconds: Sequence[float]) -> Latency | None:
    if not seconds:
        return None
    if len(seconds) == 1:
        return Latency(p50=seconds[0], p99=seconds[0], max=seconds[0])
    cuts = quantiles(seconds, n=100, method="inclusive")
    return Latency(p50=cuts[49], p99=cuts[98], max=max(seconds))
