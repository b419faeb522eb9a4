import asyncio

import pytest
from tenacity import wait_none

from agent_wrapper.contract import Outcome
from rollout_backend.core.ledger import Phase
from rollout_backend.dispatch.call_queue import CallKind, CallQueue
from rollout_backend.dispatch.dispatcher import Dispatcher
from rollout_backend.dispatch.session_closer import SessionCloser
from rollout_backend.errors import (
    ContainerStartTimeout,
    InvokeRejected,
    OutcomeUnknown,
    QuotaExceeded,
    RuntimeConflict,
    RuntimeUnavailable,
    Throttled,
)

ACCEPTED = b'{"status": "accepted"}'
EVER = float("inf")


def calls() -> CallQueue:
    return CallQueue(invoke_per_s=1000, stop_per_s=1000)


@pytest.fixture
def dispatcher(runtime):
    return Dispatcher(runtime, calls(), max_sessions=4, max_attempts=3, wait=wait_none(), wait_refused=wait_none())


@pytest.fixture
def close(runtime, ledger):
    closer = SessionCloser(runtime, calls(), retry_s=0, wait=wait_none())
    return lambda session_id: closer.close(session_id, ledger)


async def test_an_accepted_rollout_runs_in_its_session(dispatcher, runtime, ledger, prepare, close):
    assert await dispatcher.submit("a.0", ledger, prepare, close, EVER)
    entry = ledger.entries["a.0"]
    assert entry.phase is Phase.RUNNING
    assert runtime.invokes == [entry.session_id]
    assert ledger.open_sessions == {entry.session_id}


@pytest.mark.parametrize(
    "refusal",
    [Throttled("429"), QuotaExceeded("402"), RuntimeConflict("409"), RuntimeUnavailable("no", never_opened=True)],
    ids=lambda error: type(error).__name__,
)
async def test_a_refusal_is_no_attempt_and_nothing_is_stopped(dispatcher, runtime, ledger, prepare, close, refusal):
    runtime.on_invoke = [*[refusal] * 6, ACCEPTED]
    assert await dispatcher.submit("a.0", ledger, prepare, close, EVER)
    assert runtime.invokes == ["session-of-attempt-1"] * 7
    assert runtime.stops == []
    assert (ledger.entries["a.0"].attempts, ledger.sessions_opened) == (1, 1)
    assert ledger.open_sessions == {"session-of-attempt-1"}


async def test_between_refusals_a_rollout_has_no_deadline_and_no_session(dispatcher, runtime, ledger, prepare, close):
    found = []

    async def refuse(session_id, payload):
        entry = ledger.entries["a.0"]
        found.append((entry.phase, entry.attempts))
        if len(found) < 3:
            raise Throttled("429")
        return ACCEPTED

    settled_by = []
    undo = ledger.undo_attempt

    def watched(rollout_id):
        undo(rollout_id)
        entry = ledger.entries[rollout_id]
        settled_by.append((entry.phase, entry.attempts, entry.deadline, entry.session_id))

    runtime.invoke, ledger.undo_attempt = refuse, watched
    assert await dispatcher.submit("a.0", ledger, prepare, close, EVER)
    assert found == [(Phase.DISPATCHING, 1)] * 3
    assert settled_by == [(Phase.PLANNED, 0, None, None)] * 2


async def test_refusals_are_bounded_by_time(dispatcher, runtime, ledger, prepare, close):
    runtime.on_invoke = [Throttled("slow down")]
    until = asyncio.get_running_loop().time()
    assert not await dispatcher.submit("a.0", ledger, prepare, close, until)
    assert len(runtime.invokes) == 1
    entry = ledger.entries["a.0"]
    assert (entry.outcome, entry.reason, entry.attempts) == (Outcome.INFRA_ERROR, "throttled", 0)
    assert not ledger.open_sessions


async def test_after_a_503_the_same_session_is_invoked_again(dispatcher, runtime, ledger, prepare, close):
    runtime.on_invoke = [*[RuntimeUnavailable("503", refused=True)] * 6, ACCEPTED]
    assert await dispatcher.submit("a.0", ledger, prepare, close, EVER)
    assert set(runtime.invokes) == {"session-of-attempt-1"}
    assert runtime.stops == []
    assert ledger.open_sessions == {"session-of-attempt-1"}


@pytest.mark.parametrize("last", [RuntimeUnavailable("503", refused=True), Throttled("429")])
async def test_a_session_that_a_503_may_have_opened_is_closed_in_the_end(
    dispatcher, runtime, ledger, prepare, close, last
):
    ends = asyncio.get_running_loop().time() + 0.05
    runtime.on_invoke = [RuntimeUnavailable("503", refused=True), last]
    assert not await dispatcher.submit("a.0", ledger, prepare, close, ends)
    assert runtime.stops == ["session-of-attempt-1"]
    assert not ledger.open_sessions


@pytest.mark.parametrize("kind", [RuntimeUnavailable, OutcomeUnknown, ContainerStartTimeout])
async def test_a_session_that_may_have_begun_is_stopped_and_its_id_never_used_again(
    dispatcher, runtime, ledger, prepare, close, kind
):
    runtime.on_invoke = [kind("cut"), ACCEPTED]
    assert await dispatcher.submit("a.0", ledger, prepare, close, EVER)
    first, second = runtime.invokes
    assert first != second
    assert runtime.stops == [first]
    assert ledger.open_sessions == {second}


async def test_what_fails_for_good_is_settled_at_once_with_its_reason(dispatcher, runtime, ledger, prepare, close):
    runtime.on_invoke = [InvokeRejected("ResourceNotFoundException: no such runtime", reason="runtime_not_found")]
    assert not await dispatcher.submit("a.0", ledger, prepare, close, EVER)
    entry = ledger.entries["a.0"]
    assert (entry.outcome, entry.reason) == (Outcome.INFRA_ERROR, "runtime_not_found")
    assert "no such runtime" in entry.message
    assert len(runtime.invokes) == 1
    assert not ledger.open_sessions


async def test_a_container_that_answers_an_error_has_its_session_stopped(dispatcher, runtime, ledger, prepare, close):
    runtime.on_invoke = [InvokeRejected("500", reason="container_error")]
    assert not await dispatcher.submit("a.0", ledger, prepare, close, EVER)
    assert runtime.stops == runtime.invokes
    assert ledger.entries["a.0"].reason == "container_error"


async def test_attempts_are_bounded(dispatcher, runtime, ledger, prepare, close):
    runtime.on_invoke = [RuntimeUnavailable("500")]
    assert not await dispatcher.submit("a.0", ledger, prepare, close, EVER)
    assert runtime.invokes == runtime.stops == [f"session-of-attempt-{n}" for n in (1, 2, 3)]
    entry = ledger.entries["a.0"]
    assert (entry.outcome, entry.reason, entry.attempts) == (Outcome.INFRA_ERROR, "runtime_unavailable", 3)


@pytest.mark.parametrize("body", [b"", b"hello", b"[]", b'{"answer": 7}', b'{"status": "ok"}'])
async def test_an_agent_without_the_wrapper_is_told_so(dispatcher, runtime, ledger, prepare, close, body):
    runtime.on_invoke = [body]
    assert not await dispatcher.submit("a.0", ledger, prepare, close, EVER)
    assert ledger.entries["a.0"].reason == "not_a_rollout_app"
    assert "RolloutApp" in ledger.entries["a.0"].message
    assert runtime.stops == runtime.invokes


async def test_a_rollout_that_is_settled_while_it_waits_is_not_submitted(dispatcher, runtime, ledger, prepare, close):
    ledger.settle("a.0", Outcome.CANCELLED, "target_reached")
    assert not await dispatcher.submit("a.0", ledger, prepare, close, EVER)
    assert runtime.invokes == []


async def test_a_submission_that_is_cancelled_in_mid_call_stops_its_session(
    dispatcher, runtime, ledger, prepare, close
):
    called = asyncio.Event()

    async def hang(session_id, payload):
        runtime.invokes.append(session_id)
        called.set()
        await asyncio.Event().wait()

    runtime.invoke = hang
    submitting = asyncio.create_task(dispatcher.submit("a.0", ledger, prepare, close, EVER))
    await asyncio.wait_for(called.wait(), 5)
    submitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    assert runtime.stops == runtime.invokes
    assert not ledger.open_sessions


@pytest.mark.parametrize("call", [CallKind.STOP, CallKind.STOP_EARLIER])
async def test_a_stop_is_repeated_until_it_gets_through(runtime, ledger, call):
    ledger.start_attempt("a.0", "s1", deadline=1.0)
    runtime.on_stop = [*[Throttled("slow")] * 8, RuntimeUnavailable("503"), None]
    assert await SessionCloser(runtime, calls(), wait=wait_none()).close("s1", ledger, call)
    assert runtime.stops == ["s1"] * 10
    assert not ledger.open_sessions
    assert not ledger.unclosed_sessions
    assert ledger.stops.refusals == 9


async def test_a_session_that_will_not_close_for_so_long_is_named(runtime, ledger):
    ledger.start_attempt("a.0", "s1", deadline=1.0)
    runtime.on_stop = [RuntimeUnavailable("503")]
    assert not await SessionCloser(runtime, calls(), retry_s=0, wait=wait_none()).close("s1", ledger)
    assert ledger.unclosed_sessions == {"s1": "503"}


async def test_a_stop_that_is_refused_for_good_is_not_repeated(runtime, ledger):
    ledger.start_attempt("a.0", "s1", deadline=1.0)
    runtime.on_stop = [InvokeRejected("403", reason="access_denied")]
    await SessionCloser(runtime, calls(), wait=wait_none()).close("s1", ledger)
    assert runtime.stops == ["s1"]
    assert ledger.unclosed_sessions == {"s1": "403"}
