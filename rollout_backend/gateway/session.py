"""One session: its conversations, the prompt of each next call, and the trajectory of what was sampled.

What must always hold:

- A request that continues a conversation gets a prompt that begins with the very tokens of that conversation, those
  sampled included, wherever the renderer can extend them. Only otherwise is the history rendered anew.
- Messages are compared by what is rendered: text parts or a string, None or "", arguments of a tool call in another
  spacing, and fields that nobody renders make no difference. Reasoning is not compared, for most agents do not send
  it back: the tokens keep it, and whether it stays in the history is the renderer's choice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_backend.gateway.engine import Completion
from rollout_backend.gateway.renderer import RendererBundle
from rollout_backend.gateway.trajectory import Place, Trajectory

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None
_Digest = bytes


@dataclass(frozen=True)
class Prompt:
    """What one call sends to the engine, and why a new segment opens if these ids extend none."""

    ids: list[int]
    messages: Sequence[Message]
    tools_digest: _Digest
    chain: list[_Digest]
    opened_by: str


class Session:
    """`prepare` may run in another thread than `record`; only `record` changes anything."""

    def __init__(self, bundle: RendererBundle) -> None:
        self.trajectory = Trajectory()
        self._bundle = bundle
        self._turns: dict[tuple[_Digest, _Digest], Place] = {}  # by tools and by messages with the reply
        self._replies: set[_Digest] = set()  # ends of recorded conversations, whatever their tools
        self._seen: set[_Digest] = set()  # every beginning of a request that was answered

    def prepare(self, messages: Sequence[Message], tools: Tools) -> Prompt:
        """The prompt for `messages` (plain, as `openai_chat` makes them). Raises whatever the renderer raises."""
        tools_digest = _digest(b"tools", tools or [])
        chain = _chain(messages)
        messages_named = _with_tool_names(messages) if self._bundle.needs_tool_names else messages
        for n in range(len(chain) - 1, 0, -1):  # a reply and something new after it
            place = self._turns.get((tools_digest, chain[n - 1]))
            if place is None:
                continue
            extended = self._bundle.renderer.bridge_to_next_turn(
                self.trajectory.prompt_ids(place),
                self.trajectory.completion_ids(place),
                list(messages_named[n:]),
                tools=tools,
            )
            if extended is not None:
                return Prompt(list(extended.token_ids), messages, tools_digest, chain, "branched")
            break
        ids = self._bundle.render(messages_named, tools)
        return Prompt(ids, messages, tools_digest, chain, self._why_rendered(messages, chain, tools_digest))

    def record(self, prompt: Prompt, completion: Completion, reply: Message) -> str | None:
        """Adds an answered call; the reason if it opened a new segment. `reply` is the message as returned."""
        place = self.trajectory.add(
            prompt.ids,
            completion.token_ids,
            completion.logprobs,
            finish_reason=completion.finish_reason,
            weight_versions=completion.weight_versions,
            cached_tokens=completion.cached_tokens,
            seconds=completion.seconds,
            messages=[*prompt.messages, reply],
            opened_by=prompt.opened_by,
        )
        (end,) = _chain([reply], prompt.chain[-1])
        self._turns[prompt.tools_digest, end] = place
        self._replies.add(end)
        self._seen.update(prompt.chain)
        return prompt.opened_by if place.opened else None

    def _why_rendered(self, messages: Sequence[Message], chain: list[_Digest], tools_digest: _Digest) -> str:
        if not self._seen:
            return "first_call"
        ends = [digest for digest in chain[:-1] if digest in self._replies]
        if ends:
            return "rerendered" if (tools_digest, ends[-1]) in self._turns else "tools_changed"
        if chain[-1] in self._seen:
            return "branched"  # the same question again
        # The common part is more than a system message: somebody edited or dropped what came after.
        spoken = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages) - 1)
        return "history_rewritten" if chain[spoken] in self._seen else "new_conversation"


def _chain(messages: Sequence[Message], digest: _Digest = b"") -> list[_Digest]:
    """For each message the digest of the conversation up to it."""
    chain = []
    for message in messages:
        digest = _digest(digest, _compared(message))
        chain.append(digest)
    return chain


def _digest(before: _Digest, value: object) -> _Digest:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()


def _compared(message: Message) -> list[object]:
    calls = [
        [call.get("id"), call["function"]["name"], _arguments(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]
    return [message["role"], message.get("content") or "", message.get("name"), message.get("tool_call_id"), calls]


def _arguments(text: str) -> object:
    try:
        return [json.loads(text)]
    except (ValueError, RecursionError):
        return text


def _with_tool_names(messages: Sequence[Message]) -> list[Message]:
    names = {
        call.get("id"): call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()
    }
    return [
        {"name": names[message.get("tool_call_id")], **message}
        if message["role"] == "tool" and message.get("tool_call_id") in names
        else message
        for message in messages
    ]
