"""The gateway's HTTP server: what agents call, what the wrapper calls at the end, and what the backend controls.

    POST /v1/chat/completions     a model call                                  session key
    GET  /v1/models               the one model                                 session key
    POST /v1/rollout/trajectory   seals the session, answers with its Trajectory  session key
    POST /control/revoke          {"session_ids": [...]}: closes sessions for good   control key
    GET  /control/stats           GatewayStats                                  control key
    GET  /health

What must always hold:

- A key reaches its own session and nothing else. No key, secret, prompt or reply is logged.
- A call is recorded if and only if its answer is complete; one whose client hung up is aborted and leaves no trace.
- Whatever the body, the answer is of the API's shape and never a 500.

Streams carry the right events, but all of them once the turn is complete: comments keep the connection alive
meanwhile. Increments as they are sampled are yet to come.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from renderers import ParsedResponse
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rollout_backend.errors import EngineUnavailable
from rollout_backend.gateway import openai_chat
from rollout_backend.gateway.engine import Completion, EngineClient, EngineRefused
from rollout_backend.gateway.errors import ApiError
from rollout_backend.gateway.openai_chat import Answer, ChatRequest, Reply
from rollout_backend.gateway.registry import Entry, Registry, session_closed
from rollout_backend.gateway.renderer import RendererBundle, load_renderer
from rollout_backend.gateway.session import Prompt, Session
from rollout_backend.gateway.settings import GatewaySettings
from rollout_backend.gateway.stats import Counters
from rollout_backend.gateway.tokens import KeyRefused, SessionClaims, verify

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_SWEEP_S = 5.0
_BUSY_RETRY_S = 1
_ENGINE_RETRY_S = 5


class _Revoke(BaseModel):
    model_config = ConfigDict(extra="forbid")

    session_ids: list[str] = Field(max_length=100_000)


def create_app(settings: GatewaySettings, bundle: RendererBundle | None = None) -> Starlette:
    """The application. Loads the tokenizer unless `bundle` is given.

    Raises:
        ConfigError: the model's folder or its renderer cannot be used.
    """
    return Gateway(settings, bundle or load_renderer(settings.model)).app


class Gateway:
    """Routes and what they share. Sessions are touched in the event loop only; one thread renders and parses."""

    def __init__(self, settings: GatewaySettings, bundle: RendererBundle) -> None:
        self._settings = settings
        self._bundle = bundle
        self._model_name = settings.model.served_name
        self._created = int(time.time())
        self._registry = Registry(bundle, self._model_name, settings.token_s)
        self._engine = EngineClient(settings.engine_url, settings.model_call_s, settings.engine_attempts)
        self._counters = Counters()
        self._renderer_thread = ThreadPoolExecutor(1, thread_name_prefix="renderer")
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/models", self.models, methods=["GET"]),
                Route("/v1/rollout/trajectory", self.trajectory, methods=["POST"]),
                Route("/control/revoke", self.revoke, methods=["POST"]),
                Route("/control/stats", self.stats, methods=["GET"]),
                Route("/health", self.health, methods=["GET"]),
            ],
            exception_handlers={
                ApiError: self._api_error,
                HTTPException: self._http_error,
                ClientDisconnect: self._client_left,
                Exception: self._unexpected,
            },
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        await self._engine.start()
        sweeper = asyncio.create_task(self._sweep())
        try:
            yield
        finally:
            sweeper.cancel()
            await self._engine.close()
            self._renderer_thread.shutdown(wait=False, cancel_futures=True)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            await self._registry.sweep()

    # --- routes -------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        claims = self._authenticate(request)
        self._registry.open(claims)  # a closed session's body need not be read
        body = ChatRequest.parse(await self._body(request))
        if body.model != self._model_name:
            raise ApiError(
                404, f"there is no model {body.model!r} here, only {self._model_name!r}", code="model_not_found"
            )
        messages = body.plain_messages()
        entry, session = self._registry.open(claims)
        if self._registry.calls_in_flight >= self._settings.gateway.max_concurrent_calls:
            entry.unanswered.add(_digest(messages, body.tools))
            raise ApiError(
                429, "too many model calls are in flight", code="rate_limit_exceeded", retry_after_s=_BUSY_RETRY_S
            )
        call = asyncio.create_task(self._call(entry, session, claims, body, messages))
        entry.calls.add(call)
        call.add_done_callback(entry.calls.discard)
        if not body.stream:
            answer = await self._wait(request, call)
            assert answer is not None
            return JSONResponse(answer.body())
        # An error within the first moments has a status of its own; a later one comes as an event.
        answer = await self._wait(request, call, self._settings.keepalive_s)
        events = self._events(call, body) if answer is None else _iterate(answer.events(body.include_usage))
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def models(self, request: Request) -> Response:
        self._authenticate(request)
        model = {
            "id": self._model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "rollout-backend",
            "max_model_len": self._settings.model.context_length,
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def trajectory(self, request: Request) -> Response:
        sealed = await self._registry.seal(self._authenticate(request))
        return Response(sealed, media_type="application/octet-stream")

    async def revoke(self, request: Request) -> Response:
        self._require_control_key(request)
        try:
            body = _Revoke.model_validate_json(await self._body(request))
        except ValidationError as error:
            raise ApiError(400, f"the body must be {{'session_ids': [...]}}: {error.errors()[0]['msg']}") from None
        await self._registry.revoke(body.session_ids)
        return JSONResponse({"revoked": len(body.session_ids)})

    async def stats(self, request: Request) -> Response:
        self._require_control_key(request)
        registry = self._registry
        stats = self._counters.snapshot(registry.open_count, registry.closed_count, registry.calls_in_flight)
        return JSONResponse(stats.model_dump())

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    # --- one model call -----------------------------------------------------------------------------------

    async def _call(
        self,
        entry: Entry,
        session: Session,
        claims: SessionClaims,
        body: ChatRequest,
        messages: list[dict[str, Any]],
    ) -> Answer:
        """One call, booked as unanswered for as long as it fails by our doing."""
        digest = _digest(messages, body.tools)
        try:
            answer = await self._answer(entry, session, claims, body, messages)
        except Exception as error:
            if not isinstance(error, ApiError) or error.status >= 500:
                entry.unanswered.add(digest)
            raise
        entry.unanswered.discard(digest)
        return answer

    async def _answer(
        self,
        entry: Entry,
        session: Session,
        claims: SessionClaims,
        body: ChatRequest,
        messages: list[dict[str, Any]],
    ) -> Answer:
        entry.started += 1
        salt = f"{claims.rollout_id}/{entry.started}"
        prompt = await self._in_renderer(_prepare, session, messages, body.tools or None)
        asked = openai_chat.engine_params(
            body,
            claims.sampling,
            self._settings.gateway.agent_may_set,
            len(prompt.ids),
            self._settings.model.context_length,
            self._bundle.stop_token_ids,
            seed_salt=salt,
        )
        self._counters.overridden.update(asked.overridden)
        completion = await self._sample(prompt, asked.params, entry.id)
        reply, logprobs = await self._in_renderer(self._read, body, prompt, completion)
        opened_by = session.record(prompt, completion, reply.message)
        counters = self._counters
        counters.calls += 1
        counters.prompt_tokens += len(prompt.ids)
        counters.cached_tokens += completion.cached_tokens
        counters.sampled_tokens += len(completion.token_ids)
        counters.malformed_tool_calls += reply.malformed_tool_calls
        if opened_by is not None:
            counters.segments[opened_by] += 1
        return Answer(
            id=f"chatcmpl-{uuid4().hex}",
            created=int(time.time()),
            model=self._model_name,
            reply=reply,
            prompt_tokens=len(prompt.ids),
            completion=completion,
            logprobs=logprobs,
        )

    async def _sample(self, prompt: Prompt, params: Mapping[str, Any], session_id: str) -> Completion:
        try:
            return await self._engine.generate(prompt.ids, params, session_id)
        except EngineUnavailable as error:
            logger.warning("a model call got no answer: %s", error)
            raise ApiError(503, str(error), code="engine_unavailable", retry_after_s=_ENGINE_RETRY_S) from None
        except EngineRefused as error:
            logger.warning("an engine refused a model call: %s", error)
            if "context length" in str(error) or "maximum allowed length" in str(error):
                raise openai_chat.context_exceeded(str(error)) from None
            raise ApiError(400, f"the engine refused the call: {error}", code="engine_refused") from None

    def _read(
        self, body: ChatRequest, prompt: Prompt, completion: Completion
    ) -> tuple[Reply, list[dict[str, Any]] | None]:
        bundle, ids = self._bundle, completion.token_ids
        spoken = list(ids[:-1] if ids and ids[-1] in bundle.stop_token_ids else ids)
        text = bundle.decode(spoken)
        broken = False
        try:
            parsed = bundle.renderer.parse_response(list(ids), tools=body.tools, prompt_ids=prompt.ids)
        except Exception:  # to sample again would only hide from training what this parser cannot read
            logger.exception("the renderer could not parse a reply; it is returned as text")
            parsed, broken = ParsedResponse(content=text), True
        reply = openai_chat.read_reply(parsed, completion, bool(body.tools) and body.tool_choice != "none", text)
        if broken:
            reply = replace(reply, malformed_tool_calls=1)
        if not body.logprobs:
            return reply, None
        tokens = zip(ids, completion.logprobs, strict=True)
        return reply, [openai_chat.logprob_entry(bundle.decode([token]), logprob) for token, logprob in tokens]

    async def _in_renderer(self, function: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._renderer_thread, function, *args)

    async def _wait(
        self, request: Request, call: asyncio.Task[Answer], timeout_s: float | None = None
    ) -> Answer | None:
        """The call's answer, or None if there is none after `timeout_s`. A client that hangs up ends the call."""
        gone = asyncio.ensure_future(_hung_up(request))
        try:
            await asyncio.wait({call, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            call.cancel()
            raise
        finally:
            gone.cancel()
        if call.done():
            return _outcome(call)
        if gone.done():
            call.cancel()
            raise ClientDisconnect
        return None

    async def _events(self, call: asyncio.Task[Answer], body: ChatRequest) -> AsyncIterator[bytes]:
        try:
            while not call.done():
                yield b": sampling\n\n"
                await asyncio.wait({call}, timeout=self._settings.keepalive_s)
            try:
                answer = _outcome(call)
            except ApiError as error:
                self._counters.errors[error.code] += 1
                yield openai_chat.event(error.body())
                return
            for event in answer.events(body.include_usage):
                yield event
        finally:
            if call.cancel():  # the client hung up
                self._counters.hung_up += 1

    # --- what requests share ------------------------------------------------------------------------------

    def _authenticate(self, request: Request) -> SessionClaims:
        key = _bearer(request)
        try:
            return verify(self._settings.secret, key, time.time())
        except KeyRefused as error:
            raise ApiError(
                401, f"{error}; use the api_key of this rollout's request", code="invalid_api_key"
            ) from None

    def _require_control_key(self, request: Request) -> None:
        if not hmac.compare_digest(_bearer(request).encode(), self._settings.control_key.encode()):
            raise ApiError(401, "this needs the control key", code="invalid_control_key")

    async def _body(self, request: Request) -> bytes:
        cap = self._settings.gateway.max_body_bytes
        too_large = ApiError(413, f"the body is larger than {cap} bytes", code="request_too_large")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > cap:
            raise too_large
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > cap:
                raise too_large
        return bytes(body)

    async def _api_error(self, _: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        self._counters.errors[error.code] += 1
        return JSONResponse(error.body(), status_code=error.status, headers=error.headers)

    async def _http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = "not_found" if error.status_code == 404 else "bad_request"
        message = f"{request.method} {request.url.path}: {error.detail}"
        return await self._api_error(request, ApiError(error.status_code, message, code=code))

    async def _client_left(self, _: Request, error: Exception) -> Response:
        self._counters.hung_up += 1
        return Response(status_code=499)

    async def _unexpected(self, request: Request, error: Exception) -> Response:
        return await self._api_error(request, ApiError(500, "internal error of the gateway; its log says more"))


def _prepare(session: Session, messages: Sequence[Mapping[str, Any]], tools: Any) -> Prompt:
    try:
        return session.prepare(messages, tools)
    except Exception as error:  # templates refuse conversations in ways of their own
        logger.warning("a conversation could not be rendered: %r", type(error).__name__)
        raise ApiError(
            400, f"these messages cannot be rendered for this model: {error}", code="unrenderable"
        ) from None


def _digest(messages: Sequence[Mapping[str, Any]], tools: Any) -> bytes:
    """Names a call by what it asks, so that the same question asked again is known as such."""
    return hashlib.sha256(json.dumps([messages, tools], sort_keys=True).encode()).digest()


def _outcome(call: asyncio.Task[Answer]) -> Answer:
    if call.cancelled():
        raise session_closed("its calls were aborted")
    return call.result()


def _bearer(request: Request) -> str:
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _iterate(events: Any) -> AsyncIterator[bytes]:
    for event in events:
        yield event
