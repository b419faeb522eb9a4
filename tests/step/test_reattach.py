"""A trainer that is killed while agents are at work, and started again: what can go on goes on."""

import asyncio
import json
from dataclasses import dataclass, field, replace

import pytest

from agent_wrapper.contract import Outcome, manifest_key
from rollout_backend.core.manifest import Manifest
from rollout_backend.step.in_flight import InFlightAttempt, InFlightLog, StepFiles


@dataclass
class Work:
    """The second rollout of each group is at work until `go`, and then does `then`."""

    go: asyncio.Event = field(default_factory=asyncio.Event)
    adopted: list[str] = field(default_factory=list)

    async def adopt(self, session_ids) -> None:
        self.adopted += session_ids

    async def then(self, agents, request) -> None:
        await agents.complete(request)

    async def behave(self, agents, request) -> None:
        if request.rollout_id.endswith(".1"):
            await self.go.wait()
            await self.then(agents, request)
        else:
            await agents.complete(request)


@pytest.fixture
def work(tmp_path) -> Work:
    return Work()


def started_again(bench, work, tmp_path, gateway="here"):
    bench.services = replace(
        bench.services, gateway=gateway, in_flight=InFlightLog(StepFiles(tmp_path / "steps")), adopt=work.adopt
    )
    bench.agents.requests.clear()
    bench.agents.stopped.clear()
    bench.revoked.clear()


async def kill_in_the_middle(bench, work, tmp_path, *tasks) -> list:
    """The requests whose agents are at work when the trainer is gone."""
    started_again(bench, work, tmp_path)
    bench.agents.behave = lambda agents, request: work.behave(agents, request)
    running = asyncio.create_task(bench.step(*tasks).run())
    notes, expected = tmp_path / "steps" / "00000000.in-flight", len(tasks)
    while len(bench.kept) < expected or sum(r.rollout_id.endswith(".1") for r in bench.agents.requests) < expected:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    while len(bench.services.in_flight.running_attempts(0)) < expected:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    at_work = [request for request in bench.agents.requests if request.rollout_id.endswith(".1")]
    key, stop = manifest_key("", bench.config.run_id, 0), bench.agents.stop
    [manifest], noted = await bench.objects(key), notes.read_text()

    async def nobody_stops_it(session_id):
        return None

    bench.agents.stop = nobody_stops_it  # the dead close nothing, and write nothing either
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    bench.agents.stop = stop
    await bench.agents.s3.put_object(Bucket=bench.config.storage.bucket, Key=key, Body=json.dumps(manifest).encode())
    notes.write_text(noted)
    return at_work


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # a step tells nobody
            await asyncio.sleep(0.01)


async def test_only_what_was_invoked_is_stopped(open_bench, work, tmp_path):
    bench = await open_bench("runtime.max_sessions=2", "group.size=4")
    started_again(bench, work, tmp_path)
    bench.agents.behave = type(bench.agents).vanish
    running = asyncio.create_task(bench.step("a").run())
    await until(lambda: len(bench.agents.requests) == 2)
    invoked = {request.session_id for request in bench.agents.requests}
    key, notes = manifest_key("", bench.config.run_id, 0), tmp_path / "steps" / "00000000.in-flight"
    [manifest], noted = await bench.objects(key), notes.read_text()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await bench.agents.s3.put_object(Bucket=bench.config.storage.bucket, Key=key, Body=json.dumps(manifest).encode())
    notes.write_text(noted)
    started_again(bench, work, tmp_path, gateway="another: nothing goes on")
    bench.agents.behave = type(bench.agents).complete
    assert (await bench.step("a").run()).report.outcomes[Outcome.COMPLETED] == 4
    mine = {request.session_id for request in bench.agents.requests}
    assert set(bench.agents.stopped) == invoked | mine


async def test_an_agent_at_work_is_waited_for_and_not_run_again(open_bench, work, tmp_path):
    bench = await open_bench()
    [request] = await kill_in_the_middle(bench, work, tmp_path, "a")
    started_again(bench, work, tmp_path)
    step = bench.step("a:2")
    running = asyncio.create_task(step.run())
    await until(lambda: work.adopted)
    assert request.session_id in step.ledger.open_sessions
    work.go.set()
    result = await running
    assert bench.agents.requests == []
    assert (result.report.resumed, result.report.reattached, result.report.attempts) == (1, 1, 0)
    assert result.report.outcomes[Outcome.COMPLETED] == 2
    assert {rollout.session_id for rollout in result.rollouts} > {request.session_id}
    assert work.adopted == [request.session_id]
    assert bench.agents.stopped.count(request.session_id) == 1
    assert request.session_id in bench.revoked
    assert bench.services.in_flight.running_attempts(0) == []
    # A third take finds all of it done, and everything closed.
    started_again(bench, work, tmp_path)
    assert (await bench.step("a").run()).report.resumed == 2
    assert (bench.agents.stopped, bench.agents.requests) == ([], [])


async def test_what_was_published_while_no_trainer_was_there_is_finished(open_bench, work, tmp_path):
    bench = await open_bench()
    [request] = await kill_in_the_middle(bench, work, tmp_path, "a")
    work.go.set()
    await until(lambda: bench.agents.finished == 2)
    started_again(bench, work, tmp_path)
    report = (await bench.step("a").run()).report
    assert (report.resumed, report.reattached) == (2, 0)
    assert (bench.agents.requests, work.adopted) == ([], [])
    assert request.session_id in bench.agents.stopped


@pytest.mark.parametrize("meanwhile", [True, False])
async def test_an_attempt_that_says_it_was_lost_is_followed_by_another(open_bench, work, tmp_path, meanwhile):
    bench = await open_bench()
    [request] = await kill_in_the_middle(bench, work, tmp_path, "a")
    work.then = lambda agents, request: (
        agents.fail(request, Outcome.INFRA_ERROR) if request.attempt == 1 else agents.complete(request)
    )
    if meanwhile:
        work.go.set()
        await until(lambda: bench.agents.finished == 2)
    started_again(bench, work, tmp_path)
    running = asyncio.create_task(bench.step("a").run())
    if not meanwhile:
        await until(lambda: work.adopted)
        work.go.set()
    report = (await running).report
    assert report.outcomes[Outcome.COMPLETED] == 2
    assert [(again.rollout_id, again.attempt) for again in bench.agents.requests] == [("a.1", 2)]
    assert report.superseded >= 1
    assert request.session_id in bench.agents.stopped
    assert report.reattached == (0 if meanwhile else 1)


async def test_an_attempt_whose_deadline_comes_is_followed_by_another(open_bench, work, tmp_path):
    bench = await open_bench("timeouts.agent_s=6", "timeouts.publish_grace_s=0.5")
    [request] = await kill_in_the_middle(bench, work, tmp_path, "a")

    async def first_hangs(agents, again):
        if again.attempt > 1:
            await agents.complete(again)

    work.behave = first_hangs
    started_again(bench, work, tmp_path)
    report = (await bench.step("a").run()).report
    assert report.outcomes[Outcome.COMPLETED] == 2
    assert [again.rollout_id for again in bench.agents.requests] == ["a.1"]
    assert report.reattached == 1
    assert request.session_id in bench.agents.stopped


async def test_with_another_gateway_all_is_closed_and_run_anew(open_bench, work, tmp_path):
    bench = await open_bench()
    [request] = await kill_in_the_middle(bench, work, tmp_path, "a")
    started_again(bench, work, tmp_path, gateway="elsewhere")
    work.go.set()
    report = (await bench.step("a").run()).report
    assert [again.rollout_id for again in bench.agents.requests] == ["a.1"] or report.resumed == 2
    assert work.adopted == []
    assert request.session_id in bench.agents.stopped
    assert request.session_id in bench.revoked


async def test_with_other_weights_what_is_at_work_is_closed(open_bench, work, tmp_path):
    bench = await open_bench()
    [request] = await kill_in_the_middle(bench, work, tmp_path, "a")
    started_again(bench, work, tmp_path)
    bench.agents.behave = type(bench.agents).complete
    result = await bench.step("a", same_weights=False).run()
    assert len(bench.agents.requests) == 2
    assert work.adopted == []
    assert request.session_id in bench.agents.stopped
    assert request.session_id in bench.revoked
    assert request.session_id not in {rollout.session_id for rollout in result.rollouts}


async def test_what_goes_on_holds_its_slot(open_bench, work, tmp_path):
    bench = await open_bench("runtime.max_sessions=2")
    at_work = await kill_in_the_middle(bench, work, tmp_path, "a", "b")
    started_again(bench, work, tmp_path)
    fresh = Manifest.parse((await bench.objects(manifest_key("", bench.config.run_id, 0)))[0])
    # Of one of the finished rollouts the result is gone, so that it must be run again.
    await bench.agents.s3.delete_object(
        Bucket=bench.config.storage.bucket, Key=f"runs/{fresh.run_id}/steps/00000000/a.0"
    )
    running = asyncio.create_task(bench.step("a", "b").run())
    await until(lambda: len(work.adopted) == 2)
    for _ in range(20):
        await asyncio.sleep(0)
    assert bench.agents.requests == []
    assert bench.services.dispatcher.slots.locked()
    work.go.set()
    report = (await running).report
    assert [again.rollout_id for again in bench.agents.requests] == ["a.0"]
    assert report.reattached == len(at_work) == 2


# --- the notes --------------------------------------------------------------------------------------------


def note(session: str, attempt: int = 1) -> InFlightAttempt:
    return InFlightAttempt(session_id=session, rollout_id="a.0", attempt=attempt, began=1.0, deadline=2.0)


def test_what_is_noted_and_not_closed_is_at_work(tmp_path):
    notes = InFlightLog(StepFiles(tmp_path / "steps"))
    assert notes.running_attempts(3) == []
    notes.record_running(3, note("s1"))
    notes.record_closed(3, "s1")
    notes.record_closed(3, "s2")  # never accepted
    notes.record_running(3, note("s3", 2))
    notes.record_running(4, note("s4"))
    assert InFlightLog(StepFiles(tmp_path / "steps")).running_attempts(3) == [note("s3", 2)]
    notes.delete(3)
    assert notes.running_attempts(3) == []
    assert notes.running_attempts(4) == [note("s4")]


def test_what_was_invoked_and_not_stopped_may_be_open(tmp_path):
    notes = InFlightLog(StepFiles(tmp_path))
    notes.record_execution(0, "nonce", first=1, last=1)
    for session in ("s1", "s2", "s3"):
        notes.record_invoked(0, session)
    notes.record_running(0, note("s2"))
    notes.record_closed(0, "s1")
    notes.record_stopped(0, "s1")
    notes.record_closed(0, "s2")  # and then the trainer was killed
    left = InFlightLog(StepFiles(tmp_path)).open_sessions(0, "nonce")
    assert left.session_ids == ["s2", "s3"]
    assert left.complete_attempts == {1}
    notes.record_execution(0, "nonce", first=1, last=3)  # it needs further attempts
    notes.record_execution(0, "nonce", first=8, last=8)  # those from 4 to 7 were made on another machine
    assert notes.open_sessions(0, "nonce").complete_attempts == {1, 2, 3, 8}
    assert notes.open_sessions(0, "another step's").complete_attempts == frozenset()
    assert notes.open_sessions(1, "nonce").session_ids == []


def test_notes_of_a_machine_that_went_down_name_sessions_and_prove_nothing(tmp_path):
    notes = InFlightLog(StepFiles(tmp_path))
    notes._boot = "before"
    notes.record_execution(0, "nonce", first=1, last=1)
    notes.record_invoked(0, "s1")
    left = InFlightLog(StepFiles(tmp_path)).open_sessions(0, "nonce")
    assert (left.session_ids, left.complete_attempts) == (["s1"], frozenset())


def test_a_line_that_was_cut_off_hides_no_other(tmp_path):
    notes = InFlightLog(StepFiles(tmp_path))
    notes.record_running(0, note("s1"))
    with (tmp_path / "00000000.in-flight").open("a") as file:
        file.write('\n{"closed": "s')
    InFlightLog(StepFiles(tmp_path)).record_running(0, note("s2"))
    assert InFlightLog(StepFiles(tmp_path)).running_attempts(0) == [note("s1"), note("s2")]


def test_where_notes_cannot_be_written_there_are_none(tmp_path, monkeypatch):
    files = StepFiles(tmp_path)
    notes = InFlightLog(files)
    notes.record_running(0, note("s1"))

    def full(step, line):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "append", full)
    notes.record_closed(0, "s1")
    monkeypatch.undo()
    notes.record_running(0, note("s2"))
    assert notes.running_attempts(0) == []  # or the session that was closed would be waited for
