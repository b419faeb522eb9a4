"""A restarted step uses the results that it has, and runs nothing twice."""

import asyncio
import json

import pytest

from agent_wrapper.contract import Outcome, Sampling, Trajectory
from builders import eventually, skip
from rollout_backend.core.manifest import Manifest, digest_of
from rollout_backend.core.seal import Sealer
from rollout_backend.core.tasks import Task
from rollout_backend.errors import ManifestError, StoreError
from rollout_backend.run.scoring.rollout_scorer import RolloutScorer
from rollout_backend.run.step.task_blocklist import TaskBlocklist
from rollouts import make_claims, make_manifest
from step_bench import Agents, only


async def die(bench, running) -> None:
    """Kill the trainer: it records nothing any more."""
    manifest = await bench.manifest()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await bench.put(bench.manifest_key, json.dumps(manifest).encode())
    bench.forget()


async def begin_and_die(bench, *tasks: str, **more) -> None:
    """Run a step until the first rollout of each group is finished, and kill it while the second runs."""

    async def first_completes(agents, request):
        await (agents.complete if request.rollout_id.endswith(".0") else agents.vanish)(request)

    running = bench.start(*tasks, behave=first_completes, **more)
    await eventually(lambda: len(bench.kept) == len(tasks) and len(bench.agents.requests) == 2 * len(tasks))
    await die(bench, running)
    bench.agents.behave = Agents.complete


async def test_the_sessions_of_a_killed_trainer_are_closed_and_their_numbers_not_used_again(open_bench):
    bench = await open_bench("runtime.max_attempts=3")
    await begin_and_die(bench, "a")
    before = Manifest.parse(await bench.manifest())
    await bench.run("a")
    [request] = bench.agents.requests
    assert request.attempt == 2
    earlier = {before.session_id(rollout_id, 1) for rollout_id in ("a.0", "a.1")}
    assert set(bench.agents.stopped) == {*earlier, request.session_id}
    assert request.session_id not in earlier
    bench.forget()
    await bench.run("a")
    assert bench.agents.stopped == [], "the second trainer ended normally and closed everything"


def score(bench) -> None:
    """Give the run a scorer, and a trainer that has just started."""
    bench.forget()
    store, run_id = bench.services.blocklist._store, bench.config.run_id

    async def call(request: bytes) -> dict:
        return {"scorer": "judge", "sha256": "a" * 64, "reward": 3.0}

    bench.replace(
        blocklist=TaskBlocklist(store, run_id, bench.config.group.block_task_after),
        scorer=RolloutScorer(store, run_id, call, "judge", "a" * 64),
    )


async def test_a_step_that_cannot_read_all_earlier_results_does_not_call_earlier_sessions_closed(open_bench):
    """It has read one result, which is being scored, when its time is over."""
    bench = await open_bench()
    await begin_and_die(bench, "a")
    score(bench)
    sweep = bench.services.buffer.sweep

    async def sweep_in_part(sink) -> bool:
        assert await sweep(sink)
        skip(bench.config.timeouts.collection_s)
        return False

    bench.services.buffer.sweep = sweep_in_part
    with pytest.raises(StoreError):
        await bench.run("a")
    assert bench.agents.requests == []
    assert Manifest.parse(await bench.manifest()).attempts_closed == 0


async def test_a_result_that_is_being_scored_counts_although_its_task_is_blocked_meanwhile(open_bench):
    bench = await open_bench("group.block_task_after=1", "group.min_viable=1")
    await begin_and_die(bench, "a", "b")
    await bench.run("a", "b", number=1, behave=only("b", Agents.lose))
    bench.agents.behave = Agents.complete
    score(bench)
    result = await bench.run("a", "b")
    assert {rollout.rollout_id for rollout in result.rollouts} >= {"a.0", "a.1", "b.0"}
    assert result.report.reasons == {"infra_error: task_blocked": 1}


async def test_neither_ids_nor_order_of_the_tasks_matter(open_bench):
    bench = await open_bench()
    await begin_and_die(bench, "a:1", "b:1")
    result = await bench.run("b:2", "a:2")
    assert bench.agents.rollouts == ["a-1.1", "b-1.1"]
    by_task = {group.task.task_id: {r.rollout_id for r in group.rollouts} for group in result.groups}
    assert by_task == {"a-2": {"a-1.0", "a-1.1"}, "b-2": {"b-1.0", "b-1.1"}}


async def test_a_step_may_be_resumed_with_some_of_its_tasks(open_bench):
    """The sessions of the other tasks are closed, and their rollouts neither run nor count."""
    bench = await open_bench()
    await begin_and_die(bench, "a", "b")
    before = Manifest.parse(await bench.manifest())
    result = await bench.run("b", allow_subset=True)
    assert bench.agents.rollouts == ["b.1"]
    assert (result.report.planned, result.report.resumed) == (2, 1)
    assert {before.session_id(f"{task}.{i}", 1) for task in "ab" for i in (0, 1)} <= set(bench.agents.stopped)


async def test_a_second_kill_loses_nothing_of_the_tasks_that_were_left_out(open_bench):
    """The trainer that is killed in between has resumed the step with some of its tasks."""
    bench = await open_bench()
    await begin_and_die(bench, "a", "b")
    running = bench.start("b", allow_subset=True, behave=Agents.vanish)
    await eventually(lambda: bench.agents.rollouts == ["b.1"])
    await die(bench, running)
    result = await bench.run("a", "b", behave=Agents.complete, allow_subset=True)
    assert bench.agents.rollouts == ["a.1", "b.1"]
    assert (result.report.planned, result.report.resumed) == (4, 2)


@pytest.mark.parametrize(
    ("tasks", "more", "other"),
    [
        (["a", "c"], {}, "tasks, sampling or group sizes"),
        (["a"], {}, "tasks, sampling or group sizes"),
        (["a", "a:2", "b"], {}, "tasks, sampling or group sizes"),
        (["a", "b"], {"same_weights": False}, "weights (unknown)"),
        (["a", "b"], {"weights": "model@1"}, "weights (unknown)"),
    ],
    ids=["another task", "one less", "one more", "other weights", "another version"],
)
async def test_another_step_of_the_same_number_reuses_nothing(open_bench, caplog, tasks, more, other):
    bench = await open_bench()
    await begin_and_die(bench, "a", "b")
    before = Manifest.parse(await bench.manifest())
    result = await bench.run(*tasks, **more)
    assert {*before.open_sessions()} <= {*bench.agents.stopped}
    assert len(bench.agents.requests) == 2 * len(tasks)
    assert result.report.resumed == 0
    assert f"step {before.step} was begun with other {other}: all of its rollouts run again" in caplog.text
    assert not {r.rollout_id for r in result.rollouts} & {"a.0", "a.1", "b.0", "b.1"}
    more.pop("same_weights", None)
    assert (await bench.run(*tasks, **more)).report.resumed == 2 * len(tasks), "the new step replaced the old one"


async def test_the_sessions_of_a_replaced_step_are_closed_even_by_the_trainer_after_the_next(open_bench):
    bench = await open_bench()
    await begin_and_die(bench, "a")
    first = Manifest.parse(await bench.manifest())
    second = make_manifest(first.run_id, Task("a", {}), before=first)
    await bench.put(bench.manifest_key, second.model_dump_json().encode())  # killed before it closed a session
    await bench.run("b")
    assert {*first.open_sessions(), *second.open_sessions()} <= {*bench.agents.stopped}
    bench.forget()
    await bench.run("c")
    assert {*bench.agents.stopped} == {request.session_id for request in bench.agents.requests}
    assert not Manifest.parse(await bench.manifest()).replaced


async def test_a_rollout_that_was_lost_before_is_run_again(open_bench):
    bench = await open_bench("group.min_viable=1")
    assert (await bench.run("a", behave=Agents.lose)).report.outcomes[Outcome.INFRA_ERROR] == 2
    assert (await bench.run("a", behave=Agents.complete)).report.outcomes[Outcome.COMPLETED] == 2


async def test_replacements_made_before_a_restart_are_known(open_bench):
    bench = await open_bench("group.policy=replace")
    first = await bench.run("a", behave=only("a.0", Agents.lose))
    assert {r.rollout_id for r in first.rollouts if r.trainable} == {"a.1", "a.2"}
    bench.forget()
    again = await bench.step("a", behave=Agents.complete).run()
    assert set(bench.agents.rollouts) <= {"a.0"}
    assert {"a.1", "a.2"} <= {r.rollout_id for r in again.rollouts}


async def test_a_late_result_of_an_earlier_session_counts_once(open_bench):
    bench = await open_bench()
    await begin_and_die(bench, "a")
    old = Manifest.parse(await bench.manifest()).session_id("a.1", 1)

    async def the_old_session_is_done(agents, request):
        await agents.complete(request, attempt=1, session_id=old)

    result = await bench.run("a", behave=the_old_session_is_done)
    assert result.report.outcomes[Outcome.COMPLETED] == 2
    assert {r.session_id for r in result.rollouts if r.rollout_id == "a.1"} == {old}


async def test_an_unreadable_manifest_stops_the_step_before_anything_is_spent(open_bench):
    bench = await open_bench()
    await bench.put(bench.manifest_key, b'{"schema_version": 9}')
    with pytest.raises(ManifestError, match="run_id"):
        await bench.run("a")
    assert bench.agents.requests == []


async def test_an_object_that_s3_never_gives_does_not_block_the_next_start(open_bench):
    bench = await open_bench("group.min_viable=1")
    await begin_and_die(bench, "a", "b")
    key = f"runs/{bench.config.run_id}/steps/00000000/a.0"
    await bench.put(key, b"x", StorageClass="GLACIER")
    result = await bench.run("a", "b")
    assert result.report.outcomes[Outcome.COMPLETED] == 3
    [failure] = result.failures
    assert (failure.rollout_id, failure.reason) == ("a.0", "invalid_result")
    assert "InvalidObjectState" in failure.message
    [record] = await bench.quarantined()
    assert record["what"] == key


def test_tasks_are_the_same_if_payload_number_and_sampling_are():
    plain = digest_of(Task("a", {"q": 1, "p": 2}), 2, Sampling())
    assert digest_of(Task("b", {"p": 2, "q": 1}), 2, Sampling()) == plain
    others = {
        digest_of(Task("a", {"q": 2, "p": 2}), 2, Sampling()),
        digest_of(Task("a", {"q": 1, "p": 2}), 3, Sampling()),
        digest_of(Task("a", {"q": 1, "p": 2}), 2, Sampling(temperature=0.5)),
    }
    assert len(others) == 3
    assert plain not in others


# --- with seals -------------------------------------------------------------------------------------------


def sealed_by(bench, secret: str, previous: str | None = None) -> None:
    """Let the run check seals with these secrets, and let its agents' results have seals of the first."""
    sealer = Sealer(secret, previous)
    bench.verify = sealer.check
    bench.replace(sealed_by=sealer.fingerprints)

    def result(agents, request, **more):
        rollout = Agents.result(agents, request, **more)
        names = ("run_id", "step", "rollout_id", "attempt", "sampling")
        claims = make_claims(request.session_id, **{name: getattr(request, name) for name in names})
        trajectory = sealer.seal(Trajectory(model=rollout.model, segments=rollout.segments), claims)
        return rollout.model_copy(update={"seal": more.get("seal", trajectory.seal)})

    bench.agents.result = result.__get__(bench.agents)


async def test_a_trainer_with_a_new_secret_and_the_previous_one_reuses_finished_rollouts(open_bench):
    bench = await open_bench()
    sealed_by(bench, "the old secret " * 3)
    await begin_and_die(bench, "a")
    sealed_by(bench, "the new secret " * 3, previous="the old secret " * 3)
    result = await bench.run("a")
    assert bench.agents.rollouts == ["a.1"]
    assert (result.report.outcomes[Outcome.COMPLETED], result.report.resumed) == (2, 1)
    assert await bench.quarantined() == []


async def test_a_trainer_with_another_secret_runs_the_whole_step_again_and_says_why(open_bench, caplog):
    bench = await open_bench()
    sealed_by(bench, "the first machine's secret " * 2)
    await begin_and_die(bench, "a")
    sealed_by(bench, "another machine's secret " * 2)
    result = await bench.run("a")
    assert bench.agents.rollouts == ["a.0.g1", "a.1.g1"]
    assert (result.report.outcomes[Outcome.COMPLETED], result.report.resumed) == (2, 0)
    assert await bench.quarantined() == []
    assert "with another secret" in caplog.text
    assert "gateway.secret" in caplog.text


async def test_a_forged_trajectory_is_no_result_and_is_kept_as_evidence(open_bench):
    bench = await open_bench("group.min_viable=1")
    sealed_by(bench, "the machine's own secret " * 2)

    async def steal(agents, request):
        other = request.model_copy(update={"rollout_id": "a.0", "session_id": "another-session"})
        await agents.complete(request, seal=agents.result(other).seal)

    [failure] = (await bench.run("a", behave=only("a.1", steal))).failures
    assert (failure.rollout_id, failure.outcome, failure.reason) == ("a.1", Outcome.INFRA_ERROR, "invalid_result")
    assert "seal: is of rollout_id 'a.0'" in failure.message
    [record] = await bench.quarantined()
    assert record["reason"].startswith("seal: ")
