"""Compute the advantages of rollouts, for verl and for training services. Pure.

Invariants:

- A rollout counts once, however many segments it has.
- A rollout without a trained token, or the only one of its group that has some, enters no statistic. Its advantage
  is 0.
- Sums are float64, so that equal rewards deviate from their mean by exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# verl's estimators use the same epsilon.
_EPSILON = 1e-6


@dataclass(frozen=True, eq=False)
class Rollouts:
    """The N rollouts of a batch that have another one of their prompt to compare with. Each array is [N]."""

    reward: Array
    tokens: Array
    """Number of trained tokens in all rows of the rollout."""
    group: NDArray[np.int64]
    """Number of the rollout's prompt."""

    def group_sum(self, values: Array) -> Array:
        """Return for each rollout the sum over its group, [N]."""
        return _group_sum(values, self.group)

    @property
    def count(self) -> Array:
        """The number of rollouts in each rollout's group, at least 2, [N]."""
        return self.group_sum(np.ones_like(self.reward))

    @property
    def deviation(self) -> Array:
        """The difference between each reward and the mean of its group, [N]."""
        return self.reward - self.group_sum(self.reward) / self.count


Settings = Mapping[str, Any]
"""verl's section `algorithm`, or a part of it."""
RolloutEstimator = Callable[[Rollouts, Settings], Array]
"""Returns the advantage of each rollout, [N]."""


def advantages_of(
    estimator: RolloutEstimator, reward: Array, tokens: Array, group: NDArray[np.int64], settings: Settings
) -> Array:
    """Return the advantage of each rollout. `tokens` is 0 for a missing one."""
    present = tokens > 0
    compared = present & (_group_sum(present.astype(np.float64), group) > 1)
    advantage = np.zeros(len(reward))
    if compared.any():
        found = estimator(Rollouts(reward[compared], tokens[compared], group[compared]), settings)
        advantage[compared] = np.asarray(found)
    return advantage


def grpo(rollouts: Rollouts, settings: Settings) -> Array:
    """Compute GRPO: (r - mean) / (std + epsilon), or r - mean for Dr. GRPO."""
    return _by_std(rollouts.deviation, rollouts, settings)


def rloo(rollouts: Rollouts, settings: Settings) -> Array:
    """Compute RLOO: the reward minus the mean of the others of the group."""
    return rollouts.deviation * rollouts.count / (rollouts.count - 1)


def reinforce_plus_plus_baseline(rollouts: Rollouts, settings: Settings) -> Array:
    """Compute REINFORCE++-baseline: r - mean, whitened over all trained tokens of the batch."""
    tokens, values = rollouts.tokens, rollouts.deviation
    values = values - (tokens * values).sum() / tokens.sum()
    variance = (tokens * np.square(values)).sum() / (tokens.sum() - 1)
    return np.asarray(values / np.sqrt(variance + 1e-8))


def gpg(rollouts: Rollouts, settings: Settings) -> Array:
    """Compute GPG: r - mean, times the number of rollouts per rollout whose reward is not 0."""
    return rollouts.deviation * len(rollouts.reward) / max(1, int((rollouts.reward != 0).sum()))


def opo(rollouts: Rollouts, settings: Settings) -> Array:
    """Compute OPO: the reward minus the group's mean, in which each reward weighs as much as its tokens."""
    mean = rollouts.group_sum(rollouts.tokens * rollouts.reward) / rollouts.group_sum(rollouts.tokens)
    return rollouts.reward - mean


def grpo_passk(rollouts: Rollouts, settings: Settings) -> Array:
    """Compute GRPO for pass@k: the best rollout of a group gets its lead over the second, the others get 0."""
    lead = np.zeros_like(rollouts.reward)
    for group in np.unique(rollouts.group):
        places = np.flatnonzero(rollouts.group == group)
        second, best = places[np.argsort(rollouts.reward[places], kind="stable")[-2:]]
        lead[best] = rollouts.reward[best] - rollouts.reward[second]
    return _by_std(lead, rollouts, settings)


ESTIMATORS: Mapping[str, RolloutEstimator] = {
    each.__name__: each for each in (grpo, rloo, reinforce_plus_plus_baseline, gpg, opo, grpo_passk)
}
"""The estimators by name."""


def _by_std(values: Array, rollouts: Rollouts, settings: Settings) -> Array:
    """Divide by the standard deviation of the group's rewards, unless `norm_adv_by_std_in_grpo` is off."""
    if not settings.get("norm_adv_by_std_in_grpo", True):
        return values
    variance = rollouts.group_sum(np.square(rollouts.deviation)) / (rollouts.count - 1)
    return np.asarray(values / (np.sqrt(variance) + _EPSILON))


def _group_sum(values: Array, group: NDArray[np.int64]) -> Array:
    sums = np.bincount(group, weights=values).astype(np.float64)
    return sums[group]
