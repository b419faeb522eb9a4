"""Which manager holds a run: over a real S3, with processes that live and processes that are dead."""

import asyncio
import hashlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any
from unittest.mock import AsyncMock

import pytest

from agent_wrapper.contract import ContractError, manifest_key
from agent_wrapper.shared.processes import boot_clock
from rollout_backend.config import AwsConfig, StorageConfig
from rollout_backend.errors import (
    LeaseUnconfirmed,
    ResultMissing,
    RunHeld,
    StoreError,
    WriteConflict,
)
from rollout_backend.run import lease as run_lease
from rollout_backend.run.collect.manifest_store import ManifestStore
from rollout_backend.run.collect.store import ResultStore, StoredObject
from rollout_backend.run.lease import FencedRuntime, LeaseHolder, RunLease
from rollout_backend.testing.fault_proxy import Fault, Rule
from rollouts import make_manifest
from tests.simulation.clock import in_virtual_time

LONG = 600.0
Open = Callable[..., RunLease]


@pytest.fixture
async def store(proxy, local_aws) -> AsyncIterator[ResultStore]:
    store = await ResultStore.open(StorageConfig(bucket=local_aws.bucket), AwsConfig(endpoint_url=proxy.url))
    yield store
    await store.aclose()


@pytest.fixture
async def manager(store, run_id) -> AsyncIterator[Open]:
    """A manager of this process; keywords replace fields of its holder."""
    async with AsyncExitStack() as stack:

        def make(lease_s: float = LONG, on_status: Callable[[str], object] = str, **who: Any) -> RunLease:
            me = LeaseHolder.this_process().model_copy(update=who)
            made = RunLease(store, run_id, me, lease_s, on_status=on_status)
            stack.push_async_callback(made.release)
            return made

        yield make


async def start(lease: RunLease) -> RunLease:
    await lease.begin()
    await lease.claim()
    return lease


def stall(lease: RunLease) -> None:
    """Let a lease expire, as if its process had stalled."""
    assert lease._renewing is not None
    lease._renewing.cancel()


def resume(lease: RunLease) -> None:
    lease._renewing = asyncio.create_task(lease._renew())


async def record(store: ResultStore, lease: RunLease) -> dict[str, Any]:
    return json.loads(await store.get(lease.key))


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


async def test_a_run_is_held_by_one_manager_and_the_second_learns_by_which(manager, store):
    first = manager()
    await first.begin()
    assert await first.may_delete_queue()
    await first.claim()
    before = await record(store, first)
    with pytest.raises(RunHeld, match=rf"held by another manager \(process {first.me.pid} on .*, since 20") as caught:
        await manager().begin()
    assert "Stop that one, or give this run another run_id" in str(caught.value)
    assert await record(store, first) == before
    assert first.fencing_token > 1_700_000_000
    assert await first.may_delete_queue()


@pytest.mark.parametrize("is_used_again", [False, True])
async def test_a_run_whose_process_is_dead_starts_again_at_once_on_its_machine(manager, is_used_again):
    first = await start(manager(**{"started": 1} if is_used_again else {"pid": ended_process()}))
    assert (await start(manager())).fencing_token > first.fencing_token


async def test_a_released_run_is_taken_at_once_on_any_machine(manager):
    first = await start(manager())
    await first.release()
    assert (await start(manager(machine="elsewhere"))).fencing_token > first.fencing_token


async def test_a_manager_on_another_machine_that_renews_its_lease_keeps_the_run(manager):
    await start(manager(lease_s=8.0, machine="elsewhere", host="far-away"))
    statuses: list[str] = []
    with pytest.raises(RunHeld, match=r"on far-away.*8 s \(janitor\.lease_s\) after its last sign of life"):
        await manager(on_status=statuses.append).begin()
    assert statuses[0].endswith("waiting up to 8 s for a sign of life of it")


async def test_a_manager_that_stops_renewing_its_lease_loses_the_run_and_learns_it(manager, store, proxy):
    first = await start(manager(lease_s=1.0, machine="elsewhere", host="far-away"))
    stall(first)
    second = await start(manager(lease_s=1.0))
    assert second.fencing_token > first.fencing_token
    resume(first)
    with pytest.raises(RunHeld, match=rf"taken over by another manager \(process {second.me.pid}.*far-away"):
        await first.wait_lost()
    assert not await first.may_delete_queue()
    with pytest.raises(RunHeld):
        await first.wait_confirmed()
    await first.release()
    assert (await record(store, second))["manager_id"] == second.me.id
    assert not (await record(store, second))["released"]


async def test_an_unnoticed_loss_is_noticed_before_anything_is_deleted(manager):
    first = await start(manager(pid=ended_process()))
    stall(first)
    await start(manager())
    first._renewed_at -= LONG
    assert not await first.may_delete_queue()


async def test_a_start_that_fails_leaves_the_former_holder_on_record(manager, store):
    dead = await start(manager(pid=ended_process()))
    second = manager()
    await second.begin()
    assert (await record(store, second))["manager_id"] == dead.me.id
    assert (await record(store, second))["starting"]["id"] == second.me.id
    assert not await second.may_delete_queue()  # the queue may be the dead one's, whose janitor deletes it
    await second.release()
    found = await record(store, second)
    assert (found["manager_id"], found["starting"], found["released"]) == (dead.me.id, None, False)


async def test_of_many_managers_that_start_at_once_one_gets_the_run(manager):
    found = await asyncio.gather(*(start(manager()) for _ in range(5)), return_exceptions=True)
    assert sum(isinstance(each, RunLease) for each in found) == 1
    assert sum(isinstance(each, RunHeld) for each in found) == 4


async def test_a_holder_that_comes_back_before_the_next_one_has_started_keeps_the_run(manager):
    first = await start(manager(lease_s=1.0, pid=ended_process()))
    stall(first)
    second = manager(lease_s=1.0)
    await second.begin()
    resume(first)
    with pytest.raises(RunHeld, match="held by another manager"):
        await second.wait_lost()
    with pytest.raises(RunHeld):
        await second.claim()
    await first.wait_confirmed()


async def test_a_record_that_was_deleted_is_written_again(manager, store):
    first = await start(manager(lease_s=1.0))
    await store._s3.delete_object(Bucket=store.config.bucket, Key=first.key)
    first._renewed_at -= LONG
    await first.wait_confirmed()
    with pytest.raises(RunHeld):
        await manager().begin()
    assert (await record(store, first))["fencing_token"] == first.fencing_token


async def test_answers_that_are_lost_and_refusals_cost_time(manager, proxy):
    proxy.rules += [
        Rule("s3:PutObject", Fault.CUT_AFTER, once_each=True, path="*/lease"),
        Rule("s3:*Object", Fault.FAIL, times=5, code="SlowDown", path="*/lease"),
    ]
    await start(manager())
    assert {call.fault for call in proxy.calls} >= {Fault.CUT_AFTER, Fault.FAIL}


class PlayedStore:
    """An S3 in memory. The next writes do what `writes` says."""

    def __init__(self) -> None:
        self.config = StorageConfig(bucket="bucket")
        self.objects: dict[str, bytes] = {}
        self.writes: list[Callable[[], Awaitable[None]]] = []

    async def fetch(self, key: str) -> StoredObject:
        if key not in self.objects:
            raise ResultMissing(key)
        return StoredObject(self.objects[key], hashlib.sha256(self.objects[key]).hexdigest(), 0.0)

    async def get(self, key: str) -> bytes:
        return (await self.fetch(key)).body

    async def put_if_match(self, key: str, body: bytes, etag: str | None) -> str:
        if self.writes:
            await self.writes.pop(0)()
        if etag != ((await self.fetch(key)).etag if key in self.objects else None):
            raise WriteConflict(key)
        self.objects[key] = body
        return (await self.fetch(key)).etag

    async def keys(self, prefix: str) -> AsyncIterator[str]:
        for key in sorted(self.objects):
            if key.startswith(prefix):
                yield key


async def silence() -> None:
    await asyncio.Event().wait()


async def defect() -> None:
    raise ContractError("object", "S3 refuses it permanently")


@pytest.mark.parametrize("fault", [silence, defect])
@in_virtual_time
async def test_a_renewal_that_fails_in_any_way_is_reported_and_repeated_before_the_lease_expires(fault, caplog):
    store = PlayedStore()
    lease = await start(RunLease(store, "run", LeaseHolder.this_process(), 60.0))
    for _ in range(20):
        store.writes = [fault]
        await asyncio.sleep(60.0)
        assert lease.is_confirmed
    assert caplog.text.count("the run's lease cannot be renewed") == 20
    store.writes = [fault] * 1000
    await asyncio.sleep(60.0)
    assert not lease.is_confirmed
    store.writes.clear()
    await lease.wait_confirmed()
    await lease.release()


@in_virtual_time
async def test_a_silent_s3_ends_a_start_and_delays_an_end():
    store, loop = PlayedStore(), asyncio.get_running_loop()
    lease = RunLease(store, "run", LeaseHolder.this_process(), 60.0)
    store.writes = [silence] * 1000
    with pytest.raises(StoreError, match="no answer"):
        await lease.begin()
    assert loop.time() <= 300
    store.writes.clear()
    await start(lease)
    store.writes, began = [silence] * 1000, loop.time()
    await lease.release()
    assert loop.time() - began <= 60


@in_virtual_time
async def test_a_machine_that_was_suspended_does_not_trust_its_lease(monkeypatch):
    lease = await start(RunLease(PlayedStore(), "run", LeaseHolder.this_process(), 60.0))
    monkeypatch.setattr(run_lease, "boot_clock", lambda: boot_clock() + 46)
    assert not lease.is_confirmed
    await lease.wait_confirmed()
    await lease.release()


@pytest.mark.parametrize("lease", [None, b"{", b'{"fencing_token": 3, "released": true}'])
@pytest.mark.parametrize("token", [7, 9_000_000_000])
@in_virtual_time
async def test_fencing_tokens_grow_whatever_became_of_the_lease(lease, token):
    store = PlayedStore()
    for step in range(40):
        tokens = {"step": step, "fencing_token": token if step in (11, 39) else 1}
        stored = make_manifest("run").model_copy(update=tokens)
        store.objects[manifest_key("", "run", step)] = stored.model_dump_json().encode()
    store.objects[manifest_key("", "run", 5)] = b"[]"
    made = RunLease(store, "run", LeaseHolder.this_process(), 60.0)
    if lease is not None:
        store.objects[made.key] = lease
    await start(made)
    assert made.fencing_token > token
    assert await ManifestStore(store, "run", made.fencing_token).read(11)
    await made.release()


@pytest.mark.parametrize("lost", [False, True])
async def test_a_manager_that_may_have_lost_the_run_starts_and_stops_no_agent(manager, lost):
    first, runtime = await start(manager()), AsyncMock()
    fenced = FencedRuntime(runtime, first)
    runtime.stop.return_value = False
    assert await fenced.stop("a") is False  # the runtime does not know it
    runtime.stop.reset_mock()
    if lost:
        first.mark_lost(RunHeld("taken"))
    else:
        first._renewed_at -= 3 * LONG
    for call in (fenced.stop("a"), fenced.invoke("a", b"")):
        with pytest.raises(LeaseUnconfirmed):
            await call
    runtime.stop.assert_not_called()
    runtime.invoke.assert_not_called()


async def test_a_lease_that_cannot_be_confirmed_for_minutes_is_unknown(manager):
    first = await start(manager())
    assert await first.try_to_confirm()
    assert not first.is_silent
    first._renewed_at -= 3 * LONG
    assert first.is_silent
    assert not await first.try_to_confirm()


# --- the manifests of a run with two managers -------------------------------------------------------------


async def test_a_manager_that_has_lost_the_run_writes_no_manifest(store, run_id):
    old, new = ManifestStore(store, run_id, 1, "the old one"), ManifestStore(store, run_id, 2, "the new one")
    await old.read(0)
    await old.write(make_manifest(run_id))
    before = await new.read(0)
    assert before is not None
    await new.write(before)
    for call in (old.write(make_manifest(run_id, weights="late")), old.read(0)):
        with pytest.raises(RunHeld, match=r"taken over by another manager \(the new one\)"):
            await call
    assert (await new.read(0)).weights == ""  # type: ignore[union-attr]


async def test_what_the_former_holder_wrote_last_is_read_before_it_is_replaced(store, run_id):
    old, new = ManifestStore(store, run_id, 1), ManifestStore(store, run_id, 2)
    await old.read(0)
    await new.read(0)
    await old.write(make_manifest(run_id, weights="late"))
    with pytest.raises(WriteConflict):
        await new.write(make_manifest(run_id))
    assert (await new.read(0)).weights == "late"  # type: ignore[union-attr]
    await new.write(make_manifest(run_id))


async def test_an_own_write_that_lands_late_is_replaced(store, run_id):
    manifests = ManifestStore(store, run_id, 1)
    await manifests.read(0)
    await ManifestStore(store, run_id, 1).write(make_manifest(run_id, weights="late"))
    with pytest.raises(StoreError, match="arrived late"):
        await manifests.write(make_manifest(run_id))
    await manifests.write(make_manifest(run_id, weights="newest"))
    assert (await manifests.read(0)).weights == "newest"  # type: ignore[union-attr]


# --- conditional writes -----------------------------------------------------------------------------------


async def test_a_write_under_a_condition(store, run_id):
    key = f"{run_id}/a"
    first = await store.put_if_match(key, b"1", None)
    with pytest.raises(WriteConflict):
        await store.put_if_match(key, b"2", None)
    second = await store.put_if_match(key, b"2", first)
    with pytest.raises(WriteConflict):
        await store.put_if_match(key, b"3", first)
    with pytest.raises(WriteConflict):
        await store.put_if_match(f"{run_id}/never", b"3", second)
    stored = await store.fetch(key)
    assert (stored.body, stored.etag) == (b"2", second)
    assert 0 <= stored.age_s < 60


async def test_a_write_whose_answer_is_lost_is_found_done(store, proxy, run_id):
    proxy.rules.append(Rule("s3:PutObject", Fault.CUT_AFTER, times=1))
    etag = await store.put_if_match(f"{run_id}/a", b"1", None)
    proxy.rules.append(Rule("s3:PutObject", Fault.CUT_AFTER, times=1))
    await store.put_if_match(f"{run_id}/a", b"2", etag)
    assert await store.get(f"{run_id}/a") == b"2"
