"""verl's load balancer over Ray actors: the middleware finds the version in the actor that runs its server."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import uvicorn
from starlette.applications import Starlette
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from rollout_backend.model.serving.server_process import free_port
from rollout_backend.verl import verl_api
from rollout_backend.verl.server_list import ServerList, VllmServers
from rollout_backend.verl.vllm_middleware import INFO, WeightVersions

pytestmark = pytest.mark.slow


@ray.remote
class Server:
    """Asynchronous, as verl's `vLLMHttpServer`: `engine` is the engine client of vLLM's app, which it serves."""

    def __init__(self, global_steps: int) -> None:
        self.engine = SimpleNamespace(model_config=SimpleNamespace(logprobs_mode="processed_logprobs"))
        self.global_steps = global_steps
        app = Starlette()
        app.state.engine_client = self.engine
        app.add_middleware(WeightVersions)
        self._port = free_port()
        server = uvicorn.Server(uvicorn.Config(app, port=self._port, log_level="error"))
        threading.Thread(target=asyncio.run, args=(server.serve(),), daemon=True).start()
        while not server.started:
            threading.Event().wait(0.01)

    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    async def set_global_steps(self, global_steps: int) -> None:
        self.global_steps = global_steps


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def version_at(address: str) -> Any:
    with urllib.request.urlopen(f"http://{address}{INFO}", timeout=120) as reply:
        return json.load(reply)["weight_version"]


def test_servers_report_the_version_of_their_actor_as_they_join() -> None:
    actors = [Server.remote(step) for step in (7, 8)]
    first, second = ray.get([actor.address.remote() for actor in actors])
    balancer = ray.remote(GlobalRequestLoadBalancer).remote({first: actors[0]})
    servers = VllmServers(balancer)
    assert version_at(first) is None

    assert servers.addresses() == [first]
    assert version_at(first) == "7"

    ray.get(balancer.add_servers.remote({second: actors[1]}))
    assert servers.addresses() == sorted([first, second])
    ray.get(actors[1].set_global_steps.remote(9))
    assert (version_at(first), version_at(second)) == ("7", "9")


@ray.remote
class Silent:
    """A load balancer that takes calls and answers none."""

    async def get_all_servers(self) -> None:
        await asyncio.Event().wait()


async def test_the_list_stays_unchanged_if_verl_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl_api, "ANSWER_S", 0.5)
    addresses = VllmServers(Silent.remote()).addresses
    followed: list[str] = []

    async def follow(urls: Sequence[str]) -> None:
        followed[:] = urls

    servers = ServerList(["http://a"], lambda: asyncio.to_thread(addresses), follow, labelled=True)
    async with asyncio.timeout(60):
        await servers.begin_batch(3)
    assert followed == ["http://a"]
