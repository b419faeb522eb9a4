"""Frames, proofs, routes and channels in isolation."""

import asyncio

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_backend.model.relay.exchange import WINDOW, CallLost, Channel
from rollout_backend.model.relay.forwarding import forwarded_headers, route
from rollout_backend.model.relay.protocol import (
    MAX_CALLS,
    MAX_CHUNK,
    MAX_FRAME,
    Ack,
    Challenge,
    Chunk,
    End,
    FrameError,
    Head,
    Hello,
    Open,
    Resume,
    Welcome,
    decode,
    encode,
    make_hello,
    verify_dialer,
    verify_relay,
)

things = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=20) | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


messages = st.binary(max_size=200) | st.tuples(st.integers(-2, 12), st.lists(things, max_size=6)).map(
    lambda drawn: msgpack.packb([drawn[0], *drawn[1]])
)


@given(messages)
def test_invalid_messages_are_refused(message):
    try:
        frame = decode(message)
    except FrameError:
        return
    assert decode(encode(frame)) == frame


@pytest.mark.parametrize(
    "frame",
    [
        Chunk(1, 0, b"x" * (MAX_CHUNK + 1)),
        Chunk(-1, 0, b""),
        Head(1, 0, 101, ()),
        Open(1, 0, "GET", "/" * 9000, (), False),
        Challenge(1, "short", b"n" * 32),
        Hello(1, "d" * 32, b"n" * 31, b"p" * 32),
        Resume(((1, 2),) * (MAX_CALLS + 1)),
        Ack(1, True),
    ],
    ids=repr,
)
def test_values_out_of_bounds_are_refused(frame):
    with pytest.raises(FrameError, match=type(frame).__name__):
        decode(encode(frame))


def test_largest_frames_fit_into_a_message():
    assert len(encode(Resume(tuple((2**53 - 1 - i, 2**40) for i in range(MAX_CALLS))))) < 2 * MAX_FRAME
    assert len(encode(Resume(tuple((i, 100) for i in range(MAX_CALLS))))) < MAX_FRAME


# --- the handshake ----------------------------------------------------------------------------------------

K = "k" * 32
CHALLENGE = Challenge(1, "r" * 32, b"1" * 32)


@pytest.mark.parametrize(
    "other",
    [
        {"proof": b"p" * 32},
        {"dialer_id": "e" * 32},
        {"nonce": b"2" * 32},
    ],
)
def test_proof_is_valid_for_one_handshake(other):
    said = make_hello(K, CHALLENGE, "d" * 32)
    assert not verify_dialer(K, CHALLENGE, said._replace(**other))
    assert not verify_dialer("x" * 32, CHALLENGE, said)
    assert not verify_dialer(K, CHALLENGE._replace(nonce=b"9" * 32), said)
    assert not verify_dialer(K, CHALLENGE._replace(relay_id="s" * 32), said)
    assert not verify_relay(K, CHALLENGE, said, Welcome(said.proof))


# --- routes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "to"),
    [
        ("/v1/chat/completions", ("", "/v1/chat/completions")),
        ("/v1/models?a=b/../c", ("", "/v1/models?a=b/../c")),
        ("/s/3/v1/messages?beta=true", ("3", "/v1/messages?beta=true")),
        ("/v1/models/a.b:c@d", ("", "/v1/models/a.b:c@d")),
        ("/v1/models/a%2Fb", ("", "/v1/models/a%2Fb")),
        ("/k/a.b-c_d/v1/v1/messages", ("", "/k/a.b-c_d/v1/v1/messages")),
        ("/s/3/k/a.b/v1/models?x", ("3", "/k/a.b/v1/models?x")),
        ("/s/3/v1/", ("3", "/v1/")),
    ],
)
def test_allowed_paths(path, to):
    assert route(path) == to


@pytest.mark.parametrize(
    "path",
    ["", "/", "/v1/%2F", "/v1/./x", "/v1/../x", "/v1/x/..", "/v1//x", "/v1/%41", "/v1/x#y", "/v1/x y", "/v1/x\n",
     "/v1/x\\y", "/v1/é", "/v1/..%2fx", "/v1/x%2F..%2Fy", "/v2/x", "/control/stats",
     "/s/a/b/v1/x", "/s//v1/x", "/s/../v1/x", "/s/1/control/x",
     "/k/v1/x", "/k/a/control/stats", "/k/../v1/x", "/k/a/b/v1/x", "/k/a/s/1/v1/x", "/k/%41/v1/x",
     "http://h/v1/x", "//h/v1/x", "/v1/x?a\r\nb", "/v1x/y"],
)  # fmt: skip
def test_refused_paths(path):
    assert route(path) is None


def test_hop_by_hop_headers_are_removed():
    sent = [("Host", "a"), ("Connection", "keep-alive, X-Own"), ("X-Own", "1"), ("Transfer-Encoding", "chunked"),
            ("TE", "x"), ("Upgrade", "h2c"), ("Authorization", "Bearer k"), ("Content-Length", "3"), ("a", "1"), ("a", "2")]  # fmt: skip  # noqa: E501
    assert forwarded_headers(sent) == (("Authorization", "Bearer k"), ("Content-Length", "3"), ("a", "1"), ("a", "2"))


@pytest.mark.parametrize(
    "header", [("a", "b\r\nc: d"), ("a b", "c"), ("a:", "b"), ("a", "é"), ("", "x"), ("a", "x" * 65536)]
)
def test_invalid_headers_are_refused(header):
    with pytest.raises(ValueError, match="headers"):
        forwarded_headers([header])


# --- channels ---------------------------------------------------------------------------------------------


class Pair:
    """The two ends of one call, and the frames in transit."""

    def __init__(self) -> None:
        self.there: list[bytes] = []
        self.back: list[bytes] = []
        self.a = Channel(1, self.there.append)
        self.b = Channel(1, self.back.append)

    def carry(self, lose_after: int | None = None) -> None:
        for wire, end in ((self.there, self.b), (self.back, self.a)):
            messages, wire[:] = wire[:lose_after], []
            for message in messages:
                match decode(message):
                    case Ack(consumed=consumed):
                        end.on_ack(consumed)
                    case frame:
                        end.on_frame(frame)

    def reconnect(self) -> None:
        self.there.clear()
        self.back.clear()
        wanted_by_a, wanted_by_b = self.a.next_expected, self.b.next_expected
        self.a.resume(wanted_by_b)
        self.b.resume(wanted_by_a)


@given(st.data())
async def test_frames_arrive_once_and_in_order_after_any_loss(data):
    pair = Pair()
    sent = [bytes([n]) * size for n, size in enumerate(data.draw(st.lists(st.integers(0, MAX_CHUNK), max_size=30)))]
    got = []

    async def send() -> None:
        for part in sent:
            await pair.a.send(Chunk, part)
        await pair.a.send(End)

    sending = asyncio.create_task(send())
    draws = 0
    while not (sending.done() and got and isinstance(got[-1], End)):
        await asyncio.sleep(0)
        draws += 1
        if draws < 60 and data.draw(st.booleans()):
            pair.carry(data.draw(st.integers(0, 3)))  # the rest is lost
            pair.reconnect()
        else:
            pair.carry()
        assert pair.a._kept_bytes <= WINDOW
        assert pair.b._waiting_bytes <= WINDOW
        while pair.b._waiting and (draws >= 60 or data.draw(st.booleans())):
            got.append(await pair.b.receive())
            pair.b.mark_processed(now=isinstance(got[-1], End))
    assert [frame.data for frame in got[:-1]] == sent
    pair.carry()
    async with asyncio.timeout(60):
        await pair.a.drain()


async def test_sender_waits_for_the_window_and_wakes_on_failure():
    pair = Pair()
    for _ in range(3):
        await pair.a.send(Chunk, b"x" * MAX_CHUNK)
    full = asyncio.create_task(pair.a.send(Chunk, b"x" * MAX_CHUNK))
    waiting = asyncio.create_task(pair.a.receive())
    await asyncio.sleep(0)
    assert not full.done()
    pair.a.fail(CallLost(502, "gone"))
    for task in (full, waiting):
        with pytest.raises(CallLost, match="gone"):
            await task
    with pytest.raises(CallLost):
        await pair.a.send(End)


async def test_received_frames_are_returned_before_a_failure():
    pair = Pair()
    pair.b.on_frame(End(1, 0))
    pair.b.fail(CallLost(502, "gone"))
    assert isinstance(await pair.b.receive(), End)
    pair.b.mark_processed()
    with pytest.raises(CallLost):
        await pair.b.receive()


async def test_a_resume_after_more_than_was_sent_is_refused():  # other breaches: test_hostile.py
    with pytest.raises(FrameError, match="is expected"):
        Pair().a.resume(1)
