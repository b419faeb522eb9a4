"""What to look at first in a step: its verdict, and what cost it time or data. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from rollout_backend.core.engine_use import EngineUse
from rollout_backend.core.formats import count
from rollout_backend.results.records import RolloutRecord
from rollout_backend.results.step_report import CallRate, LengthBias, StepReport
from rollout_backend.results.summary import TAIL, StepSummary, duration, tail_share
from rollout_backend.results.verdict import Finding, Level, count_failures, failure_findings, judge, show_command

_SLOW_TAIL, _LONG_WAIT, _LOW_CACHE_HIT = 0.25, 0.25, 0.3
_LONG_QUEUE = 0.25  # of the requests that run
_IDLE = 0.5  # part of the time
_LISTED = 5
_LAST_REQUESTS = 2  # of a session that is being stopped
_LENGTH_ADVICE = {  # by why rollouts were cut off
    "straggler": "group.straggler_factor: raise it",
    "target_reached": "group.oversample, group.target_groups",
    "collection_deadline": "timeouts.collection_s: raise it",
    "agent_deadline": "timeouts.agent_s: raise it",
    "": "",  # in reports of older versions
}


def findings_of(
    report: StepReport | None, records: Sequence[RolloutRecord], summary: StepSummary, *, runs: bool = False
) -> tuple[Finding, ...]:
    """Return the findings on a step, most important first. `report` is None if the step `runs` or was interrupted."""
    accounts = failure_findings(count_failures(records), len(records)) if runs else _accounts(report, records)
    found = [*accounts, *_records(records, summary)]
    found += _sessions(report.engine_use if report is not None else None, summary)
    return tuple(sorted(found, key=lambda finding: finding.level))


def _accounts(report: StepReport | None, records: Sequence[RolloutRecord]) -> Iterator[Finding]:
    if report is None:
        settled = sum(record.outcome is not None for record in records)
        when = f"when {settled} of {count(len(records), 'rollout')} had ended"
        text = f"the step was interrupted {when if settled < len(records) else 'after its last rollout'}"
        yield Finding(Level.BAD, text, "run_id: start the run again under the same one")
        return
    yield from judge(report, records).findings
    if not report.reconciles:
        yield Finding(Level.BAD, "the ledger does not reconcile")
    if report.deadline_reached:
        yield Finding(Level.WARNING, "the step ended at its deadline", "timeouts.collection_s: raise it")
    yield from engine_findings(report.engine_use)
    if report.unarchived:
        text = f"{count(report.unarchived, 'result')} could not be written to the run's folder; they are in S3"
        yield Finding(Level.WARNING, text, "output_dir: free space on its disk")
    yield from rate_findings(report)
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
    if report.left_out_replies:
        text = f"{count(report.left_out_replies, 'model call')} left out of training"
        yield Finding(Level.NOTE, text, "training.leave_out")
    for rollout_id, tokens in sorted(report.runaways.items())[:_LISTED]:
        text = f"{rollout_id} sampled {tokens:,} tokens and was refused more"
        yield Finding(Level.WARNING, text, "gateway.session_tokens")
    still = sorted(name for name, requests in report.heard_after_stop.items() if requests > _LAST_REQUESTS)
    if still:
        text = f"{count(len(still), 'session')} ran on after the stop, and may be billed: "
        text += ", ".join(still[:_LISTED])
        yield Finding(Level.WARNING, text, "stop them at the runtime")
    if report.split_reasons:
        reasons = ", ".join(f"{number} {why}" for why, number in sorted(report.split_reasons.items()))
        yield Finding(Level.NOTE, f"conversations opened {count(report.broken_histories, 'more row')}: {reasons}")
    if (bias := report.length_bias) is not None:
        yield Finding(Level.NOTE, f"length: {describe_bias(bias)}", _LENGTH_ADVICE[bias.reason])
    if report.staleness is not None and report.staleness.max:
        text = f"tokens come from weights up to {count(report.staleness.max, 'version')} old"
        yield Finding(Level.NOTE, f"{text}, {report.staleness.mean:.2f} on average")


def _records(records: Sequence[RolloutRecord], summary: StepSummary) -> Iterator[Finding]:
    again = [record for record in records if record.attempts > 1]
    if again:
        extra = sum(record.attempts - 1 for record in again)
        text = f"{count(len(again), 'rollout')} needed more than one attempt, {count(extra, 'session')} in addition"
        yield Finding(Level.NOTE, text, show_command(max(again, key=lambda record: record.attempts).rollout_id))
    tail = tail_share(records)
    if tail is not None and tail > _SLOW_TAIL:
        slowest = max(records, key=lambda record: duration(record) or 0.0)
        text = f"the last {1 - TAIL:.0%} of the rollouts took {tail:.0%} of the step"
        yield Finding(Level.NOTE, f"{text}; the slowest was {slowest.rollout_id}", f"group.straggler_after: {TAIL}")
    turns = sum(record.result.turns for record in records if record.result is not None)
    if summary.cache_hit is not None and turns > 2 * len(records) and summary.cache_hit < _LOW_CACHE_HIT:
        text = f"only {summary.cache_hit:.0%} of the prompt tokens were found in the prefix cache"
        yield Finding(Level.NOTE, text, "router.policy")


def _sessions(use: EngineUse | None, summary: StepSummary) -> Iterator[Finding]:
    """More sessions help only if engines have room for their calls."""
    spent = summary.spent
    if spent.total and spent.waiting / spent.total > _LONG_WAIT and not (use is not None and _has_queue(use)):
        text = f"rollouts spent {spent.waiting / spent.total:.0%} of their time waiting for an invoke"
        yield Finding(Level.NOTE, text, "runtime.max_sessions, runtime.invoke_per_s")


def engine_findings(use: EngineUse | None) -> Iterator[Finding]:
    """Say whether the engines were too few for the agents' calls, or had too few of them."""
    if use is None:
        return
    if _has_queue(use) and use.needed is not None:
        ran = f"on average {count(use.engines, 'engine')} ran {use.running:.0f} requests and {use.waiting:.0f} waited"
        if use.needed == use.engines:
            yield Finding(Level.NOTE, f"{ran}, while others had room", "router.policy")
        else:
            text = f"engines were the bottleneck: {ran}; {use.needed} would run all of them at once"
            yield Finding(Level.NOTE, f"{text}{_kv(use)}", "serving.servers")
    elif use.idle > _IDLE:
        text = f"engines had no request {use.idle:.0%} of the time: use fewer, or more sessions"
        yield Finding(Level.NOTE, text, "serving.servers, runtime.max_sessions")


def _has_queue(use: EngineUse) -> bool:
    return use.waiting > _LONG_QUEUE * use.running


def _kv(use: EngineUse) -> str:
    return f". {use.kv_used:.0%} of their KV caches was in use" if use.kv_used is not None else ""


class CallRates(Protocol):
    """Has the rates that a runtime granted. A rate is None unless the runtime refused a call."""

    @property
    def invoke_rate(self) -> CallRate | None: ...
    @property
    def stop_rate(self) -> CallRate | None: ...


def rate_findings(report: CallRates) -> Iterator[Finding]:
    for calls, setting, rate in call_rates(report):
        yield Finding(Level.WARNING, describe_rate(calls, setting, rate), setting)


def call_rates(report: CallRates) -> Iterator[tuple[str, str, CallRate]]:
    """Yield the kinds of call that the runtime refused: a name, the setting of their rate, and what was granted."""
    if report.invoke_rate is not None:
        yield "invokes", "runtime.invoke_per_s", report.invoke_rate
    if report.stop_rate is not None:
        yield "stops", "runtime.stop_per_s", report.stop_rate


def describe_rate(calls: str, setting: str, rate: CallRate) -> str:
    """Say what the runtime granted of one kind of call."""
    refused = f"the runtime refused {rate.refused} {calls} in {rate.seconds:.0f} s"
    if rate.granted_per_s is None:
        return f"{refused}; they were retried"
    return f"{refused} and granted {rate.granted_per_s:.1f} per second; a higher {setting} has no effect"


def describe_bias(bias: LengthBias) -> str:
    """Say how long the rollouts that finished and those that were cut off were."""
    done, cut = bias.finished, bias.cut_off
    finished = "none finished"
    if done.mean_s is not None:
        finished = (
            f"{done.rollouts} finished after {done.mean_s:.1f} s, {done.mean_sampled_tokens or 0:.0f} tokens and "
            f"{done.mean_turns or 0:.1f} turns on average"
        )
    return f"{finished}; {cut.rollouts} were cut off after {cut.mean_s or 0:.1f} s and are left out"
