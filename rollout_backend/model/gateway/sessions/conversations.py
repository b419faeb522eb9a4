"""Keep the conversations of one session: build the prompt of each call, and record what the engine sampled.

Invariants:

- A request that continues a conversation gets a prompt that starts with the exact tokens of that conversation,
  including the sampled ones, if the renderer can extend them. Otherwise the history is rendered again.
- Replaying the return values of `record` in order into a new session reproduces the session: the same prompts and the
  same trajectory.
- A message refers to an image by the hash of its bytes. The session stores the bytes once, from the first answered
  call that showed them.
- An agent may send a reply back without its end, because it stopped reading or dropped the end. The call then
  continues the reply after the last token that came back, and the later tokens are removed from the row. If another
  call continues them, they are trained in a separate row.
- The reply of a stream that its client closed is in no row until a call continues it.
- Among equal replies, a call continues the latest one whose call ids or reasoning it repeats.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from agent_wrapper.contract import ImageSpan, Segment
from rollout_backend.base.giving_way import let_others_go_first
from rollout_backend.config import ExpertShape
from rollout_backend.model.dialects.base import to_json
from rollout_backend.model.gateway.sessions.comparison import (
    Defaults,
    Message,
    Tools,
    compared,
    count_tokens_read,
    defaults_of,
    reasoning_of,
)
from rollout_backend.model.images import Image, PlacedImage, collapse_images, image_names
from rollout_backend.model.model_call import ModelCall
from rollout_backend.model.rendering.reply import PROBE, read_tokens
from rollout_backend.model.rendering.segments import Completion, SegmentRecorder, TurnPosition

# transformers takes seconds to import, and the trainer's process needs no renderer.
if TYPE_CHECKING:
    from rollout_backend.model.rendering.guarded_renderer import RendererBundle
    from rollout_backend.model.rendering.segments import IntArray

# Engines cache whole pages, but not the last page.
_CACHE_MIN_TOKENS, _CACHE_SHARE = 256, 0.5
# Number of conversations kept, because an agent may alternate between several.
_KEPT = 4
# Limits the replies to one question that are compared with what came back, and the closed streams kept.
_EQUALS = 64
_COMPARED_TOKENS = 500_000
# Replaces the digest of the tools if the agent wrote the prompt as text or tokens.
_TEXT = b"text"

Step = Callable[[bytes, Sequence[Message], int], bytes]
"""Function from the digest of the messages before an index to the digest that includes the message at that index. It
must not depend on later messages."""


class PrefixMemo:
    """Caches the digests of the latest conversations of one session. Their messages must not be changed.

    If a conversation was changed in the middle, it is digested again from the first changed message.

    Threads may share a memo: each call replaces its contents as a whole, and the last one wins.
    """

    def __init__(self) -> None:
        self._known: list[tuple[object, list[Message], list[bytes]]] = []

    def chain(self, messages: Sequence[Message], step: Step, context: object = None) -> list[bytes]:
        """Return, for each message, the digest of the conversation up to it.

        `context` has everything else that `step` depends on; digests from another context are not reused.
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
    # This is fast, because identical objects compare equal at once.
    if some[:n] == other[:n]:
        return n
    return next((i for i in range(n) if some[i] != other[i]), n)


_Digest = bytes
_Digests = tuple[_Digest, Defaults, list[_Digest]]


class Continued(NamedTuple):
    """The part of a reply that a call continues: the reply's number in its session, and the message sent back."""

    reply: int
    tokens: int
    message: Message
    end: _Digest
    """Digest of the conversation up to the reply."""


@dataclass(frozen=True)
class Prompt:
    """The prompt of one call. If `ids` extend no segment, `split_reason` says why a new one opens."""

    ids: IntArray
    messages: Sequence[Message]
    tools_digest: _Digest
    chain: list[_Digest]
    split_reason: str
    # How many ids belong to the conversation that this call continues, and the segment of that conversation.
    known: int = 0
    continues: int | None = None
    continued: Continued | None = None
    defaults: Defaults = field(default_factory=dict)
    images: Sequence[PlacedImage] = ()


def is_cache_break(known: int, cached: int) -> bool:
    """Return whether an engine's prefix cache lost the `known` tokens of a conversation and has only `cached`.

    A session stays on one engine. If a call that continues it finds far fewer tokens, it reached another engine, or
    the cache was evicted or was flushed for new weights.
    """
    return known >= _CACHE_MIN_TOKENS and cached < known * _CACHE_SHARE


@dataclass(frozen=True)
class _Reply:
    """A sampled reply. It has a `place` in a segment, or a `prompt` instead if its client closed the stream."""

    ids: IntArray
    place: TurnPosition | None = None
    prompt: Prompt | None = None
    rest: Completion | None = None
    """The last tokens, which no segment holds."""
    asked: int = 0
    """Number of messages before the reply, or of characters if the prompt was text."""
    end: _Digest = b""
    left_out: bool = False


@dataclass(frozen=True)
class RecordedTurn:
    """The delta that a call adds to a session. Its size does not grow with the history."""

    # The segment that the prompt starts with, and the tokens of the prompt after it.
    extends: int | None
    given: Sequence[int]
    completion: Completion
    # How many messages of that segment this conversation shares, and the later ones, with the reply if there is one.
    kept: int
    messages: Sequence[Message]
    split_reason: str
    tools_digest: _Digest
    # Digests of the conversation before the reply, and including it.
    asked: _Digest
    end: _Digest = b""
    seen: Sequence[_Digest] = ()
    """Prefixes of the request that are new in the session."""
    # Placement of the images within `given`, and the images that are new in the session.
    spans: Sequence[ImageSpan] = ()
    images: Sequence[Image] = ()
    continued: Continued | None = None
    """None if this turn changes nothing about the reply that it continues."""
    is_closed: bool = False
    """True if the client closed the stream, so `messages` has no reply."""
    left_out: bool = False

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

    `prepare` and `extend` modify only memos, so they may run in another thread.
    """

    def __init__(self, bundle: RendererBundle, experts: ExpertShape | None = None) -> None:
        """`experts` is the shape of the routing to record, or None."""
        self.recorder = SegmentRecorder(experts)
        self._bundle = bundle
        self._sampled: list[_Reply] = []
        # The number of a reply and how many of its tokens, by tools, conversation and `_marks`.
        self._turns: dict[tuple[_Digest, _Digest, object], tuple[int, int]] = {}
        # The numbers of replies, by tools and conversation.
        self._answers: dict[tuple[_Digest, _Digest], list[int]] = {}
        self._texts: list[int] = []
        # Messages that repeat none of the replies to their question, by digest. Each call shows them again.
        self._rewritten: set[_Digest] = set()
        # Replies whose client closed the stream and that no call continues.
        self._closed: list[int] = []
        self._left_out: list[TurnPosition] = []
        self.forgotten = 0
        # Recorded conversations, regardless of tools, and every prefix of an answered request.
        self._replies: set[_Digest] = set()
        self._seen: set[_Digest] = set()
        self._said: dict[int, Sequence[Message]] = {}
        self._images: dict[str, Image] = {}
        self._prepared = PrefixMemo()
        # The tools of the latest call, and its digests, for which each call asks twice.
        self._offered: tuple[bytes, _Digest, Defaults] = b"", b"", {}
        self._latest: tuple[Sequence[Message], Tools, _Digests] = (), None, (b"", {}, [])

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

    @property
    def closed(self) -> int:
        """Return the number of replies whose client closed the stream and that no call continues."""
        return len(self._closed) + self.forgotten

    def recorded(self, turn: RecordedTurn) -> RecordedReply:
        """Return the position of the latest recorded turn."""
        place = self._sampled[-1].place
        assert place is not None
        return RecordedReply(place, turn.end)

    def drop(self, replies: Iterable[RecordedReply]) -> list[RecordedReply]:
        """Remove the replies that no later call continues, and return them."""
        latest_first = sorted(replies, key=lambda reply: reply.place, reverse=True)
        return [reply for reply in latest_first if reply.end not in self._seen and self.recorder.drop(reply.place)]

    def leave_out(self) -> None:
        """Exclude the replies that are left out from training."""
        for place in sorted(self._left_out, reverse=True):
            self.recorder.mask(place)

    def question(self, messages: Sequence[Message], tools: Tools) -> bytes:
        """Return a digest of a call's messages and tools, which identifies a repeated question."""
        tools_digest, _, chain = self._digests(messages, tools)
        return b"".join([tools_digest, *chain[-1:]])

    def answered_question(self, messages: Sequence[Message], tools: Tools) -> tuple[bytes, int]:
        """Return the question before the latest reply in these messages, and the index of that reply; 0 if none."""
        n = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)
        tools_digest, _, chain = self._digests(messages, tools)
        return tools_digest + chain[n - 1], n

    def prepare(self, messages: Sequence[Message], tools: Tools, images: Mapping[str, Image] | None = None) -> Prompt:
        """Return the prompt for `messages`, which refer only to `images`. Propagates the renderer's exceptions."""
        n, part = self._find(messages, tools) or (0, None)
        if part is not None and (extended := self._extended(n, part, messages, tools, images or {})) is not None:
            return extended
        named = _with_tool_names(messages) if self._bundle.needs_tool_names else messages
        ids, placed = self._rendered(named, tools, images or {})
        tools_digest, defaults, chain = self._digests(messages, tools)
        why = self._split_reason(messages, chain, tools_digest, part)
        return Prompt(ids, messages, tools_digest, chain, why, continued=part, defaults=defaults, images=placed)

    def extend(self, messages: Sequence[Message], tools: Tools, max_chars: int) -> Prompt | None:
        """Return the prompt for `messages` if they extend a recorded conversation by at most `max_chars` of text.

        Propagates the renderer's exceptions.
        """
        n, part = self._find(messages, tools, brief=True) or (0, None)
        if part is None or sum(len(message.get("content") or "") for message in messages[n:]) > max_chars:
            return None
        return self._extended(n, part, messages, tools, {})

    def prepare_text(self, prompt: str | tuple[int, ...], silent: frozenset[int]) -> Prompt:
        """Return a prompt that the agent wrote as text or tokens. It may begin with an earlier prompt and its reply.

        The tokens in `silent` are left out of the text of a reply.
        """
        tokenizer = self._bundle.tokenizer
        messages = [{"role": "user", "content": prompt if isinstance(prompt, str) else self._bundle.decode(prompt)}]
        _, defaults, chain = self._digests(messages, None)
        why = self._split_reason(messages, chain, _TEXT)
        found = [shared for each in self._texts[-_EQUALS:] if (shared := self._shared(prompt, each, silent))[1]]
        if not found:
            ids = array("i", tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
            return Prompt(ids, messages, _TEXT, chain, why, defaults=defaults)
        length, tokens, number, more = max(found)
        reply = self._sampled[number]
        assert reply.place is not None
        known, segment = reply.place.start + tokens, reply.place.segment
        ids = self.recorder.prompt_ids(reply.place) + reply.ids[:tokens]
        ids.extend(tokenizer.encode(more, add_special_tokens=False) if isinstance(prompt, str) else prompt[length:])
        said = {"role": "assistant", "content": self._bundle.decode(reply.ids[:tokens])}
        part = Continued(number, tokens, said, reply.end)
        return Prompt(ids, messages, _TEXT, chain, why, known, segment, part, defaults)

    def _shared(
        self, prompt: str | tuple[int, ...], number: int, silent: frozenset[int]
    ) -> tuple[int, int, int, str]:
        """Return how much of a prompt repeats an earlier prompt and its reply: the length of that part, how many of
        the reply's tokens it has, the reply's number, and the text after it."""
        reply = self._sampled[number]
        assert reply.place is not None
        if isinstance(prompt, tuple):
            before = self.recorder.prompt_ids(reply.place) + reply.ids
            length = min(len(before), len(prompt))
            differ = np.flatnonzero(np.asarray(before[:length]) != np.asarray(prompt[:length]))
            same = int(differ[0]) if len(differ) else length
            return same, max(same - reply.place.start, 0), number, ""
        asked = self.recorder.messages(reply.place.segment)[0]["content"][: reply.asked]
        if not prompt.startswith(asked):
            return 0, 0, number, ""
        text, at, found = prompt[len(asked) :].encode(errors="surrogatepass"), 0, (0, 0)
        for i, token in enumerate(reply.ids):
            spelled = self._bundle.token_bytes.get(token, b"")
            if token in silent or not text.startswith(spelled, at):
                break
            at += len(spelled)
            # A token that ends within a character does not count.
            if text[at : at + 1] < b"\x80" or text[at : at + 1] >= b"\xc0":
                found = at, i + 1
        at, tokens = found
        return len(asked) + at, tokens, number, text[at:].decode(errors="surrogatepass")

    def record(
        self, prompt: Prompt, completion: Completion, reply: Message, *, left_out: bool = False
    ) -> RecordedTurn:
        """Record an answered call. `reply` is the message that the agent gets."""
        continued = self._continue(prompt)
        end = _digest(prompt.chain[-1], compared(reply, prompt.defaults, with_ids=self._bundle.renders_call_ids))
        messages = [*prompt.messages, reply]
        place = self.recorder.add(
            prompt.ids,
            completion,
            messages=messages,
            split_reason=prompt.split_reason,
            images=[placed.span for placed in prompt.images],
            continues=prompt.continues,
        )
        if completion.experts is not None:
            completion = replace(completion, experts=self.recorder.experts(place))
        turn = replace(
            self._turn(prompt, completion, messages, None if place.opened else place.segment, place.before),
            end=end,
            seen=[digest for digest in prompt.chain if digest not in self._seen],
            continued=continued,
            left_out=left_out,
        )
        self._index(place, messages, turn)
        return turn

    def keep(self, prompt: Prompt, completion: Completion, *, left_out: bool = False) -> RecordedTurn:
        """Keep what was sampled until the client closed the stream: a later call may continue it."""
        continued = self._continue(prompt)
        spans = [placed.span for placed in prompt.images]
        extends = self.recorder.extended_by(prompt.ids, spans)
        before = 0 if extends is None else len(self.recorder.ids(extends))
        turn = replace(
            self._turn(prompt, completion, prompt.messages, extends, before),
            continued=continued,
            is_closed=True,
            left_out=left_out,
        )
        self._add_closed(turn, prompt.ids, prompt.messages, spans)
        return turn

    def _turn(
        self, prompt: Prompt, completion: Completion, messages: Sequence[Message], extends: int | None, before: int
    ) -> RecordedTurn:
        """Return what a call adds to the segment that it extends, whose `before` tokens begin its prompt."""
        kept = 0 if extends is None else common_prefix(self._said[extends], messages)
        return RecordedTurn(
            extends=extends,
            given=prompt.ids[before:],
            completion=completion,
            kept=kept,
            messages=messages[kept:],
            split_reason=prompt.split_reason,
            tools_digest=prompt.tools_digest,
            asked=prompt.chain[-1],
            spans=[placed.span for placed in prompt.images if placed.start >= before],
            images=self.unseen({placed.image.sha256: placed.image for placed in prompt.images}),
        )

    def add(self, turn: RecordedTurn) -> None:
        """Add a turn that another session recorded or kept after the same turns."""
        if turn.continued is not None:
            self._apply(turn.continued, turn.tools_digest)
        ids = array("i") if turn.extends is None else self.recorder.ids(turn.extends)
        ids.extend(turn.given)
        spans = [] if turn.extends is None else self.recorder.images(turn.extends)
        said = () if turn.extends is None else self._said[turn.extends][: turn.kept]
        messages = [*said, *turn.messages]
        if turn.is_closed:
            self._add_closed(turn, ids, messages, [*spans, *turn.spans])
            return
        place = self.recorder.add(
            ids, turn.completion, messages=messages, split_reason=turn.split_reason, images=[*spans, *turn.spans]
        )
        self._index(place, messages, turn)

    def _add_closed(
        self, turn: RecordedTurn, ids: IntArray, messages: Sequence[Message], spans: Sequence[ImageSpan]
    ) -> None:
        self._images.update((image.sha256, image) for image in turn.images)
        prompt = Prompt(
            ids,
            messages,
            turn.tools_digest,
            [turn.asked],
            turn.split_reason,
            known=len(ids) - len(turn.given),
            continues=turn.extends,
            images=[PlacedImage(span.start, span.end, self._images[span.sha256]) for span in spans],
        )
        number = len(self._sampled)
        sampled = array("i", turn.completion.token_ids)
        reply = _Reply(sampled, None, prompt, turn.completion, len(messages), left_out=turn.left_out)
        self._sampled.append(reply)
        self._answers.setdefault((turn.tools_digest, turn.asked), []).append(number)
        self._closed.append(number)
        if len(self._closed) > _EQUALS:
            self._sampled[self._closed.pop(0)] = _Reply(array("i"))
            self.forgotten += 1

    def _continue(self, prompt: Prompt) -> Continued | None:
        """Record that a call continues a reply. Return what it changed about the reply, if anything."""
        part = prompt.continued
        if part is None:
            return None
        reply = self._sampled[part.reply]
        held = len(reply.ids) - (0 if reply.rest is None else len(reply.rest.token_ids))
        if held == part.tokens and part.end in self._replies:
            return None
        self._apply(part, prompt.tools_digest)
        return part

    def _apply(self, part: Continued, tools_digest: _Digest) -> None:
        """Make segments hold as many tokens of a reply as a call continues, and index the reply by that part."""
        reply, recorder = self._sampled[part.reply], self.recorder
        rest = 0 if reply.rest is None else len(reply.rest.token_ids)
        held = len(reply.ids) - rest
        self._replies.add(part.end)
        self._turns.setdefault((tools_digest, part.end, None), (part.reply, part.tokens))
        if reply.end:
            self._seen.add(reply.end)
        if reply.place is not None and part.tokens < held:
            cut = recorder.cut(reply.place.segment, reply.place.start + part.tokens) if not rest else None
            if cut is not None:
                self._sampled[part.reply] = replace(reply, rest=cut)
        elif reply.rest is not None and part.tokens > held:
            first, left = reply.rest.split(part.tokens - held)
            if reply.prompt is not None:
                before, prompt, spans = (
                    reply.prompt.messages,
                    reply.prompt.ids,
                    [each.span for each in reply.prompt.images],
                )
                why = reply.prompt.split_reason
                self._closed.remove(part.reply)
            else:
                assert reply.place is not None
                prompt = recorder.prompt_ids(reply.place)
                spans = recorder.images(reply.place.segment, reply.place.start)
                before, why = recorder.messages(reply.place.segment)[: reply.asked], "branched"
                if tools_digest == _TEXT:
                    before = [{**before[0], "content": before[0]["content"][: reply.asked]}]
            messages = [*before, part.message]
            place = recorder.add(prompt + reply.ids[:held], first, messages=messages, split_reason=why, images=spans)
            self._hold(place, messages)
            if reply.left_out:
                self._left_out.append(place)
            place = place._replace(start=len(prompt))
            self._sampled[part.reply] = replace(reply, place=place, prompt=None, rest=left)

    def _hold(self, place: TurnPosition, messages: Sequence[Message]) -> None:
        self._said[place.segment] = messages
        # The segment before a new one now shares its messages with others.
        if place.opened and place.segment:
            self._said[place.segment - 1] = self.recorder.messages(place.segment - 1)

    def _find(
        self, messages: Sequence[Message], tools: Tools, *, brief: bool = False
    ) -> tuple[int, Continued] | None:
        """Return the latest reply that these messages repeat and continue, with the number of messages up to it.

        `brief` means to find only replies that were repeated whole, or in the same way before.
        """
        tools_digest, defaults, chain = self._digests(messages, tools)
        for n in range(len(chain) - 1, 0, -1):
            end, back = (tools_digest, chain[n - 1]), messages[n - 1]
            if (*end, None) in self._turns:
                found = next(self._turns[key] for mark in _marks(back) if (key := (*end, mark)) in self._turns)
                return n, Continued(*found, back, chain[n - 1])
            asked = self._answers.get((tools_digest, chain[n - 2])) if n > 1 and back["role"] == "assistant" else None
            if asked is None or (told := _digest(tools_digest + chain[n - 2], [asked[-1], back])) in self._rewritten:
                continue
            if brief:
                return None
            if (part := self._part_read(asked, back, tools, defaults)) is not None:
                return n, Continued(*part, back, chain[n - 1])
            self._rewritten.add(told)
        return None

    def _part_read(
        self, numbers: Sequence[int], back: Message, tools: Tools, defaults: Defaults
    ) -> tuple[int, int] | None:
        """Find the latest reply that begins with `back`. Return its number and how many of its tokens `back` has.

        Return None, too, once about `_COMPARED_TOKENS` tokens were compared.
        """
        compared: list[int] = []
        for number in reversed(numbers[-_EQUALS:]):
            if sum(compared) > _COMPARED_TOKENS:
                return None
            reply = self._sampled[number]
            ids = reply.ids
            if reply.prompt is not None:
                prompt = reply.prompt.ids
            elif reply.place is not None:
                prompt = self.recorder.prompt_ids(reply.place)
            else:
                continue
            for choice in ("auto", "none") if tools else ("none",):
                call = ModelCall("", (), tools=tools, tool_choice=choice)

                read = partial(self._read, call, prompt, ids, compared)
                tokens = count_tokens_read(back, len(ids), read, partial(self._decode, ids), defaults)
                if tokens is not None:
                    return number, tokens
        return None

    def _read(
        self, call: ModelCall, prompt: IntArray, ids: IntArray, compared: list[int], n: int, with_word: bool
    ) -> Message:
        compared.append(n)
        let_others_go_first()
        read = (*ids[:n], *(self._bundle.marker_ids(PROBE) if with_word else ()))
        return read_tokens(self._bundle, call, prompt, Completion(read, (None,) * len(read)))[0].message

    def _decode(self, ids: IntArray, n: int) -> str:
        return self._bundle.decode(ids[:n])

    def _extended(
        self, n: int, part: Continued, messages: Sequence[Message], tools: Tools, images: Mapping[str, Image]
    ) -> Prompt | None:
        """Return the prompt that extends a reply by the messages after the first `n`; None if the renderer cannot."""
        tools_digest, defaults, chain = self._digests(messages, tools)
        fresh = _with_tool_names(messages, n) if self._bundle.needs_tool_names else messages[n:]
        if self._bundle.sorts_results:
            fresh = _in_call_order(messages[n - 1], fresh)
        extended = self._bridged(part, fresh, tools, images)
        if extended is None:
            return None
        ids, placed = extended
        reply = self._sampled[part.reply]
        if reply.prompt is not None:
            known, segment = reply.prompt.known, reply.prompt.continues
        else:
            assert reply.place is not None
            rest = 0 if reply.rest is None else len(reply.rest.token_ids)
            known = reply.place.start + min(part.tokens, len(reply.ids) - rest)
            segment = reply.place.segment
        return Prompt(ids, messages, tools_digest, chain, "branched", known, segment, part, defaults, placed)

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
        self, part: Continued, messages: Sequence[Message], tools: Tools, images: Mapping[str, Image]
    ) -> tuple[IntArray, tuple[PlacedImage, ...]] | None:
        """Return a conversation extended by these messages; None if the renderer cannot extend it."""
        reply = self._sampled[part.reply]
        completion = reply.ids[: part.tokens]
        if reply.prompt is not None:
            ids, earlier = reply.prompt.ids[:], reply.prompt.images
        else:
            assert reply.place is not None
            ids = self.recorder.prompt_ids(reply.place)
            earlier = [
                PlacedImage(span.start, span.end, self._images[span.sha256])
                for span in self.recorder.images(reply.place.segment, reply.place.start)
            ]
        names = image_names(messages) if images else []
        added = self._bundle.renderer.continuation(
            collapse_images(ids, earlier) if earlier else ids,
            completion,
            messages,
            tools=tools,
            places=bool(earlier or names),
        )
        if added is None:
            return None
        ids.extend(completion)
        placed: tuple[PlacedImage, ...] = ()
        if names:
            assert self._bundle.vision is not None, "images were accepted for a model that takes none"
            added, placed = self._bundle.vision.expand(added, [images[name] for name in names], len(ids))
        ids.extend(array("i", added))
        return ids, (*earlier, *placed)

    def _index(self, place: TurnPosition, messages: Sequence[Message], turn: RecordedTurn) -> None:
        self._hold(place, messages)
        self._images.update((image.sha256, image) for image in turn.images)
        number, sampled = len(self._sampled), array("i", turn.completion.token_ids)
        is_text = turn.tools_digest == _TEXT
        asked = len(messages[0]["content"]) if is_text else len(messages) - 1
        self._sampled.append(_Reply(sampled, place, None, None, asked, turn.end, turn.left_out))
        self._turns.update(
            ((turn.tools_digest, turn.end, mark), (number, len(sampled))) for mark in _marks(messages[-1])
        )
        self._replies.add(turn.end)
        self._seen.update(turn.seen)
        if is_text:
            self._texts.append(number)
        else:
            self._answers.setdefault((turn.tools_digest, turn.asked), []).append(number)
        if turn.left_out:
            self._left_out.append(place)

    def _digests(self, messages: Sequence[Message], tools: Tools) -> _Digests:
        """Return the tools' digest and argument defaults, and the digest of the conversation up to each message."""
        latest_messages, latest_tools, digests = self._latest
        if messages is latest_messages and tools is latest_tools:
            return digests
        text, digest, defaults = self._offered
        if text != (text := to_json(tools)):
            digest, defaults = _digest(b"tools", tools or []), defaults_of(tools)
            self._offered = text, digest, defaults
        with_ids = self._bundle.renders_call_ids
        # Without call ids, the tool identifies a result.
        named = messages if with_ids else _with_tool_names(messages)
        step = partial(_compared_digest, defaults=defaults, with_ids=with_ids)
        digests = digest, defaults, self._prepared.chain(named, step, digest)
        self._latest = messages, tools, digests
        return digests

    def _split_reason(
        self, messages: Sequence[Message], chain: list[_Digest], tools_digest: _Digest, part: Continued | None = None
    ) -> str:
        if not self._seen and part is None:
            return "first_call"
        read = b"" if part is None else part.end
        ends = [i for i, digest in enumerate(chain[:-1]) if digest in self._replies or digest == read]
        if ends:
            if any(message["role"] == "assistant" for message in messages[ends[-1] + 1 :]):
                return "history_rewritten"
            known = chain[ends[-1]] == read or (tools_digest, chain[ends[-1]], None) in self._turns
            return "rerendered" if known else "tools_changed"
        if chain[-1] in self._seen:
            return "branched"
        # More than a system message is shared, so the agent edited or dropped later messages.
        spoken = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages) - 1)
        return "history_rewritten" if chain[spoken] in self._seen else "new_conversation"


def _marks(reply: Message) -> list[object]:
    """Return the marks that distinguish equal replies, best first: call ids, reasoning, and None for any reply."""
    ids = tuple(call.get("id") for call in reply.get("tool_calls") or ())
    return [*filter(None, (ids, reasoning_of(reply))), None]


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
    names: dict[str | None, str] = {}
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
    before: _Digest, messages: Sequence[Message], i: int, *, defaults: Defaults, with_ids: bool
) -> _Digest:
    message = messages[i]
    reasoning = reasoning_of(message)
    if reasoning and message.get("tool_calls") and message.get("content") == reasoning:
        # Copilot repeats the reasoning as the text of a reply that only calls tools.
        message = {**message, "content": ""}
    return _digest(before, compared(message, defaults, with_ids=with_ids))


def _digest(before: _Digest, value: object) -> _Digest:
    return hashlib.blake2b(before + to_json(value, sort_keys=True), digest_size=16).digest()
