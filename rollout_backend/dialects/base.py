"""Define the interface of an API dialect, and parse growing conversations by parsing only the new messages.

Invariant: `RequestMemo` yields the messages that the dialect's `parse` returns for the whole body. Messages of an
earlier request are reused only if the bodies are equal up to the end of these messages.
"""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from rollout_backend.core.images import ImageLimits
from rollout_backend.core.model_call import Answer, ApiError, Delta, Message, ModelCall
from rollout_backend.dialects import wire
from rollout_backend.dialects.text_parts import Separators

_KEPT = 4  # conversations kept, because an agent may alternate between several
_TAIL = 64  # bytes compared before everything is digested
# The start of a body, up to its messages. Only plain values may precede them.
_BEGIN = rb'\s*\{\s*(?:"\w+"\s*:\s*(?:"[^"\\]*"|[\w.+-]+)\s*,\s*)*"%s"\s*:\s*(?=\[)'
_NEXT = re.compile(rb"\s*,\s*")
_DECODER = json.JSONDecoder()


class EventStream(Protocol):
    """Write one answer as server-sent events. Each event ends with an empty line."""

    def start(self, prompt_tokens: int) -> Iterator[bytes]: ...

    def delta(self, delta: Delta) -> Iterator[bytes]: ...

    def end(self, answer: Answer) -> Iterator[bytes]:
        """Write what follows the last delta. The deltas contain all text and tool calls of the answer."""
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

        Refuses unknown fields, and values that would change the call's meaning if they were ignored: see `wire`.

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
        return wire.openai_error(error)

    def parse_count(self, body: bytes) -> ModelCall:
        """Parse a request to `count_path`. Raises ApiError (400) as `parse` does."""
        return self.parse(body)

    def count_body(self, prompt_tokens: int) -> dict[str, Any]:
        """Return the response to a request to `count_path`."""
        raise NotImplementedError


# --- growing conversations ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Known:
    dialect: str
    size: int  # bytes of the body up to the end of its last message
    tail: bytes
    digest: bytes
    messages: list[Message]
    ignored: frozenset[str]


class RequestMemo:
    """Caches the messages of one session's latest requests. Callers share them and must not change them."""

    def __init__(self) -> None:
        self._known: list[_Known] = []  # latest last

    def parse(self, dialect: Dialect, body: bytes) -> ModelCall:
        """Return `dialect.parse(body)`. Raises ApiError as that does."""
        field = dialect.appended_field
        begin = re.match(_BEGIN % field.encode(), body) if field is not None else None
        if field is None or begin is None:
            return dialect.parse(body)
        known, digest = self._find(dialect.name, body)
        extended = None if known is None else _parse_rest(dialect, field, body, begin.end(), known)
        if extended is None:
            known, digest = None, hashlib.blake2b(digest_size=16)
            call = dialect.parse(body)
            end = _end_of_array(body, begin.end(), len(call.messages))
        else:
            call, end = extended
        if end is not None and not call.images and not _repeats(field, body[end:]):
            digest.update(memoryview(body)[known.size if known else 0 : end])
            others = [each for each in self._known if each is not known][1 - _KEPT :]
            tail = body[max(0, end - _TAIL) : end]
            # Replaced as a whole, because threads may share this object.
            latest = _Known(dialect.name, end, tail, digest.digest(), list(call.messages), call.ignored)
            self._known = [*others, latest]
        return call

    def _find(self, dialect: str, body: bytes) -> tuple[_Known | None, Any]:
        """Return the longest known prefix of the body, and its digest, which the caller continues."""
        for known in sorted(self._known, key=lambda known: known.size, reverse=True):
            if known.dialect == dialect and body.endswith(known.tail, 0, known.size):
                found = hashlib.blake2b(memoryview(body)[: known.size], digest_size=16)
                if found.digest() == known.digest:
                    return known, found
        return None, hashlib.blake2b(digest_size=16)


def _parse_rest(dialect: Dialect, field: str, body: bytes, begin: int, known: _Known) -> tuple[ModelCall, int] | None:
    """Return the call, and the end of its last message in the body; None if the whole body must be parsed."""
    after = _NEXT.match(body, known.size)
    if after is None:
        return None
    rest = body[:begin] + b"[" + body[after.end() :]
    try:
        call = dialect.parse(rest)
    except ApiError:  # its message would count from here: parse the whole body for the right index
        return None
    end = _end_of_array(rest, begin, len(call.messages))
    if end is None or call.images or _repeats(field, rest[end:]):
        return None
    call = replace(call, messages=[*known.messages, *call.messages], ignored=known.ignored | call.ignored)
    return call, end + after.end() - begin - 1


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
    """Return whether the rest of a body may repeat the field, of which JSON parsers use the last."""
    return f'"{field}"'.encode() in rest or b"\\u006" in rest or b"\\u007" in rest
