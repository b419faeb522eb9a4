"""A step while S3 refuses requests: what waits, what continues, and in which order writes land."""

import asyncio

import pytest

from agent_wrapper.contract import Outcome
from builders import eventually, skip, skip_to_end
from rollout_backend.core.manifest import Manifest
from rollout_backend.errors import CircuitOpen, CredentialsExpired, StoreError
from rollout_backend.testing.fault_proxy import Fault, Rule
from step_bench import Agents, only

REPLACING = "group.policy=replace"
LATE = 81  # seconds after which a rollout of a bench is overdue


def refuse(operation: str, path: str = "*") -> Rule:
    """Answer as S3 may for a while, and as its SDK does not repeat."""
    return Rule(operation, Fault.FAIL, status=403, code="RequestTimeTooSkewed", path=path)


# --- its manifest -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["s3:GetObject", "s3:PutObject"])
async def test_a_refusal_at_the_start_delays_the_step_and_nothing_is_dispatched_before(proxy, open_bench, operation):
    bench = await open_bench(f"aws.endpoint_url={proxy.url}")
    rule = refuse(operation, "*/manifests/*")
    proxy.rules.append(rule)
    running = bench.start("a")
    await eventually(lambda: rule.hits >= 5)
    assert bench.agents.requests == []
    assert not running.done()
    proxy.rules.clear()
    assert (await running).report.outcomes[Outcome.COMPLETED] == 2


async def test_a_refusal_during_a_replacement_holds_up_the_replacement_alone(proxy, open_bench):
    bench = await open_bench(REPLACING, f"aws.endpoint_url={proxy.url}")
    rule, go = refuse("s3:PutObject", "*/manifests/*"), asyncio.Event()

    async def behave(agents, request):
        if request.rollout_id == "b.0":
            await go.wait()
        proxy.rules[:] = [rule] if not go.is_set() else proxy.rules
        await only("a.0", Agents.lose)(agents, request)

    running = bench.start("a", "b", behave=behave)
    await eventually(lambda: rule.hits >= 5)
    go.set()
    await eventually(lambda: bench.ledger.entries["b.0"].outcome is not None)  # while S3 still refuses
    assert "a.2" not in bench.agents.rollouts
    proxy.rules.clear()
    report = (await running).report
    assert (report.outcomes[Outcome.COMPLETED], report.replacements) == (4, 1)


async def test_an_older_state_never_lands_last(open_bench):
    bench = await open_bench(REPLACING, "group.size=4")
    began: list[Manifest] = []
    landed: list[Manifest] = []

    async def write(manifest: Manifest) -> None:
        assert len(began) == len(landed), "two writes of one manifest at the same time"
        began.append(manifest)
        await asyncio.sleep(0)
        landed.append(manifest)

    bench.services.manifests.write = write
    result = await bench.run("a", behave=only("a.0", Agents.lose, only("a.1", Agents.lose)))
    assert result.report.replacements == 2
    sizes = [len(manifest.tasks[0].rollouts) for manifest in landed]
    assert sizes == sorted(sizes)
    assert landed == began
    assert sizes[-1] == 6


async def test_a_refusal_until_the_deadline_ends_the_step_and_nothing_was_dispatched(open_bench):
    bench = await open_bench()
    tries = []

    async def write(manifest: Manifest) -> None:
        tries.append(manifest)
        if len(tries) == 2:
            skip(bench.config.timeouts.collection_s)
        await asyncio.sleep(0)
        raise StoreError("503 SlowDown")

    bench.services.manifests.write = write
    with pytest.raises(StoreError, match="503 SlowDown"):
        await bench.run("a")
    assert len(tries) == 2
    assert bench.agents.requests == []


async def test_an_abort_does_not_wait_for_s3(open_bench):
    bench = await open_bench()
    asked = asyncio.Event()

    async def read(step: int) -> None:
        asked.set()
        await asyncio.sleep(0)
        raise StoreError("503 SlowDown")

    bench.services.manifests.read = read
    step = bench.step("a")
    running = asyncio.create_task(step.run())
    await asked.wait()
    step.early_end.abort(CircuitOpen("enough"))
    with pytest.raises(CircuitOpen):
        await running


async def test_credentials_that_expire_during_a_replacement_end_the_step(open_bench):
    bench = await open_bench(REPLACING)
    write = bench.services.manifests.write

    async def expired(manifest: Manifest) -> None:
        if len(manifest.tasks[0].rollouts) > 2:
            raise CredentialsExpired("get new ones")
        await write(manifest)

    bench.services.manifests.write = expired
    with pytest.raises(CredentialsExpired):
        await bench.run("a", behave=only("a.0", Agents.lose, Agents.vanish))
    assert not bench.agents.sessions


# --- its results: an unanswered question does not mean that a result is absent ----------------------------


async def test_unknown_results_are_reported_as_unknown_at_the_steps_deadline(proxy, open_bench):
    bench = await open_bench(f"aws.endpoint_url={proxy.url}")
    proxy.rules = [refuse("s3:GetObject", "*/steps/*")]
    running = bench.start(behave=only("task-a.0", Agents.vanish, Agents.write_unannounced))
    await eventually(lambda: bench.agents.finished == 2)
    skip(LATE)
    await eventually(lambda: proxy.count("s3:GetObject", Fault.FAIL) >= 2)
    skip(bench.config.timeouts.collection_s)
    result = await running
    assert result.report.reasons == {"timed_out: store_unavailable": 2}
    assert "S3 could not be asked" in result.failures[0].message


async def test_while_listings_fail_results_are_requested_by_their_keys(proxy, open_bench):
    sizes = ("group.size=60", "group.min_viable=1", "queue.enabled=false")
    bench = await open_bench(f"aws.endpoint_url={proxy.url}", *sizes)

    async def no_listings(request):  # from the first dispatch on
        proxy.rules = [refuse("s3:ListObjects")]

    running = bench.start(before=no_listings, behave=Agents.write_unannounced)
    await eventually(lambda: bench.agents.finished == 60)
    skip(LATE)
    result = await running
    assert result.report.outcomes[Outcome.COMPLETED] == 60


# --- an S3 that is silent, although its client should have given up ---------------------------------------


async def silent(*args: object) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("call", ["blocklist.read", "manifests.read", "manifests.write"])
async def test_a_step_ends_at_its_deadline_however_silent_s3_is(open_bench, monkeypatch, call):
    bench = await open_bench()
    service, _, method = call.partition(".")
    reached = asyncio.Event()

    async def ask(*args: object) -> None:
        reached.set()
        await silent()

    monkeypatch.setattr(getattr(bench.services, service), method, ask)
    running = asyncio.create_task(bench.run("a"))
    await reached.wait()  # the calls before it need real time
    with pytest.raises(StoreError, match="no answer in time"):
        await skip_to_end(asyncio.wait_for(running, None))
    assert bench.agents.requests == []


async def test_a_step_returns_however_silent_s3_is_at_its_end(open_bench, caplog):
    bench = await open_bench("group.block_task_after=1", "group.size=1", "group.min_viable=1")
    tasks = ["a", *(f"lost-{i}" for i in range(40))]
    running = bench.start(*tasks, behave=only("a.0", Agents.complete, Agents.lose))
    await eventually(lambda: bench.agents.requests)
    bench.services.manifests.write = bench.services.blocklist._store.put = silent
    await eventually(lambda: bench.ledger.open == 0)
    await skip_to_end(asyncio.wait([running]))
    assert running.result().report.outcomes[Outcome.COMPLETED] == 1
    assert "did not take the manifest of step 0 in time" in caplog.text
    assert "a restarted trainer will not know of the losses of 40 tasks" in caplog.text
