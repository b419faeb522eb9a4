"""verl settings that this backend does not support. Each is refused by name; none is silently ignored."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rollout_backend.errors import ConfigError
from rollout_backend.verl import verl_api
from rollout_backend.verl.advantage import needs_row_uids, takes_rows_for_rollouts
from rollout_backend.verl.verl_settings import is_asynchronous
from rollout_backend.verl.vllm_middleware import MIDDLEWARE

_REWARD = (
    "rewards are computed by the agent, or by the function of reward.custom_reward_function.path: remove this setting"
)
_KWARGS = "the function is called with verl's four arguments alone: give it defaults, and remove this setting"
_TOOLS = "the agent brings its own tools and controls its turns: remove this setting"
_CHECKPOINT_ENGINE = "actor_rollout_ref.rollout.checkpoint_engine.backend"
_REPLAY = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
# verl 0.9.1 ignores the mode of other strategies.
_REPLAYING = ("megatron", "veomni")
_ENGINES = ("fsdp_config", "megatron", "torchtitan", "veomni")
_LEGACY = "set trainer.use_v1=False"
_SKIP = "use grpo_skip_missing or rloo_skip_missing"
_ESTIMATORS = {
    "gdpo": f"it reads rewards by name, and rows have those of the rollout and of its turns: {_SKIP}",
    "opo": "its baseline of rows that pad a batch is 0 / 0, with which verl skips the optimizer step: use "
    "opo_skip_missing",
}
_ROWS = "it counts a rollout once for each of its rows, of which it has one per segment: use "
_V1_ESTIMATORS = {
    "gpg": f"{_ROWS}gpg_skip_missing",
    "grpo_passk": f"{_ROWS}grpo_passk_skip_missing",
    "grpo_vectorized": f"{_ROWS}grpo_skip_missing",
    "reinforce_plus_plus_baseline": f"{_ROWS}reinforce_plus_plus_baseline_skip_missing",
    "rloo": f"{_ROWS}rloo_skip_missing",
    "rloo_vectorized": f"{_ROWS}rloo_skip_missing",
    "remax": f"verl's v1 trainer has no greedy baseline: {_LEGACY}",
    "optimal_token_baseline": f"verl's v1 trainer does not read the actor's sum_pi_squared: {_LEGACY}",
    "tir_optimal_token_baseline": f"verl's v1 trainer does not read the actor's sum_pi_squared: {_LEGACY}",
}
_WEIGH = "trainer.v1.sampler.sampler_kwargs.weigh_rollouts"
_RS = "algorithm.rollout_correction.rollout_rs"
_MODES = "run python -m verl.trainer.main_ppo with trainer.v1.trainer_mode=separate_async instead"


@dataclass(frozen=True)
class _Rule:
    """`setting` is refused unless it is absent, empty, off, or one of `allowed`."""

    setting: str
    advice: str
    allowed: tuple[object, ...] = ()

    def refuses(self, value: Any) -> bool:
        return bool(value) and value not in self.allowed


_RULES = (
    _Rule(
        "actor_rollout_ref.rollout.name",
        "the gateway calls verl's servers over HTTP with token ids, which only SGLang's and vLLM's accept: set it to "
        "sglang or vllm",
        allowed=("sglang", "sglang_cpu", "vllm"),
    ),
    _Rule(
        "actor_rollout_ref.rollout.disaggregation.enabled",
        "servers that only prefill or only decode cannot be called individually over HTTP: set it to False",
    ),
    _Rule(
        "actor_rollout_ref.rollout.router_config_path",
        "model calls go through this backend's own router: remove this setting",
    ),
    _Rule(
        "actor_rollout_ref.rollout.agent.agent_loop_config_path",
        "verl's agent loops are replaced by agents in containers: remove this setting",
    ),
    _Rule("actor_rollout_ref.rollout.ignore_eos", "replies end where the model ends them: set it to False"),
    _Rule("actor_rollout_ref.rollout.multi_turn.enable", _TOOLS),
    _Rule("actor_rollout_ref.rollout.multi_turn.tool_config_path", _TOOLS),
    _Rule("actor_rollout_ref.rollout.multi_turn.function_tool_path", _TOOLS),
    _Rule("data.tool_config_path", _TOOLS),
    _Rule("data.function_tool_path", _TOOLS),
    *(
        _Rule(f"actor_rollout_ref.model.{name}", "the gateway reads this from the model's folder: put it there")
        for name in ("custom_chat_template", "hf_config_path", "tokenizer_path")
    ),
    _Rule(
        "data.apply_chat_template_kwargs",
        "the gateway renders the agents' messages: set model.renderer_options of the backend's settings instead",
    ),
    _Rule(
        "data.mm_processor_kwargs",
        "the model's own processor prepares images with its own settings: remove this setting",
    ),
    _Rule("reward.custom_reward_function.reward_kwargs", _KWARGS),
    _Rule(
        "reward.reward_kwargs",
        "only verl's own reward managers read it, such as for DAPO's overlong penalty: compute it in your reward, or "
        "leave out what was cut with training.mask of the backend's settings",
    ),
    _Rule("reward.reward_manager.source", _REWARD, allowed=("register",)),
    _Rule("reward.reward_manager.name", _REWARD, allowed=("naive",)),
    _Rule("reward.reward_model.enable", _REWARD),
    _Rule("reward.sandbox_fusion.url", _REWARD),
    _Rule("custom_reward_function.reward_kwargs", _KWARGS),
    _Rule("reward_model.enable", _REWARD),
    _Rule("reward_model.reward_manager", _REWARD, allowed=("naive",)),
    _Rule("sandbox_fusion.url", _REWARD),
    _Rule(
        "distillation.enabled",
        "on-policy distillation calls its teacher inside verl's own agent loop: set it to False, or train without "
        "this backend",
    ),
    _Rule(
        "algorithm.use_pf_ppo", "verl's v1 trainer gives the advantages of resampled rows to others: set it to False"
    ),
    _Rule("async_training", f"verl's fully_async trainer does not load a manager class: {_MODES}"),
    _Rule("rollout", f"verl's one_step_off trainer awaits what both other trainers do not: {_MODES}"),
)


def refuse_unsupported(config: Any, loaded: bool = True) -> None:
    """Check all of verl's settings. `loaded`: the modules that may register an estimator are imported.

    Raises:
        ConfigError: names each unsupported setting that is set, and what to do about it.
    """
    problems = [
        *_refused(config),
        *_estimator(config, loaded),
        *_loss(config),
        *_vllm(config),
        *_adapters(config),
        *_routing(config),
    ]
    if problems:
        raise ConfigError("this backend does not support these verl settings:\n" + "\n".join(problems))


def _refused(config: Any) -> Iterable[str]:
    for rule in _RULES:
        value = _at(config, rule.setting)
        if rule.refuses(value):
            shown = f"={value}" if isinstance(value, str | bool | int) else ""
            yield f"  {rule.setting}{shown}: {rule.advice}"


def _estimator(config: Any, loaded: bool) -> Iterable[str]:
    """Yield problems of an estimator that fails in verl's trainer, or takes rows for rollouts."""
    name, use_v1 = str(_at(config, "algorithm.adv_estimator")), _at(config, "trainer.use_v1")
    by_name = _ESTIMATORS | (_V1_ESTIMATORS if use_v1 else {})
    if name in by_name:
        yield f"  algorithm.adv_estimator={name}: {by_name[name]}"
    elif loaded and name not in verl_api.ADV_ESTIMATOR_REGISTRY:
        yield (
            f"  algorithm.adv_estimator={name}: no estimator has this name, so verl would end when the first step is "
            "sampled: correct it, or name the module that registers it in VERL_USE_EXTERNAL_MODULES"
        )
    if _at(config, _WEIGH) and not (use_v1 and needs_row_uids(name)):
        yield f"  {_WEIGH}=True: only trainer.use_v1=True and estimators of this backend weigh rollouts: {_SKIP}"
    if not use_v1:
        return
    if name == "gae" and _at(config, "algorithm.use_pf_ppo"):
        yield f"  algorithm.use_pf_ppo=True: verl's v1 trainer gives a row the advantages of another one: {_LEGACY}"
    if takes_rows_for_rollouts(name):
        return
    if _at(config, "algorithm.use_kl_in_reward"):
        yield (
            f"  algorithm.use_kl_in_reward=True: {name} would take the KL of a rollout's last row for that of all "
            "its rows: set actor_rollout_ref.actor.use_kl_loss=True instead"
        )
    if name == "grpo" and _at(config, _RS):
        yield (
            f"  {_RS}={_at(config, _RS)}: grpo compares a rollout whose last row is rejected, and trains none of its "
            "rows: use grpo_skip_missing"
        )


def _loss(config: Any) -> Iterable[str]:
    """Yield the problem of a loss whose scale depends on how rows are split into micro-batches."""
    actor = "actor_rollout_ref.actor"
    mode = _at(config, f"{actor}.loss_agg_mode")
    if mode == "seq-mean-token-sum-norm" and not _at(config, f"{actor}.loss_scale_factor"):
        yield (
            f"  {actor}.loss_agg_mode={mode}: without a constant verl divides by the longest response of each "
            f"micro-batch: set {actor}.loss_scale_factor, such as to data.max_response_length"
        )


def _vllm(config: Any) -> Iterable[str]:
    """Yield problems with vLLM: its servers must report the weights, and the logprobs, of what they sample."""
    rollout = "actor_rollout_ref.rollout"
    if _at(config, f"{rollout}.name") != "vllm":
        return
    if _at(config, f"{rollout}.engine_kwargs.vllm.middleware") != MIDDLEWARE:
        yield (
            f"  {rollout}.name=vllm: vLLM 0.24.0 reports no weight version: add "
            f"+{rollout}.engine_kwargs.vllm.middleware={MIDDLEWARE}"
        )
    if (mode := _at(config, f"{rollout}.logprobs_mode")) != "processed_logprobs":
        yield (
            f"  {rollout}.logprobs_mode={mode}: logprobs would be of another distribution than tokens are sampled "
            "from: set it to processed_logprobs"
        )
    if _at(config, _REPLAY):
        yield f"  {_REPLAY}=True: the routing in vLLM's replies is not read: set {rollout}.name=sglang"


def _adapters(config: Any) -> Iterable[str]:
    """Yield problems with LoRA. verl 0.9.1 sends its servers an adapter only in synchronous training, and drops it
    when a checkpoint engine transfers the weights."""
    model, trainer = "actor_rollout_ref.model", _at(config, "trainer")
    if _at(config, f"{model}.lora.merge"):
        return
    merge = f"set {model}.lora.merge=True, so that the servers get merged weights"
    for setting in ("lora.rank", "lora_adapter_path"):
        value = _at(config, f"{model}.{setting}")
        if value:
            yield f"  {model}.{setting}={value}: adapters are only tried with {model}.lora_rank: {merge}"
    rank = _at(config, f"{model}.lora_rank")
    backend = _at(config, _CHECKPOINT_ENGINE)
    if rank and trainer is not None and is_asynchronous(trainer):
        yield f"  {model}.lora_rank={rank}: asynchronous trainers of verl send no adapter to their servers: {merge}"
    elif rank and backend not in (None, "naive"):
        yield f"  {_CHECKPOINT_ENGINE}={backend}: it does not send an adapter to verl's servers: {merge}"


def _routing(config: Any) -> Iterable[str]:
    """Yield problems with routed experts: the servers must record them, and the actor's engine replay them."""
    strategy = str(_at(config, "actor_rollout_ref.actor.strategy"))
    replayed = []
    for engine in _ENGINES:
        setting = f"actor_rollout_ref.actor.{engine}.router_replay.mode"
        if _at(config, setting) != "R3":
            continue
        if engine == strategy and engine in _REPLAYING:
            replayed.append(setting)
        else:
            yield f"  {setting}=R3: with actor.strategy={strategy} verl replays no routing: remove this setting"
    interval = "actor_rollout_ref.rollout.moe_load_balance_metrics_interval"
    measured = [interval] if _at(config, interval) else []
    if not _at(config, _REPLAY):
        for setting in (*replayed, *measured):
            yield f"  {setting}={_at(config, setting)}: the servers record no routing: set {_REPLAY}=True"
        return
    cache = "actor_rollout_ref.rollout.engine_kwargs.sglang.enable_hierarchical_cache"
    # A server of verl 0.9.1 cannot report how it was started.
    if _at(config, cache):
        yield f"  {cache}=True: tokens that come back from this cache get the routing of others: remove this setting"
    if not replayed and not measured:
        yield (
            f"  {_REPLAY}=True: the actor does not replay the routing. Set actor.megatron.router_replay.mode=R3 with "
            "actor.strategy=megatron, or the same of veomni: other strategies cannot"
        )


def _at(config: Any, setting: str) -> Any:
    """Return the setting's value, or None if it is absent."""
    for key in setting.split("."):
        if config is None or not hasattr(config, "get"):
            return None
        config = config.get(key)
    return config
