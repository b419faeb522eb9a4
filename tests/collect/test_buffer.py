"""From an announcement, or a listing, to a step: nothing is lost, and nothing that arrives can stop the receiving."""

from __future__ import annotations

import json
import random
import string
import time

import pytest

from agent_wrapper.contract import Announcement, ContractError
from rollout_backend.collect.buffer import RolloutBuffer
from rollout_backend.collect.queue import AnnouncementQueue
from rollout_backend.collect.store import ResultStore
from rollout_backend.errors import StoreError

# --- by announcement --------------------------------------------------------------------------------------


async def test_what_is_announced_arrives_and_its_message_is_deleted(open_run, make_sink, make_rollout):
    sink = make_sink("task-a.0")
    run = await open_run(sink)
    before = time.time()
    await run.store_(make_rollout())
    await run.announce(run.key("task-a.0"))
    await sink.until(lambda: sink.arrived)
    [(rollout, announced_at)] = sink.arrived
    assert rollout.encode() == make_rollout().encode()
    assert before - 1 < announced_at < time.time() + 1
    await run.until_held(0)
    assert run.buffer.heard_at > 0
    assert (run.buffer.refused, run.buffer.stale, run.buffer.dangling, run.buffer.queue_down) == (0, 0, 0, False)


async def test_each_goes_to_its_own_step(open_run, make_sink, make_rollout):
    sinks = [make_sink("task-a.0", step=step) for step in (1, 7)]
    run = await open_run(*sinks)
    for sink in sinks:
        await run.store_(make_rollout(step=sink.step))
        await run.announce(run.key("task-a.0", sink.step))
    for sink in sinks:
        await sink.until(lambda sink=sink: sink.arrived)
        assert [rollout.step for rollout, _ in sink.arrived] == [sink.step]


async def test_what_is_announced_again_is_told_and_not_fetched(open_run, make_sink, make_rollout):
    sink = make_sink("task-a.0")
    run = await open_run(sink)
    await run.store_(make_rollout())
    await run.announce(run.key("task-a.0"))
    await sink.until(lambda: sink.arrived)
    await run.announce(run.key("task-a.0"))
    await run.announce(run.key("never-planned.0"))
    await sink.until(lambda: len(sink.repeated) == 2)
    assert sorted(sink.repeated) == ["never-planned.0", "task-a.0"]
    assert len(sink.arrived) == 1
    await run.until_held(0)


async def test_an_announcement_for_a_step_that_is_over_is_counted_and_deleted(open_run, make_sink, make_rollout):
    sink = make_sink("task-a.0")
    run = await open_run(sink)
    run.buffer.detach(sink)
    await run.store_(make_rollout())
    await run.announce(run.key("task-a.0"))
    await run.until_held(0)
    assert (run.buffer.stale, sink.arrived) == (1, [])


async def test_a_step_is_attached_once_and_may_come_back(open_run, make_sink):
    sink = make_sink()
    run = await open_run(sink)
    with pytest.raises(AssertionError, match="step 0 is being collected already"):
        run.buffer.attach(make_sink())
    run.buffer.detach(sink)
    run.buffer.attach(make_sink())


async def test_a_result_behind_its_announcement_is_taken_when_the_message_comes_again(
    open_run, make_sink, make_rollout
):
    sink = make_sink("task-a.0", "task-a.1")
    run = await open_run(sink, queue={"visibility_s": 5, "wait_s": 20})
    await run.store_(make_rollout("task-a.1"))
    await run.announce(run.key("task-a.0"), run.key("task-a.1"))
    await sink.until(lambda: sink.arrived)
    assert sink.ids == ["task-a.1"]
    assert await run.held() == 1, "it is not deleted: a part of it may do better later"
    await run.store_(make_rollout("task-a.0"))
    await sink.until(lambda: len(sink.arrived) == 2)
    await run.until_held(0)
    assert run.buffer.dangling >= 1
    assert set(sink.repeated) == {"task-a.1"}, "the part that had arrived changes nothing"


async def test_s3s_own_test_event_is_deleted_without_a_word(open_run, make_sink):
    run = await open_run(make_sink())
    await run.say('{"Event": "s3:TestEvent", "Service": "Amazon S3"}')
    await run.until_held(0)
    assert run.buffer.refused == 0


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("not json", "body: not JSON"),
        ("[]", "body: not a JSON object"),
        ("{}", "Records: missing"),
        ('{"Records": [{"s3": {"bucket": {"name": 5}}}]}', "Records.0.s3.bucket.name: not a text"),
        ("[" * 10_000, "body: not JSON"),
    ],
)
async def test_a_malformed_message_is_put_aside_and_deleted(open_run, make_sink, body, reason):
    run = await open_run(make_sink())
    await run.say(body)
    await run.until_held(0)
    [record] = await run.quarantined()
    assert record["reason"].startswith(reason)
    assert record["what"].startswith("message ")
    assert record["begins"] == body[:4096]
    assert run.buffer.refused == 1


async def test_an_announcement_opens_nothing_but_this_runs_own_results(open_run, make_sink, make_rollout, run_id, s3):
    sink = make_sink("task-a.0")
    run = await open_run(sink, storage={"prefix": "team/"})
    await run.store_(make_rollout())
    elsewhere = f"elsewhere-{run_id}"
    await s3.create_bucket(Bucket=elsewhere)
    await s3.put_object(Bucket=elsewhere, Key=run.key("task-a.0"), Body=make_rollout().encode())
    forged = [
        (elsewhere, run.key("task-a.0")),
        (None, run.key("task-a.0").removeprefix("team/")),
        (None, f"team/runs/{run_id}-more/steps/00000000/task-a.0"),
        (None, f"team/runs/{run_id}/steps/00000000/../task-a.0"),
        (None, f"team/runs/{run_id}/steps/00000000/task-a.0/more"),
        (None, "/etc/passwd"),
    ]
    for bucket, key in forged:
        await run.announce(key, bucket=bucket)
    await run.until_held(0)
    assert (run.buffer.refused, sink.arrived, sink.repeated) == (len(forged), [], [])
    reasons = [record["reason"] for record in await run.quarantined()]
    assert sum(reason.startswith("bucket.name: ") for reason in reasons) == 1
    assert sum(reason.startswith("object.key: ") for reason in reasons) == len(forged) - 1


async def test_a_trainers_own_records_are_passed_over(open_run, make_sink, run_id):
    """S3 may notify of them. Evidence put aside for that would be the next notification, without an end."""
    sink = make_sink("task-a.0")
    run = await open_run(sink, storage={"prefix": "team/"})
    for record in ("quarantine/0123.json", "manifests/00000000.json", "owner"):
        await run.announce(f"team/runs/{run_id}/{record}")
        await run.announce(f"team/runs/another-run/{record}")
    await run.until_held(0)
    assert (run.buffer.refused, run.buffer.dangling, sink.arrived) == (0, 0, [])
    assert await run.quarantined() == []


async def test_a_message_that_also_names_something_foreign_is_refused_whole(open_run, make_sink, make_rollout):
    sink = make_sink("task-a.0")
    run = await open_run(sink)
    await run.store_(make_rollout())
    await run.announce(run.key("task-a.0"), "not/ours")
    await run.until_held(0)
    assert sink.arrived == []
    await run.buffer.sweep(sink)  # which finds it all the same
    assert sink.ids == ["task-a.0"]


async def test_whatever_a_message_contains_the_next_one_is_received(open_run, make_sink, make_rollout):
    random.seed(7)
    sink = make_sink("task-a.0")
    run = await open_run(sink)
    good = Announcement(bucket=run.store.config.bucket, key=run.key("task-a.0")).encode()
    for _ in range(20):
        cut = good[: random.randrange(1, len(good))]
        noise = "".join(random.choices(string.ascii_letters + string.punctuation + " ", k=30))
        await run.say(random.choice([cut, noise, good.replace("Records", "records"), f"[{good}]"]))
    await run.until_held(0)
    assert run.buffer.refused == 20
    await run.store_(make_rollout())
    await run.say(good)
    await sink.until(lambda: sink.arrived)


# --- results that cannot be used --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda rollout: b"", "object: has 0 bytes"),
        (lambda rollout: rollout.encode()[:-5], "object: is damaged or cut short"),
        (lambda rollout: b"<xml/>", "object: is neither"),
        (lambda rollout: rollout.model_copy(update={"run_id": "another"}).encode(), "run_id: is 'another'"),
        (lambda rollout: rollout.model_copy(update={"step": 5}).encode(), "step: is 5"),
        (lambda rollout: rollout.model_copy(update={"rollout_id": "task-a.9"}).encode(), "rollout_id: is 'task-a.9'"),
        (
            lambda rollout: rollout.to_json().replace(b'"extras":{}', b'"extras":{"x":1' + b"0" * 30 + b"}"),
            "object: holds what cannot be stored",
        ),
        (lambda rollout: b'{"status_code": 500, "input_id": "task-b"}', "input_id: is 'task-b'"),
    ],
    ids=["empty", "cut", "neither form", "run", "step", "rollout", "beyond 64 bits", "text of another task"],
)
async def test_a_result_that_breaks_the_contract_is_rejected_with_evidence(
    open_run, make_sink, make_rollout, damage, reason
):
    sink = make_sink("task-a.0", "task-a.1")
    run = await open_run(sink)
    body = damage(make_rollout())
    key = await run.put(run.key("task-a.0"), body)
    await run.announce(key)
    await sink.until(lambda: sink.rejected)
    assert str(sink.rejected["task-a.0"]).startswith(reason)
    [record] = await run.quarantined()
    assert (record["what"], record["bytes"]) == (key, len(body))
    await run.until_held(0)
    await run.store_(make_rollout("task-a.1"))  # and it goes on
    await run.announce(run.key("task-a.1"))
    await sink.until(lambda: sink.arrived)


@pytest.mark.parametrize("packed", [False, True])
async def test_a_result_beyond_the_cap_is_rejected(open_run, make_sink, make_rollout, packed):
    sink = make_sink("task-a.0")
    run = await open_run(sink, storage={"max_result_bytes": 4096})
    text = "x" * 10_000 if packed else random.Random(3).randbytes(10_000).hex()
    await run.store_(make_rollout(extras={"x": text}))
    await run.announce(run.key("task-a.0"))
    await sink.until(lambda: sink.rejected)
    assert "more than the cap of 4096" in str(sink.rejected["task-a.0"])
    [record] = await run.quarantined()
    assert (record["bytes"] > 0) == packed, "what is too large to be fetched is not fetched for evidence either"


async def test_what_cannot_be_put_aside_is_neither_rejected_nor_deleted(open_run, make_sink, told_in_the_log, over):
    class Full(ResultStore):
        async def quarantine(self, *args: object) -> str:
            raise StoreError("S3 is full")

    sink = make_sink("task-a.0")
    run = await open_run(receive=False)
    await run.put(run.key("task-a.0"), b"broken")
    await run.announce(run.key("task-a.0"))
    await run.say("not json")
    async with over(run, Full(run.store.config, run.store._s3, run.store._stack), sink):
        await told_in_the_log("S3 is full; it is tried again", 2)
        assert (sink.rejected, await run.held()) == ({}, 2)


async def test_while_s3_does_not_answer_messages_stay(
    open_run, make_sink, nowhere, open_store, told_in_the_log, over
):
    sink = make_sink("task-a.0")
    run = await open_run(receive=False)
    await run.announce(run.key("task-a.0"))
    async with over(run, await open_store(nowhere), sink) as buffer:
        await told_in_the_log("it is tried again", 1)
        assert (sink.arrived, sink.rejected, await run.held(), buffer.dangling) == ([], {}, 1, 0)
        with pytest.raises(StoreError, match="S3 did not list"):
            await buffer.sweep(sink)


# --- the queue itself -------------------------------------------------------------------------------------


async def test_a_queue_that_is_gone_is_noticed_and_heard_again_when_it_is_back(
    open_run, make_sink, make_rollout, sqs, told_in_the_log
):
    sink = make_sink("task-a.0")
    run = await open_run(sink)
    await sqs.delete_queue(QueueUrl=run.queue.url)
    await told_in_the_log("the queue does not answer, results are found by listing", 1)
    assert run.buffer.queue_down
    await sqs.create_queue(QueueName=run.queue.url.rpartition("/")[2])
    await run.store_(make_rollout())
    await run.announce(run.key("task-a.0"))
    await sink.until(lambda: sink.arrived)
    assert not run.buffer.queue_down


async def test_messages_that_could_not_be_deleted_change_nothing(open_run, make_sink, make_rollout, told_in_the_log):
    class Undeletable(AnnouncementQueue):
        async def delete(self, messages) -> None:
            await self._sqs.delete_queue(QueueUrl=self.url)
            await super().delete(messages)

    sink = make_sink("task-a.0")
    run = await open_run(sink, queue={"kind": Undeletable})
    await run.store_(make_rollout())
    await run.announce(run.key("task-a.0"))
    await sink.until(lambda: sink.arrived)
    await told_in_the_log("1 messages were not deleted and will come again", 1)
    assert sink.ids == ["task-a.0"]


async def test_without_a_queue_there_is_nothing_to_hear(open_run, make_sink, make_rollout):
    sink = make_sink("task-a.0")
    run = await open_run(sink, queue=False)
    assert run.buffer.queue_down
    await run.store_(make_rollout())
    await run.buffer.sweep(sink)
    assert [(rollout.rollout_id, announced_at) for rollout, announced_at in sink.arrived] == [("task-a.0", None)]


# --- by listing -------------------------------------------------------------------------------------------


async def test_a_sweep_takes_what_is_wanted_and_nothing_else(open_run, make_sink, make_rollout):
    sink = make_sink("task-a.0", "task-a.2", step=2)
    run = await open_run(sink, receive=False)
    await run.store_(*(make_rollout(f"task-a.{i}", step=2) for i in (0, 1)), make_rollout("task-a.2", step=3))
    await run.buffer.sweep(sink)
    assert (sink.ids, sink.repeated, sink.wanted) == (["task-a.0"], [], {"task-a.2"})
    await run.buffer.sweep(sink)
    assert sink.ids == ["task-a.0"], "what has come is not taken twice"


async def test_a_sweep_rejects_what_is_broken(open_run, make_sink):
    sink = make_sink("task-a.0")
    run = await open_run(sink, receive=False)
    await run.put(run.key("task-a.0"), b"broken")
    await run.buffer.sweep(sink)
    assert list(sink.rejected) == ["task-a.0"]
    assert len(await run.quarantined()) == 1


async def test_a_look_asks_for_what_it_is_told_to(open_run, make_sink, make_rollout):
    sink = make_sink("task-a.0", "task-a.1", "task-a.2")
    run = await open_run(sink, receive=False)
    await run.store_(make_rollout("task-a.0"), make_rollout("task-a.1"))
    await run.buffer.look(sink, [("task-a.1", 1), ("task-a.2", 1)])
    assert (sink.ids, sink.wanted) == (["task-a.1"], {"task-a.0", "task-a.2"})
    assert run.buffer.dangling == 0, "nobody had announced what is not there"


async def test_no_more_is_fetched_at_once_than_was_allowed(open_run, make_sink, make_rollout):
    class Counted(ResultStore):
        now = most = 0

        async def get(self, key: str) -> bytes:
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                return await super().get(key)
            finally:
                self.now -= 1

    ids = [f"task-a.{i}" for i in range(12)]
    sink = make_sink(*ids)
    run = await open_run(sink, receive=False)
    await run.store_(*(make_rollout(each) for each in ids))
    store = Counted(run.store.config, run.store._s3, run.store._stack)
    await RolloutBuffer(run.run_id, store, None, fetches=3).sweep(sink)
    assert (len(sink.arrived), store.most) == (12, 3)


# --- messages made trainable ------------------------------------------------------------------------------


async def test_what_arrives_has_been_through_the_retokeniser(open_run, make_sink, make_rollout):
    async def mark(rollout):
        return rollout.model_copy(update={"extras": {"seen": rollout.rollout_id}})

    sink = make_sink("task-a.0")
    run = await open_run(sink, receive=False)
    await run.store_(make_rollout())
    await RolloutBuffer(run.run_id, run.store, None, 4, mark).sweep(sink)
    assert sink.arrived[0][0].extras == {"seen": "task-a.0"}


@pytest.mark.parametrize("form", ["encode", "to_json"])
async def test_a_result_that_calls_itself_retokenised_is_rejected(open_run, make_sink, make_rollout, form):
    segment = json.loads(make_rollout().to_json())["segments"][0]
    segment["turns"][0]["weight_versions"] = []
    forged = {**segment, "logprobs": [None] * 5, "retokenised": True}
    sink = make_sink("task-a.0")
    run = await open_run(sink, receive=False)
    await run.put(run.key("task-a.0"), getattr(make_rollout(segments=[forged]), form)())
    await run.buffer.sweep(sink)
    assert sink.arrived == []
    assert "marked retokenised" in str(sink.rejected["task-a.0"])


# --- seals ------------------------------------------------------------------------------------------------


async def test_what_the_gateway_did_not_hand_out_is_rejected_with_evidence(open_run, make_sink, make_rollout):
    def verify(rollout):
        if rollout.seal != "good":
            raise ContractError("seal", "is not one that this run's gateway made")

    sink = make_sink("task-a.0", "task-a.1")
    run = await open_run(sink, queue=False)
    await run.store_(make_rollout("task-a.0", seal="good"), make_rollout("task-a.1", seal="forged"))
    assert await RolloutBuffer(run.run_id, run.store, None, 4, verify=verify).sweep(sink)
    assert sink.ids == ["task-a.0"]
    assert sink.rejected["task-a.1"].field == "seal"
    [record] = await run.quarantined()
    assert record["what"] == run.key("task-a.1")
    assert record["reason"].startswith("seal: ")
