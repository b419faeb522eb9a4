"""The objects that both sides exchange, as validated values."""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

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
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import to_json

from agent_wrapper.contract.codec import MAX_OBJECT_BYTES, ContractError, pack, readable, unpack
from agent_wrapper.contract.keys import ID_PATTERN, MAX_STEP
from agent_wrapper.contract.shared_prefixes import CheckedMessages, add_to_schema, expand, share

if TYPE_CHECKING:
    IntArray = array[int]
    FloatArray = array[float]
else:
    # Arrays take no parameter at run time before Python 3.12.
    IntArray = FloatArray = array

SCHEMA_VERSION = 1
NO_REWARD = "no_reward"
"""The failure of a rollout whose agent leaves the reward to a scorer."""
# Trainers add up rewards in float32, and this is the largest one.
MAX_REWARD = float.fromhex("0x1.fffffep127")
# Refused at the first invalid item: the errors of a million would take 900 MB, and hold the interpreter's lock.
_ITEMS, _NO_ITEMS = Field(fail_fast=True), Field(default=(), fail_fast=True)
# datetime ends with the year 9999.
_LAST_SECOND = 253402300799
# Limits on the artifacts of one rollout: their number, their bytes, and the bytes of the object that holds them.
MAX_ARTIFACTS = 64
MAX_ARTIFACT_BYTES = 32 * 1024 * 1024
MAX_PACKED_ARTIFACT_BYTES = MAX_ARTIFACT_BYTES + MAX_ARTIFACTS * 1024


class Outcome(StrEnum):
    """The outcome of a rollout. Each planned rollout has exactly one."""

    COMPLETED = "completed"
    AGENT_ERROR = "agent_error"
    """The agent's code raised, or never called the model."""
    INFRA_ERROR = "infra_error"
    """The infrastructure failed, so there is no reward."""
    TIMED_OUT = "timed_out"
    """A deadline passed."""
    CANCELLED = "cancelled"
    """The backend no longer needed it."""


def _parser(typecode: str, what: str) -> Callable[[object], array[Any]]:
    def parse(value: object) -> array[Any]:
        if isinstance(value, array):
            if value.typecode != typecode:
                raise ValueError(f"expected {what}, got an array of type {value.typecode!r}")
            return value
        out: array[Any] = array(typecode)
        if isinstance(value, (bytes, bytearray, memoryview)):
            if len(value) % out.itemsize:
                raise ValueError(f"{len(value)} bytes are not a multiple of the size of {what}")
            out.frombytes(value)
            if sys.byteorder == "big":
                out.byteswap()
            return out
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError(f"expected {what}, as raw little-endian bytes or as a list")  # noqa: TRY004
        if typecode == "f":
            value = [math.nan if item is None else item for item in value]
        if any(isinstance(item, (bool, str, bytes)) for item in value):
            raise ValueError(f"expected {what}, got something that is not a number")
        try:
            out.extend(value)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"expected {what}: {error}") from None
        return out

    return parse


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


def _json_list(kind: str | list[str], **more: Any) -> WithJsonSchema:
    return WithJsonSchema({"type": "array", "items": {"type": kind, **more}})


_dump = PlainSerializer(_dump_array)
TokenIds = Annotated[
    IntArray, BeforeValidator(_parser("i", "int32 token ids")), _dump, _json_list("integer", minimum=0)
]
Mask = Annotated[
    IntArray, BeforeValidator(_parser("B", "mask bytes of 0 or 1")), _dump, _json_list("integer", enum=[0, 1])
]
Logprobs = Annotated[
    FloatArray, BeforeValidator(_parser("f", "float32 logprobs")), _dump, _json_list(["number", "null"])
]


def _has_negative(ids: array[int]) -> bool:
    """Return whether an id has its sign bit set. `min` would take 40 % of the time of decoding a result."""
    highest = ids.itemsize - 1 if sys.byteorder == "little" else 0
    return not ids.tobytes()[highest :: ids.itemsize].isascii()


def _parse_bytes(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise ValueError(f"is not base64: {error}") from None


def _dump_bytes(value: bytes, info: Any) -> object:
    return base64.b64encode(value).decode("ascii") if info.mode == "json" else value


Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_BASE64 = WithJsonSchema({"type": "string", "contentEncoding": "base64"})
RawBytes = Annotated[bytes, BeforeValidator(_parse_bytes), PlainSerializer(_dump_bytes), _BASE64]
Images = dict[Sha256, RawBytes]
"""Unmodified bytes of images (JSON: base64), by their SHA-256."""

Identifier = Annotated[str, StringConstraints(pattern=rf"^{ID_PATTERN}$")]
"""An id that is valid in a key, a URL and a file name: no slash, no leading dot, at most 128 characters."""

# The limits exist because a container writes these strings, and logs, records and pages show them.
_MESSAGE_CHARS, TRACEBACK_CHARS = 2_000, 20_000
_Message = Annotated[str, AfterValidator(lambda text: readable(text[:_MESSAGE_CHARS]))]
# The end of a traceback has the error.
_Traceback = Annotated[str, AfterValidator(lambda text: readable(text[-TRACEBACK_CHARS:]))]
Seal = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
"""The gateway's signature of a trajectory. Only the training side creates and reads it."""


class ContractObject(BaseModel):
    """Base of the exchanged objects: frozen, strict, unknown fields refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        allow_inf_nan=False,
        ser_json_bytes="base64",
    )

    @classmethod
    def parse(cls, data: object, where: str = "") -> Self:
        """Validate plain values (dicts, lists).

        Raises:
            ContractError: names the first invalid field, prefixed by `where`.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(str(part) for part in first["loc"]) or cls.__name__.lower()
            raise ContractError(f"{where}{field}", first["msg"].removeprefix("Value error, ")) from None


_OMITTED_IF_EMPTY = ("images", "routed_experts", "turn_rewards", "artifacts", "score")


class _OmitsEmpty(ContractObject):
    """An object with optional fields that are left out of the encoding if they are empty."""

    @model_serializer(mode="wrap")
    def _omit_empty(self, encode: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = encode(self)
        for name in _OMITTED_IF_EMPTY:
            if not fields.get(name):
                fields.pop(name, None)
        return fields


_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


# Dataclasses, because a result has many of them: as models they would take six times the memory.
@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class VersionSpan:
    """The tokens `[start, end)` of a segment that one version of the weights sampled."""

    version: str
    """Such as "3", or "math@3" for version 3 of the LoRA adapter "math"."""
    start: Annotated[int, Field(ge=0)]
    end: Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class Turn:
    """One model call: the sampled tokens `[start, end)` of its segment."""

    start: Annotated[int, Field(ge=0)]
    end: Annotated[int, Field(ge=0)]
    finish_reason: str
    """`stop` or `length`."""
    weight_versions: Annotated[tuple[VersionSpan, ...], _ITEMS]
    """Spans that cover [start, end) without a gap; empty if unknown."""
    cached_tokens: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    """Prompt tokens found in the engine's prefix cache; None if unknown."""
    seconds: Annotated[float, Field(ge=0)] = 0.0
    """Seconds from the gateway's request to the engine's last token."""


class ImageSpan(ContractObject):
    """The tokens `[start, end)` of a segment that represent one image."""

    start: int = Field(ge=0)
    end: int = Field(ge=0)
    sha256: Sha256
    """SHA-256 of the image's bytes."""
    media_type: str = Field(pattern=r"^image/[a-z]+$")


class RoutedExperts(ContractObject):
    """The experts that processed the tokens of a segment, in a mixture of experts.

    `ids` has an id for each token but the last, each layer, and each of the `topk` experts of that layer, in this
    order. The last token was sampled and never processed. The ids of a layer without experts are 0.
    """

    layers: int = Field(ge=1)
    topk: int = Field(ge=1)
    id_bytes: Literal[1, 2]
    """Bytes per id: unsigned, little-endian."""
    ids: RawBytes


class Segment(_OmitsEmpty):
    """One token sequence that the model processed from its first token, and which of its tokens were sampled.

    `token_ids`, `response_mask` and `logprobs` have the same length. `response_mask` is 1 for a token that the model
    sampled and 0 for a token of its prompt. `logprobs` is NaN where the engine returned none.
    """

    token_ids: TokenIds
    response_mask: Mask
    logprobs: Logprobs
    turns: tuple[Turn, ...] = _ITEMS
    messages: tuple[dict[str, JsonValue], ...] = _NO_ITEMS
    """The conversation in OpenAI's format, for display only."""
    split_reason: str = "first_call"
    """Why this segment does not extend an earlier one."""
    images: tuple[ImageSpan, ...] = _NO_ITEMS
    """Images in the order of their tokens."""
    routed_experts: RoutedExperts | None = None
    """Only with the setting `model.routed_experts`."""

    model_config = ConfigDict(json_schema_extra=add_to_schema)

    @field_validator("messages", mode="wrap")
    @classmethod
    def _check_messages_once(cls, value: object, check: ValidatorFunctionWrapHandler) -> Any:
        return value if isinstance(value, CheckedMessages) else check(value)

    def __repr__(self) -> str:
        return f"<Segment: {len(self.token_ids)} tokens, {len(self.turns)} turns>"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        n = len(self.token_ids)
        for name in ("response_mask", "logprobs"):
            if len(getattr(self, name)) != n:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {n} token_ids")
        mask = self.response_mask.tobytes()
        if mask.count(0) + mask.count(1) != n:
            raise ValueError("mask has a value other than 0 and 1")
        if _has_negative(self.token_ids):
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
                raise ValueError(f"images.{i} covers tokens that the model sampled")
            last = image.end
        if self.routed_experts is not None:
            experts, tokens = self.routed_experts, max(0, n - 1)
            if len(experts.ids) != tokens * experts.layers * experts.topk * experts.id_bytes:
                raise ValueError(
                    f"routed_experts.ids has {len(experts.ids)} bytes for {tokens} tokens of {experts.layers} layers "
                    f"and {experts.topk} experts"
                )
        return self

    @property
    def sampled_tokens(self) -> int:
        return sum(turn.end - turn.start for turn in self.turns)


class Failure(ContractObject):
    """Why a rollout did not complete: a reason to count by, a message to read, a traceback to debug with."""

    reason: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
    message: _Message
    traceback: _Traceback | None = None


def check_rewards(reward: float, turn_rewards: Iterable[float]) -> None:
    """Raise ValueError if a sum of the rewards could exceed float32."""
    if sum(map(abs, turn_rewards), abs(reward)) > MAX_REWARD:
        raise ValueError(f"the reward is {reward:g}, which alone or with the turn_rewards is beyond float32")


def _check_images(images: Images, segments: Iterable[Segment]) -> None:
    """Raise ValueError unless these are the images that the segments name, with matching digests."""
    named = {span.sha256 for segment in segments for span in segment.images}
    if named != images.keys():
        raise ValueError(f"images hold {len(images)} images, which are not the {len(named)} that the segments name")
    for name, data in images.items():
        if hashlib.sha256(data).hexdigest() != name:
            raise ValueError(f"images.{name} does not match its SHA-256")


class _Encoded(_OmitsEmpty):
    """An object with a `schema_version`, which is encoded as a whole, in either form."""

    def encode(self) -> bytes:
        """Encode in the compact form: msgpack in one zstd frame."""
        return pack(_fields(self, "python"))

    def to_json(self) -> bytes:
        """Encode the same fields as JSON."""
        return _json(_fields(self, "json"), levels=3)

    @classmethod
    def decode(cls, data: bytes, max_bytes: int = MAX_OBJECT_BYTES) -> Self:
        """Decode either form.

        Raises:
            ContractError: empty, larger than `max_bytes` once unpacked, truncated, of another schema
                version, or with an invalid field.
        """
        fields = unpack(data, max_bytes)
        expand(fields.get("segments"), max_bytes, _PARSERS, _CHECK_MESSAGES)
        version = fields.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ContractError("schema_version", f"is {version!r}, and this version reads {SCHEMA_VERSION}")
        return cls.parse(fields)


class Trajectory(_Encoded):
    """Everything sampled in a session. The gateway returns it when it seals the session, in either form."""

    schema_version: Literal[1] = 1
    model: str
    segments: tuple[Segment, ...] = _ITEMS
    unanswered_calls: int = Field(default=0, ge=0, lt=2**31)
    """Model calls that failed on the training side."""
    seal: Seal | None = None
    """The gateway's signature, copied into the rollout."""
    images: Images = {}
    """Bytes of the images in the segments, by SHA-256."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_images(self.images, self.segments)
        return self


class Artifact(ContractObject):
    """A file that the agent published. All files of a rollout are one object, under `artifacts_key`."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]
    size: int = Field(ge=0, le=MAX_ARTIFACT_BYTES)
    sha256: Sha256

    @classmethod
    def of(cls, name: str, data: bytes) -> Self:
        """Describe a file. Raises ContractError for an invalid name."""
        return cls.parse({"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()})


def pack_artifacts(files: Mapping[str, bytes]) -> bytes:
    """Encode the files of a rollout, by name, as one object."""
    return pack({"files": dict(files)})


def unpack_artifacts(data: bytes, listed: Iterable[Artifact]) -> dict[str, bytes]:
    """Return the files of a rollout, by name.

    Raises:
        ContractError: they are not exactly those that its result lists.
    """
    files = unpack(data, MAX_PACKED_ARTIFACT_BYTES).get("files")
    if not isinstance(files, dict) or not all(isinstance(content, bytes) for content in files.values()):
        raise ContractError("files", "is not a map of bytes")
    if [Artifact.of(name, content) for name, content in files.items()] != [*listed]:
        raise ContractError("files", "are not those that the result lists")
    return files


class ScoredBy(ContractObject):
    """The scorer that computed a rollout's reward on the training side, and the reward that it replaced."""

    scorer: str
    sha256: Sha256
    """SHA-256 of the scorer's file or command."""
    agent_reward: float | None
    """None if the agent returned no reward."""


class Rollout(_Encoded):
    """One finished rollout, as stored under `result_key`."""

    schema_version: Literal[1] = 1
    run_id: Identifier
    step: int = Field(ge=0, le=MAX_STEP)
    task_id: Identifier
    rollout_id: Identifier
    attempt: int = Field(ge=1, lt=10**9)
    session_id: str
    outcome: Outcome
    reward: float | None = None
    extras: dict[str, JsonValue] = {}
    """Values that the agent returned in addition to the reward."""
    failure: Failure | None = None
    model: str = ""
    segments: tuple[Segment, ...] = _NO_ITEMS
    seal: Seal | None = None
    """The trajectory's seal of these segments."""
    started_at: float = Field(default=0.0, ge=0, le=_LAST_SECOND)
    """Unix seconds of the container's clock; 0 if unknown."""
    finished_at: float = Field(default=0.0, ge=0, le=_LAST_SECOND)
    images: Images = {}
    """Bytes of the images in the segments, by SHA-256."""
    turn_rewards: tuple[float, ...] = _NO_ITEMS
    """One reward per turn, in the order of the segments; may be empty."""
    artifacts: tuple[Artifact, ...] = Field((), max_length=MAX_ARTIFACTS, fail_fast=True)
    """Files of this attempt."""
    score: ScoredBy | None = None
    """Set if a scorer on the training side computed the reward."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.outcome is Outcome.COMPLETED:
            if self.reward is None:
                raise ValueError("reward is missing from a completed rollout")
            if self.failure is not None:
                raise ValueError("failure is set on a completed rollout")
            if not self.sampled_tokens:
                raise ValueError(
                    "segments hold no sampled token, but the rollout is completed: call the model at base_url, and "
                    "copy the segments of the sealed trajectory"
                )
        else:
            if self.failure is None:
                raise ValueError(f"failure is missing from a rollout that ended as {self.outcome}")
            if self.reward is not None and self.outcome is not Outcome.AGENT_ERROR:
                raise ValueError(f"reward is set on a rollout that ended as {self.outcome}")
        turns = sum(len(segment.turns) for segment in self.segments)
        if self.turn_rewards and (self.reward is None or len(self.turn_rewards) != turns):
            raise ValueError(f"turn_rewards are {len(self.turn_rewards)} for {turns} turns and reward {self.reward}")
        if self.reward is not None:
            check_rewards(self.reward, self.turn_rewards)
        _check_images(self.images, self.segments)
        return self

    @property
    def trainable(self) -> bool:
        """Return True if the rollout has a reward and sampled tokens."""
        return self.reward is not None and self.sampled_tokens > 0

    @property
    def can_be_scored(self) -> bool:
        """Return True if a scorer may compute the reward."""
        left_to_scorer = self.failure is not None and self.failure.reason == NO_REWARD and self.sampled_tokens > 0
        return self.reward is not None or left_to_scorer

    @property
    def sampled_tokens(self) -> int:
        return sum(segment.sampled_tokens for segment in self.segments)


def _fields(value: ContractObject, mode: Literal["python", "json"]) -> dict[str, Any]:
    """Return the fields as they are encoded: what several segments have in common is stored once."""
    segments: tuple[Segment, ...] = getattr(value, "segments", ())
    if len(segments) < 2:
        return value.model_dump(mode=mode)
    arrays = ("token_ids", "response_mask", "logprobs")
    fields = value.model_dump(mode=mode, exclude={"segments": {"__all__": {*arrays, "messages"}}})
    form = _to_list if mode == "json" else _to_bytes
    for segment, encoded, stored in zip(segments, fields["segments"], share(segments), strict=True):
        encoded["messages"] = stored["messages"]
        for name in arrays:
            encoded[name] = form(stored.get(name, getattr(segment, name)))
        if "shared" in stored:
            encoded["shared"] = {**stored["shared"], "messages": form(stored["shared"]["messages"])}
    return fields


def _json(value: Any, levels: int) -> bytes:
    """Return JSON, written in pieces: the conversion of many tokens at once would stop all other threads."""
    if levels and isinstance(value, dict):
        return b"{%b}" % b",".join(b"%b:%b" % (to_json(key), _json(each, levels - 1)) for key, each in value.items())
    if levels and isinstance(value, list):
        return b"[%b]" % b",".join(_json(each, levels - 1) for each in value)
    return to_json(value)


_CHECK_MESSAGES = TypeAdapter(Annotated[tuple[dict[str, JsonValue], ...], _ITEMS]).validate_python
_PARSERS = {
    "token_ids": _parser("i", "int32 token ids"),
    "response_mask": _parser("B", "mask bytes of 0 or 1"),
    "logprobs": _parser("f", "float32 logprobs"),
    "shared": _parser("i", "int32 numbers of messages"),
}
