"""Select the rollouts whose conversations a report includes, and convert them to plain values for its viewer."""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from agent_wrapper.contract import Rollout, Segment, Turn, readable
from rollout_backend.results.archive import RunArchive
from rollout_backend.results.page.token_text import TokenText
from rollout_backend.results.records import RolloutRecord, replies_by_turn, text_of
from rollout_backend.results.run_data import RunData, read_rollout
from rollout_backend.results.summary import TaskRewards, duration

MAX_CONVERSATIONS, MAX_CHARACTERS = 300, 1_500_000
_MAX_TEXT, _MAX_MESSAGES, _EXTREMES, _MAX_FAILURES = 12_000, 120, 5, 100


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
    for task in tasks:  # one rollout per reward, so that right and wrong ones can be compared
        yield from {record.reward: record for record in task.records if record.result is not None}.values()
    yield from known


def conversation(rollout: Rollout, text: TokenText | None) -> dict[str, Any]:
    """Convert a rollout to plain values. Long texts are cut and marked."""
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
