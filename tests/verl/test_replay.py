"""verl's rows of a live step, and those of its folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agent_servers import serve_agent
from agent_wrapper.contract import Rollout
from rollout_backend.config import ExpertShape, load_config
from rollout_backend.core.routed_experts import unpack
from rollout_backend.core.tasks import Task
from rollout_backend.local.cloud import LocalStorage
from rollout_backend.local.scripted import BYTE_MODEL, ScriptedEngine
from rollout_backend.manager import RolloutManager
from rollout_backend.results.replay import replay_step, rows_as_parquet
from rollout_backend.verl.row_formats import legacy_batch, v1_fields, v1_tag
from rollout_backend.verl.rows import rows_of
from tests.emulators.scripted_experts import seeded_routing

SHAPE = ExpertShape(layers=3, topk=2, experts=8)
PROMPT = 16  # shorter than the prompts, so that they continue in the response


@pytest.fixture
def agent(storage: LocalStorage, repository: Path, tmp_path: Path) -> Iterator[str]:
    """Start the arithmetic example as a server and return its URL."""
    with serve_agent(repository / "examples" / "arithmetic" / "agent.py", storage, tmp_path) as url:
        yield url


def plain(value: Any) -> Any:
    """Return a value with its arrays and tensors as bytes, and their types and shapes."""
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def v1_rows(rollouts: Sequence[Rollout], response: int) -> list[Any]:
    rows = [row for rollout in rollouts for row in rows_of(rollout, PROMPT, response, experts=SHAPE)]
    return [(plain(v1_fields(row, {"uid": "u"})), v1_tag(row, 3, 2)) for row in rows]


def legacy_columns(rollouts: Sequence[Rollout], response: int) -> Any:
    made = [rows_of(rollout, PROMPT, response, experts=SHAPE) for rollout in rollouts]
    batch = legacy_batch(made, PROMPT, response, 0, experts=SHAPE)
    return plain(dict(batch.tensors.items())), plain(batch.missing)


@pytest.mark.slow
async def test_the_rows_of_a_replayed_step_are_those_of_the_live_one(local_aws, agent, tmp_path, run_id):
    """They have routed experts, so the calls bypass the router, which drops the request for them."""
    shutil.copytree(BYTE_MODEL, tmp_path / "model")
    experts = {"num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 4096}
    (tmp_path / "model" / "config.json").write_text(json.dumps(experts))
    base = {
        "run_id": run_id,
        "model": {"path": str(tmp_path / "model"), "renderer": "chatml", "routed_experts": True},
        "storage": {"bucket": local_aws.bucket},
        "aws": {"region": local_aws.region, "endpoint_url": local_aws.endpoint_url},
        "runtime": {"kind": "http", "url": agent},
        "output_dir": str(tmp_path / "runs"),
        "queue": {"wait_s": 1},
        "group": {"size": 2},
    }
    with ScriptedEngine(lambda prompt: "It is 7, I think.", routing=seeded_routing(SHAPE)) as engine:
        config = load_config(base={**base, "serving": {"kind": "external", "urls": [engine.url]}})
        async with RolloutManager(config) as manager:
            result = await manager.collect([Task("sum", {"question": "What is 3 + 4?", "answer": "7"})])
    assert result.report.reasons == {}, result.failures
    [group] = result.groups
    replayed = replay_step(config.run_dir)
    assert replayed.failures == {}
    response = group.rollouts[0].segments[0].turns[0].start - PROMPT + 5  # so that each reply is cut after 5 tokens
    assert [row.trained_tokens for each in replayed.rollouts for row in rows_of(each, PROMPT, response)] == [5, 5]
    for segment in group.rollouts[0].segments:
        wanted = seeded_routing(SHAPE)(segment.token_ids[:-1], "0")
        assert np.array_equal(unpack(segment.routed_experts), wanted)
    assert rows_as_parquet(replayed.rollouts) == rows_as_parquet(group.rollouts)
    assert v1_rows(replayed.rollouts, response) == v1_rows(group.rollouts, response)
    assert legacy_columns(replayed.rollouts, response) == legacy_columns(group.rollouts, response)
