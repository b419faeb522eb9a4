"""vLLM's command line, the list of its servers, and the checks of a server that is already running."""

import json
import subprocess
from itertools import chain, repeat
from pathlib import Path
from unittest.mock import AsyncMock

import aiohttp
import pytest

from builders import run_config
from rollout_backend.config import ModelConfig, ServingConfig
from rollout_backend.errors import ConfigError, PreflightError, ServingError
from rollout_backend.model.serving import engine_routing
from rollout_backend.model.serving.engine_fleet import EngineFleet
from rollout_backend.model.serving.external_engine import ExternalEngineFactory, check_vllm, served_model
from rollout_backend.model.serving.local_engine import ServerNode, vllm_command
from tests.emulators.scripted_vllm import ScriptedVllm

MODEL = ModelConfig(path=Path("/models/Qwen3-8B"), name="qwen", context_length=4096)
PYTHON = Path("/opt/vllm/bin/python")
NODE = ServerNode("127.0.0.1", 4000, first_gpu=2)


def serving(**fields) -> ServingConfig:
    return ServingConfig(engine="vllm", python=PYTHON, **fields)


def test_command_of_a_cpu_server():
    argv, env = vllm_command(MODEL, serving(device="cpu", dtype="float32", threads=2), NODE, inherited={})
    line = " ".join(argv)
    assert line.startswith("/opt/vllm/bin/python -m vllm.entrypoints.openai.api_server --model /models/Qwen3-8B ")
    for words in (
        "--served-model-name qwen",
        "--host 127.0.0.1",
        "--dtype float32",
        "--max-model-len 4096",
        "--enable-scale-out",
        "--logprobs-mode processed_logprobs",
        "--generation-config vllm",
        "--enable-prompt-tokens-details",
        "--block-size 32 --num-gpu-blocks-override 1024",
    ):
        assert words in line
    assert (env["OMP_NUM_THREADS"], env["VLLM_SERVER_DEV_MODE"]) == ("2", "1")


def test_command_of_a_gpu_server():
    config = serving(tensor_parallel=2, max_total_tokens=100_000, extra_args=("--seed", "1"))
    argv, env = vllm_command(MODEL, config, NODE, inherited={"RAY_ADDRESS": "ray"})
    assert env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "RAY_ADDRESS" not in env
    assert "--tensor-parallel-size 2" in " ".join(argv)
    assert "--num-gpu-blocks-override 6250" in " ".join(argv)
    assert "--enforce-eager" not in argv
    assert argv[-2:] == ["--seed", "1"]
    _, env = vllm_command(MODEL, config, NODE, inherited={"CUDA_VISIBLE_DEVICES": "7,6,5,4"})
    assert env["CUDA_VISIBLE_DEVICES"] == "5,4"


def test_a_server_that_other_machines_reach_is_refused():
    with pytest.raises(ConfigError, match="control endpoints need no key"):
        vllm_command(MODEL, serving(), ServerNode("0.0.0.0", 4000))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"serving": {"engine": "vllm", "kind": "ray"}}, "engine=vllm runs with kind=process or kind=external"),
        ({"serving": {"engine": "vllm", "data_parallel": 2}}, "data_parallel=2 needs engine=sglang"),
        ({"serving": {"engine": "vllm"}, "router": {"policy": "random"}}, r"router\.policy=random has no effect"),
        (
            {"serving": {"engine": "vllm"}, "gateway": {"kind": "ray"}, "router": {"host": "0.0.0.0"}},
            "must reach each vLLM server",
        ),
    ],
)
def test_settings_that_vllm_does_not_support_are_refused(sections, words):
    with pytest.raises(ConfigError, match=words):
        run_config(**sections)


async def test_gateways_get_the_list_of_servers_that_serve(tmp_path):
    with ScriptedVllm(["x"]) as one, ScriptedVllm(["x"]) as two:
        config = run_config(serving={"engine": "vllm", "kind": "external", "urls": [one.url, two.url]})
        async with EngineFleet(config, tmp_path) as fleet, aiohttp.ClientSession() as http:

            async def listed() -> list[str]:
                async with http.get(f"{fleet.router_url}/workers") as reply:
                    return [worker["url"] for worker in (await reply.json())["workers"]]

            assert sorted(await listed()) == sorted([one.url, two.url])
            async with http.post(f"{fleet.router_url}/inference/v1/generate", json={}) as reply:
                assert reply.status == 503
            await fleet.follow([two.url])
            assert await listed() == [two.url]
        assert not (tmp_path / "router.log").exists()


@pytest.mark.parametrize(("kind", "paused"), [("process", True), ("external", False)])
async def test_only_servers_that_this_side_started_are_paused(tmp_path, kind, paused, monkeypatch):
    """Also if the first request is lost: a server that is not resumed would hold its calls for a whole step."""
    for name in ("pause_generation", "resume_generation"):
        answers = chain([AsyncMock(side_effect=ServingError("lost"))], repeat(getattr(engine_routing, name)))
        monkeypatch.setattr(engine_routing, name, lambda *args, answers=answers: next(answers)(*args))
    with ScriptedVllm(["x"]) as engine:
        urls = [engine.url]
        external = run_config(serving={"engine": "vllm", "kind": "external", "urls": urls})
        config = external if kind == "external" else run_config(serving={"engine": "vllm", "python": PYTHON})
        factory = ExternalEngineFactory(external, tmp_path)
        async with EngineFleet(config, tmp_path, factory=factory) as fleet:
            await fleet.pause()
            assert engine.paused is paused
            await fleet.resume()
            assert not engine.paused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scale_out": False}, "--enable-scale-out"),
        ({"raw_logprobs": True}, "--logprobs-mode processed_logprobs"),
    ],
)
async def test_a_server_without_the_needed_options_is_refused(options, words):
    with ScriptedVllm(["x"] * 2, **options) as engine:
        with pytest.raises(PreflightError, match=words):
            await check_vllm(engine.url)
        with pytest.raises(PreflightError, match=words):
            await served_model(engine.url)


async def test_a_running_server_is_recognized():
    with ScriptedVllm(["x"]) as engine:
        assert (await served_model(engine.url)).engine == "vllm"


@pytest.mark.engine
@pytest.mark.slow
def test_vllm_accepts_the_command_line(vllm_python):
    """vLLM's own parser accepts it; that needs no GPU."""
    config = ServingConfig(engine="vllm", python=vllm_python, tensor_parallel=2, pipeline_parallel=2)
    argv, _ = vllm_command(MODEL, config, NODE)
    on_cpu, env = vllm_command(MODEL, ServingConfig(engine="vllm", python=vllm_python, device="cpu"), NODE)
    script = (
        "import json, sys; from vllm.entrypoints.launchers.cli_args import make_arg_parser;"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser;"
        "parsed = [make_arg_parser(FlexibleArgumentParser()).parse_args(argv) for argv in json.load(sys.stdin)];"
        "print([(each.logprobs_mode, each.tensor_parallel_size) for each in parsed])"
    )
    given = json.dumps([argv[3:], on_cpu[3:]])
    done = subprocess.run([argv[0], "-c", script], input=given, env=env, capture_output=True, text=True, check=False)
    expected = "[('processed_logprobs', 2), ('processed_logprobs', 1)]"
    assert done.stdout.splitlines()[-1:] == [expected], done.stderr
