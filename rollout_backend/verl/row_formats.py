"""Convert rows into the formats of verl's two trainers: TransferQueue fields for v1, a padded batch for legacy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from rollout_backend.config import ExpertShape
from rollout_backend.core.rows import Row, Rows
from rollout_backend.errors import ConfigError
from rollout_backend.verl.row_images import VisionInputs

# --- v1: TransferQueue ------------------------------------------------------------------------------------


def v1_fields(
    row: Row,
    base: Mapping[str, Any],
    reward_extra_info: Mapping[str, Any] | None = None,
    vision: VisionInputs | None = None,
) -> dict[str, Any]:
    """Return the TransferQueue fields of a row: unpadded 1-D tensors, the same set of fields for every row.

    The tensors share memory with the row and with each other, so they are for reading. verl's
    `list_of_dict_to_tensordict` copies them.

    Args:
        row: The row.
        base: The prompt's columns from the dataset, with `uid` and `session_id`.
        reward_extra_info: Goes to verl's validation metrics. Must not hold "reward", which verl adds itself.
        vision: Gives all rows multimodal positions, [4, P + R].

    Raises:
        ValueError: an image's size does not match its tokens.
        ConfigError: the row has images and `vision` is None.
    """
    ids = torch.from_numpy(row.tokens)
    mask = torch.from_numpy(row.response_mask)
    multi_modal, positions = _multi_modal(row, ids, vision)
    experts = {} if row.routed_experts is None else {"routed_experts": torch.from_numpy(row.routed_experts)}
    return {
        **base,
        **experts,
        "rollout_log_probs": torch.from_numpy(row.logprobs),
        "prompts": ids[: row.prompt_tokens],
        "responses": ids[row.prompt_tokens :],
        "response_mask": mask,
        "loss_mask": mask,
        "input_ids": ids,
        "position_ids": positions,
        "rm_scores": torch.from_numpy(row.scores),
        "num_turns": row.turns,
        "multi_modal_inputs": multi_modal,
        "extra_fields": {"reward_extra_info": dict(reward_extra_info or {})},
    }


def v1_tag(row: Row, global_steps: int, version: int) -> dict[str, Any]:
    """Return a row's tag. verl needs the weight versions as numbers, so `version` replaces unknown ones."""
    tokens, mean, oldest = row.versions(version)
    return {
        "status": "success",
        "prompt_len": row.prompt_tokens,
        "response_len": len(row.response),
        "seq_len": len(row.tokens),
        "global_steps": global_steps,
        "min_global_steps": oldest,
        "max_global_steps": version if row.max_version is None else row.max_version,
        # For our sampler's metrics; verl ignores these.
        "mean_version": mean,
        "trained_tokens": tokens,
    }


def _multi_modal(
    row: Row, ids: torch.Tensor, vision: VisionInputs | None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    if vision is not None:
        return vision.inputs(ids, row.images)
    if row.images:
        raise ConfigError(
            f"a row has {len(row.images)} images, and verl has no processor for this model to prepare them: set "
            "gateway.max_images=0"
        )
    return {}, torch.arange(len(ids))


# --- legacy: DataProto ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LegacyBatch:
    """B rollouts in their order, as the legacy trainer reads them, and counts of what is left out.

    The batch size of `tensors` is [B], and each array is [B].
    """

    tensors: TensorDict
    non_tensors: dict[str, NDArray[Any]]
    missing: NDArray[np.bool_]
    """True where a rollout has no row."""
    left_out_tokens: int
    """Trainable tokens of the segments that were not chosen."""
    moved_turn_rewards: int
    """Nonzero rewards of turns in those segments. They are on the last token of the chosen row."""


def legacy_batch(
    slots: Sequence[Rows | None],
    prompt_length: int,
    response_length: int,
    pad_token_id: int,
    vision: VisionInputs | None = None,
    experts: ExpertShape | None = None,
) -> LegacyBatch:
    """Return B rollouts as P = `prompt_length` + R = `response_length` columns. A missing rollout is None in `slots`.

    The legacy trainer has one row per rollout. Of several segments, the one with the most trained tokens is chosen
    (the later one if equal); tokens of the others are counted in `left_out_tokens`. Only the v1 trainer trains all.
    Make the rows without `own_turns_only`, so that the chosen one has the rewards of all turns.

    A missing rollout keeps its slot, with one prompt token and an empty response. verl calls that an aborted sample
    and leaves it out of its reward metrics. Its estimators take it for a reward of 0; see
    `rollout_backend.verl.advantage`. Loss modes that average over rows (`seq-mean-*`) count it too; `token-mean`
    does not.

    With `vision` the positions are [B, 4, P + R]. With `experts` there is `routed_experts`, [B, P + R, layers, topk].

    Raises:
        ValueError: an image's size does not match its tokens.
        ConfigError: a row has images and `vision` is None.
    """
    count, length = len(slots), prompt_length + response_length
    ids = np.full((count, length), pad_token_id, dtype=np.int64)
    mask = np.zeros((count, response_length), dtype=np.int64)
    scores, log_probs = np.zeros((2, count, response_length), dtype=np.float32)
    # The columns of each rollout's first token and of the end of its tokens. A missing rollout has one token.
    starts = np.full(count, prompt_length - 1)
    stops = np.full(count, prompt_length)
    turns = np.zeros(count, dtype=np.int32)
    missing = np.ones(count, dtype=bool)
    # For a vision model; otherwise positions follow from the places of the tokens.
    positions = torch.zeros(count, 4, length if vision else 0, dtype=torch.int64)
    routed = np.zeros((count, length, experts.layers, experts.topk) if experts else 0, dtype=np.int16)
    images = np.empty(count, dtype=object)
    images[:] = [{} for _ in slots]
    left_out = moved = 0
    for i, rows in enumerate(slots):
        if not rows:
            continue
        row = max(reversed(rows.rows), key=lambda row: row.trained_tokens)
        left_out += sum(other.trained_tokens for other in rows) - row.trained_tokens
        moved += sum(other.turn_rewards for other in rows) - row.turn_rewards
        start, end = prompt_length - row.prompt_tokens, len(row.response)
        starts[i], stops[i] = start, prompt_length + end
        ids[i, start : prompt_length + end] = row.tokens
        mask[i, :end] = row.response_mask
        scores[i, :end] = row.scores
        log_probs[i, :end] = row.logprobs
        turns[i] = row.turns
        missing[i] = False
        if row.routed_experts is not None:
            routed[i, start : prompt_length + end] = row.routed_experts
        if vision is not None or row.images:
            images[i], of_row = _multi_modal(row, torch.from_numpy(row.tokens), vision)
            positions[i, :, start : prompt_length + end] = of_row
    columns = np.arange(length)
    places = columns - starts[:, None]
    arrays = {
        "prompts": ids[:, :prompt_length].copy(),
        "responses": ids[:, prompt_length:].copy(),
        "response_mask": mask,
        "rm_scores": scores,
        "rollout_log_probs": log_probs,
        **({"routed_experts": routed} if experts else {}),
        "input_ids": ids,
        "attention_mask": ((places >= 0) & (columns < stops[:, None])).astype(np.int64),
    }
    # Padding repeats the position of the nearest token.
    if vision is None:
        arrays["position_ids"] = np.clip(places, 0, (stops - starts - 1)[:, None], out=places)
    tensors = {name: torch.from_numpy(values) for name, values in arrays.items()}
    if vision is not None:
        tensors["position_ids"] = positions
    return LegacyBatch(
        tensors=TensorDict(tensors, batch_size=[len(slots)]),
        non_tensors={"multi_modal_inputs": images, "__num_turns__": turns},
        missing=missing,
        left_out_tokens=left_out,
        moved_turn_rewards=moved,
    )


def validation_rewards(batch: LegacyBatch) -> NDArray[Any]:
    """Return the reward of each rollout, None if it is missing, and set the scores of missing ones to NaN.

    verl's `reward` of a row is the sum of its scores, so that of a missing rollout would count as 0. verl leaves None
    out of the means of other values, and logs one named `acc` under `val-core/` instead of `reward`.
    """
    scores = batch.tensors["rm_scores"]
    scores[torch.from_numpy(batch.missing)] = math.nan
    rewards: NDArray[Any] = scores.sum(-1).numpy().astype(object)
    rewards[batch.missing] = None
    return rewards
