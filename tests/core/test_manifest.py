"""Session ids of tasks with a container."""

from agent_wrapper.contract import Sampling
from rollout_backend.core.harbor import CONTAINER_FIELD, container_key
from rollout_backend.core.manifest import Manifest
from rollout_backend.core.tasks import Task

TASK = Task("a", {CONTAINER_FIELD: {"image": "one"}})


def plan(before: Manifest | None = None) -> Manifest:
    return Manifest.plan("r", 0, [(TASK, 2, Sampling())], now=0, deadline=1, before=before)


def test_a_replacement_is_a_session_of_the_tasks_container():
    manifest = plan()
    manifest.session_id("a.0", 1)
    grown = manifest.with_rollout("a", manifest.next_rollout("a"))
    assert len(sessions := grown.open_sessions()) == 3
    assert all(each.endswith(f"-{container_key(TASK.payload)}") for each in sessions)


def test_a_step_that_an_older_version_planned_keeps_its_session_ids():
    manifest = plan()
    old = manifest.model_copy(update={"tasks": (manifest.tasks[0].model_copy(update={"container": ""}),)})
    assert plan(before=old).session_id("a.0", 1) == old.session_id("a.0", 1)
