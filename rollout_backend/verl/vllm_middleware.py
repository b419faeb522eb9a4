"""Make verl's vLLM servers (0.24.0) report which weights sampled a reply, and sample with verl's LoRA adapter.

vLLM 0.24.0 reports no weight version: verl keeps it in the Ray actor that runs the server, as `global_steps`. vLLM
loads this module in that actor's process, by its option `--middleware`, and the manager calls `attach` there.

verl loads its adapter into the engine, where the HTTP server does not know it: vLLM answers a request that names the
adapter with 404, and samples from the base model, with 200, if a request names no model. So the middleware adds the
adapter to the HTTP server's models.

Invariants:

- A reply has a version only if it is certain. verl aborts all generation before it changes the weights and then the
  version, and resumes after that. All tokens of a reply therefore have the version at which its first token arrived.
  If all tokens arrive with the abort, they have a version only if it has not changed since the call began.
- Each stream ends with a `finish_reason`. In 0.24.0, 8 of 32 streams that a pause aborted ended without one.
- On a server with a LoRA adapter, a request for `/inference/v1/generate` never samples from the base model: it is
  refused with 400 if it does not name the adapter. verl's own calls use the base model until the first weight update.
- A request reaches the engine only if the engine has the adapter, and gets 503 otherwise, because verl removes the
  adapter before it loads the next one. An engine that lacks a request's adapter reads it from a folder that does not
  exist, and crashes.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from rollout_backend.verl.verl_api import ADAPTER, attribute, vllm_adapter

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MIDDLEWARE = f"{__name__}.WeightVersions"
INFO = "/model_info"
GENERATE = "/inference/v1/generate"
# This attribute of vLLM's engine client holds verl's server.
_SERVER = "rollout_backend_server"
_END = b"\n\n"


def attach(server: Any) -> None:
    """Show the middleware the actor that runs its server. Runs in the actor's process; `server` is verl's object.

    Raises:
        ConfigError: the installed version of verl keeps no weight version there.
    """
    attribute(server, "global_steps")
    setattr(attribute(server, "engine"), _SERVER, server)


class WeightVersions:
    """An ASGI middleware. It answers `/model_info` without generating anything, also while the server sleeps."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == INFO:
            engine = scope["app"].state.engine_client
            info = {"logprobs_mode": str(engine.model_config.logprobs_mode), "weight_version": _version(scope)}
            await _respond(send, 200, info)
        elif scope["type"] == "http" and scope["path"] == GENERATE:
            state = scope["app"].state
            if state.engine_client.vllm_config.lora_config is not None:
                body = await _read(receive)
                if body is None:
                    return
                if (refusal := await _refusal(state, body)) is not None:
                    await _respond(send, *refusal)
                    return
                receive = _replay(body, receive)
            await self._app(scope, receive, _Reply(lambda: _version(scope), send))
        else:
            await self._app(scope, receive, send)


def _version(scope: Message) -> str | None:
    server = getattr(scope["app"].state.engine_client, _SERVER, None)
    steps = getattr(server, "global_steps", None)
    return None if steps is None else str(steps)


class _Reply:
    """Forwards a reply with the weight version of its tokens."""

    def __init__(self, version: Callable[[], str | None], send: Send) -> None:
        self._version = version
        self._send = send
        self._at_arrival = version()
        # The start of a non-streaming reply is held back, because the reply's length changes.
        self._start: Message | None = None
        self._streams = False
        self._rest = b""
        self._begun = False
        self._ended = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = next((value for name, value in message["headers"] if name.lower() == b"content-type"), b"")
            self._streams = kind.startswith(b"text/event-stream")
            if message["status"] == 200 and kind.startswith(b"application/json"):
                self._start = message
                return
        elif self._start is not None:
            self._rest += message.get("body", b"")
            if message.get("more_body", False):
                return
            body, start = self._whole(self._rest), self._start
            headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
            await self._send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
            message = {**message, "body": body}
        elif self._streams:
            message = {**message, "body": self._pieces(message.get("body", b""), message.get("more_body", False))}
        await self._send(message)

    def _whole(self, body: bytes) -> bytes:
        reply = json.loads(body)
        for choice in reply.get("choices") or ():
            choice["weight_version"] = self._certain(choice.get("finish_reason"))
        return json.dumps(reply).encode()

    def _pieces(self, data: bytes, more: bool) -> bytes:
        *events, self._rest = (self._rest + data).split(_END)
        out = b"".join(line for event in events for line in self._with_version(event))
        return out if more else out + self._rest

    def _with_version(self, event: bytes) -> Iterable[bytes]:
        """Yield a stream's event, after one with the version of the first tokens or with the end that it lacks."""
        data = event.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            if not self._ended:
                yield _event(finish_reason="abort")
        elif data.startswith(b"{"):
            piece = json.loads(data)
            self._ended |= "error" in piece
            for choice in piece.get("choices") or ():
                finish = choice.get("finish_reason")
                self._ended |= finish is not None
                if choice.get("token_ids") and not self._begun:
                    self._begun = True
                    yield _event(weight_version=self._certain(finish))
        yield event + _END

    def _certain(self, finish: str | None) -> str | None:
        now = self._version()
        return None if finish == "abort" and now != self._at_arrival else now


def _event(**fields: str | None) -> bytes:
    choice: dict[str, object] = {"index": 0, "token_ids": [], "logprobs": None, "finish_reason": None, **fields}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + _END


async def _read(receive: Receive) -> bytes | None:
    """Return a request's body; None if the client disconnected before its end."""
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that returns the whole body first."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return unread.pop() if unread else await receive()

    return replay


async def _refusal(state: Any, body: bytes) -> tuple[int, dict[str, Any]] | None:
    """Return the error for a request that would not be sampled with verl's adapter. Otherwise, make vLLM's HTTP
    server know the adapter and return None."""
    try:
        named = json.loads(body).get("model")
    except (ValueError, AttributeError):
        named = None
    if named != ADAPTER:
        return _error(
            400,
            f"verl trains a LoRA adapter, and this request names the model {named!r}, so it would be sampled without "
            f"the adapter: name the model {ADAPTER!r}",
        )
    adapter = vllm_adapter()
    if adapter.lora_int_id not in await state.engine_client.list_loras():
        return _error(503, "the engine has no LoRA adapter yet: verl loads it with its next weight update")
    state.openai_serving_models.lora_requests[ADAPTER] = adapter
    return None


def _error(status: int, message: str) -> tuple[int, dict[str, Any]]:
    return status, {"error": {"message": message, "type": "LoraAdapterError", "code": status}}


async def _respond(send: Send, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
