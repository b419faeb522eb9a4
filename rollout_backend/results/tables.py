"""Define the tables of a run: their columns, and the rows that each step adds.

Invariants:

- The schema, never the values, determines the types, so an empty table has the same columns as a full one.
- Missing values are null. A missing reward is never 0.
- Changing a column's meaning or type, or removing it, requires a new `TABLES_VERSION`. Adding a column does not.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from agent_wrapper.contract import Outcome, Rollout
from rollout_backend.results.cost import Prices
from rollout_backend.results.records import ResultSummary, RolloutRecord, replies_by_turn, text_of
from rollout_backend.results.run_data import StepData
from rollout_backend.results.step_report import StepReport
from rollout_backend.results.summary import mean

TABLES_VERSION = 1

Row = dict[str, Any]

_TYPES = {
    "text": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "time": pa.timestamp("us", tz="UTC"),
}


def _schema(**columns: str) -> pa.Schema:
    """Return a schema of columns whose types are keys of `_TYPES`; a trailing `?` marks a nullable column."""
    return pa.schema([pa.field(name, _TYPES[kind.rstrip("?")], kind.endswith("?")) for name, kind in columns.items()])


_ROLLOUT = {"run_id": "text", "step": "int", "rollout_id": "text", "task_id": "text"}
_OF_RESULT = {
    name: "float?" if name in ("reward", "model_s", "agent_s") else "int?" for name in ResultSummary.model_fields
}
_OF_REPORT = (
    "attempts",
    "sessions_opened",
    "resumed",
    "reattached",
    "duplicates",
    "late",
    "refused",
    "unarchived",
    "surplus",
    "sampled_tokens",
    "given_tokens",
    "broken_histories",
)

# A row may omit nullable columns.
SCHEMAS: dict[str, pa.Schema] = {
    "rollouts": _schema(
        **_ROLLOUT,
        outcome="text?",
        reason="text?",
        message="text?",
        trainable="bool",
        group_usable="bool",
        is_replacement="bool",
        attempts="int",
        session_id="text?",
        log="text?",
        planned_at="time",
        invoked_at="time?",
        accepted_at="time?",
        result_at="time?",
        settled_at="time?",
        **_OF_RESULT,
        stored="bool",
        extras="text?",
        traceback="text?",
    ),
    "turns": _schema(
        **_ROLLOUT,
        number="int",
        segment="int",
        turn="int",
        prompt_tokens="int",
        sampled_tokens="int",
        cached_tokens="int?",
        finish_reason="text",
        weight_version="text?",
        last_weight_version="text?",
        seconds="float",
        mean_logprob="float?",
        reasoning="text?",
        text="text?",
        tool_calls="text?",
    ),
    "events": _schema(
        **_ROLLOUT,
        number="int",
        event="text",
        at="time?",
        after_s="float?",
        session_id="text?",
        outcome="text?",
        reason="text?",
        message="text?",
    ),
    "steps": _schema(
        run_id="text",
        step="int",
        name="text",
        validates="bool",
        planned="int",
        **dict.fromkeys(Outcome, "int"),
        trainable="int",
        mean_reward="float?",
        groups="int?",
        groups_usable="int?",
        groups_with_spread="int?",
        **dict.fromkeys(_OF_REPORT, "int?"),
        mean_staleness="float?",
        max_staleness="int?",
        seconds="float?",
        deadline_reached="bool?",
        cost_dollars="float?",
        wasted_dollars="float?",
    ),
}


def rollout_row(run_id: str, record: RolloutRecord, rollout: Rollout | None) -> Row:
    """Return the row of a planned rollout. `rollout` is its stored result."""
    failure = rollout.failure if rollout is not None else None
    return {
        **_key(run_id, record),
        **_ending(record),
        "trainable": record.trainable,
        "group_usable": record.group_usable,
        "is_replacement": record.is_replacement,
        "attempts": record.attempts,
        "session_id": record.session_ids[-1] if record.session_ids else None,
        "log": record.log,
        **{f"{name}_at": _time(at) for name, at in _times(record).items()},
        **(record.result.model_dump() if record.result is not None else {}),
        "stored": rollout is not None,
        "extras": json.dumps(rollout.extras, ensure_ascii=False) if rollout is not None else None,
        "traceback": failure.traceback if failure is not None else None,
    }


def turn_rows(run_id: str, record: RolloutRecord, rollout: Rollout) -> Iterator[Row]:
    """Yield a row for each model call of a rollout whose tokens are known."""
    numbers = itertools.count()
    for number, segment in enumerate(rollout.segments):
        replies = replies_by_turn(segment)
        for i, turn in enumerate(segment.turns):
            versions = turn.weight_versions
            logprobs = [each for each in segment.logprobs[turn.start : turn.end] if not math.isnan(each)]
            yield {
                **_key(run_id, record),
                "number": next(numbers),
                "segment": number,
                "turn": i,
                "prompt_tokens": turn.start,
                "sampled_tokens": turn.end - turn.start,
                "cached_tokens": turn.cached_tokens,
                "finish_reason": turn.finish_reason,
                "weight_version": versions[0].version if versions else None,
                "last_weight_version": versions[-1].version if versions else None,
                "seconds": turn.seconds,
                "mean_logprob": mean(logprobs),
                **(_texts(segment.messages[replies[i]]) if i in replies else {}),
            }


def event_rows(run_id: str, record: RolloutRecord) -> Iterator[Row]:
    """Yield the events of a planned rollout, in order."""
    at = _times(record)
    events: list[Row] = [{"event": "planned"}]
    events += [{"event": "session", "session_id": each} for each in record.session_ids]
    events += [{"event": name} for name in ("invoked", "accepted", "result") if at[name] is not None]
    if record.outcome is not None:
        events.append({"event": "settled", **_ending(record)})
    for number, event in enumerate(events):
        when = at.get(event["event"])
        times = {"at": _time(when), "after_s": when - record.planned_at} if when is not None else {}
        yield {**_key(run_id, record), "number": number, **times, **event}


def step_row(run_id: str, step: StepData, prices: Prices | None = None) -> Row:
    """Return the row of a step. Values that only its report has are null if it was interrupted."""
    cost = step.cost(prices)
    ended = [record.outcome for record in step.records]
    rewards = [
        record.reward for record in step.records if record.outcome is Outcome.COMPLETED and record.reward is not None
    ]
    return {
        "run_id": run_id,
        "step": step.step,
        "name": step.name,
        "validates": step.validates,
        "planned": len(step.records),
        **{outcome: ended.count(outcome) for outcome in Outcome},
        "trainable": sum(record.trainable for record in step.records),
        "mean_reward": mean(rewards),
        **(_of_report(step.report) if step.report is not None else {}),
        "cost_dollars": cost.total if cost is not None else None,
        "wasted_dollars": cost.wasted if cost is not None else None,
    }


def _of_report(report: StepReport) -> Row:
    return {
        **{name: getattr(report, name) for name in _OF_REPORT},
        "groups": len(report.groups),
        "groups_usable": sum(group.usable for group in report.groups),
        "groups_with_spread": sum(group.has_spread for group in report.groups),
        "mean_staleness": report.staleness.mean if report.staleness is not None else None,
        "max_staleness": report.staleness.max if report.staleness is not None else None,
        "seconds": report.seconds,
        "deadline_reached": report.deadline_reached,
    }


def _texts(reply: Mapping[str, Any]) -> Row:
    calls = reply.get("tool_calls")
    return {
        "reasoning": text_of(reply.get("reasoning_content")) or None,
        "text": text_of(reply.get("content")),
        "tool_calls": json.dumps(calls, ensure_ascii=False) if calls else None,
    }


def _key(run_id: str, record: RolloutRecord) -> Row:
    return {
        "run_id": run_id,
        "step": record.step,
        "rollout_id": record.rollout_id,
        "task_id": record.task_id,
    }


def _ending(record: RolloutRecord) -> Row:
    return {"outcome": record.outcome, "reason": record.reason or None, "message": record.message or None}


def _times(record: RolloutRecord) -> dict[str, float | None]:
    return {
        "planned": record.planned_at,
        "invoked": record.invoked_at,
        "accepted": record.accepted_at,
        "result": record.result_at,
        "settled": record.settled_at,
    }


def _time(seconds: float | None) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if seconds is not None else None
