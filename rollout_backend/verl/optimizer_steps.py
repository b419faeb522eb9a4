"""Keep the number of optimizer steps of verl's v1 trainer the same, however many rows a batch has.

verl splits a batch into mini-batches of `ppo_mini_batch_size` * n rows and takes an optimizer step for each. A
rollout has a row for each segment, so twice the segments would be twice the steps, each over half of the rollouts,
and the last one over the few rows that are left.

Invariants:

- A batch of P prompts has ceil(P / `ppo_mini_batch_size`) mini-batches per epoch, as if each rollout had one row.
- Mini-batches have the same number of rows. They differ by at most one row that is not padding, if one rank trains.
- Nothing changes for a batch in which each rollout has one row.
"""

from __future__ import annotations

import math
from typing import Any

from transfer_queue import KVBatchMeta

from rollout_backend.verl.verl_api import need_critic, upsample_batch_to_divisible_size

_ANY_TOKEN = 0  # of padding rows, which are masked


class StableSteps:
    """Scales verl's mini-batches with the rows of each batch. verl reads their size for each batch."""

    def __init__(self, config: Any) -> None:
        """`config` is verl's whole tree of settings, the one that its trainer reads."""
        sections = [config.actor_rollout_ref.actor, *([config.critic] if need_critic(config) else [])]
        self._sections = [(section, int(section.ppo_mini_batch_size)) for section in sections]
        self._n = int(config.actor_rollout_ref.rollout.n)

    def apply(self, batch: KVBatchMeta, prompts: int) -> KVBatchMeta:
        """Set the size of mini-batches for a batch of `prompts` prompts. Return the batch, padded if necessary."""
        sizes = [size for _, size in self._sections]
        least = math.lcm(*sizes)
        rows = math.ceil(prompts / least) * least * self._n  # if each rollout has one row
        factor = max(1, math.ceil(len(batch) / rows))
        for section, size in self._sections:
            section.ppo_mini_batch_size = factor * size
        mini_batches = rows // (min(sizes) * self._n)
        if mini_batches == 1 or len(batch) < mini_batches:
            return batch  # verl pads it to whole mini-batches
        padded = upsample_batch_to_divisible_size(batch, factor * rows, _ANY_TOKEN)
        padded.reorder(_spread(len(batch), len(padded)))
        return padded


def _spread(rows: int, total: int) -> list[int]:
    """Return the order of `total` rows in which the first `rows` of them are evenly spread among the others."""
    row, padding = iter(range(rows)), iter(range(rows, total))
    return [next(row if (i + 1) * rows // total > i * rows // total else padding) for i in range(total)]
