"""Real Ray on this machine, with one GPU in its books, and fake engines in place of SGLang."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from rollout_backend.errors import StartupError
from rollout_backend.serving.engine import is_healthy
from rollout_backend.serving.fleet import Fleet
from rollout_backend.serving.ray_fleet import RayEngine, ray_engines

FAKE_ENGINE = Path(__file__).parent / "fake_engine.py"


@pytest.fixture(scope="module")
def ray():
    import ray

    ray.init(num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture
def command():
    """Crosses into Ray's workers by value, for they cannot import this module."""
    python, script = sys.executable, str(FAKE_ENGINE)

    def make(model, serving, host, port, first_gpu):
        import os

        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"  # Ray says which GPUs are the actor's
        assert first_gpu == 0  # counted among these
        return [python, "-S", script, host, str(port), model.name or "healthy"], {}

    return make


async def is_gone(url: str) -> bool:
    for _ in range(200):
        if not await is_healthy(url):
            return True
        await asyncio.sleep(0.05)
    return False


def test_the_package_does_not_import_ray():
    script = (
        "import sys, rollout_backend.serving.fleet, rollout_backend.serving.ray_fleet; sys.exit('ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


async def test_an_engine_is_placed_dies_and_comes_back(ray, command, make_config, tmp_path, until):
    config = make_config(serving={"kind": "ray", "startup_timeout_s": 30})
    events = []
    make_engine = await ray_engines(config.model, config.serving, tmp_path, command)
    async with Fleet(config, tmp_path, events.append, make_engine=make_engine) as fleet:
        assert ray.available_resources().get("GPU", 0) == 0  # the actor holds it
        (url,) = fleet.engine_urls
        assert url.startswith(f"http://{ray.util.get_node_ip_address()}:")

        async def served_by():
            async with aiohttp.ClientSession() as http, http.post(f"{fleet.router_url}/generate", json={}) as reply:
                return (await reply.json())["pid"]

        pid = await served_by()
        os.kill(pid, signal.SIGKILL)
        await until(
            lambda: [event.kind for event in events if event.server == "engine-0"][1:] == ["died", "restarted"]
        )
        died = next(event for event in events if event.kind == "died")
        assert "ended with code -9" in died.detail
        assert "engine-0.log" in died.detail
        assert await served_by() != pid


async def test_the_death_of_the_actor_is_the_death_of_the_engine(ray, command, make_config, tmp_path):
    config = make_config(serving={"kind": "ray", "startup_timeout_s": 30})
    engine = RayEngine("engine-0", config.model, config.serving, tmp_path / "log", command)
    await engine.start()
    waiting = asyncio.create_task(engine.wait())
    ray.kill(engine._actor.handle)
    assert "Ray actor died" in await asyncio.wait_for(waiting, 20)
    assert "Ray actor died" in await engine.tail()
    assert await is_gone(engine.url)  # the server itself goes too
    await engine.stop()


async def test_an_engine_that_does_not_come_up_says_why(ray, command, make_config, tmp_path):
    config = make_config(model={"path": make_config().model.path, "name": "broken"}, serving={"kind": "ray"})
    engine = RayEngine("engine-0", config.model, config.serving, tmp_path / "log", command)
    with pytest.raises(StartupError, match=r"ended with code 1 before it was up[\s\S]*made of cheese"):
        await engine.start()
    await engine.stop()


async def test_no_gpu_left(ray, command, make_config, tmp_path):
    config = make_config(serving={"kind": "ray", "tensor_parallel": 2, "startup_timeout_s": 0.5})
    engine = RayEngine("engine-0", config.model, config.serving, tmp_path / "log", command)
    with pytest.raises(StartupError, match=r"no machine of the Ray cluster had 2 GPUs free.*tensor_parallel"):
        await engine.start()
    await engine.stop()
