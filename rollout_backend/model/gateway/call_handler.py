"""Handle model calls over HTTP: start a call or join an earlier one, and write its answer.

Invariants:

- A session that an earlier trainer started makes no model call before this trainer adopts it: until then, the engines
  may serve weights with which it must not continue.
- A call is aborted when its client disconnects, unless another client waits for the same answer.
- An answer counts as delivered once all of it was sent to a client that was still connected.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from rollout_backend.base.names import random_name
from rollout_backend.config import LeftOut
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.model.dialects.base import Dialect, EventStream, ParsedRequest, to_json
from rollout_backend.model.gateway.access import TRAJECTORY_HEADER
from rollout_backend.model.gateway.call_traces import CallTraces
from rollout_backend.model.gateway.cpu_shares import charge_to
from rollout_backend.model.gateway.gateway_settings import GatewaySettings
from rollout_backend.model.gateway.model_call_executor import ModelCallExecutor
from rollout_backend.model.gateway.session_share import SessionShare, is_brief, too_large
from rollout_backend.model.gateway.sessions.calls import InFlightCall, RequestKey
from rollout_backend.model.gateway.sessions.registry import OpenSession, SessionRegistry
from rollout_backend.model.gateway.stats import GatewayStats
from rollout_backend.model.model_call import Answer, ApiError, Choice, Delta, ModelCall, context_exceeded, not_adopted

# Limit of a body without images: bytes, plus bytes per token of context.
_BYTES, _TOKEN_BYTES = 1024 * 1024, 32
_STREAM_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
    "content-type": "text/event-stream; charset=utf-8",
}
# Tokens, or entries of log-probabilities, that are written within milliseconds.
_BRIEF_REPLY = 1024
# A conversation that is longer is read in a thread, even if little of it is new.
_EXTENDED_BYTES, _EXTENDED_MESSAGES = 256 * 1024, 512
# Statuses below 500 that OpenAI's and Anthropic's clients retry.
_RETRIED = frozenset({408, 409, 429})


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
        self.settings = settings
        self.registry = registry
        self.executor = executor
        self.stats = stats
        self.traces = traces
        self.model_name, context = settings.model.served_name, settings.model.context_tokens
        self._adopted = set(settings.adopted)
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
        served = self.model_name
        if name != served and all(rule.model != name for rule in self.settings.leave_out):
            raise ApiError(404, f"there is no model {name!r} here, only {served!r}", code="model_not_found")

    def body(self, request: Request, share: SessionShare) -> AbstractAsyncContextManager[tuple[bytes, bool]]:
        """Read a request's body: see `SessionShare.body`."""
        return share.body(request, self._max_bytes, self.settings.body_s, self._too_large)

    async def count(self, request: Request, dialect: Dialect, claims: SessionClaims) -> Response:
        """Return the length of a prompt."""
        session = await self.registry.open(claims)
        return await charge_to(session.share.cpu, self._count(request, dialect, session))

    async def _count(self, request: Request, dialect: Dialect, session: OpenSession) -> Response:
        share = session.share
        async with share.turn():
            async with self.body(request, share) as (body, brief):
                call = await share.cpu.run(dialect.parse_count, body, brief=brief, tokenizes=False)
            self.check_model(call.model)
            tokens = await self.executor.count(session, call, brief=brief)
        return JSONResponse(dialect.count_body(tokens))

    async def call(self, request: Request, dialect: Dialect, claims: SessionClaims) -> "ClientCall":
        """Return the model call that answers the request, with a body or a stream of events."""
        current = not claims.is_recorded or claims.trainer_incarnation == self.settings.trainer_incarnation
        if not current and claims.session_id not in self._adopted:
            raise not_adopted()
        # A closed session is refused before its body is read.
        return ClientCall(self, request, dialect, await self.registry.open(claims))


class ClientCall:
    """One client's model call, as the ASGI application that answers its request.

    It is an open request of its session until the last byte of the answer. It listens to the call in flight that it
    started, or that it retries, until that answer is written, has failed, or the client has disconnected.
    """

    def __init__(self, handler: CallHandler, request: Request, dialect: Dialect, session: OpenSession) -> None:
        self._handler, self._request, self._dialect, self._session = handler, request, dialect, session
        self._cpu = session.share.cpu
        self._has_begun = False
        """True once the status was sent. A later error is an event of the stream."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._session.share.turn():
            call, running = await charge_to(self._cpu, self._read())
            running.join()
            try:
                answer = charge_to(self._cpu, self._answer(call, running, send))
                await _wait_or_disconnect(self._request, answer)
            except BaseException as error:
                aborted = self._end(running, error)
                if not (self._has_begun and isinstance(error, ClientDisconnect)):
                    raise
                self._handler.stats.client_disconnects += aborted
            else:
                self._end(running)
                await send({"type": "http.response.body"})

    def _end(self, running: InFlightCall, error: BaseException | None = None) -> bool:
        """Stop listening to the call in flight, and record how this client's call ended.

        Return True if the call in flight was aborted because it has no other listener.
        """
        retries = self._session.retries
        if error is None:
            running.delivered = True
            retries.undelivered.discard(running)
        aborted = running.leave(given_up=isinstance(error, ClientDisconnect))
        if aborted or (isinstance(error, ApiError) and _is_retried(error)):
            retries.failed(running.key.question)
        return aborted

    async def _read(self) -> tuple[ModelCall, InFlightCall]:
        """Read the call, and start it or find the call in flight that it retries.

        A client may read its answer slowly, so the returned call is without its question.
        """
        handler, session, headers = self._handler, self._session, self._request.headers
        async with handler.body(self._request, session.share) as (body, brief):
            parsed = None
            if not brief and len(body) <= _EXTENDED_BYTES:
                parsed = session.requests.extend(self._dialect, body, is_brief)
                brief = parsed is not None and len(parsed.call.messages) <= _EXTENDED_MESSAGES
            key, call = await self._cpu.run(self._parse, body, parsed, brief=brief, tokenizes=False)
            handler.registry.check_open(session)
            if call.max_new_tokens != 0:
                running = session.retries.find(key)
                if running is not None:
                    handler.stats.replayed += 1
                else:
                    left_out = _is_left_out(call, headers, handler.settings.leave_out)
                    running = InFlightCall(call, key, brief=brief, left_out=left_out)
                    self._start(running)
                return call.without_question(), running
        # The request only fills a provider's cache.
        tokens = await handler.executor.count(session, call, brief=False)
        nothing = Choice({"role": "assistant", "content": ""}, "length", 0)
        answer = Answer(random_name(), int(time.time()), handler.model_name, (nothing,), tokens)
        return replace(call.without_question(), stream=False), InFlightCall.answered_before(key, answer)

    def _parse(self, body: bytes, parsed: ParsedRequest | None) -> tuple[RequestKey, ModelCall]:
        handler, session, headers = self._handler, self._session, self._request.headers
        call, digest = parsed or session.requests.parse(self._dialect, body)
        call = handler.executor.shown(call)
        if TRAJECTORY_HEADER in headers and all(rule.model != call.model for rule in handler.settings.leave_out):
            # In SageMaker's job runtime, the job selects the model, and agents name any.
            call = replace(call, model=handler.model_name)
        handler.check_model(call.model)
        question = session.conversations.question(call.messages, call.tools)
        return RequestKey.of(self._dialect.name, digest, headers, question), call

    def _start(self, running: InFlightCall) -> None:
        handler, session, began_at = self._handler, self._session, time.time()
        task = running.start(charge_to(self._cpu, handler.executor.answer(session, running)))
        session.retries.add(running)
        if (traces := handler.traces) is not None:
            parent = self._request.headers.get("traceparent", "")
            task.add_done_callback(lambda _: traces.send(session.claims, running, began_at, parent))

    async def _answer(self, call: ModelCall, running: InFlightCall, send: Send) -> None:
        """Send the answer, except for the end of the response. An error before its beginning sets its status."""
        if call.stream:
            await running.wait_for_more(0, self._handler.settings.keepalive_s)
            if running.done:
                await self._handler.registry.written(self._session.claims)
                running.outcome()
            stream = self._dialect.stream(call, running.id, running.created, self._handler.model_name)
            headers, pieces = _STREAM_HEADERS, self._events(stream, running)
        else:
            await asyncio.wait({running.task})
            await self._handler.registry.written(self._session.claims)
            answer = running.outcome()
            body = await self._cpu.run(
                lambda: to_json(self._dialect.body(call, answer)), brief=_is_brief(answer), tokenizes=False
            )
            headers, pieces = {"content-length": str(len(body)), "content-type": "application/json"}, _once(body)
        self._has_begun = True
        await send({"type": "http.response.start", "status": 200, "headers": Headers(headers).raw})
        async for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _events(self, stream: EventStream, running: InFlightCall) -> AsyncIterator[bytes]:
        sent, started, cpu = 0, False, self._cpu
        while True:
            events: list[bytes] = []
            if not started and running.prompt_tokens is not None:
                started = True
                events += stream.start(running.prompt_tokens)
            deltas = running.deltas[sent:]
            sent += len(deltas)
            brief = sum(len(delta.logprobs) + len(delta.text) // 4 for delta in deltas) <= _BRIEF_REPLY
            events += await cpu.run(_written, stream, deltas, brief=brief, tokenizes=False)
            if events:
                # Each write is a system call.
                yield b"".join(events)
            if running.done and sent == len(running.deltas):
                break
            if not await running.wait_for_more(sent, self._handler.settings.keepalive_s):
                yield stream.keepalive()
        try:
            await self._handler.registry.written(self._session.claims)
            answer = running.outcome()
        except ApiError as error:
            self._handler.stats.errors[error.code] += 1
            if _is_retried(error):
                self._session.retries.failed(running.key.question)
            yield b"".join(stream.failed(error))
        else:
            yield b"".join(await cpu.run(lambda: [*stream.end(answer)], brief=_is_brief(answer), tokenizes=False))


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


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


async def _wait_or_disconnect(request: Request, work: Coroutine[Any, Any, None]) -> None:
    """Do the work. If the client disconnects, cancel it and raise ClientDisconnect."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.create_task(work)
    gone = asyncio.create_task(disconnected())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        if gone.done():
            raise ClientDisconnect
    finally:
        task.cancel()
        gone.cancel()
