"""What one model call does: render, sample, read, record.

What must always hold:

- A call is recorded if and only if all its choices were sampled; one that is aborted leaves no trace.
- Of several choices each is a turn of its own: siblings that branch from one prompt.
- What is answered stands in the session's journal by then, and so does that it was asked, before it is made.
- Tokens of a constrained reply are recorded without logprobs, for the engine's are of another distribution.
- An image gets to an engine only once all of it could be read.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from renderers import ParsedResponse

from rollout_backend.errors import EngineUnavailable
from rollout_backend.gateway import records
from rollout_backend.gateway.cache import is_cache_break
from rollout_backend.gateway.call import Answer, Choice, ModelCall
from rollout_backend.gateway.constraint import Constraints
from rollout_backend.gateway.engine import Completion, EngineClient, EngineRefused, Progress, PromptDiffers
from rollout_backend.gateway.engines import Engines
from rollout_backend.gateway.errors import ApiError
from rollout_backend.gateway.images import check_pixels
from rollout_backend.gateway.increments import Increments, at_once
from rollout_backend.gateway.registry import Entry
from rollout_backend.gateway.renderer import RendererBundle
from rollout_backend.gateway.reply import Reply, logprob_entry, read_reply
from rollout_backend.gateway.running import Running
from rollout_backend.gateway.sampling import Budget, context_exceeded, engine_params
from rollout_backend.gateway.session import Prompt, RecordedTurn, Session
from rollout_backend.gateway.settings import GatewaySettings
from rollout_backend.gateway.stats import Counters
from rollout_backend.gateway.tokens import SessionClaims

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_ENGINE_RETRY_S = 5
_NEVER = -100.0  # added to a logit
_PACE_S = 0.03  # between two looks at what a stream has sampled


class Caller:
    """Of one gateway. Sessions are touched in the event loop only; one thread renders and parses."""

    def __init__(
        self, settings: GatewaySettings, bundle: RendererBundle, counters: Counters, engines: Engines
    ) -> None:
        self._settings = settings
        self._bundle = bundle
        self._counters = counters
        self._engine = EngineClient(settings.engine_url, settings.model_call_s, settings.engine_attempts, engines)
        self._constraints = Constraints(bundle, settings.gateway.constrained_decoding == "allow")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="renderer")

    async def start(self) -> None:
        await self._engine.start()

    async def close(self) -> None:
        await self._engine.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def count(self, session: Session, call: ModelCall) -> int:
        """Tokens of the prompt that this call would have. Raises ApiError (400) if it cannot be rendered."""
        return len((await self._in_thread(self._prepare, session, call)).ids)

    async def answer(self, running: Running, entry: Entry, session: Session, claims: SessionClaims) -> Answer:
        """The call's answer, booked as unanswered for as long as it fails by our doing.

        Raises:
            ApiError: 400 if the call itself is at fault, 503 if no engine answers.
        """
        digest = call_digest(running.call)
        entry.write(records.asked(digest))
        try:
            answer = await self._answer(running, entry, session, claims, digest)
        except Exception as error:
            if not isinstance(error, ApiError) or error.status >= 500:
                entry.unanswered.add(digest)
            elif digest not in entry.unanswered:
                entry.write(records.dropped(digest))
            raise
        entry.unanswered.discard(digest)
        return answer

    async def _answer(
        self, running: Running, entry: Entry, session: Session, claims: SessionClaims, digest: bytes
    ) -> Answer:
        call = running.call
        prompt = await self._in_thread(self._prepare, session, call)
        forced = await self._in_thread(self._constraints.params, call, prompt.ids)
        running.rendered(len(prompt.ids))
        requests = [self._request(call, prompt, entry, claims, i) | forced for i in range(call.n)]
        sampled = await _all(
            self._sampled(running, prompt, params, entry.id, i, bool(forced)) for i, params in enumerate(requests)
        )
        counters = self._counters
        turns = []
        for i, (completion, reply, _) in enumerate(sampled):
            branch = prompt if i == 0 else replace(prompt, opened_by="branched")
            turns.append(self._record(branch, completion, reply, entry, session))
            counters.constrained += bool(forced)
        counters.calls += 1
        counters.prompt_tokens += len(prompt.ids)
        first = sampled[0][0]
        counters.cached_tokens += first.cached_tokens
        counters.cache_breaks += is_cache_break(prompt.known, first.cached_tokens)
        answer = Answer(
            id=running.id,
            created=running.created,
            model=self._settings.model.served_name,
            choices=tuple(choice for _, _, choice in sampled),
            prompt_tokens=len(prompt.ids),
            cached_tokens=first.cached_tokens,
        )
        entry.write(records.answered(digest, running.request, turns, answer, entry.started, entry.sampled_tokens))
        return answer

    def _request(
        self, call: ModelCall, prompt: Prompt, entry: Entry, claims: SessionClaims, choice: int
    ) -> dict[str, Any]:
        settings, entry.started = self._settings.gateway, entry.started + 1
        cap = settings.session_tokens
        asked = engine_params(
            call,
            claims.sampling,
            settings.agent_may_set,
            Budget(
                len(prompt.ids),
                self._settings.model.context_length,
                None if cap is None else cap - entry.sampled_tokens,
            ),
            self._bundle.stop_token_ids,
            seed_salt=f"{claims.rollout_id}/{entry.started}",
            choice=choice,
        )
        if choice == 0:
            self._counters.overridden.update(asked.overridden)
        if prompt.images and self._bundle.vision is not None:
            asked.params["logit_bias"] = {str(token): _NEVER for token in self._bundle.vision.unsayable}
        return asked.params

    async def _sampled(
        self, running: Running, prompt: Prompt, params: Mapping[str, Any], session_id: str, index: int, forced: bool
    ) -> tuple[Completion, Reply, Choice]:
        call = running.call
        if not call.stream or forced:  # an abort under a grammar starts again, so nothing of it may be shown before
            completion = await self._generate(prompt, params, session_id, resumable=not forced)
            reply = await self._in_thread(self._read, call, prompt, completion)
            if call.tool_choice == "required":
                _check_called(reply, completion)
            running.say(at_once(reply.message, index))
        else:
            increments = await self._in_thread(self._increments, call, prompt, index)
            completion = await self._streamed(running, increments, prompt, params, session_id)
            reply = await self._in_thread(self._read, call, prompt, completion)
            rest, reply = increments.end(reply)
            running.say(rest)
        logprobs = await self._in_thread(self._logprobs, completion) if call.logprobs else None
        choice = Choice(reply.message, reply.finish_reason, len(completion.token_ids), completion.matched, logprobs)
        if forced:
            completion = replace(completion, logprobs=(None,) * len(completion.token_ids))
        return completion, reply, choice

    async def _streamed(
        self, running: Running, increments: Increments, prompt: Prompt, params: Mapping[str, Any], session_id: str
    ) -> Completion:
        """Samples, and tells meanwhile what was sampled so far."""
        more, ended = asyncio.Event(), asyncio.Event()
        tokens: Sequence[int] = ()

        def progress(sampled: Sequence[int]) -> None:
            nonlocal tokens
            tokens = sampled
            more.set()

        async def tell() -> None:
            told = 0
            while not ended.is_set():
                await more.wait()
                more.clear()
                fresh, told = tokens[told:], len(tokens)
                if fresh and not ended.is_set():
                    running.say(await self._in_thread(increments.feed, fresh))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), _PACE_S)

        telling = asyncio.create_task(tell())
        try:
            completion = await self._generate(prompt, params, session_id, progress)
            ended.set()
            more.set()
            await telling
            return completion
        finally:
            telling.cancel()

    async def _generate(
        self,
        prompt: Prompt,
        params: Mapping[str, Any],
        session_id: str,
        progress: Progress | None = None,
        resumable: bool = True,
    ) -> Completion:
        try:
            return await self._engine.generate(
                prompt.ids, params, session_id, images=prompt.images, progress=progress, resumable=resumable
            )
        except EngineUnavailable as error:
            logger.warning("a model call got no answer: %s", error)
            raise ApiError(503, str(error), code="engine_unavailable", retry_after_s=_ENGINE_RETRY_S) from None
        except PromptDiffers as error:
            logger.warning("a model call with images cannot be recorded: %s", error)
            raise ApiError(500, str(error), code="prompt_differs") from None
        except EngineRefused as error:
            logger.warning("an engine refused a model call: %s", error)
            if "context length" in str(error) or "maximum allowed length" in str(error):
                raise context_exceeded(str(error)) from None
            if not resumable:
                raise _not_held(
                    f"the engine cannot hold a reply to this form: {error}. It needs a grammar backend (SGLang's "
                    "--grammar-backend)"
                ) from None
            raise ApiError(400, f"the engine refused the call: {error}", code="engine_refused") from None

    def _record(
        self, prompt: Prompt, completion: Completion, reply: Reply, entry: Entry, session: Session
    ) -> RecordedTurn:
        turn = session.record(prompt, completion, reply.message)
        entry.sampled_tokens += len(completion.token_ids)
        counters = self._counters
        counters.sampled_tokens += len(completion.token_ids)
        counters.malformed_tool_calls += reply.malformed_tool_calls
        counters.extra_tool_calls += reply.extra_tool_calls
        if turn.opened is not None:
            counters.segments[turn.opened] += 1
        return turn

    # --- in the thread that renders and parses ------------------------------------------------------------

    async def _in_thread(self, function: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _prepare(self, session: Session, call: ModelCall) -> Prompt:
        fresh = session.unseen(call.images)
        cap = self._settings.gateway.session_image_bytes
        if fresh and session.image_bytes + sum(len(image.data) for image in fresh) > cap:
            raise ApiError(
                400, f"the images of this session come to more than {cap} bytes; send fewer, or smaller ones"
            )
        for image in fresh:
            try:
                check_pixels(image)
            except ValueError as error:
                raise ApiError(400, f"an image ({image.media_type}, {len(image.data)} bytes) {error}") from None
        try:
            return session.prepare(call.messages, call.tools, call.images)
        except Exception as error:  # templates refuse conversations in ways of their own
            logger.warning("a conversation could not be rendered: %r", type(error).__name__)
            raise ApiError(
                400, f"these messages cannot be rendered for this model: {error}", code="unrenderable"
            ) from None

    def _increments(self, call: ModelCall, prompt: Prompt, choice: int) -> Increments:
        return Increments(
            self._bundle,
            prompt.ids,
            tools=call.tools,
            tools_offered=_tools_offered(call),
            stop=call.stop,
            parallel=call.parallel_tool_calls,
            choice=choice,
        )

    def _read(self, call: ModelCall, prompt: Prompt, completion: Completion) -> Reply:
        bundle, ids = self._bundle, completion.token_ids
        text = bundle.decode(ids[:-1] if ids and ids[-1] in bundle.stop_token_ids else ids)
        broken = False
        try:
            parsed = bundle.renderer.parse_response(list(ids), tools=call.tools, prompt_ids=prompt.ids)
        except Exception:  # to sample again would only hide from training what this parser cannot read
            logger.exception("the renderer could not parse a reply; it is returned as text")
            parsed, broken = ParsedResponse(content=text), True
        reply = read_reply(
            parsed,
            text,
            finish_reason=completion.finish_reason,
            matched_stop=completion.matched,
            tools_offered=_tools_offered(call),
            parallel=call.parallel_tool_calls,
        )
        return replace(reply, malformed_tool_calls=1) if broken else reply

    def _logprobs(self, completion: Completion) -> list[Mapping[str, Any]]:
        tokens = zip(completion.token_ids, completion.logprobs, strict=True)
        return [logprob_entry(self._bundle.decode([token]), logprob) for token, logprob in tokens]


def _check_called(reply: Reply, completion: Completion) -> None:
    """Under a grammar a reply that came to its end has the call."""
    if reply.finish_reason == "stop" and completion.matched is None:
        raise _not_held(
            "the engine sampled no tool call, for it was not told to: the router before it passes no structural_tag "
            "on, and does not tell at /workers which engines it has"
        )


def _not_held(why: str) -> ApiError:
    return ApiError(
        400,
        f"{why}; use tool_choice auto and ask for JSON in the prompt",
        code="constrained_decoding_unavailable",
    )


def call_digest(call: ModelCall) -> bytes:
    """Names a call by what it asks, so that the same question asked again is known as such."""
    return hashlib.sha256(json.dumps([call.messages, call.tools], sort_keys=True).encode()).digest()


def _tools_offered(call: ModelCall) -> bool:
    return bool(call.tools) and call.tool_choice != "none"


async def _all(work: Any) -> list[Any]:
    """All results; if one fails, the others are cancelled and its error is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
