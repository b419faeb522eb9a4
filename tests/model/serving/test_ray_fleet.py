"""Real Ray on this machine, with one logical GPU, and fake engines in place of SGLang."""

import asyncio
import importlib
import sys
import threading

import pytest

from builders import eventually
from rollout_backend.errors import StartupError
from rollout_backend.model.serving import ray_servers
from rollout_backend.model.serving.engine import is_healthy
from rollout_backend.model.serving.ray_servers import RayEngine
from tests.model.serving.conftest import FAKE_ENGINE


@pytest.fixture(scope="module")
def ray():
    import ray

    ray.init(address="local", num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture
def command():
    """A command that Ray's workers get by value, because they cannot import this module."""
    python, script = sys.executable, str(FAKE_ENGINE)

    def make(model, serving, node):
        import os

        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"  # the GPU that Ray assigned to the actor
        assert node.first_gpu == 0  # the index among the assigned GPUs
        return [python, "-S", script, node.host, str(node.port), model.name or "healthy"], {}

    return make


async def test_a_head_that_hangs_does_not_hold_the_end_of_a_run(make_config, tmp_path, monkeypatch):
    free = threading.Event()
    # `ray.util` has a function of the module's name.
    groups = importlib.import_module("ray.util.placement_group")
    monkeypatch.setattr(groups, "remove_placement_group", lambda _: free.wait(300))
    monkeypatch.setattr(ray_servers, "_STOP_S", 0.05)
    config = make_config(serving={"kind": "ray"})
    engine = RayEngine("engine-0", config.model, config.serving, tmp_path / "engine-0.log")
    engine._group = object()
    async with asyncio.timeout(60):
        await engine.stop()
    with pytest.raises(StartupError, match=r"the head of the Ray cluster did not answer within 0\.05 s"):
        await ray_servers._ask(lambda: free.wait(300), 0.05)
    free.set()


async def reserved(engine: RayEngine) -> list[str]:
    """Reserve the engine's machines; return what it waited for."""
    return [waiting_for async for waiting_for in engine.reserve()]


@pytest.mark.slow
async def test_death_of_the_actor_ends_the_engine(ray, command, make_config, tmp_path):
    config = make_config(serving={"kind": "ray", "startup_timeout_s": 120})
    engine = RayEngine("engine-0", config.model, config.serving, tmp_path / "log", command)
    await reserved(engine)
    await engine.start()
    waiting = asyncio.create_task(engine.wait())
    ray.kill(engine._nodes[0].handle)
    assert "Ray actor died" in await asyncio.wait_for(waiting, 120)
    assert "Ray actor died" in await engine.log_tail()

    async def is_gone():
        return not await is_healthy(engine.url)

    await eventually(is_gone)  # the server ends too
    await engine.stop()


@pytest.mark.slow
async def test_ray_engine_that_does_not_start_reports_its_log(ray, command, make_config, tmp_path):
    config = make_config(model={"path": make_config().model.path, "name": "broken"}, serving={"kind": "ray"})
    engine = RayEngine("engine-0", config.model, config.serving, tmp_path / "log", command)
    await reserved(engine)
    with pytest.raises(StartupError, match=r"ended with code 1 before it was up[\s\S]*made of cheese"):
        await engine.start()
    await engine.stop()


@pytest.mark.slow
async def test_missing_gpus_are_reported(ray, command, make_config, tmp_path):
    config = make_config(serving={"kind": "ray", "tensor_parallel": 2, "resources_timeout_s": 0.5})
    engine = RayEngine("engine-0", config.model, config.serving, tmp_path / "log", command)
    message = r"did not have 2 GPUs on one machine free within 0\.5 s .*free are 1 GPUs on 1 machine.*parallel sizes"
    with pytest.raises(StartupError, match=message):
        await reserved(engine)
    await engine.stop()
