"""A step that is begun again: what an earlier take of it has finished counts, and nothing is run twice."""

import asyncio
import json
from collections import Counter
from dataclasses import replace

import pytest

from agent_wrapper.contract import Outcome, Sampling, Trajectory, manifest_key
from rollout_backend.core.manifest import Manifest, digest_of
from rollout_backend.core.seal import Sealer
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.core.tasks import Task
from rollout_backend.errors import ManifestError, OutcomeUnknown


async def begin_and_die(bench, *tasks: str, **more) -> None:
    """A take in which the first rollout of each group is finished and the second still runs when it ends."""

    async def behave(agents, request):
        if request.rollout_id.endswith(".0"):
            await agents.complete(request)

    bench.agents.behave = behave
    running = asyncio.create_task(bench.step(*tasks, **more).run())
    while len(bench.kept) < len(tasks) or len(bench.agents.requests) < 2 * len(tasks):  # noqa: ASYNC110  # a step tells nobody
        await asyncio.sleep(0.01)
    key = manifest_key("", bench.config.run_id, 0)
    [manifest] = await bench.objects(key)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    # The dead do not write that they have closed what they left open.
    await bench.agents.s3.put_object(Bucket=bench.config.storage.bucket, Key=key, Body=json.dumps(manifest).encode())
    bench.agents.behave = type(bench.agents).complete
    bench.agents.requests.clear()
    bench.agents.stopped.clear()


async def test_only_what_is_not_finished_is_run(open_bench):
    bench = await open_bench()
    await begin_and_die(bench, "a", "b")
    result = await bench.step("a", "b").run()
    assert sorted(request.rollout_id for request in bench.agents.requests) == ["a.1", "b.1"]
    assert result.report.outcomes[Outcome.COMPLETED] == 4
    assert result.report.resumed == 2
    assert {rollout.rollout_id for rollout in result.rollouts} == {"a.0", "a.1", "b.0", "b.1"}
    assert all(group.usable for group in result.groups)


async def test_the_sessions_of_the_earlier_take_are_closed_and_their_numbers_not_used_again(open_bench):
    bench = await open_bench("runtime.max_attempts=3")
    await begin_and_die(bench, "a")
    before = Manifest.parse((await bench.objects(manifest_key("", bench.config.run_id, 0)))[0])
    await bench.step("a").run()
    [request] = bench.agents.requests
    assert request.attempt == 2
    earlier = {before.session_id(rollout_id, 1) for rollout_id in ("a.0", "a.1")}
    assert set(bench.agents.stopped) == {*earlier, request.session_id}
    assert request.session_id not in earlier
    # A third take need not close anything: the second one came to its end.
    bench.agents.stopped.clear()
    await bench.step("a").run()
    assert bench.agents.stopped == []


async def test_the_manifest_names_a_further_attempt_before_it_is_made(open_bench):
    """A trainer on another machine knows from it alone which sessions may be open."""
    bench = await open_bench("runtime.max_attempts=3")
    named = []

    async def cut_twice(request):
        [manifest] = await bench.objects(manifest_key("", bench.config.run_id, 0))
        named.append((request.attempt, manifest["attempts"]))
        if request.attempt < 3 and request.rollout_id == "a.1":
            raise OutcomeUnknown("cut")

    bench.agents.before = cut_twice
    result = await bench.step("a").run()
    assert result.report.outcomes[Outcome.COMPLETED] == 2
    assert sorted(named) == [(1, 1), (1, 1), (2, 2), (3, 3)]


async def test_a_finished_step_is_read_and_not_run(open_bench):
    bench = await open_bench()
    first = await bench.step("a").run()
    bench.agents.requests.clear()
    again = await bench.step("a").run()
    assert bench.agents.requests == []
    assert again.report.resumed == 2
    assert [r.encode() for r in sorted(again.rollouts, key=lambda r: r.rollout_id)] == [
        r.encode() for r in sorted(first.rollouts, key=lambda r: r.rollout_id)
    ]


async def test_the_tasks_own_ids_and_order_do_not_count(open_bench):
    bench = await open_bench()
    await begin_and_die(bench, "a:1", "b:1")
    result = await bench.step("b:2", "a:2").run()
    assert sorted(request.rollout_id for request in bench.agents.requests) == ["a-1.1", "b-1.1"]
    by_task = {group.task.task_id: {r.rollout_id for r in group.rollouts} for group in result.groups}
    assert by_task == {"a-2": {"a-1.0", "a-1.1"}, "b-2": {"b-1.0", "b-1.1"}}


@pytest.mark.parametrize(
    ("tasks", "more"),
    [
        (["a", "c"], {}),
        (["a"], {}),
        (["a", "a:2", "b"], {}),
        (["a", "b"], {"same_weights": False}),
        (["a", "b"], {"weights": "model@1"}),
    ],
    ids=["another task", "one less", "one more", "other weights", "another version"],
)
async def test_another_step_of_the_same_number_takes_nothing_of_it(open_bench, tasks, more):
    bench = await open_bench()
    await begin_and_die(bench, "a", "b")
    result = await bench.step(*tasks, **more).run()
    assert len(bench.agents.requests) == 2 * len(tasks)
    assert result.report.resumed == 0
    assert not {r.rollout_id for r in result.rollouts} & {"a.0", "a.1", "b.0", "b.1"}
    # And what now stands for this number is the new one.
    bench.agents.requests.clear()
    more.pop("same_weights", None)
    assert (await bench.step(*tasks, **more).run()).report.resumed == 2 * len(tasks)


async def test_a_rollout_that_was_lost_before_is_run_again(open_bench):
    bench = await open_bench("group.min_viable=1")

    async def lose(agents, request):
        await agents.fail(request, Outcome.INFRA_ERROR)

    bench.agents.behave = lose
    lost = await bench.step("a").run()
    assert lost.report.outcomes[Outcome.INFRA_ERROR] == 2
    bench.agents.behave = type(bench.agents).complete
    found = await bench.step("a").run()
    assert found.report.outcomes[Outcome.COMPLETED] == 2


async def test_replacements_of_the_earlier_take_are_known(open_bench):
    bench = await open_bench("group.policy=replace")

    async def behave(agents, request):
        if request.rollout_id == "a.0":
            await agents.fail(request, Outcome.INFRA_ERROR)
        else:
            await agents.complete(request)

    bench.agents.behave = behave
    first = await bench.step("a").run()
    assert {r.rollout_id for r in first.rollouts if r.trainable} == {"a.1", "a.2"}
    bench.agents.requests.clear()
    bench.agents.behave = type(bench.agents).complete
    again = await bench.step("a").run()
    assert {request.rollout_id for request in bench.agents.requests} <= {"a.0"}
    assert {"a.1", "a.2"} <= {r.rollout_id for r in again.rollouts}


async def test_a_result_that_comes_late_from_an_earlier_session_counts_once(open_bench):
    bench = await open_bench()
    await begin_and_die(bench, "a")
    [manifest] = await bench.objects(manifest_key("", bench.config.run_id, 0))
    old = Manifest.parse(manifest).session_id("a.1", 1)

    async def behave(agents, request):
        """The new attempt hangs; the old session, which nobody stopped in time, is done."""
        await agents.complete(request, attempt=1, session_id=old)

    bench.agents.behave = behave
    result = await bench.step("a").run()
    assert result.report.outcomes[Outcome.COMPLETED] == 2
    assert {r.session_id for r in result.rollouts if r.rollout_id == "a.1"} == {old}


async def test_the_notice_of_an_attempt_that_was_given_up_settles_nothing(open_bench):
    bench = await open_bench()
    first = {}

    async def refuse_first(request):
        if request.attempt == 1:
            first[request.rollout_id] = request
            raise OutcomeUnknown("not now")
        await bench.agents.fail(first[request.rollout_id], Outcome.INFRA_ERROR)

    async def after_the_notices(agents, request):
        while bench.counted.ledger.superseded < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await agents.complete(request)

    bench.agents.before = refuse_first
    bench.agents.behave = after_the_notices
    bench.counted = bench.step("a")
    result = await bench.counted.run()
    assert result.report.outcomes[Outcome.COMPLETED] == 2
    assert result.report.superseded == 2
    assert Counter(request.attempt for request in bench.agents.requests) == {1: 2, 2: 2}


async def test_a_manifest_that_cannot_be_read_stops_the_step_before_anything_is_spent(open_bench):
    bench = await open_bench()
    key = manifest_key("", bench.config.run_id, 0)
    await bench.agents.s3.put_object(Bucket=bench.config.storage.bucket, Key=key, Body=b'{"schema_version": 9}')
    with pytest.raises(ManifestError, match="run_id"):
        await bench.step("a").run()
    assert bench.agents.requests == []


def test_what_decides_whether_a_task_is_the_same():
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


def sealed_by(bench, secret: str) -> None:
    """From now on the run checks seals as one does that has this secret; the agents carry such seals."""
    sealer = Sealer(secret)
    bench.verify = sealer.check
    bench.services = replace(bench.services, sealed_by=sealer.fingerprint)

    def result(agents, request, **more):
        rollout = type(agents).result(agents, request, **more)
        claims = SessionClaims(
            **{name: getattr(request, name) for name in ("run_id", "step", "rollout_id", "attempt", "session_id")},
            sampling=request.sampling,
            expires_at=1e12,
        )
        trajectory = sealer.seal(Trajectory(model=rollout.model, segments=rollout.segments), claims)
        return rollout.model_copy(update={"seal": trajectory.seal})

    bench.agents.result = result.__get__(bench.agents)


async def test_a_trainer_with_the_same_secret_takes_what_is_finished(open_bench):
    bench = await open_bench()
    sealed_by(bench, "the first machine's secret " * 2)
    await begin_and_die(bench, "a")
    result = await bench.step("a").run()
    assert [request.rollout_id for request in bench.agents.requests] == ["a.1"]
    assert result.report.resumed == 1
    assert result.report.outcomes[Outcome.COMPLETED] == 2


async def test_an_object_that_s3_never_gives_does_not_block_the_next_start(open_bench):
    bench = await open_bench("group.min_viable=1")
    await begin_and_die(bench, "a", "b")
    key = f"runs/{bench.config.run_id}/steps/00000000/a.0"
    bucket = bench.config.storage.bucket
    await bench.agents.s3.put_object(Bucket=bucket, Key=key, Body=b"x", StorageClass="GLACIER")
    result = await bench.step("a", "b").run()
    assert result.report.outcomes[Outcome.COMPLETED] == 3
    [failure] = result.failures
    assert (failure.rollout_id, failure.reason) == ("a.0", "invalid_result")
    assert "InvalidObjectState" in failure.message
    [record] = await bench.quarantined()
    assert record["what"] == key


async def test_a_trainer_with_another_secret_runs_all_of_it_anew_and_says_why(open_bench, caplog):
    bench = await open_bench()
    sealed_by(bench, "the first machine's secret " * 2)
    await begin_and_die(bench, "a")
    sealed_by(bench, "another machine's secret " * 2)
    result = await bench.step("a").run()
    assert [request.rollout_id for request in bench.agents.requests] == ["a.0.g1", "a.1.g1"]
    assert result.report.outcomes[Outcome.COMPLETED] == 2
    assert result.report.resumed == 0
    assert await bench.quarantined() == []
    assert "with another secret" in caplog.text
    assert "gateway.secret" in caplog.text


async def test_a_forged_trajectory_is_no_result_and_is_kept_as_evidence(open_bench):
    bench = await open_bench("group.min_viable=1")
    sealed_by(bench, "the machine's own secret " * 2)

    async def behave(agents, request):
        other = request.model_copy(update={"rollout_id": "a.0", "session_id": "another-session"})
        stolen = agents.result(other).seal if request.rollout_id == "a.1" else agents.result(request).seal
        await agents.complete(request, seal=stolen)

    async def complete(agents, request, **more):
        """Without a seal of its own."""
        rollout = type(agents).result(agents, request, **more)
        await agents.put(request, rollout.encode())
        await agents.announce(request)

    bench.agents.complete = complete.__get__(bench.agents)
    bench.agents.behave = behave
    result = await bench.step("a").run()
    [failure] = result.failures
    assert (failure.rollout_id, failure.outcome, failure.reason) == ("a.1", Outcome.INFRA_ERROR, "invalid_result")
    assert "seal: is of rollout_id 'a.0'" in failure.message
    [record] = await bench.quarantined()
    assert record["reason"].startswith("seal: ")
