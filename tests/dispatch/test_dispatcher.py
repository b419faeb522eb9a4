import asyncio

import pytest
from tenacity import wait_none

from agent_wrapper.contract import Outcome
from rollout_backend.dispatch.closer import SessionCloser
from rollout_backend.dispatch.dispatcher import Dispatcher
from rollout_backend.errors import (
    OutcomeUnknown,
    QuotaExceeded,
    Rejected,
    RuntimeConflict,
    RuntimeUnavailable,
    Throttled,
)
from rollout_backend.ledger import Phase

ACCEPTED = b'{"status": "accepted"}'


@pytest.fixture
def dispatcher(runtime):
    return Dispatcher(runtime, per_s=1000, max_sessions=4, max_attempts=3, wait=wait_none())


@pytest.fixture
def close(runtime, ledger):
    closer = SessionCloser(runtime, per_s=1000, attempts=3, wait=wait_none())
    return lambda session_id: closer.close(session_id, ledger)


async def test_an_accepted_rollout_runs_in_its_session(dispatcher, runtime, ledger, prepare, close):
    assert await dispatcher.submit("a.0", ledger, prepare, close)
    entry = ledger.entries["a.0"]
    assert entry.phase is Phase.RUNNING
    assert runtime.invokes == [entry.session_id]
    assert ledger.open_sessions == {entry.session_id}


@pytest.mark.parametrize("kind", [Throttled, QuotaExceeded, RuntimeConflict])
async def test_what_was_refused_before_a_session_began_is_tried_again_and_nothing_is_stopped(
    dispatcher, runtime, ledger, prepare, close, kind
):
    runtime.on_invoke = [kind("no"), kind("no"), ACCEPTED]
    assert await dispatcher.submit("a.0", ledger, prepare, close)
    assert len(set(runtime.invokes)) == 3
    assert runtime.stops == []
    assert ledger.open_sessions == {runtime.invokes[-1]}


@pytest.mark.parametrize("kind", [RuntimeUnavailable, OutcomeUnknown])
async def test_a_session_that_may_have_begun_is_stopped_and_its_id_never_used_again(
    dispatcher, runtime, ledger, prepare, close, kind
):
    runtime.on_invoke = [kind("cut"), ACCEPTED]
    assert await dispatcher.submit("a.0", ledger, prepare, close)
    first, second = runtime.invokes
    assert first != second
    assert runtime.stops == [first]
    assert ledger.open_sessions == {second}


async def test_what_fails_for_good_is_settled_at_once_with_its_reason(dispatcher, runtime, ledger, prepare, close):
    runtime.on_invoke = [Rejected("ResourceNotFoundException: no such runtime", reason="runtime_not_found")]
    assert not await dispatcher.submit("a.0", ledger, prepare, close)
    entry = ledger.entries["a.0"]
    assert (entry.outcome, entry.reason) == (Outcome.INFRA_ERROR, "runtime_not_found")
    assert "no such runtime" in entry.message
    assert len(runtime.invokes) == 1
    assert not ledger.open_sessions


async def test_a_container_that_answers_an_error_has_its_session_stopped(dispatcher, runtime, ledger, prepare, close):
    runtime.on_invoke = [Rejected("500", reason="container_error")]
    assert not await dispatcher.submit("a.0", ledger, prepare, close)
    assert runtime.stops == runtime.invokes
    assert ledger.entries["a.0"].reason == "container_error"


async def test_attempts_are_bounded(dispatcher, runtime, ledger, prepare, close):
    runtime.on_invoke = [Throttled("slow down")]
    assert not await dispatcher.submit("a.0", ledger, prepare, close)
    assert len(runtime.invokes) == 3
    assert (ledger.entries["a.0"].outcome, ledger.entries["a.0"].reason) == (Outcome.INFRA_ERROR, "throttled")


@pytest.mark.parametrize("body", [b"", b"hello", b"[]", b'{"answer": 7}', b'{"status": "ok"}'])
async def test_an_agent_without_the_wrapper_is_told_so(dispatcher, runtime, ledger, prepare, close, body):
    runtime.on_invoke = [body]
    assert not await dispatcher.submit("a.0", ledger, prepare, close)
    assert ledger.entries["a.0"].reason == "not_a_rollout_app"
    assert "RolloutApp" in ledger.entries["a.0"].message
    assert runtime.stops == runtime.invokes


async def test_a_rollout_that_is_settled_while_it_waits_is_not_submitted(dispatcher, runtime, ledger, prepare, close):
    ledger.settle("a.0", Outcome.CANCELLED, "target_reached")
    assert not await dispatcher.submit("a.0", ledger, prepare, close)
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
    submitting = asyncio.create_task(dispatcher.submit("a.0", ledger, prepare, close))
    await asyncio.wait_for(called.wait(), 5)
    submitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    assert runtime.stops == runtime.invokes
    assert not ledger.open_sessions


async def test_a_stop_is_repeated_until_it_gets_through(runtime, ledger):
    ledger.attempt("a.0", "s1", deadline=1.0)
    runtime.on_stop = [Throttled("slow"), RuntimeUnavailable("503"), None]
    await SessionCloser(runtime, per_s=1000, wait=wait_none()).close("s1", ledger)
    assert runtime.stops == ["s1"] * 3
    assert not ledger.open_sessions
    assert not ledger.unclosed_sessions


async def test_a_session_that_will_not_close_is_named(runtime, ledger):
    ledger.attempt("a.0", "s1", deadline=1.0)
    runtime.on_stop = [RuntimeUnavailable("503")]
    await SessionCloser(runtime, per_s=1000, attempts=3, wait=wait_none()).close("s1", ledger)
    assert runtime.stops == ["s1"] * 3
    assert ledger.unclosed_sessions == {"s1": "503"}


async def test_a_stop_that_is_refused_for_good_is_not_repeated(runtime, ledger):
    ledger.attempt("a.0", "s1", deadline=1.0)
    runtime.on_stop = [Rejected("403", reason="access_denied")]
    await SessionCloser(runtime, per_s=1000, wait=wait_none()).close("s1", ledger)
    assert runtime.stops == ["s1"]
    assert ledger.unclosed_sessions == {"s1": "403"}
