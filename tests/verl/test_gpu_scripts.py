"""The scripts of examples/train_gpu start verl until the first call that needs a GPU, on 1 to 8 machines."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from transformers import Qwen3MoeConfig
from verl.single_controller.ray import ResourcePoolManager
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.config import omega_conf_to_dataclass, validate_config

from rollout_backend.verl import early_checks
from rollout_backend.verl.trainer_sizes import mini_batch_unit
from rollout_backend.verl.unsupported import refuse_unsupported
from rollout_backend.verl.verl_settings import settings_of
from rollout_backend.workbench.local.scripted import BYTE_MODEL

SCRIPTS = Path(__file__).parents[2] / "examples" / "train_gpu"
COLOCATED = (
    "trainer.v1.trainer_mode=colocate_async",
    "trainer.v1.colocate_async.num_warmup_batches=1",
    "+trainer.v1.sampler.sampler_kwargs.max_staleness=2",
)
OTHERS = [(file.name, ()) for file in sorted(SCRIPTS.glob("*.sh")) if file.name not in ("sync.sh", "asynchronous.sh")]
COMMANDS = [
    ("sync.sh", ()),
    ("asynchronous.sh", ()),
    *(pytest.param(*command, marks=pytest.mark.slow) for command in (*OTHERS, ("sync.sh", COLOCATED))),
]
MODES = {("asynchronous.sh", ()): "separate_async", ("sync.sh", COLOCATED): "colocate_async"}


class NeedsGpus(Exception):
    pass


@pytest.fixture
def overrides(ready, tmp_path):
    """Return what a script passes to verl, and which GPUs it needs."""
    model = tmp_path / "model"
    shutil.copytree(BYTE_MODEL, model)
    Qwen3MoeConfig(
        num_experts=8, num_experts_per_tok=2, num_hidden_layers=3, architectures=["Qwen3MoeForCausalLM"]
    ).save_pretrained(model)
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    print_arguments = "import json, sys; print(json.dumps(sys.argv[1:]))"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{print_arguments}' \"$@\"\n")
    python.chmod(0o755)

    def of(script: str, *more: str) -> list[str]:
        env = {
            "PATH": f"{python.parent}:{os.environ['PATH']}",
            "MODEL": str(model),
            "BACKEND": str(ready.own),
            "TRAIN": str(ready.rows),
            "VAL": str(ready.rows),
        }
        done = subprocess.run(["bash", SCRIPTS / script, *more], env=env, capture_output=True, text=True, check=True)
        module, *given = json.loads(done.stdout)[1:]
        assert module == "verl.trainer.main_ppo"
        return given

    return of


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of verl and torch
@pytest.mark.parametrize(("script", "more"), COMMANDS)
def test_verl_starts_until_it_needs_a_gpu(script, more, overrides, ready, monkeypatch):
    for name, value in ready.cloud.environ.items():
        monkeypatch.setenv(name, value)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides(script, *more))
    validate_config(config, need_reference_policy(config), need_critic(config))
    for section in ("actor", "rollout"):  # verl's workers make these: an unknown key fails there
        omega_conf_to_dataclass(config.actor_rollout_ref[section])
    OmegaConf.resolve(config)
    gpus: list[int] = []

    def first_call_that_needs_gpus(manager: ResourcePoolManager) -> None:
        gpus.append(manager.get_n_gpus())
        raise NeedsGpus

    monkeypatch.setattr(ResourcePoolManager, "create_resource_pool", first_call_that_needs_gpus)
    mode = config.trainer.v1.trainer_mode
    assert mode == MODES.get((script, more), "sync")
    trainer = get_trainer_cls(mode)(config=config)
    with pytest.raises(NeedsGpus):
        trainer.init()
    servers = config.actor_rollout_ref.rollout
    assert gpus[0] + servers.nnodes * servers.n_gpus_per_node == 8
    assert len(trainer.train_dataset) == 64
    if servers.name == "sglang":
        assert servers.engine_kwargs.sglang == {"incremental_streaming_output": True}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of verl and torch
@pytest.mark.parametrize("script", [file.name for file in sorted(SCRIPTS.glob("*.sh"))])
def test_a_script_trains_on_1_to_8_machines_or_the_check_says_with_which_mini_batch(script, overrides, monkeypatch):
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides(script))
    refuse_unsupported(config)
    actor, servers = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    settings = settings_of(config, ["a:1"])
    settings = settings.model_copy(update={"model": settings.model.model_copy(update={"context_length": None})})
    monkeypatch.setattr(early_checks, "check_parallel", lambda *_: ())  # the byte model is tiny
    size = actor.ppo_mini_batch_size
    refused = []
    for nodes in range(1, 9):
        config.trainer.nnodes, actor.ppo_mini_batch_size = nodes, size
        problems = [each for each in early_checks.check_engines(config, settings) if each.level == "problem"]
        if problems:
            [problem] = problems
            assert problem.setting == "actor_rollout_ref.actor.ppo_mini_batch_size"
            refused.append(nodes)
            for advised in re.findall(r"\d+", problem.text.partition("set it to ")[2]):
                actor.ppo_mini_batch_size = config.data.train_batch_size = int(advised)
                assert [*early_checks.check_sizes(config, 1, False, False)] == []
        assert actor.ppo_mini_batch_size * servers.n % mini_batch_unit(config, actor) == 0
        validate_config(config, need_reference_policy(config), need_critic(config))
        omega_conf_to_dataclass(actor)
    assert refused == [3, 5, 6, 7]
    assert not any("recompute" in each.setting for each in early_checks.check_memory(config))
    assert [*early_checks.check_loggers(config.trainer, {"HOME": "/nowhere"})] == []
