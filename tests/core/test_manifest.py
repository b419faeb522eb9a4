"""The ids of rollouts and sessions in a step's plan."""

import itertools

from rollout_backend.core.harbor import CONTAINER_FIELD, container_key
from rollout_backend.core.tasks import Task, rollout_id
from rollouts import make_manifest

TASK = Task("a", {CONTAINER_FIELD: {"image": "one"}})


def test_a_replacement_is_a_session_of_the_tasks_container():
    manifest = make_manifest("r", TASK)
    manifest.session_id("a.0", 1)
    grown = manifest.with_rollout("a", manifest.next_rollout("a"))
    assert len(sessions := grown.open_sessions()) == 3
    assert all(each.endswith(f"-{container_key(TASK.payload)}") for each in sessions)


def test_a_step_that_an_older_version_planned_keeps_its_session_ids():
    manifest = make_manifest("r", TASK)
    old = manifest.model_copy(update={"tasks": (manifest.tasks[0].model_copy(update={"container": ""}),)})
    assert make_manifest("r", TASK, before=old).session_id("a.0", 1) == old.session_id("a.0", 1)


def test_tasks_of_any_names_share_no_rollout():
    tasks = ("a", "a.g1", "a.0", "a.0.g1", "a.g1.0", "0", "0.0", "g1")
    ids = [rollout_id(*each) for each in itertools.product(tasks, range(12), range(12))]
    assert len(set(ids)) == len(ids)


def test_a_step_planned_again_shares_no_rollout_with_the_one_before():
    first = make_manifest("r", Task("a.g1", {"q": 1}))
    second = make_manifest("r", Task("a", {"q": 2}), before=first)
    third = make_manifest("r", Task("a.g2", {"q": 3}), before=second)
    ids = [each for manifest in (first, second, third) for each in manifest.tasks[0].rollouts]
    assert len(set(ids)) == 6
    assert second.next_rollout("a") == "a.2.g1"
    assert third.next_rollout("a.g2") == "a.g2.2.g2"


def test_session_ids_cannot_be_known_without_the_manifest():
    one, other = make_manifest("r", TASK), make_manifest("r", TASK)
    assert one.session_id("a.0", 1) != other.session_id("a.0", 1), "the same step of the same run"
    assert len(one.nonce) == 32
