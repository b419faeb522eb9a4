"""The number of optimizer steps depends on the prompts of a batch, not on its rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transfer_queue import KVBatchMeta
from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from rollout_backend.verl.sampler import StableSteps
from trainings import verl_settings

N = 4


def verl_config(mini_batch: int, critic: int | None = None) -> Any:
    config = verl_settings(f"actor_rollout_ref.rollout.n={N}")
    config.actor_rollout_ref.actor.ppo_mini_batch_size = mini_batch
    config.critic.enable = critic is not None
    if critic is not None:
        config.critic.ppo_mini_batch_size = critic
    return config


@pytest.fixture(autouse=True)
def queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's padding copies a row that it reads from TransferQueue."""
    row = {"response_mask": torch.ones(1), "position_ids": torch.zeros(1)}
    fake = SimpleNamespace(kv_batch_get=lambda **_: [row], kv_batch_put=lambda **_: None)
    monkeypatch.setattr(padding_utils, "tq", fake)


def rows(count: int) -> KVBatchMeta:
    return KVBatchMeta(keys=[f"u_{i}_0" for i in range(count)], tags=[{"seq_len": 9}] * count, partition_id="train")


def mini_batches(config: Any, batch: KVBatchMeta, ranks: int = 1) -> list[list[bool]]:
    """Return the mini-batches that verl makes: whether each row is not padding."""
    trainer = SimpleNamespace(config=config, use_critic=bool(config.critic.enable), global_steps=1)
    multiple = PPOTrainer._get_required_batch_multiple(trainer, ranks)
    batch = padding_utils.upsample_batch_to_divisible_size(batch, multiple, 0)
    size = config.actor_rollout_ref.actor.ppo_mini_batch_size * N
    real = [not tag.get("is_padding", False) for tag in batch.tags]
    return [real[i : i + size] for i in range(0, len(real), size)]


@pytest.mark.parametrize(("prompts", "mini_batch"), [(6, 6), (6, 2)])
def test_the_number_of_steps_is_the_same_for_any_number_of_rows(prompts: int, mini_batch: int) -> None:
    config = verl_config(mini_batch)
    stable = StableSteps(config)
    without = set()
    for count in (7, 20, 24, 25, 47, 48, 49, 200, 24):
        without.add(len(mini_batches(verl_config(mini_batch), rows(count))))
        found = mini_batches(config, stable.apply(rows(count), prompts))
        assert len(found) == prompts // mini_batch
        assert sum(map(sum, found)) == count
        assert max(map(sum, found)) - min(map(sum, found)) <= 1, "each mini-batch has the same number of real rows"
    assert len(without) > 3, "verl alone takes another number of steps"
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == mini_batch, "the setting is restored"


def test_a_batch_of_one_row_for_each_rollout_is_not_changed() -> None:
    config = verl_config(2)
    batch = rows(24)
    assert StableSteps(config).apply(batch, 6) is batch
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 2


def test_a_critic_has_its_own_stable_number_of_steps() -> None:
    config = verl_config(6, critic=2)
    stable = StableSteps(config)
    for count in (20, 25, 70):
        batch = stable.apply(rows(count), 6)
        assert len(mini_batches(config, batch, ranks=2)) == 1
        assert len(batch) == 3 * config.critic.ppo_mini_batch_size * N


def test_a_batch_with_fewer_rows_than_steps_is_left_to_verl() -> None:
    config = verl_config(2)
    assert len(mini_batches(config, StableSteps(config).apply(rows(2), 6))) == 1
