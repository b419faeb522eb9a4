"""A real SGLang server on two machines of Ray's test cluster, one pipeline stage on each, on the CPU."""

from pathlib import Path

import httpx
import pytest

from builders import run_config
from ray_cluster import machine, ray_machines
from rollout_backend.model.serving.engine_fleet import EngineFleet
from rollout_backend.model.serving.install import find_engine
from rollout_backend.testing.forward_pass import reference_logprobs
from tiny_engine import make_models

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.release, pytest.mark.timeout(600)]


async def test_one_server_computes_on_two_machines(repository: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_models(find_engine(), repository, model, options="heads=4, tied=False")
    config = run_config(
        model={"path": str(model), "renderer": "chatml"},
        serving={
            "kind": "ray",
            "device": "cpu",
            "dtype": "float32",
            "pipeline_parallel": 2,
            "nodes_per_server": 2,
            "startup_timeout_s": 400,
        },
    )
    prompt = list(b"What is 3 + 4?")
    asked = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 32}, "return_logprob": True}
    with ray_machines({"num_cpus": 1}, [{"num_cpus": 1}]):
        async with EngineFleet(config, tmp_path) as fleet:
            [server] = [each.engine for each in fleet._engines]
            assert len({machine(await node.read("url")) for node in server._nodes}) == 2
            async with httpx.AsyncClient(timeout=60) as http:
                reply = (await http.post(f"{fleet.router_url}/generate", json=asked)).raise_for_status().json()
    sampled = reply["output_ids"]
    [reference] = reference_logprobs(find_engine(), model, [prompt + sampled])
    stored = [logprob for logprob, *_ in reply["meta_info"]["output_token_logprobs"]]
    assert len(stored) == len(sampled) > 0
    assert stored == pytest.approx(reference[len(prompt) :], abs=1e-3)
