"""A proxy in front of an AWS endpoint that injects the faults of networks and services.

    async with FaultProxy(storage.endpoint_url, [Rule("s3:PutObject", Fault.CUT_AFTER, share=0.2)], seed=1) as proxy:
        ...  # clients use proxy.url as their endpoint

Invariants:

- A call that no rule hits passes unchanged, with its Host header, so its signature stays valid.
- With a given seed, whether the n-th call of an operation on a path is hit does not depend on any other call.
- `calls` records each call.

Operations have the names of AWS's permissions: `s3:PutObject`, `sqs:SendMessage`,
`bedrock-agentcore:StopRuntimeSession`. The proxy supports path-style S3 and SQS's JSON protocol, which boto3 uses
with a custom endpoint.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from uuid import uuid4
from xml.sax.saxutils import escape

from aiohttp import web

from rollout_backend.workbench.local.http_proxy import HOP_BY_HOP, HttpProxy, signature_of

_RUNTIME_CALLS = {"invocations": "InvokeAgentRuntime", "stopruntimesession": "StopRuntimeSession"}


class Fault(StrEnum):
    """A failure of a call."""

    FAIL = "fail"
    """The proxy answers with an error. It does not call the service."""
    HANG = "hang"
    """The proxy does not answer. It calls the service after `seconds`, or never if 0."""
    CUT_BEFORE = "cut_before"
    """The proxy resets the connection. It does not call the service."""
    CUT_AFTER = "cut_after"
    """The service executes the call, and the proxy resets the connection before the answer."""
    DROP = "drop"
    """The proxy answers a SendMessage as if it were accepted. It does not call the service."""
    DOUBLE = "double"
    """The proxy calls the service twice; the client gets the second answer."""
    DELAY = "delay"
    """The proxy calls the service after up to `seconds`; other calls overtake."""
    STRIP = "strip"
    """The proxy calls the service without the rule's `header`, and so without its condition."""
    CUT_BODY = "cut_body"
    """The proxy closes the connection in the middle of the answer's body."""
    RESET_BODY = "reset_body"
    """The proxy resets the connection in the middle of the body."""
    NO_LENGTH = "no_length"
    """Like `CUT_BODY`, but without Content-Length, so the client cannot notice."""
    TRUNCATE = "truncate"
    """Half of the body arrives as a complete answer."""
    SLOW_BODY = "slow_body"
    """The body takes `seconds` to arrive."""


@dataclass
class Rule:
    """A fault, and the calls that it hits. The first rule that matches a call applies."""

    operation: str
    """Glob pattern for `ProxiedCall.operation`, for example `s3:*`."""
    fault: Fault
    share: float = 1.0
    """Share of the matching calls that are hit, chosen by the proxy's seed."""
    times: int | None = None
    """Maximum number of hits."""
    once_each: bool = False
    """Hit the same object or message at most once, so that a retry succeeds."""
    access_key: str = "*"
    """Glob pattern for the key that signed the call."""
    path: str = "*"
    """Glob pattern for the path of the call."""
    header: str = ""
    """Header that the call must carry, with any value."""
    status: int = 503
    code: str = "ServiceUnavailable"
    seconds: float = 0.0
    hits: int = 0
    _nth: Counter[str] = field(default_factory=Counter, repr=False)
    _seen: set[bytes] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        if self.fault is Fault.DROP and self.operation != "sqs:SendMessage":
            raise ValueError(f"{self.operation} cannot be dropped: the answer is known for sqs:SendMessage only")

    def hit(self, call: ProxiedCall, body: bytes, seed: int) -> bool:
        """Return whether the rule hits this call, and count a hit."""
        pairs = (call.operation, self.operation), (call.access_key, self.access_key), (call.path, self.path)
        if not all(fnmatchcase(value, pattern) for value, pattern in pairs):
            return False
        if self.header and self.header.lower() not in call.headers:
            return False
        which = f"{call.operation} {call.path}"
        self._nth[which] += 1
        lot = random.Random(f"{seed} {self.fault} {which} {self._nth[which]}").random()  # noqa: S311
        same = hashlib.sha256(f"{which} ".encode() + body).digest() if self.once_each else b""
        if lot >= self.share or same in self._seen or (self.times is not None and self.hits >= self.times):
            return False
        if self.once_each:
            self._seen.add(same)
        self.hits += 1
        return True


@dataclass
class ProxiedCall:
    """A call that reached the proxy."""

    operation: str
    path: str
    access_key: str
    """Empty for an unsigned call."""
    fault: Fault | None = None
    status: int | None = None
    """Status of the answer; None without an answer."""
    headers: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    """Names of the call's headers."""


class FaultProxy(HttpProxy):
    """An async context manager. Changes to `rules` do not affect calls that already hang."""

    def __init__(self, upstream: str, rules: Iterable[Rule] = (), seed: int = 0) -> None:
        super().__init__()
        self.rules = list(rules)
        self.calls: list[ProxiedCall] = []
        self._upstream = upstream.rstrip("/")
        self._seed = seed

    def count(self, operation: str, fault: Fault | None = None) -> int:
        """Return the number of calls of an operation so far, or of those with this fault."""
        return sum(call.operation == operation and fault in (None, call.fault) for call in self.calls)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        call = ProxiedCall(*_named(request), headers=frozenset(name.lower() for name in request.headers))
        self.calls.append(call)
        rule = next((rule for rule in self.rules if rule.hit(call, body, self._seed)), None)
        forward = functools.partial(self._forward, self._upstream, request, body)
        if rule is None:
            answer: web.StreamResponse = await forward()
            call.status = answer.status
            return answer
        call.fault = rule.fault
        match rule.fault:
            case Fault.FAIL:
                answer = _error(call, rule)
            case Fault.HANG:
                await asyncio.sleep(rule.seconds or 1e9)
                answer = await forward()
            case Fault.CUT_BEFORE:
                return _cut(request)
            case Fault.CUT_AFTER:
                await forward()
                return _cut(request)
            case Fault.DROP:
                answer = _accepted(body)
            case Fault.DOUBLE:
                await forward()
                answer = await forward()
            case Fault.DELAY:
                lot = random.Random(f"{self._seed} {rule.hits}").random()  # noqa: S311
                await asyncio.sleep(lot * rule.seconds)
                answer = await forward()
            case Fault.CUT_BODY | Fault.RESET_BODY | Fault.NO_LENGTH:
                return _cut_body(request, await forward(), rule.fault)
            case Fault.TRUNCATE:
                whole = await forward()
                whole.body = _half(whole)
                answer = whole
            case Fault.SLOW_BODY:
                return await _send_slowly(request, await forward(), rule.seconds)
            case Fault.STRIP:
                answer = await forward(without=rule.header)
        call.status = answer.status
        return answer


def _named(request: web.Request) -> tuple[str, str, str]:
    """Return the operation, the path and the access key of a call."""
    access_key, service = signature_of(request) or ("", "s3")
    if target := request.headers.get("X-Amz-Target"):
        return f"sqs:{target.rpartition('.')[2]}", request.path, access_key
    if service != "s3":
        last = request.path.rpartition("/")[2]
        return f"{service}:{_RUNTIME_CALLS.get(last, request.method)}", request.path, access_key
    whose = "Object" if request.path.strip("/").count("/") else "Bucket"
    listing = whose == "Bucket" and request.method == "GET"
    verb = {"GET": "Get", "PUT": "Put", "HEAD": "Head", "DELETE": "Delete", "POST": "Post"}.get(request.method, "")
    return f"s3:{'ListObjects' if listing else verb + whose}", request.path, access_key


def _error(call: ProxiedCall, rule: Rule) -> web.Response:
    message = "An injected fault."
    if not call.access_key:
        # A server of agents answers in this format.
        return web.json_response({"error": rule.code, "detail": message}, status=rule.status)
    if call.operation.startswith("s3:"):
        text = f"<?xml version='1.0'?><Error><Code>{escape(rule.code)}</Code><Message>{message}</Message></Error>"
        return web.Response(status=rule.status, text=text, content_type="application/xml")
    return web.Response(
        status=rule.status,
        text=json.dumps({"__type": f"com.amazonaws#{rule.code}", "message": message}),
        headers={"x-amzn-ErrorType": rule.code},
        content_type="application/x-amz-json-1.0",
    )


def _accepted(body: bytes) -> web.Response:
    sent = json.loads(body)["MessageBody"]
    digest = hashlib.md5(sent.encode(), usedforsecurity=False).hexdigest()
    answer = {"MessageId": str(uuid4()), "MD5OfMessageBody": digest}
    return web.Response(text=json.dumps(answer), content_type="application/x-amz-json-1.0")


def _cut(request: web.Request) -> web.StreamResponse:
    """Reset the connection, like a machine that was lost."""
    transport = request.transport
    if transport is not None:
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
    # The connection is closed, so this response is never sent.
    return web.Response(status=499)


def _half(answer: web.Response) -> bytes:
    assert isinstance(answer.body, bytes)
    return answer.body[: len(answer.body) // 2]


def _cut_body(request: web.Request, answer: web.Response, fault: Fault) -> web.StreamResponse:
    """Send the head and half of the body, and end the connection."""
    transport = request.transport
    if transport is None:
        return web.Response(status=499)
    assert isinstance(answer.body, bytes)
    headers = [f"{name}: {value}" for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP]
    headers += ["Connection: close"] if fault is Fault.NO_LENGTH else [f"Content-Length: {len(answer.body)}"]
    head = "\r\n".join([f"HTTP/1.1 {answer.status} {answer.reason}", *headers, "", ""])
    transport.write(head.encode() + _half(answer))
    if fault is Fault.RESET_BODY:
        return _cut(request)
    transport.close()
    # The connection is closed, so this response is never sent.
    return web.Response(status=499)


async def _send_slowly(request: web.Request, answer: web.Response, seconds: float) -> web.StreamResponse:
    assert isinstance(answer.body, bytes)
    slow = web.StreamResponse(status=answer.status, headers=answer.headers)
    slow.content_length = len(answer.body)
    await slow.prepare(request)
    piece = max(1, len(answer.body) // 10)
    for start in range(0, len(answer.body), piece):
        await asyncio.sleep(seconds / 10)
        await slow.write(answer.body[start : start + piece])
    return slow
