"""verl's real trainers through the whole backend: real weights, a real engine, agents as processes, lost ones too.

A start of a trainer takes most of a minute on two cores, so that each run here shows as much as it can.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tenacity import AsyncRetrying, stop_after_delay, wait_fixed

from agent_wrapper.contract import Rollout
from rollout_backend.run.accounts.archive import RunArchive
from trainings import GROUP, SAME, grpo, normal

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]


def advantages(rows: list[dict[str, Any]]) -> dict[float, float]:
    """Return the trained advantage of each reward. Rows with the same reward, a session's, must agree."""
    found: dict[float, set[float]] = defaultdict(set)
    for row in rows:
        assert row["trained"] > 0
        found[row["reward"]].update(row["advantages"])
    assert all(len(values) == 1 for values in found.values()), found
    return {reward: values.pop() for reward, values in found.items()}


def is_trained_well(metrics: dict[str, float]) -> None:
    assert metrics["training/rollout_probs_diff_max"] < SAME
    assert metrics["actor/grad_norm"] > 0


def rollouts(metrics: dict[str, float], prefix: str = "rollouts/") -> dict[str, float]:
    """Return our non-zero metrics among verl's that count rollouts."""
    ours = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
    assert {"left_out/sum", "left_out/infra_error/sum", "groups_dropped/sum", "staleness/max"} <= ours.keys()
    assert ours.pop("trained_tokens/sum") > 0
    return {key: value for key, value in ours.items() if value}


async def test_each_step_trains_what_its_own_weights_have_sampled(tmp_path: Path, training: Any) -> None:
    """Rollouts are lost in the first step. In the third a server reports a version that it does not serve, which the
    metrics must show."""
    first = [
        normal("segments", segments=3),
        {"name": "one-lost", "rewards": [9.0, 0.0, 1.0, 0.25], "do": {"0": "raise"}},
        {"name": "all-lost", "rewards": [1.0] * GROUP, "do": dict.fromkeys("0123", "raise")},
        *(normal(f"first-{i}") for i in range(2)),
    ]
    second = [normal(f"second-{i}") for i in range(5)]
    second[0]["columns"] = {"__rollout_n__": 2}  # fewer than the others, which have no such column
    # Their first model call comes after the engine serves the weights of version 0 as version 2.
    stale = normal("stale", segments=0, do=dict.fromkeys("0123", "wait for go"))
    third = [stale, *(normal(f"third-{i}", columns={"__rollout_n__": 2}) for i in range(4))]
    async with training(tmp_path, first + second + third, len(first)) as run:
        await run.start()
        await run.until(lambda: [*run.begun().values()].count("stale") == GROUP, "at work in step 3", within_s=900)
        await push(run, run.work / "model", version=2)
        run.say("go")
        assert await run.ends() == 0, run.verl.log_tail()

        rows = run.gradient(step=2)
        assert {name: len(of_group) for name, of_group in rows.items()} == {
            task["name"]: 2 if task is second[0] else GROUP for task in second
        }
        before, after, old = run.metrics()
        for metrics in (before, after):
            is_trained_well(metrics)
        losses_do_not_reach_the_gradient(run, before)
        assert old["training/rollout_probs_diff_max"] > SAME, "old weights with a new version are not visible"
        assert [run.versions(step) for step in (1, 2, 3)] == [{"0"}, {"1"}, {"2"}]

        for report in run.reports():
            assert report.staleness is not None
            assert report.staleness.max == 0
        assert rollouts(after) == {"planned/sum": 18, "trained/sum": 18}
        _, clean, _ = run.reports()
        assert clean.trainable == clean.planned == len(second) * GROUP - 2
        # Named after the rows of the dataset, where `rollout show` finds them.
        assert [group.task_id for group in clean.groups] == [f"task-{i:05d}" for i in range(5, 10)]
        archive = RunArchive(run.run_dir)
        info = archive.read_info()
        assert info is not None
        assert (info.starts[-1].by, info.starts[-1].state) == ("verl", "ended")
        assert info.starts[-1].current_state(archive.info_renewed_at()) == "ended"
        [record] = archive.find_records("task-00005.1")
        [file] = archive.find_rollout("task-00005.1")
        assert record.is_of(Rollout.decode(file.read_bytes()))
        archive.close()
        await run.leaves_nothing()


def losses_do_not_reach_the_gradient(run: Any, metrics: dict[str, float]) -> None:
    """Check the first step, in which rollouts were lost."""
    rows = run.gradient(step=1)
    present = {"segments": 12, "one-lost": 3, "first-0": GROUP, "first-1": GROUP}
    assert {name: len(of_group) for name, of_group in rows.items()} == present
    assert advantages(rows["segments"]) == pytest.approx(grpo([0.0, 1.0, 0.25, 0.5]), abs=1e-5)
    assert advantages(rows["one-lost"]) == pytest.approx(grpo([0.0, 1.0, 0.25]), abs=1e-5)
    trained = [value for of_group in rows.values() for row in of_group for value in row["advantages"]]
    assert metrics["critic/advantages/max"] == pytest.approx(max(trained))
    assert metrics["critic/advantages/min"] == pytest.approx(min(trained))

    report = run.report(step=1)
    # Once three of a group are lost, the fourth may be cancelled before it is lost too.
    raised = 5 - report.reasons.get("cancelled: group_doomed", 0)
    assert raised in (4, 5)
    assert report.reasons["agent_error: agent_exception"] == raised
    expected = {
        "planned/sum": 20,
        "trained/sum": 15,
        "left_out/sum": 5,
        "left_out/agent_error/sum": raised,
        "left_out_by_reason/agent_error/agent_exception/sum": raised,
        "groups_dropped/sum": 1,
    }
    assert rollouts(metrics).items() >= expected.items()
    names = run.groups()
    assert [names[group.task_id] for group in report.groups if not group.usable] == ["all-lost"]


async def push(run: Any, folder: Path, version: int) -> None:
    """Let the engine load the weights of a folder with any version, without the trainer."""
    [command] = run.processes("launch_server.py").values()
    words = command.split()
    url = f"http://127.0.0.1:{words[words.index('--port') + 1]}/update_weights_from_disk"
    async with httpx.AsyncClient(timeout=60) as http:
        # While calls of other rollouts run, the engine updates its weights, but does not flush its cache.
        async for attempt in AsyncRetrying(stop=stop_after_delay(60), wait=wait_fixed(0.2), reraise=True):
            with attempt:
                reply = await http.post(url, json={"model_path": str(folder), "weight_version": str(version)})
                assert reply.json()["success"], reply.text


@pytest.mark.release
async def test_a_step_without_a_rollout_stops_the_run(tmp_path, training):
    one_lost = normal("one-lost", do={"3": "raise"})
    everyone = dict.fromkeys("0123", "raise")
    broken = [{"name": f"broken-{i}", "rewards": [0.0] * GROUP, "do": everyone} for i in range(2)]
    async with training(tmp_path, [normal("whole"), one_lost, *broken], 2) as run:
        await run.start()
        assert await run.ends() != 0

        trained, lost = run.reports()
        assert trained.trainable == 7
        assert trained.reasons == {"agent_error: agent_exception": 1}

        assert lost.trainable == 0
        # Which rollouts of a lost group are cancelled depends on timing.
        assert lost.reasons.keys() <= {"agent_error: agent_exception", "cancelled: group_doomed"}
        for word in ("0 of 2 groups usable", "agent_error: agent_exception", "the tool is broken"):
            assert word in run.log
        assert len(run.spy_file.read_text().splitlines()) == 1, "the second step reached the gradient"
        await run.leaves_nothing()


async def test_the_legacy_trainer_leaves_a_lost_slot_empty(tmp_path: Path, training: Any) -> None:
    first = [normal("normal"), {"name": "one-lost", "rewards": [9.0, 0.0, 1.0, 0.25], "do": {"0": "raise"}}]
    second = [normal("second-0"), normal("second-1")]
    async with training(tmp_path, first + second, 2, "trainer.use_v1=False") as run:
        await run.start()
        assert await run.ends() == 0, run.verl.log_tail()
        rows = defaultdict(list)
        for row in json.loads(run.spy_file.read_text().splitlines()[0]):
            rows[row["group"]].append(row)
        assert {name: len(of_group) for name, of_group in rows.items()} == {"normal": GROUP, "one-lost": GROUP}
        [missing] = [row for row in rows["one-lost"] if not row["trained"]]
        assert missing["advantages"] == []
        present = [row for row in rows["one-lost"] if row["trained"]]
        assert advantages(present) == pytest.approx(grpo([0.0, 1.0, 0.25]), abs=1e-5)
        assert advantages(rows["normal"]) == pytest.approx(grpo([0.0, 1.0, 0.25, 0.5]), abs=1e-5)
        for metrics in run.metrics():
            is_trained_well(metrics)
        assert [run.versions(step) for step in (1, 2)] == [{"0"}, {"1"}]
        lossy, clean = run.reports()
        assert lossy.reasons == {"agent_error: agent_exception": 1}
        lost, whole = run.metrics()
        assert rollouts(lost, "timing_s/rollouts/") == {
            "planned/sum": 8,
            "trained/sum": 7,
            "left_out/sum": 1,
            "left_out/agent_error/sum": 1,
            "left_out_by_reason/agent_error/agent_exception/sum": 1,
        }
        assert rollouts(whole, "timing_s/rollouts/") == {"planned/sum": 8, "trained/sum": 8}
        assert clean.trainable == clean.planned == 2 * GROUP
        await run.leaves_nothing()


@pytest.mark.release
async def test_a_greedy_baseline_is_rolled_out_and_a_lost_one_trains_nothing(tmp_path: Path, training: Any) -> None:
    """REMAX exists only in verl's legacy trainer."""
    tasks = [
        {"name": "compared", "rewards": [0.5, 1.0, 0.25, 0.0], "baseline": 0.75},
        {"name": "no-baseline", "rewards": [9.0] * GROUP, "baseline": 9.0, "do": {"greedy": "raise"}},
    ]
    remax = ("trainer.use_v1=False", "algorithm.adv_estimator=remax")
    async with training(tmp_path, tasks, 2, *remax) as run:
        await run.start()
        assert await run.ends() == 0, run.verl.log_tail()
        [metrics] = run.metrics()
        is_trained_well(metrics)
        assert metrics["critic/advantages/max"] == pytest.approx(0.25)
        assert metrics["critic/advantages/min"] == pytest.approx(-0.75)
        assert rollouts(metrics, "timing_s/rollouts/") == {
            "planned/sum": 2 * (GROUP + 1),
            "trained/sum": GROUP + 1,
            "left_out/sum": GROUP + 1,
            "left_out/agent_error/sum": 1,
            "left_out_by_reason/agent_error/agent_exception/sum": 1,
            "left_out/group_dropped/sum": GROUP,
            "groups_dropped/sum": 2,
        }
        greedy = {rollout.rollout_id.partition("-greedy")[1]: is_greedy(run, rollout) for rollout in run.rollouts(1)}
        assert greedy == {"-greedy": True, "": False}
        assert len(run.reports()) == 1
        await run.leaves_nothing()


def is_greedy(run: Any, rollout: Rollout) -> bool:
    """Return whether each token is the model's most likely one."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run.work / "model")
    found = []
    for segment in rollout.segments:
        ids = torch.tensor(segment.token_ids.tolist())
        with torch.no_grad():
            likely = model(ids[None]).logits[0, :-1].argmax(-1)
        sampled = torch.tensor(segment.response_mask.tolist(), dtype=torch.bool)[1:]
        found.append(torch.equal(likely[sampled], ids[1:][sampled]))
    return all(found)
