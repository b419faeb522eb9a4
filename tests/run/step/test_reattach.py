"""A trainer that is killed and restarted while agents run keeps the agents that it can."""

import asyncio
import json
import shutil
from types import SimpleNamespace

import pytest

from agent_wrapper.contract import Outcome
from builders import eventually, skip
from rollout_backend.core.manifest import Manifest
from rollout_backend.core.session_ends import Heartbeats
from rollout_backend.errors import ContainerStartTimeout
from rollout_backend.run.step.in_flight import InFlightAttempt, InFlightLog, StepFiles
from rollout_backend.run.step.sessions import StepSessions


class Work:
    """The second rollout of each group runs until `go`."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def behave(self, agents, request) -> None:
        if request.rollout_id.endswith(".1"):
            await self.go.wait()
        await agents.complete(request)


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def restart(work, tmp_path):
    def restart(bench, gateway="here") -> None:
        bench.gateways.identity = gateway
        bench.replace(in_flight=InFlightLog(StepFiles(tmp_path / "steps")))
        bench.forget()

    return restart


async def kill(bench, running, tmp_path) -> None:
    """Cancel the step, but leave its records and sessions unchanged: a dead process closes nothing."""
    notes, stop = tmp_path / "steps" / "00000000.in-flight", bench.agents.stop
    manifest, noted = await bench.manifest(), notes.read_text()

    async def stop_nothing(session_id):
        return None

    bench.agents.stop = stop_nothing
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    bench.agents.stop = stop
    await bench.put(bench.manifest_key, json.dumps(manifest).encode())
    notes.write_text(noted)


@pytest.fixture
def kill_in_the_middle(work, restart, tmp_path):
    """Kill the trainer while the second agent of each group runs, restart it, and return those agents' requests."""

    async def kill_in_the_middle(bench, *tasks, **how) -> list:
        restart(bench)
        running = bench.start(*tasks, behave=lambda agents, request: work.behave(agents, request))
        second = sorted(f"{task}.1" for task in tasks)
        await eventually(lambda: len(bench.kept) == len(tasks))

        async def second_run() -> bool:
            recorded = await bench.services.in_flight.running_attempts(0)
            return sorted(each.rollout_id for each in recorded) == second

        await eventually(second_run)
        left = [request for request in bench.agents.requests if request.rollout_id.endswith(".1")]
        await kill(bench, running, tmp_path)
        restart(bench, **how)
        return left

    return kill_in_the_middle


async def test_a_running_agent_is_waited_for_and_not_run_again(
    open_bench, work, restart, kill_in_the_middle, tmp_path
):
    bench = await open_bench()
    [request] = await kill_in_the_middle(bench, "a")
    running = bench.start("a:2")
    await eventually(lambda: bench.gateways.adopted)
    assert request.session_id in bench.ledger.open_sessions
    work.go.set()
    result = await running
    assert bench.agents.requests == []
    assert (result.report.resumed, result.report.reattached, result.report.attempts) == (1, 1, 0)
    assert result.report.outcomes[Outcome.COMPLETED] == 2
    assert {rollout.session_id for rollout in result.rollouts} > {request.session_id}
    assert bench.gateways.adopted == [request.session_id]
    assert bench.agents.stopped.count(request.session_id) == 1
    assert request.session_id in bench.revoked
    assert not [*(tmp_path / "steps").glob("*.in-flight")]
    restart(bench)  # now all is done, and everything is closed
    assert (await bench.run("a")).report.resumed == 2
    assert (bench.agents.stopped, bench.agents.requests) == ([], [])


async def test_an_attempt_that_reaches_its_deadline_is_followed_by_another(open_bench, work, kill_in_the_middle):
    # `skip` may cut off the request that receives an announcement, so results are found by listing.
    bench = await open_bench("collect.list_after_idle_s=0.3")
    [request] = await kill_in_the_middle(bench, "a")
    work.behave = lambda agents, again: (agents.complete if again.attempt > 1 else agents.vanish)(again)
    running = bench.start("a")
    await eventually(lambda: bench.gateways.adopted)
    skip(81)  # the timeouts of an agent and of its publication
    report = (await running).report
    assert report.outcomes[Outcome.COMPLETED] == 2
    assert bench.agents.rollouts == ["a.1"]
    assert report.reattached == 1
    assert request.session_id in bench.agents.stopped


async def test_with_another_gateway_everything_is_closed_and_runs_again(open_bench, work, kill_in_the_middle):
    bench = await open_bench()
    [request] = await kill_in_the_middle(bench, "a", gateway="elsewhere")
    work.go.set()
    report = (await bench.run("a")).report
    assert bench.agents.rollouts == ["a.1"] or report.resumed == 2
    assert bench.gateways.adopted == []
    assert request.session_id in bench.agents.stopped
    assert request.session_id in bench.revoked


async def test_sessions_that_an_incomplete_log_lacks_are_closed(open_bench, work, kill_in_the_middle, tmp_path):
    bench = await open_bench()
    [request] = await kill_in_the_middle(bench, "a")
    # The disk stopped answering after the first line, the execution's, and did not answer before the kill.
    records = tmp_path / "steps" / "00000000.in-flight"
    [execution] = [line for line in records.read_text().splitlines() if "execution" in line]
    records.write_text(execution)
    await bench.put(bench.manifest_key, json.dumps({**await bench.manifest(), "is_logged": False}).encode())
    work.go.set()
    await bench.run("a")
    assert request.session_id in bench.agents.stopped


async def test_sessions_of_a_log_that_was_deleted_in_between_are_closed(open_bench, work, restart, tmp_path):
    """A trainer goes on with a new log, which must not claim to have the sessions of the deleted one."""
    bench, refuse = await open_bench(), asyncio.Event()
    restart(bench)

    async def before(request):
        if (request.rollout_id, request.attempt) == ("a.0", 1):
            await refuse.wait()
            raise ContainerStartTimeout("no container")

    async def behave(agents, request):
        await work.go.wait()
        await agents.complete(request)

    running = bench.start("a", behave=behave, before=before)
    await eventually(lambda: len(bench.agents.requests) == 2)
    shutil.rmtree(tmp_path / "steps")
    refuse.set()
    await eventually(lambda: len(bench.agents.requests) == 3)
    [request] = [each for each in bench.agents.requests if each.rollout_id == "a.1"]
    await kill(bench, running, tmp_path)
    restart(bench, gateway="elsewhere")
    work.go.set()
    await bench.run("a")
    assert request.session_id in bench.agents.stopped


async def test_a_running_agent_keeps_its_slot(open_bench, work, kill_in_the_middle):
    bench = await open_bench("runtime.max_sessions=2")
    running_agents = await kill_in_the_middle(bench, "a", "b")
    run_id = Manifest.parse(await bench.manifest()).run_id
    # One finished rollout loses its result, so that it must run again.
    await bench.agents.s3.delete_object(Bucket=bench.config.storage.bucket, Key=f"runs/{run_id}/steps/00000000/a.0")
    running = bench.start("a", "b")
    await eventually(lambda: len(bench.gateways.adopted) == 2)
    for _ in range(20):
        await asyncio.sleep(0)
    assert bench.agents.requests == []
    assert bench.services.dispatcher.calls.free_slots == 0
    work.go.set()
    report = (await running).report
    assert bench.agents.rollouts == ["a.0"]
    assert report.reattached == len(running_agents) == 2


# --- the log of attempts in flight ------------------------------------------------------------------------


def note(session: str, attempt: int = 1) -> InFlightAttempt:
    return InFlightAttempt(session_id=session, rollout_id="a.0", attempt=attempt, began=1.0, deadline=2.0)


async def test_an_invoked_session_that_was_not_stopped_may_be_open(tmp_path):
    notes = InFlightLog(StepFiles(tmp_path))
    await notes.record_execution(0, "nonce", first=1, last=1)
    for session in ("s1", "s2", "s3"):
        await notes.record_invoked(0, session)
    await notes.record_running(0, note("s2"))
    await notes.record_closed(0, "s1")
    await notes.record_stopped(0, "s1")
    await notes.record_closed(0, "s2")  # and then the trainer was killed
    left = await InFlightLog(StepFiles(tmp_path)).open_sessions(0, "nonce")
    assert left.session_ids == ["s2", "s3"]
    assert left.complete_attempts == {1}
    await notes.record_execution(0, "nonce", first=1, last=3)  # it needs further attempts
    await notes.record_execution(0, "nonce", first=8, last=8)  # those from 4 to 7 were made on another machine
    assert (await notes.open_sessions(0, "nonce")).complete_attempts == {1, 2, 3, 8}
    assert (await notes.open_sessions(0, "another step's")).complete_attempts == frozenset()
    assert (await notes.open_sessions(1, "nonce")).session_ids == []


@pytest.mark.parametrize("cancelled", [True, False])
async def test_a_session_that_is_not_invoked_after_all_is_not_open(tmp_path, cancelled):
    """Its rollout is settled while the record is written."""
    notes = InFlightLog(StepFiles(tmp_path))
    ends = SimpleNamespace(forget=lambda session_ids: None)
    services = SimpleNamespace(in_flight=notes, heartbeats=Heartbeats(5.0), session_ends=ends)
    sessions = StepSessions(services, SimpleNamespace(step=0), SimpleNamespace(leave_open=False))

    async def report_log() -> None:
        pass

    assert await sessions.register("s1", report_log, lambda: True)
    if cancelled:
        waiting = asyncio.create_task(sessions.register("s2", report_log, lambda: True))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    else:
        assert not await sessions.register("s2", report_log, lambda: False)
    assert [*sessions.known] == ["s1"]
    # An invoke that is repeated may find its session open.
    assert not await sessions.register("s1", report_log, lambda: False)
    await notes.record_running(0, note("s1"))
    assert (await notes.open_sessions(0, "nonce")).session_ids == ["s1"]
    # The lease has ended between its record and its invoke. The record is written again before the next invoke.
    assert await sessions.register("s3", report_log, lambda: True)
    sessions.withdraw("s3")
    await notes.record_running(0, note("s1"))
    assert (await notes.open_sessions(0, "nonce")).session_ids == ["s1"]
    assert await sessions.register("s3", report_log, lambda: True)
    assert (await notes.open_sessions(0, "nonce")).session_ids == ["s1", "s3"]


async def test_after_a_reboot_the_log_names_sessions_but_is_not_complete(tmp_path):
    notes = InFlightLog(StepFiles(tmp_path))
    notes._boot = "before"
    await notes.record_execution(0, "nonce", first=1, last=1)
    await notes.record_invoked(0, "s1")
    left = await InFlightLog(StepFiles(tmp_path)).open_sessions(0, "nonce")
    assert (left.session_ids, left.complete_attempts) == (["s1"], frozenset())


async def test_a_truncated_line_hides_no_other(tmp_path):
    await InFlightLog(StepFiles(tmp_path)).record_running(0, note("s1"))
    with (tmp_path / "00000000.in-flight").open("a") as file:
        file.write('\n{"closed": "s')
    await InFlightLog(StepFiles(tmp_path)).record_running(0, note("s2"))
    assert await InFlightLog(StepFiles(tmp_path)).running_attempts(0) == [note("s1"), note("s2")]


async def test_a_record_is_written_after_its_file_was_deleted(tmp_path):
    notes = InFlightLog(StepFiles(tmp_path / "steps"))
    await notes.record_running(0, note("s1"))
    shutil.rmtree(tmp_path / "steps")
    await notes.record_running(0, note("s2"))
    assert await InFlightLog(StepFiles(tmp_path / "steps")).running_attempts(0) == [note("s2")]


async def test_a_log_that_cannot_be_written_is_dropped(tmp_path, monkeypatch):
    files = StepFiles(tmp_path)
    notes = InFlightLog(files)
    await notes.record_running(0, note("s1"))

    async def full(step, lines):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "append", full)
    await notes.record_closed(0, "s1")
    monkeypatch.undo()
    await notes.record_running(0, note("s2"))
    assert await notes.running_attempts(0) == []  # or the step would wait for the closed session
