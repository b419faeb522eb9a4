"""Call a gateway as many agents at once.

Each session sends its history once, before the measurement. Then it sends the whole conversation again with each
call, as OpenAI's client does. Bodies are bytes that only grow, so a call costs this process 45 us. With a rate,
it is timed from when it was due, even if the one before it was late.
"""

import asyncio
import json
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Iterator, Sequence
from typing import Any, Self
from urllib.parse import urlsplit

from common import cpu_s, resident_bytes, unverified_tls


class Connection(asyncio.Protocol):
    """A kept connection, with one request at a time. A call costs 25 us: a response is read before it is parsed."""

    transport: Any = None

    def __init__(self) -> None:
        self._read = bytearray()
        self._answer: asyncio.Future[bytes] | None = None

    @classmethod
    async def open(cls, host: str | None, port: int | None, tls: ssl.SSLContext | None = None) -> Self:
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, port, ssl=tls)
        return connection

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error or ConnectionResetError("the server closed the connection"))

    def call(self, request: bytes) -> Awaitable[bytes]:
        """Return the whole response, head included."""
        self._read.clear()
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._read += data
        if self._answer is not None and not self._answer.done() and self._is_whole():
            self._answer.set_result(bytes(self._read))

    def _is_whole(self) -> bool:
        head, end, _ = bytes(self._read[:2000]).partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower():
            return self._read.endswith(b"0\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        return bool(end) and len(self._read) >= len(head) + 4 + int(length)


class Session:
    """One conversation. `rest` is a body without its messages, and `results` are those of the tool."""

    def __init__(
        self, url: str, key: str, history: Sequence[Any], rest: dict[str, Any], results: Iterator[str]
    ) -> None:
        where = urlsplit(url)
        self._where = where.hostname, where.port, unverified_tls() if where.scheme == "https" else None
        self._head = (
            f"POST {where.path} HTTP/1.1\r\nHost: {where.netloc}\r\nAccept: application/json\r\n"
            "Content-Type: application/json\r\nUser-Agent: OpenAI/Python 2.8.1\r\nX-Stainless-Lang: python\r\n"
            f"X-Stainless-Retry-Count: 0\r\nAuthorization: Bearer {key}\r\nContent-Length: "
        ).encode()
        self._messages = ",".join(map(_json, history)).encode()
        self._rest = b"]," + _json(rest).encode()[1:]
        self._results = results
        self._connection = Connection()

    async def call(self) -> None:
        """Send the conversation, and add the reply and a tool's result to it. Raises ValueError with the status."""
        body = b'{"messages":[' + self._messages + self._rest
        response = await self._send(b"%s%d\r\n\r\n%s" % (self._head, len(body), body))
        reply = _streamed(response) if b"chunked" in response[:500] else _message(response)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": next(self._results)}
            for call in reply["tool_calls"]
        ]
        self._messages += b"," + ",".join(map(_json, [reply, *results])).encode()

    async def fetch_trajectory(self) -> bytes:
        """Return the response with the sealed trajectory. Raises ValueError with the status."""
        _, _, rest = self._head.partition(b" HTTP/1.1")
        return await self._send(b"POST /v1/rollout/trajectory HTTP/1.1" + rest + b"0\r\n\r\n")

    async def _send(self, request: bytes) -> bytes:
        try:
            response = await self._send_once(request)
        except ConnectionError:  # closed after it was idle, when the request was on its way: all clients retry
            response = await self._send_once(request)
        if response[9:12] != b"200":
            raise ValueError(f"HTTP {response[9:12].decode()}")
        return response

    async def _send_once(self, request: bytes) -> bytes:
        if self._connection.transport is None or self._connection.transport.is_closing():
            self._connection = await Connection.open(*self._where)
        return await self._connection.call(request)


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _message(response: bytes) -> dict[str, Any]:
    """Return the reply as OpenAI's `message.model_dump(exclude_none=True)` does."""
    message = json.loads(response.partition(b"\r\n\r\n")[2])["choices"][0]["message"]
    return {name: value for name, value in message.items() if value is not None}


def _streamed(response: bytes) -> dict[str, Any]:
    """Return the reply of a stream, which is tool calls."""
    calls = []
    for line in response.split(b"\n"):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(event["error"].get("code", "error event"))
            for choice in event["choices"]:
                calls += choice["delta"].get("tool_calls") or ()
    plain = [{name: value for name, value in call.items() if name != "index"} for call in calls]
    return {"role": "assistant", "tool_calls": plain}


async def generate(
    sessions: Sequence[Session], pid: int, turns: int, rate: float | None, in_flight: int
) -> dict[str, Any]:
    """Let all sessions call the server of this process `turns` times, and return what was measured.

    `rate` is of all calls per second. Without it `in_flight` sessions call at a time, without a pause.

    Raises:
        OSError, ValueError: a session could not be opened.
    """
    resident = resident_bytes(pid)
    for at in range(0, len(sessions), in_flight):
        await asyncio.gather(*(session.call() for session in sessions[at : at + in_flight]))
    spent_s, began = cpu_s(pid), time.monotonic()
    took: list[float] = []
    errors: Counter[str] = Counter()
    at_once = in_flight if rate is None else len(sessions)

    async def converse(i: int) -> None:
        for turn in range(turns):
            due = time.monotonic() if rate is None else began + (turn * len(sessions) + i) / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            try:
                await sessions[i].call()
            except (OSError, ValueError) as error:
                errors[str(error)] += 1
                return
            took.append(time.monotonic() - due)

    async def work(first: int) -> None:
        for i in range(first, len(sessions), at_once):
            await converse(i)

    await asyncio.gather(*map(work, range(at_once)))
    return {
        "took": took,
        "calls_per_s": len(took) / (time.monotonic() - began),
        "cpu_ms": 1000 * (cpu_s(pid) - spent_s) / len(took),
        "session_kib": (resident_bytes(pid) - resident) / len(sessions) / 1024,
        "errors": ", ".join(f"{count} {error}" for error, count in errors.items()),
    }
