"""A proxy in front of an AWS endpoint that does to calls what networks and services do to them.

    async with FaultProxy(storage.endpoint_url, [Rule("s3:PutObject", Fault.CUT_AFTER, share=0.2)], seed=1) as proxy:
        ...  # clients are given proxy.url in the place of the endpoint

What must always hold: a call that no rule hits passes unchanged, its Host too, so that its signature still verifies;
by one seed the n-th call of an operation on a path is hit or not, whatever happens beside it; each call stands in
`calls`.

Operations have the names of AWS's permissions: `s3:PutObject`, `sqs:SendMessage`,
`bedrock-agentcore:StopRuntimeSession`.
Understood are path-style S3 and SQS's JSON protocol, which is what boto3 speaks to an endpoint of one's own.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
import socket
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Self
from uuid import uuid4
from xml.sax.saxutils import escape

import aiohttp
import yarl
from aiohttp import web

_HOP_BY_HOP = frozenset({"connection", "expect", "keep-alive", "transfer-encoding", "content-length"})
_CREDENTIAL = re.compile(r"Credential=([^/&,]+)/\d+/[^/]+/([^/]+)/aws4_request")
_RUNTIME_CALLS = {"invocations": "InvokeAgentRuntime", "stopruntimesession": "StopRuntimeSession"}
_MAX_BYTES = 2**30


class Fault(StrEnum):
    """What is done to a call."""

    FAIL = "fail"  # answered with an error; the service is not asked
    HANG = "hang"  # not answered; the service is asked after `seconds`, or never if they are 0
    CUT_BEFORE = "cut_before"  # the connection is reset; the service is not asked
    CUT_AFTER = "cut_after"  # the service does its work, and the connection is reset before its answer
    DROP = "drop"  # a SendMessage is answered as if it had been taken; the service is not asked
    DOUBLE = "double"  # the service is asked twice, and its second answer passed on
    DELAY = "delay"  # the service is asked after up to `seconds`, and others overtake


@dataclass
class Rule:
    """Which calls are hit, and how. Of the rules that match a call the first that hits it is carried out."""

    operation: str  # as in `Call`; a pattern, as of file names: `s3:*`
    fault: Fault
    share: float = 1.0  # of the calls that match, by the proxy's seed
    times: int | None = None  # so many hits, then no more
    once_each: bool = False  # the same object or message is hit once at most, so that another try works
    access_key: str = "*"  # only calls that were signed with this one; a pattern
    status: int = 503
    code: str = "ServiceUnavailable"
    seconds: float = 0.0
    hits: int = 0
    _nth: Counter[str] = field(default_factory=Counter, repr=False)
    _seen: set[bytes] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        if self.fault is Fault.DROP and self.operation != "sqs:SendMessage":
            raise ValueError(f"{self.operation} cannot be dropped: only of sqs:SendMessage is the answer known")

    def hit(self, call: Call, body: bytes, seed: int) -> bool:
        """Whether this call is hit. Counts it if so."""
        if not (fnmatchcase(call.operation, self.operation) and fnmatchcase(call.access_key, self.access_key)):
            return False
        which = f"{call.operation} {call.path}"
        self._nth[which] += 1
        lot = random.Random(f"{seed} {self.fault} {which} {self._nth[which]}").random()  # noqa: S311  # no secret
        same = hashlib.sha256(f"{which} ".encode() + body).digest() if self.once_each else b""
        if lot >= self.share or same in self._seen or (self.times is not None and self.hits >= self.times):
            return False
        if self.once_each:
            self._seen.add(same)
        self.hits += 1
        return True


@dataclass
class Call:
    """One call, as it came."""

    operation: str
    path: str
    access_key: str  # empty: it was not signed
    fault: Fault | None = None
    status: int | None = None  # of the answer; None: none was given


class FaultProxy:
    """Enter it. `rules` may be changed meanwhile; calls that are being held stay so."""

    def __init__(self, upstream: str, rules: Iterable[Rule] = (), seed: int = 0) -> None:
        self.rules = list(rules)
        self.calls: list[Call] = []
        self._upstream = upstream.rstrip("/")
        self._seed = seed
        self._http: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=_MAX_BYTES)
        app.router.add_route("*", "/{path:.*}", self._serve)
        # A call that hangs is over once its client has hung up.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
        self._http = aiohttp.ClientSession(
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._runner is not None
        assert self._http is not None
        await self._runner.cleanup()
        await self._http.close()

    def count(self, operation: str, fault: Fault | None = None) -> int:
        """Calls so far of an operation, or those of them to which this was done."""
        return sum(call.operation == operation and fault in (None, call.fault) for call in self.calls)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        call = Call(*_named(request))
        self.calls.append(call)
        rule = next((rule for rule in self.rules if rule.hit(call, body, self._seed)), None)
        call.fault = rule.fault if rule is not None else None
        match call.fault:
            case Fault.FAIL:
                assert rule is not None
                answer: web.StreamResponse = _error(call, rule)
            case Fault.HANG:
                assert rule is not None
                await asyncio.sleep(rule.seconds or 1e9)
                answer = await self._pass_on(request, body)
            case Fault.CUT_BEFORE:
                return _cut(request)
            case Fault.CUT_AFTER:
                await self._pass_on(request, body)
                return _cut(request)
            case Fault.DROP:
                answer = _as_if_taken(body)
            case Fault.DOUBLE:
                await self._pass_on(request, body)
                answer = await self._pass_on(request, body)
            case Fault.DELAY:
                assert rule is not None
                lot = random.Random(f"{self._seed} {rule.hits}").random()  # noqa: S311  # no secret
                await asyncio.sleep(lot * rule.seconds)
                answer = await self._pass_on(request, body)
            case None:
                answer = await self._pass_on(request, body)
        call.status = answer.status
        return answer

    async def _pass_on(self, request: web.Request, body: bytes) -> web.Response:
        assert self._http is not None
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP]
        url = yarl.URL(self._upstream + request.raw_path, encoded=True)  # as it was signed
        try:
            async with self._http.request(
                request.method, url, headers=headers, data=body, allow_redirects=False
            ) as reply:
                content = await reply.read()
        except aiohttp.ClientError as error:
            return web.Response(status=502, text=f"no answer from {self._upstream}: {error}")
        answer = web.Response(status=reply.status, body=content)
        answer.headers.popall("Content-Type", None)
        for name, value in reply.headers.items():
            if name.lower() not in _HOP_BY_HOP:
                answer.headers.add(name, value)
        if request.method == "HEAD":
            answer.headers["Content-Length"] = reply.headers.get("Content-Length", "0")
        return answer


def _named(request: web.Request) -> tuple[str, str, str]:
    """The operation, the path and the access key of a call."""
    signature = request.headers.get("Authorization") or "Credential=" + request.query.get("X-Amz-Credential", "")
    found = _CREDENTIAL.search(signature)
    access_key, service = found.groups() if found else ("", "s3")
    if target := request.headers.get("X-Amz-Target"):
        return f"sqs:{target.rpartition('.')[2]}", request.path, access_key
    if service != "s3":
        last = request.path.rpartition("/")[2]
        return f"{service}:{_RUNTIME_CALLS.get(last, request.method)}", request.path, access_key
    whose = "Object" if request.path.strip("/").count("/") else "Bucket"
    listing = whose == "Bucket" and request.method == "GET"
    verb = {"GET": "Get", "PUT": "Put", "HEAD": "Head", "DELETE": "Delete", "POST": "Post"}.get(request.method, "")
    return f"s3:{'ListObjects' if listing else verb + whose}", request.path, access_key


def _error(call: Call, rule: Rule) -> web.Response:
    message = "A fault on purpose."
    if call.operation.startswith("s3:"):
        text = f"<?xml version='1.0'?><Error><Code>{escape(rule.code)}</Code><Message>{message}</Message></Error>"
        return web.Response(status=rule.status, text=text, content_type="application/xml")
    return web.Response(
        status=rule.status,
        text=json.dumps({"__type": f"com.amazonaws#{rule.code}", "message": message}),
        headers={"x-amzn-ErrorType": rule.code},
        content_type="application/x-amz-json-1.0",
    )


def _as_if_taken(body: bytes) -> web.Response:
    sent = json.loads(body)["MessageBody"]
    digest = hashlib.md5(sent.encode(), usedforsecurity=False).hexdigest()
    answer = {"MessageId": str(uuid4()), "MD5OfMessageBody": digest}
    return web.Response(text=json.dumps(answer), content_type="application/x-amz-json-1.0")


def _cut(request: web.Request) -> web.StreamResponse:
    """Resets the connection, as a machine does that has gone."""
    transport = request.transport
    if transport is not None:
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
    return web.Response(status=499)  # to nobody
