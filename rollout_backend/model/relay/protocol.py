"""Define the protocol between relay and dialer. Each message is a msgpack array in a binary WebSocket message.

A call is two streams of numbered frames: the request (`Open`, then `Chunk`s and an `End` if it has a body) and the
response (`Head`, `Chunk`s, then `End` or `Abort`). `Ack` and `Cancel` refer to a call and have no number. A
connection begins with `Challenge`, `Hello`, `Welcome` and one `Resume` from each side. Keepalive uses WebSocket
pings.

Any other message raises `FrameError`, because neither side trusts the other to send valid frames.

Both sides authenticate by challenge and response, with one key that is never sent. The dialer authenticates first, so
an unauthenticated client learns nothing from a relay, not even material for guessing the key. A proof covers both
ids, both nonces and its own side, so it cannot be replayed or reflected. After the handshake, only TLS protects the
traffic.
"""

import hashlib
import hmac
import secrets
from typing import Annotated, Literal, NamedTuple

import msgpack
from pydantic import Field, TypeAdapter, ValidationError

VERSION = 1
"""Version of this protocol. Sides with different versions refuse each other."""
MAX_CHUNK = 64 * 1024
"""Maximum body bytes in a frame."""
MAX_HEADERS = 64 * 1024
"""Maximum header bytes in a frame."""
MAX_PATH = 8 * 1024
MAX_FRAME = 1024 * 1024
"""Maximum bytes in a message. A `Resume` of 65,536 calls fits."""
MAX_CALLS = 65_536
"""Maximum number of calls on one link."""

Number = Annotated[int, Field(ge=0, lt=2**53)]
Id = Annotated[str, Field(min_length=16, max_length=64)]
Nonce = Annotated[bytes, Field(min_length=32, max_length=32)]
Proof = Annotated[bytes, Field(min_length=32, max_length=32)]
Headers = tuple[tuple[str, str], ...]
MIN_KEY_CHARS = 32
HANDSHAKE_S = 10.0
"""Time limit for the whole handshake."""


class FrameError(ValueError):
    """A message that is not a frame, or a frame that is not allowed at this point."""


class Challenge(NamedTuple):
    """From the relay: its id, and the nonce that the dialer's proof must cover."""

    version: int
    relay_id: Id
    nonce: Nonce


class Hello(NamedTuple):
    """From the dialer: its id, its proof, and the nonce that the relay's proof must cover."""

    version: int
    dialer_id: Id
    nonce: Nonce
    proof: Proof


class Welcome(NamedTuple):
    """From the relay: its proof. The dialer is admitted."""

    proof: Proof


class Resume(NamedTuple):
    """The calls that this side knows, each with the number of the next frame that it expects."""

    calls: Annotated[tuple[tuple[Number, Number], ...], Field(max_length=MAX_CALLS)]


class Open(NamedTuple):
    call: Number
    seq: Number
    method: Annotated[str, Field(max_length=16)]
    path: Annotated[str, Field(max_length=MAX_PATH)]
    """The path of the request line, with its query."""
    headers: Headers
    has_body: bool


class Head(NamedTuple):
    call: Number
    seq: Number
    status: Annotated[int, Field(ge=200, le=599)]
    headers: Headers


class Chunk(NamedTuple):
    call: Number
    seq: Number
    data: Annotated[bytes, Field(max_length=MAX_CHUNK)]


class End(NamedTuple):
    """The stream is complete."""

    call: Number
    seq: Number


class Abort(NamedTuple):
    """The response is incomplete."""

    call: Number
    seq: Number


class Ack(NamedTuple):
    """The sender has processed all frames of the call below this number; their memory can be freed."""

    call: Number
    consumed: Number


class Cancel(NamedTuple):
    """From the relay: the agent no longer waits for this call."""

    call: Number


Numbered = Open | Head | Chunk | End | Abort
Frame = Challenge | Hello | Welcome | Resume | Numbered | Ack | Cancel

_KINDS: tuple[type[Frame], ...] = (
    Challenge, Hello, Welcome, Resume, Open, Head, Chunk, End, Abort, Ack, Cancel
)  # fmt: skip
_CODES = {kind: code for code, kind in enumerate(_KINDS)}
_ADAPTERS = tuple(TypeAdapter[Frame](kind) for kind in _KINDS)


def encode(frame: Frame) -> bytes:
    packed: bytes = msgpack.packb((_CODES[type(frame)], *frame))
    return packed


def decode(message: bytes) -> Frame:
    """Decode a message. Raises FrameError if it is not a valid frame."""
    try:
        fields = msgpack.unpackb(message, use_list=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise FrameError(f"a message is not msgpack: {error}") from None
    if not isinstance(fields, tuple) or not fields or type(fields[0]) is not int or not 0 <= fields[0] < len(_KINDS):
        raise FrameError("a message of an unknown kind")
    try:
        return _ADAPTERS[fields[0]].validate_python(fields[1:], strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = _KINDS[fields[0]].__name__
        raise FrameError(f"a {name} whose {'.'.join(map(str, first['loc']))} is wrong: {first['msg']}") from None


def new_id() -> str:
    """Return a random process id."""
    return secrets.token_hex(16)


def new_nonce() -> bytes:
    return secrets.token_bytes(32)


def prove(
    key: str, side: Literal["dialer", "relay"], challenge: Challenge, dialer_id: str, dialer_nonce: bytes
) -> bytes:
    """Return a proof, valid for this handshake only, that a side knows the key."""
    parts = (b"rollout-relay", str(VERSION).encode(), side.encode(), challenge.relay_id.encode(), dialer_id.encode())
    digest = hmac.new(key.encode(), digestmod=hashlib.sha256)
    for part in (*parts, challenge.nonce, dialer_nonce):
        digest.update(len(part).to_bytes(4, "big") + part)
    return digest.digest()


def make_hello(key: str, challenge: Challenge, dialer_id: str) -> Hello:
    nonce = new_nonce()
    return Hello(VERSION, dialer_id, nonce, prove(key, "dialer", challenge, dialer_id, nonce))


def verify_dialer(key: str, challenge: Challenge, hello: Hello) -> bool:
    return hmac.compare_digest(prove(key, "dialer", challenge, hello.dialer_id, hello.nonce), hello.proof)


def make_welcome(key: str, challenge: Challenge, hello: Hello) -> Welcome:
    return Welcome(prove(key, "relay", challenge, hello.dialer_id, hello.nonce))


def verify_relay(key: str, challenge: Challenge, hello: Hello, welcome: Welcome) -> bool:
    return hmac.compare_digest(make_welcome(key, challenge, hello).proof, welcome.proof)
