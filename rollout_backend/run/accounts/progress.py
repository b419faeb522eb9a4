"""Compute the totals of running steps, and a snapshot of a run for display.

Invariant: `StepTotals.update` reads each settled rollout once; its cost does not grow with the step.
"""

import time
from bisect import insort
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Self

from agent_wrapper.contract import Outcome, Rollout
from rollout_backend.core.ledger import Ledger, Phase
from rollout_backend.core.policy import percentile_95
from rollout_backend.model.gateway.stats import GatewayStats
from rollout_backend.model.serving.engine_fleet import ServerState
from rollout_backend.run.accounts.findings import (
    Finding,
    Level,
    cut_replies,
    failure_findings,
    forced_formats,
    rate_findings,
)
from rollout_backend.run.accounts.records import RolloutRecord, StepRecords
from rollout_backend.run.accounts.step_report import CallRate
from rollout_backend.run.accounts.summary import NO_USAGE, FailureCount, Usage, count_failures, duration, usage_of

_LAST = 2


@dataclass(frozen=True)
class LastResult:
    """A result that has just arrived. `text` is the model's last reply, and must be treated as untrusted."""

    rollout_id: str
    reward: float | None
    seconds: float | None
    """Seconds since its agent was invoked; None if an earlier manager invoked it."""
    sampled_tokens: int
    text: str


class StepTotals:
    """The totals of a running step."""

    def __init__(self, records: StepRecords) -> None:
        self.failures: dict[tuple[Outcome, str], FailureCount] = {}
        self.rewards = 0
        self.reward_sum = 0.0
        self.trainable = self.wasted = NO_USAGE
        self.turns = 0
        self.cut_replies = 0
        self.sampled_tokens = self.trained_tokens = 0
        # Whether the rewards differ in a task's settled, usable group, by task.
        self.spread: dict[str, bool] = {}
        # Sorted durations of the rollouts that delivered a result.
        self.seconds: list[float] = []
        self._records = records
        # Number of settled rollouts already counted.
        self._seen = 0
        self._rewards: dict[str, list[float]] = {}

    def update(self) -> None:
        """Add everything that was settled since the last call."""
        self._records.update()
        ledger, new = self._records.ledger, self._records.settled[self._seen :]
        for record in new:
            self._add(record, delivered=ledger.entries[record.rollout_id].delivered)
        self._seen += len(new)
        for task_id in {record.task_id for record in new}:
            group, rewards = ledger.groups[task_id], self._rewards.get(task_id, ())
            if group.usable and not group.open and len(rewards) > 1:
                self.spread[task_id] = len(set(rewards)) > 1

    def _add(self, record: RolloutRecord, *, delivered: bool) -> None:
        usage, lost = usage_of(record)
        if record.trainable:
            self.trainable += usage
        else:
            self.wasted += usage
        self.wasted += lost
        if record.result is not None:
            self.turns += record.result.turns
            self.cut_replies += record.result.cut_replies
            self.sampled_tokens += record.result.sampled_tokens
            self.trained_tokens += record.result.trained_tokens
        if record.reward is not None:
            self.rewards += 1
            self.reward_sum += record.reward
            if record.trainable:
                self._rewards.setdefault(record.task_id, []).append(record.reward)
        seconds = duration(record)
        if delivered and seconds is not None:
            insort(self.seconds, seconds)
        for failure in count_failures([record]):
            key = failure.outcome, failure.reason
            first = self.failures.get(key)
            self.failures[key] = failure if first is None else replace(first, number=first.number + 1)

    @property
    def p95_s(self) -> float | None:
        """Return the 95th percentile of the durations of finished rollouts; None for fewer than 20."""
        return percentile_95(self.seconds) if len(self.seconds) >= 20 else None

    def last(self) -> list[LastResult]:
        """Return the newest results, newest first."""
        return [
            LastResult(
                rollout.rollout_id,
                rollout.reward,
                duration(self._records.ledger.entries[rollout.rollout_id]),
                rollout.sampled_tokens,
                _last_reply(rollout),
            )
            for rollout in reversed(self._records.received[-_LAST:])
        ]


def _last_reply(rollout: Rollout) -> str:
    if rollout.failure is not None:
        return rollout.failure.message
    for message in reversed(rollout.segments[-1].messages if rollout.segments else ()):
        content = message.get("content")
        if message.get("role") == "assistant" and isinstance(content, str):
            return content
    return ""


@dataclass(frozen=True)
class Progress:
    """Counts of a run's current steps. `phases` counts unsettled rollouts by phase, `outcomes` settled ones by class.

    `gateway` is None if the gateways did not answer. `warning` is empty unless no agent can call the model.
    """

    phases: dict[str, int]
    outcomes: dict[str, int]
    open_sessions: int
    gateway: GatewayStats | None
    warning: str = ""
    rewards: int = 0
    """Number of rewards that have arrived."""
    mean_reward: float | None = None
    groups: int = 0
    """Settled and usable groups with several rewards."""
    groups_with_spread: int = 0
    """Groups among them whose rewards differ. GRPO learns only from these."""
    turns: int = 0
    """Model calls of rollouts with a result."""
    cut_replies: int = 0
    """Turns among them that were cut off at max_tokens or at the end of the context."""
    sampled_tokens: int = 0
    """Sampled tokens of rollouts with a result."""
    trained_tokens: int = 0
    """Sampled tokens that have a logprob."""
    slowest: str = ""
    """The rollout that has been working for the longest time."""
    slowest_s: float = 0.0
    slowest_left_s: float | None = None
    """Seconds until the deadline of that rollout; None if it has none."""
    p95_s: float | None = None
    """95th percentile of the durations of finished rollouts."""
    failures: tuple[FailureCount, ...] = ()
    last: tuple[LastResult, ...] = ()
    """The newest results, newest first."""
    invoke_rate: CallRate | None = None
    """None unless an invoke was refused."""
    stop_rate: CallRate | None = None
    """None unless a stop was refused."""
    servers: tuple[ServerState, ...] = ()
    """The router and the engines."""
    trainable: Usage = NO_USAGE
    """Usage of ended rollouts that can be trained."""
    wasted: Usage = NO_USAGE
    """Usage of the other ended rollouts."""

    @classmethod
    def of(
        cls,
        steps: Collection[tuple[Ledger, StepTotals]],
        gateway: GatewayStats | None = None,
        warning: str = "",
        now: Callable[[], float] = time.time,
        servers: tuple[ServerState, ...] = (),
        loop_now: float = 0.0,
    ) -> Self:
        """Add up the current steps. `now` is the ledgers' clock, `loop_now` the event loop's time."""
        phases: dict[str, int] = dict.fromkeys(Phase, 0)
        outcomes: dict[str, int] = {}
        # The first running rollout of each step, with its deadline.
        running: list[tuple[float, str, float | None]] = []
        rates: list[tuple[CallRate | None, CallRate | None]] = []
        for ledger, totals in steps:
            totals.update()
            for phase, count in ledger.phases().items():
                phases[phase] += count
            for outcome, count in ledger.counts().items():
                outcomes[outcome] = outcomes.get(outcome, 0) + count
            for entry in ledger.running.values():
                running.append((entry.invoked_at or now(), entry.rollout_id, entry.deadline))
                break
            rates.append((CallRate.of(ledger.invokes), CallRate.of(ledger.stops)))
        each = [totals for _, totals in steps]
        rewards = sum(totals.rewards for totals in each)
        since, slowest, deadline = min(running, key=lambda each: each[:2], default=(0.0, "", None))
        return cls(
            phases,
            outcomes,
            open_sessions=sum(len(ledger.open_sessions) for ledger, _ in steps),
            gateway=gateway,
            warning=warning,
            rewards=rewards,
            mean_reward=sum(totals.reward_sum for totals in each) / rewards if rewards else None,
            groups=sum(len(totals.spread) for totals in each),
            groups_with_spread=sum(sum(totals.spread.values()) for totals in each),
            turns=sum(totals.turns for totals in each),
            cut_replies=sum(totals.cut_replies for totals in each),
            sampled_tokens=sum(totals.sampled_tokens for totals in each),
            trained_tokens=sum(totals.trained_tokens for totals in each),
            slowest=slowest,
            slowest_s=max(0.0, now() - since) if slowest else 0.0,
            slowest_left_s=None if deadline is None else max(0.0, deadline - loop_now),
            p95_s=max((totals.p95_s for totals in each if totals.p95_s is not None), default=None),
            failures=tuple(failure for totals in each for failure in totals.failures.values()),
            last=tuple(result for totals in each for result in totals.last()),
            invoke_rate=next((invokes for invokes, _ in rates if invokes is not None), None),
            stop_rate=next((stops for _, stops in rates if stops is not None), None),
            servers=servers,
            trainable=sum((totals.trainable for totals in each), start=NO_USAGE),
            wasted=sum((totals.wasted for totals in each), start=NO_USAGE),
        )

    @property
    def planned(self) -> int:
        return sum(self.phases.values())

    @property
    def settled(self) -> int:
        return self.phases[Phase.SETTLED]

    @property
    def at_work(self) -> int:
        return self.phases[Phase.RUNNING]

    @property
    def scoring(self) -> int:
        return self.phases.get(Phase.SCORING, 0)

    @property
    def waiting(self) -> int:
        """Return the number of rollouts without a running agent so far."""
        return self.phases[Phase.PLANNED] + self.phases[Phase.DISPATCHING]

    def findings(self) -> tuple[Finding, ...]:
        """Return what needs attention, most important first, by the rules for a step's verdict."""
        found = [Finding(Level.BAD, self.warning)] if self.warning else []
        found += failure_findings(self.failures, self.planned)
        found += rate_findings(self.invoke_rate, self.stop_rate)
        found += forced_formats(self.sampled_tokens, self.trained_tokens)
        found += cut_replies(self.cut_replies, self.turns)
        return tuple(sorted(found, key=lambda finding: finding.level))


class FirstCall:
    """Waits for a run's first model call."""

    def __init__(self, url: str, setting: str, warn_after_s: float = 30.0) -> None:
        """`url` is the address that agents received, and `setting` the setting that determines it."""
        self.warning = ""
        self.arrived = False
        self._url = url
        self._setting = setting
        self._warn_after_s = warn_after_s
        self._silent_since: float | None = None

    def observe(self, now: float, running: int, stats: GatewayStats) -> None:
        """Update `arrived` and `warning`. `now` is the time of any monotonic clock; `running` counts agents."""
        # A load balancer's health check may cause this error.
        refused = stats.errors.keys() - {"not_found"}
        if stats.calls or stats.calls_in_flight or refused:
            self.arrived, self.warning = True, ""
        if self.arrived or not running:
            self._silent_since = None
            return
        if self._silent_since is None:
            self._silent_since = now
        if now - self._silent_since >= self._warn_after_s:
            self.warning = (
                f"no model call has arrived for {now - self._silent_since:.0f} s, and agents run: can they reach "
                f"{self._url} ({self._setting})?"
            )
