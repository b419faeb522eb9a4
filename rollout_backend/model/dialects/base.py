"""Define the interface of an API dialect, and what dialects share to parse requests and write answers. Pure.

Invariants:

- Every body is either parsed, or refused with an ApiError of status 400 that names the invalid field.
- A parsed body can be serialized to JSON again.
- A field that changes the meaning of a call is supported or refused, never dropped. Unknown top-level fields are
  therefore refused, unless they are null.
- A field is harmless if it changes neither the prompt nor the sampling: storage, billing, caching, latency. Such
  fields are counted: see `ignored`.
- The trainer sets sampling and reasoning. The agent's settings are counted as overridden and ignored (see
  `ModelCall.sampling`).
- Only the bytes within a request are read as an image. No URL is fetched and no path is opened, because a request
  could then read with the gateway's rights.
- `RequestMemo` yields the messages that the dialect's `parse` returns for the whole body. Messages of an earlier
  request are reused only if the bodies are equal up to the end of these messages.
"""

import base64
import binascii
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import orjson
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from agent_wrapper.contract import ContractError
from agent_wrapper.contract.codec import check_json
from rollout_backend.base.giving_way import let_others_go_first
from rollout_backend.model.images import Image, ImageLimits, read_image
from rollout_backend.model.model_call import Answer, ApiError, Delta, Message, ModelCall

MAX_STOP_STRINGS, MAX_STOP_CHARS = 16, 1000
MAX_CHOICES = 16
# Limits of a request on objects and arrays, and on all values.
_MAX_CONTAINERS, _MAX_VALUES = 20_000, 400_000
_M = TypeVar("_M", bound=BaseModel)
_T = TypeVar("_T")
_DATA_URL = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)
# Escapes of surrogates after an even number of backslashes: pairs, or halves in the group.
_SURROGATES = re.compile(
    rb"(?<!\\)(?:\\\\)*(?:\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|\\(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2}))"
)
# Fields of OpenAI's APIs, and of other clients: Harbor's agents send `session_id`, and OpenRouter's the last three.
_HARMLESS = frozenset(
    {
        *("metadata", "store", "user", "safety_identifier", "service_tier"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("cache_salt", "client_metadata", "priority", "request_id", "rid"),
        *("session_id", "provider", "trace", "usage"),
    }
)
_SAMPLING = ("temperature", "top_p", "top_k", "seed")
# Other fields that change the distribution. Clients of engines send them in every API.
_PENALTIES = frozenset({"frequency_penalty", "presence_penalty", "repetition_penalty", "min_p", "logit_bias"})
# The names that APIs and chat templates use for whether and how long the model reasons.
_REASONING = frozenset({"enable_thinking", "thinking", "thinking_budget", "reasoning_effort"})
# OpenAI uses these words, after which Harbor's agents repeat the call without the field.
_UNKNOWN = "Unrecognized request argument"
_CHANGES = f"{_UNKNOWN}, which might change the call; leave it out"
_TEMPLATE = "the chat template and its options are the trainer's (model.renderer_options); leave it out"
_FORM = "ask for a form by a JSON schema in this API's own field for it, or in the prompt"
_END = "a reply ends at the model's own end token, at a stop string or at its limit; leave it out"
_READ = "a reply is always text and reasoning apart, without control tokens; leave it out"
_BEAMS = "replies are sampled, without a search; leave it out"
_IDS = f"{_UNKNOWN}: agents get no token ids; leave it out"
# Advice for each field, and the values that change nothing.
_EXTENSIONS: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "add_generation_prompt": ("a reply always starts a new turn; leave it out", (True,)),
    "continue_final_message": ("this model cannot continue a prefilled reply; leave it out", (False,)),
    **dict.fromkeys(("chat_template", "chat_template_kwargs"), (_TEMPLATE, ())),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), (_FORM, ())),
    **dict.fromkeys(("structured_outputs", "json_schema", "regex", "ebnf", "structural_tag"), (_FORM, ())),
    **dict.fromkeys(("stop_token_ids", "stop_regex"), ("send stop strings instead", ())),
    "ignore_eos": (_END, (False,)),
    **dict.fromkeys(("include_reasoning", "separate_reasoning", "stream_reasoning"), (_READ, (True,))),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (_READ, (True,))),
    **dict.fromkeys(("echo", "include_stop_str_in_output", "no_stop_trim"), (_READ, (False,))),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids", "return_hidden_states"), (_IDS, (False,))),
    "min_tokens": (_END, (0,)),
    "add_special_tokens": ("the chat template writes all special tokens; leave it out", (False,)),
    "top_logprobs": ("only logprobs of sampled tokens are available, from /v1/chat/completions", (0,)),
    **dict.fromkeys(("n", "best_of"), (_CHANGES, (1,))),
    "logprobs": (_CHANGES, (0,)),
    "stop": ("send stop_sequences instead", ()),
    "use_beam_search": (_BEAMS, (False,)),
    "length_penalty": (_BEAMS, (1.0,)),
}
# Fields in parts of a request. Quotes within strings are escaped, so strings never match; nor do disabled values.
_NESTED = {
    name: (f'"{name}"'.encode(), re.compile(rf'"{name}"\s*+:\s*+(?!null\b|false\b)'.encode()))
    for name in ("cache_control", "defer_loading", "eager_input_streaming", "prompt_cache_breakpoint")
}
# An agent may alternate between several conversations.
_KEPT = 4
# Compare this many bytes at the end before digesting the whole text.
_TAIL = 64
# The start of a body, up to its messages. Only plain values may precede them. The expression keeps no state for each,
# because a body may have a million.
_BEGIN = rb'\s*\{\s*(?:"\w+"\s*:\s*(?:"[^"\\]*"|[\w.+-]+)\s*,\s*)*+"%s"\s*:\s*(?=\[)'
_NEXT = re.compile(rb"\s*,\s*")
_DECODER = json.JSONDecoder()


# --- text parts -----------------------------------------------------------------------------------------------
#
# The text parts of a message are joined as the engine's own endpoints join them, so that the deployed model sees the
# same prompt. SGLang joins them with a space and vLLM with a newline, unless the chat template takes a list of parts;
# such a template prints them without a separator. Some fields have their own separator with every template.


class Separators(NamedTuple):
    """The text between two parts. An assistant's parts have none, because they are pieces of what was sampled."""

    message: str = ""
    result: str = ""
    """The separator in a tool's result."""
    output: str = ""
    """The separator in a call's output, in the Responses API."""
    system: str = ""
    """The separator in `system`, in the Messages API."""


# How SGLang 0.5.23 and vLLM recognize a template that takes lists.
_TAKES_LISTS: dict[str, Callable[[str], object]] = {
    "sglang": re.compile(r"image|audio|video|vision|\bfor\s+\w+\s+in\s+(message|msg|m)(\.|\[['\"])content\b").search,
    "vllm": re.compile(r"\bfor\s+\w+\s+in\s+(\w+(\.|\[['\"]))?content\b").search,
}


def separators(engine: Literal["sglang", "vllm"], template: str | Mapping[str, str] | None) -> Separators:
    """Return the separators that the engine uses for a model with this chat template.

    `template` may also map names to templates, as tokenizers with several do.
    """
    text = template if isinstance(template, str) else " ".join((template or {}).values())
    takes_lists = bool(_TAKES_LISTS[engine](text))
    if engine == "vllm":
        return Separators("" if takes_lists else "\n", result="\n", output="\n")
    return Separators("" if takes_lists else " ", result=" ", system="\n")


# --- the interface ---------------------------------------------------------------------------------------------


class EventStream(Protocol):
    """Write one answer as server-sent events. Each event ends with an empty line."""

    def start(self, prompt_tokens: int) -> Iterator[bytes]: ...

    def delta(self, delta: Delta) -> Iterator[bytes]: ...

    def end(self, answer: Answer) -> Iterator[bytes]:
        """Write the events after the last delta. The deltas contain all text and tool calls of the answer."""
        ...

    def failed(self, error: ApiError) -> Iterator[bytes]: ...

    def keepalive(self) -> bytes:
        """Return bytes that every client ignores: a comment, unless the API has an event for it."""
        return b": sampling\n\n"


class Dialect(ABC):
    """An API that agents speak: its paths, its bodies and the shape of its errors. Does no I/O.

    To add an API, write a subclass in its own module and add the class to `registry.DIALECTS`.
    """

    name: ClassVar[str]
    path: ClassVar[str]
    """Path of model calls, below the base URL."""
    count_path: ClassVar[str | None] = None
    """Path of requests for the length of a prompt, if the API has one. See `parse_count` and `count_body`."""
    client_header: ClassVar[str | None] = None
    """A header that only this API's clients send. It selects the shape of errors on paths that several APIs share."""

    appended_field: ClassVar[str | None] = None
    """Field with the messages, if each item becomes one message independent of the others. See `RequestMemo`."""

    def __init__(self, images: ImageLimits | None = None, separators: Separators | None = None) -> None:
        """`images` is None for a text-only model."""
        self._images = images
        self._separators = separators or Separators()

    @abstractmethod
    def parse(self, body: bytes) -> ModelCall:
        """Parse a request.

        Refuses unknown fields, and values that would change the call's meaning if they were ignored.

        Raises:
            ApiError: status 400; names the invalid field.
        """

    @abstractmethod
    def body(self, call: ModelCall, answer: Answer) -> dict[str, Any]:
        """Return the response body of a call that is not streamed."""

    @abstractmethod
    def stream(self, call: ModelCall, answer_id: str, created: int, model: str) -> EventStream:
        """Create the writer of a streamed response."""

    def error_body(self, error: ApiError) -> dict[str, Any]:
        """Return the body of an error response, by default in the shape of OpenAI's APIs."""
        return openai_error(error)

    def parse_count(self, body: bytes) -> ModelCall:
        """Parse a request to `count_path`. Raises ApiError (400) as `parse` does."""
        return self.parse(body)

    def count_body(self, prompt_tokens: int) -> dict[str, Any]:
        """Return the response to a request to `count_path`."""
        return {"input_tokens": prompt_tokens}


# --- bodies ---------------------------------------------------------------------------------------------------


class Body(BaseModel):
    """Base class for the parts of a request. Unknown fields are ignored.

    A complete request sets `extra="allow"`, so that `read` can refuse its unknown fields.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


Items = Annotated[list[_T], Field(fail_fast=True)]
"""A list that fails at its first invalid item. The errors of all could hold the interpreter's lock for seconds."""


def _is_finite(value: dict[str, Any]) -> dict[str, Any]:
    # 1e999 parses as infinity, which JSON cannot represent.
    json.dumps(value, allow_nan=False)
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_is_finite)]


def read_object(text: str) -> dict[str, Any] | None:
    """Parse a JSON object. Return None if `text` is anything else."""
    try:
        value = from_json(text, allow_inf_nan=False)
        return _is_finite(value) if isinstance(value, dict) else None
    except ValueError:
        return None


def call_arguments(text: str | Mapping[str, Any] | None, where: str) -> str:
    """Return the arguments of a call in the history as JSON. None, "" and null mean no arguments.

    Raises:
        ApiError: status 400 if they are not a JSON object. Most chat templates would render a different call.
    """
    if isinstance(text, Mapping):
        return json.dumps(text, ensure_ascii=False)
    if text is None or text.strip() in ("", "null"):
        return "{}"
    if not is_object(text):
        raise refused(where, "is not a JSON object; send what the model wrote as text, in content")
    return text


def is_object(text: str) -> bool:
    """Return whether `text` is a JSON object. Unlike `read_object`, accepts halves of surrogate pairs as escapes."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict)


def _stop_strings(value: object) -> tuple[str, ...] | None:
    strings = [value] if isinstance(value, str) else value
    if strings is None:
        return None
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise ValueError("must be a string or a list of strings")
    if "" in strings:
        raise ValueError("a stop string is empty; leave it out")
    if max(map(len, strings), default=0) > MAX_STOP_CHARS:
        raise ValueError(f"a stop string has more than {MAX_STOP_CHARS} characters; send a shorter one")
    if len(strings) > MAX_STOP_STRINGS:
        raise ValueError(f"{len(strings)} stop strings, and at most {MAX_STOP_STRINGS} are searched for; send fewer")
    return tuple(strings)


StopStrings = Annotated[tuple[str, ...] | None, BeforeValidator(_stop_strings)]


class SamplingFields(Body):
    """The fields that engines read in every API. `_PENALTIES` are read too, but only counted."""

    model_config = ConfigDict(extra="allow")

    model: str
    temperature: float | None = Field(default=None, ge=0, le=10)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63 - MAX_CHOICES)
    stream: bool | None = None


def read(model: type[_M], body: bytes, harmless: Collection[str] = ()) -> _M:
    """Parse a request's body. Of the fields unknown to `model`, only those in `harmless` are ignored.

    Raises:
        ApiError: status 400; names the invalid field.
    """
    body = whole_characters(body)
    try:
        # Validating more values would hold the interpreter's lock for long.
        check_json(body, _MAX_CONTAINERS, _MAX_VALUES)
        request = model.model_validate_json(body)
    except ContractError as error:
        raise refused("body", error.reason) from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "union_tag_invalid":
            message = f"type {first['ctx']['tag']!r} is not supported here, only {first['ctx']['expected_tags']}"
        if first["type"] == "union_tag_not_found":
            message = "type is missing, or this is not an object"
        raise refused(where, message) from None
    refuse_unknown(request.model_extra, harmless)
    return request


def whole_characters(body: bytes) -> bytes:
    """Replace each escape of half a surrogate pair by that of U+FFFD, as encoders of UTF-8 do.

    JavaScript clients send halves after cutting a string within an emoji. JSON allows them, and no tokenizer does.
    """
    if b"\\ud" not in body and b"\\uD" not in body:
        return body
    return _SURROGATES.sub(lambda found: found[0][:-5] + b"ufffd" if found["half"] else found[0], body)


# --- unsupported and harmless fields ---------------------------------------------------------------------------


def refuse(advice: str, *fine: Any) -> AfterValidator:
    """Mark a field as refused with `advice`, unless it is null or one of the `fine` values."""

    def check(value: Any) -> Any:
        if value is not None and value not in fine:
            raise ValueError(advice)
        return value

    return AfterValidator(check)


def refused(where: str, message: str) -> ApiError:
    return ApiError(400, f"{where}: {message}", param=where)


def refuse_unknown(fields: Mapping[str, Any] | None, harmless: Collection[str]) -> None:
    """Refuse request fields that the dialect does not read.

    Raises:
        ApiError: status 400; names the first field that is neither null, empty nor harmless.
    """
    for name, value in (fields or {}).items():
        if value in (None, [], {}) or name in _PENALTIES or _sets_reasoning(name, value):
            continue
        if name in harmless or name in _HARMLESS:
            continue
        advice, fine = _EXTENSIONS.get(name, (_CHANGES, (False, "")))
        if value not in fine:
            raise refused(name, advice)


def _sets_reasoning(name: str, value: Any) -> bool:
    named = value if name == "chat_template_kwargs" and isinstance(value, dict) else {name: value}
    return value not in (None, {}) and _REASONING.issuperset(named)


class HostedTool(Body):
    """A tool that the provider runs, or on which it trains its models. It is left out and counted."""

    type: str


def ignored(body: bytes, fields: Mapping[str, Any] | None, tools: Iterable[object] = ()) -> frozenset[str]:
    """Return the names of the parts that are ignored in a request that `refuse_unknown` accepted.

    These are its harmless fields, the types of its hosted tools, and `lone_surrogate` for a half that was replaced.
    """
    others = _EXTENSIONS.keys() | _REASONING | _PENALTIES
    given = {name for name, value in (fields or {}).items() if value is not None and name not in others}
    nested = (name for name, (key, on) in _NESTED.items() if key in body and on.search(body))
    halves = () if whole_characters(body) == body else ("lone_surrogate",)
    return frozenset(given.union(nested, halves, (tool.type for tool in tools if isinstance(tool, HostedTool))))


# --- images, tools, answers ------------------------------------------------------------------------------------


class ImageReader:
    """Reads the images of a request one by one. If `limits` is None, refuses images with the message `text_only`."""

    def __init__(self, limits: ImageLimits | None, text_only: str) -> None:
        self.found: dict[str, Image] = {}
        self._limits = limits
        self._text_only = text_only
        self._read = 0

    @property
    def taken(self) -> bool:
        return self._limits is not None

    def url(self, url: str, where: str) -> Image:
        """Read a data URL. Raises ApiError (400) if it contains no image, or the request has too many."""
        if not self.taken:
            raise refused(where, self._text_only)
        head = _DATA_URL.match(url)
        if head is None:
            raise refused(where, "images are not fetched: send the image itself, as data:image/png;base64,...")
        return self.base64(url[head.end() :], where)

    def base64(self, text: str, where: str) -> Image:
        """Decode an image from base64. Raises ApiError (400) if it is invalid or the request has too many images."""
        if self._limits is None:
            raise refused(where, self._text_only)
        self._read += 1
        if self._read > self._limits.per_request:
            raise refused(where, f"more than {self._limits.per_request} images in one request; send fewer")
        try:
            image = read_image(base64.b64decode(text, validate=True), self._limits.pixels)
        except binascii.Error:
            raise refused(where, "is not base64") from None
        except ValueError as error:
            raise refused(where, str(error)) from None
        self.found[image.sha256] = image
        # Converting one takes up to a second.
        let_others_go_first()
        return image


def message_content(pieces: Sequence[str | Image], separator: str = "") -> str | list[dict[str, Any]]:
    """Return the content of a message with these texts and images.

    Without images it is a string, joined by `separator`. Otherwise it is a list of parts, which the template joins.
    """
    if all(isinstance(piece, str) for piece in pieces):
        return separator.join(map(str, pieces))
    parts: list[dict[str, Any]] = []
    for is_image, run in groupby(pieces, lambda piece: isinstance(piece, Image)):
        if is_image:
            parts += [image.part for image in run if isinstance(image, Image)]
        elif text := "".join(piece for piece in run if isinstance(piece, str)):
            parts.append({"type": "text", "text": text})
    return parts


def chat_tool(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, strict: bool | None
) -> dict[str, Any]:
    """Return a tool in the format of `ModelCall`. Missing fields are omitted, because templates print every field."""
    function = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def sampling_of(request: SamplingFields, *more: str) -> dict[str, float | int]:
    """Return a request's sampling settings, including the fields `more`. Some values become True,
    because the trainer overrides them and only their presence counts."""
    given = {name: getattr(request, name) for name in (*_SAMPLING, *more)}
    for name, value in (request.model_extra or {}).items():
        if name in _PENALTIES or _sets_reasoning(name, value):
            given[name] = value if name in _PENALTIES else True
    return {
        name: value if isinstance(value, (int, float)) else bool(value)
        for name, value in given.items()
        if value is not None
    }


def as_choice(choice: object) -> object:
    """Return a `tool_choice` of OpenAI's APIs as an object."""
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        raise ValueError("allowed_tools are not supported; send only those tools")
    return {"type": choice} if isinstance(choice, str) else choice


def as_texts(content: object) -> object:
    """Return the content of a message as a list of parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def schema_of(kind: str, schema: Mapping[str, Any] | None, where: str) -> Mapping[str, Any] | None:
    """Return the JSON schema for a format of OpenAI's APIs: text, json_object or json_schema."""
    if kind == "json_schema" and schema is None:
        raise refused(where, "is missing")
    return {"text": None, "json_object": {"type": "object"}}.get(kind, schema)


def check_forced(tool_name: str | None, tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Refuse a `tool_choice` that requires a tool that the request does not offer."""
    names = [tool["function"]["name"] for tool in tools or ()]
    if not names:
        raise refused("tool_choice", "demands a tool call, yet there are no tools; send some or leave it out")
    if tool_name is not None and tool_name not in names:
        raise refused("tool_choice.name", f"there is no tool {tool_name!r}; name one of {', '.join(names)}")


def openai_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error in the shape of OpenAI's APIs."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def data_event(data: Mapping[str, Any]) -> bytes:
    """Return one server-sent event without a name, in ASCII as `event`."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def event(name: str, data: Mapping[str, Any]) -> bytes:
    """Return one server-sent event, in ASCII because some clients also end a line at U+2028."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


def to_json(value: object, *, sort_keys: bool = False) -> bytes:
    """Serialize to UTF-8, several times faster than `json`. Numbers must be finite: NaN would become null."""
    try:
        return orjson.dumps(value, _plain, orjson.OPT_SORT_KEYS if sort_keys else None)
    except TypeError:
        # orjson refuses large numbers and halves of surrogate pairs.
        return json.dumps(value, sort_keys=sort_keys, separators=(",", ":"), default=_plain).encode()


def _plain(value: object) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


# --- growing conversations ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Known:
    dialect: str
    size: int
    """Bytes of the body up to the end of its last message."""
    tail: bytes
    digest: bytes
    messages: list[Message]
    ignored: frozenset[str]


class ParsedRequest(NamedTuple):
    call: ModelCall
    digest: bytes
    """Digest of the body."""


class RequestMemo:
    """Caches the messages of one session's latest requests. Callers share them and must not change them."""

    def __init__(self) -> None:
        # The latest request is last.
        self._known: list[_Known] = []

    def parse(self, dialect: Dialect, body: bytes) -> ParsedRequest:
        """Return `dialect.parse(body)`, with a digest of the body. Raises ApiError as that does."""
        if (extended := self.extend(dialect, body)) is not None:
            return extended
        call, field, digest = dialect.parse(body), dialect.appended_field, hashlib.blake2b(digest_size=16)
        begin = None if field is None else _begin_of_array(field, body)
        end = None if begin is None else _end_of_array(body, begin, len(call.messages))
        if field is None or end is None or call.images or _repeats(field, body[end:]):
            digest.update(body)
            return ParsedRequest(call, digest.digest())
        return self._remembered(dialect.name, body, call, end, None, digest)

    def extend(
        self, dialect: Dialect, body: bytes, is_brief: Callable[[bytes], bool] = lambda _: True
    ) -> ParsedRequest | None:
        """Return what `parse` returns, or None if the body does not extend a known one or `is_brief` is false for the
        rest. Apart from parsing the rest, this takes as long as digesting the body a few times."""
        field = dialect.appended_field
        if field is None or (begin := _begin_of_array(field, body)) is None:
            return None
        for known in sorted(self._known, key=lambda known: known.size, reverse=True):
            if known.dialect == dialect.name and body.endswith(known.tail, 0, known.size):
                digest = hashlib.blake2b(memoryview(body)[: known.size], digest_size=16)
                if digest.digest() == known.digest:
                    parsed = _parse_rest(dialect, field, body, begin, known, is_brief)
                    return None if parsed is None else self._remembered(dialect.name, body, *parsed, known, digest)
        return None

    def _remembered(
        self, dialect: str, body: bytes, call: ModelCall, end: int, known: _Known | None, digest: hashlib.blake2b
    ) -> ParsedRequest:
        """Remember a request whose last message ends at `end`. `digest` is that of the known part."""
        digest.update(memoryview(body)[known.size if known else 0 : end])
        others = [each for each in self._known if each is not known][1 - _KEPT :]
        tail = body[max(0, end - _TAIL) : end]
        # Replaced as a whole, because threads may share this object.
        self._known = [*others, _Known(dialect, end, tail, digest.digest(), list(call.messages), call.ignored)]
        digest.update(memoryview(body)[end:])
        return ParsedRequest(call, digest.digest())


def _parse_rest(
    dialect: Dialect, field: str, body: bytes, begin: int, known: _Known, is_brief: Callable[[bytes], bool]
) -> tuple[ModelCall, int] | None:
    """Return the call and the end of its last message in the body, or None if the whole body must be parsed or the
    rest is not brief."""
    after = _NEXT.match(body, known.size)
    if after is None:
        return None
    rest = body[:begin] + b"[" + body[after.end() :]
    if not is_brief(rest):
        return None
    try:
        call = dialect.parse(rest)
    except ApiError:
        # The index in its message would count from here, so the whole body is parsed.
        return None
    end = _end_of_array(rest, begin, len(call.messages))
    if end is None or call.images or _repeats(field, rest[end:]):
        return None
    call = replace(call, messages=[*known.messages, *call.messages], ignored=known.ignored | call.ignored)
    return call, end + after.end() - begin - 1


def _begin_of_array(field: str, body: bytes) -> int | None:
    """Return the beginning of the field's array, which follows at most a few other fields."""
    found = re.match(_BEGIN % field.encode(), body)
    return None if found is None else found.end()


def _end_of_array(body: bytes, begin: int, n: int) -> int | None:
    """Return the end of the array at `begin` if it has exactly `n` values, else None."""
    try:
        text = body[begin:].decode()
        values, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None
    if not n or len(values) != n:
        return None
    return begin + len(text[: end - 1].rstrip().encode())


def _repeats(field: str, rest: bytes) -> bool:
    """Return whether the rest of a body may repeat the field. JSON parsers would use the last value."""
    return f'"{field}"'.encode() in rest or b"\\u006" in rest or b"\\u007" in rest
