"""Pure: a finished rollout as the rows that verl trains on.

A segment becomes at most one row. Its prompt is what was given before the first sampled token, its response all that
follows, with mask 1 on the tokens that are trained. What must always hold:

- Every sampled token is either trained in exactly one row, or counted: in `truncated_tokens` if there was no place
  for it, in `unknown_logprobs` if the engine gave no logprob for it.
- A prompt longer than `prompt_length` is split, not cut: what is given beyond that stands in the response, masked
  out. A response longer than `response_length` loses its end.
- A response ends with its last trained token. What was given after it trains nothing and is left out, and the reward
  lies on the last token of the response, where every estimator of verl finds it: GAE, unlike the others, loses a
  reward that lies on a masked token.
- A segment without a trained token gives no row, and rows are numbered without a gap: verl takes the advantage of a
  session from its last row, which therefore must train something.
- Where the mask is 0, `logprobs` is 0: finite, since 0 * NaN would reach the loss, and of no weight, since verl
  multiplies whatever it makes of a logprob by the mask.
- An image of a segment is in its row whole, or not at all: what is cut off is behind a trained token. Rows of a
  model that sees bring its pixels and positions, in the way of verl's own agent loop; without a processor to make
  them a row with images is refused. A place for an image that the model sampled itself has none behind it, and
  ends what is trained.
- A re-tokenised segment has no logprob at all, and is trained all the same: its row is marked, its `logprobs` are
  NaN, and it goes to verl only where no row brings logprobs. verl has no word for one that is not known, and a number
  that stood for it would be taken for the engine's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from agent_wrapper.contract import Rollout, Segment
from rollout_backend.errors import ConfigError
from rollout_backend.verl.vision import SeenImage, Vision


@dataclass(frozen=True, eq=False)
class Row:
    """One segment as verl trains it: P prompt tokens (at least 1) and R response tokens, the last of them trained."""

    prompt: NDArray[np.int64]  # [P]
    response: NDArray[np.int64]  # [R]
    mask: NDArray[np.int64]  # [R], 1 = sampled and trained
    logprobs: NDArray[np.float32]  # [R], of the engine; 0 where mask is 0, NaN throughout where re-tokenised
    reward: float  # the rollout's
    min_version: int | None  # of the weights that sampled the trained tokens; None if any of them is not known
    max_version: int | None
    mean_version: float | None  # over the trained tokens
    turns: int  # model calls with a token in the response
    index: int  # among the rows of its rollout
    truncated_tokens: int  # sampled, with a logprob, and not trained: there was no place
    unknown_logprobs: int  # sampled, and not trained: without a logprob
    retokenised: bool = False  # made of messages: its tokens are a guess
    images: tuple[SeenImage, ...] = ()

    @property
    def trained_tokens(self) -> int:
        return int(self.mask.sum())

    def versions(self, fallback: int) -> tuple[int, float, int]:
        """How many tokens are trained, and the mean and the oldest of their versions."""
        if self.mean_version is None or self.min_version is None:
            return self.trained_tokens, float(fallback), fallback
        return self.trained_tokens, self.mean_version, self.min_version


@dataclass(frozen=True, eq=False)
class Rows(Sequence[Row]):
    """The rows of one rollout. The counts include the segments that gave no row."""

    rows: tuple[Row, ...] = ()
    truncated_tokens: int = 0
    unknown_logprobs: int = 0
    empty_segments: int = 0

    @property
    def retokenised(self) -> int:
        """How many of the rows were made of messages."""
        return sum(row.retokenised for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Row]: ...
    def __getitem__(self, at: int | slice) -> Row | Sequence[Row]:
        return self.rows[at]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)


def rows_of(rollout: Rollout, prompt_length: int, response_length: int, image_token: int | None = None) -> Rows:
    """The rows of a rollout, at most `prompt_length` + `response_length` tokens each. `image_token` is the one that
    stands for images, where the model sees.

    Raises:
        ValueError: the rollout has no reward, or a length is below 1.
    """
    if prompt_length < 1 or response_length < 1:
        raise ValueError(f"prompt_length {prompt_length} and response_length {response_length} must be at least 1")
    if rollout.reward is None:
        raise ValueError(
            f"rollout {rollout.rollout_id!r} ended as {rollout.outcome} without a reward: not to be trained"
        )
    rows: list[Row] = []
    truncated = unknown = 0
    for segment in rollout.segments:
        cut = _cut(segment, prompt_length, response_length, image_token)
        truncated += cut.truncated
        unknown += cut.unknown
        if cut.end:
            rows.append(_row(segment, cut, rollout, index=len(rows)))
    return Rows(tuple(rows), truncated, unknown, empty_segments=len(rollout.segments) - len(rows))


@dataclass(frozen=True, eq=False)
class _Cut:
    """Where a segment's response begins and ends; `end` is 0 if it has no trained token."""

    trained: NDArray[np.bool_]
    start: int
    end: int
    truncated: int
    unknown: int


def _cut(segment: Segment, prompt_length: int, response_length: int, image_token: int | None) -> _Cut:
    sampled = np.asarray(segment.mask, dtype=bool)
    known = sampled if segment.retokenised else sampled & np.isfinite(np.asarray(segment.logprobs, dtype=np.float32))
    unknown = int(sampled.sum() - known.sum())
    # Nothing precedes a segment's first token, so it is in the prompt even if it was sampled.
    start = max(1, min(int(sampled.argmax()) if sampled.any() else 0, prompt_length))
    trained = known.copy()
    trained[:start] = False
    trained[start + response_length :] = False
    if image_token is not None:
        astray = np.flatnonzero(sampled & (np.asarray(segment.token_ids) == image_token))
        trained[astray[0] if len(astray) else len(trained) :] = False
    places = np.flatnonzero(trained)
    end = int(places[-1]) + 1 if len(places) else 0
    return _Cut(trained, start, end, int(known.sum()) - len(places), unknown)


def _row(segment: Segment, cut: _Cut, rollout: Rollout, index: int) -> Row:
    assert rollout.reward is not None
    tokens = np.asarray(segment.token_ids, dtype=np.int64)
    trained = cut.trained[cut.start : cut.end]
    logprobs = np.asarray(segment.logprobs, dtype=np.float32)[cut.start : cut.end]
    turns = [turn for turn in segment.turns if max(turn.start, cut.start) < min(turn.end, cut.end)]
    versions: list[int | None] = []
    weighed = 0  # the sum of the versions of the trained tokens
    for turn in turns:
        spans = [span for span in turn.weight_versions if max(span.start, cut.start) < min(span.end, cut.end)]
        versions += [_number(span.version) for span in spans] or [None]
        for span in spans:
            of_span = cut.trained[max(span.start, cut.start) : min(span.end, cut.end)]
            weighed += (_number(span.version) or 0) * int(of_span.sum())
    numbers = [version for version in versions if version is not None]
    known = len(numbers) == len(versions)
    return Row(
        prompt=tokens[: cut.start],
        response=tokens[cut.start : cut.end],
        mask=trained.astype(np.int64),
        logprobs=logprobs if segment.retokenised else np.where(trained, logprobs, np.float32(0)),
        reward=rollout.reward,
        min_version=min(numbers) if known else None,
        max_version=max(numbers) if known else None,
        mean_version=weighed / int(trained.sum()) if known else None,
        turns=len(turns),
        index=index,
        truncated_tokens=cut.truncated,
        unknown_logprobs=cut.unknown,
        retokenised=segment.retokenised,
        images=tuple(
            SeenImage(span.start, span.end, rollout.images[span.sha256])
            for span in segment.images
            if span.end <= cut.end
        ),
    )


def _number(version: str) -> int | None:
    """SGLang's first version is "default", before any weights were pushed under a number."""
    return int(version) if version.isdecimal() else None


# --- v1: TransferQueue ------------------------------------------------------------------------------------


def v1_fields(
    row: Row,
    base: Mapping[str, Any],
    reward_extra_info: Mapping[str, Any] | None = None,
    logprobs: bool = True,
    vision: Vision | None = None,
) -> dict[str, Any]:
    """What TransferQueue holds for a row: the same set of fields for every row, unpadded 1-D tensors.

    `base` is what the dataset gave for the prompt, with `uid` and `session_id`. `reward_extra_info` goes to verl's
    validation metrics; verl adds "reward" itself, so it must not hold that. Without `logprobs` there is no field
    `rollout_log_probs`: say so for all rows of a run that may hold re-tokenised ones, or for none. With `vision` all
    rows have positions of its kind, [4, P + R].

    Raises:
        ValueError: logprobs are wanted of a re-tokenised row, or an image is not what its tokens say.
        ConfigError: there are images and no `vision`.
    """
    _check_logprobs(row, logprobs)
    response = torch.tensor(row.response)
    mask = torch.tensor(row.mask)
    ids = torch.cat([torch.tensor(row.prompt), response])
    known = {"rollout_log_probs": torch.tensor(row.logprobs)} if logprobs else {}
    seen, positions = _seen(row, ids, vision)
    return {
        **base,
        **known,
        "prompts": torch.tensor(row.prompt),
        "responses": response,
        "response_mask": mask,
        "loss_mask": mask,
        "input_ids": ids,
        "position_ids": positions,
        "rm_scores": torch.tensor(_scores(row)),
        "num_turns": row.turns,
        "multi_modal_inputs": seen,
        "extra_fields": {"reward_extra_info": dict(reward_extra_info or {})},
    }


def v1_tag(row: Row, global_steps: int, fallback: int | None = None) -> dict[str, Any]:
    """A row's tag. verl reads the versions as numbers, so where they are not known `fallback` stands in for them.

    By default that is the version a synchronous step samples with: its servers hold the weights of the step before.
    """
    version = max(0, global_steps - 1) if fallback is None else fallback
    tokens, mean, oldest = row.versions(version)
    return {
        "status": "success",
        "prompt_len": len(row.prompt),
        "response_len": len(row.response),
        "seq_len": len(row.prompt) + len(row.response),
        "global_steps": global_steps,
        "min_global_steps": oldest,
        "max_global_steps": version if row.max_version is None else row.max_version,
        # Ours, for the sampler's metrics.
        "mean_version": mean,
        "trained_tokens": tokens,
        "retokenised": row.retokenised,
    }


def _check_logprobs(row: Row, wanted: bool) -> None:
    if row.retokenised and wanted:
        raise ValueError("a re-tokenised row has no logprobs: leave them out of every row")


def _seen(row: Row, ids: torch.Tensor, vision: Vision | None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    if vision is not None:
        return vision.inputs(ids, row.images)
    if row.images:
        raise ConfigError(
            f"a rollout has {len(row.images)} images in a row, and verl has no processor for this model to prepare "
            "them with: set gateway.max_images=0"
        )
    return {}, torch.arange(len(ids))


def _scores(row: Row) -> NDArray[np.float32]:
    scores = np.zeros(len(row.response), dtype=np.float32)
    scores[-1] = row.reward
    return scores


# --- legacy: DataProto ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LegacyBatch:
    """What the legacy trainer wants of B rollouts, in their order, and what of them found no place in it."""

    tensors: TensorDict  # batch size [B]
    non_tensors: dict[str, NDArray[Any]]  # each [B]
    missing: NDArray[np.bool_]  # [B], where no row stands
    left_out_tokens: int  # trained tokens of the segments beside the chosen one
    truncated_tokens: int
    unknown_logprobs: int


def legacy_batch(
    slots: Sequence[Rows | None],
    prompt_length: int,
    response_length: int,
    pad_token_id: int,
    logprobs: bool = True,
    vision: Vision | None = None,
) -> LegacyBatch:
    """B rollouts, None where one is missing, as P = `prompt_length` + R = `response_length` columns.

    The legacy trainer has one row per rollout. Of several segments the one with the most trained tokens is taken,
    the later of equals; the tokens of the others are counted in `left_out_tokens`. Only the v1 trainer trains all.

    A missing rollout holds its slot with one token of prompt and an empty response. verl calls that an aborted
    sample and leaves it out of its reward metrics; its estimators do not, and take it for a reward of 0: see
    `rollout_backend.verl.advantage`.
    The loss modes that average over rows (`seq-mean-*`) divide by it, too; `token-mean` does not.

    Without `logprobs` there is no `rollout_log_probs`; re-tokenised rows have none, and are marked in `retokenised`.
    With `vision` the positions are [B, 4, P + R].

    Raises:
        ValueError: logprobs are wanted of a re-tokenised row, or an image is not what its tokens say.
        ConfigError: there are images and no `vision`.
    """
    shape = len(slots), prompt_length
    prompts = np.full(shape, pad_token_id, dtype=np.int64)
    prompt_attention = np.zeros(shape, dtype=np.int64)
    prompt_attention[:, -1] = 1
    shape = len(slots), response_length
    responses = np.full(shape, pad_token_id, dtype=np.int64)
    response_attention, mask = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    scores, rollout_log_probs = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32)
    retokenised = np.zeros(len(slots), dtype=bool)
    turns = np.zeros(len(slots), dtype=np.int32)
    missing = np.ones(len(slots), dtype=bool)
    # Of a model that sees; else they follow from the attention.
    positions = torch.zeros(len(slots), 4, prompt_length + response_length if vision else 0, dtype=torch.int64)
    images = np.empty(len(slots), dtype=object)
    images[:] = [{} for _ in slots]
    left_out = 0
    for i, rows in enumerate(slots):
        if not rows:
            continue
        row = max(reversed(rows), key=lambda row: row.trained_tokens)
        _check_logprobs(row, logprobs)
        left_out += sum(other.trained_tokens for other in rows) - row.trained_tokens
        start, end = prompt_length - len(row.prompt), len(row.response)
        prompts[i, start:] = row.prompt
        prompt_attention[i, start:] = 1
        responses[i, :end] = row.response
        response_attention[i, :end] = 1
        mask[i, :end] = row.mask
        scores[i, :end] = _scores(row)
        rollout_log_probs[i, :end] = row.logprobs
        retokenised[i] = row.retokenised
        turns[i] = row.turns
        missing[i] = False
        images[i], of_row = _seen(row, torch.from_numpy(np.concatenate([row.prompt, row.response])), vision)
        if vision is not None:
            positions[i, :, start : prompt_length + end] = of_row
    attention = np.concatenate([prompt_attention, response_attention], axis=1)
    arrays = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": np.concatenate([prompts, responses], axis=1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(axis=1) - 1).clip(min=0),
        "response_mask": mask,
        "rm_scores": scores,
        "rollout_log_probs": rollout_log_probs,
    }
    if not logprobs:
        del arrays["rollout_log_probs"]
    tensors = {name: torch.from_numpy(values) for name, values in arrays.items()}
    if vision is not None:
        tensors["position_ids"] = positions
    return LegacyBatch(
        tensors=TensorDict(tensors, batch_size=[len(slots)]),
        non_tensors={"multi_modal_inputs": images, "__num_turns__": turns, "retokenised": retokenised},
        missing=missing,
        left_out_tokens=left_out,
        truncated_tokens=sum(rows.truncated_tokens for rows in slots if rows is not None),
        unknown_logprobs=sum(rows.unknown_logprobs for rows in slots if rows is not None),
    )
