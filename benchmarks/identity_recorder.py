"""What a trainer of `identity.py` loads by name: a record of each batch, and verl's own agent loop with our seeds.

verl imports this module as its dataset's. Each step's batch is written to the folder `RECORDS`, if that is set, just
before the actor is trained with it, and nothing is changed.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.dataset.rl_dataset import RLHFDataset as RLHFDataset

from rollout_backend.core.earlier_batches import batch_number
from rollout_backend.model.gateway.engine.protocol import reply_seed
from rollout_backend.verl.dataset import PayloadDataset as PayloadDataset

COLUMNS = (
    *("prompts", "responses", "response_mask", "position_ids"),
    *("rollout_log_probs", "old_log_probs", "rm_scores", "advantages"),
)


class SeededAgentLoop(SingleTurnAgentLoop):  # type: ignore[misc]
    """verl's own loop, which gives each reply the seed that our gateway would."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **columns: Any) -> Any:
        task, n = int(columns["index"]), int(self.rollout_config.n)
        step = task // int(self.data_config.train_batch_size) + 1  # in the first epoch, without shuffling
        number = columns.get("session_id", int(priority) % n)  # the legacy trainer has no session ids
        seed = reply_seed(self.rollout_config.seed, batch_number(step, False, 0), f"task-{task:05d}.{number}", 1)
        return await super().run({**sampling_params, "sampling_seed": seed}, priority, **columns)


class OrderedReplayBuffer(ReplayBuffer):  # type: ignore[misc]
    """verl's own buffer, whose rows are in the order of the questions instead of their arrival."""

    def __init__(self, **verl_arguments: Any) -> None:
        super().__init__(poll_interval=0.25, **verl_arguments)

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        batch, metrics = super().sample(*args, **kwargs)
        index = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["index"])["index"]
        places = [(int(task), int(key.split("_")[1])) for task, key in zip(list(index), batch.keys, strict=True)]
        batch.reorder(sorted(range(len(batch)), key=places.__getitem__))
        return batch, metrics


def _record(trainer: Any, columns_of: Callable[[Any], Any]) -> None:
    update_actor = trainer._update_actor

    def recorded(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        columns = columns_of(batch)
        # Rows as they are trained: without padding in v1, with padding in the legacy trainer.
        rows = {name: [row.clone() for row in columns[name].unbind()] for name in COLUMNS}
        torch.save(rows, Path(os.environ["RECORDS"]) / f"{self.global_steps}.pt")
        return update_actor(self, batch, *args, **kwargs)

    trainer._update_actor = recorded


if "RECORDS" in os.environ:
    _record(
        PPOTrainer,
        lambda batch: tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(COLUMNS)),
    )
    _record(RayPPOTrainer, lambda batch: batch.batch)
