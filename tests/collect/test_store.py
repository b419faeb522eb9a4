"""Results in a real S3: what is there, what is not, and what is put aside."""

from __future__ import annotations

import asyncio
import hashlib
import json

import pytest

from agent_wrapper.contract import ContractError, ResultName, step_prefix
from rollout_backend.collect.inventory import inventory
from rollout_backend.errors import PreflightError, ResultMissing, StoreError


@pytest.fixture
async def put(s3, local_aws):
    async def put(key: str, body: bytes = b"x") -> None:
        await s3.put_object(Bucket=local_aws.bucket, Key=key, Body=body)

    return put


@pytest.fixture
async def lost(open_store, s3, run_id):
    """A store whose bucket has been deleted since."""
    bucket = f"lost-{run_id}"
    await s3.create_bucket(Bucket=bucket)
    store = await open_store(bucket=bucket)
    await s3.delete_bucket(Bucket=bucket)
    return store


# --- a look before the run --------------------------------------------------------------------------------


async def test_a_bucket_that_is_there_passes(open_store):
    await (await open_store(prefix="some/where/")).check()


async def test_a_bucket_that_is_not_there_is_found_out(open_store):
    with pytest.raises(PreflightError, match=r"bucket 'no-such' does not exist. Create it, or mend storage\.bucket"):
        await (await open_store(bucket="no-such")).check()


async def test_an_s3_that_does_not_answer_is_found_out(open_store, nowhere):
    with pytest.raises(PreflightError, match=r"cannot be reached.*aws\.endpoint_url"):
        await (await open_store(nowhere)).check()


# --- get --------------------------------------------------------------------------------------------------


async def test_an_object_comes_back_byte_for_byte(open_store, put, run_id):
    body = bytes(range(256)) * 1000
    await put(f"{run_id}/a", body)
    assert await (await open_store()).get(f"{run_id}/a") == body


async def test_what_is_not_there_is_missing(open_store, run_id):
    with pytest.raises(ResultMissing, match=f"nothing is stored under '{run_id}/nothing'"):
        await (await open_store()).get(f"{run_id}/nothing")


async def test_an_object_up_to_the_cap_is_read_and_a_larger_one_is_not(open_store, put, run_id):
    store = await open_store(max_result_bytes=2048)
    await put(f"{run_id}/fits", b"x" * 2048)
    await put(f"{run_id}/large", b"x" * 2049)
    assert len(await store.get(f"{run_id}/fits")) == 2048
    with pytest.raises(ContractError, match="object: has 2049 bytes, more than the cap of 2048"):
        await store.get(f"{run_id}/large")


async def test_large_objects_left_unread_cost_no_connection(open_store, put, run_id):
    store = await open_store(max_result_bytes=1024)
    await put(f"{run_id}/large", b"x" * 1_000_000)
    await put(f"{run_id}/small")
    for _ in range(40):  # more than there are connections
        with pytest.raises(ContractError):
            await store.get(f"{run_id}/large")
    async with asyncio.timeout(20):
        assert await store.get(f"{run_id}/small") == b"x"


async def test_a_bucket_that_is_gone_is_no_missing_result(lost):
    with pytest.raises(StoreError, match="S3 refused 'a'") as caught:
        await lost.get("a")
    assert not isinstance(caught.value, ResultMissing)


async def test_an_s3_that_does_not_answer_may_do_so_later(open_store, nowhere):
    store = await open_store(nowhere)
    with pytest.raises(StoreError, match="S3 did not give 'a'") as caught:
        await store.get("a")
    assert not isinstance(caught.value, ResultMissing)


# --- keys and the inventory -------------------------------------------------------------------------------


async def test_every_key_is_listed_over_all_pages(open_store, put, run_id):
    wanted = [f"{run_id}/{i:04d}" for i in range(1_003)]  # a page has 1,000
    for start in range(0, len(wanted), 50):
        await asyncio.gather(*map(put, wanted[start : start + 50]))
    assert [key async for key in (await open_store()).keys(f"{run_id}/")] == wanted


async def test_an_empty_prefix_lists_nothing(open_store, run_id):
    assert [key async for key in (await open_store()).keys(f"{run_id}/none/")] == []


async def test_a_listing_that_fails_says_so(lost, open_store, nowhere):
    for store in (lost, await open_store(nowhere)):
        with pytest.raises(StoreError, match="S3 did not list 'p/'"):
            _ = [key async for key in store.keys("p/")]
    with pytest.raises(StoreError, match="S3 did not list"):
        await inventory(lost, "run", 0)


@pytest.mark.parametrize("prefix", ["", "team/a/"])
async def test_the_inventory_is_the_steps_results_and_nothing_else(open_store, put, run_id, prefix):
    here = step_prefix(prefix, run_id, 3)
    ours = {
        here + rollout_id: ResultName(3, rollout_id, None) for rollout_id in ("task-a.0", "task-a.1", "x.y_z-1.10")
    }
    ours[here + "task-a.0~12"] = ResultName(3, "task-a.0", 12)
    for key in ours:
        await put(key)
    for other in (
        step_prefix(prefix, run_id, 2) + "task-a.2",
        step_prefix(prefix, f"{run_id}-more", 3) + "task-a.3",
        step_prefix(f"{prefix}x/", run_id, 3) + "task-a.4",
        here + "deeper/task-a.5",
        here + ".hidden",
        here + "with space",
        here + "task-a.0~0",
        here + "x" * 129,
        f"{prefix}runs/{run_id}/quarantine/0.json",
    ):
        await put(other)
    found = await inventory(await open_store(prefix=prefix), run_id, 3)
    assert found == ours
    assert list(found)[-1] == here + "task-a.0~12", "results come before notices"
    assert await inventory(await open_store(prefix=prefix), run_id, 4) == {}


# --- quarantine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "team/a/"])
async def test_what_cannot_be_used_is_put_aside_with_its_reason_and_its_beginning(open_store, run_id, prefix):
    store = await open_store(prefix=prefix)
    evidence = b"<broken>\xff\x00" + b"x" * 5000
    key = await store.quarantine(run_id, "message m-1", "body: not JSON", evidence)
    assert key.startswith(f"{prefix}runs/{run_id}/quarantine/")
    assert json.loads(await store.get(key)) == {
        "what": "message m-1",
        "reason": "body: not JSON",
        "bytes": len(evidence),
        "sha256": hashlib.sha256(evidence).hexdigest(),
        "begins": "<broken>\\xff\x00" + "x" * (4096 - 10),
    }


async def test_what_is_told_twice_stands_once(open_store, run_id):
    store = await open_store()
    first = await store.quarantine(run_id, "a", "why", b"evidence")
    assert await store.quarantine(run_id, "a", "why", b"evidence") == first
    others = [("b", "why", b"evidence"), ("a", "another", b"evidence"), ("a", "why", b"more")]
    keys = {first, *[await store.quarantine(run_id, *other) for other in others]}
    assert len(keys) == 4
    assert {key async for key in store.keys(f"runs/{run_id}/quarantine/")} == keys


async def test_evidence_that_cannot_be_kept_is_told(lost, open_store, nowhere):
    for store in (lost, await open_store(nowhere)):
        with pytest.raises(StoreError, match="S3 did not take 'runs/run/quarantine/"):
            await store.quarantine("run", "a", "why", b"")
