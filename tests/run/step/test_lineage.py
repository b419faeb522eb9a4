"""A restarted trainer reuses rollouts of its own weights alone, however many trainers were killed before it."""

import asyncio
import contextlib
import json
from typing import Any

import pytest

from agent_wrapper.contract import RolloutRequest, lineage_key
from memory_store import MemoryStore
from rollout_backend.core.earlier_batches import batch_number, weights_before
from rollout_backend.core.lineage import Lineage
from rollout_backend.core.manifest import StepRequest
from rollout_backend.core.tasks import Task
from rollout_backend.errors import ManifestError, RunHeld
from rollout_backend.run.collect.manifest_store import ManifestStore
from rollout_backend.run.dispatch.call_queue import CallQueue
from rollout_backend.run.step.step import Step
from rollouts import make_rollout
from tests.simulation.clock import in_virtual_time
from virtual_run import virtual_config, virtual_services

CONFIG = virtual_config(collect={"list_interval_s": 1})


def train(global_step: int) -> int:
    return batch_number(global_step, validate=False, position=0)


def validate(global_step: int) -> int:
    return batch_number(global_step, validate=True, position=0)


class Agents:
    """Each result has as its reward the trainer that sampled it."""

    def __init__(self, store: MemoryStore, trainer: int) -> None:
        self.store = store
        self.trainer = trainer
        self.hang = asyncio.Event()

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        request = RolloutRequest.parse(json.loads(payload)["_rollout"])
        if not self.hang.is_set():
            names = ("run_id", "step", "task_id", "rollout_id", "attempt", "session_id")
            fields = {name: getattr(request, name) for name in names}
            done = make_rollout(**fields, started_at=0, finished_at=0, reward=float(self.trainer))
            self.store.objects[request.key] = done.encode()
        return b'{"status": "accepted"}'

    async def stop(self, session_id: str) -> None: ...

    def adopt(self, session_id: str, payload: Any) -> None: ...


async def run_trainer(
    store: MemoryStore, token: int, *steps: int, killed_in: int | None = None, **more: Any
) -> dict[int, int]:
    """Run steps with weights that are named by verl's version. Return the trainer that sampled each step."""
    agents, kept, sampled = Agents(store, token), store, {}
    manifests: Any = ManifestStore(kept, CONFIG.run_id, token)  # type: ignore[arg-type]
    services = virtual_services(CONFIG, store, agents, CallQueue(100, 100), manifests=manifests)
    for number in steps:
        tasks = tuple(Task(f"t{i}", {"q": f"{number}/{i}"}) for i in range(2))
        named = {"weights": f"m@{weights_before(number)}", **more}
        same = weights_before(number) == weights_before(steps[0])
        step = Step(StepRequest(number, tasks, CONFIG.sampling, same_weights=same, **named), services)
        if number == killed_in:
            agents.hang.set()
            asyncio.get_running_loop().call_later(10, step.early_end.abort, RunHeld("killed"))
        with contextlib.suppress(RunHeld):
            [by] = {int(rollout.reward or 0) for rollout in (await step.run()).rollouts}
            sampled[number] = by
    return sampled


FIRST = [train(101), train(102), validate(102), train(103), train(104), validate(104)]


@pytest.mark.parametrize(
    ("killed", "last", "sampled_by"),
    [
        ([], [train(103)], 1),
        ([], [validate(102)], 1),
        ([[train(101), train(102)]], [train(103)], 9),
        ([[train(101), train(102)]], [validate(102)], 9),
        ([[train(101)]], [train(103)], 9),
        ([[train(101)], [train(101)]], [train(101)], 1),
        ([[train(103)]], [train(101)], 1),
        ([[train(103)]], [train(103)], 1),
        ([[validate(102)]], [train(103)], 1),
        ([[train(101), train(102)], [validate(102)]], [train(103)], 9),
        ([[train(101), train(102), train(103)], [train(103)]], [train(103)], 2),
        ([[train(101), train(102), train(103)]], [train(103)], 2),
        ([[train(104)], [train(101), train(102)]], [train(104)], 9),
    ],
)
@in_virtual_time
async def test_a_step_is_reused_unless_a_trainer_in_between_has_trained_its_weights_again(killed, last, sampled_by):
    """The first trainer is number 1, the last one 9. Those in between are killed after their last step."""
    store = MemoryStore("")
    await run_trainer(store, 1, *FIRST)
    for token, steps in enumerate(killed, 2):
        await run_trainer(store, token, *steps)
    assert await run_trainer(store, 9, *last) == {last[0]: sampled_by}


@in_virtual_time
async def test_a_trainer_that_is_killed_in_its_first_step_has_trained_nothing():
    store = MemoryStore("")
    await run_trainer(store, 1, train(101), train(102))
    await run_trainer(store, 2, train(102), killed_in=train(102))
    assert await run_trainer(store, 3, train(102)) == {train(102): 1}


@in_virtual_time
async def test_weights_that_the_backend_counts_have_one_name_for_ever():
    """Steps of an evaluation, or with several adapters, are reused by the third trainer as by the second."""
    store = MemoryStore("")
    await run_trainer(store, 1, 0, 1, 2, weights_are_counted=True, weights="m@")
    await run_trainer(store, 2, 0, weights_are_counted=True, weights="m@+math@1")
    assert await run_trainer(store, 3, 2, weights_are_counted=True, weights="m@") == {2: 1}


@in_virtual_time
async def test_a_trainer_that_is_on_no_record_may_have_trained_anything():
    """As after a copy of the run's manifests to another bucket without their record."""
    store = MemoryStore("")
    await run_trainer(store, 1, train(101))
    del store.objects[lineage_key("", CONFIG.run_id)]
    assert await run_trainer(store, 2, train(101)) == {train(101): 2}


@in_virtual_time
async def test_the_record_has_each_trainer_once_and_fences_off_earlier_ones():
    store = MemoryStore("")
    kept: Any = store
    first, second = (ManifestStore(kept, CONFIG.run_id, token) for token in (3, 7))
    await asyncio.gather(first.begin(5, "a"), first.begin(5, "a"))
    lineages = await asyncio.gather(second.begin(4, "b"), second.begin(6, "b"))
    assert {(start.fencing_token, start.step) for start in lineages[0].starts} in ({(3, 5), (7, 4)}, {(3, 5), (7, 6)})
    assert lineages[0] == lineages[1] == Lineage.parse(json.loads(store.objects[lineage_key("", CONFIG.run_id)]))
    with pytest.raises(RunHeld):
        await ManifestStore(kept, CONFIG.run_id, 3).begin(5, "a")
    store.objects[lineage_key("", CONFIG.run_id)] = b"{"
    with pytest.raises(ManifestError):
        await ManifestStore(kept, CONFIG.run_id, 8).begin(5, "a")
