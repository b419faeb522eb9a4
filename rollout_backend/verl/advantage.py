"""Advantage estimators for verl that skip missing rollouts. Importing this module registers them.

    algorithm.adv_estimator=grpo_skip_missing      # GRPO; Dr. GRPO with algorithm.norm_adv_by_std_in_grpo=False
    algorithm.adv_estimator=rloo_skip_missing      # RLOO

No other setting is needed: both trainers load the agent loop manager in the process that computes advantages (the
TaskRunner) before their first step, and verl looks up the estimator at its first use. A trainer that does not load
the manager needs `VERL_USE_EXTERNAL_MODULES=rollout_backend.verl` in its environment.

Differences from verl's own estimators:

- A row whose mask is 0 throughout is missing and enters no baseline. The legacy trainer keeps a slot for each
  rollout. verl's estimators take an empty slot for a reward of 0, so an agent lost to the infrastructure would raise
  the others' advantage. A row that rollout correction rejects as a whole counts as missing, too.
- A group with a single survivor has advantage 0. verl's `grpo` and `rloo` give it its raw reward. Without another
  rollout to compare with, the raw reward does not measure quality, and it outweighs a normalised advantage.
  Therefore `rollout.n` must be at least 2.
- If no rollout is missing, the results equal verl's.

A session's reward is the sum of the scores of its row: the rollout's reward and all its turn rewards, wherever they
are in the row. All trained tokens of the session get the same advantage. verl's `gae` and `reinforce_plus_plus` use
the places of rewards instead, and take each row for a rollout: see `takes_rows_for_rollouts`.

Rollouts with several rows (v1 only): verl's `grpo` takes a session's reward from its last row and gives all of its
rows that advantage. It recognises sessions by the rows' keys, but passes no keys to other estimators. These would see
each row as a rollout and count a session once per segment. They do receive each row's `uid` field, so under these
estimators a training row's `uid` is `row_uid(...)`. The only other reader of that field is the actor's prefix
grouper, which then groups nothing. A validation row keeps the prompt's uid, by which verl averages a prompt's
rollouts.

The v1 trainer writes no row for a missing rollout. It pads the batch with zero-mask rows, each with its own `uid`, so
they affect no group. With v1, verl's own `grpo` is therefore wrong only for a single survivor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollout_backend.verl.verl_api import register_adv_est

_ROW_UID = re.compile(r"(.+)_(\d+)_(\d+)")


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


def grpo_skip_missing(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[str],
    epsilon: float = 1e-6,
    config: Mapping[str, Any] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute GRPO over present sessions: (r - mean) / (std + epsilon), or r - mean for Dr. GRPO.

    `token_level_rewards` and `response_mask` are [B, R]; `index` holds each row's `uid`. Returns the advantages
    twice (as advantages and as returns), [B, R].
    """
    by_std = config is None or bool(config.get("norm_adv_by_std_in_grpo", True))
    with torch.no_grad():
        sessions = _sessions(token_level_rewards, response_mask, index)
        deviation = sessions.reward - sessions.mean
        if by_std:
            variance = sessions.group_sum(deviation.square()) / (sessions.count - 1).clamp(min=1)
            deviation = deviation / (variance.sqrt() + epsilon)
        advantages = sessions.spread(deviation, response_mask)
    return advantages, advantages


def rloo_skip_missing(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[str],
    config: Mapping[str, Any] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute RLOO over present sessions: the reward minus the others' mean. Shapes as in `grpo_skip_missing`."""
    with torch.no_grad():
        sessions = _sessions(token_level_rewards, response_mask, index)
        others = (sessions.count - 1).clamp(min=1)
        advantages = sessions.spread((sessions.reward - sessions.mean) * sessions.count / others, response_mask)
    return advantages, advantages


@dataclass(frozen=True, eq=False)
class _Sessions:
    """S sessions in their groups. Sums are float64, so that equal rewards deviate from their mean by exactly 0."""

    reward: torch.Tensor  # [S]
    present: torch.Tensor  # [S], bool
    group: torch.Tensor  # [S]
    of_row: torch.Tensor  # [B], each row's session
    count: torch.Tensor  # [S], present sessions in the session's group
    mean: torch.Tensor  # [S], their mean reward

    def group_sum(self, values: torch.Tensor) -> torch.Tensor:
        return _group_sum(values, self.present, self.group)

    def spread(self, advantage: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
        """Expand [S] to [B, R]: each trained token gets its session's advantage, or 0 if that is missing or alone."""
        advantage = torch.where(self.present & (self.count > 1), advantage, 0.0)
        return advantage[self.of_row].to(torch.float32).unsqueeze(-1) * response_mask


def _sessions(rewards: torch.Tensor, mask: torch.Tensor, index: Sequence[str]) -> _Sessions:
    sessions: dict[object, int] = {}
    groups: dict[str, int] = {}
    last: list[tuple[int, int]] = []  # by session: the index and the row of its last segment
    of_row, group = [], []
    for i, uid in enumerate(index):
        match = _ROW_UID.fullmatch(str(uid))
        prompt, key, segment = (match[1], (match[1], match[2]), int(match[3])) if match else (str(uid), i, 0)
        session = sessions.setdefault(key, len(sessions))
        if session == len(last):
            last.append((segment, i))
            group.append(groups.setdefault(prompt, len(groups)))
        last[session] = max(last[session], (segment, i))
        of_row.append(session)
    device = rewards.device
    rows = torch.tensor(of_row, device=device)
    in_group = torch.tensor(group, device=device)
    reward = rewards.sum(-1).double()[[i for _, i in last]]
    trained = torch.zeros(len(last), dtype=torch.float64, device=device)
    present = trained.index_add(0, rows, mask.sum(-1).double()) > 0
    count = _group_sum(torch.ones_like(reward), present, in_group)
    mean = _group_sum(reward, present, in_group) / count.clamp(min=1)
    return _Sessions(reward, present, in_group, rows, count, mean)


def _group_sum(values: torch.Tensor, present: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Return for each session the sum over the present sessions of its group, [S]."""
    sums = torch.zeros(int(group.max()) + 1, dtype=values.dtype, device=values.device)
    return sums.index_add(0, group, torch.where(present, values, 0.0))[group]


ESTIMATORS = {"grpo_skip_missing": grpo_skip_missing, "rloo_skip_missing": rloo_skip_missing}
for _name, _estimator in ESTIMATORS.items():
    register_adv_est(_name)(_estimator)
