"""The invariants of a step, while messages are lost and forged, results are damaged, and agents disappear."""

import asyncio
import errno
import os
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent_wrapper.contract import Outcome, Sampling
from builders import eventually, skip
from rollout_backend.base import disk
from rollout_backend.base.atomic_file import write_file
from rollout_backend.core.tasks import Task
from rollout_backend.errors import ServingError
from rollout_backend.run.accounts.archive import RunArchive
from rollout_backend.run.step.in_flight import InFlightLog, StepFiles
from step_bench import Agents, only

LATE = 81  # seconds after which a rollout of a bench is overdue


def completed(result) -> int:
    return result.report.outcomes[Outcome.COMPLETED]


def completed_in(bench) -> int:
    """Return how many rollouts of the running step are completed."""
    return bench.ledger.counts()[Outcome.COMPLETED]


async def test_a_full_disk_costs_the_local_copies_alone(open_bench, tmp_path, caplog):
    bench = await open_bench()
    folder = tmp_path / "rollouts" / "00000000"
    folder.mkdir(parents=True)

    def write(path: Path, data: bytes) -> None:
        if path.name.startswith("task-a"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_file(path, data)

    bench.replace(archive=RunArchive(tmp_path, write))
    result = await bench.run("task-a", "task-b")
    assert (completed(result), result.report.unarchived) == (4, 2)
    assert "No space left on device" in caplog.text
    assert sorted(path.name for path in folder.iterdir()) == ["task-b.0", "task-b.1"]


async def test_a_disk_that_hangs_delays_a_step_by_the_archives_limit(open_bench, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(disk, "DISK_S", 0.05)
    free = threading.Event()
    bench = await open_bench()
    bench.replace(archive=RunArchive(tmp_path, lambda path, data: free.wait(120)))
    try:
        result = await bench.run("task-a")
    finally:
        free.set()
    assert (completed(result), result.report.unarchived) == (2, 2)
    assert "has not answered for 0.05 s" in caplog.text


async def test_a_disk_that_never_answers_costs_the_records_of_sessions_and_no_rollout(
    open_bench, tmp_path, monkeypatch
):
    monkeypatch.setattr(disk, "DISK_S", 0.05)
    # Nobody opens the other end of the pipe, so the first call never returns.
    records = tmp_path / "00000000.in-flight"
    os.mkfifo(records)
    bench, files = await open_bench(), StepFiles(tmp_path)
    bench.replace(in_flight=InFlightLog(files))
    logged = []

    async def behave(agents, request):
        logged.append((await bench.manifest())["is_logged"])
        await agents.complete(request)

    result = await bench.run("task-a", behave=behave)
    assert completed(result) == 2
    assert logged == [False, False], "a later trainer must not believe that unrecorded sessions were never opened"
    other_end = os.open(records, os.O_RDWR)
    records.unlink(missing_ok=True)
    os.close(other_end)
    await asyncio.wrap_future(files._disk.submit(lambda: None))
    assert not records.exists(), "incomplete records are deleted once the disk answers"


@pytest.mark.parametrize("refused", [frozenset({"append"}), frozenset({"append", "delete"}), frozenset({"delete"})])
async def test_a_disk_that_refuses_the_records_of_sessions_ends_no_step(open_bench, tmp_path, monkeypatch, refused):
    async def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    bench, files = await open_bench(), StepFiles(tmp_path)
    for name in refused:
        monkeypatch.setattr(files, name, refuse)
    bench.replace(in_flight=InFlightLog(files))
    result = await bench.run("task-a")
    bench.check_ended(result)
    assert completed(result) == 2


# --- announcements ----------------------------------------------------------------------------------------


async def test_the_sessions_of_a_group_share_a_routing_key_if_the_settings_say_so(open_bench):
    bench = await open_bench("router.affinity=group")
    keys: dict[str, set[str]] = {}
    endpoint = bench.gateways.endpoint

    def issue(claims):
        keys.setdefault(claims.rollout_id.rpartition(".")[0], set()).add(claims.routing_key)
        return endpoint(claims)

    bench.gateways.endpoint = issue
    await bench.run("task-a", "task-b")
    assert keys == {"task-a": {"0/task-a"}, "task-b": {"0/task-b"}}


# --- results that are no results --------------------------------------------------------------------------


async def test_an_infrastructure_failure_is_never_a_reward_and_an_agents_error_only_if_it_was_scored(open_bench):
    bench = await open_bench("group.size=4", "group.min_viable=1")

    async def scored(agents, request):
        await agents.fail(request, reward=-1.0)

    ends = {"task-a.0": scored, "task-a.1": Agents.fail, "task-a.2": Agents.lose, "task-a.3": Agents.complete}
    result = await bench.run(behave=lambda agents, request: ends[request.rollout_id](agents, request))
    ended = result.report.outcomes
    assert (ended[Outcome.AGENT_ERROR], ended[Outcome.INFRA_ERROR], ended[Outcome.COMPLETED]) == (2, 1, 1)
    [group] = result.groups
    assert {rollout.rollout_id: rollout.reward for rollout in group.rollouts} == {"task-a.0": -1.0, "task-a.3": 1.0}
    assert result.report.groups[0].mean_reward == 0.0


# --- deadlines and targets --------------------------------------------------------------------------------


async def test_an_agent_that_disappears_times_out_and_the_others_count(open_bench):
    bench = await open_bench("group.min_viable=1")
    running = bench.start(behave=only("task-a.0", Agents.vanish))
    await eventually(lambda: len(bench.agents.requests) == 2 and completed_in(bench) == 1)
    skip(LATE)
    result = await running
    bench.check_ended(result)
    assert result.report.reasons == {"timed_out: no_result": 1}
    assert result.failures[0].session_id in result.failures[0].message
    assert completed(result) == 1
    assert not result.report.deadline_reached


async def test_at_the_deadline_the_step_ends_with_what_has_arrived(open_bench):
    sizes = ("runtime.max_sessions=2", "group.size=4", "group.min_viable=1")
    bench = await open_bench(*sizes)
    running = bench.start(behave=only("task-a.0", Agents.complete, Agents.hang))
    await eventually(lambda: completed_in(bench) == 1)
    skip(bench.config.timeouts.collection_s)
    result = await running
    bench.check_ended(result)
    assert completed(result) == 1
    assert result.report.outcomes[Outcome.TIMED_OUT] >= 1
    assert len(bench.agents.sessions) == 0


async def test_keys_that_could_not_be_revoked_are_revoked_with_the_step(open_bench):
    bench = await open_bench()
    revoke, refused = bench.gateways.revoke, []

    async def away_at_first(session_ids):
        if not refused:
            refused.extend(session_ids)
            raise ServingError("the gateway is being restarted")
        await revoke(session_ids)

    bench.gateways.revoke = away_at_first
    await bench.run("task-a", "task-b")
    assert refused
    assert set(bench.revoked) == bench.agents.invoked


# --- dispatch ---------------------------------------------------------------------------------------------


async def test_a_task_whose_runtime_is_not_ready_takes_no_slot(open_bench):
    bench = await open_bench("runtime.max_sessions=1", "group.size=1", "group.min_viable=1")
    ready, held = asyncio.Event(), set()

    async def wait_ready(payload, run_id):
        assert payload["q"] in held
        if payload["q"] == "task-a":
            await ready.wait()

    async def behave(agents, request):
        assert request.task_id in held
        ready.set()
        await agents.complete(request)

    @contextmanager
    def hold(payload):
        held.add(payload["q"])
        yield
        held.discard(payload["q"])

    bench.agents.wait_ready, bench.agents.hold = wait_ready, hold
    assert completed(await bench.run("task-a", "task-b", behave=behave)) == 2
    assert [request.task_id for request in bench.agents.requests] == ["task-b", "task-a"]
    assert not held


async def test_of_the_rollouts_that_wait_those_of_the_highest_priority_start_first(open_bench):
    bench = await open_bench("runtime.max_sessions=1", "group.size=2")
    tasks = [Task(f"t{priority}", {}, priority=priority) for priority in (0, -1, 5)]
    assert completed(await bench.run(*tasks)) == 6
    started = [request.task_id for request in bench.agents.requests]
    # The first one starts before the others wait.
    assert started[1:] == ["t5", "t5", "t0", "t-1", "t-1"]


async def test_the_request_holds_the_runs_settings_and_those_of_its_task(open_bench):
    bench = await open_bench("sampling.temperature=0.7", "storage.prefix=team/")
    bench.replace(wall=lambda: 1000.0)
    result = await bench.run(Task("greedy", {}, rollouts=1, sampling=Sampling(temperature=0)), Task("plain", {}))
    assert completed(result) == result.report.planned == 3
    temperatures = {request.task_id: request.sampling.temperature for request in bench.agents.requests}
    assert temperatures == {"greedy": 0.0, "plain": 0.7}
    for request in bench.agents.requests:
        assert request.key == f"team/runs/{bench.config.run_id}/steps/00000000/{request.rollout_id}"
        assert request.deadline == 1000.0 + bench.config.timeouts.agent_s


# --- steps that are interrupted ---------------------------------------------------------------------------


async def test_the_target_ends_a_step_early_and_each_group_is_reported_once_it_is_settled(open_bench):
    bench = await open_bench("group.target_groups=1")
    reported = []
    result = await bench.run(
        *("task-a", "task-b"),
        behave=only("task-b", Agents.hang),
        on_group=lambda group: reported.append((group.task.task_id, group.usable, len(bench.revoked))),
    )
    assert result.report.reasons == {"cancelled: target_reached": 2}
    assert set(bench.revoked) == bench.agents.invoked
    first, cancelled = reported
    assert first[:2] == ("task-a", True)
    assert cancelled == ("task-b", False, 4), "a cancelled group is reported when its sessions can sample no more"
