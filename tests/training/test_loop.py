"""The loop on a training service: the SDK, unchanged, trains the emulator's model on rollouts sampled from it."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from agent_wrapper.contract import Sampling
from agent_wrapper.contract.keys import training_key
from memory_store import MemoryStore
from rollout_backend.config import RolloutConfig
from rollout_backend.core.earlier_batches import describe_batch
from rollout_backend.core.tasks import Task
from rollout_backend.errors import ConfigError, ManifestError, RunHeld, TrainingServiceError
from rollout_backend.run.accounts.step_report import StepResult
from rollout_backend.training import loop
from rollout_backend.training import service as training_service
from rollout_backend.training.loop import TrainingLoop, TrainingRecord
from rollout_backend.training.tinker import TinkerService
from tests.emulators.tinker_emulator import TinkerEmulator
from tests.emulators.tinker_training import EmulatedTrainer
from tests.emulators.tiny_learner import TabularPolicy
from tests.training.conftest import GROUP, TASKS, Killed, Sampled, Store, World


@pytest.fixture
async def emulator(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TinkerEmulator]:
    async with TinkerEmulator({"tiny": TabularPolicy(range(6))}, poll_s=0.1) as service:
        monkeypatch.setenv("TINKER_API_KEY", service.key)
        yield service


@pytest.fixture
def trainer(emulator: TinkerEmulator) -> EmulatedTrainer:
    return EmulatedTrainer(emulator)


def settings(url: str, **changes: Any) -> RolloutConfig:
    section = {"base_url": url, "base_model": "tiny", "rank": 8, "steps": 3, "tasks_per_step": 2}
    return RolloutConfig.parse(
        {
            "run_id": "run",
            "model": {"path": "/models/tiny"},
            "storage": {"bucket": "bucket"},
            "runtime": {"kind": "process", "command": ["agent"]},
            "group": {"size": GROUP},
            "training_service": {**section, "learning_rate": 0.3, **changes},
        }
    )


class Model:
    """The SDK's client of a model. The process can be killed before each of its writes."""

    def __init__(self, client: Any, world: World) -> None:
        self._client, self._world = client, world

    def __getattr__(self, name: str) -> Any:
        assert name in ("forward_backward", "optim_step", "save_state", "save_weights_for_sampler")
        self._world.effect()
        return getattr(self._client, name)


class Service(TinkerService):
    """A process's client of the service. The process can be killed before and after each call that has an effect."""

    def __init__(self, world: World, config: RolloutConfig) -> None:
        assert config.training_service is not None
        super().__init__(config.training_service)
        self._world = world

    async def begin(self, state: str | None) -> None:
        self._world.effect()
        await super().begin(state)
        self._model = Model(self._model, self._world)
        self._world.effect()

    async def train(self, batches: Sequence[Sequence[Any]]) -> dict[str, float]:
        found = await super().train(batches)
        self._world.effect()
        return found

    async def save(self, name: str, *, keep: bool) -> Any:
        found = await super().save(name, keep=keep)
        self._world.effect()
        return found


async def train(world: World, config: RolloutConfig, rollouts: Sampled | None = None, **more: Any) -> TrainingRecord:
    rollouts = rollouts or Sampled(world)
    async with Service(world, config) as service:
        loop = TrainingLoop(config, rollouts, rollouts.serve, service, Store(world), TASKS, **more)
        return await loop.run()


async def test_the_reward_rises_and_data_are_the_sampled_tokens(
    emulator: TinkerEmulator, trainer: EmulatedTrainer
) -> None:
    world, config = World(emulator.saved), settings(emulator.url, steps=12)
    rewards, metrics, versions = [], [], []

    def on_trained(number: int, result: StepResult, data: Any, found: dict[str, float]) -> None:
        versions.append(number)
        rewards.append(np.mean([rollout.reward for rollout in result.rollouts]))
        metrics.append(found)

    record = await train(world, config, on_trained=on_trained)
    assert versions == [*range(1, 13)]
    assert record.trained == 12
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.3
    assert all(found["grad_norm"] > 0 for found in metrics)
    assert sum(found["training_tokens"] for found in metrics) == sum(len(datum.tokens) for datum in trainer.data)
    sampled = [rollout.segments[0] for rollout in world.results.values()]
    expected = {((*segment.token_ids,), (0.0, *segment.logprobs[2:])) for segment in sampled}
    for datum in trainer.data:
        targets, logprobs = (tuple(datum.inputs[name].tolist()) for name in ("target_tokens", "logprobs"))
        assert targets[:-1] == datum.tokens[1:]
        assert ((datum.tokens[0], *targets), logprobs) in expected
        assert datum.inputs["advantages"][0] == 0
        assert len(set(datum.inputs["advantages"][1:].tolist())) == 1


@pytest.mark.parametrize("overlap", [False, True])
async def test_a_training_killed_between_any_two_effects_resumes(
    emulator: TinkerEmulator, trainer: EmulatedTrainer, overlap: bool
) -> None:
    """Each process is killed after one more effect than the one before it, so a kill follows each effect."""
    config = settings(emulator.url, overlap=overlap)
    whole = World(emulator.saved)
    expected = await train(whole, config)
    world = World(emulator.saved)
    for effects in itertools.count(1):
        world.left = effects
        try:
            record = await train(world, config)
            break
        except Killed:
            pass
    assert effects > 5
    assert record.trained == expected.trained == 3
    # Each step is in the weights once, with the results that its weights sampled, and no rollout ran twice.
    assert trainer.history(record.state) == trainer.history(expected.state)
    assert len(trainer.history(record.state)) == 3
    final = [emulator.saved[each.sampler][1].logits for each in (record, expected)]
    np.testing.assert_array_equal(*final)
    assert world.sampled == whole.sampled


async def test_overlapped_steps_are_collected_while_the_one_before_is_trained(
    emulator: TinkerEmulator, trainer: EmulatedTrainer
) -> None:
    """Its rollouts have the weights before the step that is trained meanwhile, and evaluations the newest."""
    world, config = World(emulator.saved), settings(emulator.url, steps=4, overlap=True, evaluate_every=2)
    rollouts, order, metrics = Sampled(world), [], []
    collect = rollouts.collect

    async def collected(tasks: Sequence[Task], *, step: int, weights: str) -> StepResult:
        order.append(f"collect {describe_batch(step)[0]}")
        return await collect(tasks, step=step, weights=weights)

    def on_trained(number: int, result: StepResult, data: Any, found: dict[str, float]) -> None:
        order.append(f"trained {number}")
        metrics.append(found)

    rollouts.collect = collected  # type: ignore[method-assign]
    await train(
        world,
        config,
        rollouts,
        held_out=[Task(task_id="held-out", payload={})],
        on_trained=on_trained,
    )
    assert [found["rollouts/staleness/max"] for found in metrics] == [0, 1, 1, 1]
    assert order == [
        *("collect 1", "collect 0 validation", "collect 2", "trained 1", "collect 3", "trained 2"),
        *("collect 2 validation", "collect 4", "trained 3", "trained 4", "collect 4 validation"),
    ]
    of_step = {name: weights for name, _, weights in rollouts.collected}
    first, second, third = (of_step[name] for name in ("1", "3", "4"))
    assert of_step["2"] == of_step["0 validation"] == first
    assert third == of_step["2 validation"]
    assert len({first, second, third, of_step["4 validation"]}) == 4


async def test_a_failed_step_ahead_ends_the_training_once_the_present_one_is_recorded(
    emulator: TinkerEmulator, trainer: EmulatedTrainer
) -> None:
    world, config = World(emulator.saved), settings(emulator.url, overlap=True)
    rollouts = Sampled(world)
    collect = rollouts.collect

    async def refused(tasks: Sequence[Task], *, step: int, weights: str) -> StepResult:
        if describe_batch(step)[0] == "3":
            raise TrainingServiceError("too many rollouts are lost")
        return await collect(tasks, step=step, weights=weights)

    rollouts.collect = refused  # type: ignore[method-assign]
    with pytest.raises(TrainingServiceError, match="too many"):
        await train(world, config, rollouts)
    assert world.record().trained == 2


@pytest.mark.slow
async def test_each_single_kill_leaves_the_same_weights(emulator: TinkerEmulator, trainer: EmulatedTrainer) -> None:
    config = settings(emulator.url)
    expected = await train(World(emulator.saved), config)
    for effects in itertools.count():
        world = World(emulator.saved, left=effects)
        try:
            await train(world, config)
            break
        except Killed:
            world.left = float("inf")
        record = await train(world, config)
        assert trainer.history(record.state) == trainer.history(expected.state)
        np.testing.assert_array_equal(*(emulator.saved[each.sampler][1].logits for each in (record, expected)))
        assert world.sampled == GROUP * 2 * 3
    # Rollouts, and eight writes of each step.
    assert effects > (GROUP * 2 + 8) * 3


async def test_evaluations_have_their_steps_and_are_not_repeated(
    emulator: TinkerEmulator, trainer: EmulatedTrainer
) -> None:
    world, config = World(emulator.saved), settings(emulator.url, evaluate_every=2)
    rollouts = Sampled(world)
    held_out = [Task(task_id="held-out", payload={})]
    evaluated: list[int] = []
    on_evaluated: Callable[[int, StepResult], None] = lambda number, result: evaluated.append(number)  # noqa: E731
    record = await train(world, config, rollouts, held_out=held_out, on_evaluated=on_evaluated)
    assert [name for name, _, _ in rollouts.collected] == [
        "0 validation",
        "1",
        "2",
        "2 validation",
        "3",
        "3 validation",
    ]
    assert evaluated == [0, 2, 3]
    assert record.evaluated == 3
    # An epoch has each task once.
    assert sorted(rollouts.collected[1][1] + rollouts.collected[2][1]) == [task.task_id for task in TASKS]
    weights = [weights for _, _, weights in rollouts.collected]
    assert weights[0] == weights[1]
    assert weights[2] != weights[3] == weights[4] != weights[5]
    again = Sampled(world)
    assert await train(world, config, again, held_out=held_out) == record
    assert not again.collected


async def test_a_step_without_spread_trains_nothing(emulator: TinkerEmulator, trainer: EmulatedTrainer) -> None:
    logits = np.full((7, 6), -50.0)
    logits[:, 1] = 50.0
    emulator.policies["tiny"] = TabularPolicy(range(6), logits)
    world = World(emulator.saved)
    record = await train(world, settings(emulator.url))
    assert record.trained == 3
    assert trainer.data == []


async def test_faults_of_the_service_repeat_a_step_from_its_checkpoint(
    emulator: TinkerEmulator, trainer: EmulatedTrainer
) -> None:
    config = settings(emulator.url, steps=1)
    expected = await train(World(emulator.saved), config)

    class Failing(Service):
        failures = 2

        async def save(self, name: str, *, keep: bool) -> Any:
            if name.endswith("1") and self.failures:
                Failing.failures -= 1
                raise TrainingServiceError("503")
            return await super().save(name, keep=keep)

    world = World(emulator.saved)
    rollouts = Sampled(world)
    async with Failing(world, config) as service:
        record = await TrainingLoop(config, rollouts, rollouts.serve, service, Store(world), TASKS).run()
    assert trainer.history(record.state) == trainer.history(expected.state)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
async def test_the_page_of_a_proxy_ends_no_training(
    emulator: TinkerEmulator, trainer: EmulatedTrainer, status: int
) -> None:
    config = settings(emulator.url, steps=1)
    expected = await train(World(emulator.saved), config)
    for name in ("create_model", "forward_backward", "optim_step", "save_weights", "retrieve_future"):
        emulator.faults.pages[name] = [status]
    record = await train(World(emulator.saved), config)
    assert trainer.history(record.state) == trainer.history(expected.state)
    assert not any(emulator.faults.pages.values())


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_refusals_of_a_few_seconds_end_no_training(
    emulator: TinkerEmulator, trainer: EmulatedTrainer, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(loop, "_PAUSES", lambda state: 0.01)
    config = settings(emulator.url, steps=1)
    expected = await train(World(emulator.saved), config)
    for name in ("create_model", "forward_backward", "optim_step", "save_weights", "retrieve_future"):
        emulator.faults.statuses[name] = [status] * 2
    record = await train(World(emulator.saved), config)
    assert trainer.history(record.state) == trainer.history(expected.state)
    assert not any(emulator.faults.statuses.values())


async def test_a_refusal_that_lasts_ends_the_training(
    emulator: TinkerEmulator, trainer: EmulatedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_service, "_PERMANENT_AFTER_S", 0.0)
    emulator.faults.statuses["forward_backward"] = [403]
    with pytest.raises(ConfigError, match="refuses the key"):
        await train(World(emulator.saved), settings(emulator.url, steps=1))


async def test_a_second_trainer_stops(emulator: TinkerEmulator, trainer: EmulatedTrainer) -> None:
    world, config = World(emulator.saved), settings(emulator.url)

    class Overtaken(Sampled):
        async def collect(self, tasks: Sequence[Task], *, step: int, weights: str) -> StepResult:
            found = await super().collect(tasks, step=step, weights=weights)
            if describe_batch(step)[0] == "2":
                other = world.record().model_copy(update={"trained": 2})
                world.store.objects[training_key("", "run")] = other.model_dump_json().encode()
            return found

    with pytest.raises(RunHeld, match="another process"):
        await train(world, config, Overtaken(world))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_model": "large"}, "does not train 'large'. It trains: tiny"),
        ({"rank": 64}, "rank 64 is above the maximum of 32"),
        ({"tasks_per_step": 5}, "tasks_per_step is 5, and there are 4 tasks"),
        ({"evaluate_every": 1}, "evaluate_every and held-out tasks"),
        ({"loss": "cispo"}, "Loss cispo is not supported"),
    ],
)
async def test_settings_that_the_service_refuses_are_named(
    emulator: TinkerEmulator, trainer: EmulatedTrainer, changes: dict[str, Any], message: str
) -> None:
    world = World(emulator.saved)
    with pytest.raises(ConfigError, match=message):
        await train(world, settings(emulator.url, **changes))
    assert changes == {"loss": "cispo"} or not world.sampled


async def test_a_request_that_fails_after_it_was_accepted(emulator: TinkerEmulator, trainer: EmulatedTrainer) -> None:
    """SkyRL reports a rank above its own in this way, and a model that it has lost in a restart."""
    world, config = World(emulator.saved), settings(emulator.url, steps=1)
    emulator.faults.failed["create_model"] = ["LoRA rank 8 must be between 1 and 4"]
    with pytest.raises(ConfigError, match=r"with rank 8: .* refuses it: .* must be between 1 and 4"):
        await train(world, config)
    emulator.faults.failed["forward_backward"] = ["Model is not loaded"]
    record = await train(world, config)
    assert len(trainer.history(record.state)) == 1


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"sampling": {"temperature": 0.7}}, "sampling: a service's logprobs are those before temperature"),
        ({"sampling": {"top_k": 20}}, "sampling: a service's logprobs are those before temperature"),
        ({"gateway": {"agent_sampling_overrides": ["top_p"]}}, "agent_sampling_overrides: leave out top_p:"),
    ],
)
def test_sampling_that_a_service_has_no_logprobs_for_is_refused(section: dict[str, Any], message: str) -> None:
    config = settings("http://service", evaluate_every=1)
    changed = RolloutConfig.parse({**config.model_dump(mode="json", exclude_unset=True), **section})
    greedy = Task(task_id="greedy", payload={}, sampling=Sampling(temperature=0.0))
    with pytest.raises(ConfigError, match=message):
        TrainingLoop.check(changed, TASKS, [greedy])
    with pytest.raises(ConfigError, match="greedy: a service's logprobs"):
        TrainingLoop.check(config, [*TASKS, greedy], TASKS)
    assert TrainingLoop.check(config, TASKS, [greedy]) == config.training_service


def test_each_epoch_has_each_task_once_and_no_step_has_a_task_twice() -> None:
    tasks = [Task(task_id=f"task-{number}", payload={}) for number in range(5)]
    rest: Any = (None, None, None, MemoryStore(""), tasks)
    drawn = TrainingLoop(settings("http://service", tasks_per_step=2), *rest)._tasks_of
    steps = [[task.task_id for task in drawn(number)] for number in range(1, 6)]
    assert all(len({*step}) == len(step) for step in steps)
    assert {task for step in steps[:2] for task in step} | {steps[2][0]} == {task.task_id for task in tasks}
    assert {task for step in steps[2:] for task in step} == {task.task_id for task in tasks}
    whole = TrainingLoop(settings("http://service", tasks_per_step=5), *rest)._tasks_of
    assert [task.task_id for task in whole(1)][:4] == [*steps[0], *steps[1]]
    assert {task.task_id for task in whole(7)} == {task.task_id for task in tasks}


def test_a_call_that_never_ends_does_not_hold_up_the_process() -> None:
    code = (
        "import asyncio, threading\n"
        "from rollout_backend.training.tinker import _in_thread\n"
        "async def main():\n"
        "    async with asyncio.timeout(0.1):\n"
        "        await _in_thread(threading.Event().wait)\n"
        "try:\n"
        "    asyncio.run(main())\n"
        "except TimeoutError:\n"
        "    print('ended')\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout == "ended\n"


async def test_a_wrong_key_is_refused(emulator: TinkerEmulator, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, message in (("tml-other", "refuses the key in TINKER_API_KEY"), ("", "TINKER_API_KEY is not set")):
        monkeypatch.setenv("TINKER_API_KEY", key)
        with pytest.raises(ConfigError, match=message):
            await train(World(emulator.saved), settings(emulator.url))


async def test_a_record_of_other_settings_is_refused(emulator: TinkerEmulator, trainer: EmulatedTrainer) -> None:
    world = World(emulator.saved)
    await train(world, settings(emulator.url, steps=1))
    with pytest.raises(ConfigError, match="rank 8, and the settings have 'tiny' with rank 4"):
        await train(world, settings(emulator.url, rank=4))
    world.store.objects[training_key("", "run")] = b"{}"
    with pytest.raises(ManifestError, match="no record of a training"):
        await train(world, settings(emulator.url))
