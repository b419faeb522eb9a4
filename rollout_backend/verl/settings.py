"""Our settings out of verl's: what a training script says already is not asked again.

A user's own settings stand under `actor_rollout_ref.rollout.custom.rollout_backend`, inline or as the path of a YAML
file. They lie above what is derived from verl's settings, except for the engines: those are verl's own servers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agent_wrapper.contract import Sampling
from rollout_backend.config import RolloutConfig, load_config
from rollout_backend.errors import ConfigError

KEY = "actor_rollout_ref.rollout.custom.rollout_backend"
_OURS_OF_SERVING = frozenset({"max_restarts", "startup_timeout_s"})


def settings_of(config: Any, addresses: Sequence[str]) -> RolloutConfig:
    """The settings of a run under verl; `config` is verl's whole tree, `addresses` are its servers as HOST:PORT.

    Raises:
        ConfigError: names the key at fault, and where it stands.
    """
    rollout = config.actor_rollout_ref.rollout
    path, inline = _own(rollout)
    model = config.actor_rollout_ref.model
    length = rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length
    base = {
        "run_id": _run_id(config.trainer),
        "model": {"path": str(model.path), "context_length": int(length)},
        "sampling": sampling_of(rollout, validate=False, greedy=False).model_dump(),
        "group": {"size": int(rollout.n)},
    }
    serving = _patience(inline.pop("serving", {}))
    try:
        settings = load_config(
            path,
            base=base,
            top={**inline, "serving": {**serving, "kind": "external", "urls": engine_urls(addresses)}},
        )
    except ConfigError as error:
        raise ConfigError(f"under {KEY}: {error}") from None
    if settings.collect.retokenise:
        _needs_no_logprobs(config)
    return settings


def engine_urls(addresses: Sequence[str]) -> list[str]:
    return [f"http://{address}" for address in addresses]


def sampling_of(rollout: Any, *, validate: bool, greedy: bool) -> Sampling:
    """How a rollout is sampled: verl's training or validation settings, or greedily (REMAX's baseline)."""
    limit = int(rollout.response_length)
    if greedy or (validate and not rollout.val_kwargs.do_sample):
        return Sampling(temperature=0.0, max_tokens=limit)
    source = rollout.val_kwargs if validate else rollout
    return Sampling(
        temperature=float(source.temperature), top_p=float(source.top_p), top_k=int(source.top_k), max_tokens=limit
    )


def takes_up(trainer: Any) -> bool:
    """Whether what an earlier life of the trainer has sampled may be taken; `trainer` is verl's section.

    Not in its asynchronous modes: there a batch is sampled on while weights change, and those after the checkpoint
    are trained anew. What was finished before it is in verl's own checkpoint then.
    """
    asynchronous = trainer.get("use_v1", True) and trainer.v1.trainer_mode != "sync"
    return not asynchronous and str(trainer.get("resume_mode", "auto")) != "disable"


def _own(rollout: Any) -> tuple[str | None, dict[str, Any]]:
    from omegaconf import OmegaConf

    custom = rollout.get("custom") or {}
    own = custom.get("rollout_backend")
    if own is None:
        raise ConfigError(
            f"+{KEY} is missing: give it the path of a YAML file with the backend's settings, or the settings "
            "themselves, at least storage.bucket and runtime.arn or runtime.image"
        )
    if isinstance(own, str):
        return own, {}
    plain = OmegaConf.to_container(own, resolve=True) if OmegaConf.is_config(own) else own
    if not isinstance(plain, Mapping):
        raise ConfigError(f"{KEY} must be the path of a YAML file or a tree of settings, not {plain!r}")
    return None, {str(key): value for key, value in plain.items()}


def _run_id(trainer: Any) -> str:
    name = f"{trainer.get('project_name', 'verl')}-{trainer.get('experiment_name', 'run')}"
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip(".-")[:100] or "verl"


def _needs_no_logprobs(config: Any) -> None:
    """Re-tokenised rows have no logprobs, and verl wants a field of all rows or of none."""
    correction = config.algorithm.get("rollout_correction") or {}
    wanting = {
        "actor_rollout_ref.rollout.calculate_log_probs": config.actor_rollout_ref.rollout.get("calculate_log_probs"),
        **{
            f"algorithm.rollout_correction.{name}": correction.get(name)
            for name in ("rollout_is", "rollout_rs", "bypass_mode")
        },
    }
    for name, value in wanting.items():
        if value:
            raise ConfigError(
                f"{name}={value} needs the logprob of every trained token, and under {KEY} collect.retokenise=true "
                "lets in rows that have none: switch off one of the two"
            )


def _patience(serving: object) -> Mapping[str, Any]:
    """Of `serving` only what says how long an engine of verl's is waited for that answers no more."""
    if not isinstance(serving, Mapping) or not serving.keys() <= _OURS_OF_SERVING:
        raise ConfigError(
            f"{KEY}.serving: verl runs the servers, so only {' and '.join(sorted(_OURS_OF_SERVING))} can be set here"
        )
    return serving
