"""Run engines as processes on this machine (`serving.kind=process`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from rollout_backend.config import EngineName, ModelConfig, RolloutConfig, ServingConfig
from rollout_backend.errors import ServingError, StartupError
from rollout_backend.serving.engine import EngineFactory, control, is_healthy
from rollout_backend.serving.engine_commands import Command, ServerNode, sglang_command, vllm_command
from rollout_backend.serving.server_process import ServerProcess, free_port

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
        return f"{self._host}:{free_port(self._host)}"

    async def start(self, rendezvous: str = "") -> None:
        folder = await asyncio.to_thread(lambda: self._model.weight_folder)  # may download the model
        if not (folder / "config.json").is_file():  # SGLang would report it after 15 s, in 60 lines
            raise StartupError(f"{self._name}: {folder} is no model folder: it has no config.json; set model.path")
        port = free_port(self._host)
        self.url = f"http://{self._host}:{port}"
        node = ServerNode(self._host, port, self._first_gpu, self._rank, rendezvous)
        model = self._model.model_copy(update={"path": folder, "name": self._model.served_name})
        argv, env = self._command(model, self._serving, node)
        self._process = ServerProcess(self._name, argv, self._log, env, memory_advice=_MEMORY_ADVICE)
        await self._process.start()
        timeout_s = self._serving.startup_s(weight_bytes(folder))
        await self._process.wait_healthy(lambda: is_healthy(self.url), timeout_s)
        if self._serving.engine == "vllm":
            try:
                body = {"new_version": "0"}  # as SGLang's `--weight-version`
                await control(f"{self.url}/update_weight_version", body, "set the version of its weights")
            except ServingError as error:
                raise StartupError(f"{self._name}: {error}. {self._process.log_tail()}") from None

    async def wait(self) -> str:
        assert self._process is not None, "not started"
        return await self._process.wait_ended()

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stop(_GRACE_S)

    async def log_tail(self) -> str:
        return self._process.log_tail() if self._process is not None else ""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None
