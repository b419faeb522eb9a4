"""The Ray actor that owns one SGLang server process and sends it verl's requests.

Invariants:

- The server lives exactly as long as its actor. It is started from the actor's event loop, whose thread lives as long
  as the actor's process, because the kernel ends a child with the thread that started it (see
  `rollout_backend.model.serving.server_process`); so it ends even if the actor is killed.
- The server fails in the same cases as verl's own servers on a GPU. While it is asleep, its memory is released and
  generation is not paused: any request that generates, including `/health`, ends the server. Releasing the memory
  while a request runs ends it as well.
- A server of a model with a LoRA adapter applies it only to requests that name it. Others sample from the base model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from rollout_backend.config import ModelConfig, ServingConfig
from rollout_backend.errors import EngineUnavailable, ServingError
from rollout_backend.model.serving.local_engine import Command, LocalEngine, MakeCommand, ServerNode, sglang_command

ADAPTER = "verl_actor_lora_name"
"""The name under which verl loads its adapter into SGLang."""
_CONTROL_S = 120.0
_UPDATE_S = 600.0
_NOT_OF_VERL = (
    "--context-length",
    "--sampling-defaults",
    "--served-model-name",
    "--stream-interval",
    "--weight-version",
)
_LAUNCHER = Path(__file__).with_name("launch_server.py")


def server_command(model: ModelConfig, serving: ServingConfig, node: ServerNode) -> Command:
    """Return the command of `sglang_command`, with memory that can be released, and with verl's options and
    environment."""
    argv, env = sglang_command(model, serving.model_copy(update={"extra_args": ()}), node)
    env.pop("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION")  # verl does not set it
    for option in _NOT_OF_VERL:
        at = argv.index(option)
        del argv[at : at + 2]
    argv.remove("--incremental-streaming-output")  # in `extra_args`, if verl's settings have it
    module = argv.index("-m")
    return [*argv[:module], str(_LAUNCHER), *argv[module + 2 :], *serving.extra_args], env


class SGLangServer:
    """An async actor: calls run concurrently, as in verl's own servers. `name` is for messages and for the log."""

    def __init__(
        self,
        name: str,
        model: ModelConfig,
        serving: ServingConfig,
        log: Path,
        can_sleep: bool = True,
        command: MakeCommand = server_command,
    ) -> None:
        self._name = name
        self._context_length = model.context_tokens
        self._can_sleep = can_sleep
        self._has_adapter = serving.lora_rank is not None
        self._adapter_loaded = False
        self._engine = LocalEngine(name, model, serving, log, command=command)
        self._http: aiohttp.ClientSession | None = None
        self._died: asyncio.Task[str] | None = None

    async def launch(self) -> str:
        """Start the server and return its HOST:PORT. Raise StartupError."""
        await self._engine.start()
        self._http = aiohttp.ClientSession()
        self._died = asyncio.create_task(self._engine.wait())
        # On the CPU, SGLang collects garbage whenever it empties its cache. It exempts what it has loaded, but
        # without a warm-up it may try that before it listens, and each collection takes the scheduler .3 s.
        await self._post("/freeze_gc", {}, _CONTROL_S)
        return self.address()

    async def close(self) -> None:
        """End the server. Not needed if the actor ends."""
        if self._died is not None:
            self._died.cancel()
        if self._http is not None:
            await self._http.close()
        await self._engine.stop()

    def address(self) -> str:
        return self._engine.url.removeprefix("http://")

    def pid(self) -> int | None:
        """Return the server's process id."""
        return self._engine.pid

    async def update_weights(self, folder: Path, version: int | None) -> None:
        """Make the server load the weights of a model folder, which must have the model's shapes.

        SGLang empties its prefix cache itself, because the cache belongs to the old weights.

        Raises:
            ServingError: the server refused, and still serves the old weights.
            EngineUnavailable: the server died, for example of a wrong shape; the message carries the end of its log.
        """
        body = {"model_path": str(folder)}
        if version is not None:
            body["weight_version"] = str(version)
        await self._post("/update_weights_from_disk", body, _UPDATE_S)

    async def load_adapter(self, folder: Path, version: int | None) -> None:
        """Make the server load a LoRA adapter, in place of the one before.

        Raises:
            ServingError: the server refused.
            EngineUnavailable: the server died; the message carries the end of its log.
        """
        if self._adapter_loaded:
            self._adapter_loaded = False
            await self._post("/unload_lora_adapter", {"lora_name": ADAPTER}, _CONTROL_S)
        await self._post("/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": str(folder)}, _UPDATE_S)
        self._adapter_loaded = True
        await self.clear_kv_cache()
        if version is not None:
            body = {"new_version": str(version), "abort_all_requests": False}
            await self._post("/update_weight_version", body, _CONTROL_S)

    # verl calls these methods on every server of a replica.

    async def sleep(self) -> None:
        """Release the memory of the cache, and without an adapter that of the weights. Generation is not paused."""
        await self._release("kv_cache", *([] if self._has_adapter else ["weights"]))

    async def wake_up(self, tags: Sequence[str] = ("kv_cache", "weights")) -> None:
        await self._resume(*tags)

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Pause generation: running requests end as aborted, with the tokens that they have.

        A request that arrives later waits. It cannot be rejected, so `reject_request` changes nothing.
        """
        await self._post("/pause_generation", {"mode": "abort"}, _CONTROL_S)

    async def resume_generation(self) -> None:
        await self._post("/continue_generation", {}, _CONTROL_S)

    async def clear_kv_cache(self) -> None:
        """Empty the prefix cache. Raise ServingError while requests are running."""
        await self._post("/flush_cache", {}, _CONTROL_S)

    async def release_kv_cache(self) -> None:
        await self._release("kv_cache")

    async def resume_kv_cache(self) -> None:
        await self._resume("kv_cache")

    async def _release(self, *tags: str) -> None:
        if self._can_sleep:
            await self._post("/release_memory_occupation", {"tags": tags}, _CONTROL_S)

    async def _resume(self, *tags: str) -> None:
        if self._can_sleep:
            await self._post("/resume_memory_occupation", {"tags": tags}, _CONTROL_S)

    async def start_profile(self, **_: Any) -> None:
        """Do nothing: there is no profiler."""

    async def stop_profile(self, **_: Any) -> None:
        """Do nothing."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        **_: Any,
    ) -> Any:
        """Generate through verl's interface, which names the adapter; return a `TokenOutput`. Agents use HTTP
        instead."""
        from verl.workers.rollout.replica import TokenOutput

        params = {key: value for key, value in sampling_params.items() if key not in ("logprobs", "max_tokens")}
        limit = params.get("max_new_tokens", sampling_params.get("max_tokens"))
        room = self._context_length - len(prompt_ids) - 1
        params["max_new_tokens"] = room if limit is None else min(limit, room)
        body = {"input_ids": list(prompt_ids), "sampling_params": params, "return_logprob": True}
        if self._has_adapter:
            body["lora_path"] = ADAPTER
        reply = await self._post("/generate", body, None)
        meta = reply["meta_info"]
        version = meta["weight_version"]
        return TokenOutput(
            token_ids=reply["output_ids"],
            log_probs=[entry[0] for entry in meta["output_token_logprobs"]],
            stop_reason=meta["finish_reason"]["type"],
            extra_fields={"global_steps": int(version) if version.isdigit() else None},
        )

    async def _post(self, path: str, body: Mapping[str, Any], timeout_s: float | None) -> Any:
        """Return the answer's JSON, or None if it is not JSON. Raise as soon as the server ends."""
        assert self._died is not None, "not launched"
        request = asyncio.create_task(self._request(path, body, timeout_s))
        try:
            await asyncio.wait({request, self._died}, return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                raise EngineUnavailable(f"{self._name}, asked for {path}, {self._died.result()}")
            return request.result()
        except (aiohttp.ClientError, TimeoutError) as error:
            what = str(error) or type(error).__name__
            raise EngineUnavailable(
                f"{self._name} did not answer to {path} ({what}). {await self._engine.log_tail()}"
            ) from None
        finally:
            request.cancel()

    async def _request(self, path: str, body: Mapping[str, Any], timeout_s: float | None) -> Any:
        assert self._http is not None
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._http.post(self._engine.url + path, json=body, timeout=timeout) as response:
            text = await response.text()
            if response.status != 200:
                raise ServingError(f"{self._name} refused {path}: HTTP {response.status}: {text[:500]}")
            return await response.json() if response.content_type == "application/json" else None
