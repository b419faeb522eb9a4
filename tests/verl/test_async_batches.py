"""The batches of an asynchronous trainer become steps, and those of a killed trainer are resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from agent_wrapper.contract import Sampling
from rollout_backend.config import RolloutConfig
from rollout_backend.core.earlier_batches import Origin, batch_number
from rollout_backend.core.lineage import Lineage, TrainerStart
from rollout_backend.core.manifest import Manifest, PlannedTask, digest_of
from rollout_backend.core.tasks import Task
from rollout_backend.verl import async_batches
from rollout_backend.verl.async_batches import AsyncBatches, StepNumbers

CONFIG = RolloutConfig.parse(
    {
        "run_id": "run",
        "model": {"path": Path("model")},
        "storage": {"bucket": "bucket"},
        "runtime": {"kind": "http", "url": "http://agents"},
        "group": {"size": 2},
    }
)


def number(step: int, position: int = 0, validate: bool = False) -> int:
    return batch_number(step, validate, position)


def request(uid: str, step: int) -> tuple[dict[str, Any], Task]:
    return {"uid": uid, "global_steps": step}, Task(f"new-{uid}", {"q": uid}, 2, Sampling())


def manifest(step: int, *uids: str) -> Manifest:
    digests = [digest_of(request(uid, 0)[1], 2, Sampling()) for uid in uids]
    tasks = tuple(PlannedTask(task_id=f"old-{i}", digest=each, rollouts=()) for i, each in enumerate(digests))
    return Manifest(run_id="run", step=step, written_at=0.0, deadline=1.0, tasks=tasks)


def batches(
    monkeypatch: pytest.MonkeyPatch,
    *manifests: Manifest,
    mode: str = "auto",
    starts: Mapping[int, int] | None = None,
    **origins: Origin,
) -> AsyncBatches:
    """`starts` has the global step at which each earlier trainer began, by its fencing token."""
    began = tuple(TrainerStart(fencing_token=token, step=number(at)) for token, at in (starts or {}).items())
    monkeypatch.setattr(async_batches, "read_origins", lambda: origins)
    manager: Any = SimpleNamespace(
        manifests_from=lambda step: [each for each in manifests if each.step >= step],
        begin_at=lambda step: Lineage(run_id="run", starts=(*began, TrainerStart(fencing_token=9, step=step))),
    )
    blocking: Any = SimpleNamespace(manager=manager, wait_for=lambda found: found)
    sampler = {"sampler_kwargs": {"max_staleness": 2}}
    trainer = OmegaConf.create({"resume_mode": mode, "v1": {"sampler": sampler}})
    return AsyncBatches(blocking, CONFIG, trainer)


def divided(made: AsyncBatches, step: int, *uids: str, validate: bool = False) -> list[Any]:
    parts = made.divide([request(uid, step) for uid in uids], step, validate)
    return [(part.number, [*part.prompts], resumes) for part, resumes in parts]


def test_prompts_of_the_checkpoint_and_of_the_batch_after_it_are_resumed(monkeypatch) -> None:
    validation = manifest(number(6, validate=True), "c")
    made = batches(monkeypatch, manifest(number(6), "b", "c"), validation, a=Origin(number(4), "old-7"))
    assert divided(made, 6, "a") == [(number(4), ["old-7"], True)]
    assert divided(made, 6, "b", "c") == [(number(6), ["new-b", "new-c"], True)]
    assert divided(made, 6, "b") == [(number(6, 1), ["new-b"], False)], "the number of another batch"
    assert divided(made, 6, "b", validate=True) == [(number(6, validate=True), ["new-b"], False)]


def test_a_resumed_prompt_is_as_old_as_its_first_request(monkeypatch) -> None:
    made = batches(monkeypatch, manifest(number(7), "b"), manifest(number(8), "c"), a=Origin(number(4), "old"))
    [(part, _)] = made.divide([request("a", 6)], 6, validate=False)
    assert part.prompts["old"]["global_steps"] == 4
    [(part, _)] = made.divide([request("b", 7)], 7, validate=False)
    assert part.prompts["new-b"]["global_steps"] == 5, "it began with weights that are trained again"
    [(part, resumes)] = made.divide([request("c", 8)], 8, validate=False)
    assert (part.prompts["new-c"]["global_steps"], resumes) == (8, False), "too old to be trained"


def test_the_last_of_many_batches_before_the_checkpoint_is_not_resumed(monkeypatch) -> None:
    made = batches(monkeypatch, manifest(number(5, 600), "a"), manifest(number(6, 600), "b"))
    assert divided(made, 6, "a") == [(number(6), ["new-a"], False)]
    assert divided(made, 6, "b") == [(number(6, 600), ["new-b"], True)]


def test_a_prompt_that_was_held_across_two_restarts_counts_the_way_of_both(monkeypatch) -> None:
    """Its step was planned by the first trainer; the second one resumed from 2, and this one from 5."""
    held = manifest(number(4), "a").model_copy(update={"fencing_token": 1})
    made = batches(monkeypatch, held, a=Origin(number(4), "old-0"), starts={1: 1, 2: 3})
    [(part, resumes)] = made.divide([request("a", 6)], 6, validate=False)
    assert not resumes, "3, 2 and 5 are 4 versions"
    made = batches(monkeypatch, held, a=Origin(number(4), "old-0"), starts={1: 1})
    [(part, resumes)] = made.divide([request("a", 6)], 6, validate=False)
    assert (part.prompts["old-0"]["global_steps"], resumes) == (4, True)


def test_nothing_is_resumed_without_verls_checkpoint(monkeypatch) -> None:
    made = batches(monkeypatch, manifest(number(1), "a"), mode="disable")
    assert divided(made, 1, "a") == [(number(1), ["new-a"], False)]


# --- the numbers of steps ---------------------------------------------------------------------------------


def play(resumes, *batches):
    numbers = StepNumbers(resumes)
    return [numbers.next(step, validate) for step, validate in batches]


def test_no_two_batches_of_one_process_have_the_same_number():
    batches = [(1, False), (1, False), (1, True), (2, False), (2, True), (2, False), (0, True), *[(3, False)] * 600]
    numbers = [number for number, _ in play(True, *batches)]
    assert len(set(numbers)) == len(batches)


def test_a_batch_has_the_same_number_after_a_restart():
    long = dict(zip([(1, 0), (2, 0), (3, 0)], play(True, (1, False), (2, False), (3, False)), strict=True))
    [(again, _)] = play(True, (3, False))
    assert again == long[3, 0][0]


def test_only_the_first_step_after_a_checkpoint_was_sampled_with_the_same_weights():
    numbers = play(True, (4, True), (5, False), (5, False), (5, True), (6, False))
    assert [same for _, same in numbers] == [True, True, True, False, False]


def test_a_validation_after_a_training_step_is_of_new_weights():
    assert [same for _, same in play(True, (5, False), (5, True))] == [True, False]


def test_a_training_that_does_not_resume_reuses_nothing():
    assert [same for _, same in play(False, (1, False), (1, True))] == [False, False]
