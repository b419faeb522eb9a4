"""The result store on a local S3: reading, listing and quarantine."""

import asyncio
import hashlib
import json

import pytest
from aiohttp import web

from agent_wrapper.contract import (
    ContractError,
    artifacts_key,
    lease_key,
    manifest_key,
    result_key,
    score_key,
    step_prefix,
)
from agent_wrapper.contract.codec import MAX_OBJECT_BYTES
from builders import served
from collect_bench import Sink
from rollout_backend.config import AwsConfig
from rollout_backend.errors import ManifestError, PreflightError, ResultMissing, StoreError
from rollout_backend.run.collect.buffer import RolloutBuffer
from rollout_backend.run.collect.fetcher import Quarantine
from rollout_backend.run.collect.manifest_store import ManifestStore
from rollout_backend.run.collect.store import describe_keeping
from rollout_backend.testing.fault_proxy import Fault, Rule
from rollouts import make_manifest


@pytest.fixture
async def put(s3, local_aws):
    async def put(key: str, body: bytes = b"x") -> None:
        await s3.put_object(Bucket=local_aws.bucket, Key=key, Body=body)

    return put


@pytest.fixture
async def lost(open_store, s3, run_id):
    """A store whose bucket has been deleted."""
    bucket = f"lost-{run_id}"
    await s3.create_bucket(Bucket=bucket)
    store = await open_store(bucket=bucket)
    await s3.delete_bucket(Bucket=bucket)
    return store


# --- preflight --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", ["If-None-Match", "If-Match"])
async def test_a_store_without_conditional_writes_is_reported(open_store, proxy, header):
    store = await open_store(AwsConfig(endpoint_url=proxy.url))
    await store.check()
    proxy.rules = [Rule("s3:PutObject", Fault.FAIL, status=501, code="NotImplemented", header=header)]
    with pytest.raises(
        PreflightError, match=rf"does not support PutObject with {header}: it answers 501 to it\. .*past the proxy"
    ):
        await store.check()
    proxy.rules = [Rule("s3:PutObject", Fault.STRIP, header=header)]
    with pytest.raises(PreflightError, match=f"does not support PutObject with {header}: it ignores it"):
        await store.check()


# --- get --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "some/where/"])
async def test_the_cap_of_results_does_not_hold_for_what_only_trainers_write(open_store, put, run_id, prefix):
    store = await open_store(prefix=prefix, max_result_bytes=1024)
    place = prefix, run_id, 0, "t.0"
    for key in (manifest_key(*place[:3]), score_key(*place, "d"), artifacts_key(*place, 1), lease_key(*place[:2])):
        await put(key, b"x" * 1025)
        assert len(await store.get(key)) == 1025
    await put(result_key(*place), b"x" * 1024)
    assert len(await store.get(result_key(*place))) == 1024
    await put(result_key(*place), b"x" * 1025)
    with pytest.raises(ContractError, match="more than the cap of 1024"):
        await store.get(result_key(*place))


async def test_a_manifest_that_could_not_be_read_again_is_not_written(open_store, run_id):
    manifests = ManifestStore(await open_store(), run_id)
    large = make_manifest(run_id, weights="x" * MAX_OBJECT_BYTES)
    with pytest.raises(ManifestError, match=r"with 0 rollouts, has 268,\d{3},\d{3} bytes, .* fewer tasks"):
        await manifests.write(large)
    assert await manifests.read(0) is None


async def test_objects_above_the_cap_do_not_leak_connections(open_store, put, run_id):
    store = await open_store(max_result_bytes=1024)
    await put(f"{run_id}/large", b"x" * 1_000_000)
    await put(f"{run_id}/small")
    for _ in range(40):  # more than the number of connections
        with pytest.raises(ContractError):
            await store.get(f"{run_id}/large")
    async with asyncio.timeout(60):
        assert await store.get(f"{run_id}/small") == b"x"


BODY_FAULTS = (Fault.CUT_BODY, Fault.RESET_BODY, Fault.NO_LENGTH)


async def test_get_retries_a_truncated_body(faulty, proxy, open_store, put, run_id):
    body, store = bytes(range(256)) * 1000, await open_store(faulty)
    await put(f"{run_id}/a", body)
    for fault in BODY_FAULTS:
        proxy.rules = [Rule("s3:GetObject", fault, times=2)]
        assert await store.get(f"{run_id}/a") == body
        assert proxy.count("s3:GetObject", fault) == 2


async def test_a_chunked_object_is_read_up_to_the_cap(open_store):
    async def chunked(request):
        answer = web.StreamResponse()
        answer.enable_chunked_encoding()
        await answer.prepare(request)
        await answer.write(b"x" * 2000)
        return answer

    async with served(chunked) as url:
        where = AwsConfig(endpoint_url=url)
        assert await (await open_store(where, max_result_bytes=2048)).get("a") == b"x" * 2000
        with pytest.raises(ContractError, match="more than the cap of 1024"):
            await (await open_store(where, max_result_bytes=1024)).get("a")


async def test_a_body_that_takes_too_long_is_a_transient_error(faulty, proxy, open_store, put, run_id):
    await put(f"{run_id}/a", b"x" * 1000)
    proxy.rules.append(Rule("s3:GetObject", Fault.SLOW_BODY, seconds=600))
    store = await open_store(faulty)
    store.get_s = 0.3
    with pytest.raises(StoreError, match=r"reading .* from S3 failed"):
        await store.get(f"{run_id}/a")


# --- objects that S3 refuses permanently ------------------------------------------------------------------

REFUSALS = [  # of one object
    (403, "AccessDenied", ContractError),
    (400, "KMS.DisabledException", ContractError),
    (400, "KMS.ThrottlingException", StoreError),
    (403, "RequestTimeTooSkewed", StoreError),
    (408, "RequestTooSlow", StoreError),  # of a proxy
    (503, "SlowDown", StoreError),
]


async def test_an_object_that_s3_permanently_refuses_is_invalid_and_other_refusals_are_transient(
    faulty, proxy, open_store, put, run_id
):
    store = await open_store(faulty)
    await put(f"{run_id}/fine")
    assert await store.get(f"{run_id}/fine") == b"x"
    for status, code, kind in REFUSALS:
        await put(f"{run_id}/{code}")
        proxy.rules.append(Rule("s3:GetObject", Fault.FAIL, status=status, code=code, path=f"*/{code}"))
        words = "S3 refuses it permanently" if kind is ContractError else "S3 refused"
        with pytest.raises(kind, match=f"{words}.*{code}") as caught:
            await store.get(f"{run_id}/{code}")
        assert ("This machine's clock is wrong" in str(caught.value)) == (code == "RequestTimeTooSkewed")


@pytest.mark.parametrize(("status", "code"), [each[:2] for each in REFUSALS[:2]])
async def test_a_refusal_of_the_whole_bucket_is_transient(faulty, proxy, open_store, put, run_id, status, code):
    for name in ("a", "b"):
        await put(f"{run_id}/{name}")
    store = await open_store(faulty)
    await store.get(f"{run_id}/a")
    proxy.rules = [Rule("s3:GetObject", Fault.FAIL, status=status, code=code)]
    with pytest.raises(StoreError, match=f"S3 refused.*{code}"):
        await store.get(f"{run_id}/b")
    proxy.rules = []
    assert await store.get(f"{run_id}/b") == b"x"


async def test_a_missing_key_is_missing_even_if_s3_answers_403(faulty, proxy, open_store, put, run_id):
    """S3 answers 403 to a role that may not list the whole bucket."""
    await put(f"{run_id}/a.10")
    proxy.rules.append(Rule("s3:GetObject", Fault.FAIL, status=403, code="AccessDenied"))
    store = await open_store(faulty)
    with pytest.raises(ResultMissing):
        await store.get(f"{run_id}/a.1")
    proxy.rules.append(Rule("s3:ListObjects", Fault.FAIL, status=403, code="AccessDenied"))
    with pytest.raises(StoreError, match="S3 refused") as caught:
        await store.get(f"{run_id}/a.1")
    assert not isinstance(caught.value, ResultMissing)


# --- listing ---------------------------------------------------------------------------------------------


async def test_every_key_is_listed_over_all_pages(open_store, put, run_id):
    wanted = [f"{run_id}/{i:04d}" for i in range(1_003)]  # a page has 1,000
    for start in range(0, len(wanted), 50):
        await asyncio.gather(*map(put, wanted[start : start + 50]))
    assert [key async for key in (await open_store()).keys(f"{run_id}/")] == wanted


async def test_a_bucket_that_gives_no_answer_is_not_empty(lost, open_store, nowhere):
    for store in (lost, await open_store(nowhere)):
        with pytest.raises(StoreError, match="listing 'p/' in S3 failed"):
            _ = [key async for key in store.keys("p/")]
        with pytest.raises(StoreError) as caught:
            await store.get("a")
        assert not isinstance(caught.value, ResultMissing)
        assert not await Quarantine(store, "run").record("a", ContractError("x", "y"), b"")


async def test_a_truncated_listing_is_a_transient_error(faulty, proxy, open_store, put, run_id):
    store = await open_store(faulty)
    for i in range(20):
        await put(f"{run_id}/{i}")
    for fault in (*BODY_FAULTS, Fault.TRUNCATE):
        proxy.rules = [Rule("s3:ListObjects", fault)]
        with pytest.raises(StoreError, match=r"listing .* in S3 failed"):
            _ = [key async for key in store.keys(f"{run_id}/")]


async def test_an_empty_response_is_not_an_empty_listing(open_store):
    async def nothing(request):
        return web.Response(status=200 if "list-type" in request.query else 403)

    async with served(nothing) as url:
        store = await open_store(AwsConfig(endpoint_url=url))
        with pytest.raises(StoreError, match=r"listing .* in S3 failed"):
            _ = [key async for key in store.keys("p/")]
        with pytest.raises(StoreError, match="S3 refused 'p/a'"):  # it is not missing
            await store.get("p/a")


@pytest.mark.parametrize("prefix", ["", "team/a/"])
async def test_only_a_steps_wanted_results_and_failure_markers_are_listed(open_store, put, run_id, prefix):
    here = step_prefix(prefix, run_id, 3)
    wanted = ("task-a.0", "task-a.1", "x.y_z-1.10")
    for key in (here + "task-a.0~1", *(here + rollout_id for rollout_id in wanted[1:])):
        await put(key)
    others = (
        step_prefix(prefix, run_id, 2) + "task-a.2",
        step_prefix(prefix, f"{run_id}-more", 3) + "task-a.3",
        step_prefix(f"{prefix}x/", run_id, 3) + "task-a.4",
        here + "deeper/task-a.5",
        here + ".hidden",
        here + "with space",
        here + "task-a.6~0",
        here + "x" * 129,
        f"{prefix}runs/{run_id}/quarantine/0.json",
    )
    for key in (*others, here + "settled.0", here + "running.0~9"):
        await put(key)
    buffer = RolloutBuffer(run_id, await open_store(prefix=prefix), None, 4)
    names = {key.rpartition("/")[2].partition("~")[0] for key in others}
    assert await buffer.list_results(Sink(*wanted, *names, step=3)) == {*wanted}
    assert await buffer.list_results(Sink(*wanted, step=4)) == set()


# --- quarantine -------------------------------------------------------------------------------------------


async def test_quarantine_stores_the_reason_and_the_first_bytes_once(open_store, run_id):
    store = await open_store(prefix="team/a/")
    quarantine, folder = Quarantine(store, run_id), f"team/a/runs/{run_id}/quarantine/"
    evidence, error = b"<broken>\xff\x00" + b"x" * 5000, ContractError("body", "not JSON")
    assert await quarantine.record("message m-1", error, evidence)
    assert await quarantine.record("message m-1", error, evidence)
    [key] = [key async for key in store.keys(folder)]
    assert json.loads(await store.get(key)) == {
        "what": "message m-1",
        "reason": "body: not JSON",
        "bytes": len(evidence),
        "sha256": hashlib.sha256(evidence).hexdigest(),
        "begins": "<broken>\\xff\x00" + "x" * (4096 - 10),
    }
    for what, why, other in (("b", error, evidence), ("a", ContractError("x", "y"), evidence), ("a", error, b"more")):
        assert await quarantine.record(what, why, other)
    assert len([key async for key in store.keys(folder)]) == 4


@pytest.mark.parametrize(
    ("filtered", "applies"),
    [
        ({"Prefix": "team/"}, True),
        ({"Filter": {"Prefix": "team/runs/"}}, True),
        ({"Filter": {}}, True),
        ({"Filter": {"ObjectSizeGreaterThan": 1000}}, True),
        ({"Filter": {"And": {"Prefix": "team/", "ObjectSizeGreaterThan": 1000}}}, True),
        ({"Filter": {"Prefix": "logs/"}}, False),
        ({"Filter": {"Tag": {"Key": "a", "Value": "b"}}}, False),
        ({"Filter": {"And": {"Prefix": "logs/", "ObjectSizeGreaterThan": 1000}}}, False),
        ({"Filter": {"And": {"Prefix": "team/", "Tags": [{"Key": "a", "Value": "b"}]}}}, False),
    ],
)
def test_a_lifecycle_rule_counts_if_it_applies_to_results(filtered, applies):
    rule = {"Status": "Enabled", "Expiration": {"Days": 7}, **filtered}
    kept = "objects expire after 7 days" if applies else "objects never expire"
    assert describe_keeping("Enabled", [rule], "team/runs/") == f"versioning is enabled, {kept}"
