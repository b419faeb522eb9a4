"""Prompts of a restarted asynchronous trainer are assigned to the steps that ran them."""

import itertools

from agent_wrapper.contract import MAX_STEP
from rollout_backend.core.earlier_batches import (
    EarlierBatches,
    Origin,
    batch_number,
    describe_batch,
    global_step_of,
    order_of,
    validates,
)
from rollout_backend.core.manifest import Execution, Manifest, PlannedTask
from rollouts import make_rollout, make_segment


def number(global_step: int, position: int = 0) -> int:
    return batch_number(global_step, validate=False, position=position)


def manifest(global_step: int, *digests: str, position: int = 0) -> Manifest:
    tasks = tuple(PlannedTask(task_id=f"task-{i}", digest=digest, rollouts=()) for i, digest in enumerate(digests))
    step = number(global_step, position)
    return Manifest(run_id="run", step=step, written_at=0.0, deadline=1.0, tasks=tasks)


def fresh(*digests: str) -> list[tuple[str, Origin | None]]:
    return [(digest, None) for digest in digests]


def test_a_prompt_of_the_checkpoint_returns_to_its_own_step() -> None:
    """The same content in a later step belongs to another prompt."""
    earlier = EarlierBatches([manifest(6, "a", "b")], checkpoint=5, max_staleness=None)
    prompts = [("a", Origin(number(4), "task-7")), ("b", Origin(number(5, 1), "task-0"))]
    assert earlier.assign(prompts) == [number(4), number(5, 1)]
    assert earlier.assign(fresh("a", "b")) == [number(6), number(6)]


def test_prompts_are_found_in_batches_that_are_cut_differently() -> None:
    steps = [manifest(7, "c", "d"), manifest(6, "a", "b"), manifest(6, "x", position=1)]
    earlier = EarlierBatches(steps, checkpoint=5, max_staleness=None)
    assert earlier.assign(fresh("a", "b", "c")) == [number(6), number(6), number(7)]
    assert earlier.assign(fresh("d", "e")) == [None, None], "a step is begun once"
    assert earlier.steps == {number(6), number(7), number(6, 1)}


def test_each_group_is_assigned_once() -> None:
    earlier = EarlierBatches([manifest(6, "a"), manifest(7, "a")], checkpoint=5, max_staleness=None)
    assert earlier.assign(fresh("a", "a", "a")) == [number(6), number(7), None]


def test_a_step_that_began_with_abandoned_weights_is_as_old_as_the_way_to_them() -> None:
    earlier = EarlierBatches([manifest(step, "a") for step in (6, 7, 8)], checkpoint=5, max_staleness=2)
    assert [earlier.requested_in(number(step)) for step in (4, 6, 7, 8)] == [4, 6, 5, 4]
    assert earlier.can_resume(number(7), 7)
    assert not earlier.can_resume(number(8), 8), "four updates: two back to the checkpoint, two forward"


def test_a_rollout_that_was_held_across_two_restarts_is_as_old_as_the_whole_way() -> None:
    """The first trainer planned step 98, and the second one, from 95, resumed it with new attempts. This one resumes
    from 100."""
    kept = manifest(98, "a").model_copy(
        update={"executions": (Execution(fencing_token=1, last_attempt=2),), "fencing_token": 2, "attempts_before": 2}
    )
    earlier = EarlierBatches([kept, manifest(104, "b")], 100, max_staleness=8, restarts=[(1, 1), (2, 95)])
    assert earlier.requested_in(number(98)) == 94, "97, 95 and 100 are 7 versions"
    assert earlier.can_resume(number(98), 102)
    assert not earlier.can_resume(number(98), 103)
    by_attempt = {}
    for attempt in (1, 2, 3, 4):
        rollout = make_rollout(attempt=attempt, segments=(make_segment(version="97"),))
        [segment] = earlier.relabel(number(98), rollout).segments
        by_attempt[attempt] = segment.turns[0].weight_versions[0].version
    assert by_attempt == {1: "93", 2: "93", 3: "97", 4: "97"}, "the last attempt is this trainer's"


def test_an_origin_is_kept_in_a_tag() -> None:
    assert Origin.read({"status": "running", **Origin(3000, "task-1").as_tag()}) == Origin(3000, "task-1")
    assert Origin.read({"status": "running"}) is None


def test_hundreds_of_batches_of_a_step_have_different_numbers() -> None:
    """verl requests a batch for each poll that finds filtered groups, while the first batch still runs."""
    positions = (0, 1, 499, 500, 1999, 2000, 2499)
    steps = (1, 2, 999, 9_999, 10_000, 59_999, 60_000, 60_004, 100_000, 10_000_000)
    batches = [*itertools.product(steps, (False, True), (*positions, 2500, 999_999))]
    numbers = [batch_number(*batch) for batch in batches]
    assert len({*numbers}) == len(numbers)
    assert max(numbers) <= MAX_STEP
    assert sorted(numbers, key=order_of) == numbers, "a table has them in the order of the training"
    assert [(global_step_of(number), validates(number)) for number in numbers] == [batch[:2] for batch in batches]
    assert [describe_batch(batch_number(3, *batch))[0] for batch in ((False, 0), (True, 0), (True, 512))] == [
        "3",
        "3 validation",
        "3 validation.512",
    ]
