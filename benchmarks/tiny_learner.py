"""Fit the tiny byte-level model until it is right now and then, and train it with the loop of `examples/plain_loop`.

A model of this size that has to find answers and formats itself would need thousands of RL steps.
"""

import asyncio
import itertools
import random
import runpy
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

from rollout_backend import RolloutManager, StepResult, Task
from rollout_backend.workbench.local.tiny_model import make_tiny_model

BATCH, LEARNING_RATE, MAX_STEPS = 16, 3e-3, 1500
KNOWN = 0.95  # mean probability of the right answer at which the model knows the sums
NOISE = 0.9  # of the answers are drawn from all possible ones, once the model knows the sums
SUMS = tuple(itertools.product(range(1, 10), repeat=2))
ANSWERS = range(2, 19)
LOOP = Path(__file__).parent.parent / "examples" / "plain_loop" / "train.py"

Row = tuple[list[int], list[int]]  # token ids, and 1 for each that is sampled


def fit(
    folder: Path,
    rows: Sequence[Row],
    steps: int,
    tails: Sequence[tuple[int, int]] = (),
    device: str = "cpu",
    learning_rate: float = LEARNING_RATE,
) -> None:
    """Fit the model in `folder`, which is created unless it is there, to the sampled tokens of a weak player's rows.

    For each of `tails`, a length and a number of steps, it is first fitted to the last tokens of each row. That is
    cheaper if rows have long beginnings in common, and a rare decision counts for more.
    """
    import torch

    model, optimizer, _ = _start(folder, 0, device, learning_rate)
    total = steps + sum(count for _, count in tails)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total, learning_rate / 10)
    draw = random.Random(0)
    for tail, count in (*tails, (0, steps)):  # a tail of 0 is the whole row
        size = min(4 * BATCH, 4096 // tail, len(rows)) if tail else min(BATCH, len(rows))
        cut = [(ids[-tail:], mask[-tail:]) for ids, mask in rows]
        for _ in range(count):
            logprobs_B_T, mask_B_T = _logprobs(model, draw.sample(cut, size))
            _take_step(model, optimizer, -(logprobs_B_T * mask_B_T).sum() / mask_B_T.sum())
            schedule.step()
    model.save_pretrained(folder)


def question(a: int, b: int) -> str:
    return f"{a}+{b}="


def fit_sums(folder: Path, seed: int, target: float) -> None:
    """Create the model in `folder`, and fit it to all sums, then to mostly wrong ones, until it is right with a mean
    probability just below `target`. The seed decides the initial weights and the wrong answers.

    Raises:
        RuntimeError: a fit does not end within MAX_STEPS.
    """
    model, optimizer, tokenizer = _start(folder, seed)
    rows = {(a, b, answer): row_of(tokenizer, [question(a, b), str(answer)]) for a, b in SUMS for answer in ANSWERS}
    right = [rows[a, b, a + b] for a, b in SUMS]
    draw, knows = random.Random(seed), False
    for _ in range(MAX_STEPS):
        batch = [rows[a, b, draw.choice(ANSWERS) if knows and draw.random() < NOISE else a + b] for a, b in SUMS]
        logprobs_B_T, mask_B_T = _logprobs(model, batch)
        _take_step(model, optimizer, -(logprobs_B_T * mask_B_T).sum(-1).mean())
        found = probability(model, right)
        knows = knows or found >= KNOWN
        if knows and found <= target:
            model.save_pretrained(folder)
            return
    raise RuntimeError(f"after {MAX_STEPS} steps the model is right with probability {found:.2f}")


def probability(model: Any, rows: Sequence[Row]) -> float:
    """Return the mean probability with which the model samples what is sampled in each row."""
    import torch

    with torch.no_grad():
        logprobs_B_T, mask_B_T = _logprobs(model, rows)
        return float((logprobs_B_T * mask_B_T).sum(-1).exp().mean())


def known_to(folder: Path, rows: Sequence[Row], device: str) -> float:
    """Return the probability of these rows for the model in `folder`."""
    return probability(_start(folder, 0, device)[0], rows)


def row_of(tokenizer: Any, texts: Sequence[str]) -> Row:
    """Return a conversation that begins with the user's message, as the gateway renders it."""
    ids: list[int] = []
    mask: list[int] = []
    for number, text in enumerate(texts):
        sampled = number % 2
        lead = "\n" if number and not sampled else ""
        given = (
            f"{text}<|im_end|>" if sampled else f"{lead}<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        )
        tokens = tokenizer.encode(given, add_special_tokens=False)
        ids += tokens
        mask += [sampled] * len(tokens)
    return ids, mask


def _start(
    folder: Path, seed: int, device: str = "cpu", learning_rate: float = LEARNING_RATE
) -> tuple[Any, Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.set_num_threads(1)  # threads of so small a model mostly wait for each other
    if device != "cpu":
        torch.set_float32_matmul_precision("high")
    if not (folder / "model.safetensors").exists():
        make_tiny_model(folder, seed)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0)
    return model, optimizer, PreTrainedTokenizerFast.from_pretrained(folder)


def _take_step(model: Any, optimizer: Any, loss: Any) -> None:
    import torch

    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _logprobs(model: Any, batch: Sequence[Row]) -> tuple[Any, Any]:
    """Return the logprob of each token after the first, and whether it is sampled."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids_B_T, mask_B_T = (
        pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(model.device)
        for rows in zip(*batch, strict=True)
    )
    logits_B_T_V = model(ids_B_T).logits[:, :-1]
    logprobs_B_T = -torch.nn.functional.cross_entropy(logits_B_T_V.transpose(1, 2), ids_B_T[:, 1:], reduction="none")
    return logprobs_B_T, mask_B_T[:, 1:]


async def train(
    manager: RolloutManager, folder: Path, steps: Iterable[list[Task]], learning_rate: float
) -> AsyncIterator[tuple[StepResult, float, float]]:
    """Train the model of a folder on each step's tasks.

    Yield each step's rollouts, the largest difference between the engine's and the trainer's probability of a token,
    and the seconds.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    loop = runpy.run_path(str(LOOP))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    for tasks in steps:
        began = time.monotonic()
        await manager.update_weights(model.state_dict())
        result = await manager.collect(tasks)
        rows = loop["make_rows"](result)
        _, worst = await asyncio.to_thread(loop["update"], model, optimizer, rows) if rows else (0.0, 0.0)
        yield result, worst, time.monotonic() - began
