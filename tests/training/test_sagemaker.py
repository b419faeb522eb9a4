"""Training sessions of SageMaker: botocore's clients against the emulator of both services."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import numpy as np
import pytest

from builders import eventually
from rollout_backend.base.aws import Identity
from rollout_backend.config import RolloutConfig
from rollout_backend.errors import ConfigError, TrainingServiceError
from rollout_backend.run.checks.account import needed_permissions
from rollout_backend.training import sagemaker
from rollout_backend.training import service as training_service
from rollout_backend.training.loop import TrainingLoop, TrainingRecord
from rollout_backend.training.sagemaker import SageMakerService
from rollout_backend.training.sampling_server import SamplingServer
from rollout_backend.training.service import Datum
from rollout_backend.training.tinker import TinkerService
from tests.emulators.sagemaker_emulator import GROUP as PACKAGES
from tests.emulators.sagemaker_emulator import MODEL, ROLE, SageMakerEmulator
from tests.emulators.tinker_emulator import TinkerEmulator
from tests.emulators.tinker_training import EmulatedTrainer
from tests.emulators.tiny_learner import TabularPolicy
from tests.training.conftest import GROUP, TASKS, Killed, Sampled, Store, World

_WRITES = ("create_training_session", "stop_training_session", "execute_training_operation")
PROMPT, SAMPLING = [100, 101], {"max_tokens": 8, "seed": 3, "temperature": 1.0}


@pytest.fixture
async def emulator(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SageMakerEmulator]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr(sagemaker, "_PAUSES", lambda state: 0.01)
    async with SageMakerEmulator({MODEL: TabularPolicy(range(6))}) as service:
        yield service


def settings(url: str, sagemaker: dict[str, Any] | None = None, **changes: Any) -> RolloutConfig:
    section = {"role_arn": ROLE, "model_package_group_arn": PACKAGES, "output": "s3://bucket/checkpoints"}
    service = {"kind": "sagemaker", "base_url": url, "base_model": MODEL, "rank": 8, "steps": 2, "tasks_per_step": 2}
    return RolloutConfig.parse(
        {
            "run_id": "run",
            "model": {"path": "/models/tiny"},
            "storage": {"bucket": "bucket"},
            "runtime": {"kind": "process", "command": ["agent"]},
            "group": {"size": GROUP},
            "training_service": {
                **service,
                "learning_rate": 0.01,
                "sagemaker": {**section, **(sagemaker or {})},
                **changes,
            },
        }
    )


class Service(SageMakerService):
    """A process's client of the service. The process can be killed before and after each call that writes."""

    def __init__(self, world: World, config: RolloutConfig) -> None:
        super().__init__(config)
        self._world = world

    async def _call(self, what: str, method: Any, until: float, **arguments: Any) -> Any:
        writes = getattr(method, "__name__", "") in _WRITES
        if writes:
            self._world.effect()
        found = await super()._call(what, method, until, **arguments)
        if writes:
            self._world.effect()
        return found


async def train(world: World, config: RolloutConfig, **more: Any) -> TrainingRecord:
    async with Service(world, config) as service:
        rollouts = Rollouts(world, service)
        return await TrainingLoop(config, rollouts, rollouts.serve, service, Store(world), TASKS, **more).run()


class Rollouts(Sampled):
    def __init__(self, world: World, service: SageMakerService) -> None:
        super().__init__(world)
        self._service = service

    async def serve(self, path: str, version: int) -> None:
        await self._service.sampler(path)
        await super().serve(path, version)


def datum(tokens: Sequence[int] = (100, 1, 2), advantage: float = 0.5) -> Datum:
    length = len(tokens)
    return Datum(
        tokens=np.array(tokens),
        target_tokens=np.array([*tokens[1:], 3]),
        logprobs=np.full(length, -0.3, np.float32),
        advantages=np.array([0, *[advantage] * (length - 1)], np.float32),
    )


async def test_the_reward_rises_and_the_session_stops_at_the_end(emulator: SageMakerEmulator) -> None:
    world, rewards, billed = World(emulator.saved), [], []

    def on_trained(number: int, result: Any, data: Any, metrics: dict[str, float]) -> None:
        rewards.append(np.mean([rollout.reward for rollout in result.rollouts]))
        billed.append(metrics["billed_training_tokens"])
        assert metrics["grad_norm"] > 0

    record = await train(world, settings(emulator.url, steps=10), on_trained=on_trained)
    assert record.trained == 10
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.3
    assert sum(billed) == sum(len(each.tokens) for each in emulator.data) > 0
    assert [session.status for session in emulator.sessions.values()] == ["Stopping"]
    # A run that has ended opens no session.
    assert await train(world, settings(emulator.url, steps=10)) == record
    assert emulator.counts["CreateTrainingSession"] == 1


@pytest.mark.parametrize("loss_options", [{}, {"clip_low_threshold": 0.5}])
async def test_both_services_train_on_equal_inputs(
    emulator: SageMakerEmulator, monkeypatch: pytest.MonkeyPatch, loss_options: dict[str, float]
) -> None:
    batch = [[datum(), datum((100, 4), -0.25)]]
    async with SageMakerService(settings(emulator.url, loss="ppo", loss_options=loss_options)) as service:
        await service.begin(None)
        await service.train(batch)
    async with TinkerEmulator({"tiny": TabularPolicy(range(6))}, poll_s=0.1) as tinker:
        trainer = EmulatedTrainer(tinker)
        monkeypatch.setenv("TINKER_API_KEY", tinker.key)
        other = {"kind": "tinker", "sagemaker": None, "base_model": "tiny", "learning_rate": 0.3, "loss": "ppo"}
        section = settings(tinker.url).training_service
        assert section is not None
        config = type(section).model_validate({**section.model_dump(exclude={"sagemaker"}), **other})
        async with TinkerService(config) as service_of_tinker:
            await service_of_tinker.begin(None)
            await service_of_tinker.train(batch)
    for ours, theirs in zip(emulator.data, trainer.data, strict=True):
        assert ours.tokens == theirs.tokens
        for name, values in theirs.inputs.items():
            np.testing.assert_array_equal(ours.inputs[name], values)
        np.testing.assert_array_equal(ours.inputs["weights"], theirs.inputs["advantages"] != 0)
    [session], [model] = emulator.sessions.values(), tinker.trained.values()
    np.testing.assert_allclose(session.policy.logits, model.policy.logits)


async def test_a_training_killed_between_any_two_writes_resumes(emulator: SageMakerEmulator) -> None:
    """Each process is killed after one more effect than the one before it, so a kill follows each effect."""
    config = settings(emulator.url)
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
    assert emulator.history(record.state) == emulator.history(expected.state)
    assert len(emulator.history(record.state)) == 2
    np.testing.assert_array_equal(*(emulator.saved[each.sampler][1].logits for each in (record, expected)))
    assert world.sampled == whole.sampled
    assert not any(session.status in ("Running", "Blocked") for session in emulator.sessions.values())


@pytest.mark.slow
async def test_each_single_kill_leaves_the_same_weights(emulator: SageMakerEmulator) -> None:
    config = settings(emulator.url, steps=3)
    expected = await train(World(emulator.saved), config)
    for effects in itertools.count():
        world = World(emulator.saved, left=effects)
        try:
            await train(world, config)
            break
        except Killed:
            world.left = float("inf")
        record = await train(world, config)
        assert emulator.history(record.state) == emulator.history(expected.state)
        np.testing.assert_array_equal(*(emulator.saved[each.sampler][1].logits for each in (record, expected)))
        assert world.sampled == GROUP * 2 * 3
    # Rollouts, and ten writes of each step.
    assert effects > (GROUP * 2 + 10) * 3


_FAULTS: dict[str, dict[str, Any]] = {
    "throttled": {
        "errors": {
            name: ["ThrottlingException", "InternalServerException"]
            for name in ("ExecuteTrainingOperation", "GetTrainingOperationResult", "ExecuteSamplingOperation")
        }
    },
    "answers are lost": {"lost": {"ExecuteTrainingOperation": 2, "CreateTrainingSession": 1}},
    "slow": {"polls": 3, "provision_polls": 4},
    "a pass fails": {"failing": {"forwardBackward": ["out of memory"]}},
    "the optimizer fails with its session": {"failing": {"optimizerStep": ["a node is lost"]}, "session_fails": True},
    "a save fails": {"failing": {"saveWeights": ["S3 is busy"]}},
    "a proxy answers calls": {
        "pages": {name: [403, 404, 400] for name in ("CreateTrainingSession", "ExecuteTrainingOperation")}
    },
    "a proxy answers polls": {"pages": {"GetTrainingOperationResult": [404]}},
    "no quota": {"errors": {"CreateTrainingSession": ["ResourceLimitExceeded"] * 2}},
}


@pytest.mark.parametrize("fault", _FAULTS)
async def test_faults_of_the_service_cost_time(emulator: SageMakerEmulator, fault: str) -> None:
    config = settings(emulator.url)
    expected = await train(World(emulator.saved), config)
    # The run's sessions are those of another account.
    emulator.sessions.clear()
    for name, value in _FAULTS[fault].items():
        held = getattr(emulator.faults, name)
        held.update(value) if isinstance(held, dict) else setattr(emulator.faults, name, value)
    record = await train(World(emulator.saved), config)
    assert emulator.history(record.state) == emulator.history(expected.state)
    np.testing.assert_array_equal(*(emulator.saved[each.sampler][1].logits for each in (record, expected)))
    assert not any(emulator.faults.errors.values())
    assert not any(emulator.faults.failing.values())
    assert not any(emulator.faults.pages.values())


async def test_a_silent_service_is_an_error_at_the_deadline(emulator: SageMakerEmulator) -> None:
    async with SageMakerService(settings(emulator.url, call_s=2)) as service:
        await service.begin(None)
        emulator.faults.silent.add("ExecuteTrainingOperation")
        with pytest.raises(TrainingServiceError, match="no answer in time"):
            await service.save("silent", keep=True)
        emulator.faults.silent.clear()
        await service.begin(None)
        assert (await service.save("heard", keep=True)).state in emulator.states
    assert len(emulator.sessions) == 1


async def test_operations_after_a_failed_session_are_skipped(emulator: SageMakerEmulator) -> None:
    async with SageMakerService(settings(emulator.url)) as service:
        await service.begin(None)
        saved = await service.save("start", keep=True)
        emulator.faults.held, emulator.faults.session_fails = True, True
        emulator.faults.failing["saveState"] = ["the node is lost"]
        call = asyncio.ensure_future(service.save("lost", keep=True))
        # The first poll follows both submissions.
        await emulator.arrived("GetTrainingOperationResult", 3)
        emulator.release()
        with pytest.raises(TrainingServiceError, match="saveState failed at SageMaker: the node is lost"):
            await call
        statuses = [each.status for session in emulator.sessions.values() for each in session.operations.values()]
        assert statuses[-1] == "Skipped"
        await service.begin(saved.state)
        assert len(emulator.sessions) == 2


async def test_an_operation_of_another_process_is_noticed(emulator: SageMakerEmulator) -> None:
    config = settings(emulator.url)
    async with SageMakerService(config) as first, SageMakerService(config) as second:
        await first.begin(None)
        saved = await first.save("start", keep=True)
        await second.begin(saved.state)
        with pytest.raises(TrainingServiceError, match="of another process"):
            await first.train([[datum()]])
        await first.begin(saved.state)
        await first.train([[datum()]])
        final = await first.save("end", keep=True)
    assert len(emulator.history(final.state)) == 1


async def test_a_blocked_session_runs_again(emulator: SageMakerEmulator) -> None:
    async with SageMakerService(settings(emulator.url)) as service:
        await service.begin(None)
        saved = await service.save("start", keep=True)
        [session] = emulator.sessions.values()
        await service._runtime.execute_training_operation(
            trainingSessionName=session.name,
            sequenceNumber=4,
            clientToken="other",
            operationConfig={"saveState": {"description": "of another process"}},
        )
        assert session.status == "Blocked"
        with pytest.raises(TrainingServiceError, match="of another process"):
            await service.train([[datum()]])
        assert session.status == "Running"
        await service.begin(saved.state)
        await service.train([[datum()]])
        assert len(emulator.history((await service.save("end", keep=True)).state)) == 1


async def test_samples_go_on_in_another_session(emulator: SageMakerEmulator) -> None:
    async with SageMakerService(settings(emulator.url)) as service:
        await service.begin(None)
        saved = await service.save("start", keep=True)
        weights = await service.sampler(saved.sampler)
        emulator.end_sessions("Expired")
        tokens, logprobs, reason = await service.sample(weights, PROMPT, SAMPLING)
        assert (len(tokens), len(logprobs), reason) == (8, 8, "length")
        assert len(emulator.sessions) == 2
        with pytest.raises(TrainingServiceError, match="its successor has no weights yet"):
            await service.train([[datum()]])
        await service.begin(saved.state)
        await service.train([[datum()]])


async def test_a_sequence_ends_at_the_limit_or_the_stop_token(emulator: SageMakerEmulator) -> None:
    async with SageMakerService(settings(emulator.url)) as service:
        await service.begin(None)
        weights = await service.sampler((await service.save("start", keep=True)).sampler)
        whole, logprobs, reason = await service.sample(weights, PROMPT, {**SAMPLING, "max_tokens": 600})
        assert (len(whole), reason) == (600, "length")
        for limit in (1, 8, 511, 512, 600):
            found = await service.sample(weights, PROMPT, {**SAMPLING, "max_tokens": limit})
            assert found == (whole[:limit], logprobs[:limit], "length")
            assert emulator.samples[-1].params["maxTokens"] == max(limit, 512)
        stop = whole[5]
        end = whole.index(stop) + 1
        for limit, expected in ((end - 1, "length"), (end, "stop"), (600, "stop")):
            params = {**SAMPLING, "max_tokens": limit, "stop": [stop]}
            count = min(limit, end)
            assert await service.sample(weights, PROMPT, params) == (whole[:count], logprobs[:count], expected)
        with pytest.raises(ConfigError, match="temperature from 0 to 2"):
            await service.sample(weights, PROMPT, {**SAMPLING, "temperature": 3.0})


async def test_a_sample_whose_client_hangs_up_is_counted_as_it_is_billed(emulator: SageMakerEmulator) -> None:
    async with SageMakerService(settings(emulator.url)) as service, SamplingServer(service, "tiny", 60.0) as server:
        await service.begin(None)
        await server.serve((await service.save("start", keep=True)).sampler, 0)
        emulator.faults.polls = 10**9
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 600, "temperature": 1.0}}
        async with aiohttp.ClientSession() as http:
            call = asyncio.ensure_future(http.post(f"{server.url}/generate", json=body))
            await emulator.arrived("GetSamplingOperationResult", 2)
            call.cancel()
            await eventually(lambda: server._given_up["calls"])
            emulator.faults.polls = 0
            await eventually(lambda: server._given_up["sampled_tokens"])
            async with http.get(f"{server.url}/v1/loads") as response:
                [load] = (await response.json())["loads"]
    assert load["given_up"] == {"calls": 1, "prompt_tokens": 2, "sampled_tokens": 600}
    assert len(emulator.samples) == 1


async def test_large_batches_are_divided(emulator: SageMakerEmulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sagemaker, "_OPERATION_TOKENS", 7)
    config = settings(emulator.url)
    prices = {"prefill_million": 1.0, "sample_million": 2.0, "training_million": 3.0}
    config = config.model_copy(update={"prices": config.prices.model_copy(update=prices)})
    async with SageMakerService(config) as service:
        await service.begin(None)
        await service.train([[datum()] * 5 + [datum([100, *[1] * 20])]])
        usage = await service.usage()
        assert not any((await service.usage()).values())
        monkeypatch.setattr(training_service, "_PERMANENT_AFTER_S", 0.0)
        emulator.faults.errors["DescribeTrainingSession"] = ["AccessDeniedException"]
        assert await service.usage() == {}
    assert emulator.counts["ExecuteTrainingOperation"] == 3 + 1 + 1
    assert len(emulator.data) == 6
    [session] = emulator.sessions.values()
    assert [len(step) for step in session.learner.history] == [6]
    assert usage["billed_training_tokens"] == 5 * 3 + 21
    assert usage["billed_dollars"] == pytest.approx(36 * 3e-6)


async def test_a_step_that_trains_nothing_reports_what_it_was_billed(emulator: SageMakerEmulator) -> None:
    # All rewards are equal.
    emulator.policies[MODEL] = TabularPolicy([1])
    seen = []

    def on_trained(number: int, result: Any, data: Any, metrics: dict[str, float]) -> None:
        seen.append((len(data.groups), [*metrics]))

    await train(World(emulator.saved), settings(emulator.url, steps=1), on_trained=on_trained)
    assert seen == [(0, ["billed_prefill_tokens", "billed_sample_tokens", "billed_training_tokens"])]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sagemaker": {"role_arn": ROLE + "Other"}}, "Could not assume role"),
        ({"base_model": MODEL.replace("tiny", "large")}, "Hub content .* does not exist"),
        ({"rank": 65}, "LoRA rank must be at most 64"),
        ({"sagemaker": {"model_package_group_arn": PACKAGES + "-2"}}, "Model package group does not exist"),
    ],
)
async def test_what_the_service_refuses_costs_nothing(
    emulator: SageMakerEmulator, changes: dict[str, Any], message: str
) -> None:
    world = World(emulator.saved)
    with pytest.raises(ConfigError, match=message):
        await train(world, settings(emulator.url, **changes))
    assert not world.sampled
    assert not emulator.sessions


async def test_a_session_that_never_runs_is_explained(emulator: SageMakerEmulator) -> None:
    emulator.faults.provision_failure = "the role may not write to s3://bucket"
    with pytest.raises(ConfigError, match="is Failed: the role may not write"):
        await train(World(emulator.saved), settings(emulator.url))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sagemaker": {"role_arn": "TrainingSessions"}}, "is not the ARN of a role"),
        ({"sagemaker": {"output": "/checkpoints"}}, "is not an S3 URI"),
        ({"base_model": "Qwen/Qwen3-8B"}, "is no ARN of a model in SageMaker's hub"),
        ({"rank": 257}, "a rank from 1 to 256, not 257"),
        ({"learning_rate": 0.02}, "a learning_rate from 0 to 0.01"),
        ({"loss": "dro"}, "has no loss dro, only importance_sampling, ppo, cispo"),
        ({"loss_options": {"clip": 1}}, "has no loss_options clip"),
        ({"loss_options": {"clip_high_threshold": 0.5}}, "a clip_high_threshold from 1 to 10"),
        ({"kind": "tinker"}, "sagemaker is for kind: sagemaker"),
        ({"base_model": MODEL.replace("us-east-1", "us-west-2")}, "is in us-west-2, and aws.region is us-east-1"),
    ],
)
def test_settings_outside_the_service_model_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings("http://service", **changes)


def test_names_of_sessions_follow_from_the_run() -> None:
    config = settings("http://service")
    name = sagemaker.session_name(config.storage, "my.run_1" * 16)
    assert name == sagemaker.session_name(config.storage, "my.run_1" * 16)
    assert len(f"{name}-9999") <= 63
    other = config.storage.model_copy(update={"bucket": "other"})
    assert sagemaker.session_name(other, "run") != sagemaker.session_name(config.storage, "run")


async def test_doctor_knows_the_permissions_of_each_call(emulator: SageMakerEmulator) -> None:
    await train(World(emulator.saved), settings(emulator.url))
    caller = Identity("arn:aws:iam::123456789012:user/trainer", "123456789012", "env", False, False, None)
    needed = {each.action: each for each in needed_permissions(settings("http://service", base_url=None), caller)}
    of_sagemaker = {action for action in needed if action.startswith("sagemaker:")}
    assert of_sagemaker == {f"sagemaker:{name}" for name in emulator.counts}
    assert needed["iam:PassRole"].resources == (ROLE,)
    [session] = needed["sagemaker:CreateTrainingSession"].resources
    assert session.startswith("arn:aws:sagemaker:us-east-1:123456789012:training-session/rollout-")
    elsewhere = needed_permissions(settings("http://service"), caller)
    assert not any(each.action.startswith("sagemaker:") for each in elsewhere)


async def test_a_denial_of_a_few_seconds_ends_no_training(emulator: SageMakerEmulator) -> None:
    for name in ("ExecuteTrainingOperation", "GetTrainingOperationResult", "ExecuteSamplingOperation"):
        emulator.faults.errors[name] = ["AccessDeniedException"] * 2
    record = await train(World(emulator.saved), settings(emulator.url, steps=1))
    assert record.trained == 1
    assert not any(emulator.faults.errors.values())
