"""The gateway's HTTP server: what agents call, what the wrapper calls at the end, and what the backend controls.

    POST /v1/chat/completions       a model call, as OpenAI's chat              session key
    POST /v1/responses              a model call, as OpenAI's responses         session key
    POST /v1/messages               a model call, as Anthropic's messages       session key
    POST /v1/messages/count_tokens  the length of its prompt                    session key
    GET  /v1/models[/{id}]          the one model                               session key
    POST /v1/rollout/trajectory     seals the session, answers with its Trajectory  session key
    POST /control/revoke            {"session_ids": [...]}: closes sessions for good  control key
    POST /control/adopt             {"session_ids": [...]}: they go on under this trainer  control key
    GET  /control/stats             GatewayStats                                control key
    GET  /health

One base URL, which ends in /v1, serves all clients: Anthropic's append /v1/messages to it, so the paths that agents
call are also there under /v1/v1, and without a prefix. A key comes as `Authorization: Bearer` or `x-api-key`.

What must always hold:

- A session that was begun under an earlier trainer samples nothing before this one has adopted it: until then nobody
  knows that the weights are those it may go on with. What it has sampled is handed out at any time.
- A key reaches its own session and nothing else. No key, secret, prompt or reply is logged.
- A call is recorded, in the journal too, if and only if its answer is complete; one whose client hung up is aborted
  and leaves no trace.
- Whatever the body, the answer is of the API's shape and never a 500.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rollout_backend.config import GatewayConfig
from rollout_backend.gateway import records
from rollout_backend.gateway.admission import Admission
from rollout_backend.gateway.call import Answer, Dialect, ModelCall
from rollout_backend.gateway.caller import Caller, call_digest
from rollout_backend.gateway.dialects.anthropic_messages import AnthropicMessages
from rollout_backend.gateway.dialects.openai_chat import OpenAIChat
from rollout_backend.gateway.dialects.openai_responses import OpenAIResponses
from rollout_backend.gateway.engines import Engines
from rollout_backend.gateway.errors import ApiError, not_adopted
from rollout_backend.gateway.images import ImageLimits
from rollout_backend.gateway.journal import Journal, refuse_lost
from rollout_backend.gateway.loads import LoadPoller
from rollout_backend.gateway.registry import Entry, Registry
from rollout_backend.gateway.renderer import RendererBundle, load_renderer
from rollout_backend.gateway.replay import Repeatable
from rollout_backend.gateway.running import Running
from rollout_backend.gateway.seal import Sealer
from rollout_backend.gateway.session import Session
from rollout_backend.gateway.settings import GatewaySettings
from rollout_backend.gateway.shards import refuse_foreign
from rollout_backend.gateway.stats import Counters
from rollout_backend.gateway.tokens import KeyRefused, SessionClaims, verify

_SWEEP_S = 5.0
_PREFIXES = ("/v1", "/v1/v1", "")
_RETRIED = frozenset({408, 409, 429})  # by both clients, and every 5xx


class _Sessions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    session_ids: list[str] = Field(max_length=100_000)


def create_app(settings: GatewaySettings, bundle: RendererBundle | None = None) -> Starlette:
    """The application. Loads the tokenizer unless `bundle` is given.

    Raises:
        ConfigError: the model's folder, its renderer or the journal cannot be used.
    """
    return Gateway(settings, bundle or load_renderer(settings.model)).app


class _Stream(StreamingResponse):
    """Tells when it is over, also where its client has left before it began."""

    def __init__(self, events: AsyncIterator[bytes], over: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._over()


class Gateway:
    """Routes and what they share."""

    def __init__(self, settings: GatewaySettings, bundle: RendererBundle) -> None:
        self._settings = settings
        self._model_name = settings.model.served_name
        self._created = int(time.time())
        sealer = Sealer(settings.seal_secret) if settings.seal_secret is not None else None
        journal = Journal(settings.journal) if settings.journal is not None else None
        self._journal = journal
        self._adopted = set(settings.adopted)
        self._epoch = journal.epoch if journal is not None else ""
        self._registry = Registry(bundle, self._model_name, settings.token_s, sealer=sealer, journal=journal)
        limits = _images_taken(settings.gateway, bundle)
        self._chat = OpenAIChat(limits)
        self._responses = OpenAIResponses(limits)
        self._messages = AnthropicMessages(limits)
        self._counters = Counters()
        self._engines = Engines()
        self._caller = Caller(settings, bundle, self._counters, self._engines)
        self._admission = Admission(settings.gateway.max_concurrent_calls, settings.gateway.max_queued_per_engine)
        agents = [
            ("/chat/completions", self.chat, "POST"),
            ("/responses", self.responses, "POST"),
            ("/messages", self.messages, "POST"),
            ("/messages/count_tokens", self.count_tokens, "POST"),
            ("/models", self.models, "GET"),
            ("/models/{name:path}", self.model, "GET"),
        ]
        self.app = Starlette(
            routes=[
                *(Route(prefix + path, to, methods=[verb]) for prefix in _PREFIXES for path, to, verb in agents),
                Route("/v1/rollout/trajectory", self.trajectory, methods=["POST"]),
                Route("/control/revoke", self.revoke, methods=["POST"]),
                Route("/control/adopt", self.adopt, methods=["POST"]),
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
        await self._caller.start()
        loads = LoadPoller(self._settings.engine_url, self._admission.observe, self._settings.loads_s, self._engines)
        background = [asyncio.create_task(self._sweep()), asyncio.create_task(loads.run())]
        try:
            yield
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await self._caller.close()
            if self._journal is not None:
                self._journal.release()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            await self._registry.sweep()

    # --- routes -------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        return await self._call(request, self._chat)

    async def responses(self, request: Request) -> Response:
        return await self._call(request, self._responses)

    async def messages(self, request: Request) -> Response:
        return await self._call(request, self._messages)

    async def count_tokens(self, request: Request) -> Response:
        request.state.dialect = self._messages
        _, session = self._registry.open(self._authenticate(request))
        call = self._messages.parse_count(await self._body(request))
        self._check_model(call.model)
        return JSONResponse(self._messages.count_body(await self._caller.count(session, call)))

    async def models(self, request: Request) -> Response:
        self._authenticate(request)
        name = self._model_name
        return JSONResponse(
            {"object": "list", "data": [self._model_card()], "first_id": name, "last_id": name, "has_more": False}
        )

    async def model(self, request: Request) -> Response:
        self._authenticate(request)
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model_card())

    async def trajectory(self, request: Request) -> Response:
        sealed = await self._registry.seal(self._authenticate(request))
        return Response(sealed, media_type="application/octet-stream")

    async def revoke(self, request: Request) -> Response:
        session_ids = await self._sessions(request)
        await self._registry.revoke(session_ids)
        return JSONResponse({"revoked": len(session_ids)})

    async def adopt(self, request: Request) -> Response:
        session_ids = await self._sessions(request)
        self._adopted.update(session_ids)
        return JSONResponse({"adopted": len(session_ids)})

    async def _sessions(self, request: Request) -> list[str]:
        self._require_control_key(request)
        try:
            body = _Sessions.model_validate_json(await self._body(request))
        except ValidationError as error:
            raise ApiError(400, f"the body must be {{'session_ids': [...]}}: {error.errors()[0]['msg']}") from None
        return body.session_ids

    async def stats(self, request: Request) -> Response:
        self._require_control_key(request)
        registry = self._registry
        stats = self._counters.snapshot(registry.open_count, registry.closed_count, self._admission.in_flight)
        return JSONResponse(stats.model_dump())

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    # --- one model call -----------------------------------------------------------------------------------

    async def _call(self, request: Request, dialect: Dialect) -> Response:
        request.state.dialect = dialect
        claims = self._authenticate(request)
        if claims.life != self._settings.life and claims.session_id not in self._adopted:
            raise not_adopted()
        self._registry.open(claims)  # a closed session's body need not be read
        body = await self._body(request)
        entry, session = self._registry.open(claims)
        asked = Repeatable(dialect.name, body, request.headers)
        running = entry.replays.find(asked)
        if running is None:
            call = dialect.parse(body)
            self._check_model(call.model)
            self._admit(entry, asked, call)
            running = self._start(Running(call, asked.digest), entry, session, claims)
            entry.replays.add(asked, running)
        else:
            self._counters.replayed += 1
            if isinstance(running, Answer):
                running = Running.answered_before(dialect.parse(body), running)
        try:
            return await self._respond(request, dialect, running)
        except ApiError as error:
            if error.status in _RETRIED or error.status >= 500:
                entry.replays.failed(asked)
            raise

    def _admit(self, entry: Entry, asked: Repeatable, call: ModelCall) -> None:
        refusal = self._admission.check()
        if refusal is not None:
            entry.unanswered.add(call_digest(call))
            entry.write(records.asked(call_digest(call)))
            entry.replays.failed(asked)
            raise refusal

    def _start(self, running: Running, entry: Entry, session: Session, claims: SessionClaims) -> Running:
        choices = running.call.n
        for _ in range(choices):
            self._admission.began()
        began = time.monotonic()

        def ended(task: asyncio.Task[Answer]) -> None:
            entry.calls.discard(task)
            for _ in range(choices):
                self._admission.ended(time.monotonic() - began if running.answered else None)

        task = running.start(self._caller.answer(running, entry, session, claims))
        entry.calls.add(task)
        task.add_done_callback(ended)
        return running

    async def _respond(self, request: Request, dialect: Dialect, running: Running) -> Response:
        """The answer, or the start of its stream. An error within the first moments has a status of its own; a later
        one comes as an event."""
        call = running.call
        running.join()
        delivered = streams = False
        try:
            if call.stream:
                await _unless_gone(request, running.news(0, self._settings.keepalive_s))
            else:
                await _unless_gone(request, asyncio.wait({running.task}))
            if not call.stream or running.done:
                answer = running.outcome()
            if not call.stream:
                delivered = True
                return JSONResponse(dialect.body(call, answer))
            streams = True
            return _Stream(self._events(dialect, running), lambda: self._left(running))
        finally:
            if not streams:
                running.leave(delivered)

    async def _events(self, dialect: Dialect, running: Running) -> AsyncIterator[bytes]:
        stream = dialect.stream(running.call, running.id, running.created, self._model_name)
        told, started = 0, False
        while True:
            if not started and running.prompt_tokens is not None:
                started = True
                for event in stream.start(running.prompt_tokens):
                    yield event
            for delta in running.deltas[told:]:
                told += 1
                for event in stream.delta(delta):
                    yield event
            if running.done and told == len(running.deltas):
                break
            if not await running.news(told, self._settings.keepalive_s):
                yield stream.keepalive()
        try:
            answer = running.outcome()
        except ApiError as error:
            self._counters.errors[error.code] += 1
            for event in stream.failed(error):
                yield event
        else:
            for event in stream.end(answer):
                yield event
        running.delivered = True

    def _left(self, running: Running) -> None:
        if running.leave():  # its client hung up
            self._counters.hung_up += 1

    # --- what requests share ------------------------------------------------------------------------------

    def _authenticate(self, request: Request) -> SessionClaims:
        key = _bearer(request) or request.headers.get("x-api-key", "")
        try:
            claims = verify(self._settings.secret, key, time.time())
        except KeyRefused as error:
            raise ApiError(
                401, f"{error}; use the api_key of this rollout's request", code="invalid_api_key"
            ) from None
        refuse_foreign(claims.session_id, self._settings.shard, self._settings.gateway.processes)
        refuse_lost(claims, self._epoch)
        return claims

    def _require_control_key(self, request: Request) -> None:
        if not hmac.compare_digest(_bearer(request).encode(), self._settings.control_key.encode()):
            raise ApiError(401, "this needs the control key", code="invalid_control_key")

    def _check_model(self, name: str) -> None:
        if name != self._model_name:
            raise ApiError(404, f"there is no model {name!r} here, only {self._model_name!r}", code="model_not_found")

    def _model_card(self) -> dict[str, object]:
        """As OpenAI's clients read it, and as Anthropic's do."""
        created_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._created))
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "rollout-backend",
            "max_model_len": self._settings.model.context_length,
            "type": "model",
            "display_name": self._model_name,
            "created_at": created_at,
        }

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

    async def _api_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        self._counters.errors[error.code] += 1
        anthropic = "anthropic-version" in request.headers or "/messages" in request.url.path
        default: Dialect = self._messages if anthropic else self._chat
        dialect: Dialect = getattr(request.state, "dialect", default)
        return JSONResponse(dialect.error_body(error), status_code=error.status, headers=error.headers)

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


def _images_taken(config: GatewayConfig, bundle: RendererBundle) -> ImageLimits | None:
    """What images may come; None: the model takes none, or none are wanted."""
    if bundle.vision is None or not config.max_images:
        return None
    return ImageLimits(config.max_images, config.max_image_pixels)


def _bearer(request: Request) -> str:
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


async def _unless_gone(request: Request, waiting: Coroutine[Any, Any, Any]) -> None:
    """Waits, as long as the client does. Raises ClientDisconnect once it has hung up."""
    task = asyncio.ensure_future(waiting)
    gone = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise ClientDisconnect
    finally:
        task.cancel()
        gone.cancel()


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
