"""The command line and the environment of one SGLang server (0.5.23).

Invariants:

- A server samples exactly as its request specifies: no option here changes a distribution or sets a sampling default.
- A server stays healthy while its generation is paused for new weights.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rollout_backend.config import ModelConfig, ServingConfig
from rollout_backend.gateway.engine.protocol import STREAM_INTERVAL
from rollout_backend.serving.engine_environment import Command, base_environment, cpu_threads, interpreter
from rollout_backend.serving.placement import ServerNode

IMAGE_CACHE = "SGLANG_VLM_CACHE_SIZE_MB"
_CPU_TOTAL_TOKENS = 32_768
_STUBS = Path(__file__).parent / "cpu_stubs"


def engine_command(
    model: ModelConfig,
    serving: ServingConfig,
    node: ServerNode,
    inherited: Mapping[str, str] | None = None,
) -> Command:
    """Return the command of one node of a server of `model`.

    `inherited` is the environment to start from, by default this process's; CUDA_VISIBLE_DEVICES and the like are
    kept.

    Raises:
        ConfigError: on the CPU, `serving.python` is not set and the CPU engine is not installed.
    """
    on_cpu, python = serving.device == "cpu", interpreter(serving)
    env = base_environment(inherited)
    # Otherwise /health generates a token. While generation is paused for new weights it hangs for 20 s and answers
    # 503, and the router removes a healthy server.
    env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
    # SGLang caches the encoder's output for an image by its pixels, and 0.5.23 never empties that cache: after new
    # weights a repeated image would still be encoded with the old ones.
    env[IMAGE_CACHE] = "0"
    argv = [
        str(python),
        *("-m", "sglang.launch_server"),
        *("--model-path", str(model.path)),
        *("--served-model-name", model.served_name),
        *("--host", node.host),
        *("--port", str(node.port)),
        *("--device", serving.device),
        *("--dtype", serving.dtype),
        *("--weight-version", "0"),  # of the weights in `model.path`; updates count from there
        *("--tp-size", str(serving.tensor_parallel)),
        *("--context-length", str(model.context_tokens)),
        *("--max-running-requests", str(serving.max_running_requests)),
        # The model's generation_config.json must not add a top_k or a penalty that the trainer does not know.
        *("--sampling-defaults", "openai"),
        *("--log-level-http", "warning"),  # no line for each request
        "--incremental-streaming-output",  # else each piece of a stream repeats all tokens and logprobs before it
        *("--stream-interval", str(STREAM_INTERVAL)),  # a router drops the request for it
    ]
    sizes = {
        "--pp-size": serving.pipeline_parallel,
        "--dp-size": serving.data_parallel,
        "--attn-dp-size": serving.attention_data_parallel,
        "--ep-size": serving.expert_parallel,
    }
    argv += [word for option, size in sizes.items() if size > 1 for word in (option, str(size))]
    if serving.nodes_per_server > 1:
        argv += ["--nnodes", str(serving.nodes_per_server), "--node-rank", str(node.rank)]
        argv += ["--dist-init-addr", node.rendezvous]
    if model.trust_remote_code:
        argv.append("--trust-remote-code")
    if model.routed_experts:
        argv.append("--enable-return-routed-experts")
    if serving.lora_rank is not None:
        argv += ["--enable-lora", "--max-lora-rank", str(serving.lora_rank)]
        argv += ["--lora-target-modules", *serving.lora_targets]
        argv += ["--max-loras-per-batch", str(serving.max_adapters + 1)]  # requests without an adapter count as one
    if not on_cpu:
        argv += ["--base-gpu-id", str(node.first_gpu)]  # each server on a machine uses separate GPUs
    total_tokens = serving.max_total_tokens or (_CPU_TOTAL_TOKENS if on_cpu else None)
    if total_tokens is not None:  # on a GPU SGLang uses the free memory
        argv += ["--max-total-tokens", str(total_tokens)]
    if on_cpu:
        env["SGLANG_USE_CPU_ENGINE"] = "1"  # else rotary embedding imports CUDA operations and dies
        env["PYTHONPATH"] = str(_STUBS)  # replaces two GPU packages: see its sitecustomize.py
        env["TORCH_COMPILE_DISABLE"] = "1"  # SGLang compiles its sampling with a seed, which needs a C++ compiler
        env |= cpu_threads(serving.threads)
        if serving.gpus_per_server > 1:  # else SGLang refuses more processes than the machine has NUMA nodes
            cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join([cores] * serving.gpus_per_server)
        argv += [
            *("--attention-backend", "torch_native"),  # the others are kernels for GPUs, or for AMX
            *("--mm-attention-backend", "sdpa"),
            "--disable-fast-image-processor",  # it needs torchvision
            *("--sampling-backend", "pytorch"),
            *("--grammar-backend", "none"),  # compiles for 10 s at the start, for an unused feature
            "--disable-overlap-schedule",  # there is no device to overlap with
            "--sleep-on-idle",  # else an idle scheduler spins on a core
            *("--lora-backend", "torch_native"),  # the others are kernels for GPUs
        ]
    return [*argv, *serving.extra_args], env
