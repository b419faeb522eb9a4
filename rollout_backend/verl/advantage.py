"""Advantage estimators for verl that compare rollouts. Importing this module registers them.

    algorithm.adv_estimator=grpo_skip_missing      # GRPO; Dr. GRPO with algorithm.norm_adv_by_std_in_grpo=False
    algorithm.adv_estimator=rloo_skip_missing      # RLOO; `ESTIMATORS` has the others

No other setting is needed: both trainers load the agent loop manager in the process that computes advantages (the
TaskRunner) before their first step, and verl looks up the estimator at its first use. A trainer that does not load
the manager needs `VERL_USE_EXTERNAL_MODULES=rollout_backend.verl` in its environment.

Differences from verl's own estimators:

- A rollout counts once, however many rows it has. verl's, except for `grpo`, count each row as a rollout.
- A rollout without a trained token is missing and enters no statistic. The legacy trainer keeps a slot for each
  rollout, and verl's estimators take an empty slot for a reward of 0, so an agent lost to the infrastructure would
  raise the others' advantage. Rows that pad a batch, and rows that rollout correction rejects as a whole, are
  missing, too.
- A group with a single survivor has advantage 0 and enters no statistic. verl's estimators give it its raw reward.
  Without another rollout to compare with, the raw reward does not measure quality, and it outweighs a normalised
  advantage. Therefore `rollout.n` must be at least 2.
- If each rollout has one row and none is missing, the results equal verl's.

A rollout's reward is the sum of the scores of its row: the rollout's reward and all its turn rewards, wherever they
are in the row. All trained tokens of the rollout get the same advantage. verl's `gae` and `reinforce_plus_plus` use
the places of rewards instead, and take each row for a rollout: see `takes_rows_for_rollouts`.

Write your own with `register_rollout_estimator`.

Estimators receive each row's `uid` field and nothing else that names the rollout. So under these estimators a v1
training row's `uid` is `row_uid(...)`. The only other reader of that field is the actor's prefix grouper, which then
groups nothing. A validation row keeps the prompt's uid, by which verl averages a prompt's rollouts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollout_backend.verl.verl_api import register_adv_est, root_of

_ROW_UID = re.compile(r"(.+)_(\d+)_(\d+)")
# verl's estimators use the same epsilon.
_EPSILON = 1e-6

RowEstimator = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""An estimator as verl calls it, with rows."""
ESTIMATORS: dict[str, RowEstimator] = {}
"""The estimators that compare rollouts, by name: those below, and those that users register."""


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


@dataclass(frozen=True, eq=False)
class Rollouts:
    """The N rollouts of a batch that have another one of their prompt to compare with. Each tensor is [N].

    Sums are float64, so that equal rewards deviate from their mean by exactly 0.
    """

    reward: torch.Tensor
    tokens: torch.Tensor
    """Number of trained tokens in all rows of the rollout."""
    group: torch.Tensor
    """Number of the rollout's prompt."""

    def group_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return for each rollout the sum over its group, [N]."""
        return _group_sum(values, self.group)

    @property
    def count(self) -> torch.Tensor:
        """The number of rollouts in each rollout's group, at least 2, [N]."""
        return self.group_sum(torch.ones_like(self.reward))

    @property
    def deviation(self) -> torch.Tensor:
        """The difference between each reward and the mean of its group, [N]."""
        return self.reward - self.group_sum(self.reward) / self.count


Settings = Mapping[str, Any]
"""verl's section `algorithm`, or a part of it."""
RolloutEstimator = Callable[[Rollouts, Settings], torch.Tensor]
"""Returns the advantage of each rollout, [N]."""


def register_rollout_estimator(estimator: RolloutEstimator) -> RowEstimator:
    """Register a function of rollouts as an estimator of verl: `algorithm.adv_estimator` is the function's name.

    All trained tokens of a rollout get the advantage that the function returns. A rollout that is missing, or the
    only one in its group, gets 0, and the function does not see it.
    """

    @functools.wraps(estimator)
    def of_rows(
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        index: Sequence[str],
        config: Settings | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            advantages = _of_rows(estimator, token_level_rewards, response_mask, index, config or {})
        return advantages, advantages

    ESTIMATORS[estimator.__name__] = register_adv_est(estimator.__name__)(of_rows)
    return of_rows


@register_rollout_estimator
def grpo_skip_missing(rollouts: Rollouts, settings: Settings) -> torch.Tensor:
    """Compute GRPO: (r - mean) / (std + epsilon), or r - mean for Dr. GRPO."""
    return _by_std(rollouts.deviation, rollouts, settings)


@register_rollout_estimator
def rloo_skip_missing(rollouts: Rollouts, settings: Settings) -> torch.Tensor:
    """Compute RLOO: the reward minus the mean of the others of the group."""
    return rollouts.deviation * rollouts.count / (rollouts.count - 1)


@register_rollout_estimator
def reinforce_plus_plus_baseline_skip_missing(rollouts: Rollouts, settings: Settings) -> torch.Tensor:
    """Compute REINFORCE++-baseline: r - mean, whitened over all trained tokens of the batch."""
    tokens, values = rollouts.tokens, rollouts.deviation
    values = values - (tokens * values).sum() / tokens.sum()
    variance = (tokens * values.square()).sum() / (tokens.sum() - 1)
    return values * torch.rsqrt(variance + 1e-8)


@register_rollout_estimator
def gpg_skip_missing(rollouts: Rollouts, settings: Settings) -> torch.Tensor:
    """Compute GPG: r - mean, times the number of rollouts per rollout whose reward is not 0."""
    return rollouts.deviation * len(rollouts.reward) / rollouts.reward.count_nonzero().clamp(min=1)


@register_rollout_estimator
def opo_skip_missing(rollouts: Rollouts, settings: Settings) -> torch.Tensor:
    """Compute OPO: the reward minus the group's mean, in which each reward weighs as much as its tokens."""
    mean = rollouts.group_sum(rollouts.tokens * rollouts.reward) / rollouts.group_sum(rollouts.tokens)
    return rollouts.reward - mean


@register_rollout_estimator
def grpo_passk_skip_missing(rollouts: Rollouts, settings: Settings) -> torch.Tensor:
    """Compute GRPO for pass@k: the best rollout of a group gets its lead over the second, the others get 0."""
    lead = torch.zeros_like(rollouts.reward)
    for group in rollouts.group.unique():
        places = (rollouts.group == group).nonzero()[:, 0]
        (best, second), order = rollouts.reward[places].topk(2)
        lead[places[order[0]]] = best - second
    return _by_std(lead, rollouts, settings)


def _by_std(values: torch.Tensor, rollouts: Rollouts, settings: Settings) -> torch.Tensor:
    """Divide by the standard deviation of the group's rewards, unless `norm_adv_by_std_in_grpo` is off."""
    if not settings.get("norm_adv_by_std_in_grpo", True):
        return values
    variance = rollouts.group_sum(rollouts.deviation.square()) / (rollouts.count - 1)
    return values / (variance.sqrt() + _EPSILON)


def _of_rows(
    estimator: RolloutEstimator,
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[str],
    settings: Settings,
) -> torch.Tensor:
    """Return the advantages of B rows, [B, R]. `index` holds the `uid` of each row."""
    rollout_of_row, last_row, group = _rollouts_of(index, response_mask.device)
    reward = token_level_rewards.sum(-1).double()[last_row]
    row_tokens = response_mask.sum(-1).double()
    tokens = torch.zeros_like(reward).index_add(0, rollout_of_row, row_tokens)
    present = tokens > 0
    compared = present & (_group_sum(present.double(), group) > 1)
    advantage = torch.zeros_like(reward)
    if compared.any():
        rollouts = Rollouts(reward[compared], tokens[compared], group[compared])
        advantage[compared] = estimator(rollouts, settings).to(advantage)
    of_row = advantage[rollout_of_row] * _weights(settings, row_tokens, tokens[rollout_of_row], present.sum())
    return of_row.to(torch.float32).unsqueeze(-1) * response_mask


def _weights(
    settings: Settings, row_tokens: torch.Tensor, rollout_tokens: torch.Tensor, rollouts: torch.Tensor
) -> torch.Tensor | float:
    """Return the weight of each row with which each rollout weighs the same in the loss; 1 unless `weigh_rollouts`.

    verl divides the loss of a mini-batch by its rows or by its tokens (`loss_agg_mode`), padding rows included.
    """
    root = root_of(settings)
    if "trainer" not in root or not (root.trainer.v1.sampler.get("sampler_kwargs") or {}).get("weigh_rollouts"):
        return 1.0
    mode, share = str(root.actor_rollout_ref.actor.loss_agg_mode), rollout_tokens.clamp(min=1)
    if mode.startswith("token-"):
        return row_tokens.sum() / (rollouts * share)
    if mode == "seq-mean-token-mean":
        return len(row_tokens) / rollouts * row_tokens / share
    return len(row_tokens) / rollouts


def _rollouts_of(index: Sequence[str], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
    found = (of_row, [i for _, i in last], group)
    of_each, last_row, prompt_of = (torch.tensor(each, device=device) for each in found)
    return of_each, last_row, prompt_of


def _group_sum(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    sums = torch.zeros(int(group.max()) + 1, dtype=values.dtype, device=values.device)
    return sums.index_add(0, group, values)[group]
