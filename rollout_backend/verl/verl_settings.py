"""Derive the backend's settings from verl's, so that a training script says nothing twice.

The user's own settings are under `actor_rollout_ref.rollout.custom.rollout_backend`, inline or as the path of a YAML
file. They override the derived ones, except for the engines, which are always verl's servers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from agent_wrapper.contract import Sampling
from rollout_backend.base.names import derived_name
from rollout_backend.config import ModelConfig, RolloutConfig, load_config
from rollout_backend.errors import ConfigError
from rollout_backend.verl import verl_api
from rollout_backend.verl.advantage import needs_row_uids
from rollout_backend.verl.verl_api import ADAPTER

log = logging.getLogger(__name__)

KEY = "actor_rollout_ref.rollout.custom.rollout_backend"
# These estimators of verl compare no rollouts of a group.
_WITHOUT_GROUPS = ("gae", "reinforce_plus_plus", "remax")
_SERVING_LIMITS = frozenset({"max_restarts", "restart_window_s", "startup_timeout_s"})


def settings_of(config: Any, addresses: Sequence[str]) -> RolloutConfig:
    """Return the backend's settings. `config` is verl's whole tree; `addresses` are its servers as HOST:PORT.

    Raises:
        ConfigError: names the wrong key and where it is set.
    """
    rollout = config.actor_rollout_ref.rollout
    path, inline = _user_settings(rollout)
    model = config.actor_rollout_ref.model
    model_path = _model_path(model)
    length = rollout.get("max_model_len") or min(
        rollout.prompt_length + rollout.response_length, _engine_context(config, model_path)
    )
    records_experts = bool(rollout.get("enable_rollout_routing_replay"))
    sampling = sampling_of(rollout, validate=False, greedy=False).model_dump()
    # Without full determinism, verl's seed seeds no reply, because it has a default.
    if rollout.get("full_determinism"):
        sampling["seed"] = int(rollout.seed)
    base = {
        "run_id": run_id_of(config.trainer),
        "model": {
            "path": model_path,
            "name": PurePath(str(model.path)).name,
            "context_length": int(length),
            "routed_experts": records_experts,
            "trust_remote_code": bool(model.get("trust_remote_code")),
        },
        "sampling": sampling,
        "group": {"size": int(rollout.n)},
    }
    scorer = _reward_function(config)
    if scorer is not None:
        base["scoring"] = {"function": scorer}
    serving = {**_serving_limits(inline.pop("serving", {})), "engine": engine_of(rollout)}
    try:
        settings = load_config(
            path,
            base=base,
            top={**inline, "serving": {**serving, "kind": "external", "urls": engine_urls(addresses)}},
        )
    except ConfigError as error:
        raise ConfigError(f"under {KEY}: {error}") from None
    if scorer is not None and settings.scoring.function != scorer:
        raise ConfigError(
            f"reward.custom_reward_function names the scorer {scorer}, and scoring.function under {KEY} another one: "
            "remove one of the two"
        )
    if settings.model.routed_experts is not records_experts:
        raise ConfigError(
            f"under {KEY} model.routed_experts={settings.model.routed_experts}, and "
            f"verl starts its servers by actor_rollout_ref.rollout.enable_rollout_routing_replay={records_experts}: "
            "remove model.routed_experts"
        )
    for name, value in settings.sampling.model_dump(exclude={"seed"}).items():
        if value != sampling[name]:
            raise ConfigError(
                f"under {KEY} sampling.{name}={value}: verl's settings decide how tokens are sampled, except for "
                "sampling.seed: remove it, and set verl's own, such as actor_rollout_ref.rollout.temperature"
            )
    _check_seeds(rollout, settings)
    _check_estimator(config, settings)
    return settings


def max_positions(config: Any, model: ModelConfig) -> int | None:
    """Return the most that verl accepts as `max_model_len`; None if the model does not say. `config` is its tree."""
    override = config.actor_rollout_ref.model.get("override_config") or {}
    override = override.get("model_config", override)
    return override.get("max_position_embeddings") or model.unscaled_context


def _engine_context(config: Any, path: str) -> float:
    """Return the context of verl's servers without `max_model_len`: verl's limit in vLLM, SGLang's own in SGLang."""
    model = ModelConfig(path=Path(path))
    on_vllm = engine_of(config.actor_rollout_ref.rollout) == "vllm"
    return (max_positions(config, model) if on_vllm else model.longest_context) or math.inf


def _model_path(model: Any) -> str:
    """Return the folder to which verl copies the model, or else its path: a folder, or a name on the model hub."""
    path, use_shm = str(model.path), bool(model.get("use_shm"))
    if not use_shm and not path.startswith("hdfs://"):
        return path
    from rollout_backend.verl.verl_api import copy_to_local

    try:
        return str(copy_to_local(path, use_shm=use_shm))
    except Exception as error:
        # HDFS, the model hub or the disk can raise any exception.
        raise ConfigError(
            f"actor_rollout_ref.model.path={path} cannot be copied to this machine ({error}): correct it"
            f"{', or set actor_rollout_ref.model.use_shm=False' if use_shm else ''}"
        ) from error


def _reward_function(config: Any) -> str | None:
    """Return verl's custom reward function, as `scoring.function` names one."""
    # Older versions of verl have the key at the top level.
    for section in (config.get("reward") or {}, config):
        own = section.get("custom_reward_function") or {}
        path = own.get("path")
        if path:
            source = str(path).removeprefix("pkg://").removeprefix("file://")
            return f"{source}:{own.get('name') or 'compute_score'}"
    return None


def engine_of(rollout: Any) -> str:
    """Return the engine of verl's servers. `rollout` is verl's section."""
    return "vllm" if rollout.get("name") == "vllm" else "sglang"


def engine_urls(addresses: Sequence[str]) -> list[str]:
    return [f"http://{address}" for address in addresses]


def sampling_of(rollout: Any, *, validate: bool, greedy: bool) -> Sampling:
    """Return a rollout's sampling: by verl's training or validation settings, or greedy (REMAX's baseline)."""
    limit = int(rollout.response_length)
    if greedy or (validate and not rollout.val_kwargs.do_sample):
        return Sampling(temperature=0.0, max_tokens=limit)
    source = rollout.val_kwargs if validate else rollout
    return Sampling(
        temperature=float(source.temperature), top_p=float(source.top_p), top_k=int(source.top_k), max_tokens=limit
    )


def resumes_steps(trainer: Any) -> bool:
    """Return whether a restarted trainer may reuse rollouts of an earlier process. `trainer` is verl's section."""
    return str(trainer.get("resume_mode", "auto")) != "disable"


def is_asynchronous(trainer: Any) -> bool:
    """Return whether sampling continues while verl trains; it then pauses its servers itself. Otherwise it releases
    their memory as soon as a batch is complete. `trainer` is verl's section.
    """
    return bool(trainer.get("use_v1", True)) and trainer.v1.trainer_mode != "sync"


def last_global_step(config: Any) -> int | None:
    """Return the number of the last global step; None if the settings lack it. `config` is verl's whole tree."""
    trainer, optimizer = config.trainer, config.actor_rollout_ref.actor.get("optim") or {}
    if trainer.get("total_training_steps") is not None:
        return int(trainer.total_training_steps)
    # verl sets this number before it creates the manager.
    updates = int(optimizer.get("total_training_steps") or 0)
    separate = is_asynchronous(trainer) and trainer.v1.trainer_mode == "separate_async"
    return updates // (trainer.v1.separate_async.parameter_sync_step if separate else 1) if updates > 0 else None


def adapter_of(model: Any) -> str:
    """Return the name of the LoRA adapter that verl loads into its servers; empty if it sends them whole weights.

    `model` is verl's section `actor_rollout_ref.model`.
    """
    merges = (model.get("lora") or {}).get("merge", False)
    return ADAPTER if model.get("lora_rank") and not merges else ""


def max_staleness_of(trainer: Any) -> int | None:
    """Return how old rollouts may be, by our sampler or else by verl. None: no limit. `trainer` is verl's section."""
    sampler = trainer.v1.sampler
    limit, span = sampler.sampler_kwargs.get("max_staleness"), sampler.get("max_off_policy_threshold")
    if limit is None and span is not None and sampler.max_off_policy_strategy == "drop":
        limit = span - 1
    return None if limit is None else int(limit)


def _user_settings(rollout: Any) -> tuple[str | None, dict[str, Any]]:
    from omegaconf import OmegaConf

    custom = rollout.get("custom") or {}
    own = custom.get("rollout_backend")
    if own is None:
        raise ConfigError(
            f"+{KEY} is missing: set it to the path of a YAML file with the backend's settings, or to the settings "
            "themselves. At least storage.bucket and runtime.arn or runtime.image are required"
        )
    if isinstance(own, str):
        return own, {}
    plain = OmegaConf.to_container(own, resolve=True) if OmegaConf.is_config(own) else own
    if not isinstance(plain, Mapping):
        raise ConfigError(f"{KEY} must be the path of a YAML file or a tree of settings, not {plain!r}")
    return None, {str(key): value for key, value in plain.items()}


def run_id_of(trainer: Any) -> str:
    """Return PROJECT-EXPERIMENT. A digest keeps different names different where that would lose a character, or where
    the project has a hyphen, too."""
    project, experiment = (str(trainer.get(key) or "") for key in ("project_name", "experiment_name"))
    name = f"{project or 'verl'}-{experiment or 'run'}"
    if project and experiment and "-" not in project:
        return derived_name(name, "A-Za-z0-9._-", 128)
    return derived_name(name, "A-Za-z0-9._-", 128, of=[project, experiment])


def _check_seeds(rollout: Any, settings: RolloutConfig) -> None:
    """Refuse seeds that would have no effect. A server of verl 0.9.1 cannot be asked how it was started."""
    seeded = settings.sampling.seed is not None or "seed" in settings.gateway.agent_sampling_overrides
    options = (rollout.get("engine_kwargs") or {}).get("sglang") or {}
    if seeded and rollout.get("name") == "sglang" and not options.get("enable_deterministic_inference"):
        raise ConfigError(
            "SGLang ignores seeds, and actor_rollout_ref.rollout.full_determinism, or sampling.seed or "
            f"gateway.agent_sampling_overrides under {KEY}, asks for them: add "
            "+actor_rollout_ref.rollout.engine_kwargs.sglang.enable_deterministic_inference=True, or remove the seeds"
        )


def _check_estimator(config: Any, settings: RolloutConfig) -> None:
    """Refuse an estimator that gives each group of this size the advantage 0. Warn if verl's estimator compares the
    rollouts of a group and misjudges one with missing rollouts. If some are missing by intention, refuse it."""
    group, use_v1 = settings.group, config.trainer.get("use_v1", True)
    n = int(config.actor_rollout_ref.rollout.n)
    adv_estimator = str((config.get("algorithm") or {}).get("adv_estimator", "gae"))
    if n < 2 and not config.trainer.get("val_only") and needs_row_uids(adv_estimator):
        raise ConfigError(
            f"algorithm.adv_estimator={adv_estimator} compares the rollouts of a prompt, and with "
            f"actor_rollout_ref.rollout.n={n} each has only one, so nothing would be trained: set n to at least 2"
        )
    of_users = verl_api.ADV_ESTIMATOR_REGISTRY.keys() - {each.value for each in verl_api.AdvantageEstimator}
    if use_v1 and adv_estimator in of_users and not needs_row_uids(adv_estimator):
        log.warning(
            "algorithm.adv_estimator=%s gets each row as a rollout, also those that pad a batch, and a rollout has a "
            "row for each segment: to get rollouts, register it with "
            "rollout_backend.verl.advantage.register_rollout_estimator",
            adv_estimator,
        )
    masked = settings.training.mask and not use_v1
    if not (masked or group.needed < (min(2, group.size) if use_v1 else group.size)):
        return
    if needs_row_uids(adv_estimator) or adv_estimator in _WITHOUT_GROUPS:
        return
    if masked:
        raise ConfigError(
            f"algorithm.adv_estimator={adv_estimator} takes a rollout without a row for a reward of 0 on the legacy "
            f"trainer, but under {KEY} training.mask leaves rollouts out of every baseline: use grpo_skip_missing or "
            "rloo_skip_missing, or trainer.use_v1=True"
        )
    log.warning(
        "algorithm.adv_estimator=%s %s, and %d of %d rollouts make a group usable: use grpo_skip_missing or "
        "rloo_skip_missing, or set group.min_viable=%d under %s",
        adv_estimator,
        "gives the only rollout left of a group its raw reward as advantage"
        if use_v1
        else "takes a rollout without a row for a reward of 0 on the legacy trainer",
        group.needed,
        group.size,
        2 if use_v1 else group.size,
        KEY,
    )


def _serving_limits(serving: object) -> Mapping[str, Any]:
    """Return the user's `serving` settings: only those that limit the wait for a server that stopped answering."""
    if not isinstance(serving, Mapping) or not serving.keys() <= _SERVING_LIMITS:
        raise ConfigError(
            f"{KEY}.serving: verl runs the servers, so only {' and '.join(sorted(_SERVING_LIMITS))} can be set here"
        )
    return serving
