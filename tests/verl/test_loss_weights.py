"""What segments, lost rollouts and padding do to verl's losses, against references that compute from rollouts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, agg_loss, get_policy_loss_fn
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils.config import omega_conf_to_dataclass

from rollout_backend.core.advantages import Rollouts
from rollout_backend.verl.advantage import ESTIMATORS, register_rollout_estimator, row_uid
from rollout_backend.verl.sampler import StableSteps
from trainings import verl_settings

N, PROMPTS, SCALE = 4, 2, 16
MODES = ["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
# The trained tokens of each row. The first rollout is lost, the second has one row, others have several.
ROLLOUTS = [[], [3], [4, 1, 2], [2], [1, 1, 1, 1, 1], [4], [2, 2], [3]]


@pytest.fixture(autouse=True)
def queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's padding copies a row that it reads from TransferQueue."""
    row = {"response_mask": torch.ones(1), "position_ids": torch.zeros(1)}
    fake = SimpleNamespace(kv_batch_get=lambda **_: [row], kv_batch_put=lambda **_: None)
    monkeypatch.setattr(padding_utils, "tq", fake)


@pytest.fixture
def ones() -> Any:
    """Register an estimator whose advantage is 1, so that what remains is the weight."""

    def ones(rollouts: Rollouts, settings: Any) -> np.ndarray:
        return np.ones_like(rollouts.reward)

    register_rollout_estimator(ones)
    yield
    del ESTIMATORS["ones"], ADV_ESTIMATOR_REGISTRY["ones"]


def loss_of(rollouts: list[list[int]], mode: str, *more: str) -> tuple[float, list[list[float]], int]:
    """Return the loss of a batch of one mini-batch, the token losses of each rollout, and the rows with padding."""
    config = verl_settings(f"actor_rollout_ref.rollout.n={N}", f"actor_rollout_ref.actor.loss_agg_mode={mode}", *more)
    config.actor_rollout_ref.actor.ppo_mini_batch_size = PROMPTS
    keys = [row_uid(f"u{i // N}", i % N, j) for i, rows in enumerate(rollouts) for j in range(len(rows))]
    batch = KVBatchMeta(keys=keys, tags=[{"seq_len": 9}] * len(keys), partition_id="train")
    batch = StableSteps(config).apply(batch, PROMPTS)
    size = config.actor_rollout_ref.actor.ppo_mini_batch_size * N
    batch = padding_utils.upsample_batch_to_divisible_size(batch, size, 0)
    lengths = [tokens for rows in rollouts for tokens in rows]
    lengths += [0] * (len(batch) - len(lengths))
    width = max(lengths)
    mask = torch.tensor([[float(t < length) for t in range(width)] for length in lengths])
    losses = torch.rand(mask.shape, generator=torch.Generator().manual_seed(1)) * mask
    tensors = TensorDict({"token_level_rewards": mask * 0, "response_mask": mask}, batch_size=len(lengths))
    data = DataProto(batch=tensors, non_tensor_batch={"uid": np.array(batch.keys, dtype=object)})
    weights = compute_advantage(data, "ones", config=config.algorithm).batch["advantages"]
    loss = agg_loss(
        losses * weights,
        mask,
        mode,
        batch_num_tokens=int(mask.sum()),
        global_batch_size=size,
        loss_scale_factor=SCALE,
    )
    rows = iter(losses)
    of_rollouts = [[float(each) for length in found for each in next(rows)[:length]] for found in rollouts]
    return float(loss), of_rollouts, len(lengths)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("mode", MODES)
def test_with_weigh_rollouts_the_loss_is_that_of_rollouts(mode: str, ones: None) -> None:
    weigh = "+trainer.v1.sampler.sampler_kwargs.weigh_rollouts=True"
    loss, of_rollouts, _ = loss_of(ROLLOUTS, mode, weigh)
    present = [each for each in of_rollouts if each]
    tokens = sum(map(len, present))
    expected = {
        "token-mean": mean([mean(each) for each in present]),
        "token-sum": mean([mean(each) for each in present]) * tokens,
        "seq-mean-token-mean": mean([mean(each) for each in present]),
        "seq-mean-token-sum": mean([sum(each) for each in present]),
        "seq-mean-token-sum-norm": mean([sum(each) for each in present]) / SCALE,
    }
    assert loss == pytest.approx(expected[mode], rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_without_it_verls_modes_weigh_tokens_or_rows(mode: str, ones: None) -> None:
    loss, of_rollouts, rows = loss_of(ROLLOUTS, mode)
    every = [each for rollout in of_rollouts for each in rollout]
    pieces = iter(every)
    of_rows = [[next(pieces) for _ in range(length)] for lengths in ROLLOUTS for length in lengths]
    expected = {
        "token-mean": mean(every),
        "token-sum": sum(every),
        "seq-mean-token-mean": sum(mean(each) for each in of_rows) / rows,
        "seq-mean-token-sum": sum(every) / rows,
        "seq-mean-token-sum-norm": sum(every) / rows / SCALE,
    }
    assert loss == pytest.approx(expected[mode], rel=1e-5)
    assert rows - len(of_rows) < N, "no more padding rows than a prompt has rollouts"


@pytest.mark.parametrize("segments", [1, 9, 40])
def test_further_segments_of_one_rollout_leave_the_weight_of_all_rows_at_1(segments: int, ones: None) -> None:
    found = [[2]] * (N * PROMPTS - 1) + [[2] * segments]
    loss, of_rollouts, _ = loss_of(found, "seq-mean-token-mean")
    rows = [mean(rollout[i : i + 2]) for rollout in of_rollouts for i in range(0, len(rollout), 2)]
    assert loss == pytest.approx(mean(rows), rel=N / len(rows))


# --- losses and corrections, of a rollout with one row and with two ---------------------------------------

OLD = torch.tensor([-1.0, -0.5, -2.0, -1.5, -0.2, -1.0])
NEW = torch.tensor([-0.6, -0.7, -1.2, -1.9, -0.1, -1.6])
SPLIT = 4
"""Where the second row begins."""


def rows(values: torch.Tensor, split: bool) -> torch.Tensor:
    if not split:
        return values.unsqueeze(0)
    second = torch.cat([values[SPLIT:], torch.zeros(2 * SPLIT - len(values))])
    return torch.stack([values[:SPLIT], second])


def policy_loss(name: str, split: bool, scale: float = 1.0) -> float:
    actor = verl_settings("actor_rollout_ref.actor.clip_ratio_high=0.28").actor_rollout_ref.actor
    actor.ppo_micro_batch_size_per_gpu = 1
    loss, _ = get_policy_loss_fn(name)(
        old_log_prob=rows(OLD, split),
        log_prob=rows(NEW, split),
        advantages=rows(torch.full_like(OLD, scale), split),
        response_mask=rows(torch.ones_like(OLD), split),
        loss_agg_mode="token-mean",
        config=omega_conf_to_dataclass(actor),
    )
    return float(loss)


@pytest.mark.parametrize(
    ("name", "same"),
    [("vanilla", True), ("cispo", True), ("gpg", True), ("sapo", False), ("gspo", False), ("geo_mean", False)],
)
def test_losses_of_tokens_do_not_see_segments_and_others_treat_each_row_alone(name: str, same: bool) -> None:
    whole, split = policy_loss(name, split=False), policy_loss(name, split=True)
    assert (whole == pytest.approx(split, rel=1e-5)) is same
    assert policy_loss(name, split=True, scale=3.0) == pytest.approx(3 * split, rel=1e-5), "weights scale the loss"


def correction(split: bool, **options: Any) -> tuple[list[float], list[float]]:
    """Return the importance weights and the mask of the rollout's tokens."""
    mask = rows(torch.ones_like(OLD), split)
    weights, kept, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=rows(NEW, split), rollout_log_prob=rows(OLD, split), response_mask=mask, **options
    )
    given = mask.bool()
    found = [] if weights is None else weights.batch["rollout_is_weights"][given].tolist()
    return found, kept[given].tolist()


def test_importance_weights_are_of_tokens_or_of_rows() -> None:
    by_token = [correction(split, rollout_is="token", rollout_is_threshold=9.0)[0] for split in (False, True)]
    assert by_token[0] == pytest.approx(by_token[1])
    [first, *_, last], _ = correction(True, rollout_is="sequence", rollout_is_threshold=9.0)
    difference = (NEW - OLD).double()
    assert first == pytest.approx(difference[:SPLIT].sum().exp().item(), rel=1e-4)
    assert last == pytest.approx(difference[SPLIT:].sum().exp().item(), rel=1e-4)


def test_rejection_leaves_out_rows_and_not_their_rollouts() -> None:
    mean_k1 = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.13}
    assert correction(False, **mean_k1)[1] == [1.0] * len(OLD)
    assert correction(True, **mean_k1)[1] in ([1.0] * SPLIT + [0.0] * 2, [0.0] * SPLIT + [1.0] * 2)
