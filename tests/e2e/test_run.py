import asyncio
import functools
import json
import math

import httpx
import pytest

from agent_wrapper.contract import Outcome, Rollout
from agent_wrapper.contract.keys import traceparent
from builders import eventually
from rollout_backend import manager
from rollout_backend.core.ledger import Phase
from rollout_backend.core.tasks import Task, read_tasks
from rollout_backend.errors import CircuitOpen, ServingError
from rollout_backend.local.scripted import Fail
from rollout_backend.serving.server_process import free_port
from rollout_backend.tracing import SpanSender
from tests.emulators.otlp_receiver import OtlpReceiver
from token_exact import is_token_exact

SPANS = {"rollout", "wait for a session", "invoke", "invoke_agent", "chat scripted", "publish", "fetch"}


@pytest.fixture
def collector(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")  # milliseconds
    with OtlpReceiver() as receiver:
        yield receiver


async def no_session_is_open(run) -> bool:
    return (await run.cloud.sessions())["sessions"] == []


async def test_tasks_become_validated_rollouts_through_two_gateways(collector, open_run):
    sampling = ("sampling.temperature=0.5", "sampling.max_tokens=99")
    port = free_port()
    observe = (f"observe.metrics_port={port}", f"observe.otlp_endpoint={collector.url}")
    run = await open_run(*sampling, *observe, "group.size=4", "gateway.processes=2")
    result = await run.manager.collect([Task("a", {}), Task("b", {})])
    report = result.report
    assert report.balanced
    assert report.outcomes[Outcome.COMPLETED] == 8
    assert report.latency is not None
    assert (report.malformed_tool_calls, report.split_reasons) == ({}, {})
    assert await no_session_is_open(run)
    stats = await run.manager._run.serving.gateways.stats()
    assert (stats.calls, stats.sessions_open, stats.sessions_closed) == (8, 0, 8)  # each revoked at its own gateway
    async with httpx.AsyncClient(timeout=60) as client:
        metrics = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    assert 'rollout_rollouts_total{outcome="completed",reason=""} 8.0\n' in metrics
    assert "rollout_gateway_calls_total 8.0\n" in metrics
    assert 'rollout_servers_up{server="engine"} 1.0\n' in metrics
    for rollout in result.rollouts:
        assert rollout.reward == 1.0
        assert rollout.extras == {"answer": "The answer is 7."}
        [segment] = rollout.segments
        assert sum(segment.response_mask) == len("The answer is 7.x")
        for mask, logprob in zip(segment.response_mask, segment.logprobs, strict=True):
            assert math.isnan(logprob) != bool(mask)
    is_token_exact(result.rollouts, run.engine, lambda prompt: "The answer is 7.")
    assert all(body["sampling_params"]["temperature"] == 0.5 for body in run.engine.requests)
    assert report.sampled_tokens == 8 * len("The answer is 7.x")
    wanted = 8 * len(SPANS)
    await eventually(lambda: len({each.span_id for each in collector.spans if each.name != "queue"}) == wanted)
    for rollout in result.rollouts:
        trace_id = traceparent(rollout.run_id, 0, rollout.rollout_id).split("-")[1]
        spans = {span.name: span for span in collector.spans if span.trace_id == trace_id}
        assert spans.keys() - {"queue"} == SPANS  # a result that was found by listing was in no queue
        assert spans["rollout"].attributes["rl.rollout_id"] == rollout.rollout_id
        assert {span.parent_id for span in spans.values()} == {"", spans["rollout"].span_id}
        call, agent = spans["chat scripted"], spans["invoke_agent"]
        assert agent.start <= call.start <= call.end <= agent.end <= spans["fetch"].end <= spans["rollout"].end
    kept = run.manager.archive.find_rollout("a.1")
    assert [Rollout.decode(path.read_bytes()).rollout_id for path in kept] == ["a.1"]
    stored = json.loads((run.config.run_dir / "steps" / "00000000.json").read_text())
    assert stored["planned"] == 8


@pytest.mark.slow
async def test_a_run_that_ends_early_sends_the_spans_of_its_open_steps(collector, open_run, monkeypatch):
    monkeypatch.setattr(manager, "SpanSender", functools.partial(SpanSender, close_s=120))
    run = await open_run("group.size=1", f"observe.otlp_endpoint={collector.url}")
    collecting = asyncio.create_task(run.manager.collect([Task("a", {"do": "never return"})]))

    async def is_running() -> bool:
        return (await run.manager.progress()).phases[Phase.RUNNING] == 1

    await eventually(is_running)
    await run.manager.__aexit__(None, None, None)
    with pytest.raises(asyncio.CancelledError):
        await collecting
    await eventually(
        lambda: [span for span in collector.spans if span.name == "rollout" and "cancelled" in span.error]
    )


@pytest.mark.slow
async def test_a_run_creates_its_runtime_from_an_image(open_run):
    run = await open_run("group.size=1", "runtime.environment={HOUSE: ours}", by_image=True)
    result = await run.manager.collect([Task("a", {"do": "return its environment"})])
    [rollout] = result.rollouts
    assert rollout.extras == {"house": "ours"}
    assert await no_session_is_open(run)


@pytest.mark.slow
async def test_steps_may_follow_one_another_and_overlap(open_run):
    run = await open_run("group.size=1")
    first = await run.manager.collect([Task("a", {})])
    assert (first.step, {rollout.step for rollout in first.rollouts}) == (0, {0})
    results = await asyncio.gather(*(run.manager.collect([Task(f"task-{i}", {})]) for i in range(3)))
    assert sorted(result.step for result in results) == [1, 2, 3]
    assert [result.report.outcomes[Outcome.COMPLETED] for result in results] == [1, 1, 1]
    assert await no_session_is_open(run)


@pytest.mark.slow
async def test_a_scorer_computes_the_rewards_out_of_the_agents_reach(open_run, tmp_path):
    scorer = tmp_path / "scorer.py"
    scorer.write_text(
        "def score(given):\n"
        "    if given.private['answer'] == 'broken': raise LookupError('the judge is down')\n"
        "    return {'reward': 2.0 * (given.private['answer'] in given.reply), 'seen': sorted(given.payload)}\n"
    )
    run = await open_run("group.size=2", f"scoring.function={scorer}:score", "scoring.retry_s=1")
    answers = {"right": "7", "wrong": "8", "lost": "broken"}
    tasks = [Task(name, {"do": "show"}, private={"answer": answer}) for name, answer in answers.items()]
    result = await run.manager.collect(tasks)
    assert result.report.balanced
    rewards = {rollout.rollout_id: rollout.reward for rollout in result.rollouts if rollout.task_id != "lost"}
    assert rewards == {"right.0": 2.0, "right.1": 2.0, "wrong.0": 0.0, "wrong.1": 0.0}
    assert {rollout.reward for rollout in result.rollouts if rollout.task_id == "lost"} == {None}
    assert {failure.task_id for failure in result.failures} == {"lost"}
    archive = run.manager.archive
    [record] = archive.find_records("right.1")
    stored = archive.read_result(record)
    assert (stored.reward, stored.score.agent_reward, stored.extras["seen"]) == (2.0, 1.0, ["do"])
    found = {record.reason for record in result.records if record.task_id == "lost"}
    assert "scorer_failed" in found <= {"scorer_failed", "group_doomed"}
    assert [task.private for task in read_tasks(archive.tasks_file(0))] == [task.private for task in tasks]
    assert await no_session_is_open(run)


FAILURES = {
    "never call the model": (Outcome.AGENT_ERROR, "no_model_call", ""),
    "raise": (Outcome.AGENT_ERROR, "agent_exception", "no such answer"),
    "nan": (Outcome.AGENT_ERROR, "bad_reward", "nan"),
    "text": (Outcome.AGENT_ERROR, "bad_reward", "The answer is 7."),
    "lose its model": (Outcome.INFRA_ERROR, "model_unavailable", ""),
    "swallow": (Outcome.INFRA_ERROR, "model_unavailable", ""),  # it hides a lost call and returns 0
}


async def test_a_failed_agent_has_an_error_class_and_is_never_trained(open_run):
    run = await open_run(
        "group.size=1", replies=lambda prompt: Fail(400) if "Fail!" in prompt else "The answer is 7."
    )
    tasks = {do.replace(" ", "-"): Task(do.replace(" ", "-"), {"do": do}) for do in FAILURES}
    result = await run.manager.collect([*tasks.values(), Task("good", {})])
    assert result.report.balanced
    assert [group.task.task_id for group in result.groups if group.usable] == ["good"]
    assert [group.task.task_id for group in result.groups if group.rollouts] == ["good"]
    failures = {failure.task_id: failure for failure in result.failures}
    assert failures.keys() == tasks.keys()
    for do, (outcome, reason, message) in FAILURES.items():
        failure = failures[do.replace(" ", "-")]
        assert (failure.outcome, failure.reason) == (outcome, reason)
        assert message in failure.message
    assert await no_session_is_open(run)


@pytest.mark.slow
async def test_calls_refused_by_the_engine_stop_the_run_as_infrastructure_errors(open_run):
    run = await open_run(
        *("group.size=2", "circuit_breaker.max_failures=2", "circuit_breaker.min_span_s=0"),
        replies=[Fail(400, "unknown sampling parameter")] * 50,
    )
    with pytest.raises(CircuitOpen, match="unknown sampling parameter") as broken:
        await run.manager.collect([Task("a", {})])
    assert "infra_error, model_unavailable" in str(broken.value)


@pytest.mark.slow
async def test_no_call_reaches_paused_engines(open_run):
    run = await open_run()
    await run.manager.pause_engines()
    assert [server.paused for server in run.manager.servers()] == [False, True]
    collecting = asyncio.create_task(run.manager.collect([Task("a", {})]))

    async def both_wait() -> bool:
        return (await run.manager.progress()).gateway.calls_in_flight == 2

    await eventually(both_wait)
    assert run.engine.requests == []
    await run.manager.resume_engines()
    assert (await collecting).report.outcomes[Outcome.COMPLETED] == 2


@pytest.mark.slow
async def test_a_step_samples_with_an_adapter_of_servers_that_others_run(open_run):
    run = await open_run()
    result = await run.manager.collect([Task("a", {})], adapter="theirs")
    assert {request["lora_path"] for request in run.engine.requests} == {"theirs"}
    assert set(result.report.weight_versions) == {"theirs@0"}
    await run.manager.collect([Task("b", {})])
    assert "lora_path" not in run.engine.requests[-1]


@pytest.mark.slow
async def test_a_gateway_that_cannot_restart_ends_the_run_and_leaves_no_session(open_run, held_back):
    run = await open_run("serving.max_restarts=0", replies=held_back)
    collecting = asyncio.create_task(run.manager.collect([Task("a", {})]))
    await eventually(lambda: run.engine.requests)
    gateway = run.manager._run.serving.gateways
    assert gateway is not None
    (shard,) = gateway._shards
    shard._process._process.kill()
    with pytest.raises(ServingError, match="the gateway ended with code"):
        await collecting
    assert await no_session_is_open(run)
