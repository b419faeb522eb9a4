"""Handle model calls over HTTP: start a call or join an earlier one, and write its answer.

Invariants:

- A session that an earlier trainer started makes no model call before this trainer adopts it: until then, the engines
  may serve weights with which it must not continue.
- A call is aborted when its client disconnects, unless another client waits for the same answer.
- An answer counts as delivered once all of it was sent to a client that was still connected.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from rollout_backend.config import LeftOut
from rollout_backend.core.model_call import Answer, ApiError, Choice, Delta, ModelCall, context_exceeded, not_adopted
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.model.dialects.base import Dialect, EventStream, to_json
from rollout_backend.model.gateway.access import TRAJECTORY_HEADER
from rollout_backend.model.gateway.call_traces import CallTraces
from rollout_backend.model.gateway.cpu_shares import charge_to
from rollout_backend.model.gateway.gateway_settings import GatewaySettings
from rollout_backend.model.gateway.model_call_executor import ModelCallExecutor
from rollout_backend.model.gateway.session_share import SessionShare, too_large
from rollout_backend.model.gateway.sessions.calls import InFlightCall, RequestKey
from rollout_backend.model.gateway.sessions.registry import OpenSession, SessionRegistry
from rollout_backend.model.gateway.stats import GatewayStats

# Limit of a body without images: bytes, plus bytes per token of context.
_BYTES, _TOKEN_BYTES = 1024 * 1024, 32
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
# Tokens, or entries of log-probabilities, that are written within milliseconds.
_BRIEF_REPLY = 1024
# Statuses below 500 that OpenAI's and Anthropic's clients retry.
_RETRIED = frozenset({408, 409, 429})


class _Answer(Response):
    """Base class of responses. Calls `on_end` when it ends, even if the client disconnects before it starts."""

    is_cancelled = False
    """True if the response ended because this gateway is shutting down."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ends = contextlib.ExitStack()

    def on_end(self, function: Callable[[], object]) -> None:
        self._ends.callback(function)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._send(scope, receive, send)
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise
        finally:
            self._ends.close()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)


class Stream(_Answer, StreamingResponse):
    """A response sent in parts, which ends when the client disconnects."""


class _Whole(_Answer):
    """A response sent in one piece: a StreamingResponse would cost a tenth of the call's time."""

    def __init__(self, request: Request, running: InFlightCall, body: bytes) -> None:
        super().__init__(body, media_type="application/json")
        self._request, self._running = request, running

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self.body, "more_body": True})

        with contextlib.suppress(ClientDisconnect):
            await _wait_or_disconnect(self._request, write())
            self._running.delivered = True
            await send({"type": "http.response.body"})


class CallHandler:
    """Handles the model calls of one gateway, in every dialect."""

    def __init__(
        self,
        settings: GatewaySettings,
        registry: SessionRegistry,
        executor: ModelCallExecutor,
        stats: GatewayStats,
        traces: CallTraces | None = None,
        *,
        text_only: bool = False,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._executor = executor
        self._stats = stats
        self._traces = traces
        self._adopted = set(settings.adopted)
        self._model_name, context = settings.model.served_name, settings.model.context_tokens
        self._max_bytes = settings.gateway.max_body_bytes
        self._too_large = partial(too_large, self._max_bytes)
        if text_only and (most := _BYTES + _TOKEN_BYTES * context) < self._max_bytes:
            why = f"the request has more than {most} bytes"
            self._max_bytes, self._too_large = most, partial(context_exceeded, context, why)

    def adopt(self, session_ids: Iterable[str]) -> None:
        """Allow model calls from sessions that an earlier trainer started."""
        self._adopted.update(session_ids)

    def check_model(self, name: str) -> None:
        """Raise ApiError (404) unless `name` is the model that this gateway serves."""
        served = self._model_name
        if name != served and all(rule.model != name for rule in self._settings.leave_out):
            raise ApiError(404, f"there is no model {name!r} here, only {served!r}", code="model_not_found")

    async def count(self, request: Request, dialect: Dialect, claims: SessionClaims) -> Response:
        """Return the length of a prompt."""
        session = await self._registry.open(claims)
        return await charge_to(session.share.cpu, self._count(request, dialect, session))

    async def _count(self, request: Request, dialect: Dialect, session: OpenSession) -> Response:
        share = session.share
        with share.request(), contextlib.ExitStack() as open_request:
            await share.turn(open_request)
            async with self._body(request, share) as (body, brief):
                call = await share.cpu.run(dialect.parse_count, body, brief=brief, tokenizes=False)
            self.check_model(call.model)
            tokens = await self._executor.count(session, call, brief=brief)
        return JSONResponse(dialect.count_body(tokens))

    async def call(self, request: Request, dialect: Dialect, claims: SessionClaims) -> Response:
        """Answer a model call, with a body or a stream of events."""
        current = not claims.is_recorded or claims.trainer_incarnation == self._settings.trainer_incarnation
        if not current and claims.session_id not in self._adopted:
            raise not_adopted()
        # A closed session is refused before its body is read.
        session = await self._registry.open(claims)
        return await charge_to(session.share.cpu, self._call(request, dialect, session))

    async def _call(self, request: Request, dialect: Dialect, session: OpenSession) -> Response:
        with contextlib.ExitStack() as open_request:
            open_request.enter_context(session.share.request())
            await session.share.turn(open_request)
            call, running = await self._read(request, dialect, session)
            if running is None:
                # The request only fills a provider's cache.
                tokens = await self._executor.count(session, call, brief=False)
                nothing = Choice({"role": "assistant", "content": ""}, "length", 0)
                answer = Answer(uuid4().hex, int(time.time()), self._model_name, (nothing,), tokens)
                return JSONResponse(dialect.body(call, answer))
            # A client may read its answer slowly, so the question is dropped before.
            call = call.without_question()
            try:
                response = await self._respond(request, dialect, session, call, running)
            except ApiError as error:
                if _is_retried(error):
                    session.retries.failed(running.key.question)
                raise
            response.on_end(open_request.pop_all().close)
            return response

    async def _read(
        self, request: Request, dialect: Dialect, session: OpenSession
    ) -> tuple[ModelCall, InFlightCall | None]:
        """Read a call, and start it or find the call in flight that it retries; None if it samples nothing."""
        share = session.share
        async with self._body(request, share) as (body, brief):
            key, call = await share.cpu.run(
                self._parse, session, dialect, body, request.headers, brief=brief, tokenizes=False
            )
            self._registry.check_open(session)
            if call.max_new_tokens == 0:
                return call, None
            running = session.retries.find(key)
            if running is not None:
                self._stats.replayed += 1
                return call, running
            running = InFlightCall(
                call,
                key,
                brief=brief,
                left_out=_is_left_out(call, request.headers, self._settings.leave_out),
            )
            self._start(session, running, request.headers.get("traceparent", ""))
            session.retries.add(running)
            return call, running

    def _body(self, request: Request, share: SessionShare) -> AbstractAsyncContextManager[tuple[bytes, bool]]:
        return share.body(request, self._max_bytes, self._settings.body_s, self._too_large)

    def _parse(
        self, session: OpenSession, dialect: Dialect, body: bytes, headers: Mapping[str, str]
    ) -> tuple[RequestKey, ModelCall]:
        call = self._executor.shown(session.requests.parse(dialect, body))
        if TRAJECTORY_HEADER in headers and all(rule.model != call.model for rule in self._settings.leave_out):
            # In SageMaker's job runtime, the job selects the model, and agents name any.
            call = replace(call, model=self._model_name)
        self.check_model(call.model)
        question = session.conversations.question(call.messages, call.tools)
        return RequestKey.of(dialect.name, body, headers, question), call

    def _start(self, session: OpenSession, running: InFlightCall, traceparent: str) -> None:
        began_at = time.time()

        def ended(task: asyncio.Task[Answer]) -> None:
            session.calls.discard(task)
            if not running.answered:
                session.undelivered.discard(running)
            if self._traces is not None:
                self._traces.send(session.claims, running, began_at, traceparent)

        task = running.start(charge_to(session.share.cpu, self._executor.answer(session, running)))
        session.calls.add(task)
        session.undelivered.add(running)
        task.add_done_callback(ended)

    async def _respond(
        self, request: Request, dialect: Dialect, session: OpenSession, call: ModelCall, running: InFlightCall
    ) -> _Answer:
        """Return the complete answer, or start its stream.

        An error before the stream starts sets the response's status; a later one is sent as an event.
        """
        running.join()
        try:
            if call.stream:
                await _wait_or_disconnect(request, running.wait_for_more(0, self._settings.keepalive_s))
            else:
                await _wait_or_disconnect(request, running.task)
            if running.done:
                await self._registry.written(session.claims)
            if not call.stream or running.done:
                answer = running.outcome()
            if call.stream:
                stream = dialect.stream(call, running.id, running.created, self._model_name)
                events = self._events(stream, session, running)
                response: _Answer = Stream(events, media_type="text/event-stream", headers=_STREAM_HEADERS)
            else:
                brief = _is_brief(answer)
                body = await session.share.cpu.run(
                    lambda: to_json(dialect.body(call, answer)), brief=brief, tokenizes=False
                )
                response = _Whole(request, running, body)
        except BaseException as error:
            self._leave(session, running, given_up=isinstance(error, ClientDisconnect))
            raise

        def left() -> None:
            if self._leave(session, running, given_up=not response.is_cancelled):
                self._stats.client_disconnects += 1

        response.on_end(left)
        return response

    async def _events(self, stream: EventStream, session: OpenSession, running: InFlightCall) -> AsyncIterator[bytes]:
        sent, started, cpu = 0, False, session.share.cpu
        while True:
            events: list[bytes] = []
            if not started and running.prompt_tokens is not None:
                started = True
                events += stream.start(running.prompt_tokens)
            deltas = running.deltas[sent:]
            sent += len(deltas)
            brief = sum(len(delta.logprobs) + len(delta.text) // 4 for delta in deltas) <= _BRIEF_REPLY
            events += await charge_to(cpu, cpu.run(_written, stream, deltas, brief=brief, tokenizes=False))
            if events:
                # Each write is a system call.
                yield b"".join(events)
            if running.done and sent == len(running.deltas):
                break
            if not await running.wait_for_more(sent, self._settings.keepalive_s):
                yield stream.keepalive()
        try:
            await self._registry.written(session.claims)
            answer = running.outcome()
        except ApiError as error:
            self._stats.errors[error.code] += 1
            if _is_retried(error):
                session.retries.failed(running.key.question)
            yield b"".join(stream.failed(error))
        else:
            end = cpu.run(lambda: [*stream.end(answer)], brief=_is_brief(answer), tokenizes=False)
            yield b"".join(await charge_to(cpu, end))
        running.delivered = True

    def _leave(self, session: OpenSession, running: InFlightCall, *, given_up: bool) -> bool:
        """Remove a listener. Return True if this aborted the call."""
        aborted = running.leave(given_up=given_up)
        if aborted:
            session.retries.failed(running.key.question)
        if running.delivered:
            session.undelivered.discard(running)
        return aborted


def _written(stream: EventStream, deltas: Sequence[Delta]) -> list[bytes]:
    return [event for delta in deltas for event in stream.delta(delta)]


def _is_brief(answer: Answer) -> bool:
    """Return whether an answer is written within milliseconds."""
    return sum(choice.sampled_tokens for choice in answer.choices) <= _BRIEF_REPLY


def _is_left_out(call: ModelCall, headers: Mapping[str, str], rules: Iterable[LeftOut]) -> bool:
    system = next((message["content"] for message in call.messages if message["role"] == "system"), "")

    def has(header: str) -> bool:
        name, _, value = (part.strip() for part in header.partition(":"))
        return name in headers and value in ("", headers[name])

    return any(
        (rule.model is None or rule.model == call.model)
        and (rule.system is None or rule.system in system)
        and (rule.header is None or has(rule.header))
        for rule in rules
    )


def _is_retried(error: ApiError) -> bool:
    return error.status in _RETRIED or error.status >= 500


async def _wait_or_disconnect(request: Request, waiting: Awaitable[Any]) -> None:
    """Wait for `waiting`. Raise ClientDisconnect as soon as the client disconnects.

    A coroutine is then cancelled and its error raised; a future or task continues and keeps its error.
    """
    task = asyncio.ensure_future(waiting)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise ClientDisconnect
        if task is not waiting:
            task.result()
    finally:
        if task is not waiting:
            task.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
