"""The spans of a rollout follow from its record and its result."""

import functools
import re
from pathlib import Path

import pytest

from agent_wrapper.contract import Outcome
from agent_wrapper.contract.keys import trace_ids
from rollout_backend.base import tracing
from rollout_backend.base.tracing import Span
from rollout_backend.run.accounts.records import ResultSummary
from rollout_backend.run.accounts.rollout_spans import Delivery, rollout_spans
from rollouts import make_rollout
from run_folders import make_record

record = functools.partial(
    make_record, "task-a.0", message="a private text", trainable=True, session_ids=("s1",), planned_at=10.0,
    invoked_at=12.0, accepted_at=13.0, result_at=31.0, settled_at=31.0,
)  # fmt: skip


def times(spans: list[Span]) -> dict[str, tuple[float, float]]:
    return {span.name: (span.start, span.end) for span in spans}


@pytest.mark.parametrize("announced_at", [30.0, None])
def test_a_finished_rollout_has_a_span_of_each_phase(announced_at):
    rollout = make_rollout(started_at=13.5, finished_at=29.0)
    result = record(result=ResultSummary.of(rollout))
    spans = list(rollout_spans("run", result, rollout, Delivery(announced_at, fetch_s=0.5)))
    expected = {
        "rollout": (10.0, 31.0),
        "wait for a session": (10.0, 12.0),
        "invoke": (12.0, 13.0),
        "invoke_agent": (13.5, 29.0),
        "publish": (29.0, announced_at or 30.5),
        "queue": (30.0, 30.5),
        "fetch": (30.5, 31.0),
    }
    if announced_at is None:
        del expected["queue"]
    assert times(spans) == expected
    trace_id, root = trace_ids("run", 0, "task-a.0")
    assert {span.trace_id for span in spans} == {trace_id}
    assert [span.parent_id for span in spans] == [None] + [root] * (len(spans) - 1)
    assert len({span.span_id for span in spans}) == len(spans)
    assert spans[0].attributes == {
        "rl.run_id": "run", "rl.step": 0, "rl.task_id": "task-a", "rl.rollout_id": "task-a.0", "rl.attempts": 1,
        "rl.outcome": "completed", "rl.trainable": True, "rl.group_usable": True, "rl.replacement": False,
        "rl.reward": 1.0, "rl.segments": 1, "rl.turns": 1, "rl.sampled_tokens": 2, "rl.weight_versions": ["7"],
    }  # fmt: skip
    assert not any(span.error for span in spans)


def test_a_lost_rollout_has_an_error_and_no_private_text():
    lost = record(outcome=Outcome.TIMED_OUT, reason="no_result", trainable=False, result_at=None)
    spans = list(rollout_spans("run", lost))
    assert times(spans)["invoke_agent"] == (13.0, 31.0)
    assert spans[0].error == "timed_out: no_result"
    assert "private" not in repr(spans)


def test_phases_that_did_not_happen_have_no_span():
    cancelled = record(outcome=Outcome.CANCELLED, reason="not_started", invoked_at=None, accepted_at=None)
    assert times(list(rollout_spans("run", cancelled))) == {
        "rollout": (10.0, 31.0),
        "wait for a session": (10.0, 31.0),
    }
    refused = record(outcome=Outcome.INFRA_ERROR, reason="throttled", accepted_at=None)
    assert [span.name for span in rollout_spans("run", refused)] == ["rollout", "wait for a session", "invoke"]
    assert list(rollout_spans("run", record(outcome=None, settled_at=None))) == []


def test_a_clock_of_the_container_that_is_ahead_makes_no_negative_span():
    ahead = make_rollout(started_at=113.5, finished_at=129.0)
    assert all(s.start <= s.end for s in rollout_spans("run", record(), ahead, Delivery(30.0, 0.5)))


def test_the_page_lists_each_attribute_and_span():
    page = (Path(__file__).parents[3] / "docs" / "tracing.md").read_text()
    named = {value for name, value in vars(tracing).items() if name.isupper() and isinstance(value, str)}
    assert set(re.findall(r"`((?:rl|gen_ai|error)\.[a-z_.]+)`", page)) == named
    rollout = make_rollout()
    made = rollout_spans("run", record(result=ResultSummary.of(rollout)), rollout, Delivery(30.0, 0.5))
    rows = re.findall(r"^\| `([\w ]+)` \| (\w+) \|.*\| `rollout-(\w+)` \|$", page, flags=re.M)
    assert {(name, kind) for name, kind, by in rows if by == "manager"} == {(each.name, each.kind) for each in made}
