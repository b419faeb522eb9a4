"""The logprobs of a real engine equal the model's."""

import asyncio
import math
import sys
from pathlib import Path

import pytest

from rollout_backend.errors import ServingError
from rollout_backend.gateway.engine.client import EngineClient
from rollout_backend.gateway.engine.protocol import EngineRequest
from rollout_backend.gateway.engine.vllm import VllmProtocol
from rollout_backend.serving.engine_fleet import EngineFleet
from rollout_backend.serving.install import find_engine, find_model
from rollout_backend.testing.forward_pass import reference_logprobs

WORST_DIFFERENCE = 1e-4  # in probability: both sides compute in float32, with different orders of summation


def test_failed_forward_pass_reports_its_output(tmp_path):
    with pytest.raises(ServingError, match=r"forward pass with .* failed[\s\S]*No module named 'torch'"):
        reference_logprobs(Path(sys.executable), tmp_path, [[1, 2]])


@pytest.fixture(params=["sglang", "vllm"])
async def sampled_by(request, make_config, tmp_path):
    """A client of a fleet with one engine."""
    if request.param == "vllm":
        request.getfixturevalue("vllm_python")
    config = make_config(
        router={},  # vLLM is called without one
        model={"path": find_model()},
        serving={
            "engine": request.param,
            "device": "cpu",
            "dtype": "float32",
            "threads": 1,
            "max_running_requests": 8,
        },
    )
    async with EngineFleet(config, tmp_path) as fleet:
        if request.param == "vllm":
            client = EngineClient(fleet.engine_urls[0], 200.0, protocol=VllmProtocol())
        else:
            client = EngineClient(fleet.router_url, 200.0)
        await client.start()
        yield client
        await client.close()


def test_invalid_temperatures_are_refused(tmp_path):
    for temperatures in ([1.0], [1.0, 0.0]):
        with pytest.raises(ValueError, match="one number above 0 for each"):
            reference_logprobs(Path(sys.executable), tmp_path, [[1], [2]], temperatures)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.release  # the gateway's test of token identity compares the same values
@pytest.mark.timeout(400)  # a real engine and a forward pass, on cores that other processes may use
async def test_logprobs_equal_those_of_a_plain_forward_pass(sampled_by):
    """The engine reports a token's logprob at its sampling temperature."""
    prompts = [
        [1, 4093, 198, 1780, 314, 216, 35, 1232, 216, 36, 47, 2, 198, 1, 520, 9531, 198],
        [1, 4093, 198, 6004, 2, 198, 1, 520, 9531, 198],
    ]
    cases = [(prompt, temperature) for prompt in prompts for temperature in (1.0, 0.7)]

    params = {"max_new_tokens": 24, "top_p": 1.0, "top_k": -1}
    calls = (
        sampled_by.generate(EngineRequest(prompt, {**params, "temperature": temperature}, "s"))
        for prompt, temperature in cases
    )
    replies = await asyncio.gather(*calls)
    sequences = [[*prompt, *reply.token_ids] for (prompt, _), reply in zip(cases, replies, strict=True)]
    temperatures = [temperature for _, temperature in cases]
    rows = await asyncio.to_thread(reference_logprobs, find_engine(), find_model(), sequences, temperatures)

    for row, ids, reply in zip(rows, sequences, replies, strict=True):
        assert len(row) == len(ids)
        assert math.isnan(row[0])
        computed = row[-len(reply.token_ids) :]
        differences = [abs(math.exp(a) - math.exp(b)) for a, b in zip(computed, reply.logprobs, strict=True)]
        assert max(differences) < WORST_DIFFERENCE
