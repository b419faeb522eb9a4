"""The buffer delivers announced and listed results to their step, and no message or object stops it."""

import asyncio
import gc
import time

import pytest

from agent_wrapper.contract import probe_key
from builders import eventually
from collect_bench import Sink
from rollout_backend.errors import CredentialsExpired, StoreError
from rollout_backend.run.collect.buffer import RolloutBuffer
from rollout_backend.run.collect.queue import AnnouncementQueue
from rollout_backend.run.collect.store import ResultStore
from rollout_backend.testing.fault_proxy import Fault, Rule

# --- by announcement --------------------------------------------------------------------------------------


async def test_each_result_goes_to_its_step(open_run):
    sinks = [Sink("task-a.0", step=step) for step in (1, 7)]
    run = await open_run(*sinks)
    for sink in sinks:
        await run.store_(run.rollout(step=sink.step))
        await run.announce(run.key("task-a.0", sink.step))
    for sink in sinks:
        await sink.until(lambda sink=sink: sink.arrived)
        assert [rollout.step for rollout, _ in sink.arrived] == [sink.step]


async def test_a_repeated_announcement_is_counted_and_not_fetched(open_run):
    sink = Sink("task-a.0")
    run = await open_run(sink)
    before = time.time()
    await run.publish(run.rollout())
    await sink.until(lambda: sink.arrived)
    await run.announce(run.key())
    await run.announce(run.key("never-planned.0"))
    await sink.until(lambda: len(sink.repeated) == 2)
    assert sorted(sink.repeated) == ["never-planned.0", "task-a.0"]
    [(rollout, announced_at)] = sink.arrived
    assert rollout.encode() == run.rollout().encode()
    assert before - 1 < announced_at < time.time() + 1
    await run.until_held(0)
    assert run.buffer.last_announcement_at > 0


async def test_a_result_written_after_its_announcement_is_fetched_on_redelivery(open_run):
    sink = Sink("task-a.0", "task-a.1")
    run = await open_run(sink, queue={"visibility_s": 5, "wait_s": 20})
    await run.store_(run.rollout("task-a.1"))
    await run.announce(run.key(), run.key("task-a.1"))
    await sink.until(lambda: sink.arrived)
    assert sink.ids == ["task-a.1"]
    assert await run.held() == 1, "the message is kept: one of its results may appear later"
    await run.store_(run.rollout("task-a.0"))
    await sink.until(lambda: len(sink.arrived) == 2)
    await run.until_held(0)
    assert run.buffer.dangling >= 1
    assert set(sink.repeated) == {"task-a.1"}, "the delivered result is only counted as a duplicate"


MALFORMED = {
    "not json": "body: not JSON",
    "[{}]": "body: not a JSON object",
    "{}": "Records: missing",
    '{"Records": [{"s3": {"bucket": {"name": 5}}}]}': "Records.0.s3.bucket.name: not a string",
    "[" * 10_000: "body: not JSON",
}


async def test_a_malformed_message_is_quarantined_and_deleted(open_run):
    run = await open_run(Sink())
    for body in MALFORMED:
        await run.send(body)
    await run.until_held(0)
    found = {record["begins"]: record for record in await run.quarantined()}
    assert found.keys() == {body[:4096] for body in MALFORMED}
    for body, reason in MALFORMED.items():
        assert found[body[:4096]]["reason"].startswith(reason)
        assert found[body[:4096]]["what"].startswith("message ")
    assert run.buffer.refused == len(MALFORMED)


async def test_an_announcement_gives_access_to_this_runs_results_only(open_run, run_id, s3):
    sink = Sink("task-a.0")
    run = await open_run(sink, storage={"prefix": "team/"})
    await run.store_(run.rollout())
    elsewhere = f"elsewhere-{run_id}"
    await s3.create_bucket(Bucket=elsewhere)
    await s3.put_object(Bucket=elsewhere, Key=run.key(), Body=run.rollout().encode())
    forged = [
        (elsewhere, run.key()),
        (None, run.key().removeprefix("team/")),
        (None, f"team/runs/{run_id}-more/steps/00000000/task-a.0"),
        (None, f"team/runs/{run_id}/steps/00000000/../task-a.0"),
        (None, f"team/runs/{run_id}/steps/00000000/task-a.0/more"),
        (None, "/etc/passwd"),
    ]
    for bucket, key in forged:
        await run.announce(key, bucket=bucket)
    await run.announce(run.key(), "not/ours")  # refused as a whole
    await run.until_held(0)
    assert (run.buffer.refused, sink.arrived, sink.repeated) == (len(forged) + 1, [], [])
    reasons = [record["reason"] for record in await run.quarantined()]
    assert sum(reason.startswith("bucket.name: ") for reason in reasons) == 1
    assert sum(reason.startswith("object.key: ") for reason in reasons) == len(forged)


async def test_messages_are_not_begun_after_the_step_has_ended(open_run):
    """A coroutine that is created and never awaited would warn, and warnings fail tests."""
    run = await open_run(Sink("task-0.0"), receive=False)
    await run.announce(run.key("task-0.0"))
    messages = await run.queue.receive()
    handling = asyncio.create_task(run.buffer.handle(run.queue, messages))
    await asyncio.sleep(0)  # until it has created a task for the message, which has not begun
    handling.cancel()
    await asyncio.wait([handling])
    assert handling.cancelled()
    gc.collect()


async def test_runs_that_share_a_queue_leave_each_other_their_announcements(open_run, sqs, s3, run_id):
    url = (await sqs.create_queue(QueueName=f"shared-{run_id}"))["QueueUrl"]
    ids = [f"task-{i}.0" for i in range(30)]
    runs = []
    for other in (run_id, f"{run_id}-more"):
        sink = Sink(*ids)
        runs.append((await open_run(sink, queue={"url": url}, run_id=other, receive=False), sink))
    for run, _ in runs:
        await run.store_(*(run.rollout(rollout_id) for rollout_id in ids))
    for rollout_id in ids:
        for run, _ in runs:
            await run.announce(run.key(rollout_id))
    for _ in range(len(ids)):  # in turns, because an emulator may give one run the same message again and again
        for run, _ in runs:
            await run.buffer.handle(run.queue, await run.queue.receive())
        if not any(sink.wanted for _, sink in runs):
            break
    for run, sink in runs:
        assert (sink.ids, run.buffer.refused, await run.quarantined()) == (sorted(ids), 0, [])


async def test_a_message_that_no_other_run_takes_is_quarantined(open_run, sqs, run_id):
    url = (await sqs.create_queue(QueueName=f"shared-{run_id}"))["QueueUrl"]
    run = await open_run(Sink(), queue={"url": url})
    run.buffer.max_receives = 3
    await run.announce(run.key().replace(run_id, "ended"))
    await eventually(run.quarantined)  # while a message becomes visible again, an emulator may count it nowhere
    await run.until_held(0)
    [record] = await run.quarantined()
    assert record["reason"].startswith("object.key: ")


async def test_announcements_of_trainer_objects_are_ignored(open_run, run_id):
    """S3 may notify of them. A quarantine record about one would cause the next notification, without an end."""
    sink = Sink("task-a.0")
    run = await open_run(sink, storage={"prefix": "team/"})
    for record in ("quarantine/0123.json", "manifests/00000000.json", "lease"):
        await run.announce(f"team/runs/{run_id}/{record}")
        await run.announce(f"team/runs/another-run/{record}")
    await run.announce(f"team/{probe_key('', 'ab12', agents=True)}")
    await run.until_held(0)
    assert (run.buffer.refused, run.buffer.dangling, sink.arrived) == (0, 0, [])
    assert await run.quarantined() == []


# --- results that cannot be used --------------------------------------------------------------------------


DAMAGED = {
    "object: is damaged or cut short": lambda rollout: rollout.encode()[:-5],
    "object: is neither": lambda rollout: b"<xml/>",
    "run_id: is 'another'": lambda rollout: rollout.model_copy(update={"run_id": "another"}).encode(),
    "step: is 5": lambda rollout: rollout.model_copy(update={"step": 5}).encode(),
    "rollout_id: is 'task-a.9'": lambda rollout: rollout.model_copy(update={"rollout_id": "task-a.9"}).encode(),
    "object: holds what cannot be stored": (
        lambda rollout: rollout.to_json().replace(b'"extras":{}', b'"extras":{"x":1' + b"0" * 30 + b"}")
    ),
}


async def test_a_result_that_breaks_the_contract_is_rejected_with_evidence(open_run):
    reasons = {f"task-a.{i}": reason for i, reason in enumerate(DAMAGED)}
    sink, stored = Sink(*reasons, "task-b.0"), {}
    run = await open_run(sink)
    for rollout_id, reason in reasons.items():
        body = DAMAGED[reason](run.rollout(rollout_id))
        key = await run.put(run.key(rollout_id), body)
        stored[key] = len(body)
        await run.announce(key)
    await sink.until(lambda: len(sink.rejected) == len(reasons))
    for rollout_id, reason in reasons.items():
        assert str(sink.rejected[rollout_id]).startswith(reason)
    assert {record["what"]: record["bytes"] for record in await run.quarantined()} == stored
    await run.until_held(0)
    await run.publish(run.rollout("task-b.0"))  # receiving continues
    await sink.until(lambda: sink.arrived)


async def test_a_result_that_cannot_be_quarantined_is_neither_rejected_nor_deleted(open_run, until_logged):
    class Full(ResultStore):
        async def put(self, key: str, body: bytes) -> None:
            raise StoreError("S3 is full")

    sink = Sink("task-a.0")
    run = await open_run(receive=False)
    await run.put(run.key(), b"broken")
    await run.announce(run.key())
    await run.send("not json")
    async with run.receive_with(Full(run.store.config, run.store._s3, run.store._stack), sink):
        await until_logged("S3 is full; it is retried", 2)
        assert (sink.rejected, await run.held()) == ({}, 2)


# --- defects ----------------------------------------------------------------------------------------------


async def test_a_defect_in_handling_one_result_does_not_stop_receiving(open_run, until_logged):
    def verify(rollout):
        if rollout.rollout_id == "task-a.0":
            raise ZeroDivisionError("a defect")

    sink = Sink("task-a.0", "task-a.1")
    run = await open_run(receive=False)
    await run.store_(run.rollout(), run.rollout("task-a.1"))
    await run.announce(run.key())
    async with run.receive_with(run.store, sink, verify=verify) as buffer:
        await until_logged("failed; it is retried")
        await run.announce(run.key("task-a.1"))
        await sink.until(lambda: sink.arrived)
        assert not await buffer.sweep(sink)
    assert (sink.ids, sink.rejected, await run.held()) == (["task-a.1"], {}, 1)


async def test_expired_credentials_stop_receiving(faulty, proxy, open_run, open_store):
    run = await open_run(receive=False)
    await run.announce(run.key())
    proxy.rules.append(Rule("s3:GetObject", Fault.FAIL, status=400, code="ExpiredToken"))
    buffer = RolloutBuffer(run.run_id, await open_store(faulty), run.queue, 4)
    buffer.attach(Sink("task-a.0"))
    with pytest.RaisesGroup(CredentialsExpired, flatten_subgroups=True):
        await buffer.run(1)


# --- the queue itself -------------------------------------------------------------------------------------


async def test_a_deleted_queue_is_noticed_and_used_again_when_it_is_back(open_run, sqs, until_logged):
    sink = Sink("task-a.0")
    run = await open_run(sink)
    await sqs.delete_queue(QueueUrl=run.queue.url)
    await until_logged("the queue does not answer; results are found by listing")
    await eventually(lambda: run.buffer.queue_down)  # a call of the other receiver may still succeed
    await sqs.create_queue(QueueName=run.queue.url.rpartition("/")[2])
    await run.publish(run.rollout())
    await sink.until(lambda: sink.arrived)
    await eventually(lambda: not run.buffer.queue_down)  # one may still fail


async def test_messages_that_could_not_be_deleted_change_nothing(open_run, until_logged):
    class Undeletable(AnnouncementQueue):
        async def delete(self, messages) -> None:
            await self._sqs.delete_queue(QueueUrl=self.url)
            await super().delete(messages)

    sink = Sink("task-a.0")
    run = await open_run(sink, queue={"kind": Undeletable})
    await run.publish(run.rollout())
    await sink.until(lambda: sink.arrived)
    await until_logged("1 messages will be received again")
    assert sink.ids == ["task-a.0"]


# --- by listing -------------------------------------------------------------------------------------------


async def test_what_s3_does_not_return_does_not_count_as_absent(faulty, proxy, open_run, open_store):
    sink = Sink("task-a.0")
    run = await open_run(queue=False)
    buffer = RolloutBuffer(run.run_id, await open_store(faulty), None, 4)
    for key in ("*/task-a.0", "*/task-a.0~1"):  # a result, a failure marker
        proxy.rules = [Rule("s3:GetObject", Fault.FAIL, status=403, code="RequestTimeTooSkewed", path=key)]
        assert not await buffer.fetch_by_key(sink, "task-a.0", 1)
    proxy.rules = []
    assert await buffer.fetch_by_key(sink, "task-a.0", 1)
    assert (sink.arrived, sink.rejected) == ([], {})


async def test_fetches_at_once_are_limited(open_run):
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
    sink = Sink(*ids)
    run = await open_run(sink, receive=False)
    await run.store_(*(run.rollout(each) for each in ids))
    store = Counted(run.store.config, run.store._s3, run.store._stack)
    await RolloutBuffer(run.run_id, store, None, max_fetches=3).sweep(sink)
    assert (len(sink.arrived), store.most) == (12, 3)
