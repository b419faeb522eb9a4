"""The estimators equal verl's if no rollout is missing, and missing rollouts never change them."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, AdvantageEstimator, get_adv_estimator_fn
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from rollout_backend.core.advantages import Rollouts
from rollout_backend.errors import ConfigError
from rollout_backend.verl.advantage import ESTIMATORS, register_rollout_estimator, row_uid
from rollout_backend.verl.unsupported import refuse_unsupported
from trainings import verl_settings

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


# --- against verl's estimators, which get one row for each present rollout --------------------------------

PAIRS = {
    "grpo_skip_missing": ("grpo", "grpo_vectorized"),
    "rloo_skip_missing": ("rloo", "rloo_vectorized"),
    "reinforce_plus_plus_baseline_skip_missing": ("reinforce_plus_plus_baseline",),
    "gpg_skip_missing": ("gpg",),
    "opo_skip_missing": ("opo",),
    "grpo_passk_skip_missing": ("grpo_passk",),
}
"""Ours, and verl's that they replace."""

Rollout = tuple[float, list[int]]  # the reward, and the trained tokens of each row; none if it is lost

rollout = st.tuples(st.sampled_from([0.0, 1.0, 0.25, -2.0]), st.lists(st.integers(0, WIDTH), max_size=3))
groups = st.lists(st.lists(rollout, min_size=1, max_size=5), min_size=1, max_size=4)
ONE_ROW = [[(1.0, [2]), (0.0, [4]), (0.0, [1]), (0.25, [3])], [(1.0, [1]), (0.0, [3])]]


def references(name: str, found: list[list[Rollout]], by_std: bool) -> dict[tuple[int, int], float]:
    """Return what verl's estimator gives each rollout that can be compared, if it has one row with all its tokens."""
    present = {(g, i): each for g, group in enumerate(found) for i, each in enumerate(group) if sum(each[1])}
    rollouts = {place: each for place, each in present.items() if sum(g == place[0] for g, _ in present) > 1}
    if not rollouts:
        return {}
    width = max(sum(tokens) for _, tokens in rollouts.values())
    mask = torch.tensor([[float(t < sum(tokens)) for t in range(width)] for _, tokens in rollouts.values()])
    scores = torch.zeros(len(rollouts), width, dtype=torch.float64)  # verl divides noise of float32 by epsilon
    scores[:, 0] = torch.tensor([reward for reward, _ in rollouts.values()])
    data = DataProto(
        batch=TensorDict({"token_level_rewards": scores, "response_mask": mask.double()}, batch_size=len(rollouts)),
        non_tensor_batch={"uid": np.array([f"u{g}" for g, _ in rollouts], dtype=object)},
    )
    config = OmegaConf.create({"norm_adv_by_std_in_grpo": by_std})
    function = get_adv_estimator_fn(name)
    by_argument = {"norm_adv_by_std_in_grpo": by_std} if name in ("grpo", "grpo_vectorized") else {}
    advantages, _ = function(
        token_level_rewards=data.batch["token_level_rewards"],
        response_mask=data.batch["response_mask"],
        index=data.non_tensor_batch["uid"],
        config=config,
        **by_argument,
    )
    return dict(zip(rollouts, advantages[:, 0].tolist(), strict=True))


def rows_of(found: list[list[Rollout]], padding: int = 0) -> tuple[DataProto, list[str], list[tuple[int, int]]]:
    """Return the batch as v1 has it, the keys of its rows, and the rollout of each row that pads nothing."""
    rows = [
        (reward, row_uid(f"u{g}", i, segment), tokens, (g, i))
        for g, group in enumerate(found)
        for i, (reward, segments) in enumerate(group)
        for segment, tokens in enumerate(segments)
    ]
    random.Random(len(rows)).shuffle(rows)  # as verl's balancing does
    keys = [key for _, key, _, _ in rows] + [f"padf00_{i}_0" for i in range(padding)]
    uids = [key if not key.startswith("pad") else "padf00" for key in keys]
    lengths = [tokens for _, _, tokens, _ in rows] + [0] * padding
    return batch([reward for reward, *_ in rows] + [0.0] * padding, uids, lengths), keys, [row[3] for row in rows]


@given(groups, st.sampled_from([*PAIRS]), st.booleans(), st.integers(0, 3))
@example(ONE_ROW, "grpo_skip_missing", False, 0)
@example(ONE_ROW, "reinforce_plus_plus_baseline_skip_missing", True, 2)
@example([[(1.0, [2, 1, 1, 3]), (0.0, [4]), (0.0, []), (0.0, [0])], [(1.0, [2])]], "gpg_skip_missing", True, 3)
def test_ours_equal_verls_for_one_row_per_rollout(
    found: list[list[Rollout]], name: str, by_std: bool, padding: int
) -> None:
    """For several rows, lost rollouts, rows that are rejected as a whole, single survivors and padding."""
    data, _, places = rows_of(found, padding)
    if not len(data):
        return
    mask = data.batch["response_mask"]
    ours = advantages(name, data, OmegaConf.create({"norm_adv_by_std_in_grpo": by_std}))
    for stock in PAIRS[name]:
        expected = references(stock, found, by_std)
        wanted = torch.tensor([expected.get(place, 0.0) for place in places] + [0.0] * padding)
        torch.testing.assert_close(ours, wanted.unsqueeze(-1) * mask, rtol=1e-4, atol=1e-4)


def test_each_estimator_of_verl_has_a_row_in_the_table() -> None:
    """The table says of each what `refuse_unsupported` does."""
    text = (Path(__file__).parents[2] / "docs" / "training-internals.md").read_text()
    table = [line for line in text.partition("## Estimators")[2].splitlines() if line.startswith("| `")]
    rows = {name: line for line in table for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert rows.keys() >= {each.value for each in AdvantageEstimator} | ESTIMATORS.keys()
    for name in {each.value for each in AdvantageEstimator} | PAIRS.keys():
        config = verl_settings("actor_rollout_ref.rollout.name=sglang", f"algorithm.adv_estimator={name}")
        try:
            refuse_unsupported(config)
            refused = False
        except ConfigError:
            refused = True
        assert refused == ("refused" in rows[name].split("|")[3]), rows[name]


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "grpo"])
def test_padding_changes_nothing_in_those_of_verl_that_are_accepted(name: str) -> None:
    config = OmegaConf.create({"gamma": 1.0, "norm_adv_by_std_in_grpo": True})
    found = []
    for padding in (0, 5):
        data, keys, places = rows_of([[(1.0, [2, 1]), (0.0, [4]), (0.5, [1, 3, 2])]], padding)
        data.batch["values"] = torch.zeros_like(data.batch["token_level_rewards"])
        data.non_tensor_batch["uid"] = np.array([key.partition("_")[0] for key in keys], dtype=object)
        made = compute_advantage_for_multi_trajectories(data, batch_keys=keys, adv_estimator=name, config=config)
        found.append((made.batch["advantages"] * made.batch["response_mask"])[: len(places)])
    torch.testing.assert_close(*found)


def test_reinforce_plus_plus_has_the_same_advantage_for_any_split_of_a_rollout() -> None:
    """Without discount and turn rewards: each token's return is the rollout's reward."""
    config = OmegaConf.create({"gamma": 1.0})
    split, _, places = rows_of([[(1.0, [2, 1]), (0.0, [4]), (0.5, [1, 2, 1])]])
    whole, _, order = rows_of([[(1.0, [3]), (0.0, [4]), (0.5, [4])]])
    ours = compute_advantage(split, "reinforce_plus_plus", config=config).batch["advantages"][:, 0].tolist()
    theirs = compute_advantage(whole, "reinforce_plus_plus", config=config).batch["advantages"][:, 0].tolist()
    by_rollout = dict(zip(order, theirs, strict=True))
    assert ours == pytest.approx([by_rollout[place] for place in places])


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_a_single_survivor_has_advantage_0_and_not_its_reward(name: str) -> None:
    data = [1.0, 0.0, 0.0], ["a", "a", "b"], [2, 0, 2]
    assert not advantages(f"{name}_skip_missing", batch(*data)).any()
    assert advantages(name, batch([1.0], ["a"], [2]))[0, 0] == pytest.approx(1), (
        "verl's estimators return the raw reward"
    )


def test_grpo_of_verl_counts_a_rollout_whose_last_row_is_rejected_and_trains_none_of_its_rows() -> None:
    """Therefore it is refused with `rollout_rs`."""
    data, keys, places = rows_of([[(1.0, [2, 0]), (0.0, [4]), (0.0, [1])]])
    data.non_tensor_batch["uid"] = np.array(["u0"] * len(keys), dtype=object)
    made = compute_advantage_for_multi_trajectories(data, batch_keys=keys, adv_estimator="grpo")
    by_place = dict(zip(places, made.batch["advantages"][:, 0].tolist(), strict=True))
    assert by_place[0, 0] == 0
    assert by_place[0, 1] < -0.5


def test_users_register_functions_of_rollouts() -> None:
    def mine(rollouts: Rollouts, settings: Any) -> np.ndarray:
        assert rollouts.count.tolist() == [2, 2]
        return rollouts.reward * 10

    try:
        register_rollout_estimator(mine)
        data, _, places = rows_of([[(1.0, [2, 1]), (0.0, [1]), (5.0, [])], [(7.0, [1])]])
        found = dict(zip(places, advantages("mine", data)[:, 0].tolist(), strict=True))
        assert found == {(0, 0): 10, (0, 1): 0, (1, 0): 0}
        config = verl_settings("actor_rollout_ref.rollout.name=sglang", "algorithm.adv_estimator=mine")
        refuse_unsupported(config)
    finally:
        del ESTIMATORS["mine"], ADV_ESTIMATOR_REGISTRY["mine"]


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
