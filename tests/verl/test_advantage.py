"""The estimators equal verl's if no rollout is missing, and missing rollouts never change them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from rollout_backend.verl.advantage import row_uid

WIDTH = 4


def batch(rewards: list[float], uids: list[str], lengths: list[int] | None = None) -> DataProto:
    """Row i has `lengths[i]` trained tokens, by default 1 + i % 4, and its reward on the last of them."""
    mask = torch.zeros(len(rewards), WIDTH)
    scores = torch.zeros(len(rewards), WIDTH)
    for i, reward in enumerate(rewards):
        n = lengths[i] if lengths is not None else 1 + i % WIDTH
        mask[i, :n] = 1
        scores[i, max(0, n - 1)] = reward
    tensors = TensorDict({"token_level_rewards": scores, "response_mask": mask}, batch_size=len(rewards))
    return DataProto(batch=tensors, non_tensor_batch={"uid": np.array(uids, dtype=object)})


def advantages(name: str, data: DataProto, config: Any = None, **arguments: Any) -> torch.Tensor:
    found = compute_advantage(data, name, config=config, **arguments).batch
    assert torch.equal(found["advantages"], found["returns"])
    assert found["advantages"].dtype == torch.float32
    return found["advantages"]


values = st.sampled_from([0.0, 1.0, 0.3, -2.0])
groups = st.lists(st.lists(values, min_size=2, max_size=5), min_size=1, max_size=4)


@given(groups, st.booleans(), st.randoms(use_true_random=False))
def test_without_missing_rollouts_the_estimators_equal_verls(found, by_std, random):
    rows = [(reward, f"u{g}") for g, group in enumerate(found) for reward in group]
    random.shuffle(rows)
    rewards, uids = [reward for reward, _ in rows], [uid for _, uid in rows]
    config = OmegaConf.create({"norm_adv_by_std_in_grpo": by_std})

    ours = advantages("grpo_skip_missing", batch(rewards, uids), config)
    stock = advantages("grpo", batch(rewards, uids), norm_adv_by_std_in_grpo=by_std)
    if not by_std or all(len(set(group)) > 1 for group in found):  # verl divides float32 noise by epsilon
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        advantages("rloo_skip_missing", batch(rewards, uids)),
        advantages("rloo", batch(rewards, uids)),
        rtol=1e-4,
        atol=1e-5,
    )


@given(groups, st.sampled_from(["grpo_skip_missing", "rloo_skip_missing"]), st.lists(st.integers(0, 3), max_size=4))
def test_missing_rows_change_no_advantage(found: list[list[float]], name: str, missing: list[int]) -> None:
    rewards = [reward for group in found for reward in group]
    uids = [f"u{g}" for g, group in enumerate(found) for _ in group]
    lengths = [1 + i % WIDTH for i in range(len(rewards))]
    gone = [f"u{g}" for g in missing]

    alone = advantages(name, batch(rewards, uids, lengths))
    among = advantages(name, batch([*rewards, *[0.0] * len(gone)], uids + gone, lengths + [0] * len(gone)))

    assert torch.equal(among[: len(rewards)], alone)
    assert not among[len(rewards) :].any()


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_a_single_survivor_has_advantage_0_and_not_its_reward(name: str) -> None:
    data = [1.0, 0.0, 0.0], ["a", "a", "b"], [2, 0, 2]
    assert not advantages(f"{name}_skip_missing", batch(*data)).any()
    assert advantages(name, batch([1.0], ["a"], [2]))[0, 0] == pytest.approx(1), (
        "verl's estimators return the raw reward"
    )


def test_dr_grpo_follows_verls_setting() -> None:
    data = [1.0, 0.0, 0.0, 1.0], ["a"] * 4, [1] * 4
    for config in (OmegaConf.create({"norm_adv_by_std_in_grpo": False}), AlgoConfig(norm_adv_by_std_in_grpo=False)):
        assert advantages("grpo_skip_missing", batch(*data), config)[:, 0].tolist() == [0.5, -0.5, -0.5, 0.5]
    assert advantages("grpo_skip_missing", batch(*data), AlgoConfig())[0, 0] == pytest.approx(0.866, abs=1e-3)


# --- several rows of one rollout, as in v1 ----------------------------------------------------------------

SESSIONS = [  # uid, session, index, reward, trained tokens; shuffled, as after verl's balancing
    ("a", 0, 1, 1.0, 2),
    ("b", 1, 0, 0.0, 1),
    ("a", 1, 0, 0.0, 3),
    ("a", 0, 0, 1.0, 4),
    ("a", 0, 2, 1.0, 1),
    ("b", 0, 0, 1.0, 2),
    ("a", 2, 0, 0.5, 2),
    ("b", 1, 1, 0.0, 3),
]


def _v1(name: str, uid_of_row: bool, norm: bool = True) -> torch.Tensor:
    keys = [row_uid(uid, session, index) for uid, session, index, _, _ in SESSIONS]
    uids = keys if uid_of_row else [uid for uid, *_ in SESSIONS]
    pad = ["padf00_0_0", "padf00_1_0"]
    data = batch(
        [reward for *_, reward, _ in SESSIONS] + [0.0, 0.0],
        [*uids, "padf00", "padf00"],
        [length for *_, length in SESSIONS] + [0, 0],
    )
    found = compute_advantage_for_multi_trajectories(
        data,
        batch_keys=keys + pad,
        adv_estimator=name,
        norm_adv_by_std_in_grpo=norm,
        config=OmegaConf.create({"norm_adv_by_std_in_grpo": norm}),
    )
    return found.batch["advantages"]


@pytest.mark.parametrize("norm", [True, False])
def test_a_session_with_several_rows_counts_once(norm: bool) -> None:
    torch.testing.assert_close(
        _v1("grpo_skip_missing", uid_of_row=True, norm=norm),
        _v1("grpo", uid_of_row=False, norm=norm),
        rtol=1e-4,
        atol=1e-5,
    )


def test_rloo_by_sessions() -> None:
    found = _v1("rloo_skip_missing", uid_of_row=True)
    # of "a": 1, 0, 0.5; of "b": 1, 0
    assert found[:, 0].tolist() == pytest.approx([0.75, -1.0, -0.75, 0.75, 0.75, 1.0, 0.0, -1.0, 0.0, 0.0])


# --- registration -----------------------------------------------------------------------------------------

REGISTRATION = """
import verl
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.utils.import_utils import load_class_from_fqn

try:
    get_adv_estimator_fn("grpo_skip_missing")
except ValueError as error:
    print(error)
load_class_from_fqn("rollout_backend.verl.CloudAgentLoopManager")
print(get_adv_estimator_fn("grpo_skip_missing").__name__)
"""


@pytest.mark.slow  # a process that loads verl
def test_loading_the_manager_registers_the_estimators() -> None:
    command = [sys.executable, "-W", "ignore", "-c", REGISTRATION]
    before, after = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "Unknown advantage estimator" in before
    assert after == "grpo_skip_missing"
