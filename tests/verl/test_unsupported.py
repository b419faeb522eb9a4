"""verl settings that this backend does not support, in verl's real tree of settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from rollout_backend.errors import ConfigError
from rollout_backend.verl.unsupported import refuse_unsupported
from rollout_backend.verl.vllm_middleware import MIDDLEWARE
from trainings import verl_settings
from verl_cpu.environment import overrides

ROLLOUT, MODEL, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.model", "actor_rollout_ref.actor"
ASYNCHRONOUS = "trainer.v1.trainer_mode=separate_async"


def verl_config(*more: str, **base: Any) -> Any:
    return verl_settings(f"{ROLLOUT}.name=sglang", *more, **base)


ESTIMATOR, OPTIMAL = "algorithm.adv_estimator", "optimal_token_baseline"
WEIGH = "trainer.v1.sampler.sampler_kwargs.weigh_rollouts"
VLLM = (f"{ROLLOUT}.name=vllm", f"+{ROLLOUT}.engine_kwargs.vllm.middleware={MIDDLEWARE}")


@pytest.mark.parametrize(
    "more",
    [
        [],
        *(
            ["trainer.use_v1=False", f"{ESTIMATOR}={name}"]
            for name in ("gae", "remax", "grpo_passk", "rloo", f"tir_{OPTIMAL}")
        ),
        ["trainer.use_v1=False", "algorithm.use_kl_in_reward=True", f"{ESTIMATOR}=rloo"],
        ["algorithm.use_kl_in_reward=True", f"{ESTIMATOR}=reinforce_plus_plus"],
        ["algorithm.rollout_correction.rollout_rs=seq_mean_k3", f"{ESTIMATOR}=grpo_skip_missing"],
        [f"+{WEIGH}=True", f"{ESTIMATOR}=opo_skip_missing"],
        [
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
            "actor_rollout_ref.actor.loss_scale_factor=9",
        ],
        ["trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.hybrid_rollout.enable_switch=True"],
        [f"{MODEL}.lora_rank=8", f"+{MODEL}.lora.merge=True", ASYNCHRONOUS],
        [f"{MODEL}.lora_rank=8"],
        [f"{MODEL}.lora_rank=8", "trainer.use_v1=False"],
        ["reward.num_workers=0"],
        VLLM,
        [*VLLM, f"{MODEL}.lora_rank=8"],
    ],
)
def test_supported_settings_pass(more: list[str]) -> None:
    refuse_unsupported(verl_config(*more))


@pytest.mark.parametrize(
    ("more", "advice"),
    [
        (f"{ROLLOUT}.logprobs_mode=raw_logprobs", "set it to processed_logprobs"),
        (f"{ROLLOUT}.enable_rollout_routing_replay=True", "the routing in vLLM's replies is not read"),
    ],
)
def test_vllms_replies_must_be_those_of_the_trained_model(more: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        refuse_unsupported(verl_config(*VLLM, more))


def test_training_on_the_cpu_is_supported() -> None:
    refuse_unsupported(verl_settings(base=tuple(overrides())))


RECORD = f"{ROLLOUT}.enable_rollout_routing_replay"
METRICS = f"{ROLLOUT}.moe_load_balance_metrics_interval"


@pytest.mark.parametrize("engine", ["megatron", "veomni"])
def test_routed_experts_are_replayed_by_engines_that_can_and_recorded_for_them(engine: str) -> None:
    replay = f"actor_rollout_ref.actor.{engine}.router_replay.mode"
    trainer = {"base": (f"model_engine={engine}",)}
    refuse_unsupported(verl_config(f"{replay}=R2", **trainer))
    refuse_unsupported(verl_config(f"{replay}=R3", f"{RECORD}=True", **trainer))
    cache = f"{ROLLOUT}.engine_kwargs.sglang.enable_hierarchical_cache=True"
    refuse_unsupported(verl_config(f"+{cache}"))
    with pytest.raises(ConfigError, match=f"  {cache}: tokens that come back .* get the routing of others"):
        refuse_unsupported(verl_config(f"{replay}=R3", f"{RECORD}=True", f"+{cache}", **trainer))
    with pytest.raises(ConfigError, match=f"{replay}=R3: the servers record no routing: set {RECORD}=True"):
        refuse_unsupported(verl_config(f"{replay}=R3", **trainer))
    with pytest.raises(ConfigError, match=f"{RECORD}=True: the actor does not replay the routing"):
        refuse_unsupported(verl_config(f"{RECORD}=True", **trainer))


def test_other_engines_replay_no_routed_experts() -> None:
    replay = "actor_rollout_ref.actor.fsdp_config.router_replay.mode"
    with pytest.raises(ConfigError, match=f"{replay}=R3: with actor.strategy=fsdp.* verl replays no routing"):
        refuse_unsupported(verl_config(f"+{replay}=R3", f"{RECORD}=True"))
    refuse_unsupported(verl_config(f"{METRICS}=5", f"{RECORD}=True"))


UNSUPPORTED: list[dict[str, str]] = [  # each set in one tree, whose problems are reported at once
    {
        f"{ROLLOUT}.name=vllm": rf"add \+{ROLLOUT}\.engine_kwargs\.vllm\.middleware=rollout_backend\.verl\.",
        f"{ROLLOUT}.enable_rollout_routing_replay=True": "other strategies cannot",
        f"{MODEL}.lora.rank=8": r"lora\.merge=True",
    },
    {
        f"{ROLLOUT}.name=trtllm": "set it to sglang or vllm",
        f"{ROLLOUT}.disaggregation.enabled=True": "set it to False",
        f"{ROLLOUT}.moe_load_balance_metrics_interval=5": "servers record no routing",
        f"{ROLLOUT}.router_config_path=router.yaml": "own router",
        f"{ROLLOUT}.agent.agent_loop_config_path=loops.yaml": "agents in containers",
        f"{ROLLOUT}.ignore_eos=True": "set it to False",
        f"{ROLLOUT}.multi_turn.enable=True": "controls its turns",
        f"{ROLLOUT}.multi_turn.tool_config_path=tools.yaml": "its own tools",
        f"{ROLLOUT}.multi_turn.function_tool_path=tools.py": "its own tools",
        "+data.apply_chat_template_kwargs.enable_thinking=False": r"model\.renderer_options",
        "+data.mm_processor_kwargs.max_pixels=100": "own processor",
        "+reward.custom_reward_function.reward_kwargs.scale=2": "give it defaults",
        "reward.reward_manager.name=dapo": "computed by the agent",
        "reward.reward_manager.source=importlib": "computed by the agent",
        "reward.reward_model.enable=True": "computed by the agent",
        "reward.sandbox_fusion.url=http://sandbox": "computed by the agent",
        "+custom_reward_function.reward_kwargs.scale=2": "give it defaults",
        "reward_model.enable=True": "computed by the agent",
        "reward_model.reward_manager=dapo": "computed by the agent",
        "sandbox_fusion.url=http://sandbox": "computed by the agent",
        "distillation.enabled=True": "teacher",
        f"{ESTIMATOR}=gdpo": "grpo_skip_missing",
        f"{MODEL}.lora_adapter_path=/adapter": r"lora\.merge=True",
        "algorithm.use_kl_in_reward=True": r"actor\.use_kl_loss=True",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm": r"set .*\.loss_scale_factor",
        "+reward.reward_kwargs.max_resp_len=9": r"training\.mask",
    },
    {f"{ESTIMATOR}=opo": "0 / 0.*opo_skip_missing"},
    *({f"{ESTIMATOR}={name}": r"set trainer\.use_v1=False"} for name in ("remax", OPTIMAL, f"tir_{OPTIMAL}")),
    *(
        {f"{ESTIMATOR}={name}": f"once for each of its rows.* use {ours}_skip_missing"}
        for name, ours in (
            ("gpg", "gpg"),
            ("grpo_passk", "grpo_passk"),
            ("grpo_vectorized", "grpo"),
            ("reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline"),
            ("rloo", "rloo"),
            ("rloo_vectorized", "rloo"),
        )
    ),
    {f"{ESTIMATOR}=misspelt": "VERL_USE_EXTERNAL_MODULES"},
    {f"{ESTIMATOR}=grpo": "", "algorithm.rollout_correction.rollout_rs=seq_mean_k3": "use grpo_skip_missing"},
    {f"{ESTIMATOR}=gae": "", "algorithm.use_pf_ppo=True": r"set trainer\.use_v1=False"},
]


@pytest.mark.parametrize("settings", UNSUPPORTED)
def test_an_unsupported_setting_is_refused_by_name(settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_unsupported(verl_config(*settings))
    lines = str(caught.value).splitlines()
    for override, advice in settings.items():
        if not advice:
            continue
        named = override[1:].rpartition(".")[0] if override.startswith("+") else override
        assert any(line.startswith(f"  {named}: ") and re.search(advice, line) for line in lines), (override, lines)


def test_an_estimator_may_be_registered_by_a_module_that_is_imported_later() -> None:
    config = verl_config(f"{ESTIMATOR}=registered_later")
    refuse_unsupported(config, loaded=False)
    with pytest.raises(ConfigError, match="no estimator has this name"):
        refuse_unsupported(config)


@pytest.mark.parametrize("more", [f"{ESTIMATOR}=grpo", "trainer.use_v1=False"])
def test_weights_that_would_have_no_effect_are_refused(more: str) -> None:
    with pytest.raises(ConfigError, match=f"{WEIGH}=True: only"):
        refuse_unsupported(verl_config(f"{ESTIMATOR}=grpo_skip_missing", f"+{WEIGH}=True", more))


@pytest.mark.parametrize("engine", [(), VLLM])
def test_an_adapter_that_verl_does_not_send_is_refused(engine: tuple[str, ...]) -> None:
    lora = f"{MODEL}.lora_rank=8"
    with pytest.raises(ConfigError, match=rf"{lora}: asynchronous trainers .*lora\.merge=True"):
        refuse_unsupported(verl_config(*engine, lora, ASYNCHRONOUS))
    with pytest.raises(ConfigError, match=r"checkpoint_engine\.backend=nccl: it does not send an adapter"):
        refuse_unsupported(verl_config(*engine, lora, f"{ROLLOUT}.checkpoint_engine.backend=nccl"))


@pytest.mark.parametrize(
    ("folder", "name"), [("one_step_off_policy", "one_step_off"), ("fully_async_policy", "fully_async")]
)
def test_verls_experimental_trainers_are_refused(folder: str, name: str, tmp_path: Path) -> None:
    import verl

    [verl_folder] = verl.__path__
    config_file = next((Path(verl_folder) / "experimental" / folder / "config").glob(f"{name}_ppo_trainer.yaml"))
    (tmp_path / config_file.name).write_text(
        config_file.read_text().replace("file://verl/trainer/config", "pkg://verl.trainer.config")
    )
    with initialize_config_dir(str(tmp_path), version_base=None):
        config = compose(config_file.stem, [f"{ROLLOUT}.name=sglang"])
    with pytest.raises(ConfigError, match=rf"{name} trainer .*trainer_mode=separate_async"):
        refuse_unsupported(config)
