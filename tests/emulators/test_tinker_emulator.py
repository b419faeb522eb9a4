"""The SDK `tinker`, unchanged, against the emulator of a training service."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
import pytest
import tinker
from tinker import types

from tests.emulators.tinker_emulator import TinkerEmulator
from tests.emulators.tiny_learner import TabularPolicy
from tinker_client import connected

STOP = 9
PROMPT = types.ModelInput.from_ints([100, 101])


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


@pytest.fixture
async def service() -> AsyncIterator[TinkerEmulator]:
    async with TinkerEmulator({"tiny": TabularPolicy(range(10))}, poll_s=0.1) as emulator:
        yield emulator


def params(**more: object) -> types.SamplingParams:
    return types.SamplingParams(**{"max_tokens": 8, "seed": 3, "stop": [STOP], **more})


async def test_samples_are_exact_and_repeat_for_a_seed(service: TinkerEmulator) -> None:
    async with connected(service) as client:
        sampler = await client.create_sampling_client(base_model="tiny")
        first, again = [await sampler.sample(PROMPT, 2, params()) for _ in range(2)]
        assert [each.tokens for each in first.sequences] == [each.tokens for each in again.sequences]
        assert first.sequences[0].tokens != first.sequences[1].tokens
        sent = [(*each.tokens, *each.logprobs, each.stop_reason) for each in [*first.sequences, *again.sequences]]
        made = [
            (*each.tokens, *each.logprobs, "stop" if each.tokens[-1] == STOP else "length")
            for each in service.samples
        ]
        assert sent == made
        policy = service.policies["tiny"]
        for each in first.sequences:
            context = [101, *each.tokens]
            expected = [policy.logprobs(before)[after] for before, after in zip(context, each.tokens, strict=False)]
            np.testing.assert_allclose(each.logprobs, expected, rtol=1e-6)


async def test_temperature_top_k_and_top_p_choose_the_tokens(service: TinkerEmulator) -> None:
    async with connected(service) as client:
        sampler = await client.create_sampling_client(base_model="tiny")
        greedy = [{"temperature": 0}, {"top_k": 1}, {"top_p": 1e-6}]
        replies = [await sampler.sample(PROMPT, 1, params(**each)) for each in greedy]
        assert len({tuple(each.sequences[0].tokens) for each in replies}) == 1
        assert replies[0].sequences[0].tokens[0] == service.policies["tiny"].logprobs(101).argmax()


async def test_a_sampler_keeps_its_weights(service: TinkerEmulator) -> None:
    async with connected(service) as client:
        trainer = await client.create_lora_training_client(base_model="tiny", rank=8)
        old = await client.create_sampling_client(model_path=(await trainer.save_weights_for_sampler("zero")).path)
        [model] = service.trained.values()
        model.policy.logits[:, 5] += 100
        new = await trainer.save_weights_and_get_sampling_client()
        replies = [await each.sample(PROMPT, 1, params(max_tokens=3)) for each in (old, new, old)]
        assert replies[1].sequences[0].tokens == [5, 5, 5]
        assert replies[0].sequences[0].tokens == replies[2].sequences[0].tokens != [5, 5, 5]


async def test_faults_delay_a_sample(service: TinkerEmulator) -> None:
    async with connected(service) as client:
        sampler = await client.create_sampling_client(base_model="tiny")
        service.faults.statuses["asample"] = [500, 429]
        service.faults.statuses["retrieve_future"] = [503, 429]
        service.faults.samples_unfetchable = 1
        await service.set_queue("paused_capacity")
        reply = asyncio.ensure_future(sampler.sample(PROMPT, 1, params()))
        await service.arrived("retrieve_future", 4)
        await service.set_queue("")
        assert (await reply).sequences[0].tokens == list(service.samples[1].tokens)
        # The first result was lost, and was sampled nevertheless.
        assert len(service.samples) == 2


async def test_an_unknown_key_is_refused(service: TinkerEmulator) -> None:
    with pytest.raises(tinker.AuthenticationError):
        async with connected(service, "tml-other"):
            pass


@pytest.mark.parametrize(
    "create",
    [
        lambda client: client.create_sampling_client(base_model="other"),
        lambda client: client.create_lora_training_client(base_model="tiny", rank=64),
        lambda client: client.create_sampling_client(model_path="tinker://other/sampler_weights/0"),
    ],
)
async def test_unknown_names_are_refused(
    service: TinkerEmulator, create: Callable[[tinker.ServiceClient], Awaitable[object]]
) -> None:
    async with connected(service) as client:
        with pytest.raises(tinker.APIStatusError):
            await create(client)


async def test_a_failed_sample_and_a_silent_service(service: TinkerEmulator) -> None:
    async with connected(service) as client:
        sampler = await client.create_sampling_client(base_model="tiny")
        service.faults.failures.append("server")
        with pytest.raises(tinker.RequestFailedError):
            await sampler.sample(PROMPT, 1, params())
        service.faults.silent.add("asample")
        reply = asyncio.ensure_future(sampler.sample(PROMPT, 1, params()))
        await service.arrived("asample", 2)
        reply.cancel()
        assert service.samples == []
        service.faults.silent.clear()
