"""Serve a training service's samplers on this machine, in the format of SGLang's `/generate`, to the run's router.

`ServiceEngineFactory` makes such a server the engine of a run (`serving.kind=tinker`).

Invariants:

- A call samples from the weights that were the newest when it began, and its reply names their version.
- Token ids and logprobs are the service's, unchanged. A reply without a logprob for each token is an error.
- Features that the service lacks (images, forced formats, logit bias, adapters, routed experts) are refused by name.
- After a fault of the service, a call is retried until its deadline. A sampler that the service has forgotten, for
  example after a restart, is opened again.
- A call at the service never counts as lost, however long its reply takes: the service would bill a retry again.
- The service may bill a call whose client hangs up, so such calls and their tokens are counted. They are not retried,
  and are cancelled if the service supports that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage
from tenacity import wait_random_exponential

from rollout_backend.base.check_result import CheckResult
from rollout_backend.base.local_keys import HOST
from rollout_backend.base.retry import log_retry, retry_until
from rollout_backend.config import RolloutConfig
from rollout_backend.errors import ConfigError, PreflightError, StartupError, TrainingServiceError
from rollout_backend.model.serving.engine import EngineFactory
from rollout_backend.training.checks import check_service
from rollout_backend.training.sagemaker import SageMakerService
from rollout_backend.training.service import Forgotten, Sampler, TrainingService
from rollout_backend.training.tinker import TinkerService

log = logging.getLogger(__name__)

_MAX_BYTES = 2**26
# The service queues calls itself. A gateway would hold back calls beyond this number.
_MAX_CALLS = 2**20
_server_log = logging.getLogger(f"{__name__}.http")
# A router first probes a new engine with gRPC, which is no HTTP/1.
_server_log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], BadHttpMessage)))
_PAUSES = wait_random_exponential(multiplier=1, max=30)
_RECONNECT_S = 5.0
_LOG_EVERY_S = 30.0
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_new_tokens": "max_tokens",
    "stop_token_ids": "stop",
    "sampling_seed": "seed",
}
"""SGLang's sampling parameters, and the service's."""
_IGNORED = frozenset({"stream_interval"})
_MAX_SEED = 2**31 - 1
_UNSUPPORTED = ("image_data", "lora_path", "return_routed_experts")
_Sample = tuple[list[int], list[float], str]
"""See `TrainingService.sample`."""


def service_of(config: RolloutConfig, *, trains: bool = True) -> AbstractAsyncContextManager[TrainingService]:
    """Return the service that `training_service.kind` names. Enter it before use.

    Without `trains`, the service need only sample.
    """
    settings = config.training_service
    assert settings is not None
    if settings.kind == "sagemaker":
        return SageMakerService(config)
    return TinkerService(settings, trains=trains, prices=config.prices)


class SamplingServer:
    """An async context manager. `url` is the server's, for `serving.urls`."""

    def __init__(self, service: TrainingService, model_path: str, model_call_s: float) -> None:
        """While the service fails, a call is repeated for `model_call_s` at most."""
        self.url = ""
        self._service = service
        self._model_path = model_path
        self._model_call_s = model_call_s
        self._served: _Served | None = None
        self._reopening = asyncio.Lock()
        # Time of the event loop at which the last failure was logged.
        self._logged_at = -math.inf
        self._at_service = 0
        self._load_reports = 0
        # Calls at the service whose clients have hung up, and what they cost: see `GatewayStats.engine_given_up`.
        self._unread: set[asyncio.Task[_Sample]] = set()
        self._given_up: Counter[str] = Counter()
        # Set while no call is at the service.
        self._idle = asyncio.Event()
        self._idle.set()
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=_MAX_BYTES)
        for path in ("/health", "/health_generate", "/flush_cache"):
            app.router.add_route("*", path, self._healthy)
        for path in ("/pause_generation", "/continue_generation", "/abort_request"):
            app.router.add_post(path, self._healthy)
        for path in ("/model_info", "/get_model_info", "/server_info", "/get_server_info"):
            app.router.add_get(path, self._info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/update_weights_from_disk", self._update_weights)
        # A call whose client hangs up is cancelled.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, logger=_server_log, shutdown_timeout=1.0
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, 0).start()
        self.url = "http://{}:{}".format(*self._runner.addresses[0][:2])
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()
        for call in self._unread:
            call.cancel()
        await asyncio.gather(*self._unread, return_exceptions=True)

    async def serve(self, path: str, version: int) -> None:
        """Sample further calls from these weights. Raises ConfigError or TrainingServiceError."""
        self._served = _Served(path, str(version), await self._service.sampler(path))

    async def _healthy(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": self._model_path,
                "tokenizer_path": self._model_path,
                "is_generation": True,
                "weight_version": self._served.version if self._served is not None else "",
                "enable_deterministic_inference": True,
            }
        )

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self._model_path, "object": "model"}]})

    async def _loads(self, request: web.Request) -> web.Response:
        # A gateway repeats a call unless these numbers change. The service reports no progress before its reply.
        self._load_reports += self._at_service > 0
        load = {
            "num_running_reqs": self._at_service,
            "num_waiting_reqs": 0,
            "max_running_requests": _MAX_CALLS,
            "num_used_tokens": self._load_reports,
            "is_service": True,
            "given_up": self._given_up,
        }
        return web.json_response({"loads": [load]})

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self._at_service += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._at_service -= 1
            if not self._at_service:
                self._idle.set()

    async def _update_weights(self, request: web.Request) -> web.Response:
        body = await request.json()

        async def serve() -> None:
            await self.serve(body["model_path"], int(body["weight_version"]))

        try:
            warn = log_retry(log, "opening the weights %s", body["model_path"])
            await retry_until(self._call_ends_at(), serve, TrainingServiceError, _PAUSES, before_sleep=warn)
        except (ConfigError, TrainingServiceError) as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        return web.json_response({"success": True, "message": ""})

    def _call_ends_at(self) -> float:
        return asyncio.get_running_loop().time() + self._model_call_s

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body, served = await request.json(), self._served
        params = body["sampling_params"]
        # A gateway, or the check of the engine, asks for any token. No trained call has temperature 0.
        if body["input_ids"] == [0] and (params.get("max_new_tokens"), params.get("temperature")) == (1, 0):
            # A sample would cost money. An answer would say that calls without one are lost.
            await self._idle.wait()
            return web.json_response(_reply(body, [0], [-0.5], "length", "" if served is None else served.version))
        try:
            params = _service_params(body)
            if served is None:
                raise TrainingServiceError("no weights are served yet")
            with self._counted():
                tokens, logprobs, reason = await retry_until(
                    self._call_ends_at(),
                    lambda: self._sample(served, body["input_ids"], params),
                    TrainingServiceError,
                    _PAUSES,
                )
        except ConfigError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        except TrainingServiceError as error:
            return web.json_response({"error": {"message": str(error)}}, status=503)
        reply = _reply(body, tokens, logprobs, reason, served.version)
        if not body.get("stream"):
            return web.json_response(reply)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        with contextlib.suppress(ConnectionError):
            await stream.write(f"data: {json.dumps(reply)}\n\ndata: [DONE]\n\n".encode())
        return stream

    async def _sample(self, served: _Served, prompt: Sequence[int], params: Mapping[str, Any]) -> _Sample:
        sampler = served.sampler
        call = asyncio.create_task(self._service.sample(sampler, prompt, params))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            self._give_up(call, len(prompt), params["max_tokens"])
            raise
        except Forgotten:
            async with self._reopening:
                # Another call may have opened it.
                if served.sampler is sampler:
                    try:
                        served.sampler = await self._service.sampler(served.path)
                    except ConfigError as error:
                        # No agent is to blame.
                        raise TrainingServiceError(str(error)) from error
            raise
        except TrainingServiceError as error:
            # All calls in flight fail together.
            if (now := asyncio.get_running_loop().time()) > self._logged_at + _LOG_EVERY_S:
                self._logged_at = now
                log.warning("%d model calls wait for the training service: %s", self._at_service, error)
            raise

    def _give_up(self, call: asyncio.Task[_Sample], prompt_tokens: int, limit: int) -> None:
        """Count a call whose client has hung up. Cancel it, or count its sampled tokens once it has ended."""
        self._given_up.update(calls=1, prompt_tokens=prompt_tokens)
        if self._service.may_end_samples and call.cancel():
            self._given_up["limit_tokens"] += limit
        self._unread.add(call)
        call.add_done_callback(self._on_unread_end)

    def _on_unread_end(self, call: asyncio.Task[_Sample]) -> None:
        self._unread.discard(call)
        if not call.cancelled() and call.exception() is None:
            self._given_up["sampled_tokens"] += len(call.result()[0])


@dataclass
class _Served:
    """Weights that are served."""

    path: str
    version: str
    sampler: Sampler


def _service_params(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the service's sampling parameters. Raises ConfigError if the service lacks one."""
    asked = {name: value for name, value in body["sampling_params"].items() if name not in _IGNORED}
    missing = [*(name for name in asked if name not in _SAMPLING), *(name for name in _UNSUPPORTED if body.get(name))]
    if missing:
        raise ConfigError(f"the training service does not support {', '.join(missing)}")
    params = {_SAMPLING[name]: value for name, value in asked.items()}
    if params.get("seed") is not None:
        # SkyRL with JAX fails a whole batch with a larger one, and SageMaker declares an integer of 32 bits.
        params["seed"] &= _MAX_SEED
    return params


def _reply(
    body: Mapping[str, Any], tokens: Sequence[int], logprobs: Sequence[float], reason: str, version: str
) -> dict[str, Any]:
    finish = (
        {"type": "length", "length": len(tokens)} if reason == "length" else {"type": "stop", "matched": tokens[-1]}
    )
    return {
        "text": "",
        "output_ids": list(tokens),
        "meta_info": {
            "id": body.get("rid", ""),
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(tokens),
            "weight_version": version,
            "weight_versions": [{"version": version, "start": 0, "end": len(tokens)}],
            "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, tokens, strict=True)],
        },
    }


class ServiceEngineFactory(EngineFactory):
    """Makes the engine of `serving.kind=tinker`: a server in this process that samples from the service."""

    count = 1
    takes_weights = True

    def __init__(self, config: RolloutConfig, log_dir: Path) -> None:
        self._config = config

    async def check(self) -> Sequence[CheckResult]:
        return await check_service(self._config, trains=False)

    def make(self, number: int) -> ServiceEngine:
        return ServiceEngine(self._config)


class ServiceEngine:
    """Samples from `training_service.sampler`, or from the base model, through a `SamplingServer` in this process."""

    def __init__(self, config: RolloutConfig) -> None:
        assert config.training_service is not None
        self.url = ""
        self._config = config
        self._settings = config.training_service
        self._server: SamplingServer | None = None
        # A session of SageMaker takes minutes to start.
        minutes = self._settings.call_s if self._settings.kind == "sagemaker" else None
        self._timeout_s = config.serving.startup_timeout_s or minutes or config.serving.startup_s()
        self._stack = AsyncExitStack()

    async def reserve(self) -> AsyncIterator[str]:
        """Wait until the service answers."""
        until = asyncio.get_running_loop().time() + self._timeout_s
        while (why := await self._connect(until)) is not None:
            if asyncio.get_running_loop().time() >= until:
                limit = f"within {self._timeout_s:g} s (serving.startup_timeout_s)"
                raise StartupError(f"the training service cannot be used {limit}: {why}")
            yield f"waits for the training service: {why}"
            await asyncio.sleep(_RECONNECT_S)

    async def _connect(self, until: float) -> str | None:
        """Connect to the service. Return the reason if it cannot be used yet, else None. Raises StartupError."""
        try:
            async with asyncio.timeout_at(until):
                service = await self._stack.enter_async_context(service_of(self._config, trains=False))
                config = self._config
                self._server = SamplingServer(service, str(config.model.path), config.timeouts.model_call_s)
                await self._server.serve(self._settings.sampler, 0)
        except (ConfigError, PreflightError) as error:
            raise StartupError(str(error)) from error
        except (TrainingServiceError, TimeoutError) as error:
            await self._stack.aclose()
            return str(error) or "no answer"
        return None

    async def start(self) -> None:
        assert self._server is not None, "`reserve` has made it"
        await self._stack.enter_async_context(self._server)
        self.url = self._server.url

    async def wait(self) -> str:
        return str(await asyncio.Event().wait())

    async def stop(self) -> None:
        await self._stack.aclose()

    async def log_tail(self) -> str:
        return ""
