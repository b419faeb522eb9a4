"""The command line and the environment of one SGLang server (0.5.23).

What must always hold: a server samples exactly as its request says, so nothing here changes a distribution or
fills in a sampling setting; and it stays healthy while its generation is paused to take new weights.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from rollout_backend.config import ModelConfig, ServingConfig
from rollout_backend.serving.install import find_engine

Command = tuple[list[str], dict[str, str]]
"""The arguments and the whole environment of a process."""

_CPU_TOTAL_TOKENS = 32_768
_STUBS = Path(__file__).parent / "cpu_stubs"
# Ours, and wrong for a process of another Python environment that is no Ray worker.
_NOT_INHERITED = ("PYTHON", "RAY_", "VIRTUAL_ENV", "ROLLOUT__")


def engine_command(
    model: ModelConfig,
    serving: ServingConfig,
    host: str,
    port: int,
    first_gpu: int = 0,
    inherited: Mapping[str, str] | None = None,
) -> Command:
    """How to start a server of `model` that listens on `host:port`.

    `first_gpu` counts among the GPUs that the process sees. `inherited` is the environment to start from, this
    process's own by default; CUDA_VISIBLE_DEVICES and the like pass through.

    Raises:
        ConfigError: for the CPU, where neither `serving.python` is set nor the CPU engine installed.
    """
    on_cpu = serving.device == "cpu"
    python = serving.python or (find_engine() if on_cpu else Path(sys.executable))
    env = {
        name: value
        for name, value in (os.environ if inherited is None else inherited).items()
        if not name.startswith(_NOT_INHERITED)
    }
    # Otherwise the working directory comes first among the places that modules are imported from.
    env["PYTHONSAFEPATH"] = "1"
    env["PYTHONUNBUFFERED"] = "1"  # the last words of a server that dies must be in its log
    # /health would generate a token: it hangs for 20 s and answers 503 while generation is paused for new weights,
    # and the router would drop a server that is well.
    env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
    # A model is a folder; without these a mistyped path becomes a question to a model hub.
    env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    argv = [
        str(python),
        *("-m", "sglang.launch_server"),
        *("--model-path", str(model.path)),
        *("--served-model-name", model.served_name),
        *("--host", host),
        *("--port", str(port)),
        *("--device", serving.device),
        *("--dtype", serving.dtype),
        *("--tp-size", str(serving.tensor_parallel)),
        *("--context-length", str(model.context_length)),
        *("--max-running-requests", str(serving.max_running_requests)),
        # The model's own generation_config.json must not add a top_k or a penalty that the trainer knows nothing of.
        *("--sampling-defaults", "openai"),
        *("--log-level-http", "warning"),  # no line for each request
        "--incremental-streaming-output",  # else each piece of a stream repeats all tokens and logprobs before it
    ]
    if model.trust_remote_code:
        argv.append("--trust-remote-code")
    if not on_cpu:
        argv += ["--base-gpu-id", str(first_gpu)]  # several servers on one machine each take GPUs of their own
    total_tokens = serving.max_total_tokens or (_CPU_TOTAL_TOKENS if on_cpu else None)
    if total_tokens is not None:  # on a GPU SGLang takes the memory that is left
        argv += ["--max-total-tokens", str(total_tokens)]
    if on_cpu:
        env["SGLANG_USE_CPU_ENGINE"] = "1"  # else rotary embedding imports CUDA operations and dies
        env["PYTHONPATH"] = str(_STUBS)  # stands in for two GPU packages: see sitecustomize.py there
        env["OMP_NUM_THREADS"] = str(serving.threads)  # else each server takes every core
        # Agents run on the same cores here: threads that spin while they wait would take turns with them for nothing.
        env["OMP_WAIT_POLICY"] = "PASSIVE"
        argv += [
            *("--attention-backend", "torch_native"),  # the others are kernels for GPUs, or for AMX
            *("--mm-attention-backend", "sdpa"),
            "--disable-fast-image-processor",  # which is torchvision's
            *("--sampling-backend", "pytorch"),
            *("--grammar-backend", "none"),  # compiles for 10 s at the start, for a feature that is not used
            "--disable-overlap-schedule",  # there is no device to overlap with
            "--sleep-on-idle",  # else an idle scheduler spins on a core
        ]
    return [*argv, *serving.extra_args], env
