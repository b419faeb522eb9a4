"""Result types and accounting report of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from agent_wrapper.contract import Outcome, Rollout, Segment
from rollout_backend.core.adapter import number_of
from rollout_backend.core.ledger import CallTally, Ledger, LedgerEntry
from rollout_backend.core.tasks import Task
from rollout_backend.model.gateway.stats import EngineUse
from rollout_backend.run.accounts.records import RolloutRecord
from rollout_backend.run.accounts.summary import mean, percentiles

# Split reasons that the gateway writes. A result without a seal may have any other, written by the agent.
_REASONS = ("first_call", "rerendered", "tools_changed", "history_rewritten", "branched", "new_conversation")


class GroupReport(BaseModel, frozen=True, extra="forbid"):
    task_id: str
    planned: int
    outcomes: dict[Outcome, int]
    rewards: tuple[float, ...]
    """Rewards of the trainable rollouts."""
    usable: bool

    @property
    def mean_reward(self) -> float | None:
        return mean(self.rewards)

    @property
    def has_spread(self) -> bool:
        """Return whether the rewards differ. GRPO learns nothing from equal rewards."""
        return len(set(self.rewards)) > 1


class Staleness(BaseModel, frozen=True, extra="forbid"):
    """Age of the weights that sampled a step's tokens, in versions behind the step's newest weights.

    Only numbered versions count; 0 means that a single version sampled everything.
    """

    mean: float
    """Mean age over all tokens."""
    max: int


class Latency(BaseModel, frozen=True, extra="forbid"):
    """Seconds until results arrived here, over a step. They compare two clocks, which must be synchronized."""

    p50: float
    p99: float
    max: float


class Lengths(BaseModel, frozen=True, extra="forbid"):
    """Durations of some rollouts of a step, from dispatch until they ended here. None if unknown."""

    rollouts: int
    mean_s: float | None
    mean_sampled_tokens: float | None = None
    mean_turns: float | None = None


class CallRate(BaseModel, frozen=True, extra="forbid"):
    """The rate that the runtime granted for one kind of call, in a step in which it refused some (429, 402, 5xx)."""

    refused: int
    seconds: float
    """Seconds from the first refusal to the last."""
    granted_per_s: float | None
    """Granted calls per second between them; None if that was under a second."""

    @classmethod
    def of(cls, tally: CallTally) -> CallRate | None:
        if not tally.refusals:
            return None
        return cls(refused=tally.refusals, seconds=tally.seconds, granted_per_s=tally.granted_per_s)


class LengthBias(BaseModel, frozen=True, extra="forbid"):
    """Lengths of finished and cut-off rollouts, to expose length bias.

    `cut_off` counts rollouts that were stopped because they took longer than others or than the step: stragglers, and
    rollouts still running at the target or the deadline. Their tokens are unknown.
    """

    finished: Lengths
    """Rollouts of this execution that completed or failed in the agent."""
    cut_off: Lengths
    reason: str
    """The most frequent reason for a cut-off."""


class StepReport(BaseModel, frozen=True):
    """The accounts of one step: how each planned rollout ended, and what the step cost."""

    # Unknown fields are ignored, so that a version without a field still reads the reports of one that had it.

    run_id: str
    step: int
    planned: int
    replacements: int
    """Rollouts that replace one that the infrastructure lost."""
    outcomes: dict[Outcome, int]
    reasons: dict[str, int]
    """"outcome: reason" of rollouts that did not complete."""
    trainable: int
    groups: tuple[GroupReport, ...]
    duplicates: int
    late: int
    unknown: int
    superseded: int
    """Failure markers of attempts that a later attempt had replaced."""
    resumed: int
    """Rollouts that an earlier execution of this step had finished."""
    reattached: int = 0
    """Rollouts of an earlier execution whose agents were still running and continued."""
    refused: int
    """Messages put into quarantine."""
    unarchived: int = 0
    """Results that could not be written to the run directory; they are in S3."""
    attempts: int
    sessions_opened: int
    sessions_open: int
    unclosed_sessions: dict[str, str]
    unconfirmed_stops: int = 0
    """Stops that the runtime answered with 404, which does not prove that the session has ended."""
    sampled_tokens: int
    given_tokens: int
    broken_histories: int
    """Number of segments after each rollout's first."""
    split_reasons: dict[str, int] = {}
    """Number of these segments by split reason."""
    malformed_tool_calls: dict[str, int] | None = None
    """Malformed calls by renderer, since the last report; None if unknown."""
    unknown_tool_calls: dict[str, int] = {}
    """Calls of tools that were not offered, by name, since then."""
    undelivered_replies: int = 0
    """Replies that no client received whole and no call continued, since then."""
    given_up_calls: dict[str, int] = {}
    """`calls` whose clients hung up while a training service sampled them, since then, with their `prompt_tokens` and
    `sampled_tokens`. If the service may have stopped a call, its token limit is in `limit_tokens` instead."""
    left_out_replies: int = 0
    """Replies that training.leave_out leaves out of training, since then."""
    unjournaled_sessions: int = 0
    """Sessions that lost their journal since then, because a gateway's disk failed. A restart of their gateway ends
    them."""
    dropped_log_lines: int = 0
    """Lines that the gateways' logs lost since then, because their disk was full or did not answer."""
    runaways: dict[str, int] = {}
    """Sampled tokens of rollouts whose session reached gateway.session_tokens."""
    heard_after_stop: dict[str, int] = {}
    """Refused requests of stopped sessions, by session, since then."""
    weight_versions: dict[str, int] = {}
    """Sampled tokens by version; "" if the engine reported none."""
    staleness: Staleness | None = None
    latency: Latency | None
    """Time since the result's announcement, which follows its PUT, by SQS's clock."""
    lag: Latency | None
    """Time since the agent returned, by its container's clock. Includes fetching the trajectory."""
    surplus: int = 0
    """Trainable rollouts that exceed their group's size and are not trained."""
    length_bias: LengthBias | None = None
    """None unless something was cut off."""
    invoke_rate: CallRate | None = None
    """None unless an invoke was refused."""
    stop_rate: CallRate | None = None
    """None unless a stop was refused."""
    engine_use: EngineUse | None = None
    """Load of the engines; None if none reported it."""
    restarts: dict[str, int] = {}
    """Restarts of engines, gateways, the router and the dialer during the step, by name."""
    seconds: float
    until_invoke_s: float | None = None
    """Seconds until the first invoke; None if there was none."""
    closing_s: float | None = None
    """Seconds after the last outcome, in which sessions were closed and the manifest was written."""
    deadline_reached: bool

    @property
    def reconciles(self) -> bool:
        """Return True if each rollout has one class, and each session is closed or listed."""
        return sum(self.outcomes.values()) == self.planned and self.sessions_open == 0

    @property
    def balanced(self) -> bool:
        """Whether the accounts balance and every session is closed."""
        return self.reconciles and not self.unclosed_sessions


@dataclass(frozen=True)
class StepFailure:
    """A rollout that did not complete, and where to look."""

    rollout_id: str
    task_id: str
    outcome: Outcome
    reason: str
    message: str
    session_id: str | None
    """Session of the last attempt that may have opened one."""
    attempts: int


@dataclass(frozen=True)
class GroupResult:
    """The rollouts of one task. `usable` is whether the group policy accepts the group for training."""

    task: Task
    rollouts: tuple[Rollout, ...]
    """The trainable rollouts."""
    usable: bool
    planned: int
    failures: tuple[StepFailure, ...] = ()
    """The rollouts that did not complete, including scored agent errors."""


@dataclass(frozen=True, repr=False)
class StepResult:
    """The outcome of one step.

    `rollouts` holds every result that arrived, including failed ones. `groups` holds the groups that may be trained.
    """

    step: int
    rollouts: tuple[Rollout, ...]
    groups: tuple[GroupResult, ...]
    failures: tuple[StepFailure, ...]
    report: StepReport
    records: tuple[RolloutRecord, ...] = ()
    """One record per planned rollout."""

    def __repr__(self) -> str:
        usable = sum(group.usable for group in self.groups)
        counts = f"{len(self.rollouts)} rollouts, {usable} of {len(self.groups)} groups usable"
        return f"<StepResult step {self.step}: {counts}, {len(self.failures)} failures>"


def failures_of(ledger: Ledger, rollout_ids: Iterable[str] | None = None) -> tuple[StepFailure, ...]:
    """Return the failures among these rollouts, or among all."""
    wanted = ledger.entries if rollout_ids is None else {each: ledger.entries[each] for each in rollout_ids}
    return tuple(
        StepFailure(
            rollout_id=rollout_id,
            task_id=entry.task_id,
            outcome=entry.outcome,
            reason=entry.reason,
            message=entry.message,
            session_id=entry.last_session_id,
            attempts=entry.attempts,
        )
        for rollout_id, entry in wanted.items()
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
    unarchived: int = 0,
    resumed: int = 0,
    reattached: int = 0,
    seconds: float,
    began_at: float | None = None,
    closing_s: float | None = None,
    deadline_reached: bool,
    engine_use: EngineUse | None = None,
    restarts: Mapping[str, int] | None = None,
) -> StepReport:
    entries = list(ledger.entries.values())
    outcomes = _outcomes_by_task(entries)
    ended = [entry for entry in entries if entry.outcome is not None]
    unusual = [entry for entry in ended if entry.outcome is not Outcome.COMPLETED or entry.reason]
    segments = [segment for rollout in rollouts for segment in rollout.segments]
    later = [segment for rollout in rollouts for segment in rollout.segments[1:]]
    sampled = sum(segment.sampled_tokens for segment in segments)
    versions = _versions(segments)
    invoked_at = [entry.first_invoked_at for entry in entries if entry.first_invoked_at is not None]
    return StepReport(
        run_id=run_id,
        step=ledger.step,
        planned=len(entries),
        replacements=sum(entry.is_replacement for entry in entries),
        outcomes=ledger.counts(),
        reasons=dict(Counter(f"{entry.outcome}: {entry.reason}" for entry in unusual)),
        trainable=sum(entry.trainable for entry in entries),
        groups=tuple(_group_report(group, outcomes.get(group.task.task_id, Counter())) for group in groups),
        duplicates=ledger.duplicates,
        late=ledger.late,
        unknown=ledger.unknown,
        superseded=ledger.superseded,
        resumed=resumed,
        reattached=reattached,
        refused=refused,
        unarchived=unarchived,
        attempts=sum(entry.attempts for entry in entries),
        sessions_opened=ledger.sessions_opened,
        sessions_open=len(ledger.open_sessions),
        unclosed_sessions=dict(ledger.unclosed_sessions),
        unconfirmed_stops=ledger.unconfirmed_stops,
        sampled_tokens=sampled,
        given_tokens=sum(len(segment.token_ids) for segment in segments) - sampled,
        broken_histories=len(later),
        split_reasons=dict(
            Counter(segment.split_reason if segment.split_reason in _REASONS else "other" for segment in later)
        ),
        weight_versions=dict(versions),
        staleness=_staleness(versions),
        latency=_latency(latencies),
        lag=_latency(lags),
        surplus=sum(entry.trainable for entry in entries) - sum(len(group.rollouts) for group in groups),
        length_bias=_length_bias(entries, rollouts),
        invoke_rate=CallRate.of(ledger.invokes),
        stop_rate=CallRate.of(ledger.stops),
        engine_use=engine_use,
        restarts=dict(restarts or {}),
        seconds=seconds,
        until_invoke_s=max(0.0, min(invoked_at) - began_at) if invoked_at and began_at is not None else None,
        closing_s=closing_s,
        deadline_reached=deadline_reached,
    )


def _outcomes_by_task(entries: Iterable[LedgerEntry]) -> dict[str, Counter[Outcome]]:
    counts: dict[str, Counter[Outcome]] = {}
    for entry in entries:
        if entry.outcome is not None:
            counts.setdefault(entry.task_id, Counter())[entry.outcome] += 1
    return counts


def _group_report(group: GroupResult, outcomes: Counter[Outcome]) -> GroupReport:
    return GroupReport(
        task_id=group.task.task_id,
        planned=outcomes.total(),
        outcomes=dict(outcomes),
        rewards=tuple(rollout.reward for rollout in group.rollouts if rollout.reward is not None),
        usable=group.usable,
    )


_CUT_FOR_LENGTH = ("straggler", "target_reached", "collection_deadline", "agent_deadline")


def _length_bias(entries: Iterable[LedgerEntry], rollouts: Sequence[Rollout]) -> LengthBias | None:
    took = {entry.rollout_id: entry.took for entry in entries if entry.took is not None}
    cut = [
        (took[entry.rollout_id], entry.reason)
        for entry in entries
        if not entry.by_result and entry.rollout_id in took and entry.reason in _CUT_FOR_LENGTH
    ]
    if not cut:
        return None
    done = [
        rollout
        for rollout in rollouts
        if rollout.outcome in (Outcome.COMPLETED, Outcome.AGENT_ERROR) and rollout.rollout_id in took
    ]
    segments = [rollout.segments for rollout in done]
    return LengthBias(
        finished=Lengths(
            rollouts=len(done),
            mean_s=mean([took[rollout.rollout_id] for rollout in done]),
            mean_sampled_tokens=mean([sum(segment.sampled_tokens for segment in each) for each in segments]),
            mean_turns=mean([sum(len(segment.turns) for segment in each) for each in segments]),
        ),
        cut_off=Lengths(rollouts=len(cut), mean_s=mean([seconds for seconds, _ in cut])),
        reason=Counter(reason for _, reason in cut).most_common(1)[0][0],
    )


def _versions(segments: Iterable[Segment]) -> Counter[str]:
    tokens: Counter[str] = Counter()
    for turn in (turn for segment in segments for turn in segment.turns):
        if not turn.weight_versions:
            tokens[""] += turn.end - turn.start
        for span in turn.weight_versions:
            tokens[span.version] += span.end - span.start
    return tokens


def _staleness(tokens_of: Mapping[str, int]) -> Staleness | None:
    numbered: Counter[int] = Counter()
    for label, tokens in tokens_of.items():
        if tokens and (number := number_of(label)) is not None:
            numbered[number] += tokens
    if not numbered:
        return None
    newest = max(numbered)
    behind = sum((newest - version) * tokens for version, tokens in numbered.items())
    return Staleness(mean=behind / sum(numbered.values()), max=newest - min(numbered))


def _latency(seconds: Sequence[float]) -> Latency | None:
    if not seconds:
        return None
    p50, p99 = percentiles(seconds, 50, 99)
    return Latency(p50=p50, p99=p99, max=max(seconds))
