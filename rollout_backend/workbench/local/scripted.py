"""Emulate SGLang's HTTP interface with scripted answers instead of a model, for tests of agents and of this project.

Each session (`X-SMG-Routing-Key`) reads the script from its start, so concurrent sessions do not affect each other.
Prompts and answers are token ids of a real tokenizer. The tokens are scripted, and the log-probability of each is
`LOGPROB`.
"""

import asyncio
import base64
import functools
import itertools
import json
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import uvicorn
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer

from rollout_backend.errors import ConfigError, StartupError
from rollout_backend.model.serving.server_process import free_port

BYTE_MODEL = Path(__file__).with_name("byte_model")
"""A byte-level ChatML tokenizer: 259 tokens, no weights. With it, `context_length` counts bytes."""
LOGPROB = -0.5
_START_S = 10.0
_SUM = re.compile(r"What is (\d+) \+ (\d+)\?")


@dataclass(frozen=True)
class ToolCall:
    """An answer that calls one tool, in the Hermes format of ChatML models."""

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
    """An answer that is streamed in parts. The iterator runs in a thread and may block."""

    parts: Iterable[str]


@dataclass(frozen=True)
class Aborted:
    """An answer that the engine aborts after this text, for example to load new weights."""

    text: str

    def __str__(self) -> str:
        return self.text


Routing = Callable[[Sequence[int], str], NDArray[np.int32]]
"""Returns the experts of each token in a sequence, [tokens, layers, topk], for a weight version."""
_T = TypeVar("_T")
# At most this many answers may block without delaying others.
_BLOCKED = 256

Reply = str | ToolCall | list[str | ToolCall] | Fail | Pieces | Aborted
"""A list is one answer: its parts, joined by newlines."""
Script = Sequence[Reply] | Callable[[str], Reply]


@functools.lru_cache(maxsize=8)
def _tokenizer(file: Path, changed_ns: int) -> Tokenizer:
    """Return the cached tokenizer: a large vocabulary takes 0.5 s to read, and each test starts an engine."""
    return Tokenizer.from_file(str(file))


def _listen(port: int) -> socket.socket:
    """Return a socket that listens on the port, so that no other process can take it. 0 selects a free port."""
    while True:
        try:
            return socket.create_server(("127.0.0.1", port or free_port()))
        except OSError as error:
            if port:
                raise StartupError(f"port {port} is taken: {error}") from None


class ScriptedEngine:
    """A context manager that serves `replies` in a separate thread.

    `replies` is a sequence that each session reads from the start (a request beyond its end gets 400), or a function
    of the prompt's text, which runs in a thread and may block. An answer ends with the token `end`, unless
    `max_new_tokens` or a stop string cuts it. With `end=None`, for models with several end tokens, it ends with the
    first of the request's stop tokens, or at its limit. With `stream` each token is one event; `cumulative` events
    hold all tokens so far, like SGLang's without --incremental-streaming-output. `image_tokens` returns the number of
    tokens of an image from its bytes, for vocabularies with `<|image_pad|>`; without it images get 400. `routing`
    gives the routed experts of requests for them. Without it they get none, like those to a server without
    --enable-return-routed-experts.
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
        routing: Routing | None = None,
    ) -> None:
        file = model_path / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{model_path} holds no tokenizer.json: model_path must be a model's folder")
        self.tokenizer = _tokenizer(file, file.stat().st_mtime_ns)
        self.weight_version = "0"
        # Bodies of the /generate requests, in order of arrival.
        self.requests: list[dict[str, Any]] = []
        # Number of calls whose client disconnected before the answer.
        self.aborted = 0
        # New sessions read this script unless `script` sets another one.
        self.replies = replies
        self.image_tokens = image_tokens
        self.routing = routing
        self.hierarchical_cache = False
        self.deterministic = True
        self._scripts: dict[str, Script] = {}
        self._model_path = model_path
        self._read: dict[str, int] = {}
        self._end = None if end is None else self.tokenizer.token_to_id(end)
        if end is not None and self._end is None:
            raise ConfigError(f"{model_path} is not a ChatML model: its vocabulary has no {end}")
        self._listener = _listen(port)
        self.port = int(self._listener.getsockname()[1])
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app(),
                # A router first probes a new engine with gRPC, which logs two warnings.
                log_level="error",
                access_log=False,
                # `force_exit` would interrupt the lifespan, with a traceback.
                lifespan="off",
            )
        )
        self._threads = ThreadPoolExecutor(_BLOCKED)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._listener],), name="scripted-engine", daemon=True
        )

    def _in_thread(self, work: Callable[..., _T], *arguments: Any) -> asyncio.Future[_T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def script(self, session_id: str, replies: Script) -> None:
        """Set the script of one session, which starts at its beginning."""
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
                raise StartupError(f"the scripted engine did not start on {self.url}")
            time.sleep(0.01)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.should_exit = True
        # Do not wait for blocked answers.
        self._server.force_exit = True
        self._thread.join(_START_S)
        self._listener.close()

    # Tests override this method to add middleware.
    def _app(self) -> Starlette:
        return Starlette(routes=self._routes())

    def _routes(self) -> list[Route]:
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
            routed = self.routing is not None
            return JSONResponse(
                {
                    "model_path": str(self._model_path),
                    "version": "scripted",
                    "enable_return_routed_experts": routed,
                    "enable_hierarchical_cache": self.hierarchical_cache,
                    "enable_deterministic_inference": self.deterministic,
                }
            )

        return [
            *(Route(path, healthy, methods=["GET"]) for path in ("/health", "/health_generate")),
            *(Route(path, model_info, methods=["GET"]) for path in ("/get_model_info", "/model_info")),
            *(Route(path, server_info, methods=["GET"]) for path in ("/get_server_info", "/server_info")),
            Route("/v1/models", models, methods=["GET"]),
            Route("/flush_cache", healthy, methods=["GET", "POST"]),
            # A pause has no effect, because a client that pauses an engine sends it no calls.
            Route("/pause_generation", healthy, methods=["POST"]),
            Route("/continue_generation", healthy, methods=["POST"]),
            Route("/generate", self._generate, methods=["POST"]),
        ]

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        if body.get("input_ids") == [0]:
            # The probe of a silent or idle engine takes no scripted reply.
            return JSONResponse(self._completion("", body))
        self.requests.append(body)
        try:
            body = await self._translated(body)
        except ValueError as error:
            return JSONResponse({"error": {"message": str(error)}}, status_code=400)
        answer = asyncio.ensure_future(self._reply(request.headers.get("x-smg-routing-key", ""), body))
        gone = asyncio.ensure_future(_disconnected(request))
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not answer.done():
            self.aborted += 1
            answer.cancel()
            return Response(status_code=499)
        reply = answer.result()
        if isinstance(reply, list):
            reply = "\n".join(map(str, reply))
        if isinstance(reply, Fail):
            return JSONResponse({"error": {"message": reply.message}}, status_code=reply.status)
        body["aborted"] = isinstance(reply, Aborted)
        if body.get("stream"):
            parts = reply.parts if isinstance(reply, Pieces) else (str(reply),)
            return StreamingResponse(self._events(parts, body), media_type="text/event-stream")
        text = await self._in_thread("".join, reply.parts) if isinstance(reply, Pieces) else str(reply)
        return JSONResponse(self._whole(text, body))

    async def _translated(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the request in SGLang's format, with the whole prompt. Raises ValueError if it is refused."""
        body = {**body, "input_ids": self._prompt(body)}
        if body.get("routed_experts_start_len", 0) > len(body["input_ids"]):
            raise ValueError("routed_experts_start_len is higher than the number of input tokens")
        return body

    def _whole(self, text: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to a request that does not stream."""
        whole = self._completion(text, body)
        whole["meta_info"] |= self._routed(whole["output_ids"], body)
        return whole

    def _routed(self, ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
        """Return the routing that a request asks for. The last token has none, because it was not processed."""
        if self.routing is None or not body.get("return_routed_experts"):
            return {}
        processed = [*body["input_ids"], *ids][:-1]
        rows = self.routing(processed, self.weight_version)[body.get("routed_experts_start_len", 0) :]
        return {"routed_experts": base64.b64encode(rows.astype("<i4").tobytes()).decode()}

    def _prompt(self, body: dict[str, Any]) -> list[int]:
        """Return the prompt as SGLang expands it, with an image's pad token repeated for each of its tokens."""
        images = [base64.b64decode(url.partition(",")[2]) for url in body.get("image_data") or ()]
        if not images:
            return list(body["input_ids"])
        if self.image_tokens is None:
            raise ValueError("this scripted engine takes no images: pass image_tokens")
        pad = self.tokenizer.token_to_id("<|image_pad|>")
        if body["input_ids"].count(pad) != len(images):
            raise ValueError(f"{body['input_ids'].count(pad)} image pads for {len(images)} images")
        lengths = map(self.image_tokens, images)
        return [token for each in body["input_ids"] for token in [each] * (next(lengths) if each == pad else 1)]

    async def _events(self, parts: Iterable[str], body: dict[str, Any]) -> AsyncIterator[bytes]:
        """Yield the new tokens of the completion after each part of the answer."""
        text, sent, remaining, done = "", 0, iter(parts), False
        prompt_ids = _prompt_ids(body)
        try:
            while not done:
                part = await self._in_thread(next, remaining, None)
                text += part or ""
                whole = self._completion(text, body)
                ids, meta = whole["output_ids"], whole["meta_info"]
                cut = meta["finish_reason"].get("matched") != self._end
                # The end token is final only after the last part.
                last = len(ids) if part is None or cut else len(ids) - 1
                for n in range(sent + 1, last + 1):
                    start = 0 if self.cumulative else n - 1
                    piece = {
                        **meta,
                        "finish_reason": meta["finish_reason"] if n == len(ids) else None,
                        "completion_tokens": n,
                        "output_token_logprobs": meta["output_token_logprobs"][start:n],
                        "weight_versions": [{"version": meta["weight_version"], "start": 0, "end": n}],
                        **(self._routed(ids, body) if n == len(ids) else {}),
                    }
                    yield event({**prompt_ids, "output_ids": ids[start:n], "meta_info": piece})
                sent = last
                done = sent == len(ids)
            yield b"data: [DONE]\n\n"
        finally:
            self.aborted += not done

    async def _reply(self, session: str, body: dict[str, Any]) -> Reply:
        replies = self._scripts.setdefault(session, self.replies)
        if callable(replies):
            prompt = self.tokenizer.decode(body["input_ids"], skip_special_tokens=False)
            return await self._in_thread(replies, prompt)
        n = self._read.get(session, 0)
        if n == len(replies):
            return Fail(400, f"the script is exhausted: session {session!r} requested more than {n} replies")
        self._read[session] = n + 1
        return replies[n]

    def _completion(self, text: str, body: dict[str, Any]) -> dict[str, Any]:
        params = body.get("sampling_params", {})
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if self._end is not None and not body.get("aborted"):
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
        elif body.get("aborted"):
            finish = {"type": "abort", "message": "scripted abort"}
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


def event(data: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def is_sum(text: str) -> bool:
    """Return whether `ScriptedSums` can answer a prompt with this text."""
    return _SUM.search(text) is not None


class ScriptedSums:
    """A script that answers a prompt's last sum. Some answers are wrong, so that rewards differ within a group.

    Every third answer to a prompt is wrong; the sum determines which one. Answers to sums whose first number is 5 are
    always right. A prompt without a sum gets a fixed reply.
    """

    def __init__(self, reply: int | None = None) -> None:
        """With `reply`, a prompt always gets its reply of that number."""
        self._reply = reply
        self._counts: dict[str, itertools.count[int]] = {}

    def __call__(self, prompt: str) -> str:
        sums = _SUM.findall(prompt)
        if not sums:
            return "This reply is scripted."
        a, b = map(int, sums[-1])
        seen = next(self._counts.setdefault(prompt, itertools.count())) if self._reply is None else self._reply
        is_right = a == 5 or (a + b + seen) % 3 > 0
        return f"It is {a + b if is_right else a + b + 1}."
