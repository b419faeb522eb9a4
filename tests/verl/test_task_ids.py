"""Tasks are named after the rows of the dataset, the same in each step."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rollout_backend.core.tasks import Task
from rollout_backend.verl.dataset import TaskIds, task_id_of

UID = "5c0d2f8e-95d4-4f9c-b4ae-0d0a5b0a3a11"


def test_a_row_has_its_own_id_in_each_step():
    row, payload = {"task_id": "sum-6-5"}, {"question": "6 + 5"}
    assert [TaskIds().of({**row, "uid": uid}, payload) for uid in "ab"] == ["sum-6-5"] * 2
    assert TaskIds().of({"task_id": np.int64(7), "uid": UID}, payload) == "7"


def test_a_row_without_an_id_is_named_after_its_payload():
    names = [
        task_id_of({"uid": uid}, payload) for uid in "ab" for payload in ({"a": 1, "b": [2]}, {"a": 2, "b": [2]})
    ]
    assert names[:2] == names[2:]
    assert names[0] != names[1]
    assert task_id_of({}, {"b": [2], "a": 1}) == names[0]


@pytest.mark.parametrize("name", ["math/algebra 1", "_x", "ä", "", "-", "a" * 300, "." * 90])
def test_any_name_becomes_an_id_and_different_names_stay_different(name):
    ids = [task_id_of({"task_id": each}, {}) for each in (name, f"{name} ", f"{name}/")]
    assert len({*ids}) == 3
    for each in ids:
        Task(f"{each}-10000-greedy", {})  # raises where that is no id


def test_a_row_that_a_batch_has_twice_gets_another_id_for_the_second():
    ids = TaskIds()
    rows = [{"task_id": name, "uid": uid} for uid, name in enumerate(["a", "a-2", "a", "a"])]
    found = [ids.of(row, {}) for row in itertools.chain(rows, rows)]
    assert found == ["a", "a-2", "a-3", "a-4"] * 2
