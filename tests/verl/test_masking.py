"""Masked episodes have no row, so they are in no gradient and no baseline, and each is counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from agent_wrapper.contract import Failure, Outcome, Rollout
from rollout_backend.core.rows import Rows, mask_group, rows_of
from rollout_backend.core.tasks import Task
from rollout_backend.run.accounts.step_report import GroupResult
from rollout_backend.verl.manager import CloudAgentLoopManager
from rollout_backend.verl.metrics import as_metrics, count_group
from rollouts import make_rollout, make_segment

WHOLE, CUT_REPLY, CUT_ROW, FAILED = "whole", "last_reply_cut", "row_cut", "agent_error"
ALL = (CUT_REPLY, CUT_ROW, FAILED)


def rollout(kind: str = WHOLE, reward: float = 1.0) -> Rollout:
    if kind == FAILED:
        failure = Failure(reason="agent_failure", message="x")
        return make_rollout(outcome=Outcome.AGENT_ERROR, reward=reward, failure=failure)
    whole = make_segment(2, 3)
    segment = make_segment(2, 9) if kind == CUT_ROW else whole
    if kind == CUT_REPLY:
        segment = whole.model_copy(update={"turns": [replace(whole.turns[0], finish_reason="length")]})
    return make_rollout(reward=reward, segments=[whole, segment])


def masked(kinds: list[str], masks: tuple[Any, ...], needed: int = 2) -> list[Rows]:
    rollouts = [rollout(kind) for kind in kinds]
    return mask_group(rollouts, [rows_of(each, 4, 6) for each in rollouts], masks, needed)


@pytest.mark.parametrize("mask", ALL)
def test_each_mask_leaves_out_its_rollouts_alone(mask: str) -> None:
    kinds = [WHOLE, WHOLE, *ALL]
    found = masked(kinds, (mask,))
    assert [rows.masked for rows in found] == [mask if kind == mask else None for kind in kinds]
    assert [len(rows) == 0 for rows in found] == [kind == mask for kind in kinds]


def test_a_reply_that_was_cut_and_continued_is_not_masked() -> None:
    cut, whole = rollout(CUT_REPLY).segments[-1], make_segment(2, 3)
    continued = make_rollout(segments=[cut, whole])
    assert not mask_group([continued], [rows_of(continued, 4, 6)], (CUT_REPLY,), 1)[0].masked


def test_a_group_with_too_few_others_has_no_rows() -> None:
    assert masked([WHOLE, CUT_ROW, FAILED], ALL) == []
    assert len(masked([WHOLE, WHOLE, FAILED], ALL)) == 3
    assert masked([WHOLE, WHOLE, FAILED], ALL, needed=3) == [], "strict"
    assert len(masked([WHOLE], ALL)) == 1, "nothing is masked, so the policy of the step decides"
    assert masked([FAILED], ALL) == []


def test_masked_rollouts_are_counted_and_the_counts_add_up() -> None:
    kinds = [WHOLE, WHOLE, CUT_REPLY, CUT_ROW, CUT_ROW]
    counts: Counter[str] = Counter()
    for of_group in ([*kinds], [WHOLE, FAILED]):
        rollouts = tuple(
            rollout(kind).model_copy(update={"rollout_id": f"task.{i}"}) for i, kind in enumerate(of_group)
        )
        made = mask_group(rollouts, [rows_of(each, 4, 6) for each in rollouts], ALL, 2)
        counts.update(count_group(GroupResult(Task("task", {}), rollouts, True, len(rollouts)), made))
    found = {key: value for key, value in as_metrics(counts, trained=2).items() if value}
    assert found == {
        "rollouts/planned/sum": 7,
        "rollouts/trained/sum": 2,
        "rollouts/left_out/sum": 5,
        "rollouts/left_out/masked/sum": 3,
        "rollouts/left_out_by_reason/masked/last_reply_cut/sum": 1,
        "rollouts/left_out_by_reason/masked/row_cut/sum": 2,
        "rollouts/left_out/group_dropped/sum": 2,
        "rollouts/groups_dropped/sum": 1,
    }


def test_validation_has_the_rollouts_of_an_unusable_group() -> None:
    manager = object.__new__(CloudAgentLoopManager)
    manager._vision = manager._experts = None
    manager._lengths = 4, 6
    manager.settings = SimpleNamespace(training=SimpleNamespace(mask=ALL), group=SimpleNamespace(needed=2))
    group = GroupResult(Task("task", {}), (rollout(CUT_REPLY),), usable=False, planned=2)
    assert [len(rows) for rows in manager._rows_of_group(group, validate=True)] == [2]
    assert manager._rows_of_group(group, validate=False) == []
