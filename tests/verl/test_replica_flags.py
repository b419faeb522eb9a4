"""The CPU replica's servers have the options that verl's own launch code gives its SGLang servers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from transformers import Qwen3MoeConfig
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig, RolloutConfig

from rollout_backend.local.scripted import BYTE_MODEL
from rollout_backend.serving.engine_commands import ServerNode
from rollout_backend.verl.early_checks import set_streams
from verl_cpu.replica_server import server_command
from verl_cpu.replica_settings import model_of, serving_of

ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
VERLS_OPTIONS = """
import asyncio, contextlib, dataclasses, importlib.abc, importlib.machinery, json, sys, types
from unittest.mock import MagicMock

@dataclasses.dataclass
class Fields:
    enable_weights_cpu_backup: bool = False

class ServerArgs(Fields):
    def __init__(self, **args):
        print("OPTIONS", json.dumps(args))
        raise SystemExit

class Stub(types.ModuleType):
    __path__ = []
    __version__ = "0.5.12"  # which verl pins
    def __getattr__(self, name):
        return ServerArgs if name == "ServerArgs" else MagicMock()

class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("sglang", "cupy"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return Stub(spec.name)
    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Stubs())
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer
for file in sys.argv[1:]:
    config = OmegaConf.load(file)
    server = object.__new__(SGLangHttpServer)
    server.config = omega_conf_to_dataclass(config.rollout)
    server.model_config = omega_conf_to_dataclass(config.model, dataclass_type=HFModelConfig)
    server.rollout_mode = RolloutMode.HYBRID
    server.nnodes, server.node_rank, server.base_gpu_id = 1, 0, 0
    server._disaggregation_role, server._disaggregation_bootstrap_port = "null", None
    with contextlib.suppress(SystemExit):
        asyncio.run(server.launch_server())
"""
OF_GPUS = {  # what these options say has no meaning on the CPU, or `launch_server.py` does it
    *("attention_backend", "base_gpu_id", "disable_cuda_graph", "enable_memory_saver", "enable_weights_cpu_backup"),
    *("gpu_id_step", "mem_fraction_static"),
    "load_format",  # verl sends the weights of its first step, and the replica begins with the model's own
    "log_level",
    "max_running_requests",  # the replica has its own setting
}
SGLANGS_DEFAULTS = {"dp_size": 1, "ep_size": 1, "node_rank": 0, "nnodes": 1}
OF_THE_CPU = {
    *("--attention-backend", "--device", "--disable-fast-image-processor", "--disable-overlap-schedule"),
    *("--grammar-backend", "--host", "--log-level-http", "--lora-backend", "--max-loras-per-batch"),
    *("--max-running-requests", "--max-total-tokens", "--mm-attention-backend", "--port", "--sampling-backend"),
    "--sleep-on-idle",
}


def replicas_options(rollout: Any, model: Any) -> dict[str, list[str]]:
    serving = serving_of(rollout, model).model_copy(update={"python": sys.executable})
    argv, _ = server_command(model_of(rollout, model), serving, ServerNode("127.0.0.1", 1, 0, 0, ""))
    options: dict[str, list[str]] = {}
    for word in argv[2:]:
        if word.startswith("--"):
            values = options.setdefault(word, [])
        else:
            values.append(word)
    return options


CASES = {
    "plain": [],
    "adapter": [f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=[q_proj, v_proj]"],
    "experts": [f"{ROLLOUT}.enable_rollout_routing_replay=True"],
    "tokenizer": [f"{ROLLOUT}.skip_tokenizer_init=False", f"{MODEL}.trust_remote_code=True"],
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Return verl's settings in each case, and the options that verl gives SGLang for them."""
    folder = tmp_path_factory.mktemp("cases")
    model = folder / "model"
    shutil.copytree(BYTE_MODEL, model)
    Qwen3MoeConfig(num_experts=8, architectures=["Qwen3MoeForCausalLM"]).save_pretrained(model)
    given = [f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.tensor_model_parallel_size=1", f"{MODEL}.path={model}"]
    configs, files = [], [str(folder / f"{case}.yaml") for case in CASES]
    with initialize_config_module("verl.trainer.config", version_base=None):
        for overrides, file in zip(CASES.values(), files, strict=True):
            config = compose("ppo_trainer", [*given, *overrides])
            set_streams(config)
            OmegaConf.resolve(config)
            OmegaConf.save(config.actor_rollout_ref, file)
            configs.append(config.actor_rollout_ref)
    ran = subprocess.run([sys.executable, "-c", VERLS_OPTIONS, *files], capture_output=True, text=True, check=False)
    printed = [line.partition("OPTIONS ")[2] for line in ran.stdout.splitlines()]
    verls = [json.loads(options) for options in printed if options]
    assert len(verls) == len(CASES), ran.stderr[-3000:]
    return dict(zip(CASES, zip(configs, verls, strict=True), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_the_replica_has_verls_options(cases, case):
    config, verls = cases[case]
    rollout: RolloutConfig = omega_conf_to_dataclass(config.rollout)
    hf_model: HFModelConfig = omega_conf_to_dataclass(config.model, dataclass_type=HFModelConfig)
    replicas = replicas_options(rollout, hf_model)
    for name, value in verls.items():
        option = f"--{name.replace('_', '-')}"
        mine = replicas.pop(option, None)
        if name in OF_GPUS or (name == "mm_attention_backend" and value is None):
            continue
        expected = [] if value is True else [str(each) for each in (value if isinstance(value, list) else [value])]
        if mine is None and (value in (False, None, "{}") or SGLANGS_DEFAULTS.get(name) == value):
            continue
        assert mine == expected, f"{option}: verl {value}, the replica {mine}"
    assert {*replicas} <= OF_THE_CPU, "the replica's servers have options that verl's do not have"
