"""Whole runs with a real model on real SGLang servers, on the CPU in float32."""

import asyncio
import math
import os
import signal

import pytest

from agent_wrapper.contract import Outcome
from rollout_backend.core.tasks import read_tasks
from rollout_backend.local.cloud import LocalCloud
from rollout_backend.manager import RolloutManager
from rollout_backend.serving.install import find_engine, find_model
from rollout_backend.serving.supervisor import ServingEvent
from rollout_backend.testing.forward_pass import reference_logprobs
from tiny_engine import cpu_config, engine_url, server_process

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


async def test_a_killed_engine_loses_no_rollout_and_every_logprob_is_the_models(repository, tmp_path, monkeypatch):
    model, example = find_model(), repository / "examples" / "arithmetic"
    events: list[ServingEvent] = []
    async with LocalCloud(example / "agent.py", run_dir=tmp_path / "logs") as cloud:
        for name, value in cloud.environ.items():
            monkeypatch.setenv(name, value)
        config = cpu_config(cloud, model, tmp_path, "sampling.max_tokens=48", servers=2)
        async with RolloutManager(config, on_serving=events.append) as manager:
            tasks = read_tasks(example / "tasks.jsonl")[:4]
            collecting = asyncio.create_task(manager.collect(tasks))
            await asyncio.wait_for(_tokens_are_sampled(manager), 120)
            os.killpg(server_process(engine_url(manager)), signal.SIGKILL)
            result = await collecting
        assert (await cloud.sessions())["sessions"] == []
    assert result.report.balanced
    assert result.report.outcomes[Outcome.COMPLETED] == 16, result.failures
    assert all(group.usable for group in result.groups)
    assert ("engine-0", "died") in [(event.server, event.kind) for event in events]

    segments = [segment for rollout in result.rollouts for segment in rollout.segments]
    assert len(segments) == 16  # one turn each, and no broken history
    reference = await asyncio.to_thread(
        reference_logprobs, find_engine(), model, [list(segment.token_ids) for segment in segments]
    )
    worst = max(
        abs(math.exp(stored) - math.exp(computed))
        for segment, row in zip(segments, reference, strict=True)
        for stored, computed, sampled in zip(segment.logprobs, row, segment.response_mask, strict=True)
        if sampled
    )
    assert worst < 1e-4


async def _tokens_are_sampled(manager: RolloutManager) -> None:
    while True:
        progress = await manager.progress()
        if progress.gateway is not None and progress.gateway.sampled_tokens:
            return
        await asyncio.sleep(0.2)
