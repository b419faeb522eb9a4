"""No rollout of another protocol is given up before its agent's own result was asked for, in virtual time."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from agent_wrapper.contract import REQUEST_FIELD, Outcome, RolloutRequest, Trajectory
from memory_store import MemoryStore
from rollout_backend.agents.protocols.agentcore_rl_toolkit import AgentCoreRlToolkit, AgentCoreRuntimeApp
from rollout_backend.agents.protocols.sagemaker_job_runtime import SageMakerJobRuntime
from rollout_backend.agents.protocols.translator import BucketTranslator, PollingTranslator, ReportTranslator
from rollout_backend.core.manifest import StepRequest
from rollout_backend.core.session_ends import SessionEnds
from rollout_backend.core.tasks import Task
from rollout_backend.errors import (
    InvokeRejected,
    OutcomeUnknown,
    QuotaExceeded,
    RunHeld,
    RuntimeUnavailable,
    ServingError,
)
from rollout_backend.run.collect.buffer import RolloutBuffer
from rollout_backend.run.dispatch.call_queue import CallQueue
from rollout_backend.run.step.in_flight import InFlightLog
from rollout_backend.run.step.step import Step
from rollouts import make_segment
from tests.simulation.clock import in_virtual_time
from virtual_run import virtual_config, virtual_services


def now() -> float:
    return asyncio.get_running_loop().time()


class Lines:
    """The in-flight records of a run, in memory."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    async def append(self, step: int, lines: str) -> None:
        self.lines += lines.split("\n")

    async def read(self, step: int) -> list[str]:
        return [*self.lines]

    async def delete(self, step: int) -> None: ...


SOURCES = ("polled", "written", "reported")


class Containers:
    """A runtime of one protocol. Each agent finishes `agent_s` after its invoke."""

    def __init__(self, source: str, agent_s: float = 298.0, quota: int = 10_000) -> None:
        self.source = source
        self.agent_s = agent_s
        self.quota = quota
        self.store = MemoryStore("")
        self.began: dict[str, float] = {}
        self.polls: list[float] = []
        self.poll_fails: Callable[[], Exception | None] = lambda: None
        self.silent = 0  # the first of its containers answer no poll
        self.reported_at: dict[str, float] = {}
        self.in_flight = InFlightLog(Lines())

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        await asyncio.sleep(0.05)
        fields = json.loads(payload)
        if self.source == "polled" and fields["_agentcore_runtime"]["operation"] == "get":
            if session_id in [*self.began][: self.silent]:
                await asyncio.sleep(3000)
                raise OutcomeUnknown("no answer")
            return self._poll(session_id)
        if len(self.began) >= self.quota:
            raise QuotaExceeded("402: the account has no session left")
        self.began[session_id] = now()
        if self.source == "polled":
            return self._state(session_id, {"status": "in_progress"})
        if self.source == "reported":
            # An agent does not notice that its trainer has gone.
            asyncio.get_running_loop().call_later(
                self.agent_s, lambda: self.reported_at.setdefault(session_id, now())
            )
            await asyncio.sleep(self.agent_s + 10.0)
            return b"{}"
        block = fields[REQUEST_FIELD]
        key = f"{block['exp_id']}/{block['input_id']}/{session_id}.json"
        asyncio.get_running_loop().call_later(self.agent_s, self._write, key)
        return json.dumps({"status": "processing", "result_key": key}).encode()

    def _poll(self, session_id: str) -> bytes:
        self.polls.append(now())
        if (error := self.poll_fails()) is not None:
            raise error
        done = now() >= self.began[session_id] + self.agent_s
        result = {"status": "completed", "result": {"reward": 1.0}}
        return self._state(session_id, result if done else {"status": "in_progress"})

    def _state(self, session_id: str, state: dict[str, Any]) -> bytes:
        return json.dumps({"version": 1, "invocation_id": session_id, **state}).encode()

    def _write(self, key: str) -> None:
        self.store.objects[key] = b'{"rewards": [1.0], "status_code": 200}'

    async def reports(self) -> dict[str, Any]:
        return {name: self._report(name) for name in self.reported_at}

    def _report(self, session_id: str) -> dict[str, Any]:
        age_s = now() - self.reported_at[session_id]
        return {"status": "ready", "has_rewards": True, "rewards": [1.0], "age_s": age_s}

    async def report_of(self, session_id: str) -> dict[str, Any] | None:
        if (error := self.poll_fails()) is not None:
            raise error
        return self._report(session_id) if session_id in self.reported_at else None

    async def stop(self, session_id: str) -> None:
        self.began.pop(session_id, None)

    def adopt(self, session_id: str, payload: Callable[[], bytes]) -> None: ...

    async def run_step(
        self,
        rollouts: int,
        *,
        invoke_per_s: float = 100.0,
        interval_s: float = 10.0,
        timeouts: dict[str, float] | None = None,
        killed_at: float | None = None,
    ) -> Any:
        """Run a step to its end, or leave it with its sessions open after `killed_at` seconds."""
        config = virtual_config(
            runtime={"max_sessions": rollouts, "invoke_per_s": invoke_per_s}, timeouts=timeouts or {}
        )
        queue, store = CallQueue(invoke_per_s, 100), self.store
        kept: Any = store
        buffer = RolloutBuffer(config.run_id, kept, None, config.collect.max_fetches)

        async def seal(request: RolloutRequest) -> Trajectory:
            return Trajectory(model="m", segments=(make_segment(),))

        more: Any = {"interval_s": interval_s, "max_writes": 4, "seal": seal, "on_result": buffer.fetch_written}
        ends = SessionEnds()
        calls: PollingTranslator | BucketTranslator | ReportTranslator
        if self.source == "polled":
            calls = PollingTranslator(self, AgentCoreRuntimeApp(), kept, self.invoke, queue, **more)
        elif self.source == "reported":
            more |= {"accept_s": 60.0, "scored": False}
            calls = ReportTranslator(self, SageMakerJobRuntime(), kept, self, ends.report, **more)
        else:
            calls = BucketTranslator(self, AgentCoreRlToolkit(), kept, **more)
        services = virtual_services(
            config, store, calls, queue, buffer=buffer, in_flight=self.in_flight, session_ends=ends
        )
        tasks = tuple(Task(f"t{i}", {"q": str(i)}) for i in range(rollouts))
        searching = asyncio.create_task(calls.run())
        step = Step(StepRequest(0, tasks, config.sampling), services)
        result = None
        if killed_at is not None:
            asyncio.get_running_loop().call_later(killed_at, step.early_end.abort, RunHeld("by another manager"))
        with contextlib.suppress(RunHeld):
            result = await step.run()
        searching.cancel()
        await asyncio.gather(searching, return_exceptions=True)
        return result


@pytest.mark.parametrize(
    ("rollouts", "invoke_per_s"),
    [(240, 1.0), pytest.param(4000, 25.0, marks=pytest.mark.slow)],
)
@in_virtual_time
async def test_every_agent_that_finished_is_asked_at_a_slow_rate(rollouts, invoke_per_s):
    result = await Containers("polled").run_step(rollouts, invoke_per_s=invoke_per_s)
    assert result.report.outcomes[Outcome.COMPLETED] == rollouts


@pytest.mark.parametrize("source", SOURCES)
@in_virtual_time
async def test_an_agent_that_finished_after_the_last_search_is_asked_at_its_deadline(source):
    """Each regular search is too late: the rollouts' own deadlines come first."""
    result = await Containers(source).run_step(60, interval_s=1e6)
    assert result.report.outcomes[Outcome.COMPLETED] == 60


@pytest.mark.parametrize("source", SOURCES)
@in_virtual_time
async def test_an_agent_that_finished_after_the_last_search_is_asked_at_the_steps_deadline(source):
    """The deadlines of rollouts that were invoked late are the step's."""
    timeouts = {"collection_s": 361.0}
    result = await Containers(source).run_step(60, invoke_per_s=6.0, interval_s=1e6, timeouts=timeouts)
    assert result.report.outcomes[Outcome.COMPLETED] == 60


@pytest.mark.parametrize("source", SOURCES)
@in_virtual_time
async def test_an_agent_that_finished_while_no_trainer_ran_is_asked_by_the_next_one(source):
    containers = Containers(source)
    assert await containers.run_step(5, killed_at=100.0) is None
    began = {*containers.began}
    await asyncio.sleep(500)
    result = await containers.run_step(5)
    assert {rollout.session_id for rollout in result.rollouts} == began
    assert result.report.outcomes[Outcome.COMPLETED] == 5


@in_virtual_time
async def test_a_runtime_that_fails_at_the_deadline_is_asked_until_it_answers():
    containers = Containers("polled")
    containers.poll_fails = lambda: RuntimeUnavailable("503") if now() < 900 else None
    result = await containers.run_step(20)
    assert result.report.outcomes[Outcome.COMPLETED] == 20


@in_virtual_time
async def test_a_gateway_that_fails_at_the_deadline_is_asked_until_it_answers():
    containers = Containers("reported")
    containers.poll_fails = lambda: ServingError("no answer") if now() < 900 else None
    result = await containers.run_step(20)
    assert result.report.outcomes[Outcome.COMPLETED] == 20


@in_virtual_time
async def test_a_silent_agent_that_reports_nothing_ends_as_no_result():
    result = await Containers("reported", agent_s=1e9).run_step(20)
    assert result.report.reasons == {"timed_out: no_result": 20}


@in_virtual_time
async def test_a_container_that_rejects_each_poll_is_given_up_after_the_grace():
    containers = Containers("polled")
    containers.poll_fails = lambda: InvokeRejected("424", reason="container_error")
    result = await containers.run_step(20)
    assert result.report.reasons == {"timed_out: no_result": 20}
    assert 360 <= result.report.seconds < 500


@in_virtual_time
async def test_an_agent_that_never_answers_ends_as_no_result():
    result = await Containers("polled", agent_s=1e9).run_step(20)
    assert result.report.reasons == {"timed_out: no_result": 20}


@pytest.mark.parametrize("invoke_per_s", [2.0, 24.0])
@in_virtual_time
async def test_refused_invokes_hold_up_no_poll(invoke_per_s):
    """The account has room for a third of the rollouts. Only finished ones make room, and only polls find them."""
    containers = Containers("polled", agent_s=20.0, quota=20)
    result = await containers.run_step(60, invoke_per_s=invoke_per_s)
    assert result.report.outcomes[Outcome.COMPLETED] == 60
    assert result.report.seconds < 900


@in_virtual_time
async def test_polls_of_agents_that_still_run_hold_up_no_invoke():
    """With 100 open sessions, polls alone would need 10 invokes per second."""
    containers = Containers("polled", agent_s=250.0)
    result = await containers.run_step(100, invoke_per_s=1.0)
    assert result.report.outcomes[Outcome.COMPLETED] == 100
    assert result.report.seconds < 700


@in_virtual_time
async def test_containers_that_answer_no_poll_hold_up_no_result_of_others():
    containers = Containers("polled", agent_s=250.0)
    containers.silent = 6
    result = await containers.run_step(20)
    assert result.report.outcomes[Outcome.COMPLETED] == 14
