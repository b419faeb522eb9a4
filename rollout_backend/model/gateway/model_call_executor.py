"""Execute a model call: render its prompt, sample, parse the reply, and record both.

Invariants:

- A call is recorded if and only if all its choices were sampled. An aborted call leaves no trace.
- Each choice of a call is a turn; the turns branch from one prompt.
- A call and its answer are in the journal before the agent gets the answer: `call_handler` waits for it.
- Tokens of a constrained reply are recorded without logprobs, because the engine's belong to another distribution.
- No part of an image reaches an engine before the whole image was read.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
from array import array
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from renderers import ParsedResponse

from rollout_backend.base.giving_way import let_others_go_first
from rollout_backend.errors import EngineUnavailable
from rollout_backend.model.gateway.admission import Admission
from rollout_backend.model.gateway.cpu_shares import CpuShare, charged_task
from rollout_backend.model.gateway.engine.client import ConstrainedCallLost, EngineClient, EngineRefused
from rollout_backend.model.gateway.engine.protocol import (
    EngineRequest,
    PromptDiffers,
    engine_params,
    reply_limit,
    reply_seed,
)
from rollout_backend.model.gateway.gateway_settings import GatewaySettings
from rollout_backend.model.gateway.sessions import journal as journals
from rollout_backend.model.gateway.sessions.calls import InFlightCall
from rollout_backend.model.gateway.sessions.comparison import begins, defaults_of
from rollout_backend.model.gateway.sessions.conversations import Conversations, Prompt, RecordedTurn, is_cache_break
from rollout_backend.model.gateway.sessions.registry import OpenSession
from rollout_backend.model.gateway.stats import GatewayStats, bounded_name, count
from rollout_backend.model.images import check_pixels
from rollout_backend.model.model_call import (
    NO_TOOL_PARSER,
    Answer,
    ApiError,
    Choice,
    Message,
    ModelCall,
    context_exceeded,
    trajectory_too_large,
    whole_deltas,
    with_logprobs,
)
from rollout_backend.model.rendering.constrained_decoding import Constraints
from rollout_backend.model.rendering.guarded_renderer import RendererBundle
from rollout_backend.model.rendering.reply import StreamingParser, logprob_entry, read_reply, read_tokens
from rollout_backend.model.rendering.segments import Completion
from rollout_backend.model.rendering.token_bytes import ClearTokens, StopStrings

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_ENGINE_RETRY_S = 5
# Limit of one session. Each choice adds a bounded amount to memory, journal and trajectory.
_MAX_CHOICES = 10_000
_CONSTRAINED_LOST = "constrained_call_lost"
_NEVER = -100.0
_PACE_S = 0.03
# New messages of this length render in some milliseconds, and a reply of this length parses as fast.
_BRIEF_CHARS = 4096
_BRIEF_TOKENS = 1024
# Text with fewer characters per token of the context is encoded without counting first.
_SURE_CHARS = 8
# The messages of a session may fill this many results, because a message that an agent rewrites is recorded again.
_REWRITTEN = 4
# Splitting a text may add some tokens.
_PIECE_CHARS, _PIECE_TOKENS = 32 * 1024, 8


class ModelCallExecutor:
    """Executes the model calls of one gateway. Only the event loop changes sessions."""

    def __init__(
        self,
        settings: GatewaySettings,
        bundle: RendererBundle,
        stats: GatewayStats,
        engine: EngineClient,
        admission: Admission,
    ) -> None:
        self._settings = settings
        self._admission = admission
        self._bundle = bundle
        self._model_name, self._context_tokens = settings.model.served_name, settings.model.context_tokens
        self._records_experts = settings.model.routed_experts
        self._stats = stats
        self._engine = engine
        self._constraints = Constraints(bundle, settings.gateway.constrained_decoding == "allow")
        self._renderer = CallRenderer(bundle, settings.gateway.session_image_bytes, self._context_tokens)

    def shown(self, call: ModelCall) -> ModelCall:
        """Return the call as the engine's own APIs show it to this model, and note what is ignored."""
        is_sglang = self._settings.engine_name == "sglang"
        if is_sglang and call.tool_choice == "none":
            call = replace(call, tools=None)
        # SGLang shows a final reply as the user's message.
        if is_sglang and (last := call.messages[-1])["role"] == "assistant":
            call = replace(call, messages=[*call.messages[:-1], {"role": "user", "content": last["content"]}])
        if call.tool_choice == "required" and self._settings.gateway.forced_tools == "as_auto":
            call = replace(call, tool_choice="auto", tool_name=None, ignored=call.ignored | {"tool_choice"})
        # Constrained tokens cannot be trained, so only a forced call follows the schema of a strict tool.
        if call.tool_choice == "auto" and any(tool["function"].get("strict") for tool in call.tools or ()):
            call = replace(call, ignored=call.ignored | {"tools.strict"})
        return self._renderer.shown(call)

    async def count(self, session: OpenSession, call: ModelCall, *, brief: bool) -> int:
        """Return the length of the call's prompt in tokens. Raises ApiError (400) if it cannot be rendered."""
        return len((await self._prompt(session, call, brief)).ids)

    async def _prompt(self, session: OpenSession, call: ModelCall, brief: bool) -> Prompt:
        cpu, conversations = session.share.cpu, session.conversations
        if brief and cpu.is_free() and (prompt := self._renderer.brief_prompt(conversations, call)) is not None:
            return prompt
        return await cpu.run(self._renderer.prepare, conversations, call)

    async def answer(self, session: OpenSession, running: InFlightCall) -> Answer:
        """Return the call's answer. A call that fails on our side counts as unanswered until it is repeated.

        Raises:
            ApiError: status 400 if the call is invalid, 503 if it finds no place in time or no engine answers.
        """
        digest = running.key.question
        session.ask(digest, is_retry=running.key.is_declared)
        # The number is taken before any wait, so that choices are numbered in order of arrival.
        number = session.started + 1
        session.started += running.call.n
        deadline = asyncio.get_running_loop().time() + self._settings.model_call_s
        try:
            async with self._place(session, running.call.n, deadline):
                answer = await self._answer(session, running, number, deadline)
        except asyncio.CancelledError:
            if running.given_up and session.is_open:
                kept = [
                    session.conversations.keep(prompt, completion, left_out=running.left_out)
                    for prompt, completion in running.sampled
                ]
                session.write(journals.dropped(digest, kept))
            raise
        except Exception as error:
            session.lost_constrained |= isinstance(error, ApiError) and error.code == _CONSTRAINED_LOST
            if not isinstance(error, ApiError) or error.status >= 500:
                session.lose(digest)
            else:
                session.write(journals.dropped(digest))
            raise
        session.unanswered.discard(digest)
        return answer

    @contextlib.asynccontextmanager
    async def _place(self, session: OpenSession, choices: int, deadline: float) -> AsyncIterator[None]:
        """Wait for a place among the calls in flight, and hold it. Raises ApiError (503) at the deadline."""
        admission = self._admission
        async with contextlib.AsyncExitStack() as held:
            try:
                async with asyncio.timeout_at(deadline):
                    await held.enter_async_context(admission.place(session.share, choices))
            except TimeoutError:
                raise ApiError(
                    503,
                    f"the call found no place within {self._settings.model_call_s:g} s (timeouts.model_call_s): "
                    f"{admission.in_flight} are in flight here and {admission.waiting} wait; the limits are "
                    "gateway.max_concurrent_calls, gateway.processes, gateway.max_queued_per_engine and "
                    "gateway.max_session_calls",
                    code="no_capacity",
                    retry_after_s=_ENGINE_RETRY_S,
                ) from None
            yield

    async def _answer(self, session: OpenSession, running: InFlightCall, number: int, deadline: float) -> Answer:
        call = running.call
        if number + call.n - 1 > _MAX_CHOICES:
            raise ApiError(
                400,
                f"this session has asked for {number - 1} replies, and may have {_MAX_CHOICES}: end the rollout",
                code="session_calls_exceeded",
            )
        await _wait_for_reply(session, running, deadline)
        prompt = await self._prompt(session, call, running.brief)
        max_bytes, spans = self._settings.max_result_bytes, [placed.span for placed in prompt.images]
        has_room = session.conversations.recorder.has_room(prompt.ids, spans, call.n, max_bytes)
        if not has_room or session.text_bytes > _REWRITTEN * max_bytes:
            raise trajectory_too_large(f"with this call it would exceed {max_bytes} bytes", status=400)
        form = {}
        if call.is_constrained:
            if session.lost_constrained:
                raise _constrained_lost("an engine broke off an earlier constrained call of this session")
            form = await session.share.cpu.run(self._constraints.params, call, prompt.ids)
        running.set_prompt_tokens(len(prompt.ids))
        request = EngineRequest(
            prompt.ids,
            form,
            _routing_key(session, call, prompt),
            prompt.images,
            stops=await session.share.cpu.run(self._renderer.stop_strings, call) if call.stop else None,
            resumable=not form,
            experts_from=max(prompt.known - 1, 0) if self._records_experts else None,
            adapter=session.claims.adapter,
            deadline=deadline,
        )
        requests = [
            replace(request, params=self._params(session, call, prompt, i, number + i) | form) for i in range(call.n)
        ]
        sampled = await _all(
            [self._sample(session.share.cpu, running, prompt, request, i) for i, request in enumerate(requests)]
        )
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
            model=self._model_name,
            choices=tuple(choice for _, choice in sampled),
            prompt_tokens=len(prompt.ids),
            cached_tokens=cached_tokens,
        )
        record = journals.answered(
            running.key.question,
            running.key.digest,
            turns,
            answer,
            session.started,
            session.sampled_tokens,
        )
        session.text_bytes += journals.text_bytes(record)
        session.write(record)
        if running.left_out:
            stats.left_out += len(turns)
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
                self._context_tokens,
                None if cap is None else cap - session.sampled_tokens,
            ),
            self._bundle.stop_token_ids,
            seed=reply_seed(claims.sampling.seed, claims.step, claims.rollout_id, number),
            choice=choice,
        )
        if choice == 0:
            self._stats.overridden.update(overridden)
            count(self._stats.ignored, call.ignored)
        if prompt.images and self._bundle.vision is not None:
            params["logit_bias"] = {str(token): _NEVER for token in self._bundle.vision.reserved_ids}
        return params

    def _record(
        self, session: OpenSession, running: InFlightCall, prompt: Prompt, completion: Completion, choice: Choice
    ) -> RecordedTurn:
        branch = prompt if not running.replies else replace(prompt, split_reason="branched")
        turn = session.conversations.record(branch, completion, choice.message, left_out=running.left_out)
        running.replies.append(session.conversations.recorded(turn))
        session.sampled_tokens += len(completion.token_ids)
        stats = self._stats
        stats.sampled_tokens += len(completion.token_ids)
        if choice.malformed_tool_calls:
            stats.malformed[self._bundle.name] += choice.malformed_tool_calls
        stats.extra_tool_calls += choice.extra_tool_calls
        offered = {tool["function"]["name"] for tool in running.call.tools or ()}
        called = (call["function"]["name"] for call in choice.message.get("tool_calls") or ())
        count(stats.unknown_tools, (name for name in called if name not in offered))
        if turn.opened is not None:
            stats.segments[turn.opened] += 1
        return turn

    # --- one choice ---------------------------------------------------------------------------------------

    async def _sample(
        self, cpu: CpuShare, running: InFlightCall, prompt: Prompt, request: EngineRequest, index: int
    ) -> tuple[Completion, Choice]:
        call, renderer = running.call, self._renderer
        parser: StreamingParser | None = None
        logprobs: Sequence[Mapping[str, Any]] | None = None
        # Generation under a grammar restarts after an abort, so nothing is streamed before it ends.
        if call.stream and request.resumable and call.prompt is None:
            parser = await cpu.run(StreamingParser, self._bundle, prompt.ids, call, index, brief=True)
            completion = await self._stream(cpu, running, prompt, request, parser)
        else:
            completion = await self._generate(request)
        ids = completion.token_ids
        brief = len(ids) <= _BRIEF_TOKENS
        choice = await cpu.run(renderer.read, call, prompt, completion, brief=brief)
        if call.logprobs:
            logprobs = await cpu.run(renderer.logprobs, ids, completion.logprobs, brief=brief)
        if parser is None:
            # A complete reply under the grammar contains a call.
            if call.tool_choice == "required" and choice.finish_reason == "stop" and completion.matched is None:
                raise _not_constrained(
                    "the engine sampled no tool call, because it got no structural_tag: the router in front of it "
                    "drops it, and does not list its engines at /workers"
                )
            running.emit(whole_deltas(choice.message, index, logprobs or ()))
        else:
            rest, choice = await cpu.run(parser.end, choice, brief=brief)
            if logprobs:
                sent = sum(len(delta.logprobs) for delta in running.deltas if delta.choice == index)
                rest = with_logprobs(rest, logprobs[sent : len(ids) - renderer.bundle.ends_turn(ids)])
            running.emit(rest)
        if not request.resumable:
            completion = replace(completion, logprobs=(None,) * len(ids))
        return completion, choice if logprobs is None else replace(choice, logprobs=logprobs)

    async def _stream(
        self, cpu: CpuShare, running: InFlightCall, prompt: Prompt, request: EngineRequest, parser: StreamingParser
    ) -> Completion:
        """Sample, and emit deltas while sampling."""

        def keep(completion: Completion) -> None:
            running.sampled.append((prompt, completion))

        live = _LiveStream(cpu, running, parser, request.stops, self._renderer)
        emitting = charged_task(live.emit())
        try:
            completion = await self._generate(replace(request, progress=live.progress, cancelled=keep))
            keep(completion)
            live.end()
            await emitting
            return completion
        finally:
            emitting.cancel()

    async def _generate(self, request: EngineRequest) -> Completion:
        try:
            return await self._engine.generate(request)
        except ConstrainedCallLost as error:
            logger.warning("a constrained model call is not repeated: %s", error)
            raise _constrained_lost(str(error)) from None
        except EngineUnavailable as error:
            logger.warning("a model call got no answer: %s", error)
            raise ApiError(503, str(error), code="engine_unavailable", retry_after_s=_ENGINE_RETRY_S) from None
        except PromptDiffers as error:
            logger.warning("a model call with images cannot be recorded: %s", error)
            raise ApiError(500, str(error), code="prompt_differs") from None
        except EngineRefused as error:
            # The message about a form quotes it. The form is the agent's, so it must not be logged.
            logger.warning("an engine refused a model call: %s", error if request.resumable else "its form")
            if "context length" in str(error) or "maximum allowed length" in str(error):
                raise context_exceeded(self._context_tokens, f"the engine says: {error}") from None
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
        self,
        cpu: CpuShare,
        running: InFlightCall,
        parser: StreamingParser,
        stops: StopStrings | None,
        renderer: CallRenderer,
    ) -> None:
        self._cpu = cpu
        self._running = running
        self._parser = parser
        self._clear_tokens = None if stops is None else ClearTokens(stops)
        self._renderer = renderer
        self._more, self._ended = asyncio.Event(), asyncio.Event()
        self._tokens: Sequence[int] = ()
        self._logprobs: Sequence[float | None] = ()
        self._clear = 0

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
                deltas = await self._cpu.run(self._parser.add, fresh, brief=len(fresh) <= _BRIEF_TOKENS)
                if work := self._parser.tokens_to_parse:
                    deltas = await self._cpu.run(self._parser.parse, brief=work <= _BRIEF_TOKENS)
                if deltas and self._running.call.logprobs:
                    begin = sent
                    sent = await self._cpu.run(self._parser.emitted, self._renderer.bundle.token_bytes)
                    entries = await self._cpu.run(
                        self._renderer.logprobs, self._tokens[begin:sent], self._logprobs[begin:sent]
                    )
                    deltas = with_logprobs(deltas, entries)
                self._running.emit(deltas)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PACE_S):
                    await self._ended.wait()


async def _wait_for_reply(session: OpenSession, running: InFlightCall, deadline: float) -> None:
    """Wait for the end of a stream that this call continues.

    A client may close the stream at its own marker and make this call before the gateway notices the closed
    connection, or leave the stream open.
    """
    streams = [each for each in session.retries.undelivered if each.call.stream and each.deltas and not each.done]
    if not streams:
        return
    call = running.call
    question, reply = session.conversations.answered_question(call.messages, call.tools)
    for other in streams:
        if reply and other is not running and other.key.question == question:
            back, defaults = call.messages[reply], defaults_of(call.tools)
            if any(begins(back, said, defaults) for said in other.said()):
                await asyncio.wait({other.task}, timeout=deadline - asyncio.get_running_loop().time())


def _constrained_lost(why: str) -> ApiError:
    return ApiError(
        503,
        f"{why}. Its grammar may have ended the engine, so this session can make no further constrained calls; use "
        "tool_choice auto and ask for JSON in the prompt",
        code=_CONSTRAINED_LOST,
        permanent=True,
    )


def _not_constrained(why: str) -> ApiError:
    return ApiError(
        400,
        f"{why}; use tool_choice auto and ask for JSON in the prompt",
        code="constrained_decoding_unavailable",
    )


def _routing_key(session: OpenSession, call: ModelCall, prompt: Prompt) -> str:
    """Return the key that sends the calls of one conversation to one engine.

    All calls that are not recorded have one session id, so their key is the conversation's beginning: its messages
    before the first reply.
    """
    claims = session.claims
    if claims.routing_key or claims.is_recorded:
        return claims.routing_key or claims.session_id
    if call.prompt is not None:
        return hashlib.blake2b(bytes(memoryview(array("i", prompt.ids))), digest_size=16).hexdigest()
    beginning = itertools.takewhile(lambda message: message["role"] != "assistant", call.messages)
    return hashlib.blake2b(json.dumps([*beginning]).encode(), digest_size=16).hexdigest()


async def _all(work: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Return all results. If one fails, cancel the others and raise its error."""
    # A task would cost 4 % of the call's time.
    if len(work) == 1:
        return [await work[0]]
    tasks = [charged_task(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# --- prompts and replies ---------------------------------------------------------------------------------------


class CallRenderer:
    """Renders prompts and reads replies.

    Handing work to a thread costs as much as the usual work, a tool result and a short reply. Brief work therefore
    runs on the event loop, unless the thread is busy: the tokenizer serves one thread at a time.
    """

    def __init__(self, bundle: RendererBundle, max_image_bytes: int, context_tokens: int) -> None:
        """`max_image_bytes` limits the images of a session in total (`gateway.session_image_bytes`)."""
        self.bundle = bundle
        self._named_roles = bundle.named_roles | {"tool"}
        self._max_image_bytes = max_image_bytes
        self._context_tokens = context_tokens

    def shown(self, call: ModelCall) -> ModelCall:
        """Return the call without the names that the template does not render, so that they open no row."""
        hidden = [m for m in call.messages if "name" in m and m["role"] not in self._named_roles]
        if not hidden:
            return call
        ids = set(map(id, hidden))
        messages = [{k: v for k, v in m.items() if k != "name"} if id(m) in ids else m for m in call.messages]
        return replace(call, messages=messages, ignored=call.ignored | {"name"})

    def brief_prompt(self, conversations: Conversations, call: ModelCall) -> Prompt | None:
        """Return the call's prompt if the event loop can render it quickly; None if a thread must `prepare` it."""
        if call.images or call.prompt is not None:
            return None
        try:
            return conversations.extend(call.messages, call.tools, _BRIEF_CHARS)
        except Exception:
            return None

    def prepare(self, conversations: Conversations, call: ModelCall) -> Prompt:
        """Return the call's prompt.

        Raises:
            ApiError: status 400 if the messages cannot be rendered or exceed the context, an image cannot be read, or
                tools are offered to a model whose calls cannot be parsed.
        """
        if call.prompt is not None:
            return self._prepare_prompt(conversations, call, call.prompt)
        if call.offers_tools and not self.bundle.reads_tool_calls:
            raise ApiError(400, f"no tools can be offered: {NO_TOOL_PARSER}", code="no_tool_parser", param="tools")
        self._check_length(call)
        self._check_images(conversations, call)
        try:
            return conversations.prepare(call.messages, call.tools, call.images)
        except Exception as error:
            # Templates raise any exception to refuse a conversation.
            logger.warning("a conversation could not be rendered: %r", type(error).__name__)
            why = f"these messages cannot be rendered for this model: {error}"
            if self._lacks_user(call):
                why += "; they contain no user message, which this model's template needs"
            raise ApiError(400, why, code="unrenderable") from None

    def _prepare_prompt(self, conversations: Conversations, call: ModelCall, prompt: str | tuple[int, ...]) -> Prompt:
        """Return the prompt that the agent supplied as text or tokens."""
        tokenizer, vision = self.bundle.tokenizer, self.bundle.vision
        if isinstance(prompt, str):
            self._check_length(call)
        elif max(prompt) >= len(tokenizer) or min(prompt) < 0:
            raise ApiError(400, f"prompt: token ids of this model are below {len(tokenizer)}", param="prompt")
        prepared = conversations.prepare_text(prompt, self._hidden(call))
        if vision is not None and not set(vision.reserved_ids).isdisjoint(prepared.ids):
            raise ApiError(400, "prompt: tokens of an image cannot be sent without it", param="prompt")
        return prepared

    def _lacks_user(self, call: ModelCall) -> bool:
        """Return whether adding a user message would make the messages renderable."""
        if any(message["role"] == "user" for message in call.messages):
            return False
        first = [message for message in call.messages[:1] if message["role"] == "system"]
        try:
            self.bundle.render([*first, {"role": "user", "content": "a"}, *call.messages[len(first) :]], call.tools)
        except Exception:
            return False
        return True

    def _check_length(self, call: ModelCall) -> None:
        """Count a long text in pieces up to the context's length, because encoding all of it may take minutes."""
        context = self._context_tokens
        if len(call.messages) * self.bundle.message_tokens > context:
            raise context_exceeded(context, f"{len(call.messages)} messages have more")
        texts = [text for message in call.messages for text in _texts(message)]
        texts += [json.dumps(tool, ensure_ascii=False) for tool in call.tools or ()]
        if sum(map(len, texts)) <= _SURE_CHARS * context:
            return
        tokens = 0
        for text in texts:
            for at in range(0, len(text), _PIECE_CHARS):
                piece = self.bundle.tokenizer.encode(text[at : at + _PIECE_CHARS], add_special_tokens=False)
                tokens += max(0, len(piece) - _PIECE_TOKENS)
                if tokens > context:
                    raise context_exceeded(context, "the messages have more")

    def _check_images(self, conversations: Conversations, call: ModelCall) -> None:
        fresh = conversations.unseen(call.images)
        cap = self._max_image_bytes
        if fresh and conversations.image_bytes + sum(len(image.data) for image in fresh) > cap:
            raise ApiError(
                400, f"the images of this session come to more than {cap} bytes; send fewer, or smaller ones"
            )
        for image in fresh:
            try:
                check_pixels(image)
            except ValueError as error:
                raise ApiError(400, f"an image ({image.media_type}, {len(image.data)} bytes) {error}") from None
            let_others_go_first()

    def stop_strings(self, call: ModelCall) -> StopStrings:
        silent = self.bundle.silent_token_ids if call.prompt is None else self._hidden(call)
        return StopStrings(call.stop, self.bundle.token_bytes, silent)

    def _hidden(self, call: ModelCall) -> frozenset[int]:
        """Return the tokens that are left out of the text of a completion."""
        stops = frozenset(self.bundle.stop_token_ids)
        return stops if call.shows_special_tokens else stops | self.bundle.special_token_ids

    def read(self, call: ModelCall, prompt: Prompt, completion: Completion) -> Choice:
        """Return the sampled message. A reply that the renderer cannot parse is returned as text."""
        ids = completion.token_ids
        if call.prompt is not None:
            hidden = self._hidden(call)
            text = self.bundle.decode([token for token in ids if token not in hidden])
            return read_reply(ParsedResponse(content=text), text, call, completion)
        choice, failure = read_tokens(self.bundle, call, prompt.ids, completion)
        if failure is not None:
            # Sampling again would bias training towards replies that this parser can read.
            logger.error("the renderer could not parse a reply; it is returned as text", exc_info=failure)
        if reasoning := choice.message.get("reasoning_content"):
            tokens = len(self.bundle.tokenizer.encode(reasoning, add_special_tokens=False))
            choice = replace(choice, reasoning_tokens=min(tokens, len(ids)))
        return choice if failure is None else replace(choice, malformed_tool_calls=1)

    def logprobs(self, tokens: Sequence[int], logprobs: Sequence[float | None]) -> list[Mapping[str, Any]]:
        """Return one entry per token, in OpenAI's format."""
        spelled = self.bundle.token_bytes
        return [
            logprob_entry(spelled.get(token, b""), logprob) for token, logprob in zip(tokens, logprobs, strict=True)
        ]


def _texts(message: Message) -> Iterator[str]:
    """Yield the texts of a message that may be rendered."""
    content = message.get("content") or ()
    yield from (content,) if isinstance(content, str) else (part.get("text") or "" for part in content)
    yield from (message.get(field) or "" for field in ("reasoning_content", "name", "tool_call_id"))
    for call in message.get("tool_calls") or ():
        yield from (call.get("id") or "", *call["function"].values())
