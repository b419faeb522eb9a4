"""What would end a training after its first step was sampled is found before verl's engines start."""

from __future__ import annotations

import json
import re
import types
from pathlib import Path

import pytest

from rollout_backend.config import ModelConfig
from rollout_backend.verl.early_checks import (
    check_classes,
    check_engines,
    check_image_prompts,
    check_loggers,
    check_memory,
)
from rollout_backend.verl.trainer_sizes import check_padding
from trainings import verl_settings

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
DYNAMIC = (f"{ACTOR}.use_dynamic_bsz=True", f"{ROLLOUT}.log_prob_use_dynamic_bsz=True")
MEGATRON = f"{ACTOR}.megatron"


def size_problems(*more, base=()):
    given = (f"{ROLLOUT}.name=sglang_cpu", f"{ROLLOUT}.n=8", "critic.enable=False", *DYNAMIC, *more)
    config = verl_settings("trainer.n_gpus_per_node=8", *given, base=base)
    model = types.SimpleNamespace(model=ModelConfig(path=Path("/nowhere")))
    problems = [result for result in check_engines(config, model) if result.level == "problem"]
    return {result.setting.removeprefix("actor_rollout_ref."): result.text for result in problems}


def install_sglang(folder, monkeypatch):
    """Let Python find the packages in `folder`, with SGLang 0.5.12."""
    information = folder / "packages" / "sglang-0.5.12.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.12\n")
    monkeypatch.syspath_prepend(folder / "packages")


SIZE, LIMIT = "actor.ppo_mini_batch_size", "actor.ppo_max_token_len_per_gpu"
LOG_PROBS, REFERENCE = "rollout.log_prob_max_token_len_per_gpu", "ref.log_prob_max_token_len_per_gpu"
CRITIC = ("critic.ppo_max_token_len_per_gpu", "critic.forward_max_token_len_per_gpu")
QUEUE = "transfer_queue.backend.SimpleStorage.total_storage_size"
LONG = "data.max_response_length=61440"


@pytest.mark.parametrize(
    ("more", "base", "found"),
    [
        ([f"{ACTOR}.ppo_mini_batch_size=64", "trainer.nnodes=3"], (), {SIZE: "24 ranks .* set it to 63 or 66"}),
        ([f"{ACTOR}.ppo_mini_batch_size=66", "trainer.nnodes=3"], (), {}),
        ([f"{ACTOR}.ppo_mini_batch_size=64", "trainer.nnodes=4096"], (), {SIZE: "32768 ranks .* set it to 4096"}),
        (
            [
                f"{ACTOR}.ppo_mini_batch_size=64",
                "trainer.nnodes=3",
                f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=3",
                f"{ACTOR}.ppo_max_token_len_per_gpu=8192",
            ],
            (),
            {},
        ),
        (
            [f"{ACTOR}.ppo_mini_batch_size=64", "trainer.nnodes=3", f"{MEGATRON}.context_parallel_size=3"],
            ("model_engine=megatron",),
            {},
        ),
        (
            [f"{ACTOR}.ppo_mini_batch_size=64", "trainer.nnodes=3", f"{MEGATRON}.tensor_model_parallel_size=2"],
            ("model_engine=megatron",),
            {SIZE: "12 ranks"},
        ),
        (
            [f"{ACTOR}.use_dynamic_bsz=False", f"{ACTOR}.ppo_micro_batch_size_per_gpu=24"],
            (),
            {SIZE: r"2048 rows, .* 8 ranks in whole micro-batches: set it to 240 or 264"},
        ),
        ([LONG], (), {LIMIT: "61,952 .* 16,384", LOG_PROBS: "61,952 .* 16,384"}),
        ([LONG, f"{ROLLOUT}.max_model_len=16384"], (), {}),
        (
            [
                LONG,
                f"{ACTOR}.ulysses_sequence_parallel_size=4",
                f"{ACTOR}.ppo_mini_batch_size=64",
            ],
            (),
            {},
        ),
        (
            [
                LONG,
                f"{ACTOR}.use_dynamic_bsz=False",
                f"{ROLLOUT}.log_prob_use_dynamic_bsz=False",
            ],
            (),
            {},
        ),
        (
            ["critic.enable=True", "critic.use_dynamic_bsz=True", "data.max_response_length=40000"],
            (),
            dict.fromkeys((LIMIT, LOG_PROBS, *CRITIC), ""),
        ),
        (
            [f"{ACTOR}.use_kl_loss=True", "data.max_response_length=20000"],
            (),
            dict.fromkeys((LIMIT, LOG_PROBS, REFERENCE), ""),
        ),
        ([LONG, "trainer.val_only=True"], (), {}),
    ],
)
def test_sizes_that_end_verls_first_update_are_found_before_it(more, base, found):
    problems = size_problems(*more, base=base)
    assert problems.keys() == found.keys()
    for setting, text in found.items():
        assert re.search(text, problems[setting])


@pytest.mark.parametrize(
    ("more", "tasks", "found"),
    [
        (["data.train_batch_size=512"], 0, None),
        (["data.train_batch_size=2048"], 0, ("warning", "100,000 rows, and 16,384 rollouts")),
        (["data.train_batch_size=16384"], 0, ("problem", "100,000 rows, and 131,072 rollouts")),
        (["data.train_batch_size=1024"], 0, None),
        (
            ["data.train_batch_size=1024", "trainer.v1.trainer_mode=separate_async"],
            0,
            ("warning", "100,000 rows, and 16,384 rollouts"),
        ),
        (["data.train_batch_size=16384", f"{QUEUE}=null"], 0, None),
        (["data.train_batch_size=16384", "trainer.use_v1=False"], 0, None),
        (
            ["data.train_batch_size=64", f"{QUEUE}=1000", f"{ROLLOUT}.val_kwargs.n=4"],
            251,
            ("problem", "1,004 rollouts"),
        ),
        (["data.train_batch_size=64", f"{QUEUE}=8192", f"{ROLLOUT}.val_kwargs.n=4"], 251, None),
    ],
)
def test_a_queue_that_is_too_small_for_the_rows_of_a_batch_is_found(tmp_path, more, tasks, found):
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "x"}\n' * tasks)
    given = (f"{ROLLOUT}.n=8", f"data.val_files={tmp_path / 'tasks.jsonl'}", *more)
    config = verl_settings(f"{ROLLOUT}.name=sglang_cpu", "critic.enable=False", *DYNAMIC, *given)
    model = types.SimpleNamespace(model=ModelConfig(path=Path("/nowhere")))
    results = [each for each in check_engines(config, model) if each.setting == QUEUE]
    assert [each.level for each in results] == ([found[0]] if found else [])
    assert not found or found[1] in results[0].text


def check_with(check, *arguments):
    return [(result.level, result.setting, result.text) for result in check(*arguments)]


@pytest.mark.parametrize(
    ("logger", "environ", "netrc", "found"),
    [
        (["console", "file"], {}, "", ""),
        ("wandb", {}, "", "set WANDB_API_KEY, or WANDB_MODE=offline"),
        (["console", "wandb"], {"WANDB_API_KEY": "x"}, "", ""),
        (["wandb"], {"WANDB_MODE": "offline"}, "", ""),
        (["wandb"], {"WANDB_MODE": "online"}, "", "set WANDB_API_KEY"),
        (["wandb"], {}, "machine api.wandb.ai login user password x", ""),
        (["wandb"], {}, "machine api.other.ai login user password x", "set WANDB_API_KEY"),
        (["wandb"], {"WANDB_BASE_URL": "https://api.other.ai"}, "machine api.other.ai login user password x", ""),
        (["wandb"], {}, "not a netrc", ""),
        (["trackio"], {}, "", "needs the package trackio, which is not installed"),
    ],
)
def test_a_logger_that_would_end_the_training_is_found(tmp_path, logger, environ, netrc, found):
    if netrc:
        (tmp_path / ".netrc").write_text(netrc)
    results = check_with(check_loggers, {"logger": logger}, {"HOME": str(tmp_path), **environ})
    assert [level for level, _, _ in results] == ["problem"] * bool(found)
    assert all(found in text for _, _, text in results)


@pytest.mark.parametrize(
    ("more", "base", "found"),
    [
        ([], (), ["attn_implementation"]),
        (["trainer.device=cpu"], (), []),
        (["+actor_rollout_ref.model.override_config.attn_implementation=sdpa"], (), []),
        (
            [
                "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
                "actor_rollout_ref.model.use_remove_padding=False",
                *DYNAMIC,
            ],
            (),
            ["use_dynamic_bsz"],
        ),
        ([], ("model_engine=megatron",), ["recompute_granularity"]),
        ([f"{MEGATRON}.override_transformer_config.recompute_granularity=full"], ("model_engine=megatron",), []),
    ],
)
def test_settings_that_need_too_much_memory_are_warned_of(more, base, found):
    results = check_with(check_memory, verl_settings(*more, base=base))
    assert [setting.rpartition(".")[2] for _, setting, _ in results] == found
    assert all(level == "warning" for level, _, _ in results)


@pytest.mark.parametrize(
    ("more", "gib", "found"),
    [
        (["data.train_batch_size=512", "data.max_response_length=32768"], 11, ["11 GiB of the 11 GiB"]),
        (["data.train_batch_size=512", "data.max_response_length=32768"], 12, []),
        (["data.train_batch_size=64", "data.max_response_length=131072"], 5, ["5 GiB of the 5 GiB"]),
        (["data.train_batch_size=512", "data.max_response_length=32768", "trainer.use_v1=False"], 1, []),
    ],
)
def test_a_batch_that_verl_pads_to_more_than_the_machines_memory_is_warned_of(more, gib, found):
    config = verl_settings(f"{ROLLOUT}.n=8", *more)
    rollouts = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    results = check_with(check_padding, config, rollouts, gib << 30)
    assert [(level, setting) for level, setting, _ in results] == [("warning", "data.max_response_length")] * len(
        found
    )
    assert all(part in text for part, (_, _, text) in zip(found, results, strict=True))


@pytest.mark.parametrize(
    ("fields", "images", "allowed", "is_refused"),
    [
        ("rid: str", True, 16, True),
        ("rid: str", True, 1, False),
        ("rid: str", False, 16, False),
        ("return_prompt_token_ids: bool", True, 16, False),
    ],
)
def test_an_sglang_that_does_not_return_prompts_with_images_is_refused(
    tmp_path, monkeypatch, fields, images, allowed, is_refused
):
    """SGLang 0.5.12 returns only the number of their tokens."""
    managers = tmp_path / "packages" / "sglang" / "srt" / "managers"
    managers.mkdir(parents=True)
    (tmp_path / "packages" / "sglang" / "__init__.py").touch()
    (managers / "io_struct.py").write_text(f"class GenerateReqInput:\n    {fields}\n")
    install_sglang(tmp_path, monkeypatch)
    if images:
        (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessorFast"}')
    gateway = types.SimpleNamespace(max_images=allowed)
    config = types.SimpleNamespace(model=ModelConfig(path=tmp_path), gateway=gateway)
    results = check_with(check_image_prompts, config, "sglang")
    assert [(level, setting) for level, setting, _ in results] == [("problem", "gateway.max_images")] * is_refused
    assert all("SGLang 0.5.12" in text for _, _, text in results)
    assert not check_with(check_image_prompts, config, "vllm")


@pytest.mark.parametrize(
    ("described", "trusted", "levels"),
    [
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, False, []),
        ({"model_type": "qwen3", "architectures": ["Qwen9ForCausalLM"]}, False, ["warning"]),
        ({"model_type": "inkling", "architectures": ["InklingForCausalLM"]}, False, ["problem", "warning"]),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, True, []),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, False, ["problem"]),
        (None, False, []),
    ],
)
def test_a_model_that_verls_environment_is_too_old_for_is_found(tmp_path, monkeypatch, described, trusted, levels):
    package = tmp_path / "packages" / "sglang"
    (package / "srt" / "models").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "srt" / "models" / "qwen3.py").write_text("class Qwen3ForCausalLM: ...")
    install_sglang(tmp_path, monkeypatch)
    if described is not None:
        (tmp_path / "config.json").write_text(json.dumps(described))
    model = ModelConfig(path=tmp_path, trust_remote_code=trusted)
    assert [level for level, _, _ in check_with(check_classes, model, "sglang")] == levels
