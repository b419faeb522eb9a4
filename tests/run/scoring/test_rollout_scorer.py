"""What a scorer is sent, and what S3 keeps of its answer."""

import json
from typing import Any

import msgpack
import pytest

from agent_wrapper.context import Artifacts
from agent_wrapper.contract import Rollout, artifacts_key
from memory_store import MemoryStore
from rollout_backend.core.tasks import Task
from rollout_backend.errors import StoreError
from rollout_backend.run.scoring.rollout_scorer import RolloutScorer
from rollout_backend.run.scoring.scorer import ArtifactLost, ScoreInput
from rollouts import make_rollout

TASK = Task("t", {"q": 1}, private={"answer": "7"})
SHA256 = "a" * 64


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore("p/")


@pytest.fixture
def requests() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def scorer(store: MemoryStore, requests: list[dict[str, Any]]) -> RolloutScorer:
    async def call(request: bytes) -> dict[str, Any]:
        requests.append(msgpack.unpackb(request))
        return {"scorer": "judge", "sha256": SHA256, "reward": float(len(requests))}

    return RolloutScorer(store, "run", call, "judge", SHA256, lambda rollout, data: kept.append(data))


kept: list[bytes] = []


def published(store: MemoryStore, **files: bytes) -> Rollout:
    artifacts = Artifacts()
    for name, content in files.items():
        artifacts.add(name, content)
    packed, listed = artifacts.pack()
    rollout = make_rollout("t.0").model_copy(update={"artifacts": listed})
    store.objects[artifacts_key("p/", "run", rollout.step, "t.0", rollout.attempt)] = packed
    return rollout


async def test_the_scorer_gets_exactly_the_artifacts_that_the_result_lists(store, scorer, requests):
    kept.clear()
    rollout = published(store, patch=b"+1", log=b"x" * 100_000)
    await scorer.compute(rollout, rollout.encode(), TASK)
    assert requests[0]["artifacts"] == {"patch": b"+1", "log": b"x" * 100_000}
    assert (requests[0]["private"], requests[0]["payload"]) == ({"answer": "7"}, {"q": 1})
    [key] = [key for key in store.objects if "/artifacts/" in key]
    assert kept == [store.objects[key]]
    for listed in (published(MemoryStore("p/"), patch=b"-1").artifacts, rollout.artifacts[:1]):
        other = rollout.model_copy(update={"artifacts": listed})
        with pytest.raises(ArtifactLost, match="are not those that the result lists"):
            await scorer.compute(other, b"", TASK)
    del store.objects[key]
    with pytest.raises(ArtifactLost, match="nothing is stored under") as caught:
        await scorer.compute(rollout, rollout.encode(), TASK)
    assert caught.value.reason == "artifact_lost"
    assert len(requests) == 1


async def test_the_scorer_gets_integers_of_any_size(store):
    values = {"power": 2**100, "many": [-(10**3000), 2**64, -(2**63) - 1, 2**64 - 1, 1.5]}
    seen: list[ScoreInput] = []

    async def call(request: bytes) -> dict[str, Any]:
        seen.append(ScoreInput.unpack(request))
        return {"scorer": "judge", "sha256": SHA256, "reward": 1.0}

    rollout = make_rollout("t.0")
    await RolloutScorer(store, "run", call, "judge", SHA256).compute(
        rollout, rollout.encode(), Task("t", values, private=values)
    )
    assert (seen[0].payload, seen[0].private) == (values, values)


async def test_the_first_score_that_is_written_counts(store, scorer):
    rollout = make_rollout("t.0")
    assert await scorer.read(rollout, TASK) is None
    first, second = [await scorer.compute(rollout, rollout.encode(), TASK) for _ in range(2)]
    assert (first.reward, second.reward) == (1.0, 2.0)
    assert await scorer.record(rollout, TASK, first) == first
    assert await scorer.record(rollout, TASK, second) == first
    assert await scorer.read(rollout, TASK) == first
    [key] = store.objects
    assert key.startswith("p/runs/run/scores/00000000/t.0~")
    assert "7" not in json.loads(store.objects[key]).values()
    other = Task("t", {"q": 1}, private={"answer": "8"})
    assert scorer.key(rollout, other) != key
    store.objects[key] = b"garbage"
    assert await scorer.read(rollout, TASK) is None
    with pytest.raises(StoreError, match="is no score"):
        await scorer.record(rollout, TASK, first)
