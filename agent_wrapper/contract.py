"""The one vocabulary of both sides: what the backend asks of an agent's container and what comes back.

Both packages use these types and nothing else to talk to each other. What must always hold:

- A `Rollout` is self-contained: what was sampled, by which weights, what it was worth, and, if it failed,
  in which class and why. Nothing is filled in: a logprob that the engine did not give is NaN (JSON: null).
- Only a completed rollout, or an agent error that the agent itself scored, carries a reward.
- Where no tokens are known, only messages are (`Conversation`): such a rollout is complete, and not trainable.
- A result's key is fixed by its rollout id (`result_key`), so the first attempt to write it wins. An attempt that was
  lost to the infrastructure has no result: it leaves a notice under a key of its own (`notice_key`), so that it does
  not stand in the way of the next attempt.
- What was sampled carries the gateway's seal from the trajectory into the rollout, unread.
- An image that the model saw stands once in a rollout, under the SHA-256 of its bytes, by which segments name it.
- Whatever is malformed raises `ContractError`, which names the field.

Two encodings of the same fields are read: the compact one that `Rollout.encode` writes (msgpack in one zstd
frame, arrays as little-endian raw bytes), and plain JSON, so that an agent in any language can take part.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import re
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self, TypeVar, cast
from urllib.parse import quote, unquote_plus

import msgpack
import zstandard
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    StringConstraints,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import from_json

if TYPE_CHECKING:
    IntArray = array[int]
    FloatArray = array[float]
else:  # arrays take no parameter at run time before Python 3.12
    IntArray = FloatArray = array

SCHEMA_VERSION = 1
MAX_OBJECT_BYTES = 256 * 1024 * 1024  # of one object once unpacked; readers may set a lower cap
MAX_CONVERSATIONS = 1024  # of one rollout
MAX_MESSAGES = 10_000  # of one conversation
REQUEST_FIELD = "_rollout"  # where the request block stands in an invoke's payload

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_STEP_DIGITS = 8
MAX_STEP = 10**_STEP_DIGITS - 1


class ContractError(ValueError):
    """An object that does not keep to the contract. `field` names the place, `reason` says what is wrong."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class Outcome(StrEnum):
    """The classes in which a rollout can end. Each planned rollout ends in exactly one."""

    COMPLETED = "completed"
    AGENT_ERROR = "agent_error"  # the agent's own code raised, or never called the model
    INFRA_ERROR = "infra_error"  # anything that is not the agent's doing: never a reward
    TIMED_OUT = "timed_out"  # a deadline passed
    CANCELLED = "cancelled"  # the backend no longer wanted it


# --- arrays -----------------------------------------------------------------------------------------------


def _array_type(typecode: str, what: str) -> BeforeValidator:
    def parse(value: object) -> array[Any]:
        if isinstance(value, array):
            if value.typecode != typecode:
                raise ValueError(f"an array of type {value.typecode!r} where {what} are wanted")
            return value
        out: array[Any] = array(typecode)
        if isinstance(value, (bytes, bytearray, memoryview)):
            if len(value) % out.itemsize:
                raise ValueError(f"{len(value)} bytes are no whole number of {what}")
            out.frombytes(value)
            if sys.byteorder == "big":
                out.byteswap()
            return out
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError(f"wanted {what}, as raw little-endian bytes or as a list")  # noqa: TRY004
        if typecode == "f":
            value = [math.nan if item is None else item for item in value]
        if any(isinstance(item, (bool, str, bytes)) for item in value):
            raise ValueError(f"wanted {what}, found something that is not a number")
        try:
            out.extend(value)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"wanted {what}: {error}") from None
        return out

    return BeforeValidator(parse)


def _to_list(value: array[Any]) -> list[int] | list[float | None]:
    if value.typecode == "f":
        return [None if math.isnan(item) else item for item in value]
    return value.tolist()


def _to_bytes(value: array[Any]) -> bytes:
    if sys.byteorder == "big":
        value = array(value.typecode, value)
        value.byteswap()
    return value.tobytes()


def _dump_array(value: array[Any], info: Any) -> object:
    return _to_list(value) if info.mode == "json" else _to_bytes(value)


_dump = PlainSerializer(_dump_array)
TokenIds = Annotated[IntArray, _array_type("i", "int32 token ids"), _dump]
Mask = Annotated[IntArray, _array_type("B", "mask bytes of 0 or 1"), _dump]
Logprobs = Annotated[FloatArray, _array_type("f", "float32 logprobs"), _dump]


def _image_bytes(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise ValueError(f"is no base64: {error}") from None


def _dump_bytes(value: bytes, info: Any) -> object:
    return base64.b64encode(value).decode("ascii") if info.mode == "json" else value


Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Images = dict[Sha256, Annotated[bytes, BeforeValidator(_image_bytes), PlainSerializer(_dump_bytes)]]
"""The bytes of images as they came (JSON: base64), each under their SHA-256."""

Identifier = Annotated[str, StringConstraints(pattern=rf"^{_ID}$")]
"""An id that can stand in a key, a URL and a file name: no slash, no leading dot, 128 characters at most."""

_UNREADABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def readable(text: str) -> str:
    """With nothing in it that a terminal or a log would obey: control characters, but for tab and newline."""
    return _UNREADABLE.sub("\N{REPLACEMENT CHARACTER}", text)


Readable = Annotated[str, AfterValidator(readable)]
Seal = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
"""The gateway's signature of a trajectory. Nobody but the training side can make one or needs to read it."""


# --- the objects ------------------------------------------------------------------------------------------

_Object = TypeVar("_Object", bound="ContractObject")


class ContractObject(BaseModel):
    """Base of everything that crosses the wire: frozen, strict, unknown fields refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        allow_inf_nan=False,
        ser_json_bytes="base64",
    )

    @classmethod
    def parse(cls, data: object, where: str = "") -> Self:
        """Checks plain values (dicts, lists) against the contract.

        Raises:
            ContractError: names the first field at fault, prefixed by `where`.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(str(part) for part in first["loc"]) or cls.__name__.lower()
            raise ContractError(f"{where}{field}", first["msg"].removeprefix("Value error, ")) from None


class _WithImages(ContractObject):
    """Of what has images only where an image was seen: without one it is encoded as if there were no such field."""

    @model_serializer(mode="wrap")
    def _without_no_images(self, encode: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = encode(self)
        if not fields.get("images"):
            fields.pop("images", None)
        return fields


class VersionSpan(ContractObject):
    """The tokens `[start, end)` of a segment that one version of the weights sampled."""

    version: str
    start: int = Field(ge=0)
    end: int = Field(ge=0)


class Turn(ContractObject):
    """One model call: the sampled tokens `[start, end)` of its segment."""

    start: int = Field(ge=0)
    end: int = Field(ge=0)
    finish_reason: str
    weight_versions: tuple[VersionSpan, ...]  # covers [start, end) without a gap; empty if the engine said none
    cached_tokens: int = Field(default=0, ge=0)  # prompt tokens the engine had in its prefix cache
    seconds: float = Field(default=0.0, ge=0)  # from the gateway's request to the engine's last token


class ImageSpan(ContractObject):
    """The tokens `[start, end)` of a segment that stand for one image."""

    start: int = Field(ge=0)
    end: int = Field(ge=0)
    sha256: Sha256  # of the image's bytes
    media_type: str = Field(pattern=r"^image/[a-z]+$")


class Segment(_WithImages):
    """One token sequence that the model saw from its first token on, with what was sampled in it.

    `token_ids`, `mask` and `logprobs` have one length. `mask` is 1 where the token was sampled by the
    model and 0 where it was given to it. `logprobs` is NaN wherever the engine gave none.
    """

    token_ids: TokenIds
    mask: Mask
    logprobs: Logprobs
    turns: tuple[Turn, ...]
    messages: tuple[dict[str, JsonValue], ...] = ()  # the conversation in the OpenAI shape, for people to read
    opened_by: str = "first_call"  # why this is not the extension of an earlier segment
    retokenised: bool = False  # made of messages by the training side: `mask` is 1 on a guess of what was sampled
    images: tuple[ImageSpan, ...] = ()  # in the order of their tokens

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        n = len(self.token_ids)
        for name in ("mask", "logprobs"):
            if len(getattr(self, name)) != n:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {n} token_ids")
        mask = self.mask.tobytes()
        if mask.count(0) + mask.count(1) != n:
            raise ValueError("mask has a value other than 0 and 1")
        if n and min(self.token_ids) < 0:
            raise ValueError("token_ids has a negative id")
        sampled = bytearray(n)
        last = 0
        for i, turn in enumerate(self.turns):
            if not last <= turn.start <= turn.end <= n:
                raise ValueError(f"turns.{i} spans [{turn.start}, {turn.end}) of {n} tokens, after {last}")
            sampled[turn.start : turn.end] = b"\x01" * (turn.end - turn.start)
            last = turn.end
            at = turn.start
            for span in turn.weight_versions:
                if span.start != at or span.end < at or span.end > turn.end:
                    raise ValueError(f"turns.{i}.weight_versions do not cover its tokens in order")
                at = span.end
            if turn.weight_versions and at != turn.end:
                raise ValueError(f"turns.{i}.weight_versions do not cover its tokens")
        if bytes(sampled) != mask:
            raise ValueError("mask is not 1 exactly where the turns sampled")
        last = 0
        for i, image in enumerate(self.images):
            if not last <= image.start < image.end <= n:
                raise ValueError(f"images.{i} spans [{image.start}, {image.end}) of {n} tokens, after {last}")
            if any(mask[image.start : image.end]):
                raise ValueError(f"images.{i} stands where the model sampled")
            last = image.end
        if self.retokenised and not all(map(math.isnan, self.logprobs)):
            raise ValueError("logprobs has a value, yet the segment was made of messages: nobody knows it")
        if self.retokenised and any(turn.weight_versions for turn in self.turns):
            raise ValueError("turns name weight_versions, yet the segment was made of messages: nobody knows them")
        return self

    @property
    def sampled_tokens(self) -> int:
        return sum(turn.end - turn.start for turn in self.turns)


class Conversation(ContractObject):
    """What was said where no tokens are known: the model was called elsewhere. Messages have the OpenAI shape."""

    messages: tuple[dict[str, JsonValue], ...] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: tuple[dict[str, JsonValue], ...] = Field(default=(), max_length=MAX_MESSAGES)
    replies: tuple[int, ...] | None = None  # the places of the messages that the model said; None: every assistant's

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for i, message in enumerate(self.messages):
            if not isinstance(message.get("role"), str):
                raise ValueError(f"messages.{i} has no role")  # noqa: TRY004
        before = -1
        for at in self.replies or ():
            if not before < at < len(self.messages):
                raise ValueError(f"replies name {at} of {len(self.messages)} messages, after {before}")
            if self.messages[at]["role"] != "assistant":
                raise ValueError(f"replies name messages.{at}, which is of the role {self.messages[at]['role']!r}")
            before = at
        return self

    @property
    def said(self) -> tuple[int, ...]:
        """The places of the messages that the model said."""
        if self.replies is not None:
            return self.replies
        return tuple(i for i, message in enumerate(self.messages) if message["role"] == "assistant")


class Failure(ContractObject):
    """Why a rollout did not complete: a reason to count by, a message to read, a traceback to mend by."""

    reason: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
    message: Readable
    traceback: Readable | None = None


def _check_images(images: Images, segments: Iterable[Segment]) -> None:
    """Raises ValueError, unless these are the images that the segments name, each what its name says."""
    named = {span.sha256 for segment in segments for span in segment.images}
    if named != images.keys():
        raise ValueError(f"images hold {len(images)}, which are not the {len(named)} that the segments name")
    for name, data in images.items():
        if hashlib.sha256(data).hexdigest() != name:
            raise ValueError(f"images.{name} has other bytes than its name says")


class Trajectory(_WithImages):
    """What the gateway hands the wrapper when a session is sealed: everything sampled in it."""

    schema_version: Literal[1] = 1
    model: str
    segments: tuple[Segment, ...]
    unanswered_calls: int = Field(default=0, ge=0)  # model calls that failed on our side and never went through
    seal: Seal | None = None  # the gateway's signature, for the rollout to carry
    images: Images = {}  # those that the segments name

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_images(self.images, self.segments)
        return self

    def encode(self) -> bytes:
        return _pack(self)

    @classmethod
    def decode(cls, data: bytes, max_bytes: int = MAX_OBJECT_BYTES) -> Self:
        return _unpack(cls, data, max_bytes)


class Rollout(_WithImages):
    """One finished rollout, as stored under `result_key`."""

    schema_version: Literal[1] = 1
    run_id: Identifier
    step: int = Field(ge=0, le=MAX_STEP)
    task_id: Identifier
    rollout_id: Identifier
    attempt: int = Field(ge=1)
    session_id: str
    outcome: Outcome
    reward: float | None = None
    extras: dict[str, JsonValue] = {}  # whatever else the agent returned beside its reward
    failure: Failure | None = None
    model: str = ""
    segments: tuple[Segment, ...] = ()
    seal: Seal | None = None  # the trajectory's own: that these segments, of this session, are what was sampled
    conversations: tuple[Conversation, ...] = Field(default=(), max_length=MAX_CONVERSATIONS)  # in place of segments
    started_at: float = Field(default=0.0, ge=0)  # unix seconds, by the container's clock; 0: not known
    finished_at: float = Field(default=0.0, ge=0)
    images: Images = {}  # those that the segments name, out of the trajectory

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.outcome is Outcome.COMPLETED:
            if self.reward is None:
                raise ValueError("reward is missing from a completed rollout")
            if self.failure is not None:
                raise ValueError("failure is set on a completed rollout")
            if not self.sampled_tokens and not self.conversations:
                raise ValueError("segments hold no sampled token, yet the rollout is completed")
            if self.conversations and not any(conversation.said for conversation in self.conversations):
                raise ValueError("conversations hold no message of the model, yet the rollout is completed")
        else:
            if self.failure is None:
                raise ValueError(f"failure is missing from a rollout that ended as {self.outcome}")
            if self.reward is not None and self.outcome is not Outcome.AGENT_ERROR:
                raise ValueError(f"reward is set on a rollout that ended as {self.outcome}")
        if self.conversations and any(s.sampled_tokens and not s.retokenised for s in self.segments):
            raise ValueError(
                "conversations stand beside sampled segments: what was sampled holds its messages itself"
            )
        _check_images(self.images, self.segments)
        return self

    @property
    def messages_only(self) -> bool:
        """Whether there are messages and no token of them: good for evaluation, and not to be trained."""
        return bool(self.conversations) and not self.sampled_tokens

    @property
    def retokenised(self) -> bool:
        """Whether the training side made its tokens of messages."""
        return any(segment.retokenised for segment in self.segments)

    @property
    def trainable(self) -> bool:
        """Whether this rollout may reach a gradient: it has a reward and something was sampled."""
        return self.reward is not None and self.sampled_tokens > 0

    @property
    def sampled_tokens(self) -> int:
        return sum(segment.sampled_tokens for segment in self.segments)

    def encode(self) -> bytes:
        """The compact form: msgpack in one zstd frame."""
        return _pack(self)

    def to_json(self) -> bytes:
        """The plain form: the same fields as JSON."""
        return self.model_dump_json().encode()

    @classmethod
    def decode(cls, data: bytes, max_bytes: int = MAX_OBJECT_BYTES) -> Self:
        """Reads either form.

        Raises:
            ContractError: empty, larger than `max_bytes` once unpacked, truncated, of another schema
                version, or with a field that does not hold what it should.
        """
        return _unpack(cls, data, max_bytes)


class Sampling(ContractObject):
    """The trainer's sampling settings. None leaves the engine's own default."""

    temperature: float = Field(default=1.0, ge=0, le=10)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)  # -1 is off
    max_tokens: int | None = Field(default=None, ge=1)  # of one model call
    seed: int | None = None


class ModelEndpoint(ContractObject):
    """The session's own way to the model being trained."""

    base_url: str  # OpenAI-shaped, ends in /v1
    api_key: str = Field(repr=False)  # opens this session only, until its deadline
    name: str
    trajectory_url: str  # POST seals the session and answers with its Trajectory


PUT_HEADERS = {"Content-Type": "application/octet-stream", "If-None-Match": "*"}
"""What a presigned PUT must be sent with: both are part of its signature, the second refuses a second write."""


class ResultUrls(ContractObject):
    """Each takes one object under one key, once, until it expires. Whoever has it can do that and nothing else."""

    result: str = Field(pattern=r"^https?://", repr=False)
    notice: str = Field(pattern=r"^https?://", repr=False)  # that this attempt was lost: see `notice_key`


class ResultTarget(ContractObject):
    """Where the result goes. The key follows from the rollout's ids: see `result_key`.

    With `urls` the container needs no credentials: a result is one PUT to one of them, with `PUT_HEADERS`.
    """

    bucket: str
    prefix: str = ""
    queue_url: str | None = None  # None: nothing is announced, the backend finds results by listing
    region: str | None = None
    urls: ResultUrls | None = Field(default=None, repr=False)


class RolloutRequest(ContractObject):
    """The `_rollout` block of an invoke's payload. Everything else in the payload belongs to the agent."""

    schema_version: Literal[1] = 1
    run_id: Identifier
    step: int = Field(ge=0, le=MAX_STEP)
    task_id: Identifier
    rollout_id: Identifier
    attempt: int = Field(ge=1)
    session_id: str
    endpoint: ModelEndpoint
    sampling: Sampling
    deadline: float  # unix seconds by which the agent must have returned
    result: ResultTarget

    @property
    def key(self) -> str:
        """Of the result."""
        return result_key(self.result.prefix, self.run_id, self.step, self.rollout_id)

    def key_for(self, outcome: Outcome) -> str:
        """Where a rollout that ended so is written: as the result, or as a notice that this attempt was lost."""
        if outcome is Outcome.INFRA_ERROR:
            return notice_key(self.result.prefix, self.run_id, self.step, self.rollout_id, self.attempt)
        return self.key

    def url_for(self, outcome: Outcome) -> str | None:
        """The presigned URL of `key_for`, where the request has them."""
        urls = self.result.urls
        if urls is None:
            return None
        return urls.notice if outcome is Outcome.INFRA_ERROR else urls.result


# --- keys -------------------------------------------------------------------------------------------------


def step_prefix(prefix: str, run_id: str, step: int) -> str:
    """Where a step's results stand: `PREFIXruns/RUN/steps/STEP/`. `prefix` is empty or ends in a slash."""
    return f"{prefix}runs/{run_id}/steps/{step:0{_STEP_DIGITS}d}/"


def result_key(prefix: str, run_id: str, step: int, rollout_id: str) -> str:
    """The one key under which a rollout's result is written, whichever attempt writes it."""
    return step_prefix(prefix, run_id, step) + rollout_id


def notice_key(prefix: str, run_id: str, step: int, rollout_id: str, attempt: int) -> str:
    """The key under which an attempt that was lost to the infrastructure says so."""
    return f"{result_key(prefix, run_id, step, rollout_id)}~{attempt}"


class ResultName(NamedTuple):
    """What a key says. `attempt` is None for a result, and the number of the attempt for a notice."""

    step: int
    rollout_id: str
    attempt: int | None


def parse_result_key(prefix: str, run_id: str, key: str) -> ResultName:
    """What a key of this run names.

    Raises:
        ContractError: the key is not of this run, or neither of a result nor of a notice.
    """
    folder = rf"{re.escape(prefix)}runs/{re.escape(run_id)}/steps/"
    match = re.fullmatch(rf"{folder}([0-9]{{{_STEP_DIGITS}}})/({_ID})(?:~([1-9][0-9]{{0,8}}))?", key)
    if match is None:
        raise ContractError("object.key", f"{key!r} is not a result of run {run_id!r} under {prefix!r}")
    return ResultName(int(match[1]), match[2], int(match[3]) if match[3] else None)


# --- announcements ----------------------------------------------------------------------------------------


class Announcement(ContractObject):
    """One object named by a message. The message has the shape of S3's own event notifications."""

    bucket: str
    key: str

    def encode(self) -> str:
        record = {
            "eventSource": "rollout:agent",
            "eventName": "ObjectCreated:Put",
            "s3": {"bucket": {"name": self.bucket}, "object": {"key": quote(self.key)}},
        }
        return json.dumps({"Records": [record]}, separators=(",", ":"))

    @classmethod
    def decode(cls, body: str) -> list[Self]:
        """The objects that a message names; none for the `s3:TestEvent` that S3 sends at set-up.

        Raises:
            ContractError: names the field that is missing or is not what it should be.
        """
        try:
            message = from_json(body)
        except ValueError as error:
            raise ContractError("body", f"not JSON: {error}") from None
        if not isinstance(message, dict):
            raise ContractError("body", "not a JSON object")
        if message.get("Event") == "s3:TestEvent":
            return []
        records = message.get("Records")
        if not isinstance(records, list) or not records:
            raise ContractError("Records", "missing, or not a list of at least one record")
        found = []
        for i, record in enumerate(records):
            bucket = _text_at(record, ("s3", "bucket", "name"), f"Records.{i}")
            key = _text_at(record, ("s3", "object", "key"), f"Records.{i}")
            found.append(cls(bucket=bucket, key=unquote_plus(key)))
        return found


def _text_at(value: object, path: tuple[str, ...], where: str) -> str:
    for name in path:
        where = f"{where}.{name}"
        value = value.get(name) if isinstance(value, Mapping) else None
        if value is None:
            raise ContractError(where, "missing")
    if not isinstance(value, str) or not value:
        raise ContractError(where, "not a text")
    return value


# --- the codec --------------------------------------------------------------------------------------------


def _pack(value: ContractObject) -> bytes:
    packed = msgpack.packb(value.model_dump(mode="python"))
    return zstandard.ZstdCompressor(level=3).compress(cast(bytes, packed))


def _unpack(cls: type[_Object], data: bytes, max_bytes: int) -> _Object:
    if not data:
        raise ContractError("object", "has 0 bytes")
    if data.startswith(_ZSTD_MAGIC):
        fields = _read_packed(data, max_bytes)
    elif data.lstrip()[:1] == b"{":
        if len(data) > max_bytes:
            raise ContractError("object", f"has {len(data)} bytes, more than the cap of {max_bytes}")
        fields = read_json(data)
    else:
        raise ContractError("object", "is neither a zstd frame nor a JSON object")
    if not isinstance(fields, dict):
        raise ContractError("object", "is not a map of fields")
    version = fields.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ContractError("schema_version", f"is {version!r}; this side reads {SCHEMA_VERSION}")
    return cls.parse(fields)


def read_json(data: bytes) -> Any:
    """Plain values out of JSON that the compact form can hold as well.

    Raises:
        ContractError: no JSON, or with a whole number beyond 64 bits, or nested too deep.
    """
    try:
        fields = from_json(data)
    except ValueError as error:
        raise ContractError("object", f"is no JSON, or is cut short: {error}") from None
    try:
        msgpack.packb(fields)
    except (ValueError, OverflowError) as error:
        raise ContractError("object", f"holds what cannot be stored: {error}") from None
    return fields


def _read_packed(data: bytes, max_bytes: int) -> object:
    # The frame's header tells the unpacked size before a byte of it is unpacked: a bomb is refused unopened.
    try:
        size = zstandard.frame_content_size(data)
        if size < 0:
            raise ContractError("object", "is a zstd frame that does not tell its size")
        if size > max_bytes:
            raise ContractError("object", f"unpacks to {size} bytes, more than the cap of {max_bytes}")
        raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=max_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ContractError("object", f"is damaged or cut short: {error}") from None
    if len(raw) != size:
        raise ContractError("object", "is damaged or cut short")
    try:
        return msgpack.unpackb(raw, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise ContractError("object", f"is no msgpack: {error}") from None
