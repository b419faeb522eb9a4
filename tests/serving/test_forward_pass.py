"""The logprobs of a real engine behind the router equal the model's."""

import asyncio
import math
import sys
from pathlib import Path

import aiohttp
import pytest

from rollout_backend.errors import ServingError
from rollout_backend.serving.engine_fleet import EngineFleet
from rollout_backend.serving.forward_pass import reference_logprobs
from rollout_backend.serving.install import find_engine, find_model

WORST_DIFFERENCE = 1e-4  # in probability: both sides compute in float32, with different orders of summation


def test_failed_forward_pass_reports_its_output(tmp_path):
    with pytest.raises(ServingError, match=r"forward pass with .* failed[\s\S]*No module named 'torch'"):
        reference_logprobs(Path(sys.executable), tmp_path, [[1, 2]])


@pytest.fixture
async def fleet(make_config, tmp_path):
    config = make_config(
        model={"path": find_model()},
        serving={"device": "cpu", "dtype": "float32", "threads": 1, "max_running_requests": 8},
    )
    async with EngineFleet(config, tmp_path) as fleet:
        yield fleet


def test_invalid_temperatures_are_refused(tmp_path):
    for temperatures in ([1.0], [1.0, 0.0]):
        with pytest.raises(ValueError, match="one number above 0 for each"):
            reference_logprobs(Path(sys.executable), tmp_path, [[1], [2]], temperatures)


@pytest.mark.engine
@pytest.mark.slow  # the gateway's test of token identity compares the same values
@pytest.mark.timeout(400)  # a real engine and a forward pass, on cores that other processes may use
async def test_logprobs_equal_those_of_a_plain_forward_pass(fleet):
    """The engine reports a token's logprob at its sampling temperature."""
    prompts = [
        [1, 4093, 198, 1780, 314, 216, 35, 1232, 216, 36, 47, 2, 198, 1, 520, 9531, 198],
        [1, 4093, 198, 6004, 2, 198, 1, 520, 9531, 198],
    ]
    cases = [(prompt, temperature) for prompt in prompts for temperature in (1.0, 0.7)]

    async with aiohttp.ClientSession() as http:

        async def generate(prompt, temperature):
            body = {
                "input_ids": prompt,
                "sampling_params": {"max_new_tokens": 24, "temperature": temperature, "ignore_eos": True},
                "return_logprob": True,
            }
            headers = {"X-SMG-Routing-Key": "session"}
            async with http.post(f"{fleet.router_url}/generate", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
                return await response.json()

        replies = await asyncio.gather(*(generate(*case) for case in cases))

    sequences, reported = [], []
    for (prompt, _), reply in zip(cases, replies, strict=True):
        pairs = reply["meta_info"]["output_token_logprobs"]
        assert [token for _, token, *_ in pairs] == reply["output_ids"]
        assert len(pairs) == 24
        sequences.append([*prompt, *reply["output_ids"]])
        reported.append([logprob for logprob, *_ in pairs])
    temperatures = [temperature for _, temperature in cases]
    rows = await asyncio.to_thread(reference_logprobs, find_engine(), find_model(), sequences, temperatures)

    for row, ids, logprobs in zip(rows, sequences, reported, strict=True):
        assert len(row) == len(ids)
        assert math.isnan(row[0])
        differences = [abs(math.exp(a) - math.exp(b)) for a, b in zip(row[-24:], logprobs, strict=True)]
        assert max(differences) < WORST_DIFFERENCE
