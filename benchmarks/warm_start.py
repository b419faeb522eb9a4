"""Make a tiny byte-level model that can add, and says so only now and then, so that RL has something to reinforce.

The model is fitted to all sums, and then to mostly wrong answers, until it is right about every fifth time. A model
of this size that never knew the sums would need thousands of RL steps.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout_backend.local.tiny_model import make_tiny_model

LEARNING_RATE, MAX_STEPS = 3e-3, 1500
KNOWN = 0.95  # mean probability of the right answer at which the model knows the sums
NOISE = 0.9  # of the answers in the second fit are drawn from all possible ones
SUMS = tuple(itertools.product(range(1, 10), repeat=2))
ANSWERS = range(2, 19)


def question(a: int, b: int) -> str:
    return f"{a}+{b}="


def make_warm_model(folder: Path, seed: int, target: float) -> None:
    """Create the model in `folder`. It is right with a mean probability just below `target`.

    The seed decides the initial weights and the wrong answers. Takes some 15 s of one core.

    Raises:
        RuntimeError: a fit does not end within MAX_STEPS.
    """
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    make_tiny_model(folder, seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0)
    prompts = [_prompt(tokenizer, a, b) for a, b in SUMS]
    replies = {
        answer: list(tokenizer.encode(f"{answer}{tokenizer.eos_token}", add_special_tokens=False))
        for answer in ANSWERS
    }
    draw = random.Random(seed)
    right = [a + b for a, b in SUMS]
    knows = False
    for _ in range(MAX_STEPS):
        answers = [draw.choice(ANSWERS) if knows and draw.random() < NOISE else answer for answer in right]
        loss = -_logprobs(model, prompts, [replies[answer] for answer in answers]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            probability = float(_logprobs(model, prompts, [replies[answer] for answer in right]).exp().mean())
        knows = knows or probability >= KNOWN
        if knows and probability <= target:
            model.save_pretrained(folder)
            return
    raise RuntimeError(f"after {MAX_STEPS} steps the model is right with probability {probability:.2f}")


def _prompt(tokenizer: Any, a: int, b: int) -> list[int]:
    messages = [{"role": "user", "content": question(a, b)}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


def _logprobs(model: Any, prompts: Sequence[list[int]], replies: Sequence[list[int]]) -> Any:
    """Return the logprob of each reply to its prompt, [B]."""
    import torch

    longest = max(len(prompt) + len(reply) for prompt, reply in zip(prompts, replies, strict=True))
    tokens_B_L = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask_B_L = torch.zeros(len(prompts), longest)
    for i, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        tokens_B_L[i, : len(prompt) + len(reply)] = torch.tensor([*prompt, *reply])
        mask_B_L[i, len(prompt) : len(prompt) + len(reply)] = 1
    logits = model(tokens_B_L).logits[:, :-1]
    logprobs = torch.log_softmax(logits, -1).gather(-1, tokens_B_L[:, 1:, None]).squeeze(-1)
    return (logprobs * mask_B_L[:, 1:]).sum(-1)
