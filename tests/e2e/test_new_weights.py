"""New weights for a real SGLang server while agents call it, and its death, on the CPU in float32."""

import asyncio
import os
import signal

import pytest

from agent_wrapper.contract import Outcome
from rollout_backend.core.tasks import read_tasks
from rollout_backend.manager import RolloutManager
from rollout_backend.model.serving.install import find_engine
from rollout_backend.testing.forward_pass import reference_logprobs
from rollout_backend.workbench.local.cloud import LocalCloud
from tiny_engine import (
    check_versions,
    cpu_config,
    engine_url,
    make_models,
    requests_run,
    server_process,
    versions_of,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


async def test_an_update_and_a_kill_lose_no_rollout_and_each_token_is_of_its_version(
    repository, tmp_path, monkeypatch
):
    example = repository / "examples" / "arithmetic"
    first, second = tmp_path / "first", tmp_path / "second"
    make_models(find_engine(), repository, first, second)
    async with LocalCloud(example / "agent.py", run_dir=tmp_path / "logs") as cloud:
        for name, value in cloud.environ.items():
            monkeypatch.setenv(name, value)
        tasks = read_tasks(example / "tasks.jsonl")[:2]
        async with RolloutManager(cpu_config(cloud, first, tmp_path)) as manager:
            collecting = asyncio.create_task(manager.collect(tasks))
            await asyncio.wait_for(requests_run(manager), 120)
            update = await manager.update_weights(second)
            assert (update.version, update.failed) == (1, {})
            crossed = await collecting
            collecting = asyncio.create_task(manager.collect(tasks))
            await asyncio.wait_for(requests_run(manager), 120)
            os.killpg(server_process(engine_url(manager)), signal.SIGKILL)
            restarted = await collecting
        assert (await cloud.sessions())["sessions"] == []
    assert ("0", "1") in versions_of(crossed) <= {("0",), ("0", "1"), ("1",)}
    assert versions_of(restarted) == {("1",)}
    rollouts = [*crossed.rollouts, *restarted.rollouts]
    assert [rollout.outcome for rollout in rollouts] == [Outcome.COMPLETED] * 16
    segments = [segment for rollout in rollouts for segment in rollout.segments]
    assert len(segments) == 16  # one turn each, and no broken history
    sequences = [list(segment.token_ids) for segment in segments]
    passes = {
        version: await asyncio.to_thread(reference_logprobs, find_engine(), model, sequences)
        for version, model in (("0", first), ("1", second))
    }
    check_versions(segments, passes)
