"""Session ids of tasks with a container."""

from rollout_backend.core.harbor import CONTAINER_FIELD, container_key
from rollout_backend.core.tasks import Task
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
