"""Make the rows of a step of long rollouts, and let verl's trainer pad them: for `large_step.py`.

The argument is a size, as JSON. A real TransferQueue holds the rows. Methods of verl compute advantages and metrics
from them, as its v1 trainer does in the process of this backend's manager.
"""

import json
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import ray
import torch
import transfer_queue as tq
from common import peak_bytes, resident_bytes
from large_step import FIRST, REPLY, RESULT, Size
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from agent_wrapper.contract import Outcome, Rollout, Segment, Turn, VersionSpan
from rollout_backend.core.rows import rows_of
from rollout_backend.verl import row_formats, verl_api
from rollout_backend.verl.advantage import row_uid

GROUP = 8
ESTIMATOR = "grpo_skip_missing"


def rollout_of(size: Size, number: int) -> Rollout:
    """Return a rollout in one segment, whose length differs a little from those of others."""
    starts = range(FIRST, size.tokens, REPLY + RESULT)
    tokens = size.tokens - number % 97
    mask = bytearray(tokens)
    for start in starts:
        mask[start : start + REPLY] = b"\1" * REPLY
    turns = [_turn(start, start + REPLY) for start in starts]
    rng = np.random.default_rng(number)
    segment = Segment(
        token_ids=array("i", rng.integers(0, 150_000, tokens, dtype=np.int32).tobytes()),
        response_mask=array("B", bytes(mask)),
        logprobs=array("f", np.where(np.frombuffer(mask, bool), -0.5, np.nan).astype(np.float32).tobytes()),
        turns=tuple(turns),
    )
    ids = {"run_id": "run", "step": 0, "task_id": f"t{number // GROUP}", "rollout_id": f"r{number}", "attempt": 1}
    return Rollout(
        **ids, session_id=f"s{number}", outcome=Outcome.COMPLETED, reward=number % GROUP / GROUP, segments=(segment,)
    )


def _turn(start: int, end: int) -> Turn:
    span = VersionSpan(version="7", start=start, end=end)
    return Turn(start=start, end=end, finish_reason="stop", weight_versions=(span,))


def put_rows(size: Size) -> tuple[KVBatchMeta, dict[str, float]]:
    """Put the rows of all rollouts into TransferQueue by group, and return their keys and what that took."""
    spent = dict.fromkeys(("rows_ms", "put_ms"), 0.0)
    keys, tags, row_bytes, tokens = [], [], 0, 0
    for group in range(0, size.sessions, GROUP):
        rollouts = [rollout_of(size, number) for number in range(group, min(group + GROUP, size.sessions))]
        before, of_group = time.process_time(), []
        for session, rollout in enumerate(rollouts):
            for row in rows_of(rollout, FIRST, size.tokens):
                key = row_uid(f"p{group}", session, row.index)
                fields = row_formats.v1_fields(row, {"global_steps": 1, "session_id": session, "uid": key})
                of_group.append((key, fields, row_formats.v1_tag(row, 1, 0)))
                row_bytes += sum(value.nbytes for value in fields.values() if isinstance(value, torch.Tensor))
                tokens += len(row.tokens)
        spent["rows_ms"] += time.process_time() - before
        before = time.process_time()
        of_keys, fields, of_tags = map(list, zip(*of_group, strict=True))
        columns = verl_api.list_of_dict_to_tensordict(fields)
        tq.kv_batch_put(keys=of_keys, partition_id="train", fields=columns, tags=of_tags)
        spent["put_ms"] += time.process_time() - before
        keys += of_keys
        tags += of_tags
    batch = KVBatchMeta(partition_id="train", keys=keys, tags=tags)
    found = {name: 1000 * seconds / size.sessions for name, seconds in spent.items()}
    return batch, {**found, "row_bytes": row_bytes / tokens}


def pad(size: Size, batch: KVBatchMeta) -> dict[str, float]:
    """Let verl compute advantages and metrics, and return the most memory of each, by padded response token."""
    algorithm = {"adv_estimator": ESTIMATOR, "use_kl_in_reward": False, "gamma": 1.0, "lam": 1.0}
    sections = {"rollout": {"n": GROUP}, "model": {}}
    trainer = SimpleNamespace(
        config=OmegaConf.create({"algorithm": algorithm, "actor_rollout_ref": sections}),
        use_critic=False,
        _rollout_moe_lb_metrics_accumulator=None,
        _get_n_gpus_for_throughput=lambda: 1,
    )
    masks = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["response_mask"])["response_mask"]
    longest = int(masks.offsets().diff().max())
    log_probs = torch.nested.nested_tensor_from_jagged(torch.zeros(len(masks.values())), masks.offsets())
    columns = TensorDict({"old_log_probs": log_probs}, batch_size=len(batch))
    tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=columns)
    del masks, log_probs, columns
    padded = len(batch) * longest
    advantage = _growth(lambda: PPOTrainer._compute_advantage(trainer, batch, {}))
    metrics = _growth(lambda: PPOTrainer._compute_metrics(trainer, batch, {}, {"step": 1.0}, 1, 0))
    return {"advantage_bytes": advantage / padded, "metrics_bytes": metrics / padded}


def _growth(work: Callable[[], Any]) -> int:
    """Return by how many bytes the memory of this process grows at most while it works."""
    before = resident_bytes("self")
    Path("/proc/self/clear_refs").write_text("5")
    work()
    return peak_bytes("self") - before


def _stored() -> int:
    """Return the resident memory of the actors that hold TransferQueue's rows."""
    mine = psutil.Process().children(recursive=True)
    return sum(resident_bytes(each.pid) for each in mine if "StorageUnit" in each.name() + "".join(each.cmdline()))


def main() -> None:
    size = Size(**json.loads(sys.argv[1]))
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    try:
        before = _stored()
        batch, found = put_rows(size)
        tokens = sum(tag["seq_len"] for tag in batch.tags)
        found["queue_bytes"] = (_stored() - before) / tokens
        found |= pad(size, batch)
    finally:
        tq.close()
        ray.shutdown()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
