"""A container that writes as other rollouts costs them one rollout at most, and nothing that it claims is trained."""

import itertools

import pytest

from agent_wrapper.contract import Outcome
from rollout_backend.core.tasks import Task, rollout_id
from rollout_backend.errors import CircuitOpen
from rollout_backend.step.circuit_breaker import CircuitBreaker
from rollouts import make_manifest
from step_bench import Agents, only


async def test_results_refused_before_a_restart_do_not_open_the_breaker_again(open_bench):
    breaker = ("circuit_breaker.max_failures=2", "circuit_breaker.min_span_s=0")
    bench = await open_bench(*breaker, "group.size=3", "group.min_viable=1")

    async def garbage(agents, request):
        await agents.put(request, b"broken")
        await agents.announce(request)

    with pytest.raises(CircuitOpen):
        await bench.run(behave=only("task-a.2", Agents.hang, garbage))
    bench.replace(breaker=CircuitBreaker(bench.config.circuit_breaker))
    report = (await bench.run(behave=Agents.complete)).report
    assert report.reasons == {"infra_error: invalid_result": 2}
    assert report.outcomes[Outcome.COMPLETED] == 1


def test_tasks_of_any_names_share_no_rollout():
    tasks = ("a", "a.g1", "a.0", "a.0.g1", "a.g1.0", "0", "0.0", "g1")
    ids = [rollout_id(*each) for each in itertools.product(tasks, range(12), range(12))]
    assert len(set(ids)) == len(ids)


def plan(name, before=None):
    return make_manifest("r", Task(name, {"q": name}), before=before)


def test_a_step_planned_again_shares_no_rollout_with_the_one_before():
    first = plan("a.g1")
    second = plan("a", first)
    third = plan("a.g2", second)
    ids = [each for manifest in (first, second, third) for each in manifest.tasks[0].rollouts]
    assert len(set(ids)) == 6
    assert second.next_rollout("a") == "a.2.g1"
    assert third.next_rollout("a.g2") == "a.g2.2.g2"


def test_session_ids_cannot_be_known_without_the_manifest():
    one, other = plan("a"), plan("a")
    assert one.session_id("a.0", 1) != other.session_id("a.0", 1), "the same step of the same run"
    assert len(one.nonce) == 32
