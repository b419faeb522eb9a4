"""A server in front of the gateway whose answer arrives a byte at a time, and never ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from aiohttp import web

from agent_wrapper.contract import ModelEndpoint
from agent_wrapper.model_endpoint import send_heartbeats
from agent_wrapper.shared import trajectory
from builders import background, eventually, served
from wrapper_containers import make_trajectory


class SlowServer:
    """Never ends its first answer, and answers later requests at once."""

    def __init__(self) -> None:
        self.url = ""
        self.heard = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.heard += 1
        if self.heard > 1:
            return web.Response(body=make_trajectory().encode())
        answer = web.StreamResponse(headers={"Content-Length": str(2**20)})
        await answer.prepare(request)
        with suppress(ConnectionError):
            while True:
                await answer.write(b" ")
                await asyncio.sleep(0.01)
        return answer


@pytest.fixture
async def server() -> AsyncIterator[SlowServer]:
    made = SlowServer()
    async with served(made.handle, handler_cancellation=True, shutdown_timeout=0.1) as made.url:
        yield made


async def test_the_next_heartbeat_is_sent(server: SlowServer) -> None:
    async with background(send_heartbeats(server.url, "key", 0.3)):
        await eventually(lambda: server.heard >= 3)


async def test_a_trajectory_is_asked_for_again(server: SlowServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectory, "_TRY_S", 0.3)
    endpoint = ModelEndpoint(base_url=server.url, api_key="key", name="m", trajectory_url=server.url)
    found = await trajectory.fetch_trajectory(endpoint, 120.0)
    assert found.encode() == make_trajectory().encode()
    assert server.heard == 2


async def test_a_trajectory_that_does_not_arrive_in_time_is_unavailable(server: SlowServer) -> None:
    endpoint = ModelEndpoint(base_url=server.url, api_key="key", name="m", trajectory_url=server.url)
    with pytest.raises(trajectory.TrajectoryUnavailable, match="could not be asked"):
        await trajectory.fetch_trajectory(endpoint, 0.5)
