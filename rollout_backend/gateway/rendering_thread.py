"""Render prompts and parse replies in one thread, so that the tokenizer does not block the event loop.

Handing work to a thread costs as much as the usual work, a tool result and a short reply. Brief work therefore runs
on the event loop, unless the thread is busy: the tokenizer serves one thread at a time.
"""

import asyncio
import json
import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from renderers import ParsedResponse

from rollout_backend.core.images import check_pixels
from rollout_backend.core.model_call import NO_TOOL_PARSER, ApiError, Choice, Message, ModelCall, context_exceeded
from rollout_backend.gateway.sessions.conversations import Conversations, Prompt
from rollout_backend.rendering.renderer import RendererBundle
from rollout_backend.rendering.reply import logprob_entry, read_reply
from rollout_backend.rendering.segments import Completion
from rollout_backend.rendering.token_bytes import StopStrings

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_BRIEF_CHARS = 4096  # length of new messages that render in some milliseconds
_BRIEF_TOKENS = 1024  # length of a reply that parses as fast
_SURE_CHARS = 8  # text with fewer characters per token of the context is encoded without counting first
_PIECE_CHARS, _PIECE_TOKENS = 32 * 1024, 8  # splitting a text may add some tokens


class RenderingThread:
    """Runs one renderer in a thread. Pass the other methods to `run`; only `has_end` may be called from outside."""

    def __init__(self, bundle: RendererBundle, max_image_bytes: int, context_tokens: int) -> None:
        """`max_image_bytes` limits the images of a session in total (`gateway.session_image_bytes`)."""
        self.bundle = bundle
        self._named_roles = bundle.named_roles | {"tool"}
        self._max_image_bytes = max_image_bytes
        self._context_tokens = context_tokens
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="renderer")
        self._jobs: deque[Future[Any]] = deque()  # submitted to the thread, in order

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def shown(self, call: ModelCall) -> ModelCall:
        """Return the call without the names that the template does not render, so that they open no row."""
        hidden = [m for m in call.messages if "name" in m and m["role"] not in self._named_roles]
        if not hidden:
            return call
        ids = set(map(id, hidden))
        messages = [{k: v for k, v in m.items() if k != "name"} if id(m) in ids else m for m in call.messages]
        return replace(call, messages=messages, ignored=call.ignored | {"name"})

    async def run(self, function: Callable[..., _T], *args: Any) -> _T:
        """Call the function in the thread and return its result."""
        self._is_busy()  # called only to forget finished jobs
        job = self._thread.submit(function, *args)
        self._jobs.append(job)
        return await asyncio.wrap_future(job)

    async def run_brief(self, tokens: int, function: Callable[..., _T], *args: Any) -> _T:
        """Call a function whose work is proportional to `tokens`, in the thread unless brief; return its result."""
        if tokens > _BRIEF_TOKENS or self._is_busy():
            return await self.run(function, *args)
        return function(*args)

    def brief_prompt(self, conversations: Conversations, call: ModelCall) -> Prompt | None:
        """Return the call's prompt if the event loop can render it quickly; None if the thread must `prepare` it."""
        if self._is_busy() or call.images or call.prompt is not None:
            return None
        try:
            return conversations.extend(call.messages, call.tools, max_chars=_BRIEF_CHARS)
        except Exception:  # `prepare` raises it again
            return None

    def _is_busy(self) -> bool:
        while self._jobs and self._jobs[0].done():  # the thread completes a job even if its call was cancelled
            self._jobs.popleft()
        return bool(self._jobs)

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
        except Exception as error:  # templates raise any exception to refuse a conversation
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
            ids = array("i", tokenizer.encode(prompt))
        elif max(prompt) >= len(tokenizer) or min(prompt) < 0:
            raise ApiError(400, f"prompt: token ids of this model are below {len(tokenizer)}", param="prompt")
        else:
            ids = array("i", prompt)
        if vision is not None and not set(vision.reserved_ids).isdisjoint(ids):
            raise ApiError(400, "prompt: tokens of an image cannot be sent without it", param="prompt")
        text = prompt if isinstance(prompt, str) else self.bundle.decode(ids)
        return conversations.prompt_of(ids, [{"role": "user", "content": text}])

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
        """Count the tokens of a long text in pieces up to the context's length: encoding all may take minutes."""
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
        said, text, parsed, broken = ids[:-1] if self.has_end(ids) else ids, "", None, False
        if call.prompt is None:
            try:
                parsed = self.bundle.renderer.parse_response(list(ids), tools=call.tools, prompt_ids=prompt.ids)
            except Exception:  # sampling again would bias training towards replies that this parser can read
                logger.exception("the renderer could not parse a reply; it is returned as text")
                broken = True
        else:
            hidden = self._hidden(call)
            said = [token for token in said if token not in hidden]
        if parsed is None or not call.offers_tools:
            text = self.bundle.decode(said)
        choice = read_reply(parsed or ParsedResponse(content=text), text, call, completion)
        if reasoning := choice.message.get("reasoning_content"):
            tokens = len(self.bundle.tokenizer.encode(reasoning, add_special_tokens=False))
            choice = replace(choice, reasoning_tokens=min(tokens, len(ids)))
        return replace(choice, malformed_tool_calls=1) if broken else choice

    def has_end(self, ids: Sequence[int]) -> bool:
        """Return whether the tokens end the model's turn."""
        return bool(ids) and ids[-1] in self.bundle.stop_token_ids

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
    yield message.get("reasoning_content") or ""
    for call in message.get("tool_calls") or ():
        yield call["function"]["arguments"]
