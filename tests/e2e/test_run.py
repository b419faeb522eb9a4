import asyncio
import json
import math

import httpx
import pytest

from agent_wrapper.contract import Outcome, Rollout
from agent_wrapper.contract.keys import traceparent
from builders import eventually
from rollout_backend.core.tasks import Task
from rollout_backend.errors import ServingError
from rollout_backend.model.serving.server_process import free_port
from rollout_backend.workbench.local.scripted import Fail
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


FAILURES = {
    "never call the model": (Outcome.AGENT_ERROR, "no_model_call", ""),
    "raise": (Outcome.AGENT_ERROR, "agent_exception", "no such answer"),
    "nan": (Outcome.AGENT_ERROR, "bad_reward", "nan"),
    "text": (Outcome.AGENT_ERROR, "bad_reward", "The answer is 7."),
    "lose its model": (Outcome.INFRA_ERROR, "model_unavailable", ""),
    "swallow": (Outcome.INFRA_ERROR, "model_unavailable", ""),  # it hides a lost call and returns 0
}


def answer(prompt: str) -> str | Fail:
    return Fail(400) if "Fail!" in prompt else "The answer is 7."


async def test_rollouts_are_validated_and_a_failed_agent_has_an_error_class_and_is_never_trained(collector, open_run):
    """Two steps of one run."""
    sampling = ("sampling.temperature=0.5", "sampling.max_tokens=99")
    port = free_port()
    observe = (f"observe.metrics_port={port}", f"observe.otlp_endpoint={collector.url}")
    run = await open_run(*sampling, *observe, "group.size=2", replies=answer)
    result = await run.manager.collect([Task(name, {}) for name in "abcd"])
    report = result.report
    assert report.balanced
    assert report.outcomes[Outcome.COMPLETED] == 8
    assert report.latency is not None
    assert (report.malformed_tool_calls, report.split_reasons) == ({}, {})
    assert await no_session_is_open(run)
    stats = await run.manager._run.serving.gateways.stats()
    assert (stats.calls, stats.sessions_open, stats.sessions_closed) == (8, 0, 8)
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
    is_token_exact(result.rollouts, run.engine, answer)
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


async def test_a_gateway_that_cannot_restart_ends_the_run_and_leaves_no_session(open_run, held):
    run = await open_run("serving.max_restarts=0", replies=held)
    collecting = asyncio.create_task(run.manager.collect([Task("a", {})]))
    await eventually(lambda: run.engine.requests)
    [shard] = run.manager._run.serving.gateways._shards
    shard._process._process.kill()
    with pytest.raises(ServingError, match="the gateway ended with code"):
        await collecting
    assert await no_session_is_open(run)
