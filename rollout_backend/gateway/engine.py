"""Client of `/generate`: token ids in, token ids with logprobs and weight versions out.

What must always hold:

- A `Completion` holds exactly what the engine sampled for these ids. A logprob or a version that it did not give is
  None, or absent; nothing is filled in.
- A prompt with images is the one that was sent: the engine makes it of one token and the bytes for each image, and
  says what it made, or through a router how long that is. If this is not the prompt that is recorded, the reply does
  not count.
- A call ends within `timeout_s`, and after `attempts` attempts at most.
- Generation that an engine aborts in the middle (it pauses to take new weights, say) goes on from the tokens sampled
  so far: they were sampled under the same prompt, keep their logprobs and the version that sampled them, and the
  agent notices nothing. An abort without a token is thus a plain retry. So it is with a stream that breaks off: its
  tokens may have been shown already.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import math
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from tenacity import AsyncRetrying, RetryError, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from agent_wrapper.contract import VersionSpan
from rollout_backend.errors import EngineUnavailable, ServingError
from rollout_backend.gateway.engines import Engines
from rollout_backend.gateway.images import Placed
from rollout_backend.gateway.vision import collapsed

ROUTING_HEADER = "X-SMG-Routing-Key"
_RETRIED = frozenset({408, 429, 499})  # and every 5xx
_MESSAGE_CHARS = 500
_STREAM_INTERVAL = 4  # tokens in a piece of a stream: each costs the engine a message
_IMAGES_STREAM_INTERVAL = 32  # each piece repeats the prompt

Progress = Callable[[Sequence[int]], None]
"""Told the tokens sampled so far, each time there are more. The sequence is the same one, and it grows."""


class EngineRefused(ServingError):
    """The engine says that the request itself is at fault (4xx). The message is the engine's."""


class PromptDiffers(ServingError):
    """The engine made another prompt of the images than we did, so what it sampled is no reply to ours."""


class _Retry(Exception):
    pass


class _Aborted(_Retry):
    """By an engine that is well: it pauses, say."""


_PASSING = (_Retry, aiohttp.ClientError, TimeoutError)  # what is tried again


@dataclass(frozen=True)
class Completion:
    """One answer. `logprobs` has one entry for each token; the spans of `weight_versions` count from the first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    weight_versions: tuple[VersionSpan, ...]  # cover all tokens in order; empty if the engine said none
    finish_reason: str  # "stop" or "length"
    matched: str | None  # the stop string that ended it, if one did
    cached_tokens: int
    seconds: float


@dataclass
class _Partial:
    """What was sampled so far, over all attempts."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    versions_known: bool = True
    cached_tokens: int | None = None  # of the first attempt that sampled: what the prompt itself hit
    finish: Mapping[str, Any] | None = None


class _Attempt:
    """What one request brings: its tokens go into `partial` at once, what is told of them when it is closed."""

    def __init__(self, partial: _Partial) -> None:
        self._partial = partial
        self._start = len(partial.token_ids)
        self._logprobs: list[Any] = []
        self._meta: Mapping[str, Any] = {}
        self._current: set[Any] = set()  # the engine's weight version at each piece

    def add(self, reply: Mapping[str, Any]) -> None:
        """A whole reply, or a piece of a stream: with all tokens of this attempt so far, or with those since the
        last piece, as the engine is set. `completion_tokens` tells which."""
        ids = [int(token) for token in reply["output_ids"]]
        meta = reply["meta_info"]
        logprobs = meta.get("output_token_logprobs") or []
        had = len(self._partial.token_ids) - self._start
        total = meta.get("completion_tokens", len(ids))
        if len(ids) == total:
            ids, self._logprobs = ids[had:], list(logprobs)
        else:
            ids = ids[: max(0, total - had)]  # an abort repeats the last token
            self._logprobs += logprobs
        self._partial.token_ids += ids
        self._meta = meta
        self._current.add(meta.get("weight_version"))

    def close(self) -> None:
        partial = self._partial
        ids = partial.token_ids[self._start :]
        if partial.cached_tokens is None and ids:
            partial.cached_tokens = int(self._meta.get("cached_tokens") or 0)
        spans = _spans(self._meta, len(ids))
        if not self._meta.get("weight_versions") and len(self._current) > 1:
            spans = None  # a stream that broke off while the weights changed
        partial.versions_known &= spans is not None
        partial.versions += [
            VersionSpan(version=v, start=start + self._start, end=end + self._start) for v, start, end in spans or ()
        ]
        partial.logprobs += _logprobs(self._logprobs, ids)


class EngineClient:
    """Calls the router, or an engine directly, at `url`; and those of `engines` with what a router does not pass on.
    `timeout_s` bounds one call with all its retries."""

    def __init__(self, url: str, timeout_s: float, attempts: int = 10, engines: Engines | None = None) -> None:
        self._url = url.rstrip("/")
        self._engines = engines or Engines()
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
        images: Sequence[Placed] = (),
        progress: Progress | None = None,
        resumable: bool = True,
    ) -> Completion:
        """Samples the continuation of `input_ids`, in which these images stand. To cancel this call aborts the
        generation.

        `sampling_params` are SGLang's, `max_new_tokens` among them. With `progress` the engine streams. A generation
        that is not `resumable` (a grammar would begin anew) starts again from its prompt after an abort.

        Raises:
            EngineUnavailable: no engine answered in time, or in as many attempts as there are.
            EngineRefused: the engine finds fault with the request.
            PromptDiffers: the engine saw other tokens.
        """
        began = time.monotonic()
        partial = _Partial()
        failed: set[str] = set()
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_PASSING),
            stop=stop_after_attempt(self._attempts),
            wait=wait_exponential_jitter(multiplier=0.25, max=15, jitter=0.25),
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                async for attempt in retrying:
                    with attempt:
                        if not resumable:
                            partial = _Partial()
                        url = self._engines.for_call(sampling_params, routing_key, failed) or self._url
                        try:
                            await self._advance(
                                url, partial, input_ids, images, sampling_params, routing_key, progress
                            )
                        except _PASSING as error:
                            if not isinstance(error, _Aborted):
                                failed.add(url)
                            raise
        except RetryError as error:
            cause = error.last_attempt.exception()
            raise EngineUnavailable(
                f"no engine answered in {self._attempts} attempts; the last said: {cause or type(cause).__name__}"
            ) from cause
        except TimeoutError:
            raise EngineUnavailable(f"no engine answered within {self._timeout_s:g} s") from None
        assert partial.finish is not None
        matched = partial.finish.get("matched")
        return Completion(
            token_ids=tuple(partial.token_ids),
            logprobs=tuple(partial.logprobs),
            weight_versions=_merged(partial.versions) if partial.versions_known else (),
            finish_reason=partial.finish["type"],
            matched=matched if isinstance(matched, str) else None,
            cached_tokens=partial.cached_tokens or 0,
            seconds=time.monotonic() - began,
        )

    async def _advance(
        self,
        url: str,
        partial: _Partial,
        input_ids: Sequence[int],
        images: Sequence[Placed],
        params: Mapping[str, Any],
        routing_key: str,
        progress: Progress | None,
    ) -> None:
        left = params["max_new_tokens"] - len(partial.token_ids)
        if left <= 0:  # aborted at its very last token
            partial.finish = {"type": "length"}
            return
        params = {**params, "max_new_tokens": left}
        prompt = [*input_ids, *partial.token_ids]
        body = {
            "rid": uuid.uuid4().hex,
            "input_ids": collapsed(prompt, images),
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,  # 0 would cost the prefix cache
        }
        if images:
            body |= {"image_data": [placed.image.data_url for placed in images], "return_prompt_token_ids": True}
        if progress is not None:
            interval = _IMAGES_STREAM_INTERVAL if images else _STREAM_INTERVAL
            body |= {"stream": True, "sampling_params": {**params, "stream_interval": interval}}
        finish: Mapping[str, Any] | None = None
        attempt = _Attempt(partial)
        try:
            try:
                async with contextlib.aclosing(self._post(url, body, routing_key)) as replies:
                    async for reply in replies:
                        if images:
                            _check_prompt(reply, prompt)
                        attempt.add(reply)
                        finish = reply["meta_info"]["finish_reason"]
                        if progress is not None and finish is None:
                            progress(partial.token_ids)
            finally:
                attempt.close()
            if finish is None:
                raise _Retry("the engine's stream broke off")
            kind = finish["type"]
        except (LookupError, TypeError, ValueError) as error:
            raise EngineUnavailable(f"an engine's reply is not what /generate answers: {error!r}") from None
        if kind == "abort":
            if finish.get("status_code") == 400:
                raise EngineRefused(finish.get("message") or "no reason given")
            raise _Aborted(f"generation was aborted: {finish.get('message') or 'no reason given'}")
        partial.finish = finish

    async def _post(self, url: str, body: Mapping[str, Any], routing_key: str) -> AsyncGenerator[Any]:
        """The reply, or the pieces of a stream."""
        assert self._http is not None, "not started"
        written = io.BytesIO(json.dumps(body).encode())  # sent in pieces: with images it may be long
        headers = {ROUTING_HEADER: routing_key, "Content-Type": "application/json"}
        async with self._http.post(f"{url}/generate", data=written, headers=headers) as response:
            if response.status != 200:
                message = f"HTTP {response.status}: {_error_message(await response.text())}"
                if response.status in _RETRIED or response.status >= 500:
                    raise _Retry(message)
                raise EngineRefused(message)
            if response.content_type != "text/event-stream":
                yield await response.json(content_type=None)
                return
            async for data in _events(response.content.iter_any()):
                reply = json.loads(data)
                if "error" in reply:
                    raise _stream_error(reply["error"])
                yield reply


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events, up to `[DONE]`. An event may be of any size."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield data


def _stream_error(error: Any) -> Exception:
    """A stream's status is 200 whatever comes, and an error stands in it."""
    told = error if isinstance(error, Mapping) else {"message": str(error)}
    message = _error_message(str(told.get("message") or ""))
    code = told.get("code")
    return (
        EngineRefused(message)
        if isinstance(code, int) and 400 <= code < 500 and code not in _RETRIED
        else _Retry(message)
    )


def _check_prompt(reply: Mapping[str, Any], prompt: Sequence[int]) -> None:
    if not reply["output_ids"]:
        return  # aborted, perhaps before there was a prompt
    saw = reply.get("prompt_token_ids")  # a router does not pass on that they are wanted
    length = len(saw) if saw is not None else reply["meta_info"].get("prompt_tokens")
    if length is None:
        raise PromptDiffers("the engine does not tell how long a prompt it made of the images")
    if length != len(prompt) or saw not in (None, prompt):
        raise PromptDiffers(f"the engine made a prompt of {length} tokens of the images, and not our {len(prompt)}")


def _error_message(text: str) -> str:
    return " ".join(text.split())[:_MESSAGE_CHARS] or "(no message)"


def _logprobs(given: Sequence[Any], ids: list[int]) -> list[float | None]:
    """One for each id; None where the engine gave none, or one of another token."""
    found: list[float | None] = [None] * len(ids)
    for i, (entry, token) in enumerate(zip(given, ids, strict=False)):
        logprob = entry[0]
        if entry[1] == token and isinstance(logprob, (int, float)) and math.isfinite(logprob):
            found[i] = float(logprob)
    return found


def _spans(meta: Mapping[str, Any], n: int) -> list[tuple[str, int, int]] | None:
    """`(version, start, end)` that cover the `n` tokens in order, or None where the engine does not say."""
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
