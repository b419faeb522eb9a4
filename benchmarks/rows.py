"""Measure how fast decoded results become verl's rows, in tokens per second of one core.

    .venv-verl/bin/python benchmarks/rows.py

A rollout is a multi-turn conversation: given and sampled tokens alternate, and only the sampled ones are trained.
Rows are made of decoded results; decoding the stored object is a figure of its own. Each figure is the CPU time of
the best of several repetitions. The floor is one copy of the same bytes by numpy.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl import DataProto
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from agent_wrapper.contract import Outcome, Rollout, Segment, Turn, VersionSpan
from rollout_backend.verl.row_formats import legacy_batch, v1_fields, v1_tag
from rollout_backend.verl.rows import rows_of

GROUP = 8
PROMPT_TOKENS = 512
PAD = 0


def make_rollout(index: int, tokens: int, turns: int) -> Rollout:
    """Return a rollout of about `tokens` tokens in one segment; no two have the same length."""
    draw = random.Random(index)
    total = tokens - draw.randrange(tokens // 16)
    at, mask, made = PROMPT_TOKENS, array("B", bytes(PROMPT_TOKENS)), []
    share = (total - PROMPT_TOKENS) // (2 * turns)
    for _ in range(turns):
        made.append(Turn(start=at, end=at + share, finish_reason="stop", weight_versions=_versions(at, at + share)))
        mask.extend(b"\x01" * share + bytes(share))
        at += 2 * share
    generator = np.random.default_rng(index)
    logprobs = -generator.random(at, dtype=np.float32)
    logprobs[np.frombuffer(mask, dtype=bool) == 0] = np.nan
    segment = Segment(
        token_ids=array("i", generator.integers(0, 150_000, at, dtype=np.int32).tobytes()),
        response_mask=mask,
        logprobs=array("f", logprobs.tobytes()),
        turns=tuple(made),
    )
    return Rollout(
        run_id="benchmark",
        step=1,
        task_id=f"t{index // GROUP}",
        rollout_id=f"t{index // GROUP}.{index % GROUP}",
        attempt=1,
        session_id=f"session-{index}",
        outcome=Outcome.COMPLETED,
        reward=float(index % 2),
        segments=(segment,),
    )


def _versions(start: int, end: int) -> tuple[VersionSpan, ...]:
    return (VersionSpan(version="1", start=start, end=end),)


def to_transfer_queue(rollouts: list[Rollout], lengths: tuple[int, int]) -> list[Any]:
    """Build what the v1 trainer's queue takes: one TensorDict and its tags for each group."""
    written = []
    for first in range(0, len(rollouts), GROUP):
        fields, tags = [], []
        for session, rollout in enumerate(rollouts[first : first + GROUP]):
            for row in rows_of(rollout, *lengths):
                base = {"uid": rollout.task_id, "session_id": session, "payload": "{}", "global_steps": 1}
                fields.append(v1_fields(row, base))
                tags.append(v1_tag(row, 1, 0))
        written.append((list_of_dict_to_tensordict(fields), tags))
    return written


def to_data_proto(rollouts: list[Rollout], lengths: tuple[int, int]) -> DataProto:
    """Build what the legacy trainer takes: one padded batch."""
    batch = legacy_batch([rows_of(rollout, *lengths) for rollout in rollouts], *lengths, PAD)
    return DataProto(batch=batch.tensors, non_tensor_batch=batch.non_tensors)


def copy_bytes(tensors: list[torch.Tensor]) -> list[Any]:
    """Copy the tensors' bytes once, which is the least that writing them can take."""
    return [tensor.numpy().copy() for tensor in tensors]


def best_cpu_s(work: Callable[[], object], repetitions: int) -> float:
    """Return the CPU seconds of the fastest repetition."""
    took = []
    for _ in range(repetitions):
        began = time.process_time()
        made = work()
        took.append(time.process_time() - began)
        del made
    return min(took)


def parts_of(batch: Any) -> list[torch.Tensor]:
    """Return the batch's tensors as plain ones."""
    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    return [tensor.values() if tensor.is_nested else tensor for tensor in tensors]


def measure(count: int, tokens: int, turns: int, repetitions: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    rollouts = [make_rollout(index, tokens, turns) for index in range(count)]
    lengths = PROMPT_TOKENS, tokens
    total = sum(len(rollout.segments[0].token_ids) for rollout in rollouts)
    queue = [tensor for data, _ in to_transfer_queue(rollouts, lengths) for tensor in parts_of(data)]
    padded = parts_of(to_data_proto(rollouts, lengths).batch)
    stored = [rollout.encode() for rollout in rollouts]
    seconds = {
        "decode": best_cpu_s(lambda: [Rollout.decode(data) for data in stored], repetitions),
        "rows": best_cpu_s(lambda: [rows_of(rollout, *lengths) for rollout in rollouts], repetitions),
        "TransferQueue rows": best_cpu_s(lambda: to_transfer_queue(rollouts, lengths), repetitions),
        "TransferQueue rows, floor": best_cpu_s(lambda: copy_bytes(queue), repetitions),
        "DataProto": best_cpu_s(lambda: to_data_proto(rollouts, lengths), repetitions),
        "DataProto, floor": best_cpu_s(lambda: copy_bytes(padded), repetitions),
    }
    return {
        "rollouts": count,
        "tokens": total,
        "turns": turns,
        "tokens_per_core_s": {name: total / took for name, took in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=16384, help="of one rollout, at most")
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--smoke", action="store_true", help="8 short rollouts, to check that the benchmark works")
    args = parser.parse_args()
    if args.smoke:
        args.rollouts, args.tokens, args.repetitions = 8, 2048, 1
    figures = measure(args.rollouts, args.tokens, args.turns, args.repetitions)
    for name, rate in figures["tokens_per_core_s"].items():
        print(f"{name:28s} {rate / 1e6:8.1f} M tokens/s")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
