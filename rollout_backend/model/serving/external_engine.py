"""Use engines that something else runs (`serving.kind=external`): check and watch them, never start or stop them.

A host name, such as that of a headless Kubernetes service, stands for one server per address.

Invariant: a name that cannot be resolved keeps its last addresses. Its servers may still be up, and the fleet detects
those that are not.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import aiohttp
from yarl import URL

from rollout_backend.config import EngineName, RolloutConfig
from rollout_backend.errors import PreflightError, StartupError
from rollout_backend.model.serving import engine
from rollout_backend.model.serving.engine import PROBE, EngineFactory, is_responding, probe_url

log = logging.getLogger(__name__)

_LOOK_UP_S = 1.0
# A server may compile kernels at its first generation.
_TIMEOUT_S = 30.0
_NEEDS = (
    "Rollouts need the ids and logprobs of sampled tokens, which SGLang and vLLM return. Servers that only speak "
    "OpenAI's API (Ollama, a hosted model) do not return them"
)
_VLLM_PATH = "/inference/v1/generate"


class ExternalEngineFactory(EngineFactory):
    """Makes the engines of `serving.kind=external`."""

    def __init__(self, config: RolloutConfig, log_dir: Path) -> None:
        self._config = config
        self._serving = config.serving
        self._urls: Sequence[str] = config.serving.urls
        self._addresses = ServiceAddresses(self._urls) if config.serving.follow_dns else None
        self.count = len(self._urls)

    async def open(self) -> None:
        """With `serving.follow_dns`, wait for an address. Raises StartupError."""
        if self._addresses is None:
            return
        try:
            async with asyncio.timeout(self._serving.startup_s()):
                while True:
                    if found := await self._addresses.look_up():
                        self._urls, self.count = found, len(found)
                        return
                    await asyncio.sleep(_LOOK_UP_S)
        except TimeoutError:
            names = ", ".join(self._serving.urls)
            raise StartupError(f"no address of {names} was found: correct serving.urls") from None

    async def follow(self, serve_with: Callable[[Sequence[str]], Awaitable[None]]) -> NoReturn:
        if self._addresses is not None:
            await self._addresses.follow(serve_with)
        await super().follow(serve_with)

    def make(self, number: int) -> ExternalEngine:
        return ExternalEngine(f"engine-{number}", self._urls[number], self._config)


class ExternalEngine:
    """A server at `url` that something else runs."""

    def __init__(self, name: str, url: str, config: RolloutConfig) -> None:
        self._name = name
        self._engine = config.serving.engine
        self._records_experts = config.model.routed_experts
        self._seeded = config.sampling.seed is not None or "seed" in config.gateway.agent_sampling_overrides
        self._timeout_s = config.serving.startup_s()
        self.url = url.rstrip("/")

    async def reserve(self) -> AsyncIterator[str]:
        """Wait until the server answers."""
        began, reported = time.monotonic(), False
        while not await is_responding(self.url, self._engine):
            waited = time.monotonic() - began
            if waited > self._timeout_s:
                probed = probe_url(self.url, self._engine)
                raise StartupError(
                    f"{self._name}: {probed} did not answer 200 within {self._timeout_s:g} s: "
                    "start that server, or correct serving.urls"
                )
            if not reported and waited > engine.REPORT_WAIT_AFTER_S:
                reported = True
                yield f"waits for {self.url} to answer"
            await asyncio.sleep(0.5)

    async def start(self) -> None:
        """Raise StartupError if the server was started without options that rollouts need."""
        try:
            if self._engine == "vllm":
                await check_vllm(self.url)
            else:
                await check_options(self.url, records_experts=self._records_experts, seeded=self._seeded)
        except PreflightError as error:
            raise StartupError(f"{self._name}: {error}") from None

    async def wait(self) -> str:
        # The process is not visible, so only a probe detects its end.
        while True:
            await asyncio.Event().wait()

    async def stop(self) -> None:
        pass

    async def log_tail(self) -> str:
        return ""


class ServiceAddresses:
    every_s = 5.0
    """Seconds between two lookups in `follow`."""

    def __init__(self, urls: Sequence[str]) -> None:
        """`urls` name the services. Each host stands for all its addresses; the rest of the URL is kept."""
        self._found: dict[str, list[str]] = {url: [] for url in urls}
        self._unresolved: set[str] = set()

    async def look_up(self) -> list[str]:
        """Return the URL of each server, ordered by service and address."""
        for url in self._found:
            try:
                self._found[url] = await _addresses(url)
                self._unresolved.discard(url)
            except OSError as error:
                if url not in self._unresolved:
                    log.warning("%s cannot be resolved (%s): its last addresses are kept", url, error)
                self._unresolved.add(url)
        return list(dict.fromkeys(address for found in self._found.values() for address in found))

    async def follow(self, serve_with: Callable[[Sequence[str]], Awaitable[None]]) -> NoReturn:
        """Look up the names every few seconds. Call `serve_with` with all servers when they have changed."""
        before = [address for found in self._found.values() for address in found]
        while True:
            await asyncio.sleep(self.every_s)
            now = await self.look_up()
            if now != before:
                await serve_with(now)
                before = now


async def _addresses(url: str) -> list[str]:
    """Return the URL for each address of its host. Raises OSError."""
    parsed = URL(url)
    found = await asyncio.get_running_loop().getaddrinfo(parsed.host, parsed.port, type=socket.SOCK_STREAM)
    hosts = sorted({str(address[0]) for *_, address in found})
    return [str(parsed.with_host(host)).rstrip("/") for host in hosts]


class ServedModel(NamedTuple):
    path: str
    """The model's path or name, as given when the server started."""
    engine: EngineName


async def served_model(url: str) -> ServedModel:
    """Return the model of an SGLang or vLLM server.

    Raises:
        PreflightError: the server cannot be used, and why.
    """
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as http:
        status, info = await _ask(http, url + PROBE)
        if status != 200 or not info.get("model_path"):
            if (await _ask(http, f"{url}/get_model_info"))[0] == 200:
                raise PreflightError(
                    f"{url} answers /get_model_info and not {PROBE}: it is a router, or an old SGLang. Name an "
                    "SGLang server; the run starts its own router"
                )
            models = (await _ask(http, f"{url}/v1/models"))[1].get("data") or [{}]
            if (await _ask(http, f"{url}/version"))[1].get("version") and models[0].get("root"):
                await check_vllm(url)
                return ServedModel(str(models[0]["root"]), "vllm")
            raise PreflightError(f"{url}{PROBE} answers {status}: this is no SGLang or vLLM server. {_NEEDS}")
        body = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
        }
        status, answer = await _ask(http, f"{url}/generate", body)
    if status != 200 or not (answer.get("meta_info") or {}).get("output_token_logprobs"):
        raise PreflightError(f"{url}/generate answers {status} without the logprob of a sampled token. {_NEEDS}")
    return ServedModel(str(info["model_path"]), "sglang")


async def check_vllm(url: str) -> None:
    """Check that a vLLM server returns token ids, and logprobs of the distribution that it samples from.

    With `top_k=1` one token is left, so its logprob is 0; a lower value is the logprob before top_k. A server of verl
    may be asleep and would not answer in time, so this checks its middleware instead.

    Raises:
        PreflightError: the server cannot be used, and why.
    """
    params = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as http:
        mode = (await _ask(http, url + PROBE))[1].get("logprobs_mode")
        if mode is None:
            status, answer = await _ask(http, url + _VLLM_PATH, {"token_ids": [0], "sampling_params": params})
    if mode == "processed_logprobs":
        return
    if mode is not None:
        raise PreflightError(
            f"{url} returns logprobs of another distribution than it samples from: set "
            f"actor_rollout_ref.rollout.logprobs_mode=processed_logprobs, not {mode}"
        )
    if status in (403, 404):
        raise PreflightError(f"{url}{_VLLM_PATH} answers {status}: start vLLM 0.32.0 with --enable-scale-out")
    try:
        [entry] = answer["choices"][0]["logprobs"]["content"]
        logprob = float(entry["logprob"])
    except (LookupError, TypeError, ValueError):
        raise PreflightError(f"{url}{_VLLM_PATH} answers {status} without the logprob of a sampled token") from None
    if logprob != 0:
        raise PreflightError(
            f"{url} returns logprobs of another distribution than it samples from: start vLLM with --logprobs-mode "
            "processed_logprobs"
        )


async def check_options(url: str, *, records_experts: bool, seeded: bool) -> None:
    """Check how an SGLang server was started, without generating: its memory may be released.

    Raises:
        PreflightError: it returns no routed experts, or wrong ones, or ignores the seeds of requests.
    """
    if not (records_experts or seeded):
        return
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as http:
        status, info = await _ask(http, f"{url}/server_info")
    told = f"{url}/server_info answers {status}"
    if status >= 500:
        # SGLang 0.5.12 answers like this when verl 0.9.1 starts it.
        if records_experts:
            log.warning(
                "%s: whether it returns routed experts is unknown. Without them each model call fails with 503", told
            )
        if seeded:
            log.warning("%s: whether seeds have an effect is unknown", told)
        return
    if records_experts and not info.get("enable_return_routed_experts"):
        raise PreflightError(
            f"model.routed_experts=true: {told} without enable_return_routed_experts: "
            "start SGLang with --enable-return-routed-experts; in verl, set "
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
        )
    if records_experts and info.get("enable_hierarchical_cache"):
        raise PreflightError(
            f"model.routed_experts=true, and {url} runs with --enable-hierarchical-cache: tokens that come back from "
            "that cache get the routing of others, so start it without"
        )
    if seeded and not info.get("enable_deterministic_inference"):
        raise PreflightError(
            "sampling.seed is set (in verl by full_determinism), or gateway.agent_sampling_overrides has seed, and "
            f"{told} without enable_deterministic_inference: SGLang ignores seeds then. "
            "Start it with --enable-deterministic-inference, in verl by "
            "+actor_rollout_ref.rollout.engine_kwargs.sglang.enable_deterministic_inference=True, or remove the seed"
        )


async def _ask(
    http: aiohttp.ClientSession, url: str, body: Mapping[str, Any] | None = None
) -> tuple[int, dict[str, Any]]:
    """Return the status and the JSON object of a response. Raises PreflightError."""
    try:
        async with http.request("GET" if body is None else "POST", url, json=body) as reply:
            try:
                answer = json.loads(await reply.read())
            except ValueError:
                answer = None
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise PreflightError(f"no server answers at {url} ({str(error) or type(error).__name__})") from None
    return reply.status, answer if isinstance(answer, dict) else {}
