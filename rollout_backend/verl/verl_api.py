"""Names of verl that its documentation does not promise: all of them, and which version has them.

They are those of verl 0.9.1, the supported version. `check_version` refuses an older version, and a newer one that
lacks one of the names or does not take our arguments. Another newer one is not tested, and gets a warning.

What differs in 0.8.0: its new trainer passes `replay_buffer` to the manager and reads the rows from it, it has no
`verl.trainer.ppo.v1`, and its servers are not in the load balancer. How verl's main branch differs is not known.

The settings of verl are in `verl_settings` and `unsupported`, the columns and tags of rows in `row_formats` and
`v1_batch`. Importing this module imports neither verl nor Ray, so vLLM's process can import it without them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
from typing import Any

from packaging.version import Version

from rollout_backend.errors import ConfigError

log = logging.getLogger(__name__)

SUPPORTED = "0.9.1"
ANSWER_S = 60.0
"""Seconds to wait for one of verl's actors, which answer from memory. Ray would wait for a hung actor for ever."""
ADAPTER = "verl_actor_lora_name"
"""The LoRA adapter that verl trains: its name in verl's SGLang servers. The middleware gives it to vLLM's, too."""

_NAMES = {
    "ADV_ESTIMATOR_REGISTRY": "verl.trainer.ppo.core_algos",
    "AdvantageEstimator": "verl.trainer.ppo.core_algos",
    "DataProto": "verl",
    "KVBatchMeta": "transfer_queue",
    "ReplayBuffer": "verl.trainer.ppo.v1.replay_buffer",
    "ReplayBufferAsync": "verl.trainer.ppo.v1.replay_buffer",
    "copy_to_local": "verl.utils.fs",
    "hf_processor": "verl.utils.tokenizer",
    "kv_batch_put": "transfer_queue",
    "kv_clear": "transfer_queue",
    "kv_list": "transfer_queue",
    "list_of_dict_to_tensordict": "verl.utils.tensordict_utils",
    "need_critic": "verl.trainer.ppo.utils",
    "need_reference_policy": "verl.trainer.ppo.utils",
    "register_adv_est": "verl.trainer.ppo.core_algos",
    "upsample_batch_to_divisible_size": "verl.trainer.ppo.padding_utils",
}
"""Functions and classes of verl and its TransferQueue by module. `from rollout_backend.verl.verl_api import NAME`
imports them."""

_CALLS: dict[str, tuple[int, tuple[str, ...]]] = {
    "DataProto": (0, ("batch", "non_tensor_batch", "meta_info")),
    "KVBatchMeta": (0, ("partition_id", "keys", "tags")),
    "ReplayBuffer.__init__": (1, ("trainer_mode", "sampler_kwargs", "refill_fn", "poll_interval")),
    "ReplayBuffer.sample": (1, ("global_steps", "partition_id", "batch_size")),
    "ReplayBufferAsync.__init__": (1, ("trainer_mode", "sampler_kwargs", "refill_fn", "poll_interval")),
    "ReplayBufferAsync.sample": (1, ("global_steps", "partition_id", "batch_size")),
    "copy_to_local": (1, ("cache_dir", "use_shm")),
    "hf_processor": (1, ("local_files_only",)),
    "kv_batch_put": (0, ("keys", "partition_id", "fields", "tags")),
    "kv_clear": (0, ("keys", "partition_id")),
    "kv_list": (1, ()),
    "list_of_dict_to_tensordict": (1, ()),
    "need_critic": (1, ()),
    "need_reference_policy": (1, ()),
    "register_adv_est": (1, ()),
    "upsample_batch_to_divisible_size": (3, ()),
}
"""How this backend calls them: the number of positional arguments, `self` included, and the keywords."""


def __getattr__(name: str) -> Any:
    """Import a name of verl when it is used.

    Raises:
        ConfigError: the installed version does not have it.
    """
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_NAMES[name]), name)
    except (ImportError, AttributeError) as error:
        raise _lacks(f"{_NAMES[name]}.{name} ({error})") from error


def root_of(section: Any) -> Any:
    """Return verl's whole tree of settings, of which verl passes one section; empty if the section is in none."""
    return section._get_root() if hasattr(section, "_get_root") else {}


def check_version() -> None:
    """Check that the installed version of verl can be used. Log a warning if it is newer than the supported one.

    Raises:
        ConfigError: it is older, lacks a name that this backend uses, or does not take its arguments.
    """
    installed = Version(_installed())
    if installed.release < Version(SUPPORTED).release:
        raise ConfigError(f"verl {installed} is too old for this backend: install verl {SUPPORTED}")
    if installed.release == Version(SUPPORTED).release:
        return
    for name in _NAMES:
        __getattr__(name)
    for path, (positional, keywords) in _CALLS.items():
        name, _, method = path.partition(".")
        function = attribute(__getattr__(name), method) if method else __getattr__(name)
        signature = inspect.signature(function)
        # verl passes further arguments of its buffers itself.
        bind = signature.bind_partial if method == "__init__" else signature.bind
        try:
            bind(*[None] * positional, **dict.fromkeys(keywords))
        except TypeError as error:
            raise _lacks(f"{_NAMES[name]}.{path} with the arguments of {SUPPORTED} ({error})") from None
    log.warning("verl %s is not tested with this backend: verl %s is supported", installed, SUPPORTED)


def load_balancer(llm_client: Any) -> Any:
    """Return the actor that knows verl's servers. `llm_client` is what verl passes to the manager.

    Raises:
        ConfigError: the installed version of verl has none.
    """
    return attribute(llm_client, "_load_balancer")


def server_addresses(balancer: Any) -> list[str]:
    """Return the servers that verl has now, as HOST:PORT. Blocks.

    Raises:
        RayError: the load balancer does not answer.
        ConfigError: the installed version of verl does not list them.
    """
    import ray

    return sorted(ray.get(attribute(balancer, "get_all_servers").remote(), timeout=ANSWER_S))


def server_actors(balancer: Any) -> dict[str, Any]:
    """Return the actor that runs each server, by HOST:PORT. Blocks.

    Raises:
        RayError: the load balancer does not answer, or does not have them.
    """
    import ray

    actors: dict[str, Any] = ray.get(balancer.__ray_call__.remote(_servers), timeout=ANSWER_S)
    return actors


def _servers(balancer: Any) -> dict[str, Any]:
    return dict(attribute(balancer, "_servers"))


def vllm_adapter() -> Any:
    """Return verl's LoRA adapter as vLLM's engine takes it with a request. Runs in the process of verl's server."""
    from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID, VLLM_LORA_PATH
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=ADAPTER, lora_int_id=VLLM_LORA_INT_ID, lora_path=VLLM_LORA_PATH)


def attribute(owner: Any, name: str) -> Any:
    """Return an attribute of an object of verl.

    Raises:
        ConfigError: the installed version of verl does not have it.
    """
    try:
        return getattr(owner, name)
    except AttributeError:
        raise _lacks(f"{type(owner).__name__}.{name}") from None


def _lacks(what: str) -> ConfigError:
    return ConfigError(f"verl {_installed()} has no {what}, which this backend uses: install verl {SUPPORTED}")


def _installed() -> str:
    return importlib.metadata.version("verl")
