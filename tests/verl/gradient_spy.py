"""The dataset module of the trainer tests. It registers an estimator that wraps ours and records each call.

The actor is updated with what an estimator returns. Each line of SPY_FILE is one call, which is one step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_adv_est

from rollout_backend.verl import advantage, manager
from rollout_backend.verl.dataset import PayloadDataset as PayloadDataset
from rollout_backend.verl.task_rows import payload_of

GROUPS: dict[str, str] = {}  # the name of each group by verl's uid


def named_payload_of(row: Mapping[str, Any], **more: bool) -> dict[str, Any]:
    payload = payload_of(row, **more)
    GROUPS[str(row["uid"])] = str(payload.get("name"))
    return payload


def spied(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Sequence[str], **more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    advantages, returns = advantage.ESTIMATORS["grpo_skip_missing"](token_level_rewards, response_mask, index, **more)
    rows = [
        {
            "group": GROUPS.get(str(uid).partition("_")[0]),  # none for verl's padding
            "trained": int(mask.sum()),
            "reward": float(rewards.sum()),
            "advantages": sorted(set(of_tokens[mask.bool()].tolist())),
        }
        for uid, mask, rewards, of_tokens in zip(index, response_mask, token_level_rewards, advantages, strict=True)
    ]
    with open(os.environ["SPY_FILE"], "a") as file:
        file.write(json.dumps(rows) + "\n")
    return advantages, returns


manager.payload_of = named_payload_of
register_adv_est("spied")(spied)
advantage.ESTIMATORS["spied"] = spied  # so that the manager gives it row keys, as it does for ours
