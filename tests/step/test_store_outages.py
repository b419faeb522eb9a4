"""A step while S3 does not answer: an unanswered question does not mean that a result is absent."""

import pytest

from agent_wrapper.contract import Outcome
from builders import eventually, skip
from rollout_backend.testing.fault_proxy import Fault, Rule
from step_bench import Agents, only

LATE = 81  # seconds after which a rollout of a bench is overdue


def refuse(operation: str, path: str = "*") -> Rule:
    return Rule(operation, Fault.FAIL, code="SlowDown", path=path)


@pytest.mark.parametrize("refused", ["s3:GetObject", "s3:*"])
async def test_what_s3_was_not_asked_for_stays_open_until_it_answers(proxy, open_bench, refused):
    bench = await open_bench(f"aws.endpoint_url={proxy.url}")
    running = bench.start("task-a", "task-b", behave=Agents.write_unannounced)
    await eventually(lambda: bench.agents.finished == 4)
    proxy.rules = [refuse(refused)]
    skip(LATE)
    await eventually(
        lambda: proxy.count("s3:GetObject", Fault.FAIL) >= 16
    )  # each of the four, with the SDK's own retries
    assert len(list(bench.ledger.open_entries())) == 4
    proxy.rules = []
    result = await running
    assert result.report.outcomes[Outcome.COMPLETED] == 4
    assert not result.report.deadline_reached


async def test_a_straggler_is_not_cut_off_before_s3_has_answered(proxy, open_bench):
    stragglers = ("group.straggler_after=0.5", "group.straggler_factor=1.0")
    bench = await open_bench(f"aws.endpoint_url={proxy.url}", *stragglers)
    proxy.rules = [refuse("s3:GetObject", "*/task-a.1")]
    running = bench.start(behave=only("task-a.1", Agents.write_unannounced))
    await eventually(lambda: proxy.count("s3:GetObject", Fault.FAIL) >= 5)
    assert [entry.rollout_id for entry in bench.ledger.open_entries()] == ["task-a.1"]
    proxy.rules = []
    assert (await running).report.outcomes[Outcome.COMPLETED] == 2


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
