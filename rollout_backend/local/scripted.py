"""An engine with scripted answers: SGLang's HTTP interface without a model, for tests of agents and of this project.

Each session (`X-SMG-Routing-Key`) reads the script from its start, so concurrent sessions do not disturb each other.
Prompts are real token ids of a real tokenizer and answers are encoded with it; what is made up is the choice of
the tokens and their log-probability, which is `LOGPROB` for each.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer

from rollout_backend.errors import ConfigError, StartupError
from rollout_backend.process import free_port

BYTE_MODEL = Path(__file__).with_name("byte_model")
"""A byte-level ChatML tokenizer: 259 tokens, no weights. `context_length` is in bytes with it."""
LOGPROB = -0.5
_START_S = 10.0


@dataclass(frozen=True)
class ToolCall:
    """An answer that calls one tool, in the Hermes form that ChatML models use."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        call = json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)
        return f"<tool_call>\n{call}\n</tool_call>"


@dataclass(frozen=True)
class Fail:
    """An answer that is an HTTP error of the engine."""

    status: int = 500
    message: str = "scripted failure"


@dataclass(frozen=True)
class Pieces:
    """An answer that is streamed as its parts come. The iterator runs in a thread and may block."""

    parts: Iterable[str]


Reply = str | ToolCall | Fail | Pieces
Script = Sequence[Reply] | Callable[[str], Reply]


@functools.lru_cache(maxsize=8)
def _tokenizer(file: Path, changed_ns: int) -> Tokenizer:
    """Kept, for a large vocabulary takes half a second to read, and tests start an engine each."""
    return Tokenizer.from_file(str(file))


class ScriptedEngine:
    """Serves `replies` in a thread of its own while it is entered as a context manager.

    `replies` is a sequence, of which each session gets one after another from the start (one answer too many
    is an error 400), or a function of the prompt's text. The function runs in a thread and may block.
    An answer ends with the token `end` unless `max_new_tokens` or a stop string cuts it; with `end=None`, for models
    with several such tokens, it ends with the first of the request's stop tokens in it, and else at its limit. To a
    request with `stream` it comes token by token, each as an event of its own; `cumulative` events hold all tokens so
    far, as SGLang's do unless it was started with --incremental-streaming-output. `image_tokens` tells how many
    tokens an image takes, by its bytes, for vocabularies with `<|image_pad|>`; without it images are an error 400.
    """

    cumulative = False

    def __init__(
        self,
        replies: Script,
        model_path: Path = BYTE_MODEL,
        port: int = 0,
        *,
        end: str | None = "<|im_end|>",
        image_tokens: Callable[[bytes], int] | None = None,
    ) -> None:
        file = model_path / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{model_path} holds no tokenizer.json: model_path must be a model's folder")
        self.tokenizer = _tokenizer(file, file.stat().st_mtime_ns)
        self.weight_version = "0"  # of the answers from now on
        self.requests: list[dict[str, Any]] = []  # the bodies of /generate, in the order of arrival
        self.aborted = 0  # calls whose client hung up before the answer
        self.port = port or free_port()
        self.replies = replies  # of sessions that begin from now on and have no script of their own
        self.image_tokens = image_tokens
        self._scripts: dict[str, Script] = {}
        self._model_path = model_path
        self._read: dict[str, int] = {}
        self._end = None if end is None else self.tokenizer.token_to_id(end)
        if end is not None and self._end is None:
            raise ConfigError(f"{model_path} is no model of this kind: its vocabulary has no {end}")
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app(),
                host="127.0.0.1",
                port=self.port,
                log_level="error",  # a router asks a new engine in gRPC first: two warnings each time
                access_log=False,
                lifespan="off",  # force_exit would cut it, with a traceback
            )
        )
        self._thread = threading.Thread(target=self._server.run, name="scripted-engine", daemon=True)

    def script(self, session_id: str, replies: Script) -> None:
        """Gives one session a script of its own, from its start."""
        self._scripts[session_id] = replies
        self._read.pop(session_id, None)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        deadline = time.monotonic() + _START_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise StartupError(f"the scripted engine did not come up on {self.url}")
            time.sleep(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._server.force_exit = True  # answers still held back are not waited for
        self._thread.join(_START_S)

    def _app(self) -> Starlette:
        async def healthy(_: Request) -> Response:
            return Response()

        async def model_info(_: Request) -> Response:
            return JSONResponse(
                {
                    "model_path": str(self._model_path),
                    "tokenizer_path": str(self._model_path),
                    "is_generation": True,
                    "weight_version": self.weight_version,
                }
            )

        async def models(_: Request) -> Response:
            return JSONResponse({"object": "list", "data": [{"id": str(self._model_path), "object": "model"}]})

        async def server_info(_: Request) -> Response:
            return JSONResponse({"model_path": str(self._model_path), "version": "scripted"})

        return Starlette(
            routes=[
                *(Route(path, healthy, methods=["GET"]) for path in ("/health", "/health_generate")),
                *(Route(path, model_info, methods=["GET"]) for path in ("/get_model_info", "/model_info")),
                *(Route(path, server_info, methods=["GET"]) for path in ("/get_server_info", "/server_info")),
                Route("/v1/models", models, methods=["GET"]),
                Route("/flush_cache", healthy, methods=["GET", "POST"]),
                Route("/generate", self._generate, methods=["POST"]),
            ],
        )

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        try:
            body = {**body, "input_ids": self._prompt(body)}
        except ValueError as error:
            return JSONResponse({"error": {"message": str(error)}}, status_code=400)
        answer = asyncio.ensure_future(self._reply(request.headers.get("x-smg-routing-key", ""), body))
        gone = asyncio.ensure_future(_hung_up(request))
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not answer.done():
            self.aborted += 1
            answer.cancel()
            return Response(status_code=499)
        reply = answer.result()
        if isinstance(reply, Fail):
            return JSONResponse({"error": {"message": reply.message}}, status_code=reply.status)
        if body.get("stream"):
            parts = reply.parts if isinstance(reply, Pieces) else (str(reply),)
            return StreamingResponse(self._events(parts, body), media_type="text/event-stream")
        text = await asyncio.to_thread("".join, reply.parts) if isinstance(reply, Pieces) else str(reply)
        return JSONResponse(self._completion(text, body))

    def _prompt(self, body: dict[str, Any]) -> list[int]:
        """As SGLang makes it: a pad for each image, repeated as often as the image takes tokens."""
        images = [base64.b64decode(url.partition(",")[2]) for url in body.get("image_data") or ()]
        if not images:
            return list(body["input_ids"])
        if self.image_tokens is None:
            raise ValueError("this scripted engine takes no images: it was not told how many tokens they are")
        pad = self.tokenizer.token_to_id("<|image_pad|>")
        if body["input_ids"].count(pad) != len(images):
            raise ValueError(f"{body['input_ids'].count(pad)} places for {len(images)} images")
        lengths = map(self.image_tokens, images)
        return [token for each in body["input_ids"] for token in [each] * (next(lengths) if each == pad else 1)]

    async def _events(self, parts: Iterable[str], body: dict[str, Any]) -> AsyncIterator[bytes]:
        """The completion of what is there so far, again and again, each time as far as it is new."""
        text, sent, remaining, done = "", 0, iter(parts), False
        told = _prompt_ids(body)
        try:
            while not done:
                part = await asyncio.to_thread(next, remaining, None)
                text += part or ""
                whole = self._completion(text, body)
                ids, meta = whole["output_ids"], whole["meta_info"]
                cut = meta["finish_reason"].get("matched") != self._end
                last = len(ids) if part is None or cut else len(ids) - 1  # more may come: this is not the end yet
                for n in range(sent + 1, last + 1):
                    start = 0 if self.cumulative else n - 1
                    piece = {
                        **meta,
                        "finish_reason": meta["finish_reason"] if n == len(ids) else None,
                        "completion_tokens": n,
                        "output_token_logprobs": meta["output_token_logprobs"][start:n],
                        "weight_versions": [{"version": meta["weight_version"], "start": 0, "end": n}],
                    }
                    yield _event({**told, "output_ids": ids[start:n], "meta_info": piece})
                sent = last
                done = sent == len(ids)
            yield b"data: [DONE]\n\n"
        finally:
            self.aborted += not done

    async def _reply(self, session: str, body: dict[str, Any]) -> Reply:
        replies = self._scripts.setdefault(session, self.replies)
        if callable(replies):
            prompt = self.tokenizer.decode(body["input_ids"], skip_special_tokens=False)
            return await asyncio.to_thread(replies, prompt)
        n = self._read.get(session, 0)
        if n == len(replies):
            return Fail(400, f"the script is used up: session {session!r} asked for more than {n} replies")
        self._read[session] = n + 1
        return replies[n]

    def _completion(self, text: str, body: dict[str, Any]) -> dict[str, Any]:
        params = body.get("sampling_params", {})
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if self._end is not None:
            ids.append(self._end)
        ends = params.get("stop_token_ids") or [] if self._end is None else [self._end]
        finish: dict[str, Any] = {"type": "length", "length": len(ids)}
        at = next((n for n, token in enumerate(ids) if token in ends), None)
        if at is not None:
            ids = ids[: at + 1]
            finish = {"type": "stop", "matched": ids[at]}
        stop = params.get("stop") or []
        for string in [stop] if isinstance(stop, str) else stop:
            if string in self.tokenizer.decode(ids):
                ids = next(ids[:n] for n in range(1, len(ids) + 1) if string in self.tokenizer.decode(ids[:n]))
                finish = {"type": "stop", "matched": string}
        limit = params.get("max_new_tokens", 128)
        if len(ids) > limit:
            ids = ids[:limit]
            finish = {"type": "length", "length": limit}
        version = self.weight_version
        return _prompt_ids(body) | {
            "text": self.tokenizer.decode(ids),
            "output_ids": ids,
            "meta_info": {
                "id": body.get("rid", ""),
                "finish_reason": finish,
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": len(ids),
                "cached_tokens": 0,
                "weight_version": version,
                "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
                "output_token_logprobs": [[LOGPROB, token, None] for token in ids],
            },
        }


def _prompt_ids(body: dict[str, Any]) -> dict[str, Any]:
    return {"prompt_token_ids": body["input_ids"]} if body.get("return_prompt_token_ids") else {}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
