"""Rollouts that carry only messages, made trainable: their messages rendered with the model's own renderer.

What must always hold:

- The segments made are marked `retokenised`; no logprob and no weight version is made up for them.
- Tokens count as the model's where the renderer says that it would have sampled them; where it cannot say, they are
  what follows the prompt for the reply, up to the token that ends it.
- Each reply stands after the prompt that the model would have been given for it: a template that drops something of
  the history (old reasoning) begins a new segment, as it does for sampled tokens.
- A tool call that the tokens do not spell, for the template knows none, is not passed over: nothing is trained.
- What cannot be rendered stays as it is, messages only, and the log says why.
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
from rollout_backend.gateway.dialects.openai_chat import OpenAIChat
from rollout_backend.gateway.errors import ApiError
from rollout_backend.gateway.session import with_tool_names
from rollout_backend.gateway.trajectory import Trajectory

if TYPE_CHECKING:
    from rollout_backend.gateway.renderer import RendererBundle

log = logging.getLogger(__name__)

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None


class Retokeniser:
    """Made with `open`. Works in one thread of its own, for a tokenizer has state."""

    def __init__(self, bundle: RendererBundle, thread: ThreadPoolExecutor) -> None:
        self._bundle = bundle
        self._thread = thread

    @classmethod
    async def open(cls, model: ModelConfig) -> Self:
        """Raises ConfigError: there is no renderer for the model."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="retokenise")
        try:
            return cls(await asyncio.get_running_loop().run_in_executor(thread, _load, model), thread)
        except BaseException:
            thread.shutdown(wait=False)
            raise

    async def __call__(self, rollout: Rollout) -> Rollout:
        """The rollout with segments, if it carries only messages and they can be rendered; otherwise as it is."""
        if not rollout.messages_only or rollout.reward is None:
            return rollout
        loop = asyncio.get_running_loop()
        try:
            segments = await loop.run_in_executor(self._thread, retokenise, self._bundle, rollout.conversations)
        except Exception as error:  # whatever a renderer raises over messages that it cannot take
            log.warning("rollout %s stays messages only, and is not trained: %s", rollout.rollout_id, error)
            return rollout
        return rollout.model_copy(update={"segments": (*rollout.segments, *segments)})

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def retokenise(bundle: RendererBundle, conversations: Sequence[Conversation]) -> tuple[Segment, ...]:
    """The segments of what was said.

    Raises:
        ValueError: which message cannot be rendered, and why. Renderers raise their own besides.
    """
    found = Trajectory()
    for number, conversation in enumerate(conversations):
        messages, tools = _plain(conversation, f"conversations.{number}")
        for at in conversation.said:
            if not at:
                raise ValueError(f"conversations.{number}.messages.0 is a reply to nothing")
            named = with_tool_names(messages[: at + 1]) if bundle.needs_tool_names else messages[: at + 1]
            prompt, reply = _split(bundle, named, tools)
            where = f"conversations.{number}.messages.{at}"
            if not reply:
                raise ValueError(f"{where} renders to no token of the model's")
            spelled = bundle.renderer.parse_response(reply, tools=tools).tool_calls
            if len(spelled) != len(messages[at].get("tool_calls", ())):
                raise ValueError(f"{where}: its tool calls do not come back from the tokens that it renders to")
            found.add(
                prompt,
                reply,
                [None] * len(reply),
                finish_reason="unknown",
                messages=messages[: at + 1],
                opened_by="first_call" if not len(found) else "retokenised",
            )
    return tuple(segment.model_copy(update={"retokenised": True}) for segment in found.segments())


def _split(bundle: RendererBundle, messages: Sequence[Message], tools: Tools) -> tuple[list[int], list[int]]:
    """The tokens before the last message's, and those of it that the model would have sampled."""
    rendered = bundle.renderer.render(list(messages), tools=tools)
    ids, last = list(rendered.token_ids), len(messages) - 1
    if len(rendered.sampled_mask) == len(ids):
        owners = zip(rendered.sampled_mask, rendered.message_indices, strict=True)
        places = [k for k, (sampled, owner) in enumerate(owners) if sampled and owner == last]
        start, end = (places[0], places[-1] + 1) if places else (0, 0)
        if end - start != len(places):
            raise ValueError(f"messages.{last}: what the model would have sampled is not in one piece")
        return ids[:start], ids[start:end]
    prompt = bundle.render(messages[:last], tools)
    if ids[: len(prompt)] != prompt:
        raise ValueError(f"messages.{last}: the model's template does not render it after its own prompt")
    stops = set(bundle.stop_token_ids)
    end = next((k + 1 for k in range(len(prompt), len(ids)) if ids[k] in stops), len(ids))
    return prompt, ids[len(prompt) : end]


def _plain(conversation: Conversation, where: str) -> tuple[list[dict[str, Any]], Tools]:
    """The messages as a model call's are rendered."""
    body = {"model": "", "messages": conversation.messages, "tools": conversation.tools or None}
    try:
        call = OpenAIChat().parse(json.dumps(body).encode())
    except ApiError as error:
        raise ValueError(f"{where}.{error}") from None
    return list(call.messages), call.tools


def _load(model: ModelConfig) -> RendererBundle:
    from rollout_backend.gateway.renderer import load_renderer  # late: it loads transformers

    return load_renderer(model)
