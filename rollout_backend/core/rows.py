"""Convert a finished rollout into the rows that trainers train on. Pure.

A segment becomes at most one row. Its prompt is the tokens before the first sampled one; its response is the tokens
that follow, with a mask of 1 on those that are trained.

Invariants:

- Every sampled token is trained in exactly one row or counted: in `truncated_tokens` if it does not fit, in
  `unknown_logprobs` if the engine gave no logprob for it.
- A prompt longer than `prompt_length` is split, not cut: the rest is in the response, masked out. A response longer
  than `response_length` loses its end.
- A response ends with its last trained token, and the reward is on that token, where each of verl's estimators finds
  it. GAE, unlike the others, loses a reward on a masked token. Tokens given after it train nothing and are left out.
- The reward of a turn is on the last trained token of that turn. If the turn has none, its reward is on the trained
  token before it, or on the first one if there is none before it, and is counted in `moved_turn_rewards`: the tokens
  that preceded the turn keep their return, and cutting a row cannot remove a penalty.
- The scores of a row add up to the rollout's reward and all its turn rewards. Rewards of turns in other rows are on
  the last token. With `own_turns_only`, a row has no rewards of turns in other rows.
- A segment without a trained token gives no row, and rows are numbered without a gap. verl takes a session's
  advantage from its last row, so that row must train something.
- Where the mask is 0, `logprobs` is 0. It is finite, because 0 * NaN would reach the loss, and it has no weight,
  because verl multiplies by the mask.
- A row never has a part of an image: an image that is cut off comes after the last trained token. Rows of a vision
  model carry pixels and positions, as in verl's own agent loop. An image token that the model sampled itself has no
  image, so training ends before it.
- With `experts`, a row has the routed experts of each token, and zeros for the last token of a segment, which no
  engine has processed. If a trained segment lacks its experts, or has the experts of another model, the rollout has
  no rows.
- A rollout that `training.mask` leaves out has no row, so it is in no gradient and in no baseline.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from agent_wrapper.contract import Outcome, Rollout, Segment
from rollout_backend.config import ExpertShape
from rollout_backend.config.step import Mask
from rollout_backend.core.adapter import number_of
from rollout_backend.core.routed_experts import unpack


@dataclass(frozen=True)
class SeenImage:
    """An image's bytes and its token range `[start, end)` in a row."""

    start: int
    end: int
    data: bytes = field(repr=False)


@dataclass(frozen=True, eq=False)
class Row:
    """A segment as it is trained: P >= 1 prompt tokens and R response tokens, of which the last is trained.

    `tokens` is [P + R], `routed_experts` is [P + R, layers, topk], and the other arrays are [R].
    """

    tokens: NDArray[np.int64]
    prompt_tokens: int
    response_mask: NDArray[np.int64]
    """1 for a token that was sampled and is trained."""
    logprobs: NDArray[np.float32]
    """From the engine; 0 where the mask is 0."""
    scores: NDArray[np.float32]
    """The reward and the turn rewards, on their tokens."""
    # Versions of the weights that sampled the trained tokens. The minimum is over the known ones; the others are None
    # if one is unknown.
    min_version: int | None
    max_version: int | None
    mean_version: float | None
    turns: int
    """Model calls with a token in the response."""
    index: int
    """Position among the rollout's rows."""
    trained_tokens: int
    # Sampled tokens that are not trained: some have a logprob but do not fit, the others have no logprob.
    truncated_tokens: int
    unknown_logprobs: int
    images: tuple[SeenImage, ...] = ()
    routed_experts: NDArray[np.int16] | None = None
    turn_rewards: int = 0
    """Number of the segment's turns with a nonzero reward on one of their own tokens."""

    @property
    def prompt(self) -> NDArray[np.int64]:
        """The first P tokens, which share the memory of `tokens`."""
        return self.tokens[: self.prompt_tokens]

    @property
    def response(self) -> NDArray[np.int64]:
        """The last R tokens, which share the memory of `tokens`."""
        return self.tokens[self.prompt_tokens :]

    def versions(self, fallback: int) -> tuple[int, float, int]:
        """Return how many tokens are trained, and the mean and the oldest of their weight versions."""
        oldest = fallback if self.min_version is None else self.min_version
        if self.mean_version is None:
            return self.trained_tokens, float(fallback), min(fallback, oldest)
        return self.trained_tokens, self.mean_version, oldest


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one rollout. The counts include segments that gave no row."""

    rows: tuple[Row, ...] = ()
    truncated_tokens: int = 0
    unknown_logprobs: int = 0
    moved_turn_rewards: int = 0
    """Nonzero rewards of turns without a trained token."""
    masked: str | None = None
    """Why the rollout is left out: a value of `training.mask`, or `routed_experts`."""

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)


def rows_of(
    rollout: Rollout,
    prompt_length: int,
    response_length: int,
    image_token: int | None = None,
    own_turns_only: bool = False,
    experts: ExpertShape | None = None,
) -> Rows:
    """Return a rollout's rows, of at most `prompt_length` + `response_length` tokens each.

    `image_token` is the id that a vision model uses for images. `own_turns_only` is for estimators that use the
    position of a reward and treat each row as a rollout: a row then has no rewards of turns in other rows.
    `experts` is the shape of the routing that each row must have.

    Raises:
        ValueError: the rollout has no reward, or a length is below 1.
    """
    if prompt_length < 1 or response_length < 1:
        raise ValueError(f"prompt_length {prompt_length} and response_length {response_length} must be at least 1")
    if rollout.reward is None:
        raise ValueError(
            f"rollout {rollout.rollout_id!r} ended as {rollout.outcome} without a reward and cannot be trained"
        )
    given = iter(rollout.turn_rewards)
    pieces: list[tuple[Segment, _Cut, list[float]]] = []
    # Rewards of turns in segments that give no row.
    without_row: list[float] = []
    truncated = unknown = 0
    for segment in rollout.segments:
        turn_rewards = [*islice(given, len(segment.turns))]
        cut = _cut(segment, prompt_length, response_length, image_token)
        truncated += cut.truncated
        unknown += cut.unknown
        if len(cut.trained):
            pieces.append((segment, cut, turn_rewards))
        else:
            without_row += turn_rewards
    routed = (segment.routed_experts for segment, _, _ in pieces)
    if experts is not None and not all(
        each is not None and (each.layers, each.topk) == (experts.layers, experts.topk) for each in routed
    ):
        return Rows(masked="routed_experts")
    rows = []
    moved = np.count_nonzero(without_row) if pieces else 0
    # A row has the rewards of all turns, and its own on their tokens.
    total = _exact_sum([*without_row, *chain(*(each for _, _, each in pieces))])
    for index, (segment, cut, turn_rewards) in enumerate(pieces):
        scores, own = _turn_scores(segment, cut, turn_rewards)
        moved += np.count_nonzero(turn_rewards) - own
        if own_turns_only:
            others = without_row if index == len(pieces) - 1 else []
        else:
            others = [*total, *(-each for each in turn_rewards)]
        scores[-1] += math.fsum((rollout.reward, *others))
        row = _row(segment, cut, rollout, index, scores.astype(np.float32), own)
        rows.append(row if experts is None else replace(row, routed_experts=_routed(segment, cut)))
    return Rows(tuple(rows), truncated, unknown, int(moved))


def _exact_sum(numbers: Sequence[float]) -> list[float]:
    """Return a few numbers with exactly the same sum. A rounded sum would lose small rewards beside large ones."""
    rest, parts = sum(map(Fraction, numbers), Fraction()), list[float]()
    while part := float(rest):
        parts.append(part)
        rest -= Fraction(part)
    return parts


@dataclass(frozen=True, eq=False)
class _Cut:
    """A segment's response and its tokens: empty if there is no trained token."""

    start: int
    trained: NDArray[np.bool_]
    """[R]; the last is True."""
    truncated: int
    unknown: int

    @property
    def end(self) -> int:
        return self.start + len(self.trained)


def _cut(segment: Segment, prompt_length: int, response_length: int, image_token: int | None) -> _Cut:
    sampled = np.asarray(segment.response_mask).view(bool)
    known = sampled & np.isfinite(np.asarray(segment.logprobs))
    known_tokens = int(np.count_nonzero(known))
    unknown = int(np.count_nonzero(sampled)) - known_tokens
    # A prompt needs a token, so a segment's first one is in the prompt even if it was sampled.
    start = max(1, min(int(sampled.argmax()) if len(sampled) else 0, prompt_length))
    stop = start + response_length
    if image_token is not None:
        without_image = np.flatnonzero(sampled & (np.asarray(segment.token_ids) == image_token))
        stop = min(stop, int(without_image[0])) if len(without_image) else stop
    trained = known[start : max(start, stop)]
    places = np.flatnonzero(trained)
    trained = trained[: int(places[-1]) + 1 if len(places) else 0]
    return _Cut(start, trained, known_tokens - len(places), unknown)


def _turn_scores(segment: Segment, cut: _Cut, turn_rewards: Sequence[float]) -> tuple[NDArray[np.float64], int]:
    """Return the turn rewards on their tokens, [R], and how many other than 0 are on a token of their own turn."""
    scores = np.zeros(len(cut.trained))
    trained = np.flatnonzero(cut.trained) + cut.start
    own = 0
    for turn, reward in zip(segment.turns, turn_rewards, strict=False):
        place = int(trained[max(0, int(np.searchsorted(trained, turn.end)) - 1)])
        scores[place - cut.start] += reward
        own += reward != 0 and turn.start <= place < turn.end
    return scores, own


def _routed(segment: Segment, cut: _Cut) -> NDArray[np.int16]:
    """Return the routed experts of a row as verl has them: a token without routing has expert 0 repeated."""
    assert segment.routed_experts is not None
    known = unpack(segment.routed_experts)[: cut.end]
    found = np.zeros((cut.end, *known.shape[1:]), dtype=np.int16)
    found[: len(known)] = known
    return found


def _row(
    segment: Segment, cut: _Cut, rollout: Rollout, index: int, scores: NDArray[np.float32], turn_rewards: int
) -> Row:
    logprobs = np.asarray(segment.logprobs)[cut.start : cut.end]
    turns = [turn for turn in segment.turns if max(turn.start, cut.start) < min(turn.end, cut.end)]
    versions: list[int | None] = []
    version_sum = 0
    for turn in turns:
        spans = [span for span in turn.weight_versions if max(span.start, cut.start) < min(span.end, cut.end)]
        versions += [number_of(span.version) for span in spans] or [None]
        for span in spans:
            of_span = cut.trained[max(span.start - cut.start, 0) : span.end - cut.start]
            version_sum += (number_of(span.version) or 0) * int(np.count_nonzero(of_span))
    numbers = [version for version in versions if version is not None]
    known = len(numbers) == len(versions)
    trained_tokens = int(np.count_nonzero(cut.trained))
    return Row(
        tokens=np.asarray(segment.token_ids)[: cut.end].astype(np.int64),
        prompt_tokens=cut.start,
        response_mask=cut.trained.astype(np.int64),
        logprobs=np.where(cut.trained, logprobs, np.float32(0)),
        scores=scores,
        min_version=min(numbers, default=None),
        max_version=max(numbers) if known else None,
        mean_version=version_sum / trained_tokens if known else None,
        turns=len(turns),
        index=index,
        trained_tokens=trained_tokens,
        truncated_tokens=cut.truncated,
        unknown_logprobs=cut.unknown,
        images=tuple(
            SeenImage(span.start, span.end, rollout.images[span.sha256])
            for span in segment.images
            if span.end <= cut.end
        ),
        turn_rewards=turn_rewards,
    )


def mask_group(rollouts: Sequence[Rollout], made: Sequence[Rows], masks: Collection[Mask], needed: int) -> list[Rows]:
    """Return the rows of a group's rollouts, without the rows of masked rollouts.

    If rollouts are masked and fewer than `needed` others can be trained, the result is empty, because advantages
    compare rollouts.
    """
    kept = [
        Rows(masked=mask) if (mask := _mask_of(rollout, rows, masks)) else rows
        for rollout, rows in zip(rollouts, made, strict=True)
    ]
    masked = any(rows.masked for rows in kept)
    return [] if masked and sum(len(rows) > 0 for rows in kept) < min(needed, len(kept)) else kept


def _mask_of(rollout: Rollout, rows: Rows, masks: Collection[Mask]) -> Mask | None:
    """Return the first mask that applies to a rollout."""
    if "agent_error" in masks and rollout.outcome is Outcome.AGENT_ERROR:
        return "agent_error"
    if "last_reply_cut" in masks:
        turns = [turn for segment in rollout.segments for turn in segment.turns]
        if turns and turns[-1].finish_reason == "length":
            return "last_reply_cut"
    return "row_cut" if "row_cut" in masks and rows.truncated_tokens else None
