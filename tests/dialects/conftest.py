from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from dialect_data import CACHED_TOKENS, PROMPT_TOKENS, SAMPLED_TOKENS
from gateway_server import ServerThread
from rollout_backend.core.api_error import ApiError
from rollout_backend.core.model_call import Answer, Choice, Delta, ModelCall
from rollout_backend.dialects.base import Dialect

ID, CREATED = "0a" * 12, 1_700_000_000


@dataclass
class Script:
    """What the server answers, and the calls that it got."""

    answer: Answer | None = None
    deltas: Sequence[Delta] = ()
    error: ApiError | None = None  # in a stream after the deltas, else at once
    calls: list[ModelCall] = field(default_factory=list)

    def reply(
        self,
        message: dict,
        finish_reason: str = "stop",
        matched_stop: str | None = None,
        deltas: Sequence[Delta] = (),
    ) -> None:
        """Set the reply; without `deltas` a stream has each of its parts in two pieces."""
        choice = Choice(message, finish_reason, SAMPLED_TOKENS, matched_stop)
        self.answer = Answer(ID, CREATED, "m", (choice,), PROMPT_TOKENS, CACHED_TOKENS)
        self.deltas = deltas or [
            *_halves("reasoning", message.get("reasoning_content")),
            *_halves("text", message["content"]),
            *(Delta("tool_call", tool_call=call) for call in message.get("tool_calls", ())),
        ]


def _halves(kind, text: str | None) -> list[Delta]:
    middle = len(text or "") // 2
    return [Delta(kind, text[:middle]), Delta(kind, text[middle:])] if text else []


class Scripted(ServerThread):
    """A server of one dialect, which answers with its script."""

    def __init__(self, dialect: Dialect, path: str) -> None:
        self.script = Script()
        self._dialect = dialect
        routes = [Route(path, self._answer, methods=["POST"])]
        if dialect.count_path is not None:
            routes.append(Route(f"{path}/count_tokens", self._count, methods=["POST"]))
        super().__init__(Starlette(routes=routes, exception_handlers={ApiError: self._refuse}))

    async def _answer(self, request: Request) -> Response:
        call = self._dialect.parse(await request.body())
        self.script.calls.append(call)
        if call.stream:
            return StreamingResponse(self._events(call), media_type="text/event-stream")
        if self.script.error:
            raise self.script.error
        return JSONResponse(self._dialect.body(call, self.script.answer))

    async def _count(self, request: Request) -> Response:
        self.script.calls.append(self._dialect.parse_count(await request.body()))
        return JSONResponse(self._dialect.count_body(PROMPT_TOKENS))

    def _events(self, call: ModelCall) -> Iterator[bytes]:
        events = self._dialect.stream(call, ID, CREATED, "m")
        yield events.keepalive()
        yield from events.start(PROMPT_TOKENS)
        for delta in self.script.deltas:
            yield from events.delta(delta)
            yield events.keepalive()
        if self.script.error:
            yield from events.failed(self.script.error)
        else:
            yield from events.end(self.script.answer)

    async def _refuse(self, _: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return JSONResponse(self._dialect.error_body(error), status_code=error.status, headers=error.headers)


@pytest.fixture(scope="module")
def serve_dialect():
    """Start a scripted server for a dialect under a path."""
    with ExitStack() as stack:
        yield lambda dialect, path: stack.enter_context(Scripted(dialect, path))


@pytest.fixture
def script(server):
    server.script = Script()
    return server.script
