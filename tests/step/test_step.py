"""The invariants of a step, each broken on purpose: messages lost and forged, results damaged, agents gone."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from agent_wrapper.contract import Outcome, Sampling
from rollout_backend.atomic_file import write_file
from rollout_backend.core.report import StepResult
from rollout_backend.core.tasks import Task
from rollout_backend.errors import RuntimeUnavailable, ServingError, Throttled
from rollout_backend.observe.archive import RunArchive
from rollout_backend.step.step import Step


def ended_well(step, result: StepResult, agents) -> None:
    """What holds at the end of any step."""
    assert sum(result.report.outcomes.values()) == result.report.planned
    assert result.report.balanced
    assert not step.ledger.open_sessions
    assert set(agents.stopped) >= set(agents.sessions)
    assert {rollout.rollout_id for group in result.groups for rollout in group.rollouts} == {
        rollout.rollout_id for rollout in result.rollouts if rollout.trainable
    }


async def test_each_rollout_arrives_once_and_its_session_is_closed(open_bench):
    bench = await open_bench()
    step = bench.step("task-a", "task-b")
    result = await step.run()
    ended_well(step, result, bench.agents)
    assert result.report.outcomes[Outcome.COMPLETED] == 4
    assert {rollout.rollout_id for rollout in result.rollouts} == {"task-a.0", "task-a.1", "task-b.0", "task-b.1"}
    assert [group.usable for group in result.groups] == [True, True]
    assert len(bench.kept) == 4
    assert sorted(bench.agents.stopped) == sorted(request.session_id for request in bench.agents.requests)
    assert sorted(bench.revoked) == sorted(bench.agents.stopped)


async def test_a_full_disk_costs_the_local_copies_alone(open_bench, tmp_path, caplog):
    bench = await open_bench()
    folder = tmp_path / "rollouts" / "00000000"
    folder.mkdir(parents=True)

    def write(path: Path, data: bytes) -> None:
        if path.name.startswith("task-a"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_file(path, data)

    bench.services = replace(bench.services, archive=RunArchive(tmp_path, write).write_rollout)
    step = bench.step("task-a", "task-b")
    result = await step.run()
    ended_well(step, result, bench.agents)
    assert result.report.outcomes[Outcome.COMPLETED] == 4
    assert result.report.unarchived == 2
    assert "No space left on device" in caplog.text
    assert sorted(path.name for path in folder.iterdir()) == ["task-b.0", "task-b.1"]


async def test_doubled_announcements_change_nothing(open_bench):
    bench = await open_bench()

    async def repeatedly(agents, request):
        times = {"task-a.1": 3, "task-b.0": 0}.get(request.rollout_id, 2)  # b.0 keeps the step open meanwhile
        await agents.put(request, agents.result(request).encode())
        if times:
            await agents.announce(request, times=times)

    bench.agents.behave = repeatedly
    step = bench.step("task-a", "task-b")
    running = asyncio.create_task(step.run())
    async with asyncio.timeout(100):
        while step.ledger.duplicates < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    waiting = next(request for request in bench.agents.requests if request.rollout_id == "task-b.0")
    await bench.agents.announce(waiting)
    result = await running
    ended_well(step, result, bench.agents)
    assert result.report.outcomes[Outcome.COMPLETED] == 4
    assert result.report.duplicates == 4
    assert len(bench.kept) == 4


async def test_lost_announcements_are_found_by_listing(open_bench):
    bench = await open_bench("collect.list_after_idle_s=0.3")

    async def silent(agents, request):
        await agents.put(request, agents.result(request).encode())

    bench.agents.behave = silent
    step = bench.step()
    result = await step.run()
    ended_well(step, result, bench.agents)
    assert result.report.outcomes[Outcome.COMPLETED] == 2
    assert not result.report.deadline_reached


async def test_a_lost_announcement_is_found_among_others(open_bench, monkeypatch):
    bench = await open_bench("collect.list_after_idle_s=0.3", "group.size=1")

    async def one_is_lost(agents, request):
        await agents.put(request, agents.result(request).encode())
        while True:  # as many agents do that finish meanwhile
            await agents.announce(request, key=f"runs/{bench.config.run_id}/steps/00000009/another.0")
            await asyncio.sleep(0.05)

    async def too_late(*_):
        raise AssertionError("it was found at its deadline alone")

    bench.agents.behave = one_is_lost
    step = bench.step()
    monkeypatch.setattr(step._absence_check, "ask", too_late)
    result = await step.run()
    ended_well(step, result, bench.agents)
    assert result.report.outcomes[Outcome.COMPLETED] == 1


async def test_a_run_without_a_queue_ends_the_same(open_bench):
    bench = await open_bench("queue.enabled=false", "collect.list_interval_s=0.1")

    async def silent(agents, request):
        assert request.result.queue_url is None
        await agents.put(request, agents.result(request).encode())

    bench.agents.behave = silent
    step = bench.step("task-a", "task-b")
    result = await step.run()
    ended_well(step, result, bench.agents)
    assert result.report.outcomes[Outcome.COMPLETED] == 4


async def test_a_queue_that_is_deleted_in_mid_run_costs_time_only(open_bench):
    bench = await open_bench("collect.list_interval_s=0.1")
    deleted = asyncio.Event()

    async def after_the_deletion(agents, request):
        if not deleted.is_set():
            deleted.set()
            await agents.sqs.delete_queue(QueueUrl=request.result.queue_url)
        await agents.put(request, agents.result(request).encode())

    bench.agents.behave = after_the_deletion
    step = bench.step()
    result = await step.run()
    ended_well(step, result, bench.agents)
    assert result.report.outcomes[Outcome.COMPLETED] == 2


async def test_messages_that_cannot_be_understood_are_refused_with_evidence_and_stop_nothing(open_bench):
    bench = await open_bench()
    foreign = f"runs/{bench.config.run_id}/steps/00000000/task-a.0"

    async def noisy(agents, request):
        if request.rollout_id == "task-a.0":
            await agents.say(request, "not json")
            await agents.say(request, '{"Records": [{"s3": {}}]}')
            await agents.say(request, '{"Event": "s3:TestEvent"}')
            await agents.announce(request, bucket="somebody-elses", key=foreign)
            await agents.announce(request, key="runs/another-run/steps/00000000/task-a.0")
            await agents.announce(request, key=f"runs/{bench.config.run_id}/steps/00000000/../../x")
            await agents.announce(request, key=f"runs/{bench.config.run_id}/steps/00000000/never-planned.0")
            await agents.announce(request, key=f"runs/{bench.config.run_id}/steps/00000009/task-a.0")
        await agents.complete(request)

    bench.agents.behave = noisy
    step = bench.step("task-a", "task-b")
    running = asyncio.create_task(step.run())
    result = await running
    ended_well(step, result, bench.agents)
    assert result.report.outcomes[Outcome.COMPLETED] == 4
    buffer = bench.services.buffer
    async with asyncio.timeout(20):  # the step may have ended before the last of them was read
        while buffer.refused < 5 or buffer.stale + step.ledger.unknown < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    reasons = " ".join(record["reason"] for record in await bench.quarantined())
    for wanted in ("body: not JSON", "Records.0.s3.bucket: missing", "'somebody-elses' is not this run's bucket"):
        assert wanted in reasons


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda body: b"", "has 0 bytes"),
        (lambda body: body[: len(body) // 2], "damaged or cut short"),
        (lambda body: b"hello", "neither a zstd frame nor a JSON object"),
        (lambda body: b'{"schema_version": 99}', "schema_version: is 99"),
        (lambda body: b"{" + b" " * 3000, "more than the cap"),
        (lambda body: b'{"schema_version": 1}', "missing|Field required"),
    ],
)
async def test_a_damaged_result_is_an_infrastructure_error_with_evidence(open_bench, damage, match):
    bench = await open_bench("storage.max_result_bytes=2048", "group.min_viable=1")

    async def damaged(agents, request):
        body = agents.result(request).encode()
        await agents.put(request, damage(body) if request.rollout_id == "task-a.0" else body)
        await agents.announce(request)

    bench.agents.behave = damaged
    step = bench.step()
    result = await step.run()
    ended_well(step, result, bench.agents)
    assert result.report.outcomes[Outcome.INFRA_ERROR] == 1
    assert result.report.reasons == {"infra_error: invalid_result": 1}
    [failure] = result.failures
    [record] = await bench.quarantined()
    for text in (failure.message, record["reason"]):
        assert any(part in text for part in match.split("|")), text


async def test_a_result_that_speaks_for_another_rollout_is_refused(open_bench):
    bench = await open_bench("group.min_viable=1")

    async def swapped(agents, request):
        more = {"rollout_id": "task-a.1"} if request.rollout_id == "task-a.0" else {}
        await agents.complete(request, **more)

    bench.agents.behave = swapped
    step = bench.step()
    result = await step.run()
    ended_well(step, result, bench.agents)
    [failure] = result.failures
    assert failure.rollout_id == "task-a.0"
    assert "rollout_id: is 'task-a.1' in the result of 'task-a.0'" in failure.message


async def test_an_announcement_of_a_missing_object_does_not_end_the_step(open_bench):
    bench = await open_bench()

    async def too_early(agents, request):
        await agents.announce(request)
        while not bench.services.buffer.dangling:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await agents.complete(request)

    bench.agents.behave = too_early
    step = bench.step()
    result = await step.run()
    ended_well(step, result, bench.agents)
    assert result.report.outcomes[Outcome.COMPLETED] == 2


async def test_an_agents_error_trains_only_if_the_agent_scored_it(open_bench):
    bench = await open_bench("group.min_viable=1")

    async def fail(agents, request):
        await agents.fail(request, reward=-1.0 if request.rollout_id == "task-a.0" else None)

    bench.agents.behave = fail
    step = bench.step()
    result = await step.run()
    ended_well(step, result, bench.agents)
    assert result.report.outcomes[Outcome.AGENT_ERROR] == 2
    [group] = result.groups
    assert [rollout.reward for rollout in group.rollouts] == [-1.0]


async def test_an_infrastructure_failure_is_never_a_reward(open_bench):
    bench = await open_bench("group.min_viable=1")

    async def half(agents, request):
        if request.rollout_id == "task-a.0":
            await agents.fail(request, Outcome.INFRA_ERROR)
        else:
            await agents.complete(request)

    bench.agents.behave = half
    step = bench.step()
    result = await step.run()
    ended_well(step, result, bench.agents)
    [group] = result.groups
    assert [rollout.rollout_id for rollout in group.rollouts] == ["task-a.1"]
    assert result.report.groups[0].mean_reward == 1.0


async def test_what_the_infrastructure_took_is_replaced_one_by_one(open_bench):
    bench = await open_bench("group.policy=replace", "group.size=3", "group.max_replacements=2")

    async def lose_one(agents, request):
        if request.rollout_id == "task-a.1":
            await agents.fail(request, Outcome.INFRA_ERROR)
        else:
            await agents.complete(request)

    bench.agents.behave = lose_one
    step = bench.step()
    result = await step.run()
    ended_well(step, result, bench.agents)
    assert result.report.planned == 4
    assert result.report.replacements == 1
    assert [rollout.rollout_id for rollout in result.groups[0].rollouts] == ["task-a.0", "task-a.2", "task-a.3"]


async def test_an_agent_that_is_never_heard_of_again_times_out_and_the_others_count(open_bench):
    bench = await open_bench(
        "timeouts.model_call_s=0.1", "timeouts.agent_s=0.5", "timeouts.publish_grace_s=0.5", "group.min_viable=1"
    )

    async def one_vanishes(agents, request):
        await (agents.vanish(request) if request.rollout_id == "task-a.0" else agents.complete(request))

    bench.agents.behave = one_vanishes
    step = bench.step()
    result = await step.run()
    ended_well(step, result, bench.agents)
    assert result.report.reasons == {"timed_out: no_result": 1}
    assert result.failures[0].session_id in result.failures[0].message
    assert result.report.outcomes[Outcome.COMPLETED] == 1
    assert not result.report.deadline_reached


async def test_before_a_rollout_is_timed_out_s3_is_asked(open_bench):
    bench = await open_bench("timeouts.model_call_s=0.1", "timeouts.agent_s=0.5", "timeouts.publish_grace_s=0.5")

    async def unannounced(agents, request):
        await agents.put(request, agents.result(request).encode())

    bench.agents.behave = unannounced
    step = bench.step()
    result = await step.run()
    assert result.report.outcomes[Outcome.COMPLETED] == 2


async def test_at_the_deadline_the_step_ends_with_what_has_arrived(open_bench):
    bench = await open_bench(
        "timeouts.model_call_s=0.1", "timeouts.agent_s=0.5", "timeouts.publish_grace_s=0.4",
        "timeouts.collection_s=1.0", "runtime.max_sessions=2", "group.size=4", "group.min_viable=1",
    )  # fmt: skip

    async def mixed(agents, request):
        await (agents.complete(request) if request.rollout_id == "task-a.0" else hang(request))

    async def hang(request):
        await asyncio.Event().wait()

    bench.agents.behave = mixed
    step = bench.step()
    result = await step.run()
    ended_well(step, result, bench.agents)
    assert result.report.outcomes[Outcome.COMPLETED] == 1
    assert result.report.outcomes[Outcome.TIMED_OUT] >= 1
    assert len(bench.agents.sessions) == 0


async def test_the_target_ends_a_step_early_and_stops_the_rest(open_bench):
    bench = await open_bench("group.target_groups=1")

    async def only_a(agents, request):
        await (agents.complete(request) if request.task_id == "task-a" else asyncio.Event().wait())

    bench.agents.behave = only_a
    step = bench.step("task-a", "task-b")
    result = await step.run()
    ended_well(step, result, bench.agents)
    assert result.report.reasons == {"cancelled: target_reached": 2}
    assert [group.usable for group in result.groups] == [True, False]
    assert set(bench.revoked) == {request.session_id for request in bench.agents.requests}


async def test_a_cancelled_agent_samples_no_more_though_the_step_goes_on(open_bench):
    bench = await open_bench("group.oversample=1", "group.size=1")
    spare, others_may_end = asyncio.Event(), asyncio.Event()

    async def behave(agents, request):
        if request.rollout_id == "task-a.1":
            spare.set()
            await asyncio.Event().wait()
        await (spare if request.task_id == "task-a" else others_may_end).wait()
        await agents.complete(request)

    bench.agents.behave = behave
    step = bench.step("task-a", "task-b")
    running = asyncio.create_task(step.run())
    async with asyncio.timeout(20):
        while not step.ledger.counts()[Outcome.CANCELLED]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        cancelled = step.ledger.entries["task-a.1"].session_id
        while cancelled not in bench.revoked:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not running.done()
    others_may_end.set()
    assert (await running).report.balanced
    assert len(bench.revoked) == len(set(bench.revoked))
    assert set(bench.revoked) == {request.session_id for request in bench.agents.requests}


async def test_keys_that_could_not_be_revoked_are_revoked_with_the_step(open_bench):
    bench = await open_bench()
    revoke, refused = bench.services.revoke, []

    async def away_at_first(session_ids):
        if not refused:
            refused.extend(session_ids)
            raise ServingError("the gateway is being started again")
        await revoke(session_ids)

    bench.services = replace(bench.services, revoke=away_at_first)
    step = bench.step("task-a", "task-b")
    ended_well(step, await step.run(), bench.agents)
    assert refused
    assert set(bench.revoked) == {request.session_id for request in bench.agents.requests}


async def test_a_late_result_of_an_earlier_step_is_counted_apart(open_bench):
    bench = await open_bench("group.target_groups=1")
    late = []

    async def b_is_late(agents, request):
        if request.step == 0 and request.task_id == "task-b":
            late.append(request)
            await asyncio.Event().wait()
        await agents.complete(request)

    bench.agents.behave = b_is_late
    await bench.step("task-a", "task-b").run()
    for request in late:
        await bench.agents.complete(request)
    second = bench.step("task-b", number=1)
    result = await second.run()
    async with asyncio.timeout(20):
        while bench.services.buffer.stale < len(late):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    ended_well(second, result, bench.agents)
    assert {rollout.step for rollout in result.rollouts} == {1}


async def test_a_submission_that_fails_for_good_is_reported_at_once(open_bench):
    bench = await open_bench("group.min_viable=1")  # else the first loss cancels the other

    async def refuse(request):
        raise RuntimeUnavailable("503 for ever")

    bench.agents.before = refuse
    step = bench.step()
    result = await step.run()
    ended_well(step, result, bench.agents)
    assert result.report.reasons == {"infra_error: runtime_unavailable": 2}
    assert result.report.attempts == 2 * bench.config.runtime.max_attempts
    assert not result.report.deadline_reached


async def test_a_throttled_submission_is_repeated_in_the_same_session(open_bench):
    bench = await open_bench("group.size=1")

    async def throttle_once(request):
        if len(bench.agents.requests) == 1:
            raise Throttled("slow down")

    bench.agents.before = throttle_once
    result = await bench.step().run()
    assert result.report.outcomes[Outcome.COMPLETED] == 1
    first, second = bench.agents.requests
    assert first.session_id == second.session_id  # a refusal opened no session
    assert (first.attempt, second.attempt) == (1, 1)
    assert first.key == second.key


async def test_sessions_open_at_once_are_capped(open_bench):
    bench = await open_bench("group.size=12", "runtime.max_sessions=3")
    peak = 0

    async def count(agents, request):
        nonlocal peak
        peak = max(peak, len(agents.sessions))
        await agents.complete(request)

    bench.agents.behave = count
    step = bench.step()
    result = await step.run()
    ended_well(step, result, bench.agents)
    assert result.report.outcomes[Outcome.COMPLETED] == 12
    assert peak <= 3


async def test_an_interrupted_step_closes_its_sessions(open_bench):
    bench = await open_bench()

    async def hang(agents, request):
        await asyncio.Event().wait()

    bench.agents.behave = hang
    step = bench.step("task-a", "task-b")
    running = asyncio.create_task(step.run())
    async with asyncio.timeout(10):
        while len(bench.agents.sessions) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    opened = set(bench.agents.sessions)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert set(bench.agents.stopped) == opened
    step.ledger.reconcile()
    assert step.ledger.counts()[Outcome.CANCELLED] == 4


async def test_a_run_that_loses_its_engines_ends_every_step_with_the_reason(open_bench):
    bench = await open_bench()

    async def hang(agents, request):
        await asyncio.Event().wait()

    bench.agents.behave = hang
    step = bench.step()
    running = asyncio.create_task(step.run())
    async with asyncio.timeout(10):
        while len(bench.agents.sessions) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    step.abort(ServingError("no engine is left"))
    with pytest.raises(ServingError, match="no engine is left"):
        await running
    step.ledger.reconcile()
    assert {entry.reason for entry in step.ledger.entries.values()} == {"run_failed"}


async def test_what_the_agent_is_told(open_bench):
    bench = await open_bench("sampling.temperature=0.7", "storage.prefix=team/")
    result = await bench.step().run()
    assert result.report.outcomes[Outcome.COMPLETED] == 2
    first, second = bench.agents.requests
    assert first.sampling.temperature == 0.7
    assert first.key == f"team/runs/{bench.config.run_id}/steps/00000000/{first.rollout_id}"
    assert first.deadline - second.deadline < 1.0


async def test_a_task_may_bring_its_own_sampling_and_number(open_bench):
    bench = await open_bench()
    tasks = [Task("greedy", {}, rollouts=1, sampling=Sampling(temperature=0)), Task("plain", {})]
    result = await Step(0, tasks, bench.services, None).run()
    assert result.report.planned == 3
    temperatures = {request.task_id: request.sampling.temperature for request in bench.agents.requests}
    assert temperatures == {"greedy": 0.0, "plain": 1.0}
    assert all(group.usable for group in result.groups)


async def test_an_answer_in_json_is_as_good(open_bench):
    bench = await open_bench()

    async def in_json(agents, request):
        body = agents.result(request).to_json()
        assert json.loads(body)["segments"][0]["logprobs"][0] is None
        await agents.put(request, body)
        await agents.announce(request)

    bench.agents.behave = in_json
    result = await bench.step().run()
    assert result.report.outcomes[Outcome.COMPLETED] == 2


async def test_a_group_is_told_of_once_and_as_soon_as_it_is_settled(open_bench):
    bench = await open_bench("group.target_groups=1")
    told: list[tuple[str, bool, int]] = []

    async def b_waits_for_word_of_a(agents, request):
        if request.task_id == "task-b":
            await asyncio.Event().wait()
        await agents.complete(request)

    bench.agents.behave = b_waits_for_word_of_a
    tasks = [Task("task-a", {}), Task("task-b", {})]
    step = Step(
        0,
        tasks,
        bench.services,
        None,
        on_group=lambda group: told.append((group.task.task_id, group.usable, len(bench.revoked))),
    )
    await step.run()
    # What was cancelled is told of when its sessions can sample no more.
    assert told[0][:2] == ("task-a", True)
    assert told[1] == ("task-b", False, 4)
    assert len(told) == 2


async def test_groups_of_an_aborted_step_are_told_of_too(open_bench):
    bench = await open_bench()
    told = []

    async def hang(agents, request):
        await asyncio.Event().wait()

    bench.agents.behave = hang
    step = Step(0, [Task("task-a", {})], bench.services, None, on_group=told.append)
    running = asyncio.create_task(step.run())
    async with asyncio.timeout(10):
        while len(bench.agents.sessions) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    step.abort(ServingError("no engine is left"))
    with pytest.raises(ServingError):
        await running
    assert [(group.task.task_id, group.usable, group.rollouts) for group in told] == [("task-a", False, ())]


# --- results that carry only messages ---------------------------------------------------------------------

TALK = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


async def tell(agents, request, **more):
    await agents.complete(request, segments=[], conversations=[{"messages": TALK}], **more)


async def in_text(agents, request, **more):
    result = {
        "rollout_data": [{"formatted_request": {"messages": TALK, "tools": None}}],
        "rewards": [0.5],
        "input_id": request.task_id,
        "session_id": request.session_id,
        "attempt": request.attempt,
    }
    await agents.put(request, json.dumps({**result, **more}).encode())
    await agents.announce(request)


@pytest.mark.parametrize("behave", [tell, in_text])
async def test_messages_alone_count_in_evaluation_and_are_not_trained(open_bench, behave):
    bench = await open_bench("group.size=4", "group.policy=strict", "collect.text_format=true")

    async def half(agents, request):
        await (behave(agents, request) if request.task_id == "task-a" else agents.complete(request))

    bench.agents.behave = half
    step = bench.step("task-a", "task-b")
    result = await step.run()
    ended_well(step, result, bench.agents)
    assert result.report.outcomes[Outcome.COMPLETED] == 8, "none is cancelled for want of tokens"
    assert result.report.reasons == {"completed: messages_only": 4}
    assert result.failures == ()
    assert (result.report.trainable, result.report.retokenized) == (4, 0)
    told, sampled = result.groups
    assert (told.rollouts, len(told.messages_only), told.usable) == ((), 4, False)
    assert (len(sampled.rollouts), sampled.messages_only, sampled.usable) == (4, (), True)
    reward = 0.5 if behave is in_text else 1.0
    assert result.report.groups[0].mean_reward == reward
    assert sorted(step.results.rewards()) == [reward] * 4 + [1.0] * 4
    assert all(rollout.messages_only for rollout in bench.kept if rollout.task_id == "task-a")


async def test_messages_are_trained_where_the_settings_allow_it_and_marked(open_bench):
    bench = await open_bench("collect.retokenize=true", "collect.text_format=true")
    bench.agents.behave = in_text
    step = bench.step()
    result = await step.run()
    ended_well(step, result, bench.agents)
    assert result.report.reasons == {}
    assert (result.report.trainable, result.report.retokenized) == (2, 2)
    [group] = result.groups
    assert group.usable
    assert all(rollout.retokenized and rollout.trainable for rollout in group.rollouts)


async def test_an_agent_cannot_mark_segments_as_retokenised_itself(open_bench):
    bench = await open_bench("group.size=1")

    async def forged(agents, request):
        segment = agents.result(request).segments[0].model_dump(mode="json")
        segment["logprobs"] = [None] * len(segment["logprobs"])
        segment["turns"][0]["weight_versions"] = []
        await agents.complete(request, segments=[{**segment, "retokenized": True}])

    bench.agents.behave = forged
    result = await bench.step().run()
    assert result.report.reasons == {"infra_error: invalid_result": 1}
    [record] = await bench.quarantined()
    assert "marked retokenized" in record["reason"]


async def test_a_text_result_that_failed_is_a_failure_and_one_of_another_task_is_refused(open_bench):
    bench = await open_bench("group.size=3", "group.min_viable=1", "collect.text_format=true")

    async def each(agents, request):
        more = {
            "0": {"status_code": 500, "stop_reason": "KeyError"},
            "1": {"status_code": 503},
            "2": {"input_id": "x"},
        }
        await in_text(agents, request, **more[request.rollout_id[-1]])

    bench.agents.behave = each
    step = bench.step()
    result = await step.run()
    ended_well(step, result, bench.agents)
    assert result.report.reasons == {
        "agent_error: status_code": 1,
        "infra_error: status_code": 1,
        "infra_error: invalid_result": 1,
    }
    assert result.report.groups[0].rewards == ()


async def test_a_result_that_does_not_say_when_it_was_done_has_no_lag(open_bench):
    bench = await open_bench("group.size=1", "collect.text_format=true")
    bench.agents.behave = in_text
    result = await bench.step().run()
    assert result.report.lag is None
    assert result.report.latency is not None


async def test_a_fault_in_the_listing_ends_the_step(open_bench, monkeypatch):
    """Else nobody would hear of it, and the step would wait for its deadline."""
    bench = await open_bench("collect.list_after_idle_s=0.1", "queue.wait_s=0")

    async def hang(agents, request):
        await asyncio.Event().wait()

    async def break_down(sink):
        raise RuntimeError("credentials were refreshed, but the refreshed ones are expired")

    bench.agents.behave = hang
    monkeypatch.setattr(bench.services.buffer, "sweep", break_down)
    step = bench.step()
    with pytest.raises(RuntimeError, match="expired"):
        await step.run()
    step.ledger.reconcile()
    assert set(bench.agents.stopped) == {request.session_id for request in bench.agents.requests}
