"""Two LoRA adapters on one real engine while agents call it, on the CPU in float32."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from adapters import save_adapter
from agent_wrapper.contract import Segment
from rollout_backend.config import EngineName, load_config
from rollout_backend.core.tasks import read_tasks
from rollout_backend.errors import ConfigError
from rollout_backend.local.cloud import LocalCloud
from rollout_backend.manager import RolloutManager
from rollout_backend.serving.install import find_engine
from rollout_backend.testing.forward_pass import adapter_logprobs
from tiny_engine import make_models, requests_run, versions_of

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(params=["sglang", "vllm"])
def engine_name(request) -> EngineName:
    if request.param == "vllm":
        request.getfixturevalue("vllm_python")
    return request.param


async def test_each_step_samples_with_its_adapter_and_the_tokens_say_which(
    repository, tmp_path, monkeypatch, engine_name
):
    example = repository / "examples" / "arithmetic"
    model, python = tmp_path / "model", find_engine(engine=engine_name)
    make_models(python, repository, model)
    folders = {name: save_adapter(tmp_path / name, model, seed) for seed, name in enumerate(("a1", "a2", "b1"))}
    passes = {"0": None, "a@1": folders["a1"], "a@2": folders["a2"], "b@1": folders["b1"]}
    async with LocalCloud(example / "agent.py", run_dir=tmp_path / "logs") as cloud:
        for name, value in cloud.environ.items():
            monkeypatch.setenv(name, value)
        base = {
            "run_id": "adapters",
            "model": {"path": str(model), "renderer": "chatml"},
            "serving": {"device": "cpu", "dtype": "float32", "engine": engine_name, "lora_rank": 4},
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
            assert (await manager.load_adapter("a", folders["a1"])).version == 1
            assert (await manager.load_adapter("b", folders["b1"])).version == 1
            with pytest.raises(ConfigError, match=r"no adapter 'c' is loaded, only: a, b"):
                await manager.collect(tasks, adapter="c")
            crossing = asyncio.create_task(manager.collect(tasks, adapter="a"))
            await asyncio.wait_for(requests_run(manager, engine_name), 120)
            others = [asyncio.create_task(manager.collect(tasks, adapter=name)) for name in ("b", "")]
            update = await manager.load_adapter("a", folders["a2"])
            assert (update.version, update.failed, manager.adapters) == (2, {}, {"a": 2, "b": 1})
            crossed, other, plain = [await step for step in (crossing, *others)]
    assert ("a@1", "a@2") in versions_of(crossed) <= {("a@1",), ("a@1", "a@2"), ("a@2",)}
    assert (versions_of(other), versions_of(plain)) == ({("b@1",)}, {("0",)})
    segments = [
        segment for step in (crossed, other, plain) for rollout in step.rollouts for segment in rollout.segments
    ]
    assert len(segments) == 24
    await asyncio.to_thread(_check, segments, python, model, passes)


def _check(segments: Sequence[Segment], python: Path, model: Path, adapters: Mapping[str, Path | None]) -> None:
    """Compare each sampled token with the forward passes with each adapter."""
    sequences = [list(segment.token_ids) for segment in segments]
    tables = adapter_logprobs(python, model, sequences, [*adapters.values()])
    passes = dict(zip(adapters, tables, strict=True))
    of_others = {version: [0.0] for version in adapters}
    for number, segment in enumerate(segments):
        for span in segment.turns[0].weight_versions:
            for at in range(span.start, span.end):
                for version, logprobs in passes.items():
                    difference = abs(segment.logprobs[at] - logprobs[number][at])
                    if version == span.version:
                        assert difference < 1e-3
                    else:
                        of_others[version].append(difference)
    for differences in of_others.values():
        assert sum(differences) / len(differences) > 0.05  # the comparison notices a wrong adapter
