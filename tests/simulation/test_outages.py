"""Throttling and outages of the runtime cost time, never a rollout."""

import asyncio
import random

import pytest

from agent_wrapper.contract import Outcome
from rollout_backend.errors import ServingError
from rollout_backend.run.dispatch.call_queue import CallKind, CallQueue
from rollout_backend.run.dispatch.rate_limiter import TokenBucket
from rollout_backend.run.lease import FencedRuntime
from tests.simulation.capacity import REFUSALS, Outage

GROUP = 8


def quick(first: object, *others: object) -> list[object]:
    """The first value is for the quick tests, the others for the release."""
    marks = (pytest.mark.slow, pytest.mark.release)
    return [first, *(pytest.param(value, marks=marks) for value in others)]


@pytest.fixture(autouse=True)
def _fixed_jitter():
    random.seed(0)


def completed(result, rollouts: int) -> None:
    report = result.report
    assert report.outcomes[Outcome.COMPLETED] == report.planned == rollouts, report.reasons
    assert (report.sessions_open, report.unclosed_sessions) == (0, {})


@pytest.mark.parametrize("since", quick(7.0, 0.0, 30.0))
@pytest.mark.parametrize("rollouts", quick(64, 8, 256))
@pytest.mark.parametrize("kind", REFUSALS)
def test_a_minute_of_refusals_loses_nothing(play, make_run, make_config, kind, rollouts, since):
    async def work():
        run = make_run(make_config(runtime={"invoke_per_s": 6}))
        run.world.limits.outage = Outage(REFUSALS[kind], since, since + 60)
        result = await run.step(rollouts // GROUP).run()
        return result, run.world.limits.outage.invokes, dict(run.world.sessions)

    result, invokes, sessions = play(work())
    completed(result, rollouts)
    assert not sessions
    assert invokes < 120  # of the 360 that the configured rate would make
    assert result.report.seconds < 400


@pytest.mark.parametrize("since", quick(7.0, 0.0, 30.0, 45.0))
@pytest.mark.parametrize("rollouts", quick(64, 8, 256))
@pytest.mark.parametrize("refused", [("PUT",), ("GET",), ("LIST",), ("PUT", "GET", "LIST")], ids="+".join)
def test_a_minute_without_s3_loses_nothing(play, make_run, make_config, refused, rollouts, since):
    async def work():
        run = make_run(make_config(runtime={"invoke_per_s": 6}))
        run.world.bucket.outages = dict.fromkeys(refused, (since, since + 60))
        return await run.step(rollouts // GROUP).run(), dict(run.world.sessions)

    result, sessions = play(work())
    completed(result, rollouts)
    assert not sessions


def test_a_quota_below_the_configured_rate_is_found(play, make_run, make_config):
    """Eight calls a second, invokes and stops together, where the settings ask for 40 invokes a second."""

    async def work():
        run = make_run(make_config(runtime={"invoke_per_s": 40}))
        run.world.limits.quota = TokenBucket(8)
        return await run.step(12).run()

    result = play(work())
    completed(result, 96)
    rate = result.report.invoke_rate
    assert rate.refused > 0
    assert 4 < rate.granted_per_s <= 9


@pytest.mark.parametrize("rollouts", quick(64, 256))
def test_a_quota_that_both_kinds_share_is_kept_by_both(play, make_run, make_config, rollouts):
    async def work(**rates):
        run = make_run(make_config(runtime={"invoke_per_s": 50, "stop_per_s": 50, **rates}))
        run.world.limits.quota = TokenBucket(25)
        return await run.step(rollouts // GROUP).run()

    result = play(work(calls_per_s=24))
    completed(result, rollouts)
    assert result.report.invoke_rate is None
    assert result.report.stop_rate is None
    completed(play(work()), rollouts)


def test_invokes_that_waited_for_the_lease_are_sent_at_the_rate(play):
    class Lease:
        lost, is_confirmed, is_silent = None, False, False

    class Runtime:
        async def invoke(self, session_id, payload):
            sent.append(asyncio.get_running_loop().time())

    sent: list[float] = []

    async def work():
        lease, calls = Lease(), CallQueue(10, 10)
        calls.lease = lease
        runtime = FencedRuntime(Runtime(), lease)

        async def invoke():
            await calls.admit(CallKind.INVOKE)
            await runtime.invoke("session", b"")

        invoking = [asyncio.create_task(invoke()) for _ in range(200)]
        await asyncio.sleep(60)
        assert sent == []
        lease.is_confirmed = True
        await asyncio.gather(*invoking)

    play(work())
    assert sum(at < sent[0] + 1 for at in sent) <= 20  # a burst of 10, and 10 a second
    assert 18 <= sent[-1] - sent[0] <= 20


def test_where_nothing_is_refused_the_configured_rate_holds(play, make_run, make_config):
    async def work():
        run = make_run(make_config(runtime={"invoke_per_s": 10}))
        result = await run.step(8).run()
        first = run.world.audit.started[0][0]
        return result, [at - first for at, _ in run.world.audit.started]

    result, invoked = play(work())
    completed(result, 64)
    assert result.report.invoke_rate is None
    assert 5 <= invoked[-1] <= 7  # 64 less the burst of 10, at 10 a second


def test_a_refusal_that_does_not_end_is_named_when_the_time_is_up(play, make_run, make_config):
    async def work():
        run = make_run(make_config(timeouts={"collection_s": 600}))
        run.world.limits.outage = Outage(REFUSALS["429"], 0.0, float("inf"))
        return await run.step(1).run()

    result = play(work())
    assert result.report.reasons == {"infra_error: throttled": 7, "cancelled: group_doomed": 1}
    assert 530 < result.report.seconds <= 600
    assert result.report.attempts == 0


def test_an_outage_that_opens_every_session_all_the_same_is_bounded_by_attempts(play, make_run, make_config):
    async def work():
        run = make_run(make_config(circuit_breaker={"max_failures": None}))
        run.world.limits.outage = Outage(REFUSALS["500 after"], 0.0, float("inf"))
        step = run.step(1)
        stop, run.runtime.stop = run.runtime.stop, None

        async def stopped(session_id):
            run.world.limits.outage, outage = None, run.world.limits.outage
            try:
                await stop(session_id)
            finally:
                run.world.limits.outage = outage

        run.runtime.stop = stopped
        return await step.run(), dict(run.world.sessions)

    result, sessions = play(work())
    assert result.report.attempts <= 40
    assert result.report.reasons.keys() <= {"infra_error: runtime_unavailable", "cancelled: group_doomed"}
    assert not sessions


def test_waiters_of_a_step_that_is_over_delay_no_other_step(play, make_run, make_config):
    async def work():
        run = make_run(make_config(group={"target_groups": 1}))
        await run.step(32).run()
        began = run.world.now()
        run.world.audit.started.clear()
        await run.step(32, number=1).run()
        return run.world.audit.started[0][0] - began

    assert play(work()) < 3


def test_an_attempt_that_begins_after_the_steps_last_question_to_s3_is_unknown_and_not_absent(
    play, make_run, make_config
):
    async def work():
        run = make_run(make_config(timeouts={"collection_s": 400}, runtime={"invoke_per_s": 20}))
        run.world.bucket.outages = {"GET": (60, 900), "LIST": (60, 900)}
        run.world.limits.outage = Outage(REFUSALS["429"], 0.0, 390.0)
        return await run.step(64).run()

    reasons = play(work()).report.reasons
    assert reasons["timed_out: store_unavailable"] > 0
    assert "timed_out: collection_deadline" not in reasons


def test_a_gateway_that_never_answers_delays_the_end_of_a_step_by_one_limit(play, make_run, make_config):
    async def work():
        run = make_run(make_config())
        asked = []

        async def revoke(session_ids):
            asked.extend(session_ids)
            await asyncio.sleep(150)
            raise ServingError("a gateway gave no answer")

        run.services.gateways.revoke = revoke
        result = await run.step(8).run()
        return result.report, set(asked), run.world.audit.asked_for

    report, asked, invoked = play(work())
    assert report.closing_s < 190
    assert asked == invoked


def test_the_records_of_sessions_are_kept_until_s3_knows_that_these_are_closed(play, make_run, make_config):
    async def work(outage):
        run = make_run(make_config())
        step = run.step(1)
        run.world.bucket.outages = {"PUT": outage}
        await step.run()
        return run.world.run_directory.read(0)

    assert play(work((5, 600)))
    assert not play(work((0, 0)))
