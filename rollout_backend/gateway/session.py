"""One session: its conversations, the prompt of each next call, and the trajectory of what was sampled.

What must always hold:

- A request that continues a conversation gets a prompt that begins with the very tokens of that conversation, those
  sampled included, wherever the renderer can extend them. Only otherwise is the history rendered anew.
- What `record` returns, added in the same order to a session of its own, makes the same session: the same prompts,
  the same trajectory.
- An image stands in a message by the name of its bytes. The bytes are kept once, from the first answered call on
  that showed them.
- Messages are compared by what is rendered: text parts or a string, None or "", arguments of a tool call in another
  spacing or with the defaults of the tool's schema filled in, and fields that nobody renders make no difference.
  Reasoning is not compared, for most agents do not send it back: the tokens keep it, and whether it stays in the
  history is the renderer's choice.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_wrapper.contract import ImageSpan
from rollout_backend.gateway.engine import Completion
from rollout_backend.gateway.images import Image, Placed, image_names
from rollout_backend.gateway.renderer import RendererBundle
from rollout_backend.gateway.trajectory import Place, Trajectory
from rollout_backend.gateway.vision import collapsed

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None
_Digest = bytes
_Defaults = Mapping[str, Mapping[str, Any]]  # of each tool's arguments


@dataclass(frozen=True)
class Prompt:
    """What one call sends to the engine, and why a new segment opens if these ids extend none."""

    ids: list[int]
    messages: Sequence[Message]
    tools_digest: _Digest
    chain: list[_Digest]
    opened_by: str
    known: int = 0  # of the ids, how many are the conversation that this call goes on with
    defaults: _Defaults = field(default_factory=dict)
    images: Sequence[Placed] = ()  # in the order of their tokens


@dataclass(frozen=True)
class RecordedTurn:
    """What a call has added to a session, told by what was there before: as much as is new, however long the rest."""

    extends: int | None  # the segment whose tokens the prompt begins with
    given: Sequence[int]  # of the prompt, the tokens that follow those
    completion: Completion
    kept: int  # of the segment's messages so far, how many this conversation begins with
    messages: Sequence[Message]  # the others, the reply at their end
    opened_by: str
    tools_digest: _Digest
    end: _Digest  # of the conversation with the reply
    seen: Sequence[_Digest]  # beginnings of the request that no request had before
    spans: Sequence[ImageSpan] = ()  # of the images among the given tokens
    images: Sequence[Image] = ()  # that the session had not seen before

    @property
    def opened(self) -> str | None:
        """The reason, if the call opened a new segment."""
        return self.opened_by if self.extends is None else None


class Session:
    """`prepare` may run in another thread than `record` and `add`; only these change anything."""

    def __init__(self, bundle: RendererBundle) -> None:
        self.trajectory = Trajectory()
        self._bundle = bundle
        self._turns: dict[tuple[_Digest, _Digest], Place] = {}  # by tools and by messages with the reply
        self._replies: set[_Digest] = set()  # ends of recorded conversations, whatever their tools
        self._seen: set[_Digest] = set()  # every beginning of a request that was answered
        self._said: dict[int, Sequence[Message]] = {}  # the conversation of each segment
        self._images: dict[str, Image] = {}

    def unseen(self, images: Mapping[str, Image]) -> list[Image]:
        """Those that no answered call has shown."""
        return [image for name, image in images.items() if name not in self._images]

    @property
    def image_bytes(self) -> int:
        return sum(len(image.data) for image in list(self._images.values()))

    def images(self) -> dict[str, bytes]:
        """All images of the trajectory, each under its SHA-256."""
        return {name: image.data for name, image in self._images.items()}

    def prepare(self, messages: Sequence[Message], tools: Tools, images: Mapping[str, Image] | None = None) -> Prompt:
        """The prompt for `messages` (plain, as `openai_chat` makes them), which name no other images than `images`.
        Raises whatever the renderer raises."""
        tools_digest = _digest(b"tools", tools or [])
        defaults = _defaults(tools)
        chain = _chain(messages, defaults)
        messages_named = with_tool_names(messages) if self._bundle.needs_tool_names else messages
        for n in range(len(chain) - 1, 0, -1):  # a reply and something new after it
            place = self._turns.get((tools_digest, chain[n - 1]))
            if place is None:
                continue
            extended = self._bridged(place, messages_named[n:], tools, images or {})
            if extended is not None:
                ids, placed = extended
                return Prompt(ids, messages, tools_digest, chain, "branched", place.end, defaults, placed)
            break
        ids, placed = self._rendered(messages_named, tools, images or {})
        why = self._why_rendered(messages, chain, tools_digest)
        return Prompt(ids, messages, tools_digest, chain, why, defaults=defaults, images=placed)

    def record(self, prompt: Prompt, completion: Completion, reply: Message) -> RecordedTurn:
        """Adds an answered call. `reply` is the message as returned."""
        (end,) = _chain([reply], prompt.defaults, prompt.chain[-1])
        messages = [*prompt.messages, reply]
        spans = [placed.span for placed in prompt.images]
        place = self._add(prompt.ids, completion, messages, prompt.opened_by, spans)
        said = self._said.get(place.segment, ())
        same = itertools.takewhile(lambda both: both[0] == both[1], zip(said, messages, strict=False))
        kept = sum(1 for _ in same)
        recorded = RecordedTurn(
            extends=None if place.opened else place.segment,
            given=prompt.ids[place.before :],
            completion=completion,
            kept=kept,
            messages=messages[kept:],
            opened_by=prompt.opened_by,
            tools_digest=prompt.tools_digest,
            end=end,
            seen=[digest for digest in prompt.chain if digest not in self._seen],
            spans=[span for span in spans if span.start >= place.before],
            images=self.unseen({placed.image.sha256: placed.image for placed in prompt.images}),
        )
        self._note(place, messages, recorded)
        return recorded

    def add(self, turn: RecordedTurn) -> None:
        """Adds what a session with the same turns before it has recorded."""
        before = [] if turn.extends is None else self.trajectory.ids(turn.extends)
        spans = [] if turn.extends is None else self.trajectory.images(turn.extends)
        said = () if turn.extends is None else self._said[turn.extends][: turn.kept]
        messages = [*said, *turn.messages]
        place = self._add([*before, *turn.given], turn.completion, messages, turn.opened_by, [*spans, *turn.spans])
        self._note(place, messages, turn)

    def _rendered(
        self, messages: Sequence[Message], tools: Tools, images: Mapping[str, Image]
    ) -> tuple[list[int], tuple[Placed, ...]]:
        names = image_names(messages)
        if not names:
            return self._bundle.render(messages, tools), ()
        assert self._bundle.vision is not None, "images were let in for a model that has none"
        ids = self._bundle.renderer.render_places(messages, tools=tools)
        return self._bundle.vision.expanded(ids, [images[name] for name in names])

    def _bridged(
        self, place: Place, messages: Sequence[Message], tools: Tools, images: Mapping[str, Image]
    ) -> tuple[list[int], tuple[Placed, ...]] | None:
        """The conversation at `place` with these messages after it, where the renderer can extend it."""
        prompt, completion = self.trajectory.prompt_ids(place), self.trajectory.completion_ids(place)
        earlier = [
            Placed(span.start, span.end, self._images[span.sha256])
            for span in self.trajectory.images(place.segment, place.start)
        ]
        names = image_names(messages)
        extended = self._bundle.renderer.bridge_to_next_turn(
            collapsed(prompt, earlier), completion, list(messages), tools=tools, places=bool(earlier or names)
        )
        if extended is None:
            return None
        before = [*prompt, *completion]
        added = extended.token_ids[len(collapsed(before, earlier)) :]
        if not names:
            return [*before, *added], tuple(earlier)
        assert self._bundle.vision is not None, "images were let in for a model that has none"
        ids, placed = self._bundle.vision.expanded(added, [images[name] for name in names], len(before))
        return [*before, *ids], (*earlier, *placed)

    def _add(
        self,
        ids: Sequence[int],
        completion: Completion,
        messages: Sequence[Message],
        opened_by: str,
        spans: Sequence[ImageSpan],
    ) -> Place:
        return self.trajectory.add(
            ids,
            completion.token_ids,
            completion.logprobs,
            finish_reason=completion.finish_reason,
            weight_versions=completion.weight_versions,
            cached_tokens=completion.cached_tokens,
            seconds=completion.seconds,
            messages=messages,
            opened_by=opened_by,
            images=spans,
        )

    def _note(self, place: Place, messages: Sequence[Message], turn: RecordedTurn) -> None:
        self._said[place.segment] = messages
        self._images.update((image.sha256, image) for image in turn.images)
        self._turns[turn.tools_digest, turn.end] = place
        self._replies.add(turn.end)
        self._seen.update(turn.seen)

    def _why_rendered(self, messages: Sequence[Message], chain: list[_Digest], tools_digest: _Digest) -> str:
        if not self._seen:
            return "first_call"
        ends = [i for i, digest in enumerate(chain[:-1]) if digest in self._replies]
        if ends:
            if any(message["role"] == "assistant" for message in messages[ends[-1] + 1 :]):
                return "history_rewritten"  # a later reply is not as it was given
            return "rerendered" if (tools_digest, chain[ends[-1]]) in self._turns else "tools_changed"
        if chain[-1] in self._seen:
            return "branched"  # the same question again
        # The common part is more than a system message: somebody edited or dropped what came after.
        spoken = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages) - 1)
        return "history_rewritten" if chain[spoken] in self._seen else "new_conversation"


def _chain(messages: Sequence[Message], defaults: _Defaults, digest: _Digest = b"") -> list[_Digest]:
    """For each message the digest of the conversation up to it."""
    chain = []
    for message in messages:
        digest = _digest(digest, _compared(message, defaults))
        chain.append(digest)
    return chain


def _digest(before: _Digest, value: object) -> _Digest:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()


def _compared(message: Message, defaults: _Defaults) -> list[object]:
    calls = [
        [call.get("id"), function["name"], _arguments(function["arguments"], defaults.get(function["name"], {}))]
        for call in message.get("tool_calls") or ()
        if (function := call["function"])
    ]
    return [message["role"], message.get("content") or "", message.get("name"), message.get("tool_call_id"), calls]


def _arguments(text: str, defaults: Mapping[str, Any]) -> object:
    """What the call means: agents that check its arguments send it back with the defaults filled in."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, dict):
        return [{name: item for name, item in value.items() if not _is_default(item, name, defaults)}]
    return [value]


def _is_default(item: object, name: str, defaults: Mapping[str, Any]) -> bool:
    return name in defaults and type(item) is type(defaults[name]) and item == defaults[name]


def _defaults(tools: Tools) -> _Defaults:
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools or ():
        parameters = tool["function"].get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        found[tool["function"]["name"]] = {
            name: schema["default"]
            for name, schema in (properties.items() if isinstance(properties, Mapping) else ())
            if isinstance(schema, Mapping) and "default" in schema
        }
    return found


def with_tool_names(messages: Sequence[Message]) -> list[Message]:
    """The messages with the tool's name in each tool's result, as far as its call is among them."""
    names = {
        call.get("id"): call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()
    }
    return [
        {"name": names[message.get("tool_call_id")], **message}
        if message["role"] == "tool" and message.get("tool_call_id") in names
        else message
        for message in messages
    ]
