"""Advantage estimators for verl that leave out what is missing. Importing this module registers them.

    algorithm.adv_estimator=grpo_present      # GRPO; Dr. GRPO with algorithm.norm_adv_by_std_in_grpo=False
    algorithm.adv_estimator=rloo_present      # RLOO

Nothing else is to be done: both trainers load the agent loop manager by name in the process that computes advantages
(the TaskRunner), before their first step, and verl looks the estimator up at its first use. A trainer that does not
load the manager needs `VERL_USE_EXTERNAL_MODULES=rollout_backend.verl` in its environment.

What they do that verl's own do not:

- A row whose mask is 0 throughout is missing, and no one's baseline counts it. The legacy trainer keeps a slot for
  each rollout; verl's estimators take the empty one for a reward of 0, so an agent lost to the infrastructure would
  lift the others' advantage. A row that rollout correction rejects whole counts as missing, too.
- A group with a single survivor has advantage 0. verl's `grpo` and `rloo` give it its raw reward: without another
  rollout to compare with, that is no measure of how good it was, and it outweighs a normalised advantage. So
  `rollout.n` must be 2 at least.
- With nothing missing, they equal verl's.

Several rows of one rollout (v1 only). verl's `grpo` takes a session's reward from its last row and gives all its rows
that advantage. It recognises sessions by the rows' keys, which it does not hand to other estimators: those see each
row as a rollout of its own, and count a session once per segment. What reaches them is each row's field `uid`; so
under these estimators write `row_uid(...)` there, and sessions are recognised by it. verl uses that field of a
training row for nothing else but the actor's prefix grouper, which then groups nothing. A validation row keeps the
prompt's uid: verl takes the mean over a prompt's rollouts by it.

The v1 trainer writes no row for a missing rollout. It pads the batch with zero-mask rows, but those have a `uid` of
their own and touch no group. Under it, stock `grpo` is thus wrong for a single survivor only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_adv_est

_ROW_UID = re.compile(r"(.+)_(\d+)_(\d+)")


def row_uid(uid: str, session: int, index: int) -> str:
    """What a v1 row's `uid` must be under these estimators: the row's key. verl's own need the prompt's uid."""
    return f"{uid}_{session}_{index}"


def knows_sessions(adv_estimator: str) -> bool:
    """Whether a training row's `uid` must be `row_uid(...)` under this estimator, and not the prompt's."""
    return adv_estimator in ESTIMATORS


def grpo_present(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[str],
    epsilon: float = 1e-6,
    config: Mapping[str, Any] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GRPO among the present: (r - mean) / (std + epsilon), or without the std for Dr. GRPO.

    `token_level_rewards` and `response_mask` are [B, R], `index` holds each row's `uid`. Returns advantages and
    returns, which are equal, [B, R].
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


def rloo_present(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[str],
    config: Mapping[str, Any] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RLOO among the present: a reward minus the mean of the others'. Shapes as in `grpo_present`."""
    with torch.no_grad():
        sessions = _sessions(token_level_rewards, response_mask, index)
        others = (sessions.count - 1).clamp(min=1)
        advantages = sessions.spread((sessions.reward - sessions.mean) * sessions.count / others, response_mask)
    return advantages, advantages


@dataclass(frozen=True, eq=False)
class _Sessions:
    """S sessions in their groups. Sums are in float64, so that equal rewards deviate from their mean by nothing."""

    reward: torch.Tensor  # [S]
    present: torch.Tensor  # [S], bool
    group: torch.Tensor  # [S]
    of_row: torch.Tensor  # [B]: a row's session
    count: torch.Tensor  # [S]: the present of its group
    mean: torch.Tensor  # [S]: their mean reward

    def group_sum(self, values: torch.Tensor) -> torch.Tensor:
        return _group_sum(values, self.present, self.group)

    def spread(self, advantage: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
        """[S] to [B, R]: to each trained token of a session's rows; 0 to who is missing or alone."""
        advantage = torch.where(self.present & (self.count > 1), advantage, 0.0)
        return advantage[self.of_row].to(torch.float32).unsqueeze(-1) * response_mask


def _sessions(rewards: torch.Tensor, mask: torch.Tensor, index: Sequence[str]) -> _Sessions:
    sessions: dict[object, int] = {}
    groups: dict[str, int] = {}
    last: list[tuple[int, int]] = []  # of each session: the number and the row of its last segment
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
    """[S]: to each session, the sum of its group's present."""
    sums = torch.zeros(int(group.max()) + 1, dtype=values.dtype, device=values.device)
    return sums.index_add(0, group, torch.where(present, values, 0.0))[group]


ESTIMATORS = {"grpo_present": grpo_present, "rloo_present": rloo_present}
for _name, _estimator in ESTIMATORS.items():
    register_adv_est(_name)(_estimator)
