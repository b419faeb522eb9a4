"""Leave out unfinished episodes instead of training their reward (`training.mask`). Pure.

Invariant: a masked rollout has no row, so it is in no gradient and in no baseline. A group with too few others has no
rows either.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from agent_wrapper.contract import Outcome, Rollout
from rollout_backend.config.training import Mask
from rollout_backend.verl.rows import Rows


def mask_group(rollouts: Sequence[Rollout], made: Sequence[Rows], masks: Collection[Mask], needed: int) -> list[Rows]:
    """Return the rows of a group's rollouts without those of masked ones.

    Empty if rollouts are masked and fewer than `needed` others can be trained, since advantages compare rollouts.
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
