import asyncio
from unittest.mock import create_autospec

import pytest
from tenacity import wait_none

from agent_wrapper.contract import Outcome, Sampling
from builders import run_config
from rollout_backend.collect.manifest_store import ManifestStore
from rollout_backend.core.ledger import Phase
from rollout_backend.core.manifest import StepRequest
from rollout_backend.core.policy import GroupState
from rollout_backend.core.tasks import Task
from rollout_backend.dispatch.call_queue import CallKind, CallQueue
from rollout_backend.dispatch.dispatcher import Dispatcher
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
from rollout_backend.step.in_flight import InFlightLog
from rollout_backend.step.rollout_task import RolloutTask, StepContext
from rollout_backend.step.services import Pauses, StepServices
from step_bench import Agents, Gateways


class ScriptedRuntime:
    """A runtime that answers each call with the next scripted answer. The last one is repeated."""

    def __init__(self):
        self.invokes, self.on_invoke = [], [ACCEPTED]
        self.stops, self.on_stop = [], [None]

    async def invoke(self, session_id, payload):
        self.invokes.append(session_id)
        return self._next(self.on_invoke)

    async def stop(self, session_id):
        self.stops.append(session_id)
        self._next(self.on_stop)

    def _next(self, answers):
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def runtime():
    return ScriptedRuntime()


@pytest.fixture
def make_rollout(runtime):
    """Plan the rollout a.0, with at most three attempts. S3 accepts each manifest, and no result arrives.

    A refused invoke is repeated at once, until the loop's time is `until`.
    """

    async def make(until: float = 1e9) -> RolloutTask:
        config = run_config(runtime={"kind": "http", "url": "http://127.0.0.1:9", "max_attempts": 3})
        manifests = create_autospec(ManifestStore, instance=True)
        manifests.read.return_value = None
        calls, task = CallQueue(1000, 1000), Task("a", {}, rollouts=1)
        unused = dict.fromkeys(("buffer", "blocklist", "archive", "breaker"))
        services = StepServices(
            config=config,
            runtime=Agents(None, None),
            dispatcher=Dispatcher(runtime, calls, max_sessions=1, stop_retry_s=0.0, stop_wait=wait_none()),
            gateways=Gateways(),
            manifests=manifests,
            in_flight=create_autospec(InFlightLog, instance=True),
            pauses=Pauses(attempt=wait_none(), refusal=wait_none()),
            **unused,
        )

        def abort(error: BaseException) -> None:
            raise AssertionError("the step was aborted") from error

        request = StepRequest(0, (task,), Sampling())
        context = StepContext(request, services, {"a": GroupState("a", needed=1)}, abort)
        context.plan.deadline = until + config.timeouts.publish_grace_s
        await context.plan.write_first()
        return RolloutTask(context.ledger.plan("a.0", "a"), task, context)

    return make


@pytest.fixture
async def rollout(make_rollout):
    return await make_rollout()


@pytest.fixture
def ledger(rollout):
    return rollout.context.ledger


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


@pytest.mark.parametrize("refusal", [*NEVER_OPENED, REFUSED], ids=lambda error: f"{type(error).__name__}-{error}")
async def test_a_refusal_is_no_attempt_and_nothing_is_stopped(rollout, runtime, ledger, refusal):
    runtime.on_invoke = [*[refusal] * 6, ACCEPTED]
    assert await rollout.dispatch()
    assert runtime.invokes == [rollout.entry.session_id] * 7
    assert runtime.stops == []
    assert (rollout.entry.attempts, ledger.sessions_opened) == (1, 1)
    assert ledger.open_sessions == {rollout.entry.session_id}


async def test_between_refusals_a_rollout_has_no_deadline_and_no_session(rollout, runtime, ledger):
    found, between = [], []
    entry = rollout.entry
    withdraw = entry.refuse_attempt

    async def refuse(session_id, payload):
        found.append((entry.phase, entry.attempts))
        if len(found) < 3:
            raise Throttled("429")
        return ACCEPTED

    def watched():
        withdraw()
        between.append((entry.phase, entry.attempts, entry.deadline, entry.session_id))

    runtime.invoke, entry.refuse_attempt = refuse, watched
    assert await rollout.dispatch()
    assert found == [(Phase.DISPATCHING, 1)] * 3
    assert between == [(Phase.PLANNED, 0, None, None)] * 2


async def test_refusals_are_bounded_by_time(make_rollout, runtime):
    runtime.on_invoke = [Throttled("slow down")]
    rollout = await make_rollout(until=asyncio.get_running_loop().time())
    assert not await rollout.dispatch()
    assert len(runtime.invokes) == 1
    entry = rollout.entry
    assert (entry.outcome, entry.reason, entry.attempts) == (Outcome.INFRA_ERROR, "throttled", 0)
    assert not rollout.context.ledger.open_sessions


@pytest.mark.parametrize("last", [REFUSED, Throttled("429")])
async def test_a_session_that_a_503_may_have_opened_is_closed_in_the_end(make_rollout, runtime, last):
    runtime.on_invoke = [REFUSED, last]
    rollout = await make_rollout(until=asyncio.get_running_loop().time() + 0.05)
    assert not await rollout.dispatch()
    assert runtime.stops == [runtime.invokes[0]]
    assert not rollout.context.ledger.open_sessions


@pytest.mark.parametrize("kind", [RuntimeUnavailable, OutcomeUnknown, ContainerStartTimeout])
async def test_a_session_that_may_have_begun_is_stopped_and_its_id_never_used_again(rollout, runtime, ledger, kind):
    runtime.on_invoke = [kind("cut"), ACCEPTED]
    assert await rollout.dispatch()
    first, second = runtime.invokes
    assert first != second
    assert runtime.stops == [first]
    assert ledger.open_sessions == {second}


@pytest.mark.parametrize(("reason", "may_be_open"), [("runtime_not_found", False), ("container_error", True)])
async def test_a_permanent_failure_is_settled_at_once_with_its_reason(rollout, runtime, ledger, reason, may_be_open):
    runtime.on_invoke = [InvokeRejected("no such runtime, or a 500 of the container", reason=reason)]
    assert not await rollout.dispatch()
    entry = rollout.entry
    assert (entry.outcome, entry.reason) == (Outcome.INFRA_ERROR, reason)
    assert "no such runtime" in entry.message
    assert len(runtime.invokes) == 1
    assert runtime.stops == runtime.invokes * may_be_open
    assert not ledger.open_sessions


async def test_attempts_are_bounded(rollout, runtime, ledger):
    runtime.on_invoke = [RuntimeUnavailable("500")]
    assert not await rollout.dispatch()
    assert runtime.invokes == runtime.stops
    assert len(set(runtime.invokes)) == 3
    entry = rollout.entry
    assert (entry.outcome, entry.reason, entry.attempts) == (Outcome.INFRA_ERROR, "runtime_unavailable", 3)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"status": "ok"}', b'{"status": {}}', b"[" * 60_000])
async def test_an_agent_without_the_wrapper_is_reported(rollout, runtime, ledger, body):
    runtime.on_invoke = [body]
    assert not await rollout.dispatch()
    assert rollout.entry.reason == "not_a_rollout_app"
    assert "RolloutApp" in rollout.entry.message
    assert runtime.stops == runtime.invokes


async def test_a_rollout_that_is_settled_while_it_waits_is_not_submitted(rollout, runtime, ledger):
    ledger.entries["a.0"].settle(Outcome.CANCELLED, "target_reached")
    assert not await rollout.dispatch()
    assert runtime.invokes == []
    assert ledger.invokes.grants == 0


async def test_a_rollout_that_is_settled_while_its_session_is_closed_keeps_its_slot(rollout, runtime, ledger):
    closing, closed = asyncio.Event(), asyncio.Event()

    async def stop(session_id):
        closing.set()
        await closed.wait()

    runtime.stop, runtime.on_invoke = stop, [OutcomeUnknown("no answer")]
    slots = rollout.context.services.dispatcher.slots
    rollout.start()
    await asyncio.wait_for(closing.wait(), 60)
    rollout.settle(Outcome.CANCELLED, "target_reached")
    for _ in range(20):
        await asyncio.sleep(0)
    assert slots.locked()
    assert ledger.open_sessions
    closed.set()
    await asyncio.wait([rollout.running])
    assert not slots.locked()
    assert not ledger.open_sessions


async def test_a_submission_that_is_cancelled_in_mid_call_stops_its_session(rollout, runtime, ledger):
    called = asyncio.Event()

    async def hang(session_id, payload):
        runtime.invokes.append(session_id)
        called.set()
        await asyncio.Event().wait()

    runtime.invoke = hang
    submitting = asyncio.create_task(rollout.dispatch())
    await asyncio.wait_for(called.wait(), 60)
    submitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    assert runtime.stops == runtime.invokes
    assert not ledger.open_sessions


# --- stops ------------------------------------------------------------------------------------------------


@pytest.fixture
async def close(runtime, ledger):
    """Stop the session `s1`, and give up after some seconds."""
    ledger.entries["a.0"].start_attempt("s1", 1, 1.0)

    async def close(call=CallKind.STOP, retry_s=0.0):
        made = Dispatcher(runtime, CallQueue(1000, 1000), max_sessions=1, stop_retry_s=retry_s, stop_wait=wait_none())
        return await made.close("s1", ledger, call)

    return close


@pytest.mark.parametrize("call", [CallKind.STOP, CallKind.STOP_EARLIER])
async def test_a_stop_is_repeated_until_it_succeeds(close, runtime, ledger, call):
    causes = [RuntimeUnavailable("503"), NoCredentials("no provider"), WrongClock("expired")]
    runtime.on_stop = [*[Throttled("slow")] * 8, *causes, None]
    assert await close(call, retry_s=180)
    assert runtime.stops == ["s1"] * 12
    assert not ledger.open_sessions
    assert not ledger.unclosed_sessions
    assert ledger.stops.refusals == 11


async def test_a_session_that_cannot_be_closed_in_time_is_named(close, runtime, ledger):
    runtime.on_stop = [RuntimeUnavailable("503")]
    assert not await close()
    assert ledger.unclosed_sessions == {"s1": "503"}


async def test_a_permanently_refused_stop_is_not_repeated(close, runtime, ledger):
    runtime.on_stop = [InvokeRejected("403", reason="access_denied")]
    await close(retry_s=180)
    assert runtime.stops == ["s1"]
    assert ledger.unclosed_sessions == {"s1": "403"}
