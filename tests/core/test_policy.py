import dataclasses
import math
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_backend.config import GroupConfig
from rollout_backend.core.policy import (
    GroupPolicy,
    GroupState,
    Stragglers,
    percentile_95,
)


def group(task_id="a", needed=2, open_=(), trainable=0, lost=0, replacements=0):
    return GroupState(task_id, needed, dict.fromkeys(open_), trainable, lost, replacements)


def test_a_doomed_group_is_cancelled_and_the_others_continue():
    decision = GroupPolicy(GroupConfig()).decide(
        [group(needed=2, open_=["a.3"], lost=3), group("b", open_=["b.0", "b.1"])]
    )
    assert (decision.replace, decision.cancel) == ({}, {"a.3": "group_doomed"})


def test_strict_needs_every_planned_rollout():
    policies = ({"size": 1}, {"size": 4}, {"size": 4, "min_viable": 3}, {"size": 4, "policy": "strict"})
    assert [GroupConfig(**each).needed for each in policies] == [1, 2, 3, 4]
    decision = GroupPolicy(GroupConfig()).decide([group(needed=4, open_=["a.1"], trainable=2, lost=1)])
    assert decision.cancel == {"a.1": "group_doomed"}


def test_replace_plans_one_rollout_for_each_lost_one_up_to_its_limit():
    policy = GroupPolicy(GroupConfig(policy="replace", max_replacements=2))
    assert policy.decide([group(trainable=3, lost=1)]).replace == {"a": 1}
    assert policy.decide([group(trainable=1, lost=3, replacements=1)]).replace == {"a": 1}
    assert policy.decide([group(trainable=3, lost=1, replacements=1)]).replace == {}
    others = GroupPolicy(GroupConfig(policy="min_viable", max_replacements=2))
    assert others.decide([group(trainable=3, lost=1)]).replace == {}
    assert policy.decide([group(needed=4, lost=5)]).replace == {}, "no replacement would save it"


def test_the_target_ends_a_step_early_and_counts_only_complete_groups():
    policy = GroupPolicy(GroupConfig(target_groups=1))
    half = group("b", trainable=2, open_=["b.2"])
    assert policy.decide([half, group(open_=["a.0", "a.1"])]).cancel == {}
    assert policy.decide([half, group(trainable=2)]).cancel == {"b.2": "target_reached"}


def test_an_oversampled_group_needs_only_its_size():
    found = dataclasses.replace(group(open_=["a.3", "a.4"], trainable=2), enough=3, spare=2)
    assert not GroupPolicy(GroupConfig()).decide([found]).cancel
    enough = dataclasses.replace(found, trainable=3)
    decision = GroupPolicy(GroupConfig()).decide([enough])
    assert decision.cancel == {"a.3": "target_reached", "a.4": "target_reached"}
    assert "b.0" in GroupPolicy(GroupConfig(target_groups=1)).decide([enough, group("b", open_=["b.0"])]).cancel


def test_oversampled_rollouts_are_used_before_replacements():
    policy = GroupPolicy(GroupConfig(policy="replace", max_replacements=2))
    lost_one = dataclasses.replace(group(open_=["a.1", "a.2"], lost=1), enough=2, spare=1)
    assert policy.decide([lost_one]).replace == {}
    assert policy.decide([dataclasses.replace(lost_one, open=("a.2",), lost=2)]).replace == {"a": 1}
    assert policy.decide([dataclasses.replace(lost_one, trainable=2, lost=2)]).replace == {}, "it has enough"


@given(st.lists(st.floats(0, 1000), min_size=2, max_size=50))
def test_the_percentile_is_that_of_the_standard_library(seconds):
    assert percentile_95(sorted(seconds)) == pytest.approx(
        statistics.quantiles(seconds, n=20, method="inclusive")[18]
    )


@given(
    st.lists(st.tuples(st.sampled_from(["start", "deliver", "end"]), st.integers(0, 9)), max_size=40),
    st.floats(0.1, 1.0),
)
def test_stragglers_equal_a_full_recount(events, after):
    """Each event takes one second."""
    running, took = {}, []
    entries: dict[str, Any] = {}
    stragglers = Stragglers(GroupConfig(straggler_after=after, straggler_factor=1.5), entries)
    for now, (event, number) in enumerate(events):
        rollout_id = str(number)
        if event == "start":
            running[rollout_id] = float(now)
            entries[rollout_id] = SimpleNamespace(began=float(now))
            stragglers.started(rollout_id, float(now))
        elif rollout_id in running:
            began = running.pop(rollout_id)
            del entries[rollout_id]
            if event == "deliver":
                took.append(now - began)
                stragglers.delivered(now - began)
        enough = took and len(took) >= after * (len(took) + len(running))
        allowed = 1.5 * percentile_95(sorted(took)) if enough else None
        expected = {rid for rid, began in running.items() if allowed is not None and began + allowed <= now}
        due, following = stragglers.due(now, len(running))
        assert set(due) == expected
        later = (
            [began + allowed for rid, began in running.items() if rid not in expected] if allowed is not None else []
        )
        assert following == min(later, default=math.inf)
        for each in due:  # tested again, as a rollout is of which S3 has given no answer
            stragglers.started(each, running[each])
