"""What a run of verl on the CPU is started with: variables of the environment, and overrides of verl's settings.

Both say only what the CPU makes necessary; batch sizes, learning rate and the like are the user's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

ROLLOUT_NAME = "sglang_cpu"
"""What our rollout is called in verl's registry, and so in `actor_rollout_ref.rollout.name`."""

KEEP_FREED_MEMORY = ":".join(
    f"glibc.malloc.{setting}"
    for setting in ("arena_max=1", "mmap_max=0", f"trim_threshold={2**40}", f"top_pad={2**26}", "hugetlb=1")
)
"""For `GLIBC_TUNABLES`. A micro batch allocates and frees gigabytes. glibc hands what is over 32 MiB back to the
kernel at once, which must clear its pages again for the next tensor: a fifth of the time of a pass."""


def _openmp() -> Path | None:
    """Intel's OpenMP, if its package is here, which it is for Linux on x86-64."""
    try:
        files = metadata.files("intel-openmp") or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())).resolve() for file in files if file.name == "libiomp5.so"), None)


def environment(threads: int | None = None, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """The whole environment of the process that starts verl; its Ray workers inherit it.

    `threads` are the trainer's, by default one for each core. `inherited` is what to start from, this process's own
    environment by default.
    """
    env = dict(os.environ if inherited is None else inherited)
    # verl counts the devices that this lists, even where it lists none: it must be unset, not empty.
    env.pop("CUDA_VISIBLE_DEVICES", None)
    env.setdefault("GLIBC_TUNABLES", KEEP_FREED_MEMORY)
    if library := _openmp():
        # torch's own, GNU's, gives each thread that computes helpers of its own, and once those are more than the
        # cores they sleep between any two operations. A worker of verl computes in several threads: 1.75 times the
        # time.
        preloaded = env.get("LD_PRELOAD", "").split(":")
        env["LD_PRELOAD"] = ":".join(filter(None, dict.fromkeys([str(library), *preloaded])))
        env.setdefault("KMP_BLOCKTIME", "10")  # milliseconds that a helper spins before it sleeps; its default is 200
    return env | {
        "VERL_PLATFORM": "cpu",
        # The module, not the package: a process may have imported the package before it had this environment.
        "VERL_USE_EXTERNAL_MODULES": "rollout_backend.local.verl_cpu.register",
        "VERL_ENGINE_DEVICE": "cuda",  # picks the FSDP engine; verl registers it for cuda and npu alone
        # At INFO verl's separate_async trainer dies of a log line: logger.info(..., flush=True).
        "VERL_LOGGING_LEVEL": "WARNING",
        # Else Ray hides the devices of an actor without a GPU by the variable that must stay unset.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",  # models are folders; a mistyped path must not become a question to a hub
        "OMP_NUM_THREADS": str(threads or os.cpu_count() or 1),
    }


def overrides(trainer_devices: int = 1, rollout_devices: int = 0, attention: str = "sdpa") -> list[str]:
    """Hydra overrides that let verl's trainer run on the CPU.

    `trainer_devices` are processes that train, each with a server of its own. `rollout_devices` are standalone
    servers, which the trainer mode `separate_async` wants; then the trainers have none.
    """
    model, actor = "actor_rollout_ref.model", "actor_rollout_ref.actor"
    rollout = "actor_rollout_ref.rollout"
    standalone = [
        "actor_rollout_ref.hybrid_engine=False",
        f"{rollout}.nnodes=1",
        f"{rollout}.n_gpus_per_node={rollout_devices}",
        f"{rollout}.checkpoint_engine.backend=shared_folder",
        f"{rollout}.checkpoint_engine.custom_backend_module=rollout_backend.local.verl_cpu.folder_engine",
    ]
    return [
        *(standalone if rollout_devices else []),
        "trainer.device=cpu",
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={trainer_devices}",
        # Logical GPUs: verl places its workers by them, and nothing checks that there are any.
        f"+ray_kwargs.ray_init.num_gpus={trainer_devices + rollout_devices}",
        "ray_kwargs.ray_init.num_cpus=16",  # likewise logical: verl's helpers each claim one
        "+ray_kwargs.ray_init.include_dashboard=False",
        # A cluster of the run's own: else Ray joins the one of another training on this machine.
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
        # One loop of verl's own would pad validation batches to a multiple of its workers; ours is one.
        f"{rollout}.agent.num_workers=1",
        "reward.num_workers=0",  # agents bring their rewards; a worker of verl's would wait in a gigabyte for nothing
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    ]
