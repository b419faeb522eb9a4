"""Rollouts become verl's rows: each sampled token is trained or counted, and verl's own functions can read them."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from verl import DataProto
from verl.trainer.ppo.metric_utils import compute_data_metrics, process_validation_metrics
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.reward import extract_reward
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.utils.padding import (
    left_right_2_no_padding,
    no_padding_2_padding,
    response_from_nested,
    response_to_nested,
)

from agent_wrapper.contract import Outcome, Rollout, Sampling, Segment
from rollout_backend.core.rows import Rows, rows_of
from rollout_backend.core.task import Task
from rollout_backend.verl import manager
from rollout_backend.verl.async_batches import StepNumbers
from rollout_backend.verl.manager import CloudAgentLoopManager
from rollout_backend.verl.row_formats import legacy_batch, v1_fields, v1_tag
from rollouts import make_rollout, make_turn
from rollouts import segment_of as segment

PAD = 999


def rollout(*segments: Segment, reward: float | None = 0.5) -> Rollout:
    outcome = Outcome.COMPLETED if reward is not None else Outcome.AGENT_ERROR
    return make_rollout("task.0", outcome, reward=reward, segments=segments)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    kinds = st.sampled_from(["given", "sampled"])
    pieces = draw(st.lists(st.tuples(kinds, st.integers(0, 6)), max_size=6))
    total = sum(n for _, n in pieces)
    unknown = draw(st.sets(st.integers(0, max(0, total - 1)), max_size=4))
    version = draw(st.sampled_from(["1", "7", "default", None]))
    return segment(pieces, version, tuple(unknown))


lengths = st.integers(1, 12)
rollouts = st.lists(segments(), min_size=1, max_size=4).filter(lambda found: any(s.sampled_tokens for s in found))


# --- rows -------------------------------------------------------------------------------------------------


@given(rollouts, lengths, lengths)
def test_every_sampled_token_is_trained_once_or_counted(found: list[Segment], p: int, r: int) -> None:
    rows = rows_of(rollout(*found), p, r)

    sampled = sum(s.sampled_tokens for s in found)
    trained = sum(row.trained_tokens for row in rows)
    assert trained + rows.truncated_tokens + rows.unknown_logprobs == sampled
    assert rows.unknown_logprobs == sum(
        bool(m) and math.isnan(x) for s in found for m, x in zip(s.response_mask, s.logprobs, strict=True)
    )
    assert [row.index for row in rows] == list(range(len(rows)))


@given(rollouts, lengths, lengths)
def test_a_row_is_a_prefix_of_its_segment(found: list[Segment], p: int, r: int) -> None:
    rows = iter(rows_of(rollout(*found), p, r))
    for source in found:
        known = [bool(m) and not math.isnan(x) for m, x in zip(source.response_mask, source.logprobs, strict=True)]
        first = source.response_mask.index(1) if 1 in source.response_mask else 0
        start = max(1, min(first, p))
        if not any(known[start : start + r]):
            continue
        row = next(rows)
        n = len(row.response)
        assert row.prompt.tolist() == list(source.token_ids[:start])
        assert row.response.tolist() == list(source.token_ids[start : start + n])
        assert row.response_mask.tolist() == known[start : start + n]
        assert row.response_mask[-1] == 1
        assert not any(known[start + n : start + r])
        assert 1 <= n <= r
        expected = [x if k else 0.0 for x, k in zip(source.logprobs, known, strict=True)][start : start + n]
        assert row.logprobs.tolist() == expected
        assert (row.prompt.dtype, row.response_mask.dtype, row.logprobs.dtype) == (np.int64, np.int64, np.float32)
    assert not list(rows)


def test_an_infinite_logprob_counts_as_unknown() -> None:
    source = segment([("given", 1), ("sampled", 2)])
    source.logprobs[1] = -math.inf
    (row,) = rows_of(rollout(source), 4, 4)
    assert row.response_mask.tolist() == [0, 1]
    assert row.unknown_logprobs == 1


def versioned(*versions: str | None) -> Segment:
    n = len(versions)
    turns = [make_turn(1 + i, 2 + i, version) for i, version in enumerate(versions)]
    return Segment(token_ids=[1] * (n + 1), response_mask=[0] + [1] * n, logprobs=[None] + [-1.0] * n, turns=turns)


def test_a_row_has_the_versions_of_its_trained_tokens() -> None:
    def spread(*versions: str | None) -> tuple[int | None, int | None]:
        (row,) = rows_of(rollout(versioned(*versions)), 4, 3)
        return row.min_version, row.max_version

    assert spread("5", "7", "6") == (5, 7)
    assert spread("5", "default") == spread("5", None) == (5, None)
    assert spread("default") == (None, None)
    assert spread("5", "5", "6", "9") == (5, 6), "the last is cut off"


def test_rollouts_without_a_reward_are_refused() -> None:
    with pytest.raises(ValueError, match="without a reward"):
        rows_of(rollout(segment([("given", 1), ("sampled", 1)]), reward=None), 4, 4)
    with pytest.raises(ValueError, match="at least 1"):
        rows_of(rollout(segment([("given", 1), ("sampled", 1)])), 0, 4)


# --- v1 ---------------------------------------------------------------------------------------------------


def _base(session: int) -> dict[str, Any]:
    return {"uid": "u", "session_id": session, "payload": '{"a": [1]}', "nothing": None, "global_steps": 4}


def test_verl_can_read_v1_rows() -> None:
    second = segment([("given", 6), ("sampled", 2), ("given", 1)])
    rows = rows_of(rollout(segment([("given", 2), ("sampled", 3)]), second), 4, 8)
    data = list_of_dict_to_tensordict([v1_fields(row, _base(0)) for row in rows])

    assert len(data) == 2
    assert data["payload"] == ['{"a": [1]}'] * 2
    for name in ("prompts", "responses", "response_mask", "loss_mask", "input_ids", "position_ids"):
        assert data[name].dtype == torch.int64
    for name in ("rm_scores", "rollout_log_probs"):
        assert data[name].dtype == torch.float32
    assert data["input_ids"].offsets().diff().tolist() == [5, 8]
    padded = data["rm_scores"].to_padded_tensor(0.0)
    assert padded.tolist() == [[0, 0, 0.5, 0], [0, 0, 0, 0.5]]
    # The trainer cuts the responses' log-probs out of whole sequences and puts advantages back.
    whole = data["input_ids"].to(torch.float32)
    cut = response_from_nested(whole, data["response_mask"])
    assert cut.offsets().tolist() == data["responses"].offsets().tolist()
    back = response_to_nested(padded, data["response_mask"])
    assert torch.equal(back.values(), data["rm_scores"].values())


def test_v1_tags_have_only_numbers() -> None:
    second = segment([("given", 2), ("sampled", 1)], "default")
    known, unknown = rows_of(rollout(segment([("given", 2), ("sampled", 3)], "3"), second), 4, 8)
    assert v1_tag(known, 9, 8) == {
        "status": "success",
        "prompt_len": 2,
        "response_len": 3,
        "seq_len": 5,
        "global_steps": 9,
        "min_global_steps": 3,
        "max_global_steps": 3,
        "mean_version": 3.0,
        "trained_tokens": 3,
    }
    found = v1_tag(unknown, 9, 8)
    assert found["min_global_steps"] == found["mean_version"] == found["max_global_steps"] == 8
    (mixed,) = rows_of(rollout(versioned("3", "default")), 4, 8)
    assert v1_tag(mixed, 9, 8)["min_global_steps"] == 3, "what is unknown hides no known age"


# --- legacy -----------------------------------------------------------------------------------------------


def _data(slots: list[Rows | None], p: int, r: int) -> DataProto:
    batch = legacy_batch(slots, p, r, PAD)
    return DataProto(batch=batch.tensors, non_tensor_batch=batch.non_tensors)


@given(st.lists(st.one_of(st.none(), rollouts), min_size=1, max_size=5), lengths, lengths)
def test_a_legacy_batch_survives_verls_padding_and_unpadding(found, p, r):
    slots = [None if one is None else rows_of(rollout(*one), p, r) for one in found]
    made = legacy_batch(slots, p, r, PAD)
    batch = made.tensors

    assert batch["prompts"].shape == (len(slots), p)
    for name in ("responses", "response_mask", "rm_scores", "rollout_log_probs"):
        assert batch[name].shape == (len(slots), r)
    for name in ("input_ids", "attention_mask", "position_ids"):
        assert batch[name].shape == (len(slots), p + r)
    for name, values in batch.items():
        assert values.dtype == (torch.float32 if name in ("rm_scores", "rollout_log_probs") else torch.int64)
        assert torch.isfinite(values).all()
    assert made.missing.tolist() == [not rows for rows in slots]
    held = int(batch["response_mask"].sum())
    assert held + made.left_out_tokens == sum(row.trained_tokens for rows in slots if rows for row in rows)
    assert not (batch["response_mask"] * (1 - batch["attention_mask"][:, p:])).any()

    data = DataProto(batch=batch, non_tensor_batch=made.non_tensors).to_tensordict()
    ids = data["input_ids"].clone()
    unpadded = left_right_2_no_padding(data)
    sequences = unpadded["input_ids"].unbind()
    for i, (sequence, positions) in enumerate(zip(sequences, unpadded["position_ids"].unbind(), strict=True)):
        assert sequence.tolist() == ids[i][batch["attention_mask"][i].bool()].tolist()
        assert positions.tolist() == list(range(len(sequence)))
    # The model's value for each token, shifted by one, returns to the token's column.
    values = torch.cat([torch.cat([s[1:], s[:1]]) for s in sequences]).float()
    offsets = unpadded["input_ids"].offsets()
    columns = no_padding_2_padding(torch.nested.nested_tensor_from_jagged(values, offsets=offsets), unpadded)
    shown = batch["attention_mask"][:, p:].bool()
    assert torch.equal(columns[shown].long(), batch["responses"][shown])


def test_a_legacy_batch_keeps_the_order_and_pads_as_verl_does() -> None:
    one = rows_of(rollout(segment([("given", 2), ("sampled", 2)]), reward=1.0), 3, 4)
    made = legacy_batch([one, None], 3, 4, PAD)
    batch = made.tensors

    assert batch["prompts"].tolist() == [[PAD, 100, 101], [PAD, PAD, PAD]]
    assert batch["responses"].tolist() == [[102, 103, PAD, PAD], [PAD] * 4]
    assert batch["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 0, 1, 2, 3, 3, 3], [0, 0, 0, 0, 0, 0, 0]]
    assert batch["response_mask"].tolist() == [[1, 1, 0, 0], [0] * 4]
    assert batch["rm_scores"].tolist() == [[0, 1, 0, 0], [0] * 4]
    assert made.missing.tolist() == [False, True]
    assert made.non_tensors["__num_turns__"].tolist() == [1, 0]
    assert list(made.non_tensors["multi_modal_inputs"]) == [{}, {}]


def test_a_legacy_batch_asks_for_a_rollout_per_row(monkeypatch: pytest.MonkeyPatch) -> None:
    maker = object.__new__(CloudAgentLoopManager)
    maker.settings = SimpleNamespace(scoring=SimpleNamespace(enabled=False), sampling=Sampling(seed=7))
    maker._rollout, maker._step_numbers = None, StepNumbers(False)
    maker._blocking = SimpleNamespace(wait_for=lambda work: work)
    collected = []

    def collect(tasks: list[Task], *_: object) -> None:
        collected.extend(tasks)
        raise InterruptedError

    monkeypatch.setattr(maker, "_collect", collect, raising=False)
    monkeypatch.setattr(manager, "sampling_of", lambda *_, **__: Sampling())
    names = ["a", "b", "b", "b", "a"]
    columns = {
        "uid": np.array(names, dtype=object),
        "payload": np.array([{"name": name} for name in names], dtype=object),
        "task_id": np.array(names, dtype=object),
    }
    with pytest.raises(InterruptedError):
        maker._roll_out_legacy(DataProto(non_tensor_batch=columns, meta_info={"global_steps": 1}))
    assert [(task.task_id, task.rollouts, task.payload) for task in collected] == [
        ("a", 2, {"name": "a"}),
        ("b", 3, {"name": "b"}),
    ]


def test_verls_validation_leaves_lost_rollouts_out_of_its_mean_reward() -> None:
    found = [rows_of(rollout(segment([("sampled", 2)]), reward=reward), 3, 4) for reward in (1.0, 0.5)]
    maker = SimpleNamespace(_lengths=(3, 4), _pad_token_id=PAD, _vision=None, _experts=None)
    result = SimpleNamespace(report=SimpleNamespace(lag=None))

    def validate(*slots: Rows | None) -> tuple[dict[str, float], dict[str, float]]:
        batch = CloudAgentLoopManager._legacy_output(maker, [*slots], Counter(), result, 0, 0.0, True)
        scores, values = extract_reward(batch)
        values = {"reward": scores.sum(-1).tolist()} | {name: each.tolist() for name, each in values.items()}
        uids = [str(i) for i in range(len(slots))]
        of_source = process_validation_metrics(["a"] * len(slots), uids, values)["a"]
        return of_source.get("acc", {}), of_source["reward"]

    acc, reward = validate(*found, None)
    assert acc == {"mean@1": 0.75}
    assert math.isnan(reward["mean@1"])
    assert validate(*found) == ({"mean@1": 0.75}, {"mean@1": 0.75})
    acc, reward = validate(None)
    assert acc == {}
    assert math.isnan(reward["mean@1"])


def test_legacy_trains_the_segment_with_the_most_trained_tokens() -> None:
    def source(n: int) -> Segment:
        return segment([("given", 1), ("sampled", n)])

    made = legacy_batch([rows_of(rollout(source(2), source(4), source(4), source(1)), 3, 6)], 3, 6, PAD)
    assert made.tensors["response_mask"].sum() == 4
    assert made.left_out_tokens == 7


def test_verls_metrics_treat_a_missing_rollout_as_aborted() -> None:
    found = [rows_of(rollout(segment([("given", 2), ("sampled", 2)]), reward=x), 3, 4) for x in (1.0, 0.5)]
    data = _data([*found, None], 3, 4)
    data.batch["token_level_scores"] = data.batch["token_level_rewards"] = data.batch["rm_scores"]
    data.non_tensor_batch["uid"] = np.array(["a"] * 3, dtype=object)
    compute_advantage(data, "grpo_skip_missing")

    metrics = compute_data_metrics(data, use_critic=False)

    assert metrics["critic/score/mean"] == 0.75
    assert metrics["response/aborted_ratio"] == pytest.approx(1 / 3)
