"""Train a small model on sums with a GRPO loop in plain torch, on this machine, with the agent in a local cloud.

    python train.py              # 10 steps of SmolLM2-135M
    python train.py --tiny       # 2 steps of a random model, to check that everything works

Each step collects rollouts, takes one optimizer step, and gives the new weights to the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from rollout_backend import RolloutConfig, RolloutManager, Segment, StepResult, Task, load_config
from rollout_backend.model.serving.install import find_model
from rollout_backend.workbench.local.cloud import LocalCloud
from rollout_backend.workbench.local.tiny_model import make_tiny_model

AGENT = Path(__file__).parent.parent / "arithmetic" / "agent.py"
PROMPTS, GROUP, MICRO_BATCH, CLIP = 16, 4, 16, 0.2


@dataclass(frozen=True)
class Row:
    """A token sequence and the advantage of its rollout."""

    segment: Segment
    advantage: float


def make_tasks(digits: random.Random) -> list[Task]:
    """Return different sums of two single digits."""
    pairs = digits.sample([(a, b) for a in range(1, 10) for b in range(1, 10)], PROMPTS)
    return [
        Task(
            task_id=f"sum-{a}-{b}",
            payload={"question": f"What is {a} + {b}? Answer with only a number.", "answer": str(a + b)},
        )
        for a, b in pairs
    ]


def make_rows(result: StepResult) -> list[Row]:
    """Compare each rollout with its group. A lost rollout has no reward, so it is in no mean; equal rewards teach
    nothing."""
    rows = []
    for group in result.groups:
        rewards = torch.tensor([rollout.reward for rollout in group.rollouts], dtype=torch.float32)
        if not group.usable or len(rewards.unique()) < 2:
            continue
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for rollout, advantage in zip(group.rollouts, advantages.tolist(), strict=True):
            rows += [Row(segment, advantage) for segment in rollout.segments if any(trained(segment))]
    return rows


def trained(segment: Segment) -> list[bool]:
    """Return which tokens are trained: the sampled ones, except those of forced formats, which have no logprob."""
    pairs = zip(segment.response_mask, segment.logprobs, strict=True)
    return [bool(sampled) and math.isfinite(logprob) for sampled, logprob in pairs]


def micro_batches(rows: Sequence[Row]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield right-padded token ids, masks of the trained tokens, logprobs of the engine, and advantages."""
    for start in range(0, len(rows), MICRO_BATCH):
        batch = rows[start : start + MICRO_BATCH]
        ids, mask, logprobs = (
            torch.nn.utils.rnn.pad_sequence([torch.tensor(list(column)) for column in columns], batch_first=True)
            for columns in zip(
                *((row.segment.token_ids, trained(row.segment), row.segment.logprobs) for row in batch),
                strict=True,
            )
        )
        yield ids, mask[:, 1:], logprobs[:, 1:], torch.tensor([[row.advantage] for row in batch])


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: Sequence[Row]) -> tuple[float, float]:
    """Take one step on the clipped GRPO loss, a mean over trained tokens. Return the gradient's norm, and the largest
    difference between the probability of a token here and at the engine that sampled it."""
    tokens = sum(sum(trained(row.segment)) for row in rows)
    worst = 0.0
    for ids, mask, sampled_logprobs, advantages in micro_batches(rows):
        logits = model(ids).logits[:, :-1]
        logprobs = torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None])[..., 0][mask]
        old, advantage = sampled_logprobs[mask], advantages.expand_as(mask)[mask]
        ratio = torch.exp(logprobs - old)
        loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).sum() / tokens
        loss.backward()
        worst = max(worst, (logprobs.detach().exp() - old.exp()).abs().max().item())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    optimizer.step()
    optimizer.zero_grad()
    return norm, worst


def settings(cloud: LocalCloud, model: Path) -> RolloutConfig:
    """Return the settings of a run. On a cluster they are a YAML file: `load_config("rollout.yaml")`."""
    base = {
        "run_id": f"plain-loop-{time.strftime('%m%d-%H%M%S')}",
        "model": {"path": str(model), "renderer": "chatml"},
        "serving": {"device": "cpu", "dtype": "float32", "threads": 1},
        "sampling": {"temperature": 1.0, "max_tokens": 16},
        "group": {"size": GROUP},
        "timeouts": {"model_call_s": 300, "agent_s": 600, "collection_s": 900, "session_key_s": 1200},
    }
    return load_config(base=base, env={}, top=cloud.settings())


async def train(model_path: Path, steps: int, lr: float, work: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    digits = random.Random(0)
    async with LocalCloud(AGENT, run_dir=work / "cloud") as cloud:
        os.environ.update(cloud.environ)
        async with RolloutManager(settings(cloud, model_path)) as manager:
            print("step  reward  prob_diff  grad_norm  versions  rollouts_s  update_s  weights_s", flush=True)
            for step in range(1, steps + 1):
                began = time.monotonic()
                result = await manager.collect(make_tasks(digits))
                collected = time.monotonic()
                rows = make_rows(result)
                norm, worst = await asyncio.to_thread(update, model, optimizer, rows) if rows else (0.0, math.nan)
                updated = time.monotonic()
                await manager.update_weights(model.state_dict())
                rewards = [rollout.reward for group in result.groups for rollout in group.rollouts]
                turns = [turn for row in rows for turn in row.segment.turns]
                versions = sorted({span.version for turn in turns for span in turn.weight_versions})
                reward, served = sum(rewards) / max(len(rewards), 1), ",".join(versions)
                print(
                    f"{step:4}  {reward:6.3f}  {worst:9.1e}  {norm:9.3f}  {served:>8}  {collected - began:10.1f}"
                    f"  {updated - collected:8.1f}  {time.monotonic() - updated:9.1f}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="default: 10, or 2 with --tiny")
    parser.add_argument("--model", type=Path, help="a model folder; default: the one of `rollout engine install`")
    parser.add_argument("--lr", type=float, help="learning rate; default: 2e-5, or 3e-3 with --tiny")
    parser.add_argument("--tiny", action="store_true", help="use a random model with a few thousand weights")
    parser.add_argument("--work", type=Path, default=Path("runs/plain_loop"), help="output directory")
    options = parser.parse_args()
    work = options.work.absolute()
    model = make_tiny_model(work / "model") if options.tiny else (options.model or find_model()).absolute()
    steps, lr = options.steps or (2 if options.tiny else 10), options.lr or (3e-3 if options.tiny else 2e-5)
    torch.manual_seed(0)
    asyncio.run(train(model, steps, lr, work))


if __name__ == "__main__":
    main()
