"""Define the interface of an API dialect."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

from rollout_backend.core.api_error import ApiError
from rollout_backend.core.images import ImageLimits
from rollout_backend.core.model_call import Answer, Delta, ModelCall


class EventStream(Protocol):
    """Write one answer as server-sent events. Each event ends with an empty line."""

    def start(self, prompt_tokens: int) -> Iterator[bytes]: ...

    def delta(self, delta: Delta) -> Iterator[bytes]: ...

    def end(self, answer: Answer) -> Iterator[bytes]:
        """Write what follows the last delta. The deltas contain all text and tool calls of the answer."""
        ...

    def failed(self, error: ApiError) -> Iterator[bytes]: ...

    def keepalive(self) -> bytes:
        """Return bytes that every client ignores."""
        ...


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

    def __init__(self, images: ImageLimits | None = None) -> None:
        """`images` is None for a text-only model."""
        self._images = images

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

    @abstractmethod
    def error_body(self, error: ApiError) -> dict[str, Any]:
        """Return the body of an error response."""

    def parse_count(self, body: bytes) -> ModelCall:
        """Parse a request to `count_path`. Raises ApiError (400) as `parse` does."""
        raise NotImplementedError

    def count_body(self, prompt_tokens: int) -> dict[str, Any]:
        """Return the response to a request to `count_path`."""
        raise NotImplementedError
