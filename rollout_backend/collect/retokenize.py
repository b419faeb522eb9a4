"""Makes rollouts that carry only messages trainable, by rendering the messages with the model's own renderer.

Invariants:

- The segments are marked `retokenized`. They have no logprobs and no weight versions.
- Tokens count as sampled where the renderer says that the model would have sampled them. If the renderer cannot say,
  they are the tokens after the reply's prompt, up to the token that ends the reply.
- Each reply follows the prompt that the model would have seen. If the template drops part of the history (old
  reasoning), a new segment begins, as for sampled tokens.
- If a tool call is missing from the tokens because the template does not support tools, the rollout is not trained.
- A rollout that cannot be rendered stays messages-only, and the log says why.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

from agent_wrapper.contract import Conversation, Rollout, Segment
from rollout_backend.config import ModelConfig
from rollout_backend.core.api_error import ApiError
from rollout_backend.dialects.openai_chat import OpenAIChat
from rollout_backend.rendering.segments import SegmentRecorder
from rollout_backend.rendering.tool_names import with_tool_names

if TYPE_CHECKING:
    from rollout_backend.rendering.renderer import RendererBundle

log = logging.getLogger(__name__)

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None


class Retokenizer:
    """Re-tokenizes rollouts in a dedicated thread, because tokenizers have state. Use `open` to make one."""

    def __init__(self, bundle: RendererBundle, thread: ThreadPoolExecutor) -> None:
        self._bundle = bundle
        self._thread = thread

    @classmethod
    async def open(cls, model: ModelConfig) -> Self:
        """Load the model's renderer.

        Raises:
            ConfigError: there is no renderer for the model.
        """
        thread = ThreadPoolExecutor(1, thread_name_prefix="retokenize")
        try:
            return cls(await asyncio.get_running_loop().run_in_executor(thread, _load, model), thread)
        except BaseException:
            thread.shutdown(wait=False)
            raise

    async def __call__(self, rollout: Rollout) -> Rollout:
        """Return the rollout with segments if it carries only messages that can be rendered, else unchanged."""
        if not rollout.messages_only or rollout.reward is None:
            return rollout
        loop = asyncio.get_running_loop()
        try:
            segments = await loop.run_in_executor(self._thread, retokenize, self._bundle, rollout.conversations)
        except Exception as error:  # renderers raise any type for messages that they cannot render
            log.warning("rollout %s stays messages-only and is not trained: %s", rollout.rollout_id, error)
            return rollout
        return rollout.model_copy(update={"segments": (*rollout.segments, *segments)})

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def retokenize(bundle: RendererBundle, conversations: Sequence[Conversation]) -> tuple[Segment, ...]:
    """Render conversations into segments.

    Raises:
        ValueError: names the message that cannot be rendered. Renderers also raise errors of other types.
    """
    found = SegmentRecorder()
    for number, conversation in enumerate(conversations):
        messages, tools = _plain(conversation, f"conversations.{number}")
        for at in conversation.model_messages:
            if not at:
                raise ValueError(f"conversations.{number}.messages.0 is a reply to nothing")
            named = with_tool_names(messages[: at + 1]) if bundle.needs_tool_names else messages[: at + 1]
            prompt, reply = _split(bundle, named, tools)
            where = f"conversations.{number}.messages.{at}"
            if not reply:
                raise ValueError(f"{where} renders to no token that the model would have sampled")
            spelled = bundle.renderer.parse_response(reply, tools=tools).tool_calls
            if len(spelled) != len(messages[at].get("tool_calls", ())):
                raise ValueError(f"{where}: its tool calls are missing from the tokens that it renders to")
            found.add(
                prompt,
                reply,
                [None] * len(reply),
                finish_reason="unknown",
                messages=messages[: at + 1],
                split_reason="first_call" if not len(found) else "retokenized",
            )
    return tuple(segment.model_copy(update={"retokenized": True}) for segment in found.segments())


def _split(bundle: RendererBundle, messages: Sequence[Message], tools: Tools) -> tuple[list[int], list[int]]:
    """Return the tokens before the last message, and its tokens that the model would have sampled."""
    rendered = bundle.renderer.render(list(messages), tools=tools)
    ids, last = list(rendered.token_ids), len(messages) - 1
    if len(rendered.sampled_mask) == len(ids):
        owners = zip(rendered.sampled_mask, rendered.message_indices, strict=True)
        places = [k for k, (sampled, owner) in enumerate(owners) if sampled and owner == last]
        start, end = (places[0], places[-1] + 1) if places else (0, 0)
        if end - start != len(places):
            raise ValueError(f"messages.{last}: the tokens that the model would have sampled are not contiguous")
        return ids[:start], ids[start:end]
    prompt = bundle.render(messages[:last], tools)
    if ids[: len(prompt)] != prompt:
        raise ValueError(f"messages.{last}: the model's template does not render it as an extension of its prompt")
    stops = set(bundle.stop_token_ids)
    end = next((k + 1 for k in range(len(prompt), len(ids)) if ids[k] in stops), len(ids))
    return prompt, ids[len(prompt) : end]


def _plain(conversation: Conversation, where: str) -> tuple[list[dict[str, Any]], Tools]:
    """Return the messages and tools in the form that the gateway renders for a model call."""
    body = {"model": "", "messages": conversation.messages, "tools": conversation.tools or None}
    try:
        call = OpenAIChat().parse(json.dumps(body).encode())
    except ApiError as error:
        raise ValueError(f"{where}.{error}") from None
    return list(call.messages), call.tools


def _load(model: ModelConfig) -> RendererBundle:
    from rollout_backend.rendering.renderer import load_renderer  # late: it loads transformers

    return load_renderer(model)
