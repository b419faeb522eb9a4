"""A trainer that keeps the pace trains every group within the age limit; ages count updates of the weights."""

import pytest

from rollout_backend.core.adapter import number_of
from rollout_backend.core.staleness import AbandonedWeights, groups_to_await, staleness
from rollouts import make_rollout, make_segment, make_turn


@pytest.mark.parametrize(
    ("unfinished", "step", "expected"),
    [
        ([], 5, 0),
        ([5, 5, 5], 5, 0),  # may be trained in step 7: four places
        ([4, 4], 5, 0),  # in step 6
        ([4, 4, 4], 5, 1),
        ([3], 5, 1),  # in this step or never
        ([4, 4, 4, 3], 5, 2),  # one of step 3, and one of step 4
        ([3, 4, 5], 5, 1),
        ([2, 2, 2], 5, 0),  # too old already
    ],
)
def test_a_step_awaits_the_groups_without_a_place_in_a_later_batch(unfinished, step, expected):
    assert groups_to_await(unfinished, step, max_staleness=2, batch_size=2) == expected


def test_staleness_is_weighted_by_tokens():
    assert staleness([(3, 4.0, 4), (1, 2.0, 1)], current=4) == {
        "rollouts/staleness/mean": 0.5,
        "rollouts/staleness/max": 3.0,
    }
    assert staleness([], current=4) == {}


def test_batches_of_one_step_train_the_same_version():
    assert groups_to_await([3, 3], 5, max_staleness=2, batch_size=4, left_in_step=2) == 0
    assert groups_to_await([3, 3], 5, max_staleness=2, batch_size=4, left_in_step=0) == 2


def test_the_age_of_abandoned_weights_is_the_way_back_and_forth():
    abandoned = AbandonedWeights((5,), last=8)
    assert [abandoned.equivalent(version) for version in (3, 5, 6, 8, 9)] == [3, 5, 4, 2, 9]


def relabelled(abandoned, *versions):
    turns = [make_turn(3 + i, 4 + i, version) for i, version in enumerate(versions)]
    segment = make_segment(3, len(versions)).model_copy(update={"turns": tuple(turns)})
    [again] = abandoned.relabel(make_rollout(segments=[segment])).segments
    return [span.version for turn in again.turns for span in turn.weight_versions]


def test_only_what_the_killed_trainer_sampled_was_sampled_by_abandoned_weights():
    abandoned = AbandonedWeights((5,), last=8)
    assert relabelled(abandoned, "4", "5", "6", "7") == ["4", "5", "4", "3"]
    assert relabelled(abandoned, "4", "7", "5", "6") == ["4", "3", "5", "6"], "the version falls at the restart"
    assert relabelled(abandoned, "default", "6") == ["default", "4"]
    assert relabelled(AbandonedWeights((5,), 5), "5", "6") == ["5", "6"], "killed before it trained anything"


def test_across_several_restarts_the_way_leads_back_to_the_earliest_checkpoint():
    """The first trainer served up to 9. The second resumed from 6 and the third, this one, from 8."""
    abandoned = AbandonedWeights((6, 8), last=9)
    assert [abandoned.equivalent(version) for version in (5, 7, 8, 9, 10)] == [5, 5, 4, 3, 10]
    assert [abandoned.equivalent(version, restarts=1) for version in (7, 8, 9)] == [7, 8, 7]
    assert [abandoned.equivalent(version, restarts=2) for version in (8, 9)] == [8, 9]
    assert relabelled(abandoned, "9", "7", "9") == ["3", "7", "7"], "sampled by the first and the second trainer"
    assert relabelled(abandoned, "9", "7", "9", "8", "9") == ["3", "7", "7", "8", "9"]
    assert relabelled(AbandonedWeights((6, 3), last=9), "9", "4") == ["-3", "4"], "the second one began at 6"


def test_labels_of_adapters_keep_their_name():
    assert [number_of(label) for label in ("3", "math@3", "math@-1", "0")] == [3, 3, -1, 0]
    assert {number_of(label) for label in ("default", "math@x", "", "1_0", " 3", "\u0663", "9" * 5000)} == {None}
    rollout = make_rollout(segments=(make_segment(version="math@4"),))
    relabelled = AbandonedWeights((3,), last=4).relabel(rollout)
    assert [span.version for span in relabelled.segments[0].turns[0].weight_versions] == ["math@2"]
