"""Checks that run before verl starts its engines, which is before it makes our manager.

`RolloutSampler` runs them, which the v1 trainer makes before anything else, and `PayloadDataset`, which both trainers
make before their workers. verl gives no earlier place, and none at all if a training uses neither.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rollout_backend.checks import preflight
from rollout_backend.checks.capacity import check_engines as check_capacity
from rollout_backend.checks.model import check_parallel
from rollout_backend.config import RolloutConfig
from rollout_backend.core.check_result import CheckResult, raise_problems
from rollout_backend.errors import ConfigError
from rollout_backend.rendering.image_positions import prepares_images
from rollout_backend.serving.local_engine import IMAGE_CACHE
from rollout_backend.verl.unsupported import refuse_unsupported
from rollout_backend.verl.verl_api import check_version
from rollout_backend.verl.verl_settings import is_asynchronous, max_positions, settings_of

logger = logging.getLogger(__name__)

MANAGER = "rollout_backend.verl.CloudAgentLoopManager"
_KEY = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
_STREAMS = "actor_rollout_ref.rollout.engine_kwargs.sglang.incremental_streaming_output"
_SHARED, _SHARED_BYTES = "/dev/shm", 1 << 30  # noqa: S108  # Docker gives containers 64 MiB
_CHECKPOINT = 6  # bytes of a checkpoint per byte of a bfloat16 model: weights and Adam's two moments in float32
_NO_SERVER_YET = ("127.0.0.1:1",)
_checked: Any = None  # verl's settings that passed: sampler and datasets ask in turn
_config: RolloutConfig | None = None  # what they mean


def check(section: Any) -> RolloutConfig | None:
    """Check the run that this section of verl's settings belongs to, and return its settings; None, without a check,
    if it does not use this backend.

    Sets what verl's engines need and verl does not set: see `set_streams`.

    Raises:
        ConfigError, PreflightError: the run cannot start; says what to change.
    """
    global _checked, _config
    root = root_of(section)
    if "actor_rollout_ref" not in root:
        return None
    if was_checked(root):
        return _config
    rollout = root.actor_rollout_ref.rollout
    name = (rollout.get("agent") or {}).get("agent_loop_manager_class")
    if not name and "rollout_backend" not in (rollout.get("custom") or {}):
        return None
    from rollout_backend.verl import dataset  # late: it imports this module

    check_version()
    _check_class(name)
    refuse_unsupported(root)
    config = settings_of(root, _NO_SERVER_YET)
    _ = config.model.expert_shape  # raises ConfigError
    check_images(root, config)
    dataset.check_own_dataset(root.get("data") or {}, scored=config.scoring.enabled)
    with ThreadPoolExecutor(1) as thread:  # the caller's thread may already run an event loop
        found = thread.submit(asyncio.run, preflight.check_run(config, _batch(root), engines=False)).result()
    of_verl = [*check_engines(root, config), *check_machine(root, config)]
    raise_problems(of_verl)
    for finding in (*found, *of_verl):
        logger.log(logging.WARNING if finding.level == "warning" else logging.INFO, "%s", finding)
    set_streams(root)
    _checked, _config = root, config
    return config


def validates_only(section: Any) -> bool:
    """Return whether the run that this section of verl's settings belongs to trains nothing."""
    return bool((root_of(section).get("trainer") or {}).get("val_only"))


def root_of(section: Any) -> Any:
    """Return verl's whole tree of settings, of which verl passes one section; empty if the section is in none."""
    return section._get_root() if hasattr(section, "_get_root") else {}


def was_checked(root: Any) -> bool:
    """Return whether these settings have passed `check` in this process."""
    return root is _checked


def _batch(root: Any) -> int | None:
    """Return how many rollouts a training step plans; None in asynchronous modes, which request them one by one."""
    if is_asynchronous(root.trainer):
        return None
    return int(root.data.train_batch_size) * int(root.actor_rollout_ref.rollout.n)


def set_streams(root: Any) -> None:
    """Let verl's SGLang send each token of a stream once; by default each event repeats all tokens before it.

    Without the option, a call of 16,000 tokens that streams or has stop strings takes 540 MB and 10 s of CPU time. A
    value that the user set stays.
    """
    from omegaconf import OmegaConf

    name = str(root.actor_rollout_ref.rollout.get("name"))
    if name.startswith("sglang") and OmegaConf.select(root, _STREAMS) is None:
        OmegaConf.update(root, _STREAMS, True, force_add=True)


def warn_if_late(root: Any) -> None:
    """Log what a training misses that uses neither the sampler nor the dataset: verl's engines are up by now."""
    if was_checked(root):
        return
    rollout = root.actor_rollout_ref.rollout
    streams = ((rollout.get("engine_kwargs") or {}).get("sglang") or {}).get("incremental_streaming_output")
    logger.warning(
        "this run is only checked now, after verl has started its engines%s: use RolloutSampler or PayloadDataset",
        f", and a stream of tokens is slow without +{_STREAMS}=True"
        if rollout.get("name") == "sglang" and not streams
        else "",
    )


def check_engines(root: Any, config: RolloutConfig) -> Iterator[CheckResult]:
    """Yield what ends verl's servers when they start, after its workers have loaded the model."""
    rollout, key = root.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    tokens, longest = rollout.get("max_model_len"), max_positions(root, config.model)
    if tokens and longest and tokens > longest:
        yield CheckResult(
            "problem",
            f"{key}.max_model_len",
            f"{tokens:,} is above the model's max_position_embeddings of {longest:,}, with which verl's servers do "
            "not start: lower or remove it",
        )
    if int(rollout.get("data_parallel_size") or 1) == 1:
        size = int(rollout.tensor_model_parallel_size)
        yield from check_parallel(config.model, size, f"{key}.tensor_model_parallel_size")
    if rollout.name in ("sglang", "vllm") and importlib.util.find_spec(rollout.name) is None:
        text = f"{rollout.name} is not installed in the environment of this machine: verl's servers need it on theirs"
        yield CheckResult("warning", f"{key}.name", text)
    if (batch := _batch(root)) is not None:
        gpus = int(root.trainer.get("nnodes") or 1) * int(root.trainer.get("n_gpus_per_node") or 1)
        parallel = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
        servers = gpus // math.prod(int(rollout.get(name) or 1) for name in parallel)
        yield from check_capacity(config, config.runtime.max_sessions, batch, max(1, servers))


def check_machine(
    root: Any, config: RolloutConfig, usage: Callable[[Path], Any] = shutil.disk_usage
) -> Iterator[CheckResult]:
    """Yield what a training lacks on this machine. Others of the cluster can differ, so these are warnings."""
    if Path(_SHARED).is_dir() and (size := usage(Path(_SHARED)).total) < _SHARED_BYTES:
        text = f"{size >> 20} MiB are too few for Ray and NCCL: start the container with --shm-size=10g"
        yield CheckResult("warning", _SHARED, text)
    trainer = root.trainer
    folder = Path(str(trainer.get("default_local_dir") or ".")).absolute()
    weights = sum(file.stat().st_size for file in config.model.folder.glob("*.safetensors"))
    if trainer.get("save_freq", -1) <= 0 or root.actor_rollout_ref.model.get("lora_rank"):
        return
    while not folder.exists():
        folder = folder.parent
    needed, free = _CHECKPOINT * weights // int(trainer.get("nnodes") or 1), usage(folder).free
    if free < needed:
        text = f"a checkpoint takes about {needed >> 30} GiB on this machine, where {free >> 30} GiB are free: name "
        text += "a folder on another disk, and set trainer.max_actor_ckpt_to_keep"
        yield CheckResult("warning", "trainer.default_local_dir", text)


def check_images(root: Any, config: RolloutConfig) -> None:
    """Refuse to train on images with settings that could train wrongly. Raises ConfigError."""
    if not root.trainer.get("val_only"):
        check_image_cache(root.actor_rollout_ref.actor, config, os.environ)
        check_image_rows(root.algorithm, config)


def check_image_cache(actor: Any, config: RolloutConfig, environ: Mapping[str, str]) -> None:
    """Refuse to train a model's image encoder while its servers cache encoder outputs of old weights.

    SGLang caches the encoder's output by the image's pixels. Neither new weights nor `/flush_cache` empty that cache,
    so a later step with the same image would sample from the old encoder's output.

    Raises:
        ConfigError: the cache is enabled in this process's environment, which Ray's workers share.
    """
    if not config.gateway.max_images or not prepares_images(config.model.folder):
        return
    if environ.get(IMAGE_CACHE) == "0" or actor.get("freeze_vision_tower"):
        return
    raise ConfigError(
        f"{IMAGE_CACHE} is {environ.get(IMAGE_CACHE, 'not set')}, so verl's servers cache image encoder outputs of "
        f"old weights: add +ray_kwargs.ray_init.runtime_env.env_vars.{IMAGE_CACHE}='\"0\"', or train only the "
        "language model with actor_rollout_ref.actor.freeze_vision_tower=true, or accept no images with "
        "gateway.max_images=0"
    )


def check_image_rows(algorithm: Any, config: RolloutConfig) -> None:
    """Refuse to train on images if nothing rejects rows whose probabilities differ between engine and trainer.

    One early training with images had a difference of .05 in one step, of which the cause is not known. With
    `bypass_mode` only the loss of that name rejects rows. verl 0.9.1's v1 trainer does not select it, and the legacy
    trainer selects it in its own process, after its workers got their settings.

    Raises:
        ConfigError: verl's rollout correction rejects no rows.
    """
    if not config.gateway.max_images or not prepares_images(config.model.folder):
        return
    correction = algorithm.get("rollout_correction") or {}
    if correction.get("rollout_rs") and not correction.get("bypass_mode"):
        return
    key = "algorithm.rollout_correction"
    raise ConfigError(
        f"{key}.rollout_rs is not set, or {key}.bypass_mode is, with which verl's trainers apply no rollout_rs, so "
        "nothing leaves out a row whose images the engine and the trainer see differently: set "
        f"{key}.rollout_rs=seq_mean_k3 {key}.rollout_rs_threshold=0.01 {key}.bypass_mode=False, or accept no images "
        "with gateway.max_images=0"
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
