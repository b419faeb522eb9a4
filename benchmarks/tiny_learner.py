"""Fit the tiny byte-level model to transcripts of a weak player, so that RL has rewards to start from."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from agent_wrapper.contract import Segment
from rollout_backend.local.tiny_model import make_tiny_model

BATCH, LEARNING_RATE = 16, 3e-3


def fit(
    folder: Path, transcripts: Iterable[Segment], steps: int, seed: int = 0, *, tail: int = 0, tail_steps: int = 0
) -> list[float]:
    """Create the model in `folder`, and fit it to the sampled tokens of transcripts of their own tokenizer.

    With `tail`, it is first fitted for `tail_steps` to the last `tail` tokens of each transcript, which is cheaper
    if they have long beginnings in common. Equal seeds give equal weights. Return the loss of each step, in nats per
    sampled token.
    """
    import torch
    from transformers import AutoModelForCausalLM

    make_tiny_model(folder, seed)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, tail_steps + steps, LEARNING_RATE / 10)
    rows = [(list(each.token_ids), list(each.response_mask)) for each in transcripts]
    tails = [(ids[-tail:], mask[-tail:]) for ids, mask in rows]
    draw = random.Random(seed)
    losses = []
    for step in range(tail_steps + steps):
        if step < tail_steps:
            loss = _loss(model, draw.sample(tails, min(4 * BATCH, len(tails))))
        else:
            loss = _loss(model, draw.sample(rows, min(BATCH, len(rows))))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    model.save_pretrained(folder)
    return losses


def _loss(model: Any, batch: Sequence[tuple[list[int], list[int]]]) -> Any:
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids_B_T, sampled_B_T = (
        pad_sequence([torch.tensor(row) for row in rows], batch_first=True) for rows in zip(*batch, strict=True)
    )
    logits_B_T_V = model(ids_B_T).logits[:, :-1]
    losses_B_T = torch.nn.functional.cross_entropy(logits_B_T_V.transpose(1, 2), ids_B_T[:, 1:], reduction="none")
    mask_B_T = sampled_B_T[:, 1:]
    return (losses_B_T * mask_B_T).sum() / mask_B_T.sum()
