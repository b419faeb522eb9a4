"""Execute a model call: render its prompt, sample, parse the reply, and record both.

Invariants:

- A call is recorded if and only if all its choices were sampled. An aborted call leaves no trace.
- Each choice of a call is a turn; the turns branch from one prompt.
- A call is journaled before it is made, and its answer before the agent gets it.
- Tokens of a constrained reply are recorded without logprobs, because the engine's belong to another distribution.
- No part of an image reaches an engine before the whole image was read.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from rollout_backend.core.model_call import (
    Answer,
    ApiError,
    Choice,
    ModelCall,
    context_exceeded,
    trajectory_too_large,
    whole_deltas,
    with_logprobs,
)
from rollout_backend.errors import EngineUnavailable
from rollout_backend.gateway.engine.client import EngineClient, EngineRefused
from rollout_backend.gateway.engine.protocol import (
    EngineRequest,
    PromptDiffers,
    engine_params,
    reply_limit,
    reply_seed,
)
from rollout_backend.gateway.gateway_settings import GatewaySettings
from rollout_backend.gateway.rendering_thread import RenderingThread
from rollout_backend.gateway.sessions import journal as journals
from rollout_backend.gateway.sessions.calls import InFlightCall
from rollout_backend.gateway.sessions.conversations import Prompt, RecordedTurn
from rollout_backend.gateway.sessions.registry import OpenSession
from rollout_backend.gateway.stats import GatewayStats, bounded_name, is_cache_break
from rollout_backend.rendering.constrained_decoding import Constraints
from rollout_backend.rendering.renderer import RendererBundle
from rollout_backend.rendering.reply import StreamingParser
from rollout_backend.rendering.segments import Completion
from rollout_backend.rendering.token_bytes import ClearTokens, StopStrings

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_ENGINE_RETRY_S = 5
_NEVER = -100.0  # the logit bias that excludes a token
_PACE_S = 0.03  # seconds between two deltas of a stream


class ModelCallExecutor:
    """Executes the model calls of one gateway. Only the event loop changes sessions."""

    def __init__(
        self,
        settings: GatewaySettings,
        bundle: RendererBundle,
        stats: GatewayStats,
        engine: EngineClient,
    ) -> None:
        self._settings = settings
        self._bundle = bundle
        self._records_experts = settings.model.routed_experts
        self._stats = stats
        self._engine = engine
        self._constraints = Constraints(bundle, settings.gateway.constrained_decoding == "allow")
        self._thread = RenderingThread(bundle, settings.gateway.session_image_bytes, settings.model.context_tokens)

    def close(self) -> None:
        self._thread.close()

    def shown(self, call: ModelCall) -> ModelCall:
        """Return the call as the engine's own APIs show it to this model, and note what is ignored."""
        is_sglang = self._settings.engine_name == "sglang"
        if is_sglang and call.tool_choice == "none":
            call = replace(call, tools=None)
        if is_sglang and (last := call.messages[-1])["role"] == "assistant":  # shown as the user's
            call = replace(call, messages=[*call.messages[:-1], {"role": "user", "content": last["content"]}])
        if call.tool_choice == "required" and self._settings.gateway.forced_tools == "as_auto":
            call = replace(call, tool_choice="auto", tool_name=None, ignored=call.ignored | {"tool_choice"})
        # Constrained tokens cannot be trained, so only a forced call follows the schema of a strict tool.
        if call.tool_choice == "auto" and any(tool["function"].get("strict") for tool in call.tools or ()):
            call = replace(call, ignored=call.ignored | {"tools.strict"})
        return self._thread.shown(call)

    async def count(self, session: OpenSession, call: ModelCall, *, brief: bool) -> int:
        """Return the length of the call's prompt in tokens. Raises ApiError (400) if it cannot be rendered."""
        return len((await self._prompt(session, call, brief)).ids)

    async def _prompt(self, session: OpenSession, call: ModelCall, brief: bool) -> Prompt:
        share, conversations = session.share, session.conversations
        if brief and (prompt := self._thread.brief_prompt(conversations, call)) is not None:
            return prompt
        return await share.render(lambda: self._thread.run(self._thread.prepare, conversations, call))

    async def answer(self, session: OpenSession, running: InFlightCall) -> Answer:
        """Return the call's answer. A call that fails on our side counts as unanswered until it is repeated.

        Raises:
            ApiError: status 400 if the call is invalid, 503 if no engine answers.
        """
        digest = running.key.question
        session.write(journals.asked(digest, is_retry=running.key.is_declared))
        try:
            answer = await self._answer(session, running)
        except asyncio.CancelledError:
            if running.given_up:
                session.write(journals.dropped(digest))
            raise
        except Exception as error:
            if not isinstance(error, ApiError) or error.status >= 500:
                session.lose(digest)
            else:
                session.write(journals.dropped(digest))
            raise
        session.unanswered.discard(digest)
        return answer

    async def _answer(self, session: OpenSession, running: InFlightCall) -> Answer:
        call = running.call
        number = session.started + 1  # taken before any wait, so that choices are numbered in order of arrival
        session.started += call.n
        prompt = await self._prompt(session, call, running.brief)
        max_bytes, spans = self._settings.max_result_bytes, [placed.span for placed in prompt.images]
        if not session.conversations.recorder.has_room(prompt.ids, spans, call.n, max_bytes):
            raise trajectory_too_large(f"with this call it would exceed {max_bytes} bytes", status=400)
        form = {}
        if call.is_constrained:
            form = await session.share.render(lambda: self._thread.run(self._constraints.params, call, prompt.ids))
        running.set_prompt_tokens(len(prompt.ids))
        request = EngineRequest(
            prompt.ids,
            form,
            session.claims.routing_key or session.claims.session_id,
            prompt.images,
            stops=await self._thread.run(self._thread.stop_strings, call) if call.stop else None,
            resumable=not form,
            experts_from=max(prompt.known - 1, 0) if self._records_experts else None,
            adapter=session.claims.adapter,
        )
        requests = [
            replace(request, params=self._params(session, call, prompt, i, number + i) | form) for i in range(call.n)
        ]
        sampled = await _all([self._sample(running, prompt, request, i) for i, request in enumerate(requests)])
        turns = [self._record(session, running, prompt, *each) for each in sampled]
        cached_tokens = sampled[0][0].cached_tokens
        stats = self._stats
        stats.constrained += len(sampled) if form else 0
        stats.calls += 1
        stats.prompt_tokens += len(prompt.ids)
        if cached_tokens is None:
            stats.cache_unknown_tokens += len(prompt.ids)
        else:
            stats.cached_tokens += cached_tokens
            stats.cache_breaks += is_cache_break(prompt.known, cached_tokens)
        answer = Answer(
            id=running.id,
            created=running.created,
            model=self._settings.model.served_name,
            choices=tuple(choice for _, choice in sampled),
            prompt_tokens=len(prompt.ids),
            cached_tokens=cached_tokens,
        )
        session.write(
            journals.answered(
                running.key.question,
                running.key.digest,
                turns,
                answer,
                session.started,
                session.sampled_tokens,
                left_out=running.left_out,
            )
        )
        if running.left_out:
            stats.left_out += len(turns)
            session.left_out += running.replies
        return answer

    def _params(
        self, session: OpenSession, call: ModelCall, prompt: Prompt, choice: int, number: int
    ) -> dict[str, Any]:
        settings, claims = self._settings.gateway, session.claims
        cap = settings.session_tokens
        if cap is not None and session.sampled_tokens >= cap:
            runaways = self._stats.runaways
            runaways[bounded_name(runaways, claims.rollout_id)] = session.sampled_tokens
        params, overridden = engine_params(
            call,
            claims.sampling,
            settings.agent_sampling_overrides,
            reply_limit(
                len(prompt.ids),
                self._settings.model.context_tokens,
                None if cap is None else cap - session.sampled_tokens,
            ),
            self._bundle.stop_token_ids,
            seed=reply_seed(claims.sampling.seed, claims.step, claims.rollout_id, number),
            choice=choice,
        )
        if choice == 0:
            self._stats.overridden.update(overridden)
            self._stats.ignored.update(call.ignored)
        if prompt.images and self._bundle.vision is not None:
            params["logit_bias"] = {str(token): _NEVER for token in self._bundle.vision.reserved_ids}
        return params

    def _record(
        self, session: OpenSession, running: InFlightCall, prompt: Prompt, completion: Completion, choice: Choice
    ) -> RecordedTurn:
        branch = prompt if not running.replies else replace(prompt, split_reason="branched")
        turn = session.conversations.record(branch, completion, choice.message)
        running.replies.append(session.conversations.recorded(turn))
        session.sampled_tokens += len(completion.token_ids)
        stats = self._stats
        stats.sampled_tokens += len(completion.token_ids)
        if choice.malformed_tool_calls:
            stats.malformed[self._bundle.name] += choice.malformed_tool_calls
        stats.extra_tool_calls += choice.extra_tool_calls
        offered = {tool["function"]["name"] for tool in running.call.tools or ()}
        for called in choice.message.get("tool_calls") or ():
            if called["function"]["name"] not in offered:
                stats.unknown_tools[bounded_name(stats.unknown_tools, called["function"]["name"])] += 1
        if turn.opened is not None:
            stats.segments[turn.opened] += 1
        return turn

    # --- one choice ---------------------------------------------------------------------------------------

    async def _sample(
        self, running: InFlightCall, prompt: Prompt, request: EngineRequest, index: int
    ) -> tuple[Completion, Choice]:
        call, thread = running.call, self._thread
        # Generation under a grammar restarts after an abort, so nothing is streamed before it ends.
        if not call.stream or not request.resumable or call.prompt is not None:
            completion = await self._generate(request)
            choice = await self._read(call, prompt, completion)
            if call.tool_choice == "required":
                _check_called(choice, completion)
            logprobs = await self._logprobs(call, completion)
            running.emit(whole_deltas(choice.message, index, logprobs or ()))
        else:
            parser = await thread.run_brief(0, StreamingParser, self._bundle, prompt.ids, call, index)
            completion = await self._stream(running, request, parser)
            choice = await self._read(call, prompt, completion)
            rest, choice = await thread.run_brief(len(completion.token_ids), parser.end, choice)
            logprobs = await self._logprobs(call, completion)
            sent = sum(len(delta.logprobs) for delta in running.deltas if delta.choice == index)
            spoken = len(completion.token_ids) - thread.has_end(completion.token_ids)
            running.emit(with_logprobs(rest, (logprobs or ())[sent:spoken]))
        if not request.resumable:
            completion = replace(completion, logprobs=(None,) * len(completion.token_ids))
        return completion, choice if logprobs is None else replace(choice, logprobs=logprobs)

    async def _read(self, call: ModelCall, prompt: Prompt, completion: Completion) -> Choice:
        thread = self._thread
        return await thread.run_brief(len(completion.token_ids), thread.read, call, prompt, completion)

    async def _logprobs(self, call: ModelCall, completion: Completion) -> list[Mapping[str, Any]] | None:
        if not call.logprobs:
            return None
        return await self._thread.run(self._thread.logprobs, completion.token_ids, completion.logprobs)

    async def _stream(self, running: InFlightCall, request: EngineRequest, parser: StreamingParser) -> Completion:
        """Sample, and emit deltas while sampling."""
        live = _LiveStream(running, parser, request.stops, self._thread)
        emitting = asyncio.create_task(live.emit())
        try:
            completion = await self._generate(replace(request, progress=live.progress))
            live.end()
            await emitting
            return completion
        finally:
            emitting.cancel()

    async def _generate(self, request: EngineRequest) -> Completion:
        try:
            return await self._engine.generate(request)
        except EngineUnavailable as error:
            logger.warning("a model call got no answer: %s", error)
            raise ApiError(503, str(error), code="engine_unavailable", retry_after_s=_ENGINE_RETRY_S) from None
        except PromptDiffers as error:
            logger.warning("a model call with images cannot be recorded: %s", error)
            raise ApiError(500, str(error), code="prompt_differs") from None
        except EngineRefused as error:
            logger.warning("an engine refused a model call: %s", error)
            if "context length" in str(error) or "maximum allowed length" in str(error):
                raise context_exceeded(self._settings.model.context_tokens, f"the engine says: {error}") from None
            if not request.resumable:
                raise _not_constrained(
                    f"the engine cannot hold a reply to this form: {error}. It needs a grammar backend (SGLang's "
                    "--grammar-backend)"
                ) from None
            # The agent's part of the request was checked before, so the fault is on our side.
            raise ApiError(
                500, f"the engine refused the call: {error}", code="engine_refused", permanent=True
            ) from None


class _LiveStream:
    """Turns the tokens of one choice into deltas while the engine samples."""

    def __init__(
        self, running: InFlightCall, parser: StreamingParser, stops: StopStrings | None, thread: RenderingThread
    ) -> None:
        self._running = running
        self._parser = parser
        self._clear_tokens = None if stops is None else ClearTokens(stops)
        self._thread = thread
        self._more, self._ended = asyncio.Event(), asyncio.Event()
        self._tokens: Sequence[int] = ()
        self._logprobs: Sequence[float | None] = ()
        self._clear = 0  # number of tokens that cannot be part of a stop string

    def progress(self, tokens: Sequence[int], logprobs: Sequence[float | None]) -> None:
        self._tokens, self._logprobs = tokens, logprobs
        self._clear = len(tokens) if self._clear_tokens is None else self._clear_tokens.count(tokens)
        self._more.set()

    def end(self) -> None:
        self._ended.set()
        self._more.set()

    async def emit(self) -> None:
        """Emit deltas until `end`, at most one batch every `_PACE_S`."""
        fed, sent = 0, 0
        while not self._ended.is_set():
            await self._more.wait()
            self._more.clear()
            fresh, fed = self._tokens[fed : self._clear], self._clear
            if fresh and not self._ended.is_set():
                deltas = await self._thread.run_brief(len(fresh), self._parser.add, fresh)
                if work := self._parser.tokens_to_parse:
                    deltas = await self._thread.run_brief(work, self._parser.parse)
                if deltas and self._running.call.logprobs:
                    begin = sent
                    sent = await self._thread.run(self._parser.emitted, self._thread.bundle.token_bytes)
                    entries = self._thread.logprobs(self._tokens[begin:sent], self._logprobs[begin:sent])
                    deltas = with_logprobs(deltas, entries)
                self._running.emit(deltas)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PACE_S):
                    await self._ended.wait()


def _check_called(reply: Choice, completion: Completion) -> None:
    """Check that the engine applied the grammar: a complete reply must contain the call."""
    if reply.finish_reason == "stop" and completion.matched is None:
        raise _not_constrained(
            "the engine sampled no tool call, because it got no structural_tag: the router in front of it drops it, "
            "and does not list its engines at /workers"
        )


def _not_constrained(why: str) -> ApiError:
    return ApiError(
        400,
        f"{why}; use tool_choice auto and ask for JSON in the prompt",
        code="constrained_decoding_unavailable",
    )


async def _all(work: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Return all results. If one fails, cancel the others and raise its error."""
    if len(work) == 1:  # a task would cost 4 % of the call's time
        return [await work[0]]
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
