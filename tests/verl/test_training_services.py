"""A training service gets the rewards, advantages and loss inputs that verl gets from the same rollouts, and has the
same gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.workers.config import ActorConfig

from agent_wrapper.contract import Outcome, Rollout
from rollout_backend.config.training_service import TrainingServiceConfig
from rollout_backend.core.advantages import ESTIMATORS
from rollout_backend.core.rows import rows_of
from rollout_backend.training.service import training_data
from rollout_backend.verl.advantage import row_uid
from rollouts import make_rollout, segment_of
from tests.emulators.tiny_learner import Learner, TabularPolicy, TrainedDatum

WIDTH = 64
ACTOR = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
CONFIG: Any = SimpleNamespace(training=SimpleNamespace(mask=()), group=SimpleNamespace(needed=2))

pieces = st.lists(st.tuples(st.sampled_from(["given", "sampled"]), st.integers(1, 4)), min_size=1, max_size=4)
segments = st.lists(pieces, min_size=1, max_size=3).filter(
    lambda found: any(kind == "sampled" for each in found for kind, _ in each)
)
rollouts = st.tuples(st.sampled_from([0.0, 1.0, 0.25, -2.0]), segments)
groups = st.lists(st.lists(rollouts, min_size=1, max_size=5), min_size=1, max_size=3)


def verls_rows(found: list[list[Rollout]], estimator: str) -> dict[tuple[int, ...], Any]:
    """Return the tokens, logprobs and advantages that verl trains, by the tokens of a row and its rollout."""
    rows = [
        (row_uid(f"u{g}", i, row.index), row, (g, i))
        for g, group in enumerate(found)
        for i, rollout in enumerate(group)
        for row in rows_of(rollout, WIDTH, WIDTH)
    ]
    mask, scores = torch.zeros(len(rows), WIDTH), torch.zeros(len(rows), WIDTH)
    for at, (_, row, _) in enumerate(rows):
        mask[at, : len(row.response)] = torch.from_numpy(row.response_mask)
        scores[at, : len(row.response)] = torch.from_numpy(row.scores)
    tensors = TensorDict({"token_level_rewards": scores, "response_mask": mask}, batch_size=len(rows))
    data = DataProto(batch=tensors, non_tensor_batch={"uid": np.array([uid for uid, *_ in rows], dtype=object)})
    advantages = compute_advantage(data, f"{estimator}_skip_missing", config={}).batch["advantages"]
    return {
        (*place, row.index): (row.tokens, row.logprobs, advantages[at, : len(row.response)].numpy())
        for at, (_, row, place) in enumerate(rows)
    }


@pytest.mark.parametrize("estimator", [*ESTIMATORS])
@given(groups)
def test_inputs_equal_verls(estimator: str, made: list[list[tuple[float, list[Any]]]]) -> None:
    found = [
        [
            make_rollout(
                f"t{g}.{i}", Outcome.COMPLETED, reward=reward, segments=[segment_of(each) for each in pieces]
            )
            for i, (reward, pieces) in enumerate(group)
        ]
        for g, group in enumerate(made)
    ]
    result: Any = SimpleNamespace(groups=[SimpleNamespace(rollouts=group, usable=True) for group in found])
    settings = TrainingServiceConfig(base_model="tiny", steps=1, tasks_per_step=1, estimator=estimator)  # type: ignore[arg-type]
    ours = [datum for group in training_data(result, CONFIG, settings).groups for datum in group]
    verls = verls_rows(found, estimator) if any(len(rows_of(r, WIDTH, WIDTH)) for g in found for r in g) else {}
    trained = [each for each in verls.values() if np.any(each[2])]
    assert len(ours) == len(trained)
    for datum, (tokens, logprobs, advantages) in zip(ours, trained, strict=True):
        given = len(tokens) - len(logprobs) - 1
        assert [datum.tokens[0], *datum.target_tokens] == tokens.tolist()
        assert datum.tokens[1:].tolist() == datum.target_tokens[:-1].tolist()
        assert not datum.logprobs[:given].any()
        assert not datum.advantages[:given].any()
        np.testing.assert_array_equal(datum.logprobs[given:], logprobs)
        np.testing.assert_array_equal(datum.advantages[given:], advantages)


def test_gradients_equal_verls_except_where_verl_clips_twice() -> None:
    """With `loss_agg_mode=token-sum` they are equal, and by default verl divides them by the number of tokens."""
    rng, policy = np.random.default_rng(0), TabularPolicy(range(6))
    tokens = rng.integers(0, 6, (40, 9))
    advantages = rng.normal(size=(40, 8))
    logits = torch.tensor(policy.logits, requires_grad=True)

    def current() -> torch.Tensor:
        return torch.log_softmax(logits, -1)[torch.tensor(tokens[:, :-1] + 1), torch.tensor(tokens[:, 1:])]

    def gradients(shift: Any, advantages: Any, loss: str, mode: str = "token-sum") -> tuple[Any, Any]:
        """Return those of the service and of verl, for ratios of probabilities that are exp(shift)."""
        sampled, learner = current().detach() - torch.tensor(shift), Learner.of(policy)
        inputs = zip(tokens[:, 1:], sampled.numpy(), advantages, strict=True)
        for before, each in zip(tokens[:, :-1], inputs, strict=True):
            named = dict(zip(("target_tokens", "logprobs", "advantages"), each, strict=True))
            learner.add_gradient(policy, TrainedDatum(tuple(before.tolist()), named), loss)
        logits.grad = None
        mask = torch.ones(advantages.shape, dtype=torch.float64)
        given = torch.tensor(advantages)
        compute_policy_loss_vanilla(sampled, current(), given, mask, mode, config=ACTOR)[0].backward()
        assert logits.grad is not None
        return learner.gradient, logits.grad.numpy().copy()

    on_policy, near = np.zeros((40, 8)), rng.uniform(-1, 1, (40, 8))
    for loss, shift in (("ppo", near), ("ppo", on_policy), ("importance_sampling", on_policy)):
        np.testing.assert_allclose(*gradients(shift, advantages, loss), rtol=1e-9)
        ours, mean = gradients(shift, advantages, loss, "token-mean")
        np.testing.assert_allclose(ours, mean * advantages.size, rtol=1e-9)
    ours, verls = gradients(np.full((40, 8), np.log(4)), -np.abs(advantages), "ppo")
    assert np.abs(ours).max() > 1
    assert not verls.any()
