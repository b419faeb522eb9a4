"""Checks that run before verl starts its engines, which is before it makes our manager.

`PayloadDataset` runs them, because verl makes the dataset first.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rollout_backend.checks import preflight
from rollout_backend.checks.model import check_renderer
from rollout_backend.config import RolloutConfig
from rollout_backend.errors import ConfigError
from rollout_backend.rendering.image_positions import prepares_images
from rollout_backend.serving.sglang import IMAGE_CACHE
from rollout_backend.verl.unsupported import refuse_unsupported
from rollout_backend.verl.verl_api import check_version
from rollout_backend.verl.verl_settings import settings_of

logger = logging.getLogger(__name__)

MANAGER = "rollout_backend.verl.CloudAgentLoopManager"
_KEY = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
_NO_SERVER_YET = ("127.0.0.1:1",)


def check(section: Any) -> None:
    """Check the run that this section of verl's settings belongs to. Do nothing if it does not use this backend.

    Raises:
        ConfigError, PreflightError: the run cannot start; says what to change.
    """
    root = section._get_root() if hasattr(section, "_get_root") else None
    if root is None or "actor_rollout_ref" not in root:
        return
    rollout = root.actor_rollout_ref.rollout
    name = (rollout.get("agent") or {}).get("agent_loop_manager_class")
    if not name and "rollout_backend" not in (rollout.get("custom") or {}):
        return
    check_version()
    _check_class(name)
    refuse_unsupported(root)
    warn_of_repeating_streams(rollout)
    config = settings_of(root, _NO_SERVER_YET)
    _ = config.model.expert_shape  # raises ConfigError
    check_image_cache(root.actor_rollout_ref.actor, config, os.environ)
    check_model(config)
    with ThreadPoolExecutor(1) as thread:  # the caller's thread may already run an event loop
        thread.submit(asyncio.run, preflight.check_services(config, _batch(root))).result()


def _batch(root: Any) -> int | None:
    """Return how many rollouts a training step plans; None in asynchronous modes, which request them one by one."""
    asynchronous = root.trainer.get("use_v1", True) and root.trainer.v1.trainer_mode != "sync"
    return None if asynchronous else int(root.data.train_batch_size) * int(root.actor_rollout_ref.rollout.n)


def check_model(config: RolloutConfig) -> None:
    """Check the renderer of a model on this machine. Log a warning if the model's tool calls cannot be parsed.

    Raises:
        ConfigError: no renderer fits.
    """
    if not config.model.path.is_dir():
        return
    found = check_renderer(config)
    if found.level == "problem":
        raise ConfigError(found.text)
    logger.log(logging.WARNING if found.level == "warning" else logging.INFO, "%s", found)


def warn_of_repeating_streams(rollout: Any) -> None:
    """Log a warning if verl's SGLang repeats all tokens in each event of a stream. `rollout` is verl's section."""
    options = (rollout.get("engine_kwargs") or {}).get("sglang") or {}
    if rollout.get("name") == "sglang" and not options.get("incremental_streaming_output"):
        logger.warning(
            "verl's SGLang repeats all tokens in each event of a stream: a call of 16,000 tokens that streams or has "
            "stop strings takes 540 MB and 10 s of CPU time. Add "
            "+actor_rollout_ref.rollout.engine_kwargs.sglang.incremental_streaming_output=True"
        )


def check_image_cache(actor: Any, config: RolloutConfig, environ: Mapping[str, str]) -> None:
    """Refuse to train a model's image encoder while its servers cache encoder outputs of old weights.

    SGLang caches the encoder's output by the image's pixels. Neither new weights nor `/flush_cache` empty that cache,
    so a later step with the same image would sample from the old encoder's output.

    Raises:
        ConfigError: the cache is enabled in this process's environment, which Ray's workers share.
    """
    if not config.gateway.max_images or not prepares_images(config.model.path):
        return
    if environ.get(IMAGE_CACHE) == "0" or actor.get("freeze_vision_tower"):
        return
    raise ConfigError(
        f"{IMAGE_CACHE} is {environ.get(IMAGE_CACHE, 'not set')}, so verl's servers cache image encoder outputs of "
        f"old weights: add +ray_kwargs.ray_init.runtime_env.env_vars.{IMAGE_CACHE}='\"0\"', or train only the "
        "language model with actor_rollout_ref.actor.freeze_vision_tower=true, or accept no images with "
        "gateway.max_images=0"
    )


def _check_class(name: str | None) -> None:
    if not name:
        raise ConfigError(f"the backend is configured, but verl does not use it: add +{_KEY}={MANAGER}")
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute, None) if module else None
    except ImportError as error:
        raise ConfigError(f"{_KEY}={name} cannot be imported ({error}): set it to {MANAGER}") from None
    if found is None:
        raise ConfigError(f"{_KEY}={name}: there is no such class; set it to {MANAGER}")
