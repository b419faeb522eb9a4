"""Advantage estimators for verl that compare rollouts. Importing this module registers them.

    algorithm.adv_estimator=grpo_skip_missing      # GRPO; Dr. GRPO with algorithm.norm_adv_by_std_in_grpo=False
    algorithm.adv_estimator=rloo_skip_missing      # RLOO; `ESTIMATORS` has the others

No other setting is needed: both trainers load the agent loop manager in the process that computes advantages (the
TaskRunner) before their first step, and verl looks up the estimator at its first use. A trainer that does not load
the manager needs `VERL_USE_EXTERNAL_MODULES=rollout_backend.verl` in its environment.

Differences from verl's own estimators:

- A rollout counts once, however many rows it has. verl's, except for `grpo`, count each row as a rollout.
- A rollout without a trained token is missing and affects no statistic. The legacy trainer keeps a slot for each
  rollout, and verl's estimators treat an empty slot as a reward of 0, so an agent lost to the infrastructure would
  raise the others' advantage. Rows that pad a batch, and rows that rollout correction rejects as a whole, are also
  missing.
- A group with a single survivor has advantage 0 and affects no statistic. verl's estimators give it its raw reward.
  Without another rollout to compare with, the raw reward does not measure quality, and it outweighs a normalised
  advantage. Therefore `rollout.n` must be at least 2.
- If each rollout has one row and none is missing, the results equal verl's.

A rollout's reward is the sum of the scores of its row: the rollout's reward and all its turn rewards, wherever they
are in the row. All trained tokens of the rollout get the same advantage. verl's `gae` and `reinforce_plus_plus` use
the positions of rewards instead, and treat each row as a rollout: see `takes_rows_for_rollouts`.

Write your own with `register_rollout_estimator`.

Estimators receive each row's `uid` field and nothing else that names the rollout. So under these estimators a v1
training row's `uid` is `row_uid(...)`. The only other reader of that field is the actor's prefix grouper, which then
groups nothing. A validation row keeps the prompt's uid, by which verl averages a prompt's rollouts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollout_backend.core import advantages
from rollout_backend.core.advantages import Array, RolloutEstimator, Settings
from rollout_backend.verl.verl_api import register_adv_est, root_of

_ROW_UID = re.compile(r"(.+)_(\d+)_(\d+)")
_Places = NDArray[np.int64]

RowEstimator = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""An estimator as verl calls it, with rows."""
ESTIMATORS: dict[str, RowEstimator] = {}
"""The estimators that compare rollouts, by name: ours and the ones that users register."""


def row_uid(uid: str, session: int, index: int) -> str:
    """Return the `uid` of a v1 training row under these estimators: its key. verl's own need the prompt's uid."""
    return f"{uid}_{session}_{index}"


def needs_row_uids(adv_estimator: str) -> bool:
    """Return whether training rows need `row_uid(...)` as `uid` under this estimator, instead of the prompt's uid."""
    return adv_estimator in ESTIMATORS


def takes_rows_for_rollouts(adv_estimator: str) -> bool:
    """Return whether this estimator of verl adds up the rewards that follow each token of a row.

    A turn reward must then be in the row of its turn alone. The other estimators only use the sum of a row's scores.
    """
    return adv_estimator in ("gae", "reinforce_plus_plus")


def register_rollout_estimator(estimator: RolloutEstimator, name: str = "") -> RowEstimator:
    """Register a function of rollouts as an estimator of verl: `algorithm.adv_estimator` is its name, by default the
    function's.

    All trained tokens of a rollout get the advantage that the function returns. A rollout that is missing, or the
    only one in its group, gets 0, and the function does not see it.
    """
    name = name or estimator.__name__

    def of_rows(
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        index: Sequence[str],
        config: Settings | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            found = _of_rows(estimator, token_level_rewards, response_mask, index, config or {})
        return found, found

    of_rows.__name__ = name
    ESTIMATORS[name] = register_adv_est(name)(of_rows)
    return of_rows


for _name, _estimator in advantages.ESTIMATORS.items():
    register_rollout_estimator(_estimator, f"{_name}_skip_missing")


def _of_rows(
    estimator: RolloutEstimator,
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[str],
    settings: Settings,
) -> torch.Tensor:
    """Return the advantages of B rows, [B, R]. `index` holds the `uid` of each row."""
    rollout_of_row, last_row, group = _rollouts_of(index)
    reward = token_level_rewards.sum(-1).double().numpy(force=True)[last_row]
    row_tokens = response_mask.sum(-1).double().numpy(force=True)
    tokens = np.bincount(rollout_of_row, weights=row_tokens).astype(np.float64)
    advantage = advantages.advantages_of(estimator, reward, tokens, group, settings)
    weights = _weights(settings, row_tokens, tokens[rollout_of_row], max(1, int((tokens > 0).sum())))
    of_row = torch.from_numpy(advantage[rollout_of_row] * weights).to(response_mask.device, torch.float32)
    return of_row.unsqueeze(-1) * response_mask


def _weights(settings: Settings, row_tokens: Array, rollout_tokens: Array, rollouts: int) -> Array | float:
    """Return the weight of each row with which each rollout weighs the same in the loss; 1 unless `weigh_rollouts`.

    verl divides the loss of a mini-batch by its rows or by its tokens (`loss_agg_mode`), padding rows included.
    """
    root = root_of(settings)
    if "trainer" not in root or not (root.trainer.v1.sampler.get("sampler_kwargs") or {}).get("weigh_rollouts"):
        return 1.0
    mode, share = str(root.actor_rollout_ref.actor.loss_agg_mode), np.maximum(rollout_tokens, 1)
    if mode.startswith("token-"):
        return np.asarray(row_tokens.sum() / (rollouts * share))
    if mode == "seq-mean-token-mean":
        return len(row_tokens) / rollouts * row_tokens / share
    return len(row_tokens) / rollouts


def _rollouts_of(index: Sequence[str]) -> tuple[_Places, _Places, _Places]:
    """Return the rollout of each row, [B], and of each rollout its last row and the number of its prompt, [N]."""
    rollouts: dict[object, int] = {}
    groups: dict[str, int] = {}
    # For each rollout, the index and the row of its last segment.
    last: list[tuple[int, int]] = []
    of_row, group = [], []
    for i, uid in enumerate(index):
        match = _ROW_UID.fullmatch(str(uid))
        prompt, key, segment = (match[1], (match[1], match[2]), int(match[3])) if match else (str(uid), i, 0)
        rollout = rollouts.setdefault(key, len(rollouts))
        if rollout == len(last):
            last.append((segment, i))
            group.append(groups.setdefault(prompt, len(groups)))
        last[rollout] = max(last[rollout], (segment, i))
        of_row.append(rollout)
    of_each, last_row, prompt_of = (np.asarray(each, np.int64) for each in (of_row, [i for _, i in last], group))
    return of_each, last_row, prompt_of
