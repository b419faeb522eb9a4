"""What a run of verl on the CPU needs at its start: environment variables, and overrides of verl's settings.

Both hold only what the CPU requires; batch sizes, learning rate and the like are the user's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from rollout_backend.model.serving.local_engine import IMAGE_CACHE

_FOLDER = str(Path(__file__).resolve().parent.parent)
"""The folder of this package, which is not installed: verl's processes find it by PYTHONPATH."""

ROLLOUT_NAME = "sglang_cpu"
"""The name of this rollout in verl's registry, and so in `actor_rollout_ref.rollout.name`."""

KEEP_FREED_MEMORY = ":".join(
    f"glibc.malloc.{setting}"
    for setting in ("arena_max=1", "mmap_max=0", f"trim_threshold={2**40}", f"top_pad={2**26}", "hugetlb=1")
)
"""For `GLIBC_TUNABLES`. A micro batch allocates and frees gigabytes. glibc returns blocks over 32 MiB to the kernel
at once, which must clear their pages again for the next tensor: a fifth of the time of a pass."""


def _openmp() -> Path | None:
    """Return the path of Intel's OpenMP, if it is installed, as on Linux on x86-64."""
    try:
        files = metadata.files("intel-openmp") or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())).resolve() for file in files if file.name == "libiomp5.so"), None)


def environment(threads: int | None = None, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the complete environment of the process that starts verl; its Ray workers inherit it.

    `threads` is the trainer's number of threads, by default one per core. `inherited` is the environment to start
    from, by default this process's.
    """
    env = dict(os.environ if inherited is None else inherited)
    # verl counts the devices in this variable, even if it is empty, so it must be unset.
    env.pop("CUDA_VISIBLE_DEVICES", None)
    env.setdefault("GLIBC_TUNABLES", KEEP_FREED_MEMORY)
    if library := _openmp():
        # GNU's OpenMP, which torch brings, gives each computing thread separate helper threads. Once these outnumber
        # the cores they sleep between any two operations. A worker of verl computes in several threads, so it would
        # take 1.75 times as long.
        preloaded = env.get("LD_PRELOAD", "").split(":")
        env["LD_PRELOAD"] = ":".join(filter(None, dict.fromkeys([str(library), *preloaded])))
        env.setdefault("KMP_BLOCKTIME", "10")  # milliseconds that a helper spins before it sleeps; the default is 200
    return env | {
        "VERL_PLATFORM": "cpu",
        # The module, not the package: a process may have imported the package before this environment was set.
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu.register",
        "PYTHONPATH": os.pathsep.join(
            dict.fromkeys(filter(None, [_FOLDER, *env.get("PYTHONPATH", "").split(os.pathsep)]))
        ),
        "VERL_ENGINE_DEVICE": "cuda",  # selects the FSDP engine, which verl registers for cuda and npu only
        # At INFO verl's separate_async trainer raises on a log line: logger.info(..., flush=True).
        "VERL_LOGGING_LEVEL": "WARNING",
        # Otherwise Ray sets CUDA_VISIBLE_DEVICES for an actor without a GPU.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        IMAGE_CACHE: "0",  # the same as for the servers
        "HF_HUB_OFFLINE": "1",  # models are folders; a mistyped path must not be looked up on a model hub
        "OMP_NUM_THREADS": str(threads or os.cpu_count() or 1),
    }


def overrides(trainer_devices: int = 1, rollout_devices: int = 0, attention: str = "sdpa") -> list[str]:
    """Return Hydra overrides that let verl's trainer run on the CPU.

    `trainer_devices` is the number of training processes, each with one server. `rollout_devices` is the number of
    standalone servers, which the trainer mode `separate_async` needs; then the training processes have none.
    """
    model, actor = "actor_rollout_ref.model", "actor_rollout_ref.actor"
    rollout = "actor_rollout_ref.rollout"
    standalone = [
        "actor_rollout_ref.hybrid_engine=False",
        f"{rollout}.nnodes=1",
        f"{rollout}.n_gpus_per_node={rollout_devices}",
        f"{rollout}.checkpoint_engine.backend=shared_folder",
        f"{rollout}.checkpoint_engine.custom_backend_module=verl_cpu.folder_engine",
    ]
    return [
        *(standalone if rollout_devices else []),
        "trainer.device=cpu",
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={trainer_devices}",
        # Logical GPUs: verl places its workers by them, and Ray does not check that they exist.
        f"+ray_kwargs.ray_init.num_gpus={trainer_devices + rollout_devices}",
        "ray_kwargs.ray_init.num_cpus=16",  # likewise logical: verl's helpers each claim one
        "+ray_kwargs.ray_init.include_dashboard=False",
        # A separate cluster: otherwise Ray joins the cluster of another training run on this machine.
        "+ray_kwargs.ray_init.address=local",
        f"{model}.use_remove_padding=False",  # needs flash attention
        f"+{model}.override_config.attn_implementation={attention}",
        f"{actor}.strategy=fsdp2",
        f"{actor}.use_torch_compile=False",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"{actor}.fsdp_config.model_dtype=fp32",
        f"+{actor}.fsdp_config.mixed_precision={{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}}",
        f"{rollout}.name={ROLLOUT_NAME}",
        f"{rollout}.tensor_model_parallel_size=1",
        # verl pads validation batches to a multiple of its agent workers, so there is one.
        f"{rollout}.agent.num_workers=1",
        "reward.num_workers=0",  # agents return their rewards; an idle reward worker takes a gigabyte
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    ]
