"""Call an engine: send token ids, receive token ids with logprobs and weight versions.

Invariants:

- A `Completion` contains exactly what the engine sampled for these ids. A missing logprob is None and a missing
  version is absent; neither is made up. A malformed reply is repeated, or ends the call if part of it was read.
- A prompt with images equals the recorded one. The engine builds it from one token and the bytes of each image, and
  returns its ids, or through a router its length. If they differ, the reply is discarded.
- A call ends within `timeout_s` and after at most `attempts` attempts without progress.
- If an attempt is silent for `silence_s`, the client checks its engine. An attempt that has sent tokens is aborted,
  and the call continues on another engine. Before its first token, a call stays with an engine that answers other
  calls, and moves from an engine that hangs to one that samples. An engine that samples, but has not answered the
  call in time, has lost it.
- A call with a grammar is not retried after its connection breaks, because the grammar may have crashed the engine
  and would crash the next one. It is retried if the engine refuses it temporarily.
- If an engine aborts a generation (for example to load new weights), the client resumes it from the tokens sampled so
  far, which keep their logprobs and weight versions. An abort without tokens is a plain retry. The same applies to an
  interrupted stream, whose tokens may already have been sent to the agent.
- With stop strings, the engine streams, and the client aborts the request at the token that completes one. Later
  tokens are dropped.
- After a stop string or a cancellation, the client aborts the request by its id and keeps the connection open until
  the engine has ended it. SGLang 0.5.12 notices a closed connection only after 2 s, and its pause waits only for open
  streams. A trainer would release the memory of a running request, which crashes the engine.
- A reply whose end was received is complete, even if the rest of its stream is lost.
- Each attempt of a call with a LoRA adapter names the adapter's newest version, and its tokens carry that version. If
  the version was replaced, the call resumes with the newest one, like a call aborted for new weights.
- A resumed request asks only for the routed experts of new tokens, so earlier tokens keep the routing with which they
  were sampled. An interrupted reply has no routing: a later request gets it from the engine's prefix cache or from a
  new forward pass. A call whose routing stays incomplete fails.
"""

import asyncio
import contextlib
import io
import json
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import numpy as np
import orjson
from numpy.typing import NDArray
from tenacity import RetryCallState, wait_exponential_jitter

from agent_wrapper.contract import VersionSpan
from agent_wrapper.shared.own_answers import ENGINE, own_answer
from rollout_backend.base.logs import report_failure
from rollout_backend.base.retry import retry
from rollout_backend.core.adapter import NamedAdapter
from rollout_backend.core.routed_experts import ExpertRows
from rollout_backend.errors import EngineUnavailable, ServingError
from rollout_backend.model.gateway.engine.engines import AdapterVersions, CallsPaused, Engines, NoEngineListed
from rollout_backend.model.gateway.engine.liveness import HangDetector
from rollout_backend.model.gateway.engine.protocol import EngineProtocol, EngineRequest, ReplyReader, SglangProtocol
from rollout_backend.model.rendering.segments import Completion
from rollout_backend.model.rendering.token_bytes import Stop

ROUTING_HEADER = "X-SMG-Routing-Key"
# Other statuses than 4xx, and all answers of a proxy, are also retried.
_RETRIED = frozenset({408, 429, 499})
_GATEWAY_ERRORS = frozenset({502, 504})
_ENDS = ("stop", "length", "abort")
_MESSAGE_CHARS = 500

# Minimum tokens per second that an engine reads and samples for one call, unless it is busy with others.
_SLOW_PREFILL, _SLOW_DECODE = 1000.0, 10.0
_ABORT_S = 10.0
_exponential = wait_exponential_jitter(multiplier=0.25, max=15, jitter=0.25)
_AFTER_ABORT_S = 1.0


class EngineRefused(ServingError):
    """The engine refused the request as invalid (4xx). The message comes from the engine."""


class ConstrainedCallLost(EngineUnavailable):
    """The connection of a call under a grammar broke. The grammar may have ended the engine."""


class _Retry(Exception):
    pass


class _Cut(_Retry):
    """The connection to the engine broke during its answer, or a proxy reports that it did."""


class _Silent(_Cut):
    """The attempt was cut because its engine was silent."""


class _Aborted(_Retry):
    """A healthy engine aborted the generation, for example to pause."""


class _Interrupted(_Aborted):
    """An attempt that added tokens or was paused. It is not counted: a long call spans many weight updates."""


_TRANSIENT = (_Retry, NoEngineListed, aiohttp.ClientError, TimeoutError)


@dataclass
class _Partial:
    """The tokens sampled so far, over all attempts."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    versions_known: bool = True
    cached_tokens: int | None = None
    finish: Mapping[str, Any] | None = None
    routed: int = 0
    """Number of tokens of the prompt and of `token_ids` with known routing."""
    experts: list[NDArray[np.uint8]] = field(default_factory=list)

    def close_attempt(self, reader: ReplyReader, start: int, stop: Stop | None, adapter: NamedAdapter | None) -> None:
        """Drop the tokens after `stop`. Add the versions of the tokens from number `start`, which `reader` read."""
        if stop is not None:
            del self.token_ids[stop.tokens :], self.logprobs[stop.tokens :]
        kept = len(self.token_ids) - start
        if self.cached_tokens is None and reader.received:
            self.cached_tokens = reader.cached_tokens
        spans = reader.spans()
        if spans is None and adapter is not None and adapter.version is not None:
            # The request named the version.
            spans = [("", 0, reader.received)]
        self.versions_known &= spans is not None
        self.versions += [
            VersionSpan(
                version=version if adapter is None else adapter.label(version),
                start=begin + start,
                end=min(end, kept) + start,
            )
            for version, begin, end in spans or ()
            if begin < kept
        ]

    def add_experts(self, rows: NDArray[np.uint8] | None, processed: int) -> None:
        """Add the routing of the tokens from number `routed` up to `processed`."""
        if rows is not None and processed > self.routed:
            self.experts.append(rows[: processed - self.routed])
            self.routed += len(self.experts[-1])

    def completion(self, seconds: float, experts_from: int | None) -> Completion:
        assert self.finish is not None
        matched = self.finish.get("matched")
        return Completion(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            weight_versions=_merged(self.versions) if self.versions_known else (),
            finish_reason=self.finish["type"],
            matched=matched if isinstance(matched, str) else None,
            cached_tokens=self.cached_tokens,
            seconds=seconds,
            experts=None if experts_from is None else ExpertRows(experts_from, b"".join(map(bytes, self.experts))),
        )


class EngineClient:
    """Calls the router or engine at `engines.url`, or one of `engines` directly if the router would reject the call
    or drop some of its fields.

    `timeout_s` bounds one call including its retries. `silence_s`, by default a fifth of it, is how long an attempt
    may be silent before it is examined.
    """

    def __init__(
        self,
        engines: Engines,
        timeout_s: float,
        attempts: int = 10,
        protocol: EngineProtocol | None = None,
        adapters: AdapterVersions | None = None,
        vocabulary: int | None = None,
        *,
        after_abort_s: float = _AFTER_ABORT_S,
        silence_s: float | None = None,
    ) -> None:
        self._vocabulary = vocabulary or 2**31
        self._after_abort_s = after_abort_s
        self._adapters = adapters or AdapterVersions()
        self._engines = engines
        self._protocol = protocol or SglangProtocol()
        self._timeout_s = timeout_s
        self._silence_s = silence_s or timeout_s / 5
        self._attempts = attempts
        self._http: aiohttp.ClientSession | None = None
        self._hangs: HangDetector | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._http = aiohttp.ClientSession(
            # The gateway limits its own calls.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self._protocol.keepalive_s),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            # A load balancer's cookie would send all sessions to one engine.
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._hangs = HangDetector(self._engines, self._protocol, self._http, self._silence_s)

    async def close(self) -> None:
        await self._engines.close()
        if self._hangs is not None:
            await self._hangs.close()
        await asyncio.gather(*self._aborts, return_exceptions=True)
        if self._http is not None:
            await self._http.close()

    async def generate(self, request: EngineRequest) -> Completion:
        """Sample a continuation. Cancelling this call aborts the generation, and reports what it sampled.

        Raises:
            EngineUnavailable: no engine answered within the time limit or the number of attempts.
            ConstrainedCallLost: the connection of a call that is not `resumable` broke.
            EngineRefused: the engine refused the request as invalid.
            PromptDiffers: the engine built a different prompt.
        """
        began = time.monotonic()
        partial = _Partial(routed=request.experts_from or 0)
        failed: set[str] = set()
        fruitless = 0

        async def attempt() -> None:
            nonlocal partial, fruitless
            await self._engines.wait_resumed()
            if not request.resumable:
                partial = _Partial(routed=request.experts_from or 0)
            url, had = self._engines.url, len(partial.token_ids)
            try:
                url = await self._engines.url_for(request.params, request.routing_key, failed)
                adapter = self._adapters.newest(request.adapter)
                await self._engines.run(self._advance(url, partial, request, adapter))
            except CallsPaused:
                raise _Interrupted("the engines were paused") from None
            except EngineRefused:
                if adapter == self._adapters.newest(request.adapter):
                    raise
                raise _Interrupted("the adapter was updated, and the engine unloaded the version before") from None
            except _Interrupted:
                raise
            except _TRANSIENT as error:
                if not request.resumable and _may_have_ended_engine(error):
                    why = str(error) or type(error).__name__
                    raise ConstrainedCallLost(f"the engine broke off a call with a grammar: {why}") from error
                if not isinstance(error, _Aborted):
                    failed.add(url)
                if request.resumable and len(partial.token_ids) > had:
                    raise _Interrupted(str(error) or type(error).__name__) from error
                fruitless += 1
                if url == self._engines.url and isinstance(error, aiohttp.ClientConnectorError):
                    assert self._http is not None
                    await self._engines.wait_for_router(self._http)
                raise

        try:
            own = asyncio.get_running_loop().time() + self._timeout_s
            async with asyncio.timeout_at(min(own, request.deadline)):
                try:
                    await retry(attempt, _TRANSIENT, self._wait, stop=lambda _: fruitless >= self._attempts)
                except _TRANSIENT as error:
                    raise EngineUnavailable(
                        f"no engine answered in {self._attempts} attempts; "
                        f"the last said: {str(error) or type(error).__name__}"
                    ) from error
        except asyncio.CancelledError:
            if request.cancelled is not None and partial.token_ids:
                partial.finish = {"type": "stop"}
                request.cancelled(partial.completion(time.monotonic() - began, None))
            raise
        except TimeoutError:
            paused = ": they are paused while the trainer has their memory" if self._engines.paused else ""
            raise EngineUnavailable(f"no engine answered within {self._timeout_s:g} s{paused}") from None
        return partial.completion(time.monotonic() - began, request.experts_from)

    def _wait(self, state: RetryCallState) -> float:
        """Return the seconds before the next attempt.

        An engine that aborts may be about to pause. If a retry reached it before the router knows, the engine would
        hold it until it resumes.
        """
        error = state.outcome.exception() if state.outcome is not None else None
        if isinstance(error, _Interrupted):
            return self._after_abort_s
        wait = _exponential(state)
        return max(wait, self._after_abort_s) if isinstance(error, _Aborted) else wait

    async def _advance(
        self, url: str, partial: _Partial, request: EngineRequest, adapter: NamedAdapter | None
    ) -> None:
        """Sample until `partial` is complete, then fetch the routing that is still missing."""
        if partial.finish is None:
            await self._extend(url, partial, request, adapter)
        processed = len(request.prompt) + len(partial.token_ids) - 1
        if request.experts_from is not None and partial.routed < processed:
            await self._fetch_experts(url, partial, request, processed, adapter)

    async def _fetch_experts(
        self, url: str, partial: _Partial, request: EngineRequest, processed: int, adapter: NamedAdapter | None
    ) -> None:
        """Add the routing of the tokens up to `processed`. The one token that this request samples is dropped."""
        params = {"max_new_tokens": 1, "temperature": 0.0}
        asked = replace(_continued(request, partial, params, adapter), stops=None, progress=None)
        reader, body = self._protocol.reader(asked), self._protocol.body(asked)
        with _read_by(self._protocol, partial):
            async with contextlib.aclosing(self._post(url, body, asked)) as replies:
                async for reply in replies:
                    reader.read(reply)
            partial.add_experts(reader.experts(), processed)
        if partial.routed < processed:
            raise _Retry(
                "the reply has no routed experts: start the engine with --enable-return-routed-experts, or set "
                "model.routed_experts=false"
            )

    async def _extend(
        self, url: str, partial: _Partial, request: EngineRequest, adapter: NamedAdapter | None
    ) -> None:
        """Send one request, and add what it samples to `partial`."""
        progress, stops = request.progress, request.stops
        left = request.params["max_new_tokens"] - len(partial.token_ids)
        if left <= 0:
            # The generation was aborted at its last token.
            partial.finish = {"type": "length"}
            return
        asked = _continued(request, partial, {**request.params, "max_new_tokens": left}, adapter)
        reader, body = self._protocol.reader(asked), self._protocol.body(asked)
        start, stop = len(partial.token_ids), None
        with _read_by(self._protocol, partial):
            try:
                async with contextlib.aclosing(self._post(url, body, asked)) as replies:
                    async for reply in replies:
                        searched = len(partial.token_ids)
                        ids, logprobs = reader.read(reply)
                        if ids and not 0 <= min(ids) <= max(ids) < self._vocabulary:
                            raise ValueError(f"tokens outside of the model's {self._vocabulary}")
                        if reader.finish is not None and reader.finish["type"] not in _ENDS:
                            raise ValueError(f"generation ended with {reader.finish['type']}")
                        partial.token_ids += ids
                        partial.logprobs += logprobs
                        if stops is not None and stop is None:
                            stop = stops.find(partial.token_ids, searched)
                        if stop is not None and reader.finish is None:
                            break
                        if progress is not None and stop is None and reader.finish is None:
                            progress(partial.token_ids, partial.logprobs)
            except (aiohttp.ClientError, _Retry):
                if stop is None and reader.finish is None:
                    raise
            finally:
                partial.close_attempt(reader, start, stop, adapter)
                partial.add_experts(reader.experts(), len(request.prompt) + len(partial.token_ids) - 1)
            finish = reader.finish if stop is None else {"type": "stop", "matched": stop.string}
            if finish is None:
                raise _Cut("the engine's stream was interrupted")
            kind = finish["type"]
        if kind == "abort":
            if finish.get("status_code") == 400:
                raise EngineRefused(_error_message(str(finish.get("message") or "")))
            resumes = request.resumable and len(partial.token_ids) > start
            kind_of_abort = _Interrupted if resumes else _Aborted
            raise kind_of_abort(f"generation was aborted: {_error_message(str(finish.get('message') or ''))}")
        if len(partial.token_ids) <= start:
            raise _Retry("the reply has no tokens")
        partial.finish = finish

    def _abort(
        self, url: str, body: Mapping[str, Any], response: aiohttp.ClientResponse | None
    ) -> asyncio.Task[None] | None:
        """Abort a request. No router forwards aborts, so every engine gets it; all but one ignore it."""
        engines = self._engines.urls if url == self._engines.url else (url,)
        if self._protocol.abort_path is None or self._http is None or not engines:
            return None
        urls = [engine + self._protocol.abort_path for engine in engines]
        task = asyncio.create_task(self._end(urls, body["rid"], response))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
        task.add_done_callback(report_failure("an abort"))
        return task

    async def _end(self, urls: Sequence[str], request_id: str, response: aiohttp.ClientResponse | None) -> None:
        """Abort a request, and read its stream to the end."""
        try:
            async with asyncio.timeout(_ABORT_S):
                accepted = await asyncio.gather(*(self._post_abort(url, request_id) for url in urls))
                if response is not None and any(accepted):
                    async for _ in response.content.iter_any():
                        pass
        except (aiohttp.ClientError, TimeoutError):
            pass
        finally:
            if response is not None:
                response.release()

    async def _post_abort(self, url: str, request_id: str) -> bool:
        assert self._http is not None
        with contextlib.suppress(aiohttp.ClientError):
            async with self._http.post(url, json={"rid": request_id}) as reply:
                return reply.status == 200
        return False

    async def _post(self, url: str, body: Mapping[str, Any], asked: EngineRequest) -> AsyncGenerator[Any]:
        """Yield the reply, or the chunks of a stream. Abort the request if the caller does not read all of them, or
        the engine is silent."""
        assert self._http is not None, "not started"
        assert self._hangs is not None
        # The body is streamed, because images make it long.
        written = io.BytesIO(orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY))
        headers = {ROUTING_HEADER: asked.routing_key, "Content-Type": "application/json"}
        response: aiohttp.ClientResponse | None = None
        ending: asyncio.Task[None] | None = None
        silence = _SilenceWatch(self._hangs, self._engines, url, asked, self._silence_s)
        try:
            async with silence.cut:
                try:
                    silence.start()
                    response = await self._http.post(
                        url + self._protocol.path, data=written, headers=headers, allow_redirects=False
                    )
                    if response.status != 200:
                        text = await response.text(errors="replace")
                        message = f"HTTP {response.status}: {_error_message(text)}"
                        # smg answers 404 before its first engine is added; SGLang does not use this code.
                        no_engine = (
                            response.status == 404 and "model_not_found" in message and url == self._engines.url
                        )
                        is_refusal = 400 <= response.status < 500 and response.status not in _RETRIED
                        if is_refusal and not no_engine and own_answer(text, ENGINE) is not None:
                            raise EngineRefused(message)
                        raise (_Cut if response.status in _GATEWAY_ERRORS else _Retry)(message)
                    async for data in _replies(response):
                        reply = _loads(data)
                        if error := reply.get("error"):
                            raise _stream_error(error)
                        silence.heard()
                        yield reply
                except (GeneratorExit, asyncio.CancelledError):
                    if response is None or not response.content.at_eof():
                        ending = self._abort(url, body, response)
                    raise
        except TimeoutError:
            if silence.cut.expired():
                raise _Silent(f"{url} sent nothing for {silence.seconds:.0f} s") from None
            raise
        finally:
            silence.end()
            if response is not None and ending is None:
                response.release()


class _SilenceWatch:
    """Cuts an attempt if its engine is silent. It creates a task only after a silence."""

    def __init__(
        self, hangs: HangDetector, engines: Engines, url: str, asked: EngineRequest, silence_s: float
    ) -> None:
        self.cut = asyncio.timeout(None)
        self._hangs = hangs
        self._engines = engines
        self._url = url
        self._silence_s = silence_s
        # The first token needs the whole prompt, and a whole reply needs all tokens. Even a slow engine is faster.
        self._first_s = silence_s + len(asked.prompt) / _SLOW_PREFILL
        self._answer_s = self._first_s + (0.0 if asked.stream else asked.params["max_new_tokens"] / _SLOW_DECODE)
        self._has_tokens = False
        self._last = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._examination: asyncio.Task[None] | None = None

    @property
    def seconds(self) -> float:
        """How long the engine has been silent."""
        return asyncio.get_running_loop().time() - self._last

    def start(self) -> None:
        self._last = asyncio.get_running_loop().time()
        self._check_in(self._first_s)

    def heard(self) -> None:
        self._has_tokens = True
        self._last = asyncio.get_running_loop().time()
        self._hangs.answered(self._url)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._examination is not None:
            self._examination.cancel()

    def _check_in(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._check)

    def _check(self) -> None:
        left = (self._silence_s if self._has_tokens else self._first_s) - self.seconds
        if left > 0:
            self._check_in(left)
        else:
            self._examination = asyncio.create_task(self._examine())
            self._examination.add_done_callback(report_failure(f"the examination of {self._url}"))

    async def _examine(self) -> None:
        try:
            found = await self._hangs.examine(self._url)
        except Exception:
            self._check_in(self._silence_s)
            raise
        can_leave = found == "hung" and bool({*self._engines.urls} - self._engines.hung)
        is_lost = found == "sampling" and self.seconds >= self._answer_s
        if self.seconds >= self._silence_s and (self._has_tokens or can_leave or is_lost):
            self.cut.reschedule(asyncio.get_running_loop().time())
        else:
            self._check_in(self._silence_s)


def _may_have_ended_engine(error: Exception) -> bool:
    """Return whether the engine received the request and neither answered it nor refused it."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return False
    return isinstance(error, (_Cut, aiohttp.ClientError, TimeoutError))


def _continued(
    request: EngineRequest, partial: _Partial, params: Mapping[str, Any], adapter: NamedAdapter | None
) -> EngineRequest:
    """Return the request of one attempt, which continues from the tokens sampled so far."""
    prompt = request.prompt
    if partial.token_ids:
        prompt = array("i", prompt)
        prompt.extend(partial.token_ids)
    return replace(
        request,
        prompt=prompt,
        params=params,
        experts_from=None if request.experts_from is None else partial.routed,
        adapter=adapter.engine_name if adapter is not None else "",
    )


@contextlib.contextmanager
def _read_by(protocol: EngineProtocol, partial: _Partial) -> Iterator[None]:
    """Raise _Retry if the protocol's reader cannot read a reply, or EngineUnavailable if it returned tokens before,
    which may be wrong."""
    had = len(partial.token_ids)
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        kind = _Retry if len(partial.token_ids) == had else EngineUnavailable
        raise kind(f"an engine's reply is not what {protocol.path} answers: {error!r}") from None


def _loads(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except ValueError:
        # orjson refuses NaN.
        return json.loads(data)


async def _replies(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield a whole reply, or the data of server-sent events of any size, up to `[DONE]`."""
    if response.content_type != "text/event-stream":
        yield await response.read()
        return
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield data


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


def _error_message(text: str) -> str:
    return " ".join(text[: 4 * _MESSAGE_CHARS].split())[:_MESSAGE_CHARS] or "(no message)"


def _merged(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    merged: list[VersionSpan] = []
    for span in spans:
        if merged and merged[-1].version == span.version:
            merged[-1] = VersionSpan(version=span.version, start=merged[-1].start, end=span.end)
        elif span.end > span.start:
            merged.append(span)
    return tuple(merged)
