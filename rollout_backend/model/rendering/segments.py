"""Record the sampled tokens of one session as segments. Pure: no HTTP, no tokenizer, no clock.

Invariants:

- Every sampled token is in the response mask of exactly one segment, once, with the engine's logprob and weight
  version. A missing logprob is NaN; a missing version is absent.
- A segment is a sequence that the model saw: the tokens before each turn are exactly the prompt of that call. A turn
  therefore extends a segment only if its prompt starts with all of the segment's tokens and the same images. (Images
  of equal size have equal tokens, so tokens alone do not identify an image.)
- Every other turn opens a new segment, and records why.
- With a mixture of experts, a segment has the routing of all its tokens except the last, or no routing.
- The work of a call does not grow with the number of segments, but with the length of its prompt.
- Dropping a call restores the segment to its state before the call.
- A cut removes the last tokens of a segment's last call. They may be recorded again in another segment.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from agent_wrapper.contract import CheckedMessages, ImageSpan, Segment, Turn, VersionSpan
from agent_wrapper.contract.shared_prefixes import TOKEN_BYTES
from rollout_backend.config import ExpertShape
from rollout_backend.core.routed_experts import ExpertRows, routed_experts, row_bytes

if TYPE_CHECKING:
    IntArray = array[int]
    FloatArray = array[float]

GIVEN, SAMPLED = 0, 1
_KINDS = array("B", [GIVEN]), array("B", [SAMPLED])
_NAN = array("f", [math.nan])


@dataclass(frozen=True)
class Completion:
    """One reply of an engine. `logprobs` has one entry per token; spans of `weight_versions` count from the first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    weight_versions: tuple[VersionSpan, ...] = ()
    """Cover all tokens in order; empty if the engine reported none."""
    finish_reason: str = "stop"
    """`stop` or `length`."""
    matched: str | None = None
    """The stop string that ended the reply."""
    cached_tokens: int | None = None
    """None if the engine does not report it."""
    seconds: float = 0.0
    experts: ExpertRows | None = None
    """Routing from the token that the call asked for to the last but one."""

    def split(self, tokens: int) -> tuple[Completion, Completion | None]:
        """Return the first tokens and the rest, both without routing; None if no token is left."""
        first, rest = (
            replace(
                self,
                token_ids=self.token_ids[start:end],
                logprobs=self.logprobs[start:end],
                weight_versions=tuple(
                    VersionSpan(
                        version=span.version, start=max(span.start - start, 0), end=min(span.end, end) - start
                    )
                    for span in self.weight_versions
                    if span.start < end and span.end > start
                ),
                experts=None,
            )
            for start, end in ((0, tokens), (tokens, len(self.token_ids)))
        )
        if not rest.token_ids:
            return first, None
        return replace(first, finish_reason="stop", matched=None), replace(rest, cached_tokens=None, seconds=0.0)


class TurnPosition(NamedTuple):
    """The position of a call: it sampled the tokens `[start, end)` of a segment; the tokens before are its prompt."""

    segment: int
    before: int
    """Length of the segment before this call."""
    start: int
    end: int
    opened: bool


@dataclass
class _Open:
    split_reason: str
    ids: IntArray = field(default_factory=lambda: array("i"))
    response_mask: IntArray = field(default_factory=lambda: array("B"))
    logprobs: FloatArray = field(default_factory=lambda: array("f"))
    turns: list[Turn] = field(default_factory=list)
    messages: Sequence[Mapping[str, Any]] = ()
    message_counts: list[int] = field(default_factory=list)
    """Number of messages after each turn."""
    images: list[ImageSpan] = field(default_factory=list)
    experts: bytearray = field(default_factory=bytearray)
    hasher: hashlib.blake2b = field(default_factory=lambda: _digest())
    """Has read all `ids`."""

    def append(self, ids: IntArray, kind: int, logprobs: FloatArray) -> None:
        self.ids.extend(ids)
        self.hasher.update(ids)
        self.response_mask.extend(_KINDS[kind] * len(ids))
        self.logprobs.extend(logprobs)

    def freeze(self, shape: ExpertShape | None, messages: CheckedMessages) -> Segment:
        is_routed = shape is not None and len(self.experts) == row_bytes(shape) * (len(self.ids) - 1)
        return Segment(
            token_ids=self.ids[:],
            response_mask=self.response_mask[:],
            logprobs=self.logprobs[:],
            turns=tuple(self.turns),
            messages=messages,
            split_reason=self.split_reason,
            images=tuple(self.images),
            routed_experts=routed_experts(bytes(self.experts), shape) if shape and is_routed else None,
        )


class SegmentRecorder:
    """Records the segments of one session, whose conversations may interleave."""

    def __init__(self, experts: ExpertShape | None = None) -> None:
        self._segments: list[_Open] = []
        self._experts = experts
        self._tokens = 0
        # Bytes of routing in the latest call's segment before that call.
        self._routed_before = 0
        # Segments by the length and the digest of their tokens, and the lengths that occur.
        self._by_tokens: dict[int, dict[bytes, list[int]]] = {}
        self._lengths: list[int] = []
        # Messages of closed conversations, by their JSON.
        self._messages: dict[str, dict[str, Any]] = {}

    def add(
        self,
        prompt_ids: Sequence[int],
        completion: Completion,
        *,
        messages: Sequence[Mapping[str, Any]] = (),
        split_reason: str = "first_call",
        images: Sequence[ImageSpan] = (),
        continues: int | None = None,
    ) -> TurnPosition:
        """Record one model call.

        `messages` is the conversation including this call's reply. `split_reason` is used only if this call opens a
        segment. `images` are the images of the prompt, in order. The prompt probably begins with the segment
        `continues`, which has the routing of the tokens before the completion.
        """
        sampled, logprobs = completion.token_ids, completion.logprobs
        if len(logprobs) != len(sampled):
            raise ValueError(f"{len(logprobs)} logprobs for {len(sampled)} sampled tokens")
        prompt = prompt_ids if isinstance(prompt_ids, array) else array("i", prompt_ids)
        index = self.extended_by(prompt, images, continues)
        opened = index is None
        if index is None:
            index = len(self._segments)
            if self._segments:
                self._segments[-1].messages = self._stored_once(self._segments[-1].messages)
            self._segments.append(_Open(split_reason))
        else:
            self._forget(index)
        segment = self._segments[index]
        before = len(segment.ids)
        given = prompt[before:]
        segment.append(given, GIVEN, _NAN * len(given))
        start = len(segment.ids)
        segment.append(
            array("i", sampled),
            SAMPLED,
            array("f", [math.nan if logprob is None else logprob for logprob in logprobs]),
        )
        segment.turns.append(
            Turn(
                start=start,
                end=len(segment.ids),
                finish_reason=completion.finish_reason,
                weight_versions=tuple(
                    VersionSpan(version=span.version, start=start + span.start, end=start + span.end)
                    for span in completion.weight_versions
                ),
                cached_tokens=completion.cached_tokens,
                seconds=completion.seconds,
            )
        )
        segment.messages = messages
        segment.message_counts.append(len(messages))
        segment.images += images[len(segment.images) :]
        self._remember(index)
        self._routed_before = len(segment.experts)
        if completion.experts is not None:
            self._add_experts(segment, completion.experts, continues)
        return TurnPosition(index, before, start, len(segment.ids), opened)

    def _add_experts(self, segment: _Open, experts: ExpertRows, continues: int | None) -> None:
        """Add the routing of a segment's next tokens. Do nothing if some of it is missing."""
        assert self._experts is not None, "routing without its shape"
        begin = experts.start * row_bytes(self._experts)
        if begin > len(segment.experts):
            # Another segment began with the same tokens.
            known = b"" if continues is None else self._segments[continues].experts[len(segment.experts) : begin]
            if len(segment.experts) + len(known) < begin:
                return
            segment.experts += known
        segment.experts += experts.data[len(segment.experts) - begin :]

    def experts(self, place: TurnPosition) -> ExpertRows | None:
        """Return the routing that the latest call added to its segment; None if the segment lacks some."""
        segment = self._segments[place.segment]
        if self._experts is None or len(segment.experts) != row_bytes(self._experts) * (place.end - 1):
            return None
        begin = self._routed_before
        return ExpertRows(begin // row_bytes(self._experts), bytes(segment.experts[begin:]))

    def has_room(self, prompt: IntArray, images: Sequence[ImageSpan], choices: int, max_bytes: int) -> bool:
        """Return whether the segments fit into `max_bytes` together with the prompt of one more call."""
        token_bytes = TOKEN_BYTES + (0 if self._experts is None else row_bytes(self._experts))
        tokens = self._tokens + choices * len(prompt)
        if tokens * token_bytes > max_bytes and (index := self.extended_by(prompt, images)) is not None:
            tokens -= len(self._segments[index].ids)
        return tokens * token_bytes <= max_bytes

    def prompt_ids(self, place: TurnPosition) -> IntArray:
        return self._segments[place.segment].ids[: place.start]

    def completion_ids(self, place: TurnPosition) -> IntArray:
        return self._segments[place.segment].ids[place.start : place.end]

    def ids(self, segment: int) -> IntArray:
        """Return all tokens of a segment."""
        return self._segments[segment].ids[:]

    def images(self, segment: int, end: int | None = None) -> list[ImageSpan]:
        """Return the images of a segment, or only those within its first `end` tokens."""
        return [span for span in self._segments[segment].images if end is None or span.end <= end]

    def mask(self, place: TurnPosition) -> None:
        """Remove a call. If later tokens follow it, its reply becomes part of their prompt."""
        if self.drop(place):
            return
        segment = self._segments[place.segment]
        index = bisect.bisect_left(segment.turns, place.start, key=lambda turn: turn.start)
        if index == len(segment.turns) or segment.turns[index].start != place.start:
            # The call was removed earlier.
            return
        end = segment.turns[index].end
        del segment.turns[index], segment.message_counts[index]
        for i in range(place.start, end):
            segment.response_mask[i], segment.logprobs[i] = GIVEN, math.nan

    def drop(self, place: TurnPosition) -> bool:
        """Remove a call, unless later tokens follow it, or it was cut. Return whether it was removed."""
        segment = self._segments[place.segment]
        if not segment.turns or (segment.turns[-1].start, segment.turns[-1].end) != (place.start, place.end):
            return False
        self._forget(place.segment)
        for each in (segment.ids, segment.response_mask, segment.logprobs):
            del each[place.before :]
        segment.hasher = _digest(segment.ids)
        segment.turns.pop()
        segment.message_counts.pop()
        segment.messages = segment.messages[: segment.message_counts[-1] if segment.message_counts else 0]
        segment.images = [span for span in segment.images if span.end <= place.before]
        if self._experts is not None:
            del segment.experts[row_bytes(self._experts) * max(place.before - 1, 0) :]
        self._remember(place.segment)
        return True

    def cut(self, index: int, end: int) -> Completion | None:
        """Remove the tokens of a segment from `end` on, and return them; None unless its last call sampled them."""
        segment = self._segments[index]
        turn = segment.turns[-1]
        if not turn.start < end < turn.end or turn.end != len(segment.ids):
            return None
        _, rest = Completion(
            token_ids=tuple(segment.ids[turn.start :]),
            logprobs=tuple(None if math.isnan(each) else each for each in segment.logprobs[turn.start :]),
            weight_versions=tuple(
                VersionSpan(version=span.version, start=span.start - turn.start, end=span.end - turn.start)
                for span in turn.weight_versions
            ),
            finish_reason=turn.finish_reason,
        ).split(end - turn.start)
        versions = tuple(replace(span, end=min(span.end, end)) for span in turn.weight_versions if span.start < end)
        self._forget(index)
        segment.turns[-1] = replace(turn, end=end, finish_reason="stop", weight_versions=versions)
        for each in (segment.ids, segment.response_mask, segment.logprobs):
            del each[end:]
        segment.hasher = _digest(segment.ids)
        if self._experts is not None:
            del segment.experts[row_bytes(self._experts) * (end - 1) :]
        self._remember(index)
        return rest

    def segments(self) -> tuple[Segment, ...]:
        """Return the segments recorded so far, in the order in which they were opened."""
        return tuple(
            segment.freeze(self._experts, self._stored_once(segment.messages))
            for segment in self._segments
            if segment.turns
        )

    def messages(self, segment: int) -> Sequence[Mapping[str, Any]]:
        """Return the conversation of a segment."""
        return self._segments[segment].messages

    def _stored_once(self, messages: Sequence[Mapping[str, Any]]) -> CheckedMessages:
        """Return the messages as objects shared by all segments: an agent may rewrite a long history each time."""
        if isinstance(messages, CheckedMessages):
            return messages
        return CheckedMessages(self._messages.setdefault(json.dumps(message), dict(message)) for message in messages)

    def extended_by(self, prompt: IntArray, images: Sequence[ImageSpan], continues: int | None = None) -> int | None:
        """Return the longest segment that is a prefix of the prompt; the latest of equally long ones.

        Finding it costs less if that is the segment `continues`, whose tokens are compared and not hashed.
        """
        if continues is not None:
            segment = self._segments[continues]
            if prompt[: len(segment.ids)] == segment.ids:
                found = self._longest(prompt, images, len(segment.ids), segment.hasher.copy())
                if found is not None:
                    return found
        return self._longest(prompt, images, 0, _digest())

    def _longest(self, prompt: IntArray, images: Sequence[ImageSpan], at: int, digest: hashlib.blake2b) -> int | None:
        """Return what `extended_by` does, of segments with at least `at` tokens. `digest` has read those."""
        digests = [(at, digest.digest())]
        first, last = (bisect.bisect_right(self._lengths, n) for n in (at, len(prompt)))
        for n in self._lengths[first:last]:
            digest.update(memoryview(prompt)[at:n])
            digests.append((n, digest.digest()))
            at = n
        for n, key in reversed(digests):
            shown: list[ImageSpan] | None = None
            for index in reversed(self._by_tokens.get(n, {}).get(key, ())):
                shown = [span for span in images if span.start < n] if shown is None else shown
                if shown == self._segments[index].images:
                    return index
        return None

    def _remember(self, index: int) -> None:
        """Add a segment to the index of tokens."""
        ids, key = self._segments[index].ids, self._segments[index].hasher.digest()
        self._tokens += len(ids)
        if len(ids) not in self._by_tokens:
            self._by_tokens[len(ids)] = {}
            bisect.insort(self._lengths, len(ids))
        bisect.insort(self._by_tokens[len(ids)].setdefault(key, []), index)

    def _forget(self, index: int) -> None:
        """Remove a segment from the index of tokens, before its tokens change."""
        ids, key = self._segments[index].ids, self._segments[index].hasher.digest()
        self._tokens -= len(ids)
        same_length = self._by_tokens[len(ids)]
        same_length[key].remove(index)
        if not same_length[key]:
            del same_length[key]
        if not same_length:
            del self._by_tokens[len(ids)]
            self._lengths.remove(len(ids))


def _digest(ids: IntArray | bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(ids, digest_size=16)
