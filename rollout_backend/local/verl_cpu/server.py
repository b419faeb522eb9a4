"""The Ray actor that owns one SGLang server process, and speaks to it for verl.

What must always hold: the server is there for exactly as long as its actor. It is started from the actor's event
loop, whose thread lives as long as the actor's process, because the kernel ends a child with the thread that started
it (`rollout_backend.process`); so it goes even when the actor is killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from rollout_backend.config import ModelConfig, ServingConfig
from rollout_backend.errors import EngineUnavailable, ServingError
from rollout_backend.serving.engine import LocalEngine, MakeCommand
from rollout_backend.serving.sglang import engine_command

_CONTROL_S = 120.0
_UPDATE_S = 600.0


class SGLangServer:
    """`name` is for messages and for the log. An async actor: calls run side by side, as verl's own servers' do."""

    def __init__(
        self,
        name: str,
        model: ModelConfig,
        serving: ServingConfig,
        log: Path,
        can_sleep: bool = True,
        command: MakeCommand = engine_command,
    ) -> None:
        self._name = name
        self._context_length = model.context_length
        self._can_sleep = can_sleep
        self._engine = LocalEngine(name, model, serving, log, command=command)
        self._http: aiohttp.ClientSession | None = None
        self._died: asyncio.Task[str] | None = None

    async def launch(self) -> str:
        """Starts the server and returns its HOST:PORT. Raises StartupError."""
        await self._engine.start()
        self._http = aiohttp.ClientSession()
        self._died = asyncio.create_task(self._engine.wait())
        return self.address()

    async def close(self) -> None:
        """Ends the server. Not needed where the actor ends."""
        if self._died is not None:
            self._died.cancel()
        if self._http is not None:
            await self._http.close()
        await self._engine.stop()

    def address(self) -> str:
        return self._engine.url.removeprefix("http://")

    def pid(self) -> int | None:
        """Of the server."""
        return self._engine.pid

    async def update_weights(self, folder: Path, version: int | None) -> None:
        """Has the server load the weights of a model folder, which must be of the model's shapes.

        SGLang empties its cache of prefixes by itself: they are the old weights'.

        Raises:
            ServingError: it refuses; the weights it serves are still the old ones.
            EngineUnavailable: it died, as it does of a wrong shape; the message carries the end of its log.
        """
        body = {"model_path": str(folder)}
        if version is not None:
            body["weight_version"] = str(version)
        await self._post("/update_weights_from_disk", body, _UPDATE_S)

    # What verl calls, on every server of a replica.

    async def sleep(self) -> None:
        """Stops generation while the trainer has the machine.

        What is being generated is cut short, and answered as aborted with the tokens it has; what comes later waits
        in the server until it wakes. The memory stays: there is no device to hand back.
        """
        if self._can_sleep:  # verl wakes no server that it was not allowed to put to sleep
            await self.abort_all_requests()

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await self.resume_generation()

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """As `sleep`. A request that comes later cannot be rejected, so `reject_request` changes nothing."""
        await self._post("/pause_generation", {"mode": "abort"}, _CONTROL_S)

    async def resume_generation(self) -> None:
        await self._post("/continue_generation", {}, _CONTROL_S)

    async def clear_kv_cache(self) -> None:
        """Empties the cache of prefixes. Raises ServingError while requests are running."""
        await self._post("/flush_cache", {}, _CONTROL_S)

    async def release_kv_cache(self) -> None:
        """Nothing: memory is not handed back and forth on the CPU."""

    async def resume_kv_cache(self) -> None:
        """Nothing, likewise."""

    async def start_profile(self, **_: Any) -> None:
        """Nothing: there is no profiler here."""

    async def stop_profile(self, **_: Any) -> None:
        """Nothing, likewise."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        **_: Any,
    ) -> Any:
        """verl's own way to generate, a `TokenOutput`. Agents come over HTTP instead."""
        from verl.workers.rollout.replica import TokenOutput

        params = {key: value for key, value in sampling_params.items() if key not in ("logprobs", "max_tokens")}
        limit = params.get("max_new_tokens", sampling_params.get("max_tokens"))
        room = self._context_length - len(prompt_ids) - 1
        params["max_new_tokens"] = room if limit is None else min(limit, room)
        body = {"input_ids": list(prompt_ids), "sampling_params": params, "return_logprob": True}
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
        """The answer's JSON, or None where it is no JSON. Ends as soon as the server does."""
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
                f"{self._name} did not answer to {path} ({what}). {await self._engine.tail()}"
            ) from None
        finally:
            request.cancel()

    async def _request(self, path: str, body: Mapping[str, Any], timeout_s: float | None) -> Any:
        assert self._http is not None
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._http.post(self._engine.url + path, json=body, timeout=timeout) as response:
            text = await response.text()
            if response.status != 200:
                raise ServingError(f"{self._name} refuses {path}: HTTP {response.status}: {text[:500]}")
            return await response.json() if response.content_type == "application/json" else None
