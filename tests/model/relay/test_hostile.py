"""Hostile peers: invalid messages to the relay, and a relay that an attacker controls."""

import asyncio
import contextlib

import aiohttp
import pytest
from aiohttp import web

from builders import eventually, skip
from rollout_backend.base.waiting_connections import HEAD_S
from rollout_backend.model.relay.exchange import Close
from rollout_backend.model.relay.protocol import (
    VERSION,
    Ack,
    Challenge,
    Chunk,
    End,
    Head,
    Hello,
    Open,
    Resume,
    decode,
    encode,
    make_hello,
    make_welcome,
)
from rollout_backend.model.relay.relay_server import _HANDSHAKES


async def door(http, url: str) -> tuple[aiohttp.ClientWebSocketResponse, Challenge]:
    socket = await http.ws_connect(f"{url}/relay")
    return socket, decode((await socket.receive()).data)


NONSENSE = {
    "text": "hello",
    "no msgpack": b"\xc1",
    "not at the door": encode(Resume(())),
    "a proof of nothing": encode(Hello(VERSION, "d" * 32, b"n" * 32, b"p" * 32)),
    "another version": encode(Hello(VERSION + 1, "d" * 32, b"n" * 32, b"p" * 32)),
}
CODES = {"a proof of nothing": Close.WRONG_KEY, "another version": Close.WRONG_VERSION}


@pytest.mark.parametrize("what", NONSENSE)
async def test_invalid_handshake_messages_are_refused(line, http, what, get):
    laid = await line()
    socket, _ = await door(http, laid.url)
    said = NONSENSE[what]
    await (socket.send_str(said) if isinstance(said, str) else socket.send_bytes(said))
    assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
    assert socket.close_code == CODES.get(what, Close.BROKEN_FRAME)
    assert (await get(f"{laid.url}/v1/x")).status == 200


async def test_proof_cannot_be_replayed(line, http, key):
    laid = await line()
    first, challenge = await door(http, laid.url)
    said = make_hello(key, challenge, "d" * 32)
    second, other = await door(http, laid.url)
    assert other.nonce != challenge.nonce
    await second.send_bytes(encode(said))
    assert (await second.receive()).type is aiohttp.WSMsgType.CLOSE
    assert second.close_code == Close.WRONG_KEY
    await first.close()
    assert await laid.relay.dialled(laid.dialer._settings.dialer_id)


async def test_strangers_do_not_lock_the_dialer_out(line, get):
    laid = await line()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as strangers:
        sockets = [each for each, _ in await asyncio.gather(*(door(strangers, laid.url) for _ in range(_HANDSHAKES)))]
        last, _ = await door(strangers, laid.url)
        received = [asyncio.create_task(each.receive()) for each in sockets]
        await asyncio.wait(received, return_when=asyncio.FIRST_COMPLETED)  # the oldest made room
        for each in received:
            each.cancel()
        await asyncio.gather(*received, return_exceptions=True)
        assert (await get(f"{laid.url}/v1/x")).status == 200
        await asyncio.gather(*(each.close() for each in [*sockets, last]))


async def test_a_stranger_sends_little(line, http):
    laid = await line()
    socket, _ = await door(http, laid.url)
    await socket.send_bytes(b"\x92\x01" + b"\xdc\xff\xff" * 21_000)
    assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
    assert socket.close_code == Close.BROKEN_FRAME


HEAD = b"POST /elsewhere HTTP/1.1\r\nHost: x\r\n"
REQUEST = HEAD + b"Content-Length: 0\r\n\r\n"


@pytest.fixture
async def connect():
    """`connect(relay, data)` sends data over a new connection."""
    writers = []

    async def start(relay, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        writers.append(writer)
        writer.write(data)
        return reader, writer

    yield start
    for writer in writers:
        writer.transport.abort()


async def not_found(reader: asyncio.StreamReader) -> None:
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 404 ")
    await reader.readuntil(b"}}")


async def test_a_connection_without_a_request_is_closed(host_relay, connect):
    relay = await host_relay(head_s=0.01)
    for begin in (b"", HEAD):
        reader, _ = await connect(relay, begin)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""


async def test_a_further_request_arrives_in_time_too(host_relay, connect):
    reader, writer = await connect(await host_relay(head_s=HEAD_S), REQUEST)
    await not_found(reader)
    writer.write(HEAD)
    for _ in range(100):  # the relay has read it
        await asyncio.sleep(0)
    skip(HEAD_S)
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""


async def test_a_body_that_outlasts_its_answer_is_no_further_request(host_relay, connect):
    reader, writer = await connect(await host_relay(head_s=HEAD_S), HEAD + b"Content-Length: 2\r\n\r\n")
    await not_found(reader)
    for byte in b"ab":
        writer.write(bytes([byte]))
        for _ in range(100):
            await asyncio.sleep(0)
    skip(HEAD_S)
    writer.write(REQUEST)
    await not_found(reader)


async def test_new_connections_replace_silent_ones_but_no_call(line, host_relay, connect, get):
    relay = await host_relay(max_connections=5)
    laid = await line(relay)
    go = laid.upstream.hold()
    call = await laid.held_call(get)
    kept, again = await connect(relay, REQUEST)
    await not_found(kept)
    silent = [await connect(relay) for _ in range(8)]
    for reader, _ in silent[:5]:
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    again.write(REQUEST)
    await not_found(kept)
    for reader, _ in [await connect(relay, REQUEST) for _ in range(5)][:1]:  # the idle ones follow
        await not_found(reader)
    go.set()
    assert (await call).status == 200


async def test_an_agent_that_does_not_read_its_answer_frees_its_place(line, host_relay, connect, get):
    laid = await line(await host_relay(read_s=0.01, max_calls=1))

    async def long(_: web.Request) -> web.StreamResponse:
        return web.Response(body=b"a" * 2**26)

    laid.upstream.handle = long
    await connect(laid.relay, b"GET /v1/x HTTP/1.1\r\nHost: x\r\n\r\n")
    await eventually(lambda: laid.upstream.asked)
    laid.upstream.handle = None

    async def answered() -> bool:
        return (await get(f"{laid.url}/v1/x")).status == 200

    await eventually(answered)


class FalseRelay:
    """A relay that knows the key, like a compromised one, and sends what the test says."""

    def __init__(self, upstream, key: str) -> None:
        self.sockets: asyncio.Queue[web.WebSocketResponse] = asyncio.Queue()
        self.id = "r" * 32
        self.calls = ()  # calls that it claims to know
        self.told: list[Resume] = []
        self.go = asyncio.Event()  # answers to calls wait for it
        self.go.set()
        self.dials = 0
        self.foreign: list[tuple[aiohttp.WSMsgType, bytes]] = []  # messages of another server, one for each dial
        self._key = key
        upstream.handle = self.relay
        self.url = upstream.url.replace("http", "ws")

    async def relay(self, request: web.Request) -> web.StreamResponse:
        if request.path != "/relay":
            await self.go.wait()
            return web.json_response(request.raw_path)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.dials += 1
        self.transport = request.transport
        if self.foreign:
            kind, message = self.foreign.pop()
            await socket.send_frame(message, kind)
            await socket.receive()
            return socket
        challenge = Challenge(VERSION, self.id, b"n" * 32)
        await socket.send_bytes(encode(challenge))
        self.said = decode((await socket.receive()).data)
        await socket.send_bytes(encode(make_welcome(self._key, challenge, self.said)))
        await socket.send_bytes(encode(Resume(self.calls)))
        if (answer := await socket.receive()).type is not aiohttp.WSMsgType.BINARY:
            return socket  # it was refused
        self.told.append(decode(answer.data))
        self.sockets.put_nowait(socket)
        await asyncio.Event().wait()
        return socket


@pytest.fixture
async def false_relay(upstream, dial, key):
    relay = FalseRelay(upstream, key)
    dial(relay.url, upstream.url)
    return relay


async def test_dialer_tells_a_relay_without_the_key_nothing(dial, upstream, key):
    """The relay admits the dialer, but cannot prove that it knows the key."""
    relay = FalseRelay(upstream, "another-key-" * 4)
    _, task = dial(relay.url, upstream.url)
    await eventually(lambda: task.done() or relay.dials == 2)
    assert not task.done()
    assert key.encode() not in encode(relay.said)
    assert relay.told == []


async def test_messages_of_another_server_do_not_end_the_dialer(dial, upstream, key):
    relay = FalseRelay(upstream, key)
    relay.foreign = [(aiohttp.WSMsgType.TEXT, b"hello"), (aiohttp.WSMsgType.BINARY, encode(Resume(())))]
    _, task = dial(relay.url, upstream.url)
    await eventually(lambda: task.done() or relay.told)
    assert relay.told == [Resume(())]


async def test_dialer_leaves_a_relay_whose_message_never_ends(dial, upstream, key):
    relay = FalseRelay(upstream, key)
    dial(relay.url, upstream.url, heartbeat_s=0.1)
    await relay.sockets.get()
    transport = relay.transport
    # The head of a binary message of 64 KiB.
    transport.write(b"\x82\x7e\xff\xff")

    async def has_left() -> bool:
        transport.write(b"x")
        return not relay.sockets.empty()

    await eventually(has_left)


async def answer_of(socket, call: int = 1) -> tuple[int, bytes]:
    status, body = 0, b""
    while True:
        match decode((await socket.receive()).data):
            case Head() as head:
                status = head.status
            case Chunk() as chunk:
                body += chunk.data
            case End():
                await socket.send_bytes(encode(Ack(call, 3)))
                return status, body


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/control/stats"),
        ("GET", "/s/9/v1/models"),
        ("PUT", "/v1/models"),
        ("GET", "http://elsewhere/v1/models"),
        ("GET", "@elsewhere/v1/models"),
        ("GET", "/v1/models\r\nX: y"),
    ],
)
async def test_hostile_relay_reaches_no_other_path(false_relay, upstream, method, path, get):
    socket = await false_relay.sockets.get()
    await socket.send_bytes(encode(Open(1, 0, method, path, (), False)))
    assert (await answer_of(socket))[0] == 404
    assert upstream.asked == ["/relay"]


async def test_hostile_relay_cannot_inject_headers(false_relay, upstream, get):
    socket = await false_relay.sockets.get()
    await socket.send_bytes(encode(Open(1, 0, "GET", "/v1/models", (("X-A", "b\r\nX-C: d"),), False)))
    assert (await answer_of(socket))[0] == 502
    await socket.send_bytes(encode(Open(2, 0, "GET", "/v1/models", (), False)))
    assert (await answer_of(socket, 2)) == (200, b'"/v1/models"')


async def test_hostile_relay_cannot_smuggle_requests(false_relay, upstream):
    relay = upstream.handle

    async def tells(request: web.Request) -> web.StreamResponse:
        names = ("Host", "Transfer-Encoding", "Connection", "Upgrade", "Content-Length")
        if request.path == "/relay":
            return await relay(request)
        return web.json_response([name for name in names if "bad" in request.headers.get(name, "")])

    upstream.handle = tells
    socket = await false_relay.sockets.get()
    bad = tuple((name, "bad") for name in ("Host", "Transfer-Encoding", "Connection", "Upgrade", "Content-Length"))
    await socket.send_bytes(encode(Open(1, 0, "GET", "/v1/models", bad, False)))
    assert await answer_of(socket) == (200, b"[]")


@pytest.mark.parametrize("started_again", [False, True])
async def test_calls_of_a_restarted_relay_are_new_calls(false_relay, upstream, started_again):
    """Call numbers restart with each relay: call 1 of the second is not call 1 of the first."""
    false_relay.go.clear()
    socket = await false_relay.sockets.get()
    await socket.send_bytes(encode(Open(1, 0, "GET", "/v1/first", (), False)))
    await eventually(lambda: "/v1/first" in upstream.asked)
    false_relay.calls = ((1, 0),)
    if started_again:
        false_relay.id = "s" * 32
    await socket.close()
    await false_relay.sockets.get()
    assert false_relay.told == [Resume(()), Resume(()) if started_again else Resume(((1, 1),))]


BREACHES = {
    "an ack of what was not sent": [Open(1, 0, "POST", "/v1/x", (), True), Ack(1, 99)],
    "a gap": [Open(1, 0, "POST", "/v1/x", (), True), Chunk(1, 2, b"")],
    "a frame a second time": [Open(1, 0, "POST", "/v1/x", (), True), Chunk(1, 1, b"x"), Chunk(1, 1, b"x")],
    "more than the window": [
        Open(1, 0, "POST", "/v1/x", (), True),
        *(Chunk(1, n, b"x" * 65536) for n in range(1, 9)),
    ],
    "a frame of the handshake": [Resume(())],
    "a call that does not begin at its beginning": [Open(1, 1, "GET", "/v1/x", (), False)],
}


@pytest.mark.parametrize("what", BREACHES)
async def test_protocol_error_ends_only_the_connection(false_relay, upstream, what):
    false_relay.go.clear()
    socket = await false_relay.sockets.get()
    for frame in BREACHES[what]:
        await socket.send_bytes(encode(frame))
    while (message := await socket.receive()).type is aiohttp.WSMsgType.BINARY:
        pass
    assert message.type is aiohttp.WSMsgType.CLOSE
    assert message.data == Close.BROKEN_FRAME
    false_relay.go.set()
    socket = await false_relay.sockets.get()  # the dialer has reconnected
    await socket.send_bytes(encode(Open(7, 0, "GET", "/v1/models", (), False)))
    assert await answer_of(socket, 7) == (200, b'"/v1/models"')
