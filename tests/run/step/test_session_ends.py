"""Sessions whose end the runtime reports, in a step."""

import asyncio
from typing import Any

import pytest

from agent_wrapper.contract import Failure, Outcome
from builders import eventually, skip
from rollout_backend.core.ledger import Phase
from rollout_backend.core.session_ends import HeartbeatReport, SessionEnd, SessionEnds
from step_bench import Agents, only


def reports_its_end(bench: Any, *, writes: bool = False, final: bool = False) -> Any:
    """Return a behaviour: the container is killed for memory, perhaps once its result is in S3. `final`: it would be
    killed in each attempt."""

    async def end(agents: Agents, request: Any) -> None:
        if writes:
            await agents.write_unannounced(request)
        end = SessionEnd(request.session_id, "out_of_memory", f"session {request.session_id}: killed", final)
        bench.services.session_ends.report(end)

    return end


async def test_an_attempt_whose_session_ended_is_followed_by_another(open_bench):
    bench = await open_bench()

    async def the_first_ends(agents, request):
        await (reports_its_end(bench)(agents, request) if request.attempt == 1 else agents.complete(request))

    result = await bench.run(behave=only("task-a.1", the_first_ends))
    assert (result.report.outcomes[Outcome.COMPLETED], result.report.attempts) == (2, 3)
    attempts = {r.attempt: r.session_id for r in bench.agents.requests if r.rollout_id == "task-a.1"}
    assert list(attempts) == [1, 2]
    assert bench.agents.stopped.count(attempts[1]) == 1


@pytest.mark.parametrize("final", [False, True])
async def test_the_last_attempt_ends_with_the_runtimes_reason(open_bench, final):
    """An end that another attempt would repeat gets none."""
    bench = await open_bench("runtime.max_attempts=2", "group.min_viable=1")
    result = await bench.run(behave=only("task-a.1", reports_its_end(bench, final=final)))
    assert result.report.reasons == {"infra_error: out_of_memory": 1}
    assert result.failures[0].message.endswith("killed")
    assert result.report.attempts == (2 if final else 3)


async def test_a_result_in_s3_wins_over_the_end_of_its_session(open_bench):
    bench = await open_bench()
    report = (await bench.run(behave=reports_its_end(bench, writes=True))).report
    assert (report.outcomes[Outcome.COMPLETED], report.attempts) == (2, 2)


def test_ends_are_kept_until_they_are_watched_or_forgotten():
    ends, seen = SessionEnds(), []
    for i in range(10_001):
        ends.report(SessionEnd(str(i), "evicted", ""))
    for name in ("0", "10000"):
        ends.watch(name, lambda end: seen.append(end.session_id))
    assert seen == ["10000"]  # the oldest is not kept
    ends.forget(["0", "10000"])
    ends.report(SessionEnd("0", "evicted", ""))
    assert seen == ["10000"]


@pytest.mark.parametrize("last", [1, 2])
async def test_a_container_that_the_runtime_stopped_gets_another_attempt(open_bench, last):
    bench = await open_bench("runtime.max_attempts=2", "group.min_viable=1")

    async def is_stopped(agents, request):
        entry = bench.ledger.entries[request.rollout_id]
        await eventually(lambda: entry.phase is Phase.RUNNING)
        failure = Failure(reason="terminated", message="the container was stopped before its agent finished")
        await agents.complete(request, outcome=Outcome.INFRA_ERROR, failure=failure)

    async def are_stopped(agents, request):
        await (is_stopped(agents, request) if request.attempt <= last else agents.complete(request))

    report = (await bench.run(behave=only("task-a.1", are_stopped))).report
    assert report.attempts == 3
    assert report.reasons == ({} if last == 1 else {"infra_error: terminated": 1})


@pytest.mark.parametrize("reached", [True, False])
async def test_an_agent_that_does_not_reach_a_gateway_gets_another_attempt_if_others_have(open_bench, reached):
    """A gateway that restarts may be away for longer than agents wait. A wrong address is reported at once."""
    bench = await open_bench("runtime.max_attempts=2", "group.min_viable=1")
    heartbeats = bench.services.heartbeats
    beats = frozenset({"a session of an earlier step"} if reached else ())
    heartbeats.observe(0.0, [HeartbeatReport(beats)])
    heartbeats.observe(1.0, [None])

    async def finds_no_gateway(agents, request):
        if request.attempt == 2:
            await agents.complete(request)
            return
        entry = bench.ledger.entries[request.rollout_id]
        await eventually(lambda: entry.phase is Phase.RUNNING)
        failure = Failure(reason="model_unreachable", message="ConnectionRefusedError")
        await agents.complete(request, outcome=Outcome.INFRA_ERROR, failure=failure)

    report = (await bench.run(behave=only("task-a.1", finds_no_gateway))).report
    assert report.attempts == (3 if reached else 2)
    assert report.reasons == ({} if reached else {"infra_error: model_unreachable": 1})


@pytest.mark.parametrize("redispatched", [False, True])
async def test_an_answer_about_an_abandoned_attempt_does_not_concern_the_next(open_bench, monkeypatch, redispatched):
    bench = await open_bench("group.size=1")
    step, buffer = bench.step(), bench.services.buffer
    fetch, asked = buffer.fetch_by_key, []

    async def fails_once(sink, rollout_id, attempt):
        asked.append(attempt)
        if len(asked) > 1:
            return await fetch(sink, rollout_id, attempt)
        step.rollouts[rollout_id].retry_lost(Failure(reason="terminated", message="its marker was announced"))
        entry = bench.ledger.entries[rollout_id]
        await eventually(lambda: not redispatched or (entry.attempt, entry.phase) == (2, Phase.RUNNING))
        return False

    async def the_first_ends(agents, request):
        if request.attempt == 1:
            await reports_its_end(bench)(agents, request)
        else:
            await eventually(lambda: not step._absence_check._pending)
            await agents.complete(request)

    monkeypatch.setattr(buffer, "fetch_by_key", fails_once)
    bench.agents.behave = the_first_ends
    report = (await step.run()).report
    assert (report.outcomes[Outcome.COMPLETED], report.attempts) == (1, 2)
    assert asked == [1]


async def test_a_deadline_that_an_invoke_moves_during_the_check_has_not_passed(open_bench, monkeypatch):
    # `skip` may cut off the request that receives an announcement, so results are found by listing.
    bench = await open_bench("group.size=1", "collect.list_after_idle_s=0.3")
    step, container_up, asked = bench.step(), asyncio.Event(), []

    async def starts_slowly(request):
        await container_up.wait()

    async def answers_once_accepted(sink, rollout_id, attempt):
        asked.append(attempt)
        container_up.set()
        await eventually(lambda: bench.ledger.entries[rollout_id].phase is Phase.RUNNING)
        return True

    async def completes_once_checked(agents, request):
        await eventually(lambda: not step._absence_check._pending)
        await agents.complete(request)

    monkeypatch.setattr(bench.services.buffer, "fetch_by_key", answers_once_accepted)
    bench.agents.before, bench.agents.behave = starts_slowly, completes_once_checked
    running = asyncio.create_task(step.run())
    await eventually(lambda: bench.agents.requests)
    skip(81)  # its time is up, were its container up
    report = (await running).report
    assert (report.outcomes[Outcome.COMPLETED], asked) == (1, [1])
