"""The `training` section."""

from __future__ import annotations

from typing import Literal

from rollout_backend.config.section import Section

Mask = Literal["agent_error", "last_reply_cut", "row_cut"]


class TrainingConfig(Section):
    """What verl trains of the collected rollouts. `rollout run` trains nothing, so it does not use this section. See
    [training-options.md](training-options.md#mask-truncated-episodes)."""

    mask: tuple[Mask, ...] = ()
    """Rollouts that are not trained although they have a reward, and are in no baseline. `last_reply_cut`: those
    whose last reply ended at `max_tokens` or at the end of the context. `row_cut`: those with sampled tokens beyond
    `data.max_response_length`. `agent_error`: those whose agent failed and scored itself. Default: none."""
