"""A training service gets the rewards, advantages and loss inputs that verl gets from the same rollouts."""

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
from verl.trainer.ppo.ray_trainer import compute_advantage

from agent_wrapper.contract import Outcome, Rollout
from rollout_backend.config.training_service import TrainingServiceConfig
from rollout_backend.core.advantages import ESTIMATORS
from rollout_backend.core.rows import rows_of
from rollout_backend.training.service import training_data
from rollout_backend.verl.advantage import row_uid
from rollouts import make_rollout, segment_of

WIDTH = 64
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
