"""What a step does with each answer of the runtime to an invoke or a stop."""

import asyncio
import json

import pytest
from tenacity import wait_fixed

from agent_wrapper.contract import Outcome
from builders import eventually, skip
from rollout_backend.core.ledger import Phase
from rollout_backend.core.manifest import Manifest
from rollout_backend.errors import (
    ContainerStartTimeout,
    InvokeRejected,
    LeaseUnconfirmed,
    NoCredentials,
    OutcomeUnknown,
    QuotaExceeded,
    RuntimeConflict,
    RuntimeUnavailable,
    Throttled,
    WrongClock,
)
from rollout_backend.run.step.in_flight import InFlightLog, StepFiles
from rollout_backend.run.step.services import Pauses
from step_bench import Agents

NEVER_OPENED = [
    Throttled("429"),
    QuotaExceeded("402"),
    RuntimeConflict("409"),
    RuntimeUnavailable("no", never_opened=True),
    NoCredentials("no answer of the provider"),
    WrongClock("signature expired"),
    LeaseUnconfirmed("S3 is silent"),
]
REFUSED = RuntimeUnavailable("503", refused=True)


@pytest.fixture
async def bench(open_bench):
    """A step of one rollout, with at most three attempts, and one session at a time."""
    return await open_bench("group.size=1", "runtime.max_attempts=3", "runtime.max_sessions=1")


def answering(*answers):
    """Answer calls with these, and then with the last one again: an error, or None."""
    left = list(answers)

    async def answer(*_):
        found = left.pop(0) if len(left) > 1 else left[0]
        if found is not None:
            raise found

    return answer


@pytest.mark.parametrize("refusal", [*NEVER_OPENED, REFUSED], ids=lambda error: f"{type(error).__name__}-{error}")
async def test_a_refusal_is_no_attempt_and_nothing_is_stopped(bench, refusal):
    report = (await bench.run(before=answering(*[refusal] * 6, None))).report
    [session] = bench.agents.invoked
    assert len(bench.agents.requests) == 7
    assert bench.agents.stopped == [session], "at its end"
    assert (report.attempts, bench.ledger.sessions_opened) == (1, 1)


async def test_a_session_whose_lease_ended_before_its_invoke_is_not_open_to_the_next_trainer(bench, tmp_path):
    files, written = StepFiles(tmp_path), []
    bench.replace(in_flight=InFlightLog(files))

    async def answer(_):
        if len(bench.agents.requests) == 1:
            raise LeaseUnconfirmed("S3 is silent")
        lines = [json.loads(line) for line in await files.read(0) if line]
        written.extend(name for line in lines for name in line if name in ("invoked", "stopped"))

    await bench.run(before=answer)
    assert written == ["invoked", "stopped", "invoked"]


async def test_between_refusals_a_rollout_has_no_deadline_and_no_session(bench):
    found, between = [], []

    async def refuse(request):
        entry = bench.ledger.entries[request.rollout_id]
        found.append((entry.phase, entry.attempts))
        if len(found) == 1:
            withdraw = entry.refuse_attempt

            def watched():
                withdraw()
                between.append((entry.phase, entry.attempts, entry.deadline, entry.session_id))

            entry.refuse_attempt = watched
        if len(found) < 3:
            raise Throttled("429")

    await bench.run(before=refuse)
    assert found == [(Phase.DISPATCHING, 1)] * 3
    assert between == [(Phase.PLANNED, 0, None, None)] * 2


@pytest.mark.parametrize(
    ("first", "last", "may_be_open"),
    [(Throttled("429"), Throttled("429"), False), (REFUSED, REFUSED, True), (REFUSED, Throttled("429"), True)],
)
async def test_refusals_are_bounded_by_time_and_what_a_503_may_have_opened_is_closed(bench, first, last, may_be_open):
    times = bench.config.timeouts

    async def refuse(_):
        if len(bench.agents.requests) == 1:
            raise first
        skip(times.collection_s - times.publish_grace_s)
        raise last

    assert (await bench.run(before=refuse)).report.reasons == {f"infra_error: {last.reason}": 1}
    assert len(bench.agents.requests) == 2
    assert bench.ledger.entries["task-a.0"].attempts == 0
    assert bench.agents.stopped == [*bench.agents.invoked] * may_be_open


@pytest.mark.parametrize("kind", [RuntimeUnavailable, OutcomeUnknown, ContainerStartTimeout])
async def test_a_session_that_may_have_begun_is_stopped_and_its_id_never_used_again(bench, kind):
    stopped, answer = [], answering(kind("cut"), None)

    async def cut(request):
        stopped.append([*bench.agents.stopped])
        await answer()

    await bench.run(before=cut)
    first, second = (request.session_id for request in bench.agents.requests)
    assert first != second
    assert (stopped, bench.agents.stopped) == ([[], [first]], [first, second])


REJECTIONS = ["runtime_not_found", "access_denied", "container_error", "invoke_rejected", "not_a_rollout_app"]


@pytest.mark.parametrize("reason", REJECTIONS)
@pytest.mark.parametrize("passes", [True, False])
async def test_a_rejection_is_permanent_once_it_repeats_over_several_attempts(open_bench, reason, passes):
    bench = await open_bench("group.size=1", "runtime.max_attempts=3")
    refusal = InvokeRejected("no such runtime, or a 500 of the container", reason=reason)
    tries = 5 if refusal.never_opened else 3
    result = await bench.run(before=answering(*[refusal] * (tries - passes), *[None] * passes))
    if passes:
        assert result.report.outcomes[Outcome.COMPLETED] == 1
    else:
        assert result.report.reasons == {f"infra_error: {reason}": 1}
        assert "no such runtime" in result.failures[0].message
    assert len(bench.agents.requests) == tries
    assert bench.agents.stopped or refusal.never_opened


async def test_a_rejection_that_cannot_pass_ends_the_rollout_at_once(open_bench):
    bench = await open_bench("group.size=1")
    result = await bench.run(before=answering(InvokeRejected("no more", reason="credentials_expired")))
    assert result.report.reasons == {"infra_error: credentials_expired": 1}
    assert len(bench.agents.requests) == 1


async def test_an_agent_without_the_wrapper_is_reported(bench):
    invoke = bench.agents.invoke
    for number, answer in enumerate([b"", b"[]", b'{"status": "ok"}', b'{"status": {}}', b"[" * 60_000]):

        async def invoke_another(session_id, payload, answer=answer):
            await invoke(session_id, payload)
            return answer

        bench.agents.invoke = invoke_another
        result = await bench.run(number=number, behave=Agents.hang)
        assert result.report.reasons == {"infra_error: not_a_rollout_app": 1}
        assert "RolloutApp" in result.failures[0].message
        assert {*bench.agents.stopped} == bench.agents.invoked
        bench.forget()


async def test_a_rollout_that_is_settled_while_it_waits_is_not_submitted(open_bench):
    bench = await open_bench("group.size=2", "group.min_viable=1", "runtime.max_sessions=1")

    async def settle_the_other(agents, request):
        bench.ledger.entries["task-a.1"].settle(Outcome.CANCELLED, "target_reached")
        await agents.complete(request)

    await bench.run(behave=settle_the_other)
    assert bench.agents.rollouts == ["task-a.0"]
    assert bench.ledger.invokes.grants == 1


@pytest.mark.parametrize("phase", [Phase.DISPATCHING, Phase.PLANNED])
async def test_a_result_ends_the_wait_for_another_attempt(bench, phase):
    bench.replace(pauses=Pauses(attempt=wait_fixed(600)))

    async def publish(request):
        await eventually(lambda: bench.ledger.entries["task-a.0"].phase is phase)
        await bench.agents.complete(request)

    async def cut(request):
        bench.agents.sessions["x"] = asyncio.create_task(publish(request))
        await eventually(lambda: phase is Phase.PLANNED or bench.ledger.entries["task-a.0"].outcome)
        raise OutcomeUnknown("cut")

    assert (await asyncio.wait_for(bench.start(before=cut), 60)).report.attempts == 1


async def test_a_rollout_that_is_settled_while_its_session_is_closed_keeps_its_slot(bench):
    closing, closed = asyncio.Event(), asyncio.Event()

    async def stop(session_id):
        closing.set()
        await closed.wait()

    bench.agents.stop, calls = stop, bench.services.dispatcher.calls
    step = bench.step(before=answering(OutcomeUnknown("no answer")))
    running = asyncio.create_task(step.run())
    await asyncio.wait_for(closing.wait(), 60)
    step.rollouts["task-a.0"].settle(Outcome.CANCELLED, "target_reached")
    for _ in range(20):
        await asyncio.sleep(0)
    assert calls.free_slots == 0
    assert bench.ledger.open_sessions
    closed.set()
    bench.check_ended(await running)
    assert calls.free_slots == 1


async def test_a_rollout_that_is_settled_during_its_invoke_has_its_session_closed_before_its_slot_is_free(open_bench):
    bench = await open_bench("group.size=2", "group.min_viable=1", "runtime.max_sessions=1")
    never, seen = asyncio.Event(), []

    async def hang_once(request):
        seen.append([*bench.agents.stopped])
        if len(seen) == 1:
            await never.wait()

    step = bench.step(before=hang_once)
    running = asyncio.create_task(step.run())
    await eventually(lambda: seen)
    step.rollouts["task-a.0"].settle(Outcome.CANCELLED, "target_reached")
    bench.check_ended(await running)
    first, second = (request.session_id for request in bench.agents.requests)
    assert (seen, bench.agents.stopped) == ([[], [first]], [first, second])


async def test_a_step_that_is_cancelled_in_an_invoke_stops_its_session(bench):
    never = asyncio.Event()
    running = bench.start(before=lambda request: never.wait())
    await eventually(lambda: bench.agents.requests)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert set(bench.agents.stopped) == bench.agents.invoked
    assert not bench.ledger.open_sessions


# --- stops ------------------------------------------------------------------------------------------------


def answer_stops(bench, *answers):
    answer = answering(*answers)

    async def stop(session_id):
        bench.agents.stopped.append(session_id)
        await answer()

    bench.agents.stop = stop


async def test_a_session_that_cannot_be_closed_in_time_is_named(bench):
    bench.services.dispatcher._stop_retry_s = 0.0
    answer_stops(bench, RuntimeUnavailable("503"))
    report = (await bench.start()).report
    assert report.unclosed_sessions == dict.fromkeys(bench.agents.invoked, "503")
    # A trainer that resumes the step stops it again.
    assert Manifest.parse(await bench.manifest()).attempts_closed == 0


async def test_a_session_that_the_runtime_does_not_know_is_not_reported_as_ended(bench):
    async def stop(session_id):
        return False

    bench.agents.stop = stop
    report = (await bench.start()).report
    assert report.unconfirmed_stops == len(bench.agents.invoked)
    assert (report.sessions_open, report.unclosed_sessions) == (0, {})


async def test_a_permanently_refused_stop_is_not_repeated(bench):
    answer_stops(bench, InvokeRejected("403", reason="access_denied"))
    report = (await bench.start()).report
    assert bench.agents.stopped == [*bench.agents.invoked]
    assert report.unclosed_sessions == dict.fromkeys(bench.agents.invoked, "403")
