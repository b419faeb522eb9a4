"""Loaded by verl as the module of its dataset: enters an estimator that does as ours, and writes down what it saw.

What an estimator returns is what the actor's update gets. A line of SPY_FILE is one call, that is one step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_adv_est

from rollout_backend.verl import advantage
from rollout_backend.verl.dataset import PayloadDataset as PayloadDataset


def spied(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Sequence[str], **more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    advantages, returns = advantage.grpo_present(token_level_rewards, response_mask, index, **more)
    rows = [
        {
            "uid": str(uid),
            "trained": int(mask.sum()),
            "reward": float(rewards.sum()),
            "advantages": sorted(set(of_tokens[mask.bool()].tolist())),
        }
        for uid, mask, rewards, of_tokens in zip(index, response_mask, token_level_rewards, advantages, strict=True)
    ]
    with open(os.environ["SPY_FILE"], "a") as file:
        file.write(json.dumps(rows) + "\n")
    return advantages, returns


register_adv_est("spied")(spied)
advantage.ESTIMATORS["spied"] = spied  # so the manager hands it the rows' keys, as it does to ours
