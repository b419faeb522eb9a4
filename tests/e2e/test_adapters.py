"""Two LoRA adapters on one real engine while agents call it, on the CPU in float32."""

import asyncio

import pytest

from adapters import save_adapter
from rollout_backend.config import EngineName
from rollout_backend.core.tasks import read_tasks
from rollout_backend.errors import ConfigError
from rollout_backend.manager import RolloutManager
from rollout_backend.model.serving.install import find_engine
from rollout_backend.testing.forward_pass import adapter_logprobs
from rollout_backend.workbench.local.cloud import LocalCloud
from tiny_engine import check_versions, cpu_config, make_models, requests_run, versions_of

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
    async with LocalCloud(example / "agent.py", run_dir=tmp_path / "logs") as cloud:
        for name, value in cloud.environ.items():
            monkeypatch.setenv(name, value)
        config = cpu_config(cloud, model, tmp_path, engine=engine_name, lora_rank=4)
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
    assert crossed.step == 0, "the refused call has taken no step"
    assert (versions_of(other), versions_of(plain)) == ({("b@1",)}, {("0",)})
    segments = [
        segment for step in (crossed, other, plain) for rollout in step.rollouts for segment in rollout.segments
    ]
    assert len(segments) == 24
    sequences = [list(segment.token_ids) for segment in segments]
    adapters = {"0": None, "a@1": folders["a1"], "a@2": folders["a2"], "b@1": folders["b1"]}
    passes = await asyncio.to_thread(adapter_logprobs, python, model, sequences, [*adapters.values()])
    check_versions(segments, dict(zip(adapters, passes, strict=True)))
