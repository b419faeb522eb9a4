"""Train a tiny model on rollouts of old weights, with verl's losses, with and without its correction.

    .venv-verl/bin/python benchmarks/off_policy.py

The model adds two digits. It is fitted until it is right in at most a third of the cases, and then trained by GRPO on
8 answers to each of 32 sums a batch. As in verl, `old_log_probs` are those of the weights with which a batch begins.
A batch is two optimizer steps, so rollouts of weights that are two versions old are four optimizer steps old. Nothing
is measured but the effect of the loss: no engine runs, and the sampled logprobs are exact.
"""

import itertools
import random
import tempfile
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from common import Table, arguments, described, machine, write
from omegaconf import OmegaConf
from tiny_learner import SUMS, fit_sums, probability, question, row_of
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, compute_policy_loss_vanilla
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

SEEDS, BATCHES = 5, 50
QUESTIONS, GROUP, MINI_BATCHES = 32, 8, 2
ANSWER = 3  # tokens: two digits and the end
AGES = (0, 2, 4)  # versions
LEARNING_RATES = (5e-4,)
START = 0.35  # mean probability of the right answer
CLIPPED = OmegaConf.create(
    {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 3.0, "global_batch_info": {}}
)


class Correction(NamedTuple):
    """Settings of `algorithm.rollout_correction`."""

    name: str
    bypass: bool = False
    settings: dict[str, Any] = {}  # noqa: RUF012


CORRECTIONS = (
    Correction("none"),
    Correction("rollout_is=token", settings={"rollout_is": "token", "rollout_is_threshold": 2.0}),
    Correction(
        "rollout_is=token, rollout_rs=seq_mean_k3",
        settings={
            "rollout_is": "token",
            "rollout_is_threshold": 2.0,
            "rollout_rs": "seq_mean_k3",
            "rollout_rs_threshold": "0.1",
        },
    ),
    Correction("bypass_mode=True", bypass=True),
)


class Batch(NamedTuple):
    """Answers, [B, ANSWER] each but `prompts`, [B, P]; a group's rows follow one another."""

    prompts: torch.Tensor
    answers: torch.Tensor
    mask: torch.Tensor
    logprobs: torch.Tensor
    rewards: torch.Tensor


class Sums:
    """The task: its prompts, its right answers, and what samples and scores them."""

    def __init__(self, folder: Path) -> None:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self._prompts: dict[tuple[int, int], list[int]] = {}
        self._right: dict[tuple[int, int], list[int]] = {}
        self.right_rows: list[tuple[list[int], list[int]]] = []
        for a, b in SUMS:
            ids, sampled = row_of(tokenizer, [question(a, b), str(a + b)])
            self.right_rows.append((ids, sampled))
            self._prompts[a, b] = ids[: sampled.index(1)]
            self._right[a, b] = ids[sampled.index(1) :]
        self._end = tokenizer.eos_token_id

    @torch.no_grad()
    def sample(self, model: Any, sums: Sequence[tuple[int, int]]) -> Batch:
        prompts = torch.tensor([self._prompts[each] for each in sums])
        ids, logprobs, masks, live = prompts, [], [], torch.ones(len(sums))
        for _ in range(ANSWER):
            logits = model(ids).logits[:, -1]
            token = torch.multinomial(logits.softmax(-1), 1)
            logprobs.append(logits.log_softmax(-1).gather(1, token)[:, 0])
            masks.append(live)
            live = live * (token[:, 0] != self._end)
            ids = torch.cat([ids, token], 1)
        answers, mask = ids[:, prompts.shape[1] :], torch.stack(masks, 1)
        rewards = torch.tensor(
            [
                float([token for token, valid in zip(row, valids, strict=True) if valid] == self._right[each])
                for row, valids, each in zip(answers.tolist(), mask.tolist(), sums, strict=True)
            ]
        )
        return Batch(prompts, answers, mask, torch.stack(logprobs, 1), rewards)


def logprobs_of(model: Any, batch: Batch) -> torch.Tensor:
    logits = model(torch.cat([batch.prompts, batch.answers], 1)).logits[:, -ANSWER - 1 : -1]
    return -cross_entropy(logits.transpose(1, 2), batch.answers, reduction="none")


def update(model: Any, optimizer: Any, batch: Batch, correction: Correction) -> None:
    with torch.no_grad():
        old = batch.logprobs if correction.bypass else logprobs_of(model, batch)
    weights, mask = None, batch.mask
    if correction.settings:
        found, mask, _ = compute_rollout_correction_and_rejection_mask(
            old, batch.logprobs, batch.mask, **correction.settings
        )
        weights = found.batch["rollout_is_weights"]
    scores = torch.zeros_like(batch.mask)
    scores[:, 0] = batch.rewards
    group = [i // GROUP for i in range(len(batch.rewards))]
    advantages, _ = compute_grpo_outcome_advantage(scores, batch.mask, group)
    for part in torch.arange(len(group)).chunk(MINI_BATCHES):
        some = Batch(*(each[part] for each in batch))
        loss, _ = compute_policy_loss_vanilla(
            old[part],
            logprobs_of(model, some),
            advantages[part],
            mask[part],
            config=CLIPPED,
            rollout_is_weights=None if weights is None else weights[part],
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def train(
    folder: Path, correction: Correction, age: int, learning_rate: float, seed: int, batches: int
) -> list[float]:
    """Return the mean probability of the right answer before the first batch, and after each."""
    torch.manual_seed(seed)
    draw, sums = random.Random(seed), Sums(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    waiting: deque[Batch] = deque()
    found = [probability(model, sums.right_rows)]
    for _ in range(batches):
        while len(waiting) <= age:
            drawn = draw.sample(SUMS, QUESTIONS)
            waiting.append(sums.sample(model, [each for each in drawn for _ in range(GROUP)]))
        update(model, optimizer, waiting.popleft(), correction)
        found.append(probability(model, sums.right_rows))
    return found


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    seeds, batches, rates = (1, 2, LEARNING_RATES[:1]) if options.smoke else (SEEDS, BATCHES, LEARNING_RATES)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        fitted = [Path(work) / str(seed) for seed in range(seeds)]
        for seed, folder in enumerate(fitted):
            fit_sums(folder, seed, START)
        rows = []
        for rate, age in itertools.product(rates, AGES):
            for correction in CORRECTIONS if age else CORRECTIONS[:1]:
                curves = [train(folder, correction, age, rate, seed, batches) for seed, folder in enumerate(fitted)]
                results.append({"learning_rate": rate, "age": age, "correction": correction.name, "curves": curves})
                ends = [curve[-1] for curve in curves]
                fall = max(
                    best - last for curve in curves for best, last in zip(accumulate(curve, max), curve, strict=True)
                )
                by_seed = ", ".join(f"{end:.2f}" for end in ends)
                rows.append([f"{rate:g}", f"{age}", correction.name, f"{mean(ends):.3f}", by_seed, f"{fall:.2f}"])
                print(*rows[-1], sep=" | ", flush=True)
    header = ["learning rate", "versions old", "correction", "right at the end", "by seed", "largest fall"]
    print(Table(header, rows).markdown())
    write(options.json, {"machine": machine(), "results": results})
    print(described(machine()))


if __name__ == "__main__":
    main()
