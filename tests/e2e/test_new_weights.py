"""New weights for a real SGLang server while agents call it, on the CPU in float32."""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from agent_wrapper.contract import Segment
from rollout_backend.config import load_config
from rollout_backend.core.tasks import read_tasks
from rollout_backend.local.cloud import LocalCloud
from rollout_backend.manager import RolloutManager
from rollout_backend.serving.install import find_engine
from rollout_backend.testing.forward_pass import reference_logprobs
from tiny_engine import engine_url, make_models, requests_run, server_process, versions_of

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


async def test_each_token_is_of_its_version_through_an_update_and_a_restart(repository, tmp_path, monkeypatch):
    example = repository / "examples" / "arithmetic"
    first, second = tmp_path / "first", tmp_path / "second"
    make_models(find_engine(), repository, first, second)
    async with LocalCloud(example / "agent.py", run_dir=tmp_path / "logs") as cloud:
        for name, value in cloud.environ.items():
            monkeypatch.setenv(name, value)
        base = {
            "run_id": "new-weights",
            "model": {"path": str(first), "renderer": "chatml"},
            "serving": {"device": "cpu", "dtype": "float32"},
            "sampling": {"temperature": 1.0, "max_tokens": 400},
            "group": {"size": 4, "policy": "strict"},
            "timeouts": {
                "model_call_s": 200, "agent_s": 240, "publish_grace_s": 60, "collection_s": 400, "session_key_s": 500,
            },
            "output_dir": str(tmp_path),
        }  # fmt: skip
        config = load_config(base=base, env={}, top=cloud.settings())
        tasks = read_tasks(example / "tasks.jsonl")[:2]
        async with RolloutManager(config) as manager:
            collecting = asyncio.create_task(manager.collect(tasks))
            await asyncio.wait_for(requests_run(manager), 120)
            update = await manager.update_weights(second)
            assert (update.version, update.failed) == (1, {})
            crossed = await collecting
            os.killpg(server_process(engine_url(manager)), signal.SIGKILL)
            restarted = await manager.collect(tasks)
    assert ("0", "1") in versions_of(crossed) <= {("0",), ("0", "1"), ("1",)}
    assert versions_of(restarted) == {("1",)}
    rollouts = [*crossed.rollouts, *restarted.rollouts]
    assert len(rollouts) == 16
    segments = [segment for rollout in rollouts for segment in rollout.segments]
    await asyncio.to_thread(_check, segments, first, second)


def _check(segments: Sequence[Segment], *models: Path) -> None:
    """Compare each sampled token with the forward passes of all versions."""
    sequences = [list(segment.token_ids) for segment in segments]
    passes = [reference_logprobs(find_engine(), model, sequences) for model in models]
    of_others = []
    for number, segment in enumerate(segments):
        for span in segment.turns[0].weight_versions:
            own, other = passes[int(span.version)][number], passes[1 - int(span.version)][number]
            for at in range(span.start, span.end):
                assert abs(segment.logprobs[at] - own[at]) < 1e-3
                of_others.append(abs(segment.logprobs[at] - other[at]))
    assert sum(of_others) / len(of_others) > 0.05  # the comparison can tell the versions apart
