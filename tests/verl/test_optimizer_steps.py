"""The number of optimizer steps depends on the prompts of a batch, not on its rows, and all tokens weigh the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transfer_queue import KVBatchMeta
from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.workers.config import FSDPActorConfig

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


# --- the gradient, computed by hand -----------------------------------------------------------------------

# Two rollouts: one with two rows of 1 and 3 tokens and advantage 1, one with a row of 2 tokens and advantage -1.
TOKENS = [(1, 1.0), (3, 1.0), (2, -1.0)]


def gradients(split: list[list[int]], mode: str, size: int) -> list[float]:
    """Return the gradient of each row's tokens, summed over the mini-batches. `size` is their number of rows."""
    mask = torch.tensor([[float(j < count) for j in range(3)] for count, _ in TOKENS])
    advantages = mask * torch.tensor([[advantage] for _, advantage in TOKENS])
    log_prob = torch.full(mask.shape, -0.5, requires_grad=True)
    for chosen in split:
        config = FSDPActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=1)
        config.global_batch_info.update(
            dp_size=1, batch_num_tokens=int(mask[chosen].sum()), global_batch_size=size, loss_scale_factor=None
        )
        loss, _ = compute_policy_loss_vanilla(
            log_prob.detach()[chosen], log_prob[chosen], advantages[chosen], mask[chosen], mode, config
        )
        loss.backward()
    assert log_prob.grad is not None
    return [round(float(row[0]), 6) for row in log_prob.grad]


def test_each_token_of_a_step_has_the_same_weight() -> None:
    """Two prompts, n = 1, one mini-batch: verl alone would take two steps, of two rows and of one."""
    assert gradients([[0, 1, 2]], "token-mean", size=4) == pytest.approx([-1 / 6, -1 / 6, 1 / 6], abs=1e-6)
    alone = gradients([[0, 1], [2]], "token-mean", size=2)
    assert alone == pytest.approx([-1 / 4, -1 / 4, 1 / 2], abs=1e-6), "the last step's tokens weigh twice as much"


def test_each_row_of_a_step_has_the_same_weight_if_the_loss_is_a_mean_over_rows() -> None:
    """The mini-batch has 2 x 2 rows, one of them padding. On average a rollout weighs 1 / 2, as with one row each."""
    assert gradients([[0, 1, 2]], "seq-mean-token-sum", size=4) == pytest.approx([-1 / 4, -1 / 4, 1 / 4], abs=1e-6)
    of_tokens = gradients([[0, 1, 2]], "seq-mean-token-mean", size=4)
    assert of_tokens == pytest.approx([-1 / 4, -1 / 12, 1 / 8], abs=1e-6)
