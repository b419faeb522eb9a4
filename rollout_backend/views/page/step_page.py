"""Build the page of one step: all values that its template shows, and the conversations that its viewer shows."""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from agent_wrapper.contract import Outcome, Rollout, Segment, Turn, readable
from rollout_backend.base.addresses import is_loopback
from rollout_backend.config import RolloutConfig
from rollout_backend.core.reasons import documented_at, what_to_do
from rollout_backend.model.rendering.token_bytes import TokenText
from rollout_backend.run.accounts.archive import RunArchive
from rollout_backend.run.accounts.findings import Level, judge
from rollout_backend.run.accounts.records import ResultSummary, RolloutRecord, replies_by_turn, text_of
from rollout_backend.run.accounts.summary import (
    PHASES,
    TaskRewards,
    duration,
    mean,
    percentiles,
    rewards_by_task,
    seconds_of,
)
from rollout_backend.views.comparison import shown_comparison
from rollout_backend.views.page import charts
from rollout_backend.views.run_data import RunData, StepData, changed_settings, read_rollout

_SLOWEST = 5
_MAX_MESSAGE = 2000
OUTCOMES: tuple[Outcome | None, ...] = (*Outcome, None)
MAX_CONVERSATIONS, MAX_CHARACTERS = 300, 1_500_000
_MAX_TEXT, _MAX_MESSAGES, _EXTREMES, _MAX_FAILURES = 12_000, 120, 5, 100


def step_context(
    run: RunData,
    step: StepData,
    *,
    against: RunData | None = None,
    text: TokenText | None = None,
    steps_link: str = "",
) -> dict[str, Any]:
    """Return the values for `step.html`. `steps_link` is the link to the page of all steps."""
    records = step.read_records()
    summary, tasks = step.summary, rewards_by_task(records)
    place = {record.rollout_id: number for number, record in enumerate(records)}
    talks, report = embedded(run, records, tasks, text), step.read_report()
    verdict = judge(report, summary) if report is not None else None
    first = verdict.findings[0] if verdict is not None else None
    other = matching_step(against, step) if against is not None else None
    return {
        "run": run,
        "step": step,
        "report": report,
        "verdict": verdict,
        "began": datetime.fromtimestamp(summary.began, UTC),
        "steps_link": steps_link,
        "summary": summary,
        "cost": step.cost(run.prices),
        # The badge shows a good verdict, which needs no advice.
        "findings": [each for each in step.overview.findings if each != first or each.level is not Level.NOTE],
        "heatmap": charts.heatmap(tasks, place),
        "timeline": charts.timeline(records, place),
        "phases": summary.spent.parts,
        "slowest": _slowest(records),
        "activity": charts.activity(records),
        "throughput": charts.throughput(records),
        "durations": charts.histogram(charts.durations(records)),
        "lengths": charts.histogram([each.result.sampled_tokens for each in records if each.result]),
        "scatter": charts.scatter(records),
        "turns": mean([each.result.turns for each in records if each.result]),
        "figures": [*_figures(records)],
        "rows": mean([each.result.segments for each in records if each.result]),
        "failures": summary.failures,
        "what_to_do": what_to_do,
        "documented_at": documented_at,
        "other_step": other,
        **shown_comparison([step], against, [other] if other is not None else []),
        "runtime": _runtime(run.config) if run.config is not None else "",
        "settings": [*changed_settings(run.config)] if run.config is not None else None,
        "outcomes": OUTCOMES,
        "with_text": text is not None,
        "embedded": len(talks),
        "data": _data(run, step, records, talks),
    }


def _runtime(config: RolloutConfig) -> str:
    """Name the runtime. The AgentCore of a demo is a server on this machine."""
    emulated = is_loopback(urlsplit(getattr(config.runtime, "endpoint_url", None) or "").hostname or "")
    return f"{config.runtime.kind}{', emulated' if emulated else ''}"


def matching_step(run: RunData, step: StepData) -> StepData:
    """Return the step of another run with the same number, or its last step of the same kind."""
    alike = [each for each in run.steps if each.validates == step.validates] or run.steps
    return next((each for each in alike if each.step == step.step), alike[-1])


def _figures(records: Iterable[RolloutRecord]) -> Iterator[tuple[str, str | None, tuple[float, ...]]]:
    """Yield each figure of the results: its name, its description, and the median, p95 and maximum of its values."""
    results = [record.result for record in records if record.result is not None]
    for name, field in ResultSummary.model_fields.items():
        if values := [value for each in results if (value := getattr(each, name)) is not None]:
            yield name, field.description, percentiles(values, 50, 95, 100)


def _slowest(
    records: Sequence[RolloutRecord],
) -> list[tuple[RolloutRecord, float, list[tuple[str, str, float, float]]]]:
    timed = [(record, duration(record) or 0.0) for record in records]
    found = sorted(timed, key=lambda each: -each[1])[:_SLOWEST]
    return [(record, seconds, seconds_of(record).parts) for record, seconds in found if seconds > 0]


def _numbered(values: Sequence[str]) -> tuple[list[str], list[int]]:
    """Return the distinct values in the order of first use, and the index of each value among them."""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return list(numbers), [numbers[value] for value in values]


def _data(run: RunData, step: StepData, records: Sequence[RolloutRecord], talks: dict[str, Any]) -> dict[str, Any]:
    """Return the page's data: one column of values per field, and each repeated value once."""
    tasks, task = _numbered([record.task_id for record in records])
    reasons, reason = _numbered([record.reason for record in records])
    messages, message = _numbered([record.message[:_MAX_MESSAGE] for record in records])
    spent = [seconds_of(record) for record in records]
    times = [duration(record) for record in records]
    results = [record.result for record in records]
    return {
        "runDir": str(run.run_dir),
        "outcomes": [str(outcome or "not settled") for outcome in OUTCOMES],
        "id": [record.rollout_id for record in records],
        "task": task,
        "outcome": [OUTCOMES.index(record.outcome) for record in records],
        "reason": reason,
        "message": message,
        "reward": [record.reward for record in records],
        "seconds": [None if seconds is None else round(seconds, 1) for seconds in times],
        "tokens": [result.sampled_tokens if result else None for result in results],
        "turns": [result.turns if result else None for result in results],
        "segments": [result.segments if result else None for result in results],
        "attempts": [record.attempts for record in records],
        # While the step runs, its groups may still become usable.
        "trained": [None if step.runs else int(record.trained) for record in records],
        "phases": list(PHASES.values()),
        "spent": [[round(seconds, 1) for seconds in vars(each).values()] for each in spent],
        "logs": {
            record.rollout_id: [record.log or "", ", ".join(record.session_ids)]
            for record in records
            if record.failed or record.rollout_id in talks
        },
        "tasks": tasks,
        "reasons": reasons,
        "messages": messages,
        "advice": {each: what_to_do(each) for each in reasons if each},
        "documented": {each: documented_at(each) for each in reasons if each},
        "talks": talks,
    }


def embedded(
    run: RunData, records: Sequence[RolloutRecord], tasks: Sequence[TaskRewards], text: TokenText | None
) -> dict[str, Any]:
    """Return conversations by rollout id, within the limits: failures, extremes, then a sample of all tasks."""
    found: dict[str, Any] = {}
    left, archive = MAX_CHARACTERS, RunArchive(run.run_dir)
    for record in _ranked(records, tasks):
        if left <= 0 or len(found) == MAX_CONVERSATIONS:
            break
        if record.rollout_id in found or record.result is None:
            continue
        rollout = read_rollout(archive, record)
        if rollout is not None:
            found[record.rollout_id] = value = conversation(rollout, text)
            left -= len(json.dumps(value))
    return found


def _ranked(records: Sequence[RolloutRecord], tasks: Sequence[TaskRewards]) -> Iterator[RolloutRecord]:
    yield from [record for record in records if record.failed and record.result is not None][:_MAX_FAILURES]
    known = [record for record in records if record.result is not None]
    measures: tuple[Callable[[RolloutRecord], float], ...] = (
        lambda each: each.reward if each.reward is not None else math.inf,
        lambda each: each.result.sampled_tokens if each.result is not None else 0,
        lambda each: duration(each) or 0.0,
    )
    for measure in measures:
        ordered = sorted(known, key=measure)
        yield from (*ordered[:_EXTREMES], *ordered[-_EXTREMES:])
    # Yield one rollout per reward, to compare right and wrong ones.
    for task in tasks:
        yield from {record.reward: record for record in task.records if record.result is not None}.values()
    yield from known


def conversation(rollout: Rollout, text: TokenText | None) -> dict[str, Any]:
    """Convert a rollout to plain values. Long strings are cut and marked."""
    failure = rollout.failure
    numbers = itertools.count()
    return {
        "extras": _short(json.dumps(rollout.extras, ensure_ascii=False)) if rollout.extras else "",
        "traceback": _short(failure.traceback or "") if failure is not None else "",
        "parts": [_segment(segment, text, numbers) for segment in rollout.segments],
    }


def _segment(segment: Segment, text: TokenText | None, numbers: Iterator[int]) -> dict[str, Any]:
    turns = [{"number": next(numbers), **_turn(segment, turn, text)} for turn in segment.turns]
    turn_of = {message: turns[turn] for turn, message in replies_by_turn(segment).items()}
    items = [_message(message, turn_of.get(i)) for i, message in enumerate(segment.messages)]
    if not turn_of:
        items += [{"role": "assistant", "text": "", "turn": turn} for turn in turns]
    return {"why": readable(segment.split_reason), "tokens": len(segment.token_ids), "items": _bounded(items)}


def _bounded(items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    found = list(items)
    if len(found) <= _MAX_MESSAGES:
        return found
    half = _MAX_MESSAGES // 2
    left_out = f"… {len(found) - 2 * half} messages are left out here: rollout show"
    return [*found[:half], {"role": "report", "text": left_out}, *found[-half:]]


def _message(message: Mapping[str, Any], turn: dict[str, Any] | None = None) -> dict[str, Any]:
    out: dict[str, Any] = {
        "role": readable(str(message.get("role"))),
        "text": _short(text_of(message.get("content"))),
    }
    calls = message.get("tool_calls")
    if isinstance(calls, Sequence):
        out["calls"] = [_short(_call(call)) for call in calls]
    if turn is not None:
        out["turn"] = turn
    return out


def _call(call: object) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return json.dumps(call)
    return f"{function.get('name')}({function.get('arguments')})"


def _turn(segment: Segment, turn: Turn, text: TokenText | None) -> dict[str, Any]:
    """Convert a turn. `tokens` and `percent` are its texts and their probabilities, -1 if unknown."""
    ids, logprobs = segment.token_ids[turn.start : turn.end], segment.logprobs[turn.start : turn.end]
    percent = [-1 if math.isnan(each) else min(100, round(100 * math.exp(min(each, 0.0)))) for each in logprobs]
    pieces = text.pieces(ids[: _MAX_TEXT // 4]) if text is not None else None
    return {
        "count": len(ids),
        "seconds": round(turn.seconds, 2),
        "finish": readable(turn.finish_reason),
        "weights": readable(", ".join(dict.fromkeys(span.version for span in turn.weight_versions))),
        "cached": turn.cached_tokens,
        "prompt": turn.start,
        "tokens": pieces,
        "percent": percent[: _MAX_TEXT // 4] if pieces is not None else [],
    }


def _short(text: str) -> str:
    text = readable(text)
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[:_MAX_TEXT]}\n… {len(text) - _MAX_TEXT:,} characters more: rollout show"
