"""verl's real trainer trains a LoRA adapter that its server applies to the calls that name it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_wrapper.contract import Segment
from trainings import SAME, normal

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.release, pytest.mark.timeout(1800)]

MODEL, ADAPTER = "actor_rollout_ref.model", "verl_actor_lora_name"


async def test_agents_sample_with_the_adapter_that_is_trained(tmp_path: Path, training: Any) -> None:
    lora = f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=256", "actor_rollout_ref.actor.optim.lr=0.1"
    async with training(tmp_path, [normal("first"), normal("second")], 1, *lora) as run:
        await run.start()
        assert await run.ends() == 0, run.verl.log_tail()

        assert [run.versions(step) for step in (1, 2)] == [{f"{ADAPTER}@0"}, {f"{ADAPTER}@1"}]
        first, second = run.metrics()
        for metrics in (first, second):
            assert metrics["training/rollout_probs_diff_max"] < SAME
            assert metrics["actor/grad_norm"] > 0
            assert metrics["rollouts/staleness/max"] == 0
        differences = [
            await asyncio.to_thread(_difference, tmp_path / "model", _segments(run, step)) for step in (1, 2)
        ]
        assert differences[0] < SAME  # a new adapter changes nothing
        assert differences[1] > 10 * SAME  # samples of the base model would be noticed
        await run.leaves_nothing()


def _segments(run: Any, step: int) -> list[Segment]:
    return [segment for rollout in run.rollouts(step) for segment in rollout.segments]


def _difference(model: Path, segments: Sequence[Segment]) -> float:
    """Return the largest difference between the probabilities of sampled tokens and those of the base model."""
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    largest = 0.0
    for segment in segments:
        ids = torch.tensor([list(segment.token_ids)])
        with torch.inference_mode():
            logprobs = base(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        for at in range(1, len(segment.token_ids)):
            if segment.response_mask[at]:
                recorded = torch.tensor(segment.logprobs[at]).exp()
                largest = max(largest, float((recorded - logprobs[at - 1].exp()).abs()))
    return largest
