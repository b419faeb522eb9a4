"""Client of `/generate`: token ids in, token ids with logprobs and weight versions out.

What must always hold:

- A `Completion` holds exactly what the engine sampled for these ids. A logprob or a version that it did not give is
  None, or absent; nothing is filled in.
- A call ends within `timeout_s`, and after `attempts` attempts at most.
- Generation that an engine aborts in the middle (it pauses to take new weights, say) goes on from the tokens sampled
  so far: they were sampled under the same prompt, keep their logprobs and the version that sampled them, and the
  agent notices nothing. An abort without a token is thus a plain retry.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from tenacity import AsyncRetrying, RetryError, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from agent_wrapper.contract import VersionSpan
from rollout_backend.errors import EngineUnavailable, ServingError

ROUTING_HEADER = "X-SMG-Routing-Key"
_RETRIED = frozenset({408, 429, 499})  # and every 5xx
_MESSAGE_CHARS = 500


class EngineRefused(ServingError):
    """The engine says that the request itself is at fault (4xx). The message is the engine's."""


class _Retry(Exception):
    pass


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
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    versions_known: bool = True
    cached_tokens: int | None = None  # of the first attempt that sampled: what the prompt itself hit
    finish: Mapping[str, Any] | None = None

    def append(self, reply: Mapping[str, Any]) -> None:
        ids = [int(token) for token in reply["output_ids"]]
        meta = reply["meta_info"]
        if self.cached_tokens is None and ids:
            self.cached_tokens = int(meta.get("cached_tokens") or 0)
        spans = _spans(meta, len(ids))
        self.versions_known &= spans is not None
        self.versions += [
            VersionSpan(version=v, start=start + len(self.token_ids), end=end + len(self.token_ids))
            for v, start, end in spans or ()
        ]
        self.logprobs += _logprobs(meta, ids)
        self.token_ids += ids


class EngineClient:
    """Calls the router, or an engine directly, at `url`. `timeout_s` bounds one call with all its retries."""

    def __init__(self, url: str, timeout_s: float, attempts: int = 10) -> None:
        self._url = url.rstrip("/") + "/generate"
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
        self, input_ids: Sequence[int], sampling_params: Mapping[str, Any], routing_key: str
    ) -> Completion:
        """Samples the continuation of `input_ids`. To cancel this call aborts the generation.

        `sampling_params` are SGLang's, `max_new_tokens` among them.

        Raises:
            EngineUnavailable: no engine answered in time, or in as many attempts as there are.
            EngineRefused: the engine finds fault with the request.
        """
        began = time.monotonic()
        partial = _Partial()
        retrying = AsyncRetrying(
            retry=retry_if_exception_type((_Retry, aiohttp.ClientError, TimeoutError)),
            stop=stop_after_attempt(self._attempts),
            wait=wait_exponential_jitter(multiplier=0.25, max=15, jitter=0.25),
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                async for attempt in retrying:
                    with attempt:
                        await self._advance(partial, input_ids, sampling_params, routing_key)
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
        self, partial: _Partial, input_ids: Sequence[int], params: Mapping[str, Any], routing_key: str
    ) -> None:
        left = params["max_new_tokens"] - len(partial.token_ids)
        if left <= 0:  # aborted at its very last token
            partial.finish = {"type": "length"}
            return
        reply = await self._post(
            {
                "rid": uuid.uuid4().hex,
                "input_ids": [*input_ids, *partial.token_ids],
                "sampling_params": {**params, "max_new_tokens": left},
                "return_logprob": True,
                "logprob_start_len": -1,  # 0 would cost the prefix cache
            },
            routing_key,
        )
        try:
            partial.append(reply)
            finish = reply["meta_info"]["finish_reason"]
            kind = finish["type"]
        except (KeyError, TypeError, ValueError) as error:
            raise EngineUnavailable(f"an engine's reply is not what /generate answers: {error!r}") from None
        if kind == "abort":
            raise _Retry(f"generation was aborted: {finish.get('message') or 'no reason given'}")
        partial.finish = finish

    async def _post(self, body: Mapping[str, Any], routing_key: str) -> Any:
        assert self._http is not None, "not started"
        async with self._http.post(self._url, json=body, headers={ROUTING_HEADER: routing_key}) as response:
            if response.status == 200:
                return await response.json(content_type=None)
            message = f"HTTP {response.status}: {_error_message(await response.text())}"
            if response.status in _RETRIED or response.status >= 500:
                raise _Retry(message)
            raise EngineRefused(message)


def _error_message(text: str) -> str:
    return " ".join(text.split())[:_MESSAGE_CHARS] or "(no message)"


def _logprobs(meta: Mapping[str, Any], ids: list[int]) -> list[float | None]:
    """One for each id; None where the engine gave none, or one of another token."""
    given = meta.get("output_token_logprobs") or []
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
