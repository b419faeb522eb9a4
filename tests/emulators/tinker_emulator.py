"""An emulator of a training service with Tinker's API, to which the SDK `tinker` connects unchanged.

    async with TinkerEmulator({"tiny": TabularPolicy(ids)}) as service:
        client = tinker.ServiceClient(base_url=service.url, api_key=service.key)

It answers the SDK's requests for sessions, models, samplers, samples and saved weights, in protobuf where the SDK
asks for it. Like the service, it answers a repeated request with the first one's future, keeps the weights of a
sampler for as long as it runs, bills what it samples even if nobody fetches it, and refuses an unknown key, model,
rank or sampler.

Invariants:

- `samples` holds every sequence that was sampled, in order, with the logprobs that the reply carries.
- The futures of one model finish in the order of its requests.
- Equal seeds, prompts and weights give equal tokens.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from aiohttp import web
from tinker.proto import tinker_public_pb2 as pb

from tests.emulators.tiny_learner import TabularPolicy

PROTOBUF = "application/x-protobuf"
_MAX_BYTES = 2**26


@dataclass(frozen=True)
class Sample:
    """A sequence that the service sampled and bills."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    params: Mapping[str, Any]
    model_path: str
    """Path of the sampler's weights; empty for a base model."""


@dataclass
class TinkerFaults:
    """What goes wrong. Names are the last part of a request's path, such as `asample`."""

    statuses: dict[str, list[int]] = field(default_factory=dict)
    """HTTP statuses with which the next requests of a name are refused, in order."""
    pages: dict[str, list[int]] = field(default_factory=dict)
    """The same of a proxy in front of the service, which answers with a page of its own."""
    silent: set[str] = field(default_factory=set)
    """Requests of these names are accepted and not answered."""
    failures: list[str] = field(default_factory=list)
    """Categories (`server`, `user`, `unknown`) with which the next samples fail, after they were accepted."""
    queue: str = ""
    """While set, no sample finishes, and polls report this queue state, such as `paused_capacity`."""
    samples_unfetchable: int = 0
    """Number of next finished samples whose result is lost (410)."""
    failed: dict[str, list[str]] = field(default_factory=dict)
    """Details with which the next accepted requests of a type fail, such as `create_model`, as SkyRL reports it: a
    400 for each poll."""
    lost: set[str] = field(default_factory=set)
    """Paths of weights whose samples fail in this way."""


@dataclass
class TrainedModel:
    """A LoRA model in training."""

    model_id: str
    base_model: str
    rank: int
    policy: TabularPolicy
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the request that is executed, so that requests run in order."""


@dataclass
class _Future:
    request_type: str
    task: asyncio.Task[Mapping[str, Any] | bytes]
    """Returns the fields of the result, or its protobuf."""
    sequence_ids: list[str] | None = None
    failed: str = ""


class Refusal(Exception):
    """An error of the service, with its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


Handler = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]


class TinkerEmulator:
    """An async context manager. `policies` are the base models by name; `trained` the models by id.

    `handlers` maps the last part of a path to the function that answers it: add an entry to serve another request.
    """

    def __init__(
        self,
        policies: Mapping[str, TabularPolicy],
        *,
        key: str = "tml-emulator",
        max_rank: int = 32,
        context_tokens: int = 32_768,
        cancels: bool = False,
        poll_s: float = 1.0,
    ) -> None:
        """`cancels` is whether clients may cancel samples, and `poll_s` how long a poll of a future waits."""
        self.url = ""
        self.key = key
        self.faults = TinkerFaults()
        self.policies = dict(policies)
        self.trained: dict[str, TrainedModel] = {}
        self.saved: dict[str, tuple[str, TabularPolicy]] = {}
        """Weights saved for samplers, by path, with the name of their base model."""
        self.samples: list[Sample] = []
        self.counts: defaultdict[str, int] = defaultdict(int)
        """Requests by name."""
        self.cancelled: list[str] = []
        """Ids of the futures that clients cancelled."""
        self.keys_seen: set[str] = set()
        self._max_rank = max_rank
        self._context_tokens = context_tokens
        self._cancels = cancels
        self._poll_s = poll_s
        self._ids = itertools.count(1)
        self._sessions: set[str] = set()
        self._samplers: dict[str, tuple[str, str, TabularPolicy]] = {}
        self._futures: dict[str, _Future] = {}
        self._released = asyncio.Condition()
        self._arrivals = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self.handlers: dict[str, Handler] = {
            "config": self._config,
            "dynamic_config": self._dynamic_config,
            "get_server_capabilities": self._capabilities,
            "healthz": self._healthz,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "finish": self._nothing,
            "telemetry": self._telemetry,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "create_sampling_session": self._create_sampling_session,
            "samplers": self._get_sampler,
            "save_weights_for_sampler": self._save_weights_for_sampler,
            "asample": self._asample,
            "cancel_future": self._cancel_future,
        }

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=_MAX_BYTES)
        app.router.add_route("*", "/api/v1/{path:.*}", self._serve)
        # A silent call ends when its client disconnects.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = "http://{}:{}".format(*self._runner.addresses[0][:2])
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()
        tasks = [future.task for future in self._futures.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def set_queue(self, state: str) -> None:
        """Pause all samples with this queue state, or let them finish with an empty one."""
        async with self._released:
            self.faults.queue = state
            self._released.notify_all()

    def forget_samplers(self) -> None:
        """Forget all samplers, as a service does that restarts."""
        self._samplers.clear()

    async def arrived(self, name: str, count: int) -> None:
        """Wait until this number of requests of a name has arrived."""
        async with self._arrivals:
            await self._arrivals.wait_for(lambda: self.counts[name] >= count)

    def enqueue(
        self,
        request_type: str,
        work: Callable[[], Awaitable[Mapping[str, Any] | bytes]],
        *,
        turn: asyncio.Lock | None = None,
        request_id: str | None = None,
        sequence_ids: list[str] | None = None,
    ) -> Mapping[str, Any]:
        """Start `work` and return its future's fields. Work with a `turn` runs after earlier work with it.

        A request with the id of an earlier one gets that one's future.
        """
        request_id = request_id or f"future-{next(self._ids)}"
        if request_id not in self._futures:

            async def run() -> Mapping[str, Any] | bytes:
                if turn is None:
                    return await work()
                async with turn:
                    return await work()

            self._futures[request_id] = _Future(request_type, asyncio.create_task(run()), sequence_ids)
        future = self._futures[request_id]
        ids = {"sample_sequence_ids": future.sequence_ids} if future.sequence_ids is not None else {}
        return {"request_id": request_id, **ids}

    async def _serve(self, request: web.Request) -> web.Response:
        response = await self._respond(request)
        if request.path.endswith("/client/config"):
            # The SDK never closes the connection of this request.
            response.force_close()
        return response

    async def _respond(self, request: web.Request) -> web.Response:
        parts = request.match_info["path"].split("/")
        name = parts[0] if parts[0] == "samplers" else parts[-1]
        async with self._arrivals:
            self.counts[name] += 1
            self._arrivals.notify_all()
        self.keys_seen.add(request.headers.get("X-API-Key", ""))
        if name in self.faults.silent:
            await asyncio.Event().wait()
        if pages := self.faults.pages.get(name):
            return web.Response(status=pages.pop(0), text="<html>the service cannot be reached</html>")
        try:
            if statuses := self.faults.statuses.get(name):
                raise Refusal(statuses.pop(0), "the emulator was told to refuse this")
            if request.headers.get("X-API-Key") != self.key:
                raise Refusal(401, "Invalid API key")
            if request.content_type == PROTOBUF:
                body: dict[str, Any] = {"protobuf": await request.read()}
            else:
                body = await request.json() if request.can_read_body else {}
            body |= {"path_parts": parts}
            if name == "retrieve_future":
                return await self._retrieve_future(body["request_id"], request.headers.get("Accept", ""))
            if (handler := self.handlers.get(name)) is None:
                raise Refusal(404, f"unknown path {request.path}")
            return web.json_response(await handler(body))
        except Refusal as refusal:
            return web.json_response({"detail": str(refusal)}, status=refusal.status)

    async def _config(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return {}

    async def _dynamic_config(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"sample_cancel_enabled": self._cancels}

    async def _capabilities(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            "supported_models": [
                {
                    "model_name": name,
                    "max_context_length": self._context_tokens,
                    "trainable": True,
                    "sampleable": True,
                }
                for name in self.policies
            ]
        }

    async def _healthz(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"status": "ok"}

    async def _nothing(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return {}

    async def _telemetry(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"status": "accepted"}

    async def _create_session(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        session_id = f"session-{next(self._ids)}"
        self._sessions.add(session_id)
        return {"type": "create_session", "session_id": session_id}

    async def _heartbeat(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self._check_session(body)
        return {"type": "session_heartbeat"}

    async def _create_model(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self._check_session(body)
        policy = self._base(body["base_model"])
        rank = (body.get("lora_config") or {}).get("rank", 0)
        if rank > self._max_rank:
            raise Refusal(400, f"LoRA rank {rank} is above the maximum of {self._max_rank}")
        request_id = f"{body['session_id']}:train:{body['model_seq_id']}"
        model_id = request_id

        async def create() -> Mapping[str, Any]:
            self.trained[model_id] = TrainedModel(model_id, body["base_model"], rank, policy.copy())
            return {"model_id": model_id, "type": "create_model"}

        return self.enqueue("create_model", create, request_id=request_id)

    async def _get_info(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        model = self.model(body)
        return {
            "model_id": model.model_id,
            "model_data": {"arch": "tabular", "model_name": model.base_model},
            "is_lora": True,
            "lora_rank": model.rank,
            "model_name": model.base_model,
        }

    async def _create_sampling_session(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self._check_session(body)
        path = body.get("model_path") or ""
        if path and path not in self.saved:
            raise Refusal(404, f"Checkpoint not found: {path}")
        base, policy = self.saved[path] if path else (body["base_model"], self._base(body["base_model"]))
        return {
            "type": "create_sampling_session",
            "sampling_session_id": self._add_sampler(base, path, policy),
        }

    async def _get_sampler(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        sampler_id = body["path_parts"][1]
        base, path, _ = self._sampler(sampler_id)
        return {"sampler_id": sampler_id, "base_model": base, "model_path": path or None}

    async def _save_weights_for_sampler(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        model = self.model(body)
        name = body.get("path")

        async def save() -> Mapping[str, Any]:
            path = f"tinker://{model.model_id}/sampler_weights/{name or f'ephemeral-{next(self._ids)}'}"
            self.saved[path] = model.base_model, model.policy.copy()
            if name:
                return {"path": path, "type": "save_weights_for_sampler"}
            sampler = self._add_sampler(model.base_model, path, self.saved[path][1])
            return {"sampling_session_id": sampler, "type": "save_weights_for_sampler"}

        request_id = f"{model.model_id}:save:{body['seq_id']}"
        return self.enqueue("save_weights_for_sampler", save, turn=model.turn, request_id=request_id)

    async def _asample(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        sampler_id, params, count = body["sampling_session_id"], body["sampling_params"], body["num_samples"]
        _, path, policy = self._sampler(sampler_id)
        prompt = [token for chunk in body["prompt"]["chunks"] for token in chunk["tokens"]]
        stops = params.get("stop") or []
        if not prompt or params.get("max_tokens", 0) < 1:
            raise Refusal(400, "a prompt and max_tokens are required")
        if len(prompt) + params["max_tokens"] > self._context_tokens:
            raise Refusal(400, f"the prompt and max_tokens exceed the context of {self._context_tokens} tokens")
        if any(isinstance(stop, str) for stop in stops):
            raise Refusal(400, "the emulator has no tokenizer for stop strings")
        request_id = f"{sampler_id}:sample:{body['seq_id']}"

        async def sample() -> bytes:
            async with self._released:
                await self._released.wait_for(lambda: not self.faults.queue)
            if self.faults.failures:
                raise _Failed(self.faults.failures.pop(0))
            reply = pb.SampleResponse()
            for index in range(count):
                seed = params.get("seed")
                # Samples without a seed differ, and are the same in each run of a test.
                rng = np.random.default_rng([next(self._ids)] if seed is None else [seed, index])
                tokens, logprobs, reason = policy.sample(prompt, params, rng)
                self.samples.append(Sample(tuple(prompt), tuple(tokens), tuple(logprobs), params, path))
                reply.sequences.add(
                    tokens=np.asarray(tokens, np.int32).tobytes(),
                    logprobs=np.asarray(logprobs, np.float32).tobytes(),
                    stop_reason=pb.STOP_REASON_STOP if reason == "stop" else pb.STOP_REASON_LENGTH,
                )
            return bytes(reply.SerializeToString())

        ids = [f"{request_id}:{index}" for index in range(count)]
        answer = self.enqueue("sample", sample, request_id=request_id, sequence_ids=ids)
        if path in self.faults.lost:
            self._futures[request_id].failed = "Model is not loaded"
        return answer

    async def _cancel_future(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        future = self._futures.get(body["request_id"])
        if future is not None and not future.task.done():
            self.cancelled.append(body["request_id"])
            future.task.cancel()
        return {}

    async def _retrieve_future(self, request_id: str, accepts: str) -> web.Response:
        if (future := self._futures.get(request_id)) is None:
            raise Refusal(404, "Future not found")
        done, _ = await asyncio.wait([future.task], timeout=self._poll_s)
        if not done:
            state = (self.faults.queue if future.request_type == "sample" else "") or "active"
            return web.json_response({"type": "try_again", "request_id": request_id, "queue_state": state})
        if details := self.faults.failed.get(future.request_type):
            future.failed = details.pop(0)
        if future.failed:
            raise Refusal(400, future.failed)
        if future.task.cancelled():
            return web.json_response({"error": "the request was cancelled", "category": "user"})
        error = future.task.exception()
        if isinstance(error, _Failed):
            return web.json_response({"error": "the emulator was told to fail this", "category": str(error)})
        if error is not None:
            raise error
        result = future.task.result()
        if isinstance(result, bytes):
            if future.request_type == "sample" and self.faults.samples_unfetchable:
                self.faults.samples_unfetchable -= 1
                raise Refusal(410, "the result is gone")
            assert PROTOBUF in accepts, "the SDK asks for protobuf"
            return web.Response(body=result, content_type=PROTOBUF)
        return web.json_response(result)

    def model(self, body: Mapping[str, Any]) -> TrainedModel:
        """Return the model that a request names."""
        if (model := self.trained.get(body["model_id"])) is None:
            raise Refusal(404, f"Model not found: {body['model_id']}")
        return model

    def _base(self, name: str) -> TabularPolicy:
        if name not in self.policies:
            raise Refusal(400, f"Model {name} is not supported")
        return self.policies[name]

    def _check_session(self, body: Mapping[str, Any]) -> None:
        if body["session_id"] not in self._sessions:
            raise Refusal(404, "Session not found")

    def _sampler(self, sampler_id: str) -> tuple[str, str, TabularPolicy]:
        if sampler_id not in self._samplers:
            raise Refusal(404, "Sampling session not found")
        return self._samplers[sampler_id]

    def _add_sampler(self, base: str, path: str, policy: TabularPolicy) -> str:
        sampler_id = f"sampler-{next(self._ids)}"
        self._samplers[sampler_id] = base, path, policy
        return sampler_id


class _Failed(Exception):
    """A sample that fails with this category."""
