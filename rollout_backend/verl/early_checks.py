"""Checks that run before verl starts its engines, which is before it makes our manager.

`RolloutSampler` and `PayloadDataset` run them. The v1 trainer creates its sampler before anything else, and both
trainers create their datasets before their workers. verl has no earlier hook, and none if a training uses neither.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import logging
import math
import netrc
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from omegaconf import OmegaConf
from transformers import CONFIG_MAPPING

from rollout_backend.base.check_result import CheckResult, raise_problems
from rollout_backend.config import ModelConfig, RolloutConfig
from rollout_backend.errors import ConfigError
from rollout_backend.model.rendering.image_positions import prepares_images
from rollout_backend.model.serving.local_engine import IMAGE_CACHE
from rollout_backend.run.checks import preflight
from rollout_backend.run.checks.capacity import check_engines as check_capacity
from rollout_backend.run.checks.model import check_parallel
from rollout_backend.verl.task_rows import check_own_dataset
from rollout_backend.verl.trainer_sizes import check_padding, check_queue, check_sizes
from rollout_backend.verl.unsupported import refuse_unsupported
from rollout_backend.verl.verl_api import check_version, need_critic, need_reference_policy, root_of
from rollout_backend.verl.verl_settings import is_asynchronous, max_positions, settings_of

logger = logging.getLogger(__name__)

MANAGER = "rollout_backend.verl.CloudAgentLoopManager"
_KEY = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
_STREAMS = "actor_rollout_ref.rollout.engine_kwargs.sglang.incremental_streaming_output"
# Docker gives containers 64 MiB.
_SHARED, _SHARED_BYTES = "/dev/shm", 1 << 30  # noqa: S108
# Bytes of a checkpoint per byte of a bfloat16 model: weights and Adam's two moments in float32.
_CHECKPOINT = 6
_MODELS = {"sglang": "srt/models/*.py", "vllm": "model_executor/models/registry.py"}
"""The files in which an engine names its model classes."""
_LOGGERS = {name: name for name in ("clearml", "mlflow", "rl_insight", "swanlab", "tensorboard", "trackio", "wandb")}
"""The package of each of verl's loggers that needs one."""
_LOGGERS["vemlp_wandb"] = "volcengine_ml_platform"


@dataclass(frozen=True)
class _Account:
    """The settings with which a logger logs in or runs offline."""

    key: str
    mode: str
    offline: tuple[str, ...]
    server: str
    default_server: str
    netrc: str


_ACCOUNTS = {
    "wandb": _Account(
        key="WANDB_API_KEY",
        mode="WANDB_MODE",
        offline=("offline", "disabled", "dryrun"),
        server="WANDB_BASE_URL",
        default_server="https://api.wandb.ai",
        netrc=".netrc",
    ),
    "swanlab": _Account(
        key="SWANLAB_API_KEY",
        mode="SWANLAB_MODE",
        offline=("offline", "disabled", "local"),
        server="SWANLAB_API_HOST",
        default_server="https://api.swanlab.cn",
        netrc=".swanlab/.netrc",
    ),
}
_DATASET = "pkg://rollout_backend.verl.dataset"
_NO_SERVER_YET = ("127.0.0.1:1",)
# verl's settings that passed, and the settings derived from them: the sampler and the datasets each call `check`.
_checked: Any = None
_config: RolloutConfig | None = None


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
    check_version()
    _check_class(name)
    # A dataset of the user's is imported later, and its module may register the estimator.
    module = OmegaConf.select(root, "data.custom_cls.path")
    refuse_unsupported(root, loaded=module in (None, _DATASET))
    config = settings_of(root, _NO_SERVER_YET)
    # Reading the property may raise ConfigError.
    _ = config.model.expert_shape
    check_images(root, config)
    check_own_dataset(root.get("data") or {}, scored=config.scoring.enabled)
    # The caller's thread may already run an event loop.
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(asyncio.run, preflight.check_run(config, _batch(root), engines=False)).result()
    of_verl = [*check_engines(root, config), *check_batch(root, config), *check_machine(root, config)]
    raise_problems(of_verl)
    for finding in (*found, *of_verl):
        logger.log(logging.WARNING if finding.level == "warning" else logging.INFO, "%s", finding)
    set_streams(root)
    _checked, _config = root, config
    return config


def validates_only(section: Any) -> bool:
    """Return whether the run that this section of verl's settings belongs to trains nothing."""
    return bool((root_of(section).get("trainer") or {}).get("val_only"))


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
    name = str(root.actor_rollout_ref.rollout.get("name"))
    if name.startswith("sglang") and OmegaConf.select(root, _STREAMS) is None:
        OmegaConf.update(root, _STREAMS, True, force_add=True)


def warn_if_late(root: Any) -> None:
    """Log a warning if neither the sampler nor the dataset ran the checks: verl's engines have started by now."""
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
    """Yield settings with which verl's servers fail at startup, after its workers have loaded the model."""
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
    yield from check_classes(config.model, str(rollout.name))
    yield from check_image_prompts(config, str(rollout.name))
    if "actor" not in root.actor_rollout_ref or root.trainer.get("val_only"):
        return
    context = config.model.context_length or rollout.get("max_model_len") or math.inf
    longest = min(rollout.prompt_length + rollout.response_length, context)
    yield from check_sizes(root, int(longest), need_critic(root), need_reference_policy(root))
    yield from check_queue(root, int(root.data.train_batch_size) * int(rollout.n), _validation(root))


def check_batch(root: Any, config: RolloutConfig) -> Iterator[CheckResult]:
    """Yield whether verl's servers can serve a batch."""
    rollout = root.actor_rollout_ref.rollout
    if (batch := _batch(root)) is not None:
        gpus = int(root.trainer.get("nnodes") or 1) * int(root.trainer.get("n_gpus_per_node") or 1)
        parallel = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
        servers = gpus // math.prod(int(rollout.get(name) or 1) for name in parallel)
        yield from check_capacity(config, config.runtime.max_sessions, batch, max(1, servers))


def check_machine(
    root: Any, config: RolloutConfig, usage: Callable[[Path], Any] = shutil.disk_usage
) -> Iterator[CheckResult]:
    """Yield what this machine lacks. Other machines of the cluster can differ, so these are warnings."""
    if Path(_SHARED).is_dir() and (size := usage(Path(_SHARED)).total) < _SHARED_BYTES:
        text = f"{size >> 20} MiB are too few for Ray and NCCL: start the container with --shm-size=10g"
        yield CheckResult("warning", _SHARED, text)
    trainer = root.trainer
    yield from check_loggers(trainer, os.environ)
    if "actor" in root.actor_rollout_ref and not trainer.get("val_only"):
        yield from check_memory(root)
        rollouts = int(root.data.train_batch_size) * int(root.actor_rollout_ref.rollout.n)
        yield from check_padding(root, rollouts, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    folder = Path(str(trainer.get("default_local_dir") or ".")).absolute()
    weights = sum(file.stat().st_size for file in config.model.folder.glob("*.safetensors"))
    if trainer.get("save_freq", -1) <= 0 or root.actor_rollout_ref.model.get("lora_rank"):
        return
    while not folder.exists():
        folder = folder.parent
    count, size = _checkpoints(root), _CHECKPOINT * weights // int(trainer.get("nnodes") or 1)
    free = usage(folder).free
    if free < count * size:
        text = (
            f"a checkpoint takes about {size >> 30} GiB on this machine, where {free >> 30} GiB are free, and this "
        )
        text += f"training keeps {count}: set trainer.max_actor_ckpt_to_keep, or name a folder on another disk"
        yield CheckResult("warning", "trainer.default_local_dir", text)


def check_classes(model: ModelConfig, engine: str) -> Iterator[CheckResult]:
    """Yield packages that are too old for the model: transformers for verl's trainer, or the engine."""
    try:
        described = json.loads((model.folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return
    kind, architectures = described.get("model_type"), described.get("architectures") or []
    if kind and kind not in CONFIG_MAPPING and not (model.trust_remote_code and described.get("auto_map")):
        text = (
            f"transformers {metadata.version('transformers')} has no model of type {kind}, so verl's trainer cannot "
        )
        text += "load it: install a version that has it and that verl accepts, or train another model"
        yield CheckResult("problem", "actor_rollout_ref.model.path", text)
    spec, pattern = importlib.util.find_spec(engine), _MODELS.get(engine)
    if spec is None or pattern is None:
        return
    files = [file for folder in spec.submodule_search_locations or () for file in Path(folder).glob(pattern)]
    known = "".join(file.read_text(errors="replace") for file in files)
    if files and architectures and not any(re.search(rf"\b{re.escape(each)}\b", known) for each in architectures):
        text = f"{engine} {metadata.version(engine)} has no {' or '.join(architectures)}, so verl's servers may not "
        text += "start: install a version that has it"
        yield CheckResult("warning", "actor_rollout_ref.model.path", text)


def check_image_prompts(config: RolloutConfig, engine: str) -> Iterator[CheckResult]:
    """Yield a version of SGLang that does not return the prompt that it built from several images."""
    spec = importlib.util.find_spec(engine) if engine == "sglang" else None
    if spec is None or config.gateway.max_images <= 1 or not prepares_images(config.model.folder):
        return
    files = [Path(folder) / "srt" / "managers" / "io_struct.py" for folder in spec.submodule_search_locations or ()]
    known = "".join(file.read_text(errors="replace") for file in files if file.is_file())
    if known and "return_prompt_token_ids" not in known:
        text = f"SGLang {metadata.version(engine)} returns only the length of the prompt that it builds from images, "
        text += (
            "which does not tell how many tokens each image has: install SGLang 0.5.23, use vLLM, or allow 1 image, "
        )
        text += "or 0 if agents send none"
        yield CheckResult("problem", "gateway.max_images", text)


def check_loggers(trainer: Any, environ: Mapping[str, str]) -> Iterator[CheckResult]:
    """Yield each of verl's loggers that cannot start in this process. verl opens them after the engines."""
    names = trainer.get("logger") or ()
    instead = "trainer.logger=[console,file] needs neither a package nor an account"
    for name in [names] if isinstance(names, str) else names:
        package, account = _LOGGERS.get(name), _ACCOUNTS.get(name)
        if package and importlib.util.find_spec(package) is None:
            text = f"{name} needs the package {package}, which is not installed: install it; {instead}"
            yield CheckResult("problem", "trainer.logger", text)
        elif account and not _has_login(account, environ):
            text = f"{name} asks for a login when the training begins, and this process has none: set {account.key}, "
            text += f"or {account.mode}={account.offline[0]} to log to this machine; {instead}"
            yield CheckResult("problem", "trainer.logger", text)


def _has_login(account: _Account, environ: Mapping[str, str]) -> bool:
    """Return whether a logger finds a login, or needs none. A file that cannot be read may have one."""
    if environ.get(account.key) or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    if environ.get(account.mode) in account.offline:
        return True
    path = Path(environ.get("NETRC") or Path(environ.get("HOME") or Path.home()) / account.netrc)
    if not path.exists():
        return False
    host = urlsplit(environ.get(account.server) or account.default_server).hostname
    try:
        return netrc.netrc(path).authenticators(host or "") is not None
    except (OSError, netrc.NetrcParseError):
        return True


def check_memory(root: Any) -> Iterator[CheckResult]:
    """Yield settings with which the trainer keeps far more in memory than it needs, or cannot start without."""
    actor, model = root.actor_rollout_ref.actor, root.actor_rollout_ref.model
    key = "actor_rollout_ref.actor"
    if actor.strategy == "megatron":
        transformer = "megatron.override_transformer_config"
        if not OmegaConf.select(actor, f"{transformer}.recompute_granularity"):
            text = (
                "Megatron keeps the activations of all layers, whatever model.enable_gradient_checkpointing says: set"
            )
            text += f" it to full, and in {transformer} recompute_method=uniform and recompute_num_layers=1"
            yield CheckResult("warning", f"{key}.{transformer}.recompute_granularity", text)
        return
    if root.trainer.get("device") == "cpu":
        return
    attention = (model.get("override_config") or {}).get("attn_implementation") or "flash_attention_2"
    if attention == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        text = (
            "flash-attn is not installed in the environment of this machine, and verl's trainer needs it on its own: "
        )
        text += "install it, or see docs/training.md for the settings without it"
        yield CheckResult("warning", "actor_rollout_ref.model.override_config.attn_implementation", text)
    if actor.get("use_dynamic_bsz") and not model.get("use_remove_padding"):
        text = "without model.use_remove_padding verl fills a micro-batch by tokens and then pads each row to the "
        text += "longest, many times ppo_max_token_len_per_gpu: set actor.use_dynamic_bsz=False and "
        text += "rollout.log_prob_use_dynamic_bsz=False, with ppo_micro_batch_size_per_gpu=1 and "
        text += "log_prob_micro_batch_size_per_gpu=1"
        yield CheckResult("warning", f"{key}.use_dynamic_bsz", text)


def _checkpoints(root: Any) -> int:
    """Return how many checkpoints a training leaves on the disk; 1 if its number of steps is not known."""
    trainer, data = root.trainer, root.get("data")
    steps = trainer.get("total_training_steps")
    tasks = _count_tasks(data.get("train_files")) if steps is None and data and data.get("train_batch_size") else None
    if tasks is not None:
        steps = tasks // int(data.train_batch_size) * int(trainer.get("total_epochs") or 1)
    saved = max(1, -(-int(steps or 0) // int(trainer.save_freq)))
    # verl deletes an old checkpoint before it writes a new one, but always leaves one.
    return min(saved, max(2, int(trainer.get("max_actor_ckpt_to_keep") or saved)))


def _count_tasks(given: Any) -> int | None:
    """Return the number of tasks in these files; None if they are not task files on this machine."""
    files = [Path(str(each)) for each in ([given] if isinstance(given, str) else given or ())]
    if not files or not all(file.suffix == ".jsonl" and file.is_file() for file in files):
        return None
    return sum(bool(line.strip()) for file in files for line in file.read_bytes().splitlines())


def _validation(root: Any) -> int | None:
    """Return how many rollouts verl validates with at once; None if that is not known."""
    data, rollout = root.data, root.actor_rollout_ref.rollout
    tasks = data.get("val_batch_size") or _count_tasks(data.get("val_files"))
    return None if tasks is None else int(tasks) * int(rollout.val_kwargs.n)


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
