"""How two runs differ."""

import json
import re

import pytest

from rollout_backend.errors import ConfigError
from rollout_backend.views.comparison import Entry, compare_runs
from rollout_backend.views.page.step_page import step_context
from rollout_backend.views.page.training_page import training_context
from rollout_backend.views.run_data import read_run
from rollout_backend.views.terminal.view import print_comparison, reward_sentence
from run_folders import write_run, write_training


def test_the_difference_of_rewards_is_paired_by_task(tmp_path):
    """Differences 1 to 5: their mean is 3, its standard error 0.7071, and Student's t with 4 degrees 2.776."""
    easy = {f"t{i}": [100.0 * i, 100.0 * i + 1] for i in range(1, 6)}
    hard = {f"t{i}": [101.0 * i, 101.0 * i + 1, None] for i in range(1, 6)}
    found = compare_runs(write_run(tmp_path / "a", easy), write_run(tmp_path / "b", hard))
    assert found.reward is not None
    assert (found.reward.tasks, found.reward.first, found.reward.second) == (5, 300.5, 303.5)
    assert found.reward.change.value == 3
    assert found.reward.change.margin == pytest.approx(1.9632, abs=0.002)
    assert reward_sentence(found.reward).startswith(
        "mean reward 300.500 and 303.500 over 5 tasks of both runs: +3.000"
    )
    assert reward_sentence(found.reward).endswith("is more than chance")
    assert [task.task_id for task in found.rewards] == ["t5", "t4", "t3", "t2", "t1"]
    outcomes = {each.name: (each.first, each.second) for each in found.outcomes}
    assert outcomes == {"planned": (10, 15), "completed": (10, 10), "infra_error: throttled": (None, 5)}


def test_only_tasks_of_both_runs_are_compared(tmp_path):
    first = write_run(tmp_path / "a", {"x": [0.0], "y": [1.0], "lost": [1.0]})
    second = write_run(tmp_path / "b", {"x": [0.0], "z": [0.0], "lost": [None]})
    found = compare_runs(first, second)
    assert (found.only_first, found.only_second, found.changed_tasks) == (2, 1, 0)
    assert found.reward is not None
    assert (found.reward.tasks, found.reward.change.margin) == (1, None)
    assert "too few tasks to say whether that is chance" in reward_sentence(found.reward)
    other = compare_runs(first, write_run(tmp_path / "c", {"x": [1.0]}, payload="another question"))
    assert (other.changed_tasks, other.reward) == (1, None)
    assert "no task has a reward in both runs" in reward_sentence(other.reward)


def test_trainings_are_compared_without_their_validations(tmp_path):
    """Row 0 of the training's file and row 0 of the validation's are both called `t0`."""
    first = write_training(tmp_path / "a", (1000, [0.0, 1.0]), (1500, [0.5] * 3), (2000, [0.0, 1.0]))
    second = write_training(tmp_path / "b", (1000, [0.0, 1.0]), (2500, [1.0] * 3))
    for found in (compare_runs(first, second), compare_runs(second, first)):
        assert (found.changed_tasks, found.reward.tasks, found.reward.change.value) == (0, 2, 0.0)
    runs = read_run(first), read_run(second)
    page = training_context(runs[0], {}, runs[1])
    assert (page["reward_change"].tasks, page["reward_change"].change.value) == (2, 0.0)
    page = step_context(runs[0], runs[0].steps[1], against=runs[1])
    assert page["other_step"].name == "2 validation"
    assert (page["reward_change"].first, page["reward_change"].second) == (1.0, 0.5)
    only = write_training(tmp_path / "c", (500, [0.25]))
    assert compare_runs(only, only).reward.first == 0.25


def test_settings_and_lengths_are_printed_side_by_side(tmp_path, screen):
    rewards = {f"t{i}": [0.0, 1.0] for i in range(12)}
    first = write_run(tmp_path / "a", rewards, sampling={"temperature": 1.0})
    second = write_run(tmp_path / "b", rewards, sampling={"temperature": 0.5}, group={"size": 2})
    found = compare_runs(first, second)
    assert {each.name: (each.first, each.second) for each in found.settings} == {
        "sampling.temperature": (1.0, 0.5),
        "group.size": (1, 2),
    }
    assert found.versions == ()
    print_comparison(screen.console, found)
    for words in ("sampling.temperature", "sampled tokens", "10.0", "over 12 tasks of both runs: equal on each task"):
        assert words in screen.text
    assert json.loads(found.model_dump_json())["measures"][0]["tasks"] == 12


def test_a_digest_is_cut_where_it_is_printed(tmp_path, screen):
    first, second = write_run(tmp_path / "a", {"x": [0.0]}), write_run(tmp_path / "b", {"x": [0.0]})
    digests = Entry(name="agent sha256", first="1e9d5f507ca8" + "0" * 52, second="0c6deaf42c12" + "0" * 52)
    found = compare_runs(first, second).model_copy(update={"versions": (digests,)})
    print_comparison(screen.console, found)
    assert re.search(r"agent sha256 +1e9d5f507ca8 +0c6deaf42c12\s", screen.text)


def test_a_run_without_records_cannot_be_compared(tmp_path):
    first = write_run(tmp_path / "a", {"x": [0.0]})
    with pytest.raises(ConfigError, match="b has no records of rollouts"):
        compare_runs(first, write_run(tmp_path / "b", {"x": [0.0]}, state=None))
