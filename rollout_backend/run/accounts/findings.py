"""Derive the findings on a step: whether it can be trained, and what cost time or data. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from agent_wrapper.contract import Outcome
from rollout_backend.base.formats import count
from rollout_backend.core.ledger import NO_RESULT
from rollout_backend.model.gateway.stats import EngineUse
from rollout_backend.run.accounts.step_report import CallRate, GroupReport, StepReport
from rollout_backend.run.accounts.summary import TAIL, FailureCount, StepSummary

_NO_MODEL_CALL = "no_model_call"


class Level(IntEnum):
    """Importance of a finding; the most important level comes first."""

    BAD = 0
    """Nothing can be trained, or rollouts were lost."""
    WARNING = 1
    """Training is possible, but something reduces it."""
    NOTE = 2


@dataclass(frozen=True)
class Finding:
    """A fact about a step, and the setting to change or the command that shows more."""

    level: Level
    text: str
    advice: str = ""

    def fields(self) -> dict[str, str]:
        """Return the finding as an object for JSON."""
        return {"level": self.level.name.lower(), "text": self.text, "advice": self.advice}


@dataclass(frozen=True)
class StepOverview:
    """Overview of a step for pages of many steps. It loads much faster than the groups of the step's report."""

    findings: tuple[Finding, ...]
    """What to look at first."""
    has_report: bool = False
    """False if the step is running or was interrupted."""
    balanced: bool = True
    trains: bool = True
    """Whether anything of the step can be trained. Known from the report."""
    staleness: float | None = None
    groups: tuple[int, int] = (0, 0)
    """Usable groups, and all groups. Known from the report."""

    @classmethod
    def of(cls, report: StepReport | None, summary: StepSummary) -> StepOverview:
        """Return the overview of a step that is over."""
        found = findings_of(report, summary)
        if report is None:
            return cls(found)
        staleness = report.staleness.mean if report.staleness is not None else None
        groups = sum(group.usable for group in report.groups), len(report.groups)
        return cls(found, True, report.balanced, judge(report, summary).trains, staleness, groups)


@dataclass(frozen=True)
class Verdict:
    """`passed`: the step `trains` something, enough rollouts completed, and every session is closed.

    `findings` starts with the most important one.
    """

    passed: bool
    trains: bool
    findings: tuple[Finding, ...]


def judge(report: StepReport, summary: StepSummary, min_completed: int = 0) -> Verdict:
    """Return the verdict on a step. It fails if fewer than `min_completed` rollouts completed."""
    completed, planned = report.outcomes[Outcome.COMPLETED], report.planned
    usable = [group for group in report.groups if group.usable]
    done = f"{completed} of {planned} rollouts completed"
    forced = [*forced_formats(summary.sampled_tokens, summary.trained_tokens)]
    why = _nothing_to_train(report, usable)
    if usable and forced and forced[0].level is Level.BAD:
        why = forced[0].text
        first = replace(forced.pop(), text=f"nothing to train on: {why}")
    elif why and usable and all(reward == 1 for group in usable for reward in group.rewards):
        text = f"nothing to train on: solved, every reward is 1 ({count(len(usable), 'task')})"
        first = Finding(Level.WARNING, text, "choose harder tasks")
    elif why:
        first = Finding(Level.BAD, f"nothing to train on: {why}", show_command(summary.first_failed))
    else:
        first = Finding(Level.NOTE, f"{done}, {len(usable)} of {len(report.groups)} groups usable")
    findings = [first]
    if completed < min_completed:
        findings.append(Finding(Level.BAD, f"{done}, and at least {min_completed} must complete"))
    findings += [] if why else _spread(usable)
    findings += forced
    findings += cut_replies(summary.cut_replies, summary.turns)
    findings += failure_findings(summary.failures, report.planned)
    if report.unclosed_sessions:
        text = f"{count(len(report.unclosed_sessions), 'session')} could not be closed"
        findings.append(Finding(Level.BAD, text))
    passed = why is None and completed >= min_completed and report.balanced
    return Verdict(passed, why is None, tuple(findings))


def _nothing_to_train(report: StepReport, usable: list[GroupReport]) -> str | None:
    if not report.trainable:
        return f"0 of {report.planned} rollouts completed"
    if not usable:
        return f"0 of {len(report.groups)} groups usable ({report.trainable} of {report.planned} rollouts trainable)"
    if any(group.has_spread or len(group.rewards) == 1 for group in usable):
        return None
    return _all_equal(usable) or f"rewards equal within each group ({count(len(usable), 'task')})"


def forced_formats(sampled: int, trained: int) -> Iterator[Finding]:
    """Describe the sampled tokens that cannot be trained: only replies with a forced format lack logprobs."""
    if trained == sampled:
        return
    level = Level.BAD if not trained else Level.WARNING if 2 * trained < sampled else Level.NOTE
    text = (
        f"{f'{sampled - trained:,}' if trained else 'none'} of {sampled:,} sampled tokens "
        f"{'have no logprob: some replies' if trained else 'has a logprob: every reply'} had a forced format "
        "(tool_choice, response_format), whose tokens were drawn from another distribution than the model's"
    )
    yield Finding(level, text, "gateway.forced_tools: as_auto, if a framework forces a tool in every call")


def _spread(usable: list[GroupReport]) -> Iterator[Finding]:
    """Describe groups with equal rewards. For groups of one rollout, only if all rewards of the step are equal."""
    larger = [group for group in usable if len(group.rewards) > 1]
    flat = [group.rewards[0] for group in larger if not group.has_spread]
    low, high = (
        (min(all_), max(all_)) if (all_ := [each for group in usable for each in group.rewards]) else (0.0, 0.0)
    )
    solved = sum(reward == high and reward > 0 for reward in flat)
    unsolved = sum(reward == low and not (reward == high and reward > 0) for reward in flat)
    for number, what, advice in (
        (
            unsolved,
            "never solved, and teach nothing",
            "group.size: raise it, so that one of them succeeds; or choose easier tasks",
        ),
        (solved, "always solved, and teach nothing", "choose harder tasks"),
        (
            len(flat) - solved - unsolved,
            "of equal rewards, and teach nothing",
            "let the reward tell better from worse",
        ),
    ):
        if number:
            yield Finding(Level.WARNING, f"tasks {what}: {number} of {len(larger)}", advice)
    if flat:
        return
    if len(usable) > 1 and (equal := _all_equal(usable)):
        yield Finding(Level.WARNING, equal)


def _all_equal(usable: list[GroupReport]) -> str | None:
    rewards = {reward for group in usable for reward in group.rewards}
    return f"all rewards equal ({count(len(usable), 'task')}, all {rewards.pop():g})" if len(rewards) == 1 else None


def cut_replies(cut: int, turns: int) -> Iterator[Finding]:
    if cut:
        text = f"replies cut at max_tokens or the end of the context: {cut} of {turns}"
        yield Finding(Level.WARNING, text, "sampling.max_tokens: raise it")


def failure_findings(failures: Sequence[FailureCount], planned: int) -> Iterator[Finding]:
    """Describe the failures of a step that planned this many rollouts, by kind."""
    silent = [failure for failure in failures if failure.reason == _NO_MODEL_CALL]
    if silent:
        text = f"no model call made by {sum(failure.number for failure in silent)} of {planned} rollouts"
        yield Finding(Level.BAD, text, show_command(silent[0].first))
    for what, (level, belongs) in _KINDS.items():
        kind = [failure for failure in failures if belongs(failure)]
        if kind:
            most = max(kind, key=lambda failure: failure.number)
            total = sum(failure.number for failure in kind)
            text = f"{total} of {planned} rollouts {what}, most often {most.reason} ({most.number})"
            yield Finding(level, text, show_command(most.first))


def _is_lost(failure: FailureCount) -> bool:
    return failure.outcome is Outcome.INFRA_ERROR or failure.reason == NO_RESULT


_KINDS: dict[str, tuple[Level, Callable[[FailureCount], bool]]] = {
    "lost to the infrastructure": (Level.BAD, _is_lost),
    "failed in the agent": (
        Level.BAD,
        lambda each: each.outcome is Outcome.AGENT_ERROR and each.reason != _NO_MODEL_CALL,
    ),
    "timed out": (Level.WARNING, lambda each: each.outcome is Outcome.TIMED_OUT and not _is_lost(each)),
    "cancelled": (
        Level.NOTE,
        lambda each: each.outcome is Outcome.CANCELLED and each.reason != "target_reached",
    ),
}


def show_command(rollout_id: str) -> str:
    """Return the command that shows a rollout of the newest run; empty without a rollout."""
    return f"rollout show {rollout_id}" if rollout_id else ""


_SLOW_TAIL, _LONG_WAIT, _LOW_CACHE_HIT = 0.25, 0.25, 0.3
# Fraction of the running requests.
_LONG_QUEUE = 0.25
# Fraction of the time.
_IDLE = 0.5
_GIVEN_UP = ("calls", "prompt_tokens", "sampled_tokens", "limit_tokens")
_LISTED = 5
# A session that is being stopped may still send this many requests.
_LAST_REQUESTS = 2
# Advice by the reason why rollouts were cut off.
_LENGTH_ADVICE = {
    "straggler": "group.straggler_factor: raise it",
    "target_reached": "group.oversample, group.target_groups",
    "collection_deadline": "timeouts.collection_s: raise it",
    "agent_deadline": "timeouts.agent_s: raise it",
}


def findings_of(report: StepReport | None, summary: StepSummary, *, runs: bool = False) -> tuple[Finding, ...]:
    """Return the findings on a step, most important first. `report` is None if the step `runs` or was interrupted."""
    if runs:
        forced = forced_formats(summary.sampled_tokens, summary.trained_tokens)
        found = [*failure_findings(summary.failures, summary.planned), *forced]
    else:
        found = [*_accounts(report, summary)]
    found += _rollouts(summary)
    found += _sessions(report.engine_use if report is not None else None, summary)
    return tuple(sorted(found, key=lambda finding: finding.level))


def _accounts(report: StepReport | None, summary: StepSummary) -> Iterator[Finding]:
    if report is None:
        settled = summary.planned - summary.outcomes.get(None, 0)
        when = f"when {settled} of {count(summary.planned, 'rollout')} had ended"
        text = f"the step was interrupted {when if settled < summary.planned else 'after its last rollout'}"
        yield Finding(Level.BAD, text, "run_id: start the run again under the same one")
        return
    yield from judge(report, summary).findings
    if not report.reconciles:
        yield Finding(Level.BAD, "the ledger does not reconcile")
    if report.deadline_reached:
        yield Finding(Level.WARNING, "the step ended at its deadline", "timeouts.collection_s: raise it")
    yield from engine_findings(report.engine_use)
    for server, restarts in sorted(report.restarts.items()):
        text = f"{server} was lost and restarted {count(restarts, 'time')}, which costs model calls time"
        yield Finding(Level.NOTE, text, "the run's logs folder: see why it ended or hung")
    if report.resumed:
        text = f"{report.resumed:,} of {count(report.planned, 'rollout')} finished in an earlier start of the run"
        yield Finding(Level.NOTE, text, "run_id: use another one after a change of the agent")
    if report.unarchived:
        text = f"{count(report.unarchived, 'result')} could not be written to the run's folder; they are in S3"
        yield Finding(Level.WARNING, text, "output_dir: free space on its disk")
    yield from rate_findings(report.invoke_rate, report.stop_rate)
    for renderer, number in sorted((report.malformed_tool_calls or {}).items()):
        yield Finding(Level.NOTE, f"{count(number, 'tool call')} of {renderer} could not be read, and became text")
    if report.unknown_tool_calls:
        most = sorted(report.unknown_tool_calls.items(), key=lambda each: -each[1])
        names = ", ".join(f"{name} ({number})" for name, number in most[:_LISTED])
        text = f"{count(sum(report.unknown_tool_calls.values()), 'call')} of tools that were not offered: {names}"
        yield Finding(Level.NOTE, text)
    if report.undelivered_replies:
        text = f"{count(report.undelivered_replies, 'call')} given up before the reply arrived, and not trained"
        yield Finding(Level.NOTE, text)
    if given_up := report.given_up_calls:
        calls, prompt, sampled, limit = (given_up.get(name, 0) for name in _GIVEN_UP)
        text = f"clients hung up {count(calls, 'call')} that the training service may bill: {prompt:,} prompt tokens"
        text += f", {sampled:,} sampled" if sampled else ""
        text += f", up to {limit:,} sampled of calls that the service could end" if limit else ""
        yield Finding(Level.NOTE, text, "the agent's timeout of model calls: raise it")
    if report.left_out_replies:
        text = f"{count(report.left_out_replies, 'model call')} left out of training"
        yield Finding(Level.NOTE, text, "training.leave_out")
    if report.unjournaled_sessions:
        text = (
            f"{count(report.unjournaled_sessions, 'session')} ran without a journal: a restart of the gateway would "
        )
        yield Finding(Level.WARNING, f"{text}have repeated their rollouts", "output_dir: look at its disk")
    if report.dropped_log_lines:
        text = f"the gateways' logs lost {count(report.dropped_log_lines, 'line')}"
        yield Finding(Level.NOTE, text, "output_dir: look at its disk")
    for rollout_id, tokens in sorted(report.runaways.items())[:_LISTED]:
        text = f"{rollout_id} sampled {tokens:,} tokens and was refused more"
        yield Finding(Level.WARNING, text, "gateway.session_tokens")
    still = sorted(name for name, requests in report.heard_after_stop.items() if requests > _LAST_REQUESTS)
    if still:
        text = f"{count(len(still), 'session')} ran on after the stop, and may be billed: "
        text += ", ".join(still[:_LISTED])
        yield Finding(Level.WARNING, text, "stop them at the runtime")
    if report.unconfirmed_stops:
        text = f"the runtime did not know {count(report.unconfirmed_stops, 'session')} that was to be stopped, "
        yield Finding(Level.NOTE, f"{text}which does not prove that each has ended", "its sessions in CloudWatch")
    if report.split_reasons:
        reasons = ", ".join(f"{number} {why}" for why, number in sorted(report.split_reasons.items()))
        yield Finding(Level.NOTE, f"conversations opened {count(report.broken_histories, 'more row')}: {reasons}")
    yield from length_findings(report)
    if report.staleness is not None and report.staleness.max:
        text = f"tokens come from weights up to {count(report.staleness.max, 'version')} old"
        yield Finding(Level.NOTE, f"{text}, {report.staleness.mean:.2f} on average")


def _rollouts(summary: StepSummary) -> Iterator[Finding]:
    if summary.retried:
        extra = count(summary.extra_attempts, "session")
        text = f"{count(summary.retried, 'rollout')} needed more than one attempt, {extra} in addition"
        yield Finding(Level.NOTE, text, show_command(summary.most_attempts))
    if summary.tail is not None and summary.tail > _SLOW_TAIL:
        text = f"the last {1 - TAIL:.0%} of the rollouts took {summary.tail:.0%} of the step"
        yield Finding(Level.NOTE, f"{text}; the slowest was {summary.slowest}", f"group.straggler_after: {TAIL}")
    if summary.cache_hit is not None and summary.turns > 2 * summary.planned and summary.cache_hit < _LOW_CACHE_HIT:
        text = f"only {summary.cache_hit:.0%} of the prompt tokens were found in the prefix cache"
        yield Finding(Level.NOTE, text, "router.policy")


def _sessions(use: EngineUse | None, summary: StepSummary) -> Iterator[Finding]:
    """Describe whether more sessions would help, which requires engines with room for their calls."""
    spent = summary.spent
    if spent.total and spent.waiting / spent.total > _LONG_WAIT and not (use is not None and _has_queue(use)):
        text = f"rollouts spent {spent.waiting / spent.total:.0%} of their time waiting for an invoke"
        yield Finding(Level.NOTE, text, "runtime.max_sessions, runtime.invoke_per_s")


def engine_findings(use: EngineUse | None) -> Iterator[Finding]:
    """Describe whether the engines were too few or too many for the agents' calls."""
    if use is None:
        return
    if _has_queue(use) and use.needed is not None:
        ran = f"on average {count(use.engines, 'engine')} ran {use.running:.0f} requests and {use.waiting:.0f} waited"
        if use.needed == use.engines:
            yield Finding(Level.NOTE, f"{ran}, while others had room", "router.policy")
        else:
            text = f"engines were the bottleneck: {ran}; {use.needed} would run all of them at once"
            if use.kv_used is not None:
                text += f". {use.kv_used:.0%} of their KV caches was in use"
            yield Finding(Level.NOTE, text, "serving.servers")
    elif use.idle > _IDLE:
        text = f"engines had no request {use.idle:.0%} of the time: use fewer, or more sessions"
        yield Finding(Level.NOTE, text, "serving.servers, runtime.max_sessions")


def _has_queue(use: EngineUse) -> bool:
    return use.waiting > _LONG_QUEUE * use.running


def rate_findings(invokes: CallRate | None, stops: CallRate | None) -> Iterator[Finding]:
    """Describe the rate that the runtime granted for invokes and stops. None: no such call was refused."""
    for call, setting, rate in (("invoke", "runtime.invoke_per_s", invokes), ("stop", "runtime.stop_per_s", stops)):
        if rate is not None:
            text = f"the runtime refused {count(rate.refused, call)} in {rate.seconds:.0f} s"
            if rate.granted_per_s is None:
                text += "; they were retried"
            else:
                text += f" and granted {rate.granted_per_s:.1f} per second; a higher {setting} has no effect"
            yield Finding(Level.WARNING, text, setting)


def length_findings(report: StepReport) -> Iterator[Finding]:
    """Describe the lengths of rollouts that finished and of rollouts that were cut off."""
    if (bias := report.length_bias) is not None:
        done, cut = bias.finished, bias.cut_off
        finished = "none finished"
        if done.mean_s is not None:
            finished = (
                f"{done.rollouts} finished after {done.mean_s:.1f} s, {done.mean_sampled_tokens or 0:.0f} tokens and "
                f"{done.mean_turns or 0:.1f} turns on average"
            )
        text = f"{finished}; {cut.rollouts} were cut off after {cut.mean_s or 0:.1f} s and are left out"
        yield Finding(Level.NOTE, f"length: {text}", _LENGTH_ADVICE[bias.reason])
