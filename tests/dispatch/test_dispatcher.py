import asyncio

import pytest

from agent_wrapper.contract import Outcome
from rollout_backend.core.ledger import Phase
from rollout_backend.dispatch.call_queue import CallKind
from rollout_backend.errors import (
    ContainerStartTimeout,
    InvokeRejected,
    NoCredentials,
    OutcomeUnknown,
    QuotaExceeded,
    RuntimeConflict,
    RuntimeUnavailable,
    Throttled,
    WrongClock,
)

ACCEPTED = b'{"status": "accepted"}'
NEVER_OPENED = [
    Throttled("429"),
    QuotaExceeded("402"),
    RuntimeConflict("409"),
    RuntimeUnavailable("no", never_opened=True),
    NoCredentials("no answer of the provider"),
    WrongClock("signature expired"),
]
REFUSED = RuntimeUnavailable("503", refused=True)


async def test_an_accepted_rollout_runs_in_its_session(submit, runtime, ledger):
    assert await submit()
    entry = ledger.entries["a.0"]
    assert entry.phase is Phase.RUNNING
    assert runtime.invokes == [entry.session_id]
    assert ledger.open_sessions == {entry.session_id}


@pytest.mark.parametrize("refusal", [*NEVER_OPENED, REFUSED], ids=lambda error: f"{type(error).__name__}-{error}")
async def test_a_refusal_is_no_attempt_and_nothing_is_stopped(submit, runtime, ledger, refusal):
    runtime.on_invoke = [*[refusal] * 6, ACCEPTED]
    assert await submit()
    assert runtime.invokes == ["session-of-attempt-1"] * 7
    assert runtime.stops == []
    assert (ledger.entries["a.0"].attempts, ledger.sessions_opened) == (1, 1)
    assert ledger.open_sessions == {"session-of-attempt-1"}


async def test_a_request_that_cannot_be_signed_is_no_attempt(submit, runtime, ledger, prepare):
    prepare.errors = [NoCredentials("the provider does not answer")] * 6
    assert await submit()
    assert runtime.invokes == ["session-of-attempt-1"]
    assert (ledger.entries["a.0"].attempts, ledger.sessions_opened, ledger.invokes.refusals) == (1, 1, 6)


async def test_between_refusals_a_rollout_has_no_deadline_and_no_session(submit, runtime, ledger):
    found, between = [], []
    entry, withdraw = ledger.entries["a.0"], ledger.undo_attempt

    async def refuse(session_id, payload):
        found.append((entry.phase, entry.attempts))
        if len(found) < 3:
            raise Throttled("429")
        return ACCEPTED

    def watched(rollout_id):
        withdraw(rollout_id)
        between.append((entry.phase, entry.attempts, entry.deadline, entry.session_id))

    runtime.invoke, ledger.undo_attempt = refuse, watched
    assert await submit()
    assert found == [(Phase.DISPATCHING, 1)] * 3
    assert between == [(Phase.PLANNED, 0, None, None)] * 2


async def test_refusals_are_bounded_by_time(submit, runtime, ledger):
    runtime.on_invoke = [Throttled("slow down")]
    assert not await submit(asyncio.get_running_loop().time())
    assert len(runtime.invokes) == 1
    entry = ledger.entries["a.0"]
    assert (entry.outcome, entry.reason, entry.attempts) == (Outcome.INFRA_ERROR, "throttled", 0)
    assert not ledger.open_sessions


@pytest.mark.parametrize("last", [REFUSED, Throttled("429")])
async def test_a_session_that_a_503_may_have_opened_is_closed_in_the_end(submit, runtime, ledger, last):
    runtime.on_invoke = [REFUSED, last]
    assert not await submit(asyncio.get_running_loop().time() + 0.05)
    assert runtime.stops == ["session-of-attempt-1"]
    assert not ledger.open_sessions


@pytest.mark.parametrize("kind", [RuntimeUnavailable, OutcomeUnknown, ContainerStartTimeout])
async def test_a_session_that_may_have_begun_is_stopped_and_its_id_never_used_again(submit, runtime, ledger, kind):
    runtime.on_invoke = [kind("cut"), ACCEPTED]
    assert await submit()
    first, second = runtime.invokes
    assert first != second
    assert runtime.stops == [first]
    assert ledger.open_sessions == {second}


async def test_a_permanent_failure_is_settled_at_once_with_its_reason(submit, runtime, ledger):
    runtime.on_invoke = [InvokeRejected("ResourceNotFoundException: no such runtime", reason="runtime_not_found")]
    assert not await submit()
    entry = ledger.entries["a.0"]
    assert (entry.outcome, entry.reason) == (Outcome.INFRA_ERROR, "runtime_not_found")
    assert "no such runtime" in entry.message
    assert len(runtime.invokes) == 1
    assert not ledger.open_sessions


async def test_a_container_that_answers_an_error_has_its_session_stopped(submit, runtime, ledger):
    runtime.on_invoke = [InvokeRejected("500", reason="container_error")]
    assert not await submit()
    assert runtime.stops == runtime.invokes
    assert ledger.entries["a.0"].reason == "container_error"


async def test_attempts_are_bounded(submit, runtime, ledger):
    runtime.on_invoke = [RuntimeUnavailable("500")]
    assert not await submit()
    assert runtime.invokes == runtime.stops == [f"session-of-attempt-{n}" for n in (1, 2, 3)]
    entry = ledger.entries["a.0"]
    assert (entry.outcome, entry.reason, entry.attempts) == (Outcome.INFRA_ERROR, "runtime_unavailable", 3)


@pytest.mark.parametrize("body", [b"", b"hello", b"[]", b'{"answer": 7}', b'{"status": "ok"}'])
async def test_an_agent_without_the_wrapper_is_reported(submit, runtime, ledger, body):
    runtime.on_invoke = [body]
    assert not await submit()
    assert ledger.entries["a.0"].reason == "not_a_rollout_app"
    assert "RolloutApp" in ledger.entries["a.0"].message
    assert runtime.stops == runtime.invokes


async def test_a_rollout_that_is_settled_while_it_waits_is_not_submitted(submit, runtime, ledger):
    ledger.settle("a.0", Outcome.CANCELLED, "target_reached")
    assert not await submit()
    assert runtime.invokes == []


async def test_a_submission_that_is_cancelled_in_mid_call_stops_its_session(submit, runtime, ledger):
    called = asyncio.Event()

    async def hang(session_id, payload):
        runtime.invokes.append(session_id)
        called.set()
        await asyncio.Event().wait()

    runtime.invoke = hang
    submitting = asyncio.create_task(submit())
    await asyncio.wait_for(called.wait(), 60)
    submitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    assert runtime.stops == runtime.invokes
    assert not ledger.open_sessions


@pytest.mark.parametrize("call", [CallKind.STOP, CallKind.STOP_EARLIER])
async def test_a_stop_is_repeated_until_it_succeeds(close, runtime, ledger, call):
    ledger.start_attempt("a.0", "s1", deadline=1.0)
    causes = [RuntimeUnavailable("503"), NoCredentials("no provider"), WrongClock("expired")]
    runtime.on_stop = [*[Throttled("slow")] * 8, *causes, None]
    assert await close("s1", call, retry_s=180)
    assert runtime.stops == ["s1"] * 12
    assert not ledger.open_sessions
    assert not ledger.unclosed_sessions
    assert ledger.stops.refusals == 11


async def test_a_session_that_cannot_be_closed_in_time_is_named(close, runtime, ledger):
    ledger.start_attempt("a.0", "s1", deadline=1.0)
    runtime.on_stop = [RuntimeUnavailable("503")]
    assert not await close("s1")
    assert ledger.unclosed_sessions == {"s1": "503"}


async def test_a_permanently_refused_stop_is_not_repeated(close, runtime, ledger):
    ledger.start_attempt("a.0", "s1", deadline=1.0)
    runtime.on_stop = [InvokeRejected("403", reason="access_denied")]
    await close("s1", retry_s=180)
    assert runtime.stops == ["s1"]
    assert ledger.unclosed_sessions == {"s1": "403"}
