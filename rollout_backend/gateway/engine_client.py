"""Call an engine's `/generate`: send token ids, receive token ids with logprobs and weight versions.

Invariants:

- A `Completion` has exactly what the engine sampled for these ids. A missing logprob is None and a missing version is
  absent; nothing is filled in.
- A prompt with images equals the recorded one. The engine builds it from one token and the bytes of each image, and
  returns its ids, or through a router its length. If they differ, the reply is discarded.
- A call ends within `timeout_s` and after at most `attempts` attempts.
- Generation that an engine aborts (for example to load new weights) resumes from the tokens sampled so far. They were
  sampled under the same prompt and keep their logprobs and weight versions. An abort without tokens is a plain retry.
  The same applies to an interrupted stream, whose tokens may already have been sent to the agent.
- With stop strings, the engine streams and is disconnected at the token that completes one. Later tokens are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import math
import time
import uuid
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import orjson
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    RetryError,
    retry_if_exception_type,
    stop_after_attempt,
    wait_exponential_jitter,
)

from agent_wrapper.contract import VersionSpan
from rollout_backend.core.images import PlacedImage
from rollout_backend.errors import EngineUnavailable, ServingError
from rollout_backend.gateway.direct_routing import DirectRouting
from rollout_backend.gateway.generation_gate import GateClosed
from rollout_backend.lazy_retry import retry
from rollout_backend.rendering.image_positions import collapse_images
from rollout_backend.rendering.stop_strings import StopStrings

ROUTING_HEADER = "X-SMG-Routing-Key"
_RETRIED = frozenset({408, 429, 499})  # and every 5xx
_MESSAGE_CHARS = 500
_STREAM_INTERVAL = 4  # tokens per piece of a stream; each piece costs the engine a message
_IMAGES_STREAM_INTERVAL = 32  # each piece repeats the prompt

_exponential = wait_exponential_jitter(multiplier=0.25, max=15, jitter=0.25)
_AFTER_ABORT_S = 1.0

Progress = Callable[[Sequence[int], Sequence[float | None]], None]
"""Called with all tokens sampled so far and their logprobs, whenever there are more. The sequences are reused."""


class EngineRefused(ServingError):
    """The engine refused the request as invalid (4xx). The message is the engine's."""


class PromptDiffers(ServingError):
    """The engine built a different prompt from the images, so its reply cannot be recorded."""


class _Retry(Exception):
    pass


class _Aborted(_Retry):
    """A healthy engine aborted the generation, for example to pause."""


_TRANSIENT = (_Retry, aiohttp.ClientError, TimeoutError)  # errors that are retried


@dataclass(frozen=True)
class Completion:
    """One reply. `logprobs` has one entry for each token; the spans of `weight_versions` count from the first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    weight_versions: tuple[VersionSpan, ...]  # cover all tokens in order; empty if the engine gave none
    finish_reason: str  # "stop" or "length"
    matched: str | None  # the stop string that ended it
    cached_tokens: int
    seconds: float


@dataclass
class _Partial:
    """The tokens sampled so far, over all attempts."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    versions_known: bool = True
    cached_tokens: int | None = None  # cache hit of the prompt, from the first attempt with tokens
    finish: Mapping[str, Any] | None = None

    def completion(self, seconds: float) -> Completion:
        assert self.finish is not None
        matched = self.finish.get("matched")
        return Completion(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            weight_versions=_merged(self.versions) if self.versions_known else (),
            finish_reason=self.finish["type"],
            matched=matched if isinstance(matched, str) else None,
            cached_tokens=self.cached_tokens or 0,
            seconds=seconds,
        )


@dataclass(frozen=True)
class _Request:
    """One call, as all its attempts send it."""

    input_ids: Sequence[int]
    params: Mapping[str, Any]
    routing_key: str
    images: Sequence[PlacedImage]
    progress: Progress | None
    stops: StopStrings | None
    resumable: bool


class _Attempt:
    """One request to the engine. `add` appends its tokens to `partial`; `close` adds their metadata."""

    def __init__(self, partial: _Partial) -> None:
        self._partial = partial
        self._start = len(partial.token_ids)
        self._received = 0  # tokens, including those after a stop string
        self._meta: Mapping[str, Any] = {}
        self._current: set[Any] = set()  # the engine's weight version at each piece

    def add(self, reply: Mapping[str, Any]) -> None:
        """Add a whole reply, or a piece of a stream.

        A piece has all tokens of this attempt, or those since the last piece, depending on the engine's settings.
        `completion_tokens` distinguishes the two.
        """
        ids = [int(token) for token in reply["output_ids"]]
        meta = reply["meta_info"]
        logprobs = meta.get("output_token_logprobs") or []
        had = self._received
        total = meta.get("completion_tokens", len(ids))
        if len(ids) == total:
            ids, logprobs = ids[had:], logprobs[had:]
        else:
            ids = ids[: max(0, total - had)]  # an abort repeats the last token
        self._partial.token_ids += ids
        self._partial.logprobs += _logprobs(logprobs, ids)
        self._received += len(ids)
        self._meta = meta
        self._current.add(meta.get("weight_version"))

    def cut(self, tokens: int) -> None:
        """Drop all tokens after this many, counted over all attempts."""
        del self._partial.token_ids[tokens:], self._partial.logprobs[tokens:]

    def close(self) -> None:
        partial = self._partial
        kept = len(partial.token_ids) - self._start
        if partial.cached_tokens is None and self._received:
            partial.cached_tokens = int(self._meta.get("cached_tokens") or 0)
        spans = _spans(self._meta, self._received)
        if not self._meta.get("weight_versions") and len(self._current) > 1:
            spans = None  # an interrupted stream during which the weights changed
        partial.versions_known &= spans is not None
        partial.versions += [
            VersionSpan(version=version, start=start + self._start, end=min(end, kept) + self._start)
            for version, start, end in spans or ()
            if start < kept
        ]


class EngineClient:
    """Calls the router or the engine at `url`, or one of `engines` directly if the router would truncate the call.

    `timeout_s` bounds one call including its retries.
    """

    def __init__(self, url: str, timeout_s: float, attempts: int = 10, engines: DirectRouting | None = None) -> None:
        self._url = url.rstrip("/")
        self._engines = engines or DirectRouting()
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._http: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # the gateway caps its calls
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        )

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        routing_key: str,
        *,
        images: Sequence[PlacedImage] = (),
        progress: Progress | None = None,
        stops: StopStrings | None = None,
        resumable: bool = True,
    ) -> Completion:
        """Sample the continuation of `input_ids`, which contain these images. Cancelling this call aborts the
        generation.

        `sampling_params` are SGLang's, including `max_new_tokens`. With `progress` or `stops` the engine streams.
        After an abort, a generation that is not `resumable` (a grammar would restart) restarts from its prompt.

        Raises:
            EngineUnavailable: no engine answered in time, or within the number of attempts.
            EngineRefused: the engine refused the request as invalid.
            PromptDiffers: the engine built a different prompt.
        """
        began = time.monotonic()
        request = _Request(input_ids, sampling_params, routing_key, images, progress, stops, resumable)
        try:
            async with asyncio.timeout(self._timeout_s):
                partial = await self._sample(request)
        except RetryError as error:
            cause = error.last_attempt.exception()
            raise EngineUnavailable(
                f"no engine answered in {self._attempts} attempts; the last said: {cause or type(cause).__name__}"
            ) from cause
        except TimeoutError:
            asleep = "" if self._engines.gate.is_open else ": they sleep while the trainer has their memory"
            raise EngineUnavailable(f"no engine answered within {self._timeout_s:g} s{asleep}") from None
        return partial.completion(time.monotonic() - began)

    async def _sample(self, request: _Request) -> _Partial:
        """Sample until a reply is complete. Raises RetryError after the last attempt."""
        partial = _Partial()
        failed: set[str] = set()

        async def attempt() -> _Partial:
            nonlocal partial
            await self._engines.gate.wait()
            if not request.resumable:
                partial = _Partial()
            url = self._engines.for_call(request.params, request.routing_key, failed) or self._url
            try:
                await self._engines.gate.run(self._advance(url, partial, request))
            except GateClosed:
                raise _Aborted("the engines were put to sleep") from None
            except _TRANSIENT as error:
                if not isinstance(error, _Aborted):
                    failed.add(url)
                raise
            return partial

        return await retry(
            attempt,
            lambda: AsyncRetrying(
                retry=retry_if_exception_type(_TRANSIENT), stop=stop_after_attempt(self._attempts), wait=_wait
            ),
        )

    async def _advance(self, url: str, partial: _Partial, request: _Request) -> None:
        """Send one request, and add what it samples to `partial`."""
        params, images, progress, stops = request.params, request.images, request.progress, request.stops
        left = params["max_new_tokens"] - len(partial.token_ids)
        if left <= 0:  # aborted at its very last token
            partial.finish = {"type": "length"}
            return
        params = {**params, "max_new_tokens": left}
        prompt = array("i", request.input_ids)
        prompt.extend(partial.token_ids)
        body = {
            "rid": uuid.uuid4().hex,
            "input_ids": np.asarray(collapse_images(prompt, images), dtype=np.int32),
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,  # 0 would disable the prefix cache
        }
        if images:
            body |= {"image_data": [placed.image.data_url for placed in images], "return_prompt_token_ids": True}
        if progress is not None or stops is not None:
            interval = _IMAGES_STREAM_INTERVAL if images else _STREAM_INTERVAL
            body |= {"stream": True, "sampling_params": {**params, "stream_interval": interval}}
        finish: Mapping[str, Any] | None = None
        attempt = _Attempt(partial)
        try:
            try:
                async with contextlib.aclosing(self._post(url, body, request.routing_key)) as replies:
                    async for reply in replies:
                        if images:
                            _check_prompt(reply, prompt.tolist())
                        searched = len(partial.token_ids)
                        attempt.add(reply)
                        finish = reply["meta_info"]["finish_reason"]
                        stop = stops.find(partial.token_ids, searched) if stops is not None else None
                        if stop is not None:
                            attempt.cut(stop.tokens)
                            finish = {"type": "stop", "matched": stop.string}
                            break  # closes the connection, so the engine aborts
                        if progress is not None and finish is None:
                            progress(partial.token_ids, partial.logprobs)
            finally:
                attempt.close()
            if finish is None:
                raise _Retry("the engine's stream was interrupted")
            kind = finish["type"]
        except (LookupError, TypeError, ValueError) as error:
            raise EngineUnavailable(f"an engine's reply is not what /generate answers: {error!r}") from None
        if kind == "abort":
            if finish.get("status_code") == 400:
                raise EngineRefused(finish.get("message") or "no reason given")
            raise _Aborted(f"generation was aborted: {finish.get('message') or 'no reason given'}")
        partial.finish = finish

    async def _post(self, url: str, body: Mapping[str, Any], routing_key: str) -> AsyncGenerator[Any]:
        """Yield the reply, or the pieces of a stream."""
        assert self._http is not None, "not started"
        # Streamed, because images make it long.
        written = io.BytesIO(orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY))
        headers = {ROUTING_HEADER: routing_key, "Content-Type": "application/json"}
        async with self._http.post(f"{url}/generate", data=written, headers=headers) as response:
            if response.status != 200:
                message = f"HTTP {response.status}: {_error_message(await response.text())}"
                if response.status in _RETRIED or response.status >= 500:
                    raise _Retry(message)
                raise EngineRefused(message)
            if response.content_type != "text/event-stream":
                yield _loads(await response.read())
                return
            async for data in _events(response.content.iter_any()):
                reply = _loads(data)
                if "error" in reply:
                    raise _stream_error(reply["error"])
                yield reply


def _loads(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except ValueError:
        return json.loads(data)  # which also reads NaN


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events of any size, up to `[DONE]`."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield data


def _wait(state: RetryCallState) -> float:
    """Return the seconds before the next attempt.

    An engine that aborts may be about to pause. A retry that reaches it before the router knows would be held there
    until the engine resumes.
    """
    wait = _exponential(state)
    aborted = state.outcome is not None and isinstance(state.outcome.exception(), _Aborted)
    return max(wait, _AFTER_ABORT_S) if aborted else wait


def _stream_error(error: Any) -> Exception:
    """Return the exception for an error event: a stream has status 200 even if it fails."""
    fields = error if isinstance(error, Mapping) else {"message": str(error)}
    message = _error_message(str(fields.get("message") or ""))
    code = fields.get("code")
    return (
        EngineRefused(message)
        if isinstance(code, int) and 400 <= code < 500 and code not in _RETRIED
        else _Retry(message)
    )


def _check_prompt(reply: Mapping[str, Any], prompt: Sequence[int]) -> None:
    if not reply["output_ids"]:
        return  # aborted, perhaps before the prompt was built
    saw = reply.get("prompt_token_ids")  # absent behind a router, which drops the request for them
    length = len(saw) if saw is not None else reply["meta_info"].get("prompt_tokens")
    if length is None:
        raise PromptDiffers("the engine does not report the length of the prompt that it built from the images")
    if length != len(prompt) or saw not in (None, prompt):
        raise PromptDiffers(
            f"the engine built a prompt of {length} tokens from the images, and the recorded one has {len(prompt)}"
        )


def _error_message(text: str) -> str:
    return " ".join(text.split())[:_MESSAGE_CHARS] or "(no message)"


def _logprobs(given: Sequence[Any], ids: list[int]) -> list[float | None]:
    """Return one logprob for each id; None if it is missing or belongs to another token."""
    found: list[float | None] = [None] * len(ids)
    for i, (entry, token) in enumerate(zip(given, ids, strict=False)):
        logprob = entry[0]
        if entry[1] == token and isinstance(logprob, (int, float)) and math.isfinite(logprob):
            found[i] = float(logprob)
    return found


def _spans(meta: Mapping[str, Any], n: int) -> list[tuple[str, int, int]] | None:
    """Return `(version, start, end)` spans that cover the `n` tokens in order; None if the engine gives none."""
    if n == 0:
        return []
    listed = meta.get("weight_versions")
    if not listed:
        version = meta.get("weight_version")
        return None if version is None else [(str(version), 0, n)]
    spans = [(str(span["version"]), int(span["start"]), int(span["end"])) for span in listed]
    at = 0
    for _, start, end in spans:
        if start != at or end < at:
            return None
        at = end
    return spans if at == n else None


def _merged(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    merged: list[VersionSpan] = []
    for span in spans:
        if merged and merged[-1].version == span.version:
            merged[-1] = VersionSpan(version=span.version, start=merged[-1].start, end=span.end)
        elif span.end > span.start:
            merged.append(span)
    return tuple(merged)
