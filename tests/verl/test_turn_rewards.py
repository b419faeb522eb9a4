"""Rewards of turns reach verl's token-level rewards: their places, their sums, and the gradient they lead to."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from agent_wrapper.contract import Rollout, Segment
from rollout_backend.core import rows as rows_module
from rollout_backend.core.rows import Row, Rows, rows_of
from rollout_backend.verl.advantage import needs_row_uids, row_uid, takes_rows_for_rollouts
from rollout_backend.verl.row_formats import legacy_batch, v1_fields
from rollouts import make_rollout, segment_of


def segment(*turns: int, unknown: tuple[int, ...] = ()) -> Segment:
    """Return a segment in which each turn has one given token and `turns[i]` sampled ones."""
    return segment_of([piece for n in turns for piece in (("given", 1), ("sampled", n))], unknown=unknown)


def rollout(reward: float, turn_rewards: tuple[float, ...], *segments: Segment) -> Rollout:
    return make_rollout("task.0", reward=reward, turn_rewards=turn_rewards, segments=segments)


def scores(rows: Rows) -> list[list[float]]:
    return [row.scores.tolist() for row in rows]


# --- places -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_turns", "source", "length", "expected", "moved"),
    [
        ((0.5, -0.25), segment(2, 3), 9, [0, 0.5, 0, 0, 0, 0.75], 0),
        ((), segment(2, 3), 9, [0, 0, 0, 0, 0, 1.0], 0),
        ((0.5, 0.25, -4.0), segment(2, 2, 2), 5, [0, 0.5, 0, 0, 0.25 - 4.0 + 1.0], 1),
        ((0.5, 0.25, -4.0), segment(2, 2, 2), 4, [0, 0.5, 0, 0.25 - 4.0 + 1.0], 1),
        ((0.5, -0.25, 0.125), segment(2, 1, 1, unknown=(4,)), 9, [0, 0.25, 0, 0, 0, 1.125], 1),
        ((0.5, -0.25), segment(1, 2, unknown=(1,)), 9, [0, 0, 0.5, 1.0 - 0.25], 1),
    ],
    ids=["last token", "none", "cut turn", "cut in a turn", "no logprob", "no logprob in the first turn"],
)
def test_a_turns_reward_is_on_its_last_token_that_is_trained_or_on_the_one_before(
    of_turns, source, length, expected, moved
) -> None:
    rows = rows_of(rollout(1.0, of_turns, source), 1, length)
    assert scores(rows) == [expected]
    assert rows.moved_turn_rewards == moved


def test_each_row_adds_up_to_the_return_of_its_rollout() -> None:
    found = rollout(1.0, (0.5, -0.25, 0.125), segment(1, 1), segment(2))
    assert scores(rows_of(found, 1, 9)) == [[0.5, 0, -0.25 + 1.0 + 0.125], [0, 0.125 + 1.0 + 0.25]]
    assert scores(rows_of(found, 1, 9, own_turns_only=True)) == [[0.5, 0, 0.75], [0, 1.125]]


@pytest.mark.parametrize(("alone", "expected"), [(False, [[1.5], [1.5]]), (True, [[1.0], [1.5]])])
def test_the_reward_of_a_segment_without_a_row_is_on_the_last_token_of_the_rollout(alone, expected) -> None:
    lost = segment(1, unknown=(1,))
    rows = rows_of(rollout(1.0, (0.0, 0.5, 0.0), segment(1), lost, segment(1)), 1, 9, own_turns_only=alone)
    assert scores(rows) == expected
    assert rows.moved_turn_rewards == 1


def test_a_small_reward_of_another_row_is_not_lost_beside_a_large_one() -> None:
    first, _ = scores(rows_of(rollout(0.0, (2.0**80, 0.0, 0.125), segment(1, 1), segment(1)), 1, 9))
    assert first == [2.0**80, 0, 0.125]


def test_a_legacy_row_has_the_rewards_of_the_segments_without_one() -> None:
    found = rows_of(rollout(1.0, (0.5, 0.25, -0.125), segment(1, 1), segment(3)), 1, 6)
    made = legacy_batch([found, None], 1, 6, 0)
    assert made.tensors["rm_scores"].tolist() == [[0, 0, -0.125 + 0.75 + 1.0, 0, 0, 0], [0] * 6]
    assert (made.moved_turn_rewards, made.left_out_tokens) == (2, 2)


numbers = st.sampled_from([0.0, 0.5, -0.25, 2.0])
segments = st.builds(
    lambda turns, unknown: segment(*turns, unknown=tuple(unknown)),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.sets(st.integers(0, 12), max_size=4),
)


@given(st.lists(segments, min_size=1, max_size=4), numbers, st.data(), st.integers(1, 4), st.integers(1, 9))
def test_every_reward_is_trained_once_and_each_that_moved_is_counted(found, reward, data, p, r) -> None:
    turns = sum(len(each.turns) for each in found)
    of_turns = tuple(data.draw(st.lists(numbers, min_size=turns, max_size=turns)))
    source = rollout(reward, of_turns, *found)
    total = reward + math.fsum(of_turns)

    whole, alone = rows_of(source, p, r), rows_of(source, p, r, own_turns_only=True)
    for row in (*whole, *alone):
        assert not row.scores[row.response_mask == 0].any(), "no estimator sees a reward on a masked token"
    assert [row.scores.sum() for row in whole] == [total] * len(whole)
    if alone:
        assert sum(row.scores.sum() for row in alone) - (len(alone) - 1) * reward == total
        own = sum(row.turn_rewards for row in whole)
        assert own + whole.moved_turn_rewards == sum(each != 0 for each in of_turns)
        assert alone.moved_turn_rewards == whole.moved_turn_rewards


def test_the_work_is_linear_in_the_segments(monkeypatch) -> None:
    added = []
    monkeypatch.setattr(
        rows_module, "math", SimpleNamespace(fsum=lambda values: added.extend(given := [*values]) or math.fsum(given))
    )
    found = rows_of(rollout(1.0, (0.5,) * 200, *[segment(1)] * 200), 1, 9)
    assert scores(found) == [[101.0]] * 200
    assert len(added) <= 5 * 200


# --- advantages and gradient, computed by hand ------------------------------------------------------------

# Returns: 1 + 0.5 - 0.25 + 0.25 = 1.5; 0 + 0.5 = 0.5; 1. Mean 1, standard deviation 0.5.
GROUP = [
    rollout(1.0, (0.5, -0.25, 0.25), segment(2, 1), segment(1)),
    rollout(0.0, (0.5,), segment(2)),
    rollout(1.0, (), segment(1, 1)),
]


def batch(adv_estimator: str) -> tuple[DataProto, list[str]]:
    """Return the group as the v1 trainer reads it."""
    own = takes_rows_for_rollouts(adv_estimator)
    rows: list[tuple[str, Row]] = []
    for session, each in enumerate(GROUP):
        rows += [(row_uid("a", session, row.index), row) for row in rows_of(each, 1, 9, own_turns_only=own)]
    keys = [key for key, _ in rows]
    data = list_of_dict_to_tensordict([v1_fields(row, {}) for _, row in rows])
    padded = data.select("response_mask", "rm_scores").to_padded_tensor(0.0)
    padded["token_level_rewards"] = padded["rm_scores"]
    padded["values"] = torch.zeros_like(padded["rm_scores"])
    uids = keys if needs_row_uids(adv_estimator) else ["a"] * len(keys)
    return DataProto(batch=padded, non_tensor_batch={"uid": np.array(uids, dtype=object)}), keys


def with_advantages(adv_estimator: str) -> DataProto:
    data, keys = batch(adv_estimator)
    return compute_advantage_for_multi_trajectories(
        data, batch_keys=keys, adv_estimator=adv_estimator, config=AlgoConfig(gamma=1.0)
    )


@pytest.mark.parametrize(
    ("adv_estimator", "expected"),
    [
        ("grpo", [1.0, 1.0, -1.0, 0.0]),
        ("grpo_skip_missing", [1.0, 1.0, -1.0, 0.0]),
        ("rloo_skip_missing", [0.75, 0.75, -0.75, 0.0]),  # 1.5 - 0.75, 0.5 - 1.25, 1 - 1
    ],
)
def test_a_sessions_advantage_is_of_its_whole_return(adv_estimator: str, expected: list[float]) -> None:
    found = with_advantages(adv_estimator)
    assert found.batch["advantages"][:, 0].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("adv_estimator", ["gae", "reinforce_plus_plus"])
def test_a_token_has_the_rewards_that_follow_it_in_its_row(adv_estimator: str) -> None:
    data = with_advantages(adv_estimator)
    returns = [
        found[mask.bool()].tolist()
        for found, mask in zip(data.batch["returns"], data.batch["response_mask"], strict=True)
    ]
    assert returns == [[1.25, 1.25, 0.75], [1.25], [0.5, 0.5], [1.0, 1.0]]
