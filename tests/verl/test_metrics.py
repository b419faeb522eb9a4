"""Metrics of what a step left out: each rollout is in one class, and verl adds the counts up."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.metric_utils import process_validation_metrics
from verl.trainer.ppo.v1 import replay_buffer
from verl.trainer.ppo.v1.utils import MetricsAggregator
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from agent_wrapper.contract import Failure, Outcome, Rollout, Segment
from rollout_backend.config import ExpertShape
from rollout_backend.core.rows import Rows, rows_of
from rollout_backend.core.tasks import Task
from rollout_backend.errors import ConfigError
from rollout_backend.run.accounts.step_report import GroupResult, StepFailure
from rollout_backend.verl.manager import reward_extra_info
from rollout_backend.verl.metrics import TALLY, as_metrics, count_group
from rollout_backend.verl.row_formats import v1_fields, v1_tag
from rollout_backend.verl.v1_batch import QueueRow, QueueWriter, V1Batch
from rollouts import make_rollout, make_segment
from trainings import verl_settings


def rollout(number: int, version: str = "3", logprob: float | None = -0.5, tokens: int = 4) -> Rollout:
    segment = make_segment(1, tokens, version=version, logprob=logprob)
    return make_rollout(f"task.{number}", segments=[segment])


def scored_error(number: int) -> Rollout:
    failed = {"outcome": Outcome.AGENT_ERROR, "failure": Failure(reason="agent_exception", message="x")}
    return rollout(number).model_copy(update=failed)


def failure(number: int, outcome: Outcome, reason: str) -> StepFailure:
    return StepFailure(f"task.{number}", "task", outcome, reason, "", None, 1)


def group(
    *rollouts: Rollout, planned: int, failures: tuple[StepFailure, ...] = (), usable: bool = True
) -> GroupResult:
    return GroupResult(Task("task", {}), rollouts, usable, planned, failures)


def made(found: GroupResult, prompt: int = 8, response: int = 8) -> list[Rows]:
    return [rows_of(one, prompt, response) for one in found.rollouts] if found.usable else []


def metrics(*groups: tuple[GroupResult, list[Rows]]) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for found, rows in groups:
        counts.update(count_group(found, rows))
    trained = sum(len(rows) > 0 for _, of_group in groups for rows in of_group)
    return as_metrics(counts, trained)


def present(found: dict[str, float]) -> dict[str, float]:
    return {key.removeprefix("rollouts/").removesuffix("/sum"): value for key, value in found.items() if value}


def test_each_rollout_is_trained_or_left_out_in_one_class() -> None:
    lossy = group(
        rollout(0),
        rollout(1, logprob=None),  # has no token that can be trained
        scored_error(2),  # failed, but is trained
        planned=7,  # number 6 completed with messages only
        failures=(
            failure(2, Outcome.AGENT_ERROR, "agent_exception"),
            failure(3, Outcome.TIMED_OUT, "no_result"),
            failure(4, Outcome.INFRA_ERROR, "container_error"),
            failure(5, Outcome.INFRA_ERROR, "container_error"),
        ),
    )
    dropped = group(rollout(0), planned=3, usable=False, failures=(failure(1, Outcome.CANCELLED, "step_over"),) * 2)
    found = metrics((lossy, made(lossy)), (dropped, made(dropped)))
    assert present(found) == {
        "planned": 10,
        "trained": 2,
        "left_out": 8,
        "left_out/untrainable": 2,
        "left_out/timed_out": 1,
        "left_out_by_reason/timed_out/no_result": 1,
        "left_out/infra_error": 2,
        "left_out_by_reason/infra_error/container_error": 2,
        "left_out/cancelled": 2,
        "left_out_by_reason/cancelled/step_over": 2,
        "left_out/group_dropped": 1,
        "groups_dropped": 1,
        "unknown_logprobs": 4,
    }
    assert found["rollouts/planned/sum"] == found["rollouts/trained/sum"] + found["rollouts/left_out/sum"]


def test_truncated_tokens_and_unknown_versions_are_counted() -> None:
    found = group(rollout(0, tokens=6), rollout(1, version="default"), planned=2)
    assert present(metrics((found, made(found, response=4)))) == {
        "planned": 2,
        "trained": 2,
        "truncated_tokens": 2,
        "unknown_versions": 4,
    }


def test_verl_logs_the_sums_of_a_step_with_several_batches() -> None:
    """verl takes the minimum of a metric with "min" in its name, such as the reason `terminated`."""
    trainer = Trainer(
        None, "separate_async", f"{SYNC_STEP}=2", "+trainer.v1.sampler.sampler_kwargs.stable_steps=False"
    )
    taken = iter([(9, 8), (9, 6), (10, 10), (10, 10)])  # versions of the rollouts of each batch

    def take(**_: Any) -> tuple[KVBatchMeta, dict[str, Any]]:
        rows = [rows_of(rollout(i, str(version)), 8, 8).rows[0] for i, version in enumerate(next(taken))]
        tags = [v1_tag(row, 10, 9) for row in rows]
        return KVBatchMeta(partition_id="train", keys=[f"u_{i}_0" for i in range(len(rows))], tags=tags), {}

    trainer.sampler._buffer = SimpleNamespace(sample=take)
    for step, losses in ((10, (2, 1)), (11, (0, 0))):
        aggregator = MetricsAggregator()
        for lost in losses:
            failures = tuple(failure(i, Outcome.INFRA_ERROR, "terminated") for i in range(2, 2 + lost))
            lossy = group(rollout(0), rollout(1), planned=2 + lost, failures=failures)
            TALLY.add("train", count_group(lossy, made(lossy)))
            batch, found = trainer.sampler.sample(global_steps=step, partition_id="train", batch_size=1)
            aggregator.add_step_metrics(found, sample_count=len(batch))
        whole = aggregator.get_aggregated_metrics()
        assert whole["rollouts/planned/sum"] == 4 + sum(losses)
        assert whole["rollouts/trained/sum"] == 4
        assert whole["rollouts/trained_tokens/sum"] == 16
        assert whole["rollouts/left_out/sum"] == whole["rollouts/left_out/infra_error/sum"] == sum(losses)
        assert whole.get("rollouts/left_out_by_reason/infra_error/terminated/sum", 0) == sum(losses)
        if losses[0]:
            assert (whole["rollouts/staleness/mean"], whole["rollouts/staleness/max"]) == (1.0, 3.0)


# --- the writer -------------------------------------------------------------------------------------------


def test_groups_that_wait_are_written_together_rows_before_statuses(monkeypatch):
    calls: list[list[tuple[str, str]]] = []
    entered, proceed, done = threading.Event(), threading.Event(), threading.Event()

    def kv_batch_put(keys: list[str], partition_id: str, tags: list[dict[str, Any]], fields: Any = None) -> None:
        assert partition_id == "train"
        assert fields is None or len(fields) == len(keys)
        calls.append([(key, tag["status"]) for key, tag in zip(keys, tags, strict=True)])
        entered.set()
        assert proceed.wait(60)
        if "u5" in keys:
            done.set()

    def rows_of(batch: V1Batch, group: GroupResult) -> list[QueueRow]:
        if group.task.task_id == "u3":
            raise ValueError("no rows")
        usable = range(group.planned if group.usable else 0)
        return [(f"{group.task.task_id}_{i}_0", {"ids": torch.arange(i + 1)}, {"status": "success"}) for i in usable]

    monkeypatch.setitem(sys.modules, "transfer_queue", SimpleNamespace(kv_batch_put=kv_batch_put))
    batch = V1Batch(1, [({"uid": f"u{i}"}, Task(f"u{i}", {})) for i in range(6)])
    errors: list[BaseException] = []
    writer = QueueWriter(rows_of, errors.append)
    for i, usable in enumerate((True, True, False, True, True)):
        writer.submit(batch, f"u{i}", GroupResult(Task(f"u{i}", {}), (), usable, planned=2))
        assert entered.wait(60)  # so that the first one is alone
    writer.submit(batch, "u5", None)
    proceed.set()
    assert done.wait(60)
    rows = {i: [(f"u{i}_0_0", "success"), (f"u{i}_1_0", "success")] for i in (0, 1, 4)}
    failures = {2: "failure", 3: "failure", 5: "failure"}
    statuses = [(f"u{i}", failures.get(i, "finished")) for i in range(1, 6)]
    assert calls == [rows[0], [("u0", "finished")], rows[1] + rows[4], statuses]
    assert [str(error) for error in errors] == ["no rows"]


@pytest.mark.parametrize("failures", [1, 4])
def test_a_status_is_written_until_transfer_queue_takes_it(monkeypatch, failures):
    monkeypatch.setattr("tenacity.nap.time", SimpleNamespace(sleep=lambda seconds: None))
    statuses: list[dict[str, str]] = []
    left, done = [TimeoutError("the controller did not answer")] * failures, threading.Event()

    def kv_batch_put(keys: list[str], tags: list[dict[str, str]], **_: object) -> None:
        if left:
            raise left.pop()
        statuses.append(dict(zip(keys, (tag["status"] for tag in tags), strict=True)))
        done.set()

    monkeypatch.setitem(sys.modules, "transfer_queue", SimpleNamespace(kv_batch_put=kv_batch_put))
    errors: list[BaseException] = []
    writer = QueueWriter(lambda batch, group: [], errors.append)
    writer.submit(V1Batch(1, [({"uid": "u"}, Task("t", {}))]), "t", None)
    assert done.wait(60)
    assert statuses == [{"u": "failure"}]
    assert errors == []


# --- the sampler, on a real TransferQueue -----------------------------------------------------------------


@pytest.fixture(scope="module")
def queue() -> Iterator[Any]:
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf

    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    storage = {"SimpleStorage": {"num_data_storage_units": 1}}
    tq.init(OmegaConf.create({"backend": storage}))
    yield tq
    tq.close()
    ray.shutdown()


def on_a_real_queue(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that needs Ray, which takes minutes to start on a busy machine."""
    return pytest.mark.slow(pytest.mark.timeout(1200)(test))


class Trainer:
    """A fake of verl's trainer: it writes prompts to the queue and refills it."""

    def __init__(self, queue: Any, mode: str, *overrides: str) -> None:
        from rollout_backend.verl.sampler import RolloutSampler

        self.queue = queue
        self.fresh = 100
        self.asked: list[int] = []
        self.config = config = verl_settings(f"trainer.v1.trainer_mode={mode}", *overrides)
        sampler = config.trainer.v1.sampler
        self.sampler = RolloutSampler(  # the arguments that verl passes to a custom sampler
            trainer_mode=mode,
            trainer_config=config.trainer.v1.get(mode, {}),
            max_off_policy_threshold=sampler.max_off_policy_threshold,
            max_off_policy_strategy=sampler.max_off_policy_strategy,
            sampler_kwargs=sampler.sampler_kwargs,
            refill_fn=self.refill,
        )

    def refill(self, count: int) -> None:
        self.asked.append(count)
        for _ in range(count):
            self.fresh += 1
            self.finish(f"u{self.fresh}", [9, 9])

    def finish(
        self,
        uid: str,
        versions: list[int],
        step: int = 10,
        status: str = "finished",
        order: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Write a group whose sessions were sampled by these versions, the last one first."""
        tag = {"is_prompt": True, "status": "running", "global_steps": step}
        self.queue.kv_put(key=uid, partition_id="train", tag=tag)
        for session, version in reversed(list(enumerate(versions))):
            (row,) = rows_of(rollout(session, str(version)), 8, 8)
            self.queue.kv_put(key=f"{uid}_{session}_0", partition_id="train", tag=v1_tag(row, step, step - 1) | order)
        self.queue.kv_put(key=uid, partition_id="train", tag={"status": status})

    def left(self) -> set[str]:
        return set((self.queue.kv_list("train") or {}).get("train", {}))


@pytest.fixture(autouse=True)
def clean_queue(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    TALLY.take("train")
    if "queue" in request.fixturenames:
        tq = request.getfixturevalue("queue")
        if keys := list((tq.kv_list("train") or {}).get("train", {})):
            tq.kv_clear(keys=keys, partition_id="train")


MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
SYNC_STEP = "trainer.v1.separate_async.parameter_sync_step"
OLD = "+trainer.v1.sampler.sampler_kwargs.max_staleness=2"


@on_a_real_queue
@pytest.mark.parametrize("mode", ["sync", "separate_async"])
def test_a_finished_batch_is_found_by_the_next_poll(queue: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(queue, mode, "data.train_batch_size=1")
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        trainer.finish("u1", [9, 9])

    monkeypatch.setattr(replay_buffer, "time", SimpleNamespace(sleep=pause, time=time.time))
    batch, _ = trainer.sampler.sample(global_steps=10, partition_id="train", batch_size=1)
    assert batch.keys
    assert pauses == [0.25]


@on_a_real_queue
def test_rows_have_the_order_of_the_prompts_and_not_of_their_arrival(queue: Any) -> None:
    trainer = Trainer(queue, "sync", "data.train_batch_size=2")
    batch = V1Batch(10, [({"uid": uid}, Task(uid, {})) for uid in ("u2", "u1")])
    for uid in ("u1", "u2"):
        trainer.finish(uid, [9, 9, 9], order=batch.order(uid))
    taken, _ = trainer.sampler.sample(global_steps=10, partition_id="train", batch_size=2)
    assert taken.keys == ["u2_0_0", "u2_1_0", "u2_2_0", "u1_0_0", "u1_1_0", "u1_2_0"]


@on_a_real_queue
def test_a_batch_waits_for_groups_that_would_become_too_old(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of step 8 and one of step 9 are unfinished: a batch of one leaves no place for one of them."""
    from rollout_backend.verl import sampler

    trainer = Trainer(queue, "separate_async", OLD, f"{SYNC_STEP}=1")
    trainer.finish("young", [9, 9], step=10)
    for uid, step in (("u1", 8), ("u2", 9), ("u3", 9)):
        trainer.finish(uid, [], step=step, status="running")
    awaited = []

    def finish_one(seconds: float) -> None:
        awaited.append(uids := sorted(uid for uid in trainer.left() if uid in ("u1", "u2", "u3")))
        trainer.finish(uids[len(awaited) - 1], [step - 1 for step in (8, 8)], step=7 + len(awaited))

    monkeypatch.setattr(sampler, "time", SimpleNamespace(sleep=finish_one))
    batch, found = trainer.sampler.sample(global_steps=10, partition_id="train", batch_size=1)
    assert len(awaited) == 2
    assert set(batch.keys) == {"u1_0_0", "u1_1_0"}, "the oldest group is not trained first"
    assert found["rollouts/left_out/too_old/sum"] == 0
    assert found["rollouts/staleness/max"] == 2


@on_a_real_queue
def test_batches_of_one_step_leave_places_to_each_other(queue: Any) -> None:
    """The first of four batches need not wait for a group that a later one can train."""
    trainer = Trainer(queue, "separate_async", OLD, f"{SYNC_STEP}=4")
    trainer.finish("u1", [9, 9], step=10)
    trainer.finish("u2", [], step=8, status="running")
    batch, _ = trainer.sampler.sample(global_steps=10, partition_id="train", batch_size=1)
    assert set(batch.keys) == {"u1_0_0", "u1_1_0"}


@on_a_real_queue
def test_rollouts_older_than_the_limit_are_dropped_and_counted(queue: Any) -> None:
    trainer = Trainer(queue, "separate_async", OLD, f"{SYNC_STEP}=1")
    trainer.finish("u1", [9, 7, 6], step=7)  # the oldest version that step 10 may train is 7
    trainer.finish("u2", [9, 8], step=8)
    batch, found = trainer.sampler.sample(global_steps=10, partition_id="train", batch_size=2)
    assert set(batch.keys) == {"u1_0_0", "u1_1_0", "u2_0_0", "u2_1_0"}
    assert found["rollouts/left_out/too_old/sum"] == found["rollouts/left_out/sum"] == 1
    assert (found["rollouts/too_old_tokens/sum"], found["rollouts/trained_tokens/sum"]) == (4, 16)
    assert found["rollouts/groups_dropped/sum"] == 0
    assert found["rollouts/trained/sum"] == 4
    assert found["rollouts/staleness/max"] == 2
    assert trainer.asked == []
    assert trainer.left() == set(batch.keys), "the stale row is still in the queue"


@on_a_real_queue
def test_a_group_with_a_single_fresh_rollout_is_replaced(queue: Any) -> None:
    trainer = Trainer(queue, "separate_async", OLD, f"{SYNC_STEP}=1")
    trainer.finish("u1", [9, 6], step=7)
    trainer.finish("u2", [5, 5], step=7)
    trainer.finish("u3", [8, 8], step=8)
    batch, found = trainer.sampler.sample(global_steps=10, partition_id="train", batch_size=3)
    assert set(batch.keys) == {"u3_0_0", "u3_1_0", "u101_0_0", "u101_1_0", "u102_0_0", "u102_1_0"}
    assert trainer.asked == [2]
    assert found["rollouts/left_out/too_old/sum"] == 4
    assert found["rollouts/groups_dropped/sum"] == 2
    assert trainer.left() == set(batch.keys)


@on_a_real_queue
def test_a_batch_of_many_rows_is_padded_for_as_many_steps_as_one_of_few(queue: Any) -> None:
    """Two prompts, mini-batches of one prompt, n = 2: seven rows become two mini-batches of four."""
    experts = {"layers": 1, "topk": 2, "id_bytes": 1, "ids": bytes([1, 2] * 4)}
    routed = Segment.parse({**make_segment(2, 3).model_dump(), "routed_experts": experts})
    sizes = ["data.train_batch_size=2", "actor_rollout_ref.rollout.n=2", f"{MINI_BATCH}=1", "critic.enable=False"]
    sizes.append("trainer.n_gpus_per_node=1")
    for more, expected in (([], 8), (["+trainer.v1.sampler.sampler_kwargs.stable_steps=False"], 7)):
        trainer = Trainer(queue, "sync", *sizes, *more)
        for uid, segments in (("u1", [3, 2]), ("u2", [1, 1])):
            rows = [
                (f"{uid}_{session}_{row.index}", row)
                for session, count in enumerate(segments)
                for row in rows_of(make_rollout(segments=[routed] * count), 8, 8, experts=ExpertShape(1, 2, 8))
            ]
            base = {"uid": uid, "session_id": 0, "payload": "{}"}
            fields = list_of_dict_to_tensordict([v1_fields(row, base) for _, row in rows])
            tags = [v1_tag(row, 10, 9) for _, row in rows]
            queue.kv_batch_put(keys=[key for key, _ in rows], partition_id="train", fields=fields, tags=tags)
            tag = {"is_prompt": True, "status": "finished", "global_steps": 10}
            queue.kv_put(key=uid, partition_id="train", tag=tag)
        batch, found = trainer.sampler.sample(global_steps=10, partition_id="train", batch_size=2)
        assert len(batch) == expected
        assert found["rollouts/trained/sum"] == 4
        mask = queue.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["response_mask"])
        trained = [int(row.sum()) for row in mask["response_mask"].unbind()]
        real = [not tag.get("is_padding", False) for tag in batch.tags]
        assert trained == [3 * each for each in real], "padding trains nothing"
        experts = queue.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["routed_experts"])
        found_ids = [each.reshape(len(each), 2).tolist() for each in experts["routed_experts"].unbind()]
        assert [each == [[1, 2]] * 4 + [[0, 0]] for each in found_ids] == real
        if expected == 8:
            assert trainer.config.actor_rollout_ref.actor.ppo_mini_batch_size == 2
            assert (sum(real[:4]), sum(real[4:])) == (3, 4)
        queue.kv_clear(keys=[*trainer.left()], partition_id="train")


@on_a_real_queue
def test_a_validation_batch_without_a_row_has_an_unknown_result_of_its_own(queue: Any) -> None:
    """verl ends the training if it asks TransferQueue for no rows."""
    trainer = Trainer(queue, "sync", "data.train_batch_size=2")
    for uid in ("u1", "u2"):
        tag = {"is_prompt": True, "status": "failure", "global_steps": 10}
        queue.kv_put(key=uid, partition_id="val", tag=tag)
    batch, _ = trainer.sampler.sample(global_steps=10, partition_id="val", batch_size=2)
    names = ["prompts", "responses", "uid", "rm_scores", "num_turns", "reward_model", "data_source", "extra_fields"]
    data = queue.kv_batch_get(keys=batch.keys, partition_id="val", select_fields=names)
    assert len(data) == data["prompts"].to_padded_tensor(padding=0).numel() == 1
    assert (data.pop("num_turns").tolist(), data.pop("extra_fields").tolist()) == ([0], [{}])
    sources = ["sums", *data.pop("data_source").tolist()]
    rewards = [1.0, *data["rm_scores"].sum(dim=1).tolist()]
    found = process_validation_metrics(sources, ["u", *data.pop("uid").tolist()], {"reward": rewards})
    assert found["sums"]["reward"]["mean@1"] == 1.0
    assert math.isnan(found["no_result"]["reward"]["mean@1"])
    queue.kv_clear(keys=batch.keys, partition_id="val")


@on_a_real_queue
def test_verls_buffer_keeps_all_its_settings(queue: Any) -> None:
    """Includes settings that verl does not pass to a custom sampler, such as the refill of failed groups."""
    trainer = Trainer(queue, "sync", "data.train_batch_size=2", "trainer.v1.sampler.sync_refill_failed_groups=True")
    trainer.finish("u1", [], status="failure")
    trainer.finish("u2", [9, 9])
    batch, found = trainer.sampler.sample(global_steps=10, partition_id="train", batch_size=2)
    assert set(batch.keys) == {"u2_0_0", "u2_1_0", "u101_0_0", "u101_1_0"}
    assert found["training/rollout_failure/evicted_samples"] == 1


def test_verls_group_filter_is_configured() -> None:
    trainer = Trainer(None, "sync", "algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=reward")
    assert trainer.sampler._buffer.filter_groups_metric == "reward"
    with pytest.raises(ConfigError, match=r"algorithm\.filter_groups\.metric is missing"):
        Trainer(None, "sync", "algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=null")


@on_a_real_queue
@pytest.mark.parametrize(("metric", "kept"), [("reward", "u1"), ("acc", "u1"), ("score", "u1"), ("f1", "u2")])
def test_groups_are_filtered_by_the_reward_or_an_extra(queue: Any, metric: str, kept: str) -> None:
    filtering = ("algorithm.filter_groups.enable=True", f"algorithm.filter_groups.metric={metric}")
    trainer = Trainer(queue, "sync", "data.train_batch_size=1", *filtering)
    for uid, rewards, extras in (("u1", (0.0, 1.0), (0.5, 0.5)), ("u2", (1.0, 1.0), (0.5, 1))):
        rows, fields = [], []
        for session, (reward, f1) in enumerate(zip(rewards, extras, strict=True)):
            each = make_rollout(reward=reward, extras={"f1": f1, "name": "x"})
            (row,) = rows_of(each, 8, 8)
            rows.append((f"{uid}_{session}_0", v1_tag(row, 10, 9)))
            fields.append(v1_fields(row, {"uid": uid}, reward_extra_info(each, validate=False)))
        keys, tags = map(list, zip(*rows, strict=True))
        data = list_of_dict_to_tensordict(fields)
        queue.kv_batch_put(keys=keys, partition_id="train", fields=data, tags=tags)
        tag = {"is_prompt": True, "status": "finished", "global_steps": 10}
        queue.kv_put(key=uid, partition_id="train", tag=tag)
    batch, found = trainer.sampler.sample(global_steps=10, partition_id="train", batch_size=1)
    assert {key.partition("_")[0] for key in batch.keys} == {kept}
    assert found["training/filter_groups/evicted_samples"] == 1


def test_validation_has_the_extras_alone() -> None:
    assert reward_extra_info(make_rollout(extras={"f1": 1, "reward": 2.0}), validate=True) == {"f1": 1.0}
    many = make_rollout(extras={f"name {i}": i for i in range(10_000)})
    assert len(reward_extra_info(many, validate=True)) == 100


@pytest.mark.parametrize(
    ("mode", "override", "message"),
    [
        ("sync", OLD, r"sampler_kwargs\.max_staleness: with trainer\.v1\.trainer_mode=sync nothing"),
        ("separate_async", "+trainer.v1.sampler.sampler_kwargs.max_stalenes=2", "sampler_kwargs.max_stalenes: "),
        ("separate_async", "+trainer.v1.sampler.sampler_kwargs.max_staleness=-1", "greater than or equal to 0"),
        (
            "colocate_async",
            "+trainer.v1.sampler.sampler_kwargs.max_staleness=0",
            "colocate_async.num_warmup_batches=1:",
        ),
        (
            "separate_async",
            "+trainer.v1.sampler.sampler_kwargs.max_staleness=8",
            "max_off_policy_threshold=8: verl would",
        ),
    ],
)
def test_a_wrong_sampler_setting_is_named(mode: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(None, mode, override)
