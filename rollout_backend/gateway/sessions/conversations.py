"""Keep the conversations of one session: build the prompt of each call, and record what the engine sampled.

Invariants:

- A request that continues a conversation gets a prompt that starts with the exact tokens of that conversation,
  including the sampled ones, if the renderer can extend them. Otherwise the history is rendered again.
- Replaying the return values of `record` in order into a new session reproduces the session: the same prompts and the
  same trajectory.
- A message refers to an image by the hash of its bytes. The session stores the bytes once, from the first answered
  call that showed them.
- Messages are compared as rendered. These differences are ignored: text parts or a string, None or "", whitespace at
  the ends of a reply, the spacing of a tool call's arguments, the order of their keys, how a number is written
  (JavaScript writes 1.0 as 1), defaults of the tool's schema filled in, tool call ids that the template does not
  render, reasoning repeated as the text beside a call, and fields that no template renders. Reasoning is not
  compared, because most agents do not send it back: the tokens keep it, and the renderer decides whether it stays in
  the history. Of equal replies, the latest with the repeated call ids or reasoning is continued.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from agent_wrapper.contract import ImageSpan, Segment
from rollout_backend.config import ExpertShape
from rollout_backend.core.images import Image, PlacedImage, collapse_images, image_names
from rollout_backend.dialects.base import to_json
from rollout_backend.rendering.segments import Completion, SegmentRecorder, TurnPosition

if TYPE_CHECKING:  # transformers takes seconds to import, and the trainer's process needs no renderer
    from rollout_backend.rendering.guarded_renderer import RendererBundle
    from rollout_backend.rendering.segments import IntArray

_CACHE_MIN_TOKENS, _CACHE_SHARE = 256, 0.5  # engines cache whole pages, but not the last page
_MAX_DEPTH = 200  # of a call's arguments, at which no encoder fails
_INT64, _EXACT_DIGITS = 2**63, 22
_KEPT = 4  # conversations kept, because an agent may alternate between several

Message = Mapping[str, Any]
Step = Callable[[bytes, Sequence[Message], int], bytes]
"""Function from the digest of the messages before an index to the digest that includes the message at that index. It
must not depend on later messages."""


class PrefixMemo:
    """Caches the digests of the latest conversations of one session. Their messages must not be changed.

    If a conversation was changed in the middle, it is digested again from the first changed message.

    Threads may share a memo: each call replaces its contents as a whole, and the last one wins.
    """

    def __init__(self) -> None:
        self._known: list[tuple[object, list[Message], list[bytes]]] = []  # latest last

    def chain(self, messages: Sequence[Message], step: Step, context: object = None) -> list[bytes]:
        """Return, for each message, the digest of the conversation up to it.

        `context` is whatever else `step` depends on; digests from another context are not reused.
        """
        known, given, shared, extended = self._known, list(messages), 0, None
        for i, (its_context, its_messages, _) in enumerate(known):
            if its_context == context and (same := common_prefix(its_messages, given)) > shared:
                shared, extended = same, i
        chain = [] if extended is None else known[extended][2][:shared]
        for i in range(shared, len(given)):
            chain.append(step(chain[-1] if chain else b"", given, i))
        if extended is not None and shared == len(known[extended][1]):
            known = [*known[:extended], *known[extended + 1 :]]
        self._known = [*known[1 - _KEPT :], (context, given, chain)]
        return chain


def common_prefix(some: Sequence[Message], other: Sequence[Message]) -> int:
    """Return the number of leading messages that both lists have in common."""
    n = min(len(some), len(other))
    if some[:n] == other[:n]:  # fast, because identical objects compare equal at once
        return n
    return next((i for i in range(n) if some[i] != other[i]), n)


Tools = Sequence[Mapping[str, Any]] | None
_Digest = bytes
_Defaults = Mapping[str, Mapping[str, Any]]  # defaults of each tool's arguments
_Digests = tuple[_Digest, _Defaults, list[_Digest]]


@dataclass(frozen=True)
class Prompt:
    """The prompt of one call. If `ids` extend no segment, `split_reason` says why a new one opens."""

    ids: IntArray
    messages: Sequence[Message]
    tools_digest: _Digest
    chain: list[_Digest]
    split_reason: str
    known: int = 0  # number of ids that belong to the conversation that this call continues
    continues: int | None = None  # the segment of that conversation
    defaults: _Defaults = field(default_factory=dict)
    images: Sequence[PlacedImage] = ()  # in the order of their tokens


def is_cache_break(known: int, cached: int) -> bool:
    """Return whether an engine's prefix cache lost the `known` tokens of a conversation and has only `cached`.

    A session stays on one engine. If a call that continues it finds far fewer tokens, it reached another engine, or
    the cache was evicted or was flushed for new weights.
    """
    return known >= _CACHE_MIN_TOKENS and cached < known * _CACHE_SHARE


@dataclass(frozen=True)
class RecordedTurn:
    """The delta that a call adds to a session. Its size does not grow with the history."""

    extends: int | None  # the segment that the prompt starts with
    given: Sequence[int]  # tokens of the prompt after that segment
    completion: Completion
    kept: int  # how many messages of that segment this conversation shares
    messages: Sequence[Message]  # the later messages; the last one is the reply
    split_reason: str
    tools_digest: _Digest
    end: _Digest  # digest of the conversation, including the reply
    seen: Sequence[_Digest]  # prefixes of the request that are new in the session
    spans: Sequence[ImageSpan] = ()  # placement of the images within `given`
    images: Sequence[Image] = ()  # new in the session

    @property
    def opened(self) -> str | None:
        """Why the call opened a new segment; None if it extended one."""
        return self.split_reason if self.extends is None else None


class RecordedReply(NamedTuple):
    """A recorded reply: its tokens, and the digest of the conversation up to it."""

    place: TurnPosition
    end: _Digest


class Conversations:
    """The conversations of one session.

    `prepare` and `extend` do not modify shared state, so they may run in another thread.
    """

    def __init__(self, bundle: RendererBundle, experts: ExpertShape | None = None) -> None:
        """`experts` is the shape of the routing to record, or None."""
        self.recorder = SegmentRecorder(experts)
        self._bundle = bundle
        self._turns: dict[tuple[_Digest, _Digest, object], TurnPosition] = {}  # by tools, conversation and `_marks`
        self._replies: set[_Digest] = set()  # recorded conversations, regardless of tools
        self._seen: set[_Digest] = set()  # every prefix of an answered request
        self._said: dict[int, Sequence[Message]] = {}  # the conversation of each segment
        self._images: dict[str, Image] = {}
        self._prepared = PrefixMemo()
        self._offered: tuple[bytes, _Digest, _Defaults] = b"", b"", {}  # the tools of the latest call
        self._latest: tuple[Sequence[Message], Tools, _Digests] = (), None, (b"", {}, [])  # each call asks twice

    def unseen(self, images: Mapping[str, Image]) -> list[Image]:
        """Return the images that no answered call contained."""
        return [image for name, image in images.items() if name not in self._images]

    @property
    def image_bytes(self) -> int:
        return sum(len(image.data) for image in list(self._images.values()))

    def images(self, segments: Iterable[Segment]) -> dict[str, bytes]:
        """Return the bytes of the segments' images, by SHA-256."""
        shown = {span.sha256 for segment in segments for span in segment.images}
        return {name: image.data for name, image in self._images.items() if name in shown}

    def recorded(self, turn: RecordedTurn) -> RecordedReply:
        """Return the position of the latest recorded turn."""
        return RecordedReply(self._turns[turn.tools_digest, turn.end, None], turn.end)

    def drop(self, replies: Iterable[RecordedReply]) -> list[RecordedReply]:
        """Remove the replies that no later call continues, and return them."""
        latest_first = sorted(replies, key=lambda reply: reply.place, reverse=True)
        return [reply for reply in latest_first if reply.end not in self._seen and self.recorder.drop(reply.place)]

    def leave_out(self, replies: Iterable[RecordedReply]) -> None:
        """Exclude replies from training. Later calls may still continue them."""
        for reply in sorted(replies, key=lambda reply: reply.place, reverse=True):
            self.recorder.mask(reply.place)

    def question(self, messages: Sequence[Message], tools: Tools) -> bytes:
        """Return a digest of a call's messages and tools, which identifies a repeated question."""
        tools_digest, _, chain = self._digests(messages, tools)
        return b"".join([tools_digest, *chain[-1:]])

    def prepare(self, messages: Sequence[Message], tools: Tools, images: Mapping[str, Image] | None = None) -> Prompt:
        """Return the prompt for `messages`, which refer only to `images`. Propagates the renderer's exceptions."""
        extended = self.extend(messages, tools, images)
        if extended is not None:
            return extended
        named = _with_tool_names(messages) if self._bundle.needs_tool_names else messages
        ids, placed = self._rendered(named, tools, images or {})
        return self.prompt_of(ids, messages, tools, placed)

    def prompt_of(
        self, ids: IntArray, messages: Sequence[Message], tools: Tools = None, images: Sequence[PlacedImage] = ()
    ) -> Prompt:
        """Return the prompt for these tokens, which extend no recorded conversation."""
        tools_digest, defaults, chain = self._digests(messages, tools)
        why = self._split_reason(messages, chain, tools_digest)
        return Prompt(ids, messages, tools_digest, chain, why, defaults=defaults, images=images)

    def extend(
        self,
        messages: Sequence[Message],
        tools: Tools,
        images: Mapping[str, Image] | None = None,
        max_chars: int | None = None,
    ) -> Prompt | None:
        """Return the prompt for `messages` if they extend a recorded conversation by at most `max_chars` of text.

        Propagates the renderer's exceptions.
        """
        tools_digest, defaults, chain = self._digests(messages, tools)
        for n in range(len(chain) - 1, 0, -1):  # look for a recorded reply followed by new messages
            end = tools_digest, chain[n - 1]
            if (*end, None) not in self._turns:
                continue
            place = next(self._turns[key] for mark in _marks(messages[n - 1]) if (key := (*end, mark)) in self._turns)
            fresh = _with_tool_names(messages, n) if self._bundle.needs_tool_names else messages[n:]
            if self._bundle.sorts_results:
                fresh = _in_call_order(messages[n - 1], fresh)
            if max_chars is not None and sum(len(message.get("content") or "") for message in fresh) > max_chars:
                return None
            extended = self._bridged(place, fresh, tools, images or {})
            if extended is None:
                return None
            ids, placed = extended
            known = place.end, place.segment
            return Prompt(ids, messages, tools_digest, chain, "branched", *known, defaults=defaults, images=placed)
        return None

    def record(self, prompt: Prompt, completion: Completion, reply: Message) -> RecordedTurn:
        """Record an answered call. `reply` is the message that the agent gets."""
        end = _digest(prompt.chain[-1], _compared(reply, prompt.defaults, self._bundle.renders_call_ids))
        messages = [*prompt.messages, reply]
        spans = [placed.span for placed in prompt.images]
        place = self.recorder.add(
            prompt.ids,
            completion,
            messages=messages,
            split_reason=prompt.split_reason,
            images=spans,
            continues=prompt.continues,
        )
        if completion.experts is not None:
            completion = replace(completion, experts=self.recorder.experts(place))
        said = self._said.get(place.segment, [])
        kept = common_prefix(said, messages)
        recorded = RecordedTurn(
            extends=None if place.opened else place.segment,
            given=prompt.ids[place.before :],
            completion=completion,
            kept=kept,
            messages=messages[kept:],
            split_reason=prompt.split_reason,
            tools_digest=prompt.tools_digest,
            end=end,
            seen=[digest for digest in prompt.chain if digest not in self._seen],
            spans=[span for span in spans if span.start >= place.before],
            images=self.unseen({placed.image.sha256: placed.image for placed in prompt.images}),
        )
        self._index(place, messages, recorded)
        return recorded

    def add(self, turn: RecordedTurn) -> None:
        """Add a turn that another session recorded after the same turns."""
        ids = array("i") if turn.extends is None else self.recorder.ids(turn.extends)
        ids.extend(turn.given)
        spans = [] if turn.extends is None else self.recorder.images(turn.extends)
        said = () if turn.extends is None else self._said[turn.extends][: turn.kept]
        messages = [*said, *turn.messages]
        place = self.recorder.add(
            ids, turn.completion, messages=messages, split_reason=turn.split_reason, images=[*spans, *turn.spans]
        )
        self._index(place, messages, turn)

    def _rendered(
        self, messages: Sequence[Message], tools: Tools, images: Mapping[str, Image]
    ) -> tuple[IntArray, tuple[PlacedImage, ...]]:
        names = image_names(messages) if images else []
        if not names:
            return array("i", self._bundle.render(messages, tools)), ()
        assert self._bundle.vision is not None, "images were accepted for a model that takes none"
        ids = self._bundle.renderer.render_places(messages, tools=tools)
        expanded, placed = self._bundle.vision.expand(ids, [images[name] for name in names])
        return array("i", expanded), placed

    def _bridged(
        self, place: TurnPosition, messages: Sequence[Message], tools: Tools, images: Mapping[str, Image]
    ) -> tuple[IntArray, tuple[PlacedImage, ...]] | None:
        """Return the conversation at `place` extended by these messages; None if the renderer cannot extend it."""
        prompt, completion = self.recorder.prompt_ids(place), self.recorder.completion_ids(place)
        before = prompt + completion
        earlier = [
            PlacedImage(span.start, span.end, self._images[span.sha256])
            for span in self.recorder.images(place.segment, place.start)
        ]
        names = image_names(messages) if images else []
        added = self._bundle.renderer.continuation(
            collapse_images(prompt, earlier) if earlier else prompt,
            completion,
            messages,
            tools=tools,
            places=bool(earlier or names),
        )
        if added is None:
            return None
        placed: tuple[PlacedImage, ...] = ()
        if names:
            assert self._bundle.vision is not None, "images were accepted for a model that takes none"
            added, placed = self._bundle.vision.expand(added, [images[name] for name in names], len(before))
        before.extend(array("i", added))
        return before, (*earlier, *placed)

    def _index(self, place: TurnPosition, messages: Sequence[Message], turn: RecordedTurn) -> None:
        self._said[place.segment] = messages
        if place.opened and place.segment:  # the segment before it now shares its messages with others
            self._said[place.segment - 1] = self.recorder.messages(place.segment - 1)
        self._images.update((image.sha256, image) for image in turn.images)
        self._turns.update(((turn.tools_digest, turn.end, mark), place) for mark in _marks(messages[-1]))
        self._replies.add(turn.end)
        self._seen.update(turn.seen)

    def _digests(self, messages: Sequence[Message], tools: Tools) -> _Digests:
        """Return the digest of the tools, the defaults of their arguments, and for each message the digest of the
        conversation up to it."""
        latest_messages, latest_tools, digests = self._latest
        if messages is latest_messages and tools is latest_tools:
            return digests
        text, digest, defaults = self._offered
        if text != (text := to_json(tools)):
            digest, defaults = _digest(b"tools", tools or []), _defaults(tools)
            self._offered = text, digest, defaults
        with_ids = self._bundle.renders_call_ids
        named = messages if with_ids else _with_tool_names(messages)  # without ids, the tool identifies a result
        step = partial(_compared_digest, defaults=defaults, with_ids=with_ids)
        digests = digest, defaults, self._prepared.chain(named, step, digest)
        self._latest = messages, tools, digests
        return digests

    def _split_reason(self, messages: Sequence[Message], chain: list[_Digest], tools_digest: _Digest) -> str:
        if not self._seen:
            return "first_call"
        ends = [i for i, digest in enumerate(chain[:-1]) if digest in self._replies]
        if ends:
            if any(message["role"] == "assistant" for message in messages[ends[-1] + 1 :]):
                return "history_rewritten"  # the agent changed a later reply
            return "rerendered" if (tools_digest, chain[ends[-1]], None) in self._turns else "tools_changed"
        if chain[-1] in self._seen:
            return "branched"  # the same request again
        # More than a system message is shared, so the agent edited or dropped later messages.
        spoken = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages) - 1)
        return "history_rewritten" if chain[spoken] in self._seen else "new_conversation"


def _marks(reply: Message) -> list[object]:
    """Return the marks by which equal replies are told apart, best first: ids of calls, reasoning, None for any."""
    ids = tuple(call.get("id") for call in reply.get("tool_calls") or ())
    return [*filter(None, (ids, _reasoning(reply))), None]


def _reasoning(message: Message) -> str:
    return (message.get("reasoning_content") or "").strip()


def _in_call_order(reply: Message, messages: Sequence[Message]) -> list[Message]:
    """Return the messages after a reply, with the results of its calls in the order of the calls."""
    order = {call.get("id"): i for i, call in enumerate(reply.get("tool_calls") or ())}
    results = (message for message in messages if message["role"] == "tool")
    in_order = iter(sorted(results, key=lambda result: order.get(result.get("tool_call_id"), 0)))
    return [next(in_order) if message["role"] == "tool" else message for message in messages]


def _with_tool_names(messages: Sequence[Message], start: int = 0) -> list[Message]:
    """Return the messages from `start` on, with the called tool's name added to each tool result.

    The name comes from the latest earlier call with the result's id. A result without such a call is not changed.
    """
    names: dict[str | None, str] = {}  # by the call's id
    named = list(messages)
    for i, message in enumerate(messages):
        if message["role"] == "tool":
            if "name" not in message and (name := names.get(message.get("tool_call_id"))) is not None:
                named[i] = {"name": name, **message}
        else:
            for call in message.get("tool_calls") or ():
                names[call.get("id")] = call["function"]["name"]
    return named[start:]


def _compared_digest(
    before: _Digest, messages: Sequence[Message], i: int, *, defaults: _Defaults, with_ids: bool
) -> _Digest:
    message = messages[i]
    reasoning = _reasoning(message)
    if reasoning and message.get("tool_calls") and message.get("content") == reasoning:
        message = {**message, "content": ""}  # Copilot repeats it as the text of a reply that only calls tools
    return _digest(before, _compared(message, defaults, with_ids))


def _digest(before: _Digest, value: object) -> _Digest:
    return hashlib.blake2b(before + to_json(value, sort_keys=True), digest_size=16).digest()


def _compared(message: Message, defaults: _Defaults, with_ids: bool) -> list[object]:
    calls = [
        [
            call.get("id") if with_ids else None,
            function["name"],
            _arguments(function["arguments"], defaults.get(function["name"], {})),
        ]
        for call in message.get("tool_calls") or ()
        if (function := call["function"])
    ]
    answers = message.get("tool_call_id") if with_ids else None
    content = message.get("content") or ""
    if message["role"] == "assistant" and isinstance(content, str):
        content = content.strip()
    return [message["role"], content, message.get("name"), answers, calls]


def _arguments(text: str, defaults: Mapping[str, Any]) -> object:
    """Parse arguments and remove defaults: agents that validate a call send it back with them filled in."""
    try:
        value = _ARGUMENTS.decode(text)
        if text.count("{") + text.count("[") > _MAX_DEPTH:
            orjson.dumps(value)  # what it cannot encode may exceed the interpreter's stack in the digest
    except (TypeError, ValueError, RecursionError):
        return text
    if isinstance(value, dict):
        return [
            {
                name: item
                for name, item in value.items()
                if name not in defaults or (type(item), item) != (type(defaults[name]), defaults[name])
            }
        ]
    return [value]


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number of JSON")
    return int(number) if number.is_integer() and -_INT64 <= number < _INT64 else number


def _integer(text: str) -> float | str:
    """Return an integer in a form that is cheap to digest: orjson takes 64 bits, and `json` is many times slower.

    JavaScript writes floats below 1e21 without an exponent.
    """
    if len(text) > _EXACT_DIGITS:
        return f"int:{text}"
    number = int(text)
    if -_INT64 <= number < _INT64:
        return number
    return float(number) if int(float(number)) == number else f"int:{text}"


_ARGUMENTS = json.JSONDecoder(parse_float=_number, parse_int=_integer, parse_constant=_number)


def _defaults(tools: Tools) -> _Defaults:
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools or ():
        parameters = tool["function"].get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        found[tool["function"]["name"]] = {
            name: _ARGUMENTS.decode(to_json(schema["default"]).decode())
            for name, schema in (properties.items() if isinstance(properties, Mapping) else ())
            if isinstance(schema, Mapping) and "default" in schema
        }
    return found
