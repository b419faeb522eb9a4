"""New connections, which wait for their turn unless their session is known."""

import asyncio
import contextlib
import socket

import pytest

from builders import until
from gateway_server import ServerThread, session_key
from rollout_backend.base import connection_pace
from rollout_backend.base.connection_pace import ConnectionPace
from rollout_backend.base.waiting_connections import WaitingConnections
from rollout_backend.core.session_key import shorten
from rollout_backend.model.gateway.access import TRAJECTORY_HEADER, bounded_protocol, keys_in

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
KNOWN = b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer good\r\n\r\n"


async def app(scope, receive, send) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def made():
    """The protocols that `paced` has made."""
    return []


@pytest.fixture
def paced(monkeypatch, made):
    """A server that lets one unknown connection in, and then none in the time of a test."""
    monkeypatch.setattr(connection_pace, "_BURST_S", 0.0)
    monkeypatch.setattr(connection_pace, "_RATE", 1e-9)

    class Counted(bounded_protocol(1000, head_s=600)):
        def __init__(self, *args, **more) -> None:
            super().__init__(*args, **more)
            made.append(self)

    with ServerThread(app, known=lambda head: b"Bearer good" in head, http=Counted, ws="none") as server:
        yield server


@pytest.fixture
def connect(paced):
    """`connect(data)` is a connection that has sent this."""
    host, port = paced.url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as opened:

        def start(data: bytes = b"") -> socket.socket:
            connection = opened.enter_context(socket.create_connection((host, int(port)), timeout=120))
            connection.sendall(data)
            return connection

        yield start


def is_served(connection: socket.socket) -> bool:
    return connection.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_unknown_connections_wait_and_known_ones_do_not(connect, made):
    assert is_served(connect(REQUEST))
    waiting, late = [connect(REQUEST) for _ in range(20)], connect()
    assert is_served(connect(KNOWN))
    late.sendall(KNOWN)
    assert is_served(late)
    assert len(made) == 3
    for each in waiting:
        each.setblocking(False)
        with pytest.raises(BlockingIOError):
            each.recv(1)


async def test_connections_that_are_opened_and_closed_take_no_turn():
    pace = ConnectionPace(WaitingConnections(4), lambda: None, lambda _: False)
    pace.charge(1e6)
    pairs = [socket.socketpair() for _ in range(2)]
    for each in sum(pairs, ()):
        each.setblocking(False)
    (early, early_client), (late, late_client) = pairs
    early_client.close()
    pace._admit(early, "10.0.0.1")
    assert early.fileno() == -1
    pace._admit(late, "10.0.0.1")
    assert late.fileno() != -1
    late_client.close()
    [waiting] = pace._queues[b"10.0.0.1"]
    pace._look(waiting)
    assert late.fileno() == -1


def test_heads_that_are_refused_cost_their_time(connect, monkeypatch):
    monkeypatch.setattr(connection_pace, "_BURST_S", 1e6)
    charged = []
    charge = ConnectionPace.charge
    monkeypatch.setattr(ConnectionPace, "charge", lambda self, s: charged.append(s) or charge(self, s))
    assert connect(REQUEST[:-2] + b"a: b\r\n" * 8000 + b"\r\n").recv(1000).startswith(b"HTTP/1.1 431 ")
    until(lambda: len(charged) >= 2)
    assert all(seconds > 0 for seconds in charged)


async def test_addresses_take_turns_and_their_newest_connection_goes_first(monkeypatch):
    waiting, started = WaitingConnections(3), []
    pace = ConnectionPace(waiting, lambda: None, lambda _: False)
    monkeypatch.setattr(pace, "_start", lambda accepted: started.append(accepted))
    monkeypatch.setattr(connection_pace, "_RATE", 1e-9)
    pace.charge(1.0)
    pairs = [socket.socketpair() for _ in range(4)]
    for (accepted, _), host in zip(pairs, ["10.0.0.1", "10.0.0.1", "10.0.0.1", "2001:db8::1"], strict=True):
        accepted.setblocking(False)
        pace._admit(accepted, host)
    # The limit of connections holds for those that wait.
    assert pairs[0][0].fileno() == -1
    pace.charge(-1.0)
    for _ in range(3):
        pace._take_turn()
    assert started == [pairs[2][0], pairs[3][0], pairs[1][0]]
    assert not waiting._open
    for each, other in pairs:
        each.close()
        other.close()


async def test_a_connection_that_waits_for_too_long_is_closed(monkeypatch):
    monkeypatch.setattr(connection_pace, "_WAIT_S", 0.0)
    pace = ConnectionPace(WaitingConnections(4), lambda: None, lambda _: False)
    pace.charge(1e6)
    accepted, client = socket.socketpair()
    accepted.setblocking(False)
    with client:
        client.setblocking(False)
        pace._admit(accepted, "10.0.0.1")
        async with asyncio.timeout(120):
            assert await asyncio.get_running_loop().sock_recv(client, 1) == b""


def test_the_cost_of_a_known_connection_is_not_counted_later_either(monkeypatch):
    """As with TLS, where nothing can be read before the handshake."""
    monkeypatch.setattr(connection_pace, "_RATE", 1e-9)
    pace = ConnectionPace(WaitingConnections(4), lambda: None, lambda head: head == b"good")
    pace.charge(1.0)
    used_s = pace._used()
    assert not pace.recognizes(b"bad")
    assert pace.recognizes(b"good")
    assert pace._used() < used_s


def test_a_step_of_sessions_that_connect_at_once_does_not_wait(serve, monkeypatch):
    """There are more than may connect at once unless they are known."""
    monkeypatch.setattr(connection_pace, "_RATE", 1e-9)
    gateway = serve()
    host, port = gateway.url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as opened:
        connections = [
            opened.enter_context(socket.create_connection((host, int(port)), timeout=120)) for _ in range(400)
        ]
        for i, connection in enumerate(connections):
            [key] = gateway.headers(f"s{i}").values()
            connection.sendall(f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: {key}\r\n\r\n".encode())
        assert all(map(is_served, connections))


@pytest.mark.parametrize(
    "head",
    [
        "POST / HTTP/1.1\r\nauthorization:  bearer {key}\r\n",
        "POST / HTTP/1.1\r\nAuthorization: Bearer other\r\nX-Api-Key: {key}\r\nA: b",
        "POST /k/{key}/v1/messages HTTP/1.1\r\n",
        f"POST / HTTP/1.1\r\n{TRAJECTORY_HEADER.title()}: {{short}}\r\n",
    ],
)
def test_the_key_of_a_head_is_found(head):
    key = session_key("s1")
    assert key in keys_in(head.format(key=key, short=shorten(key)).encode())
