"""Results of agents of another protocol become rollouts, over a bucket and a runtime in memory."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agent_wrapper.contract import REQUEST_FIELD, Outcome, Rollout, RolloutRequest, Trajectory
from agent_wrapper.shared.trajectory import TrajectoryUnavailable
from memory_store import MemoryStore
from protocol_requests import KEY, make_request
from rollout_backend.agents.protocols import translator
from rollout_backend.agents.protocols.agentcore_rl_toolkit import AgentCoreRlToolkit, AgentCoreRuntimeApp
from rollout_backend.agents.protocols.sagemaker_job_runtime import SageMakerJobRuntime
from rollout_backend.agents.protocols.translator import (
    BucketTranslator,
    PollingTranslator,
    ReportTranslator,
    Translator,
)
from rollout_backend.core.session_ends import SessionEnd
from rollout_backend.core.session_key import shorten
from rollout_backend.errors import (
    InvokeRejected,
    OutcomeUnknown,
    RuntimeCallError,
    RuntimeUnavailable,
    ServingError,
    Throttled,
)
from rollout_backend.run.collect.buffer import MAX_KEYS
from rollout_backend.run.dispatch.call_queue import CallQueue
from rollouts import make_segment

REQUEST = make_request()
OBJECT = AgentCoreRlToolkit().result_key(REQUEST)
PAYLOAD = json.dumps({"question": "2 + 2?", REQUEST_FIELD: REQUEST.model_dump(mode="json")}).encode()
SEGMENT = make_segment()
UNANSWERED = Trajectory(model="m", segments=(SEGMENT,), unanswered_calls=1)
RESULT = {
    "rewards": [1.0],
    "status_code": 200,
    "note": f"https://gateway/k/{KEY}/v1",
    "rollout_data": [{"token_ids": [1, 2], "logprobs": [0.0, 0.0]}],
}


class Bench:
    """A runtime, a gateway, and the step that waits for results."""

    translator: Translator[Any]

    def __init__(self) -> None:
        self.bucket = MemoryStore("some/")
        self.sent: list[dict[str, Any]] = []
        self.stopped: list[str] = []
        self.sealed = 0
        self.stuck = asyncio.Event()
        self.trajectory: Trajectory | TrajectoryUnavailable = Trajectory(model="m", segments=(SEGMENT,), seal="s")
        self.written: asyncio.Queue[tuple[int, str, int]] = asyncio.Queue()
        store: Any = self.bucket
        self.given: dict[str, Any] = {
            "interval_s": 0.001,
            "max_writes": 4,
            "seal": self.seal,
            "on_result": self.on_result,
        }
        self.translator = BucketTranslator(self, AgentCoreRlToolkit(), store, **self.given)

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        self.sent.append(json.loads(payload))
        return json.dumps({"status": "processing", "result_key": OBJECT}).encode()

    async def stop(self, session_id: str) -> None:
        self.stopped.append(session_id)

    def adopt(self, session_id: str, payload: Callable[[], bytes]) -> None: ...

    def watch(self, request: RolloutRequest = REQUEST) -> None:
        """Let the translator find the result of a session whose agent runs."""
        payload = json.dumps({REQUEST_FIELD: request.model_dump(mode="json")}).encode()
        self.translator.adopt(request.session_id, lambda: payload)

    async def seal(self, request: RolloutRequest) -> Trajectory:
        if request.session_id == "stuck":
            self.stuck.set()
            await asyncio.Event().wait()
        self.sealed += 1
        if isinstance(self.trajectory, TrajectoryUnavailable):
            raise self.trajectory
        return self.trajectory

    async def on_result(self, step: int, rollout_id: str, attempt: int) -> None:
        self.written.put_nowait((step, rollout_id, attempt))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.translator.run())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def rollout(self) -> Rollout:
        """Return what is written next."""
        async with asyncio.timeout(60), self.running():
            assert await self.written.get() == (3, "t.0", 1)
        [key] = [key for key in self.bucket.objects if "/steps/" in key]
        rollout = Rollout.decode(self.bucket.objects[key])
        assert key == REQUEST.key_for(rollout.outcome)
        return rollout


async def test_a_result_becomes_a_rollout_with_the_gateways_tokens():
    bench = Bench()
    answer = await bench.translator.invoke("session", PAYLOAD)
    assert json.loads(answer) == {"status": "accepted"}
    assert bench.sent[0]["_rollout"]["base_url"] == f"https://gateway/k/{KEY}/v1"
    bench.bucket.objects[OBJECT] = json.dumps(RESULT).encode()
    rollout = await bench.rollout()
    assert (rollout.outcome, rollout.reward, rollout.seal) == (Outcome.COMPLETED, 1.0, "s")
    [segment] = rollout.segments
    assert list(segment.token_ids) == list(SEGMENT.token_ids)
    assert list(segment.response_mask) == list(SEGMENT.response_mask)
    assert rollout.extras.keys() == {"note"}  # tokens are the gateway's alone
    assert KEY not in json.dumps(rollout.extras)
    assert rollout.session_id == "session"


@pytest.mark.parametrize(
    ("trajectory", "status", "reason"),
    [
        (UNANSWERED, 500, "model_unavailable"),
        (UNANSWERED, "no status", "invalid_result"),
        (TrajectoryUnavailable("gone"), 200, "trajectory_unavailable"),
    ],
)
async def test_an_infrastructure_failure_is_no_reward(
    trajectory: Trajectory | TrajectoryUnavailable, status: object, reason: str
):
    bench = Bench()
    bench.trajectory = trajectory
    bench.watch()
    bench.bucket.objects[OBJECT] = json.dumps(RESULT | {"status_code": status}).encode()
    rollout = await bench.rollout()
    assert (rollout.outcome, rollout.reward) == (Outcome.INFRA_ERROR, None)
    assert rollout.failure is not None
    assert rollout.failure.reason == reason


async def test_extras_with_which_the_rollout_is_too_large_are_refused():
    bench = Bench()
    bench.watch()
    bench.bucket.objects[OBJECT] = data = json.dumps(RESULT | {"note": "x" * 5000}).encode()
    bench.bucket.config = bench.bucket.config.model_copy(update={"max_result_bytes": len(data)})
    rollout = await bench.rollout()
    assert (rollout.outcome, rollout.failure.reason, rollout.extras) == (Outcome.AGENT_ERROR, "bad_extras", {})


async def test_a_session_that_cannot_be_sealed_delays_no_other():
    bench = Bench()
    other = REQUEST.model_copy(update={"session_id": "stuck"})
    stuck = AgentCoreRlToolkit().result_key(other)
    bench.watch(other)
    bench.bucket.objects[stuck] = json.dumps(RESULT).encode()
    async with asyncio.timeout(60), bench.running():
        await bench.stuck.wait()
        bench.watch()
        bench.bucket.objects[OBJECT] = json.dumps(RESULT).encode()
        await bench.written.get()
    assert Rollout.decode(bench.bucket.objects[REQUEST.key]).session_id == "session"


async def test_an_outage_of_s3_loses_no_result():
    bench = Bench()
    bench.watch()
    bench.bucket.objects[OBJECT] = json.dumps(RESULT).encode()
    bench.bucket.failures = 3
    assert (await bench.rollout()).reward == 1.0


async def test_a_flood_of_objects_hides_no_result():
    bench = Bench()
    bench.watch()
    missing = REQUEST.model_copy(update={"session_id": "missing"})
    bench.watch(missing)
    bench.bucket.objects |= {f"{OBJECT}-{i}": b"" for i in range(MAX_KEYS + 1)}
    bench.bucket.objects[OBJECT] = json.dumps(RESULT).encode()
    assert (await bench.rollout()).session_id == "session"


async def test_results_of_other_sessions_and_of_closed_ones_are_not_read():
    bench = Bench()
    other = REQUEST.model_copy(update={"session_id": "open"})
    bench.watch()
    bench.watch(other)
    await bench.translator.stop("session")
    assert bench.stopped == ["session"]
    bench.bucket.objects[OBJECT] = json.dumps(RESULT).encode()
    bench.bucket.objects[AgentCoreRlToolkit().result_key(other)] = json.dumps(RESULT).encode()
    assert (await bench.rollout()).session_id == "open"
    assert bench.sealed == 1


async def test_a_rollout_is_written_once():
    bench = Bench()
    bench.watch()
    bench.bucket.objects[OBJECT] = json.dumps(RESULT).encode()
    bench.bucket.objects[REQUEST.key] = b"of another attempt"
    async with asyncio.timeout(60), bench.running():
        await bench.written.get()
    assert bench.bucket.objects[REQUEST.key] == b"of another attempt"


async def test_an_app_of_another_protocol_is_refused():
    bench = Bench()

    async def invoke(session_id: str, payload: bytes) -> bytes:
        return b'{"status": "accepted"}'

    bench.invoke = invoke  # type: ignore[method-assign]
    with pytest.raises(InvokeRejected, match="leave out runtime"):
        await bench.translator.invoke("session", PAYLOAD)


class PolledBench(Bench):
    """A runtime whose agents answer polls, one answer after the other. The last one is repeated."""

    def __init__(self, *answers: object) -> None:
        super().__init__()
        self.answers = list(answers)
        self.polls: list[dict[str, Any]] = []
        self.polled = asyncio.Event()
        self.answering = asyncio.Event()
        self.answering.set()
        store: Any = self.bucket
        self.translator = PollingTranslator(
            self,
            AgentCoreRuntimeApp(),
            store,
            poll=self.poll,
            admission=CallQueue(1e6, 1e6),
            **self.given,
        )

    async def poll(self, session_id: str, payload: bytes) -> bytes:
        assert session_id not in self.stopped
        self.polls.append(json.loads(payload))
        self.polled.set()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        await self.answering.wait()
        if isinstance(answer, Exception):
            raise answer
        return json.dumps(answer).encode()


def state(status: str, **more: object) -> dict[str, object]:
    return {"version": 1, "invocation_id": "session", "status": status, **more}


async def test_the_result_of_a_polled_agent_is_found_after_failed_polls():
    running, ended = state("in_progress"), state("completed", result={"reward": 1.0, "note": "x"})
    bench = PolledBench(running, Throttled("429"), OutcomeUnknown("cut"), {"message": "of a proxy"}, running, ended)
    bench.watch()
    rollout = await bench.rollout()
    assert (rollout.outcome, rollout.reward, rollout.seal) == (Outcome.COMPLETED, 1.0, "s")
    assert rollout.extras == {"note": "x"}
    assert bench.polls[0] == {
        "_agentcore_runtime": {"version": 1, "operation": "get", "invocation_id": "session"},
    }


async def test_a_poll_that_still_waits_to_be_sent_ends_with_its_session(monkeypatch):
    monkeypatch.setattr(translator, "_POLL_ARRIVES_S", 0.01)
    bench = PolledBench(state("in_progress"))
    waits, may_be_sent = asyncio.Event(), asyncio.Event()
    sent: list[str] = []

    async def held(session_id: str, payload: bytes) -> bytes:
        waits.set()
        await may_be_sent.wait()
        sent.append(session_id)
        return b""

    bench.translator._poll = held
    bench.watch()
    async with asyncio.timeout(60), bench.running():
        await waits.wait()
        searching = asyncio.create_task(bench.translator.find_result("session", ended=False))
        await bench.translator.stop("session")
        await searching
        may_be_sent.set()
        for _ in range(10):
            await asyncio.sleep(0)
    assert bench.stopped == ["session"]
    assert sent == []


async def test_a_session_is_not_polled_after_its_stop():
    bench = PolledBench(state("in_progress"))
    bench.answering.clear()
    bench.watch()
    async with asyncio.timeout(60), bench.running():
        await bench.polled.wait()
        stopping = asyncio.create_task(bench.translator.stop("session"))
        await asyncio.sleep(0)
        assert bench.stopped == []  # the runtime could receive the stop before the poll
        bench.answering.set()
        await stopping
    assert bench.stopped == ["session"]
    assert len(bench.polls) == 1


CUT, FAILED = OutcomeUnknown("cut"), InvokeRejected("500: no such tool", "container_error")


class ReportedBench(Bench):
    """A runtime whose agents report to gateways, and answer their invokes when the test lets them."""

    def __init__(self, *, accept_s: float = 60.0, scored: bool = False) -> None:
        super().__init__()
        self.reported: dict[str, dict[str, Any] | Exception] = {}
        self.ends: asyncio.Queue[SessionEnd] = asyncio.Queue()
        self.invoked = asyncio.Event()
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        store: Any = self.bucket
        self.translator = ReportTranslator(
            self,
            SageMakerJobRuntime(),
            store,
            self,
            self.ends.put_nowait,
            accept_s=accept_s,
            scored=scored,
            **self.given,
        )

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        self.sent.append(json.loads(payload))
        self.invoked.set()
        return await self.answer

    def report(self, status: str = "ready", rewards: object = None, age_s: float = 0.0) -> None:
        has_rewards = rewards is not None
        self.reported["session"] = {"status": status, "has_rewards": has_rewards, "rewards": rewards, "age_s": age_s}

    async def reports(self) -> dict[str, Any]:
        found = {name: report for name, report in self.reported.items() if not isinstance(report, Exception)}
        return {**found, "of another run": {}}

    async def report_of(self, session_id: str) -> Any:
        found = self.reported.get(session_id)
        if isinstance(found, Exception):
            raise found
        return found


@pytest.mark.parametrize("error", [None, CUT, FAILED])
async def test_an_agent_that_reports_is_accepted_before_and_after_its_invoke_ends(error: RuntimeCallError | None):
    bench = ReportedBench()
    invoking = asyncio.create_task(bench.translator.invoke("session", PAYLOAD))
    await bench.invoked.wait()
    bench.report(rewards=[0.5])
    if error is not None:
        bench.answer.set_exception(error)
    rollout = await bench.rollout()
    assert (rollout.outcome, rollout.reward, rollout.seal) == (Outcome.COMPLETED, 0.5, "s")
    assert json.loads(await invoking) == {"status": "accepted"}
    await bench.translator.stop("session")
    assert bench.answer.cancelled() == (error is None)  # no invoke outlives its session


async def test_an_agent_counts_as_started_if_its_invoke_does_not_fail_in_time():
    bench = ReportedBench(accept_s=0.01)
    assert json.loads(await bench.translator.invoke("session", PAYLOAD)) == {"status": "accepted"}
    bench.answer.set_exception(CUT)
    async with asyncio.timeout(60):
        assert await bench.ends.get() == SessionEnd("session", CUT.reason, "cut")
    bench.report(rewards=[1.0])  # it may have reported before
    assert await bench.translator.find_result("session", ended=True)
    assert Rollout.decode(bench.bucket.objects[REQUEST.key]).reward == 1.0


@pytest.mark.parametrize(
    "error", [CUT, FAILED, Throttled("429"), RuntimeUnavailable("no connection", never_opened=True), ValueError("x")]
)
async def test_an_invoke_that_fails_without_a_report_was_not_accepted(error: Exception):
    bench = ReportedBench()
    bench.answer.set_exception(error)
    with pytest.raises(type(error)):
        await bench.translator.invoke("session", PAYLOAD)
    bench.report(rewards=[1.0])
    assert await bench.translator.find_result("session", ended=False)
    assert bench.written.empty()


async def test_a_report_that_could_not_be_read_does_not_count_as_absent():
    bench = ReportedBench()
    bench.answer.set_exception(CUT)
    bench.reported["session"] = ServingError("no answer")
    await bench.translator.invoke("session", PAYLOAD)
    async with asyncio.timeout(60):
        assert (await bench.ends.get()).session_id == "session"
    assert not await bench.translator.find_result("session", ended=True)
    bench.report("failed")
    assert await bench.translator.find_result("session", ended=True)
    assert Rollout.decode(bench.bucket.objects[REQUEST.key]).outcome is Outcome.AGENT_ERROR


@pytest.mark.parametrize(("scored", "waits_s"), [(False, 5.0), (True, 0.001)])
async def test_a_reward_is_waited_for_until_the_result_is_due(scored: bool, waits_s: float):
    bench = ReportedBench(scored=scored)
    bench.watch(REQUEST.model_copy(update={"publish_grace_s": 5.0}))
    bench.report(age_s=waits_s * 0.9)
    assert await bench.translator._candidates() == []
    bench.report(age_s=waits_s * 1.1)
    assert (await bench.rollout()).failure.reason == "no_reward"


async def test_a_reward_is_not_waited_for_at_the_end_of_its_rollout():
    bench = ReportedBench()
    bench.watch(REQUEST.model_copy(update={"publish_grace_s": 1e6}))
    bench.report()
    assert await bench.translator.find_result("session", ended=False)
    assert Rollout.decode(bench.bucket.objects[REQUEST.key]).failure.reason == "no_reward"


async def test_a_reward_is_waited_for_although_the_invoke_was_cut_off():
    bench = ReportedBench()
    bench.watch(REQUEST.model_copy(update={"publish_grace_s": 5.0}))
    bench.report(age_s=4.0)
    assert not await bench.translator.find_result("session", ended=True)
    bench.report(rewards=[0.5], age_s=4.0)
    assert await bench.translator.find_result("session", ended=True)
    assert Rollout.decode(bench.bucket.objects[REQUEST.key]).reward == 0.5


async def test_the_error_of_a_failed_agent_is_in_its_rollout_without_its_key():
    bench = ReportedBench(accept_s=0.01)
    await bench.translator.invoke("session", PAYLOAD)
    bench.report("failed", [0.0])
    assert await bench.translator._candidates() == []  # its error may follow
    trajectory = shorten(KEY)
    bench.answer.set_exception(InvokeRejected(f"500: no tool for {trajectory}", "container_error"))
    rollout = await bench.rollout()
    assert (rollout.outcome, rollout.failure.reason) == (Outcome.AGENT_ERROR, "invocation_error")
    assert "500: no tool for" in rollout.failure.message
    assert trajectory not in rollout.failure.message


async def test_adopted_sessions_and_outages_of_gateways_lose_no_report():
    bench = ReportedBench()
    bench.watch()
    bench.reported["session"] = ServingError("restarting")
    async with asyncio.timeout(60), bench.running():
        for _ in range(3):
            await asyncio.sleep(0.002)
        bench.report(rewards=[1.0])
        assert await bench.written.get() == (3, "t.0", 1)
