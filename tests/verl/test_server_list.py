"""Servers join and leave during a run, as verl's hybrid engines do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import cast

import pytest
import pytest_asyncio
from aiohttp import web

from builders import eventually, served
from rollout_backend.model.serving.supervisor import EventKind, ServingEvent
from rollout_backend.verl.manager import _ServingLog
from rollout_backend.verl.server_list import UNKNOWN, ServerList


class Server:
    """A fake SGLang server that reports its weight version and accepts a new one."""

    def __init__(self) -> None:
        self.version = "default"
        self.refuses = False
        self.answers = asyncio.Event()
        self.answers.set()
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        await self.answers.wait()
        if request.path == "/model_info":
            return web.json_response({"weight_version": self.version})
        if self.refuses or request.path != "/update_weight_version":
            raise web.HTTPServiceUnavailable
        self.version = (await request.json())["new_version"]
        return web.json_response({})


class Verl:
    """A fake of verl's load balancer and of our router.

    `followed` lists the URLs that the router received last, and `labels` has the servers' versions at that time.
    """

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = {server.url: server for server in servers}
        self.listed = [server.url for server in servers]
        self.followed: list[str] = []
        self.labels: dict[str, str] = {}
        self.down = False

    async def urls(self) -> list[str]:
        if self.down:
            raise RuntimeError("the actor died")
        return list(self.listed)

    async def follow(self, urls: Sequence[str]) -> None:
        self.followed = list(urls)
        self.labels = {url: self.servers[url].version for url in urls}


@pytest_asyncio.fixture
async def verl() -> AsyncIterator[Verl]:
    one, other = Server(), Server()
    async with served(one.handle) as one.url, served(other.handle) as other.url:
        yield Verl([one, other])


async def test_a_returning_server_gets_calls_from_the_next_batch_with_its_new_version(verl: Verl) -> None:
    stays, hybrid = verl.listed
    servers = ServerList(verl.listed, verl.urls, verl.follow)
    await servers.begin_batch(3)
    assert verl.labels == {stays: "3", hybrid: "3"}
    verl.listed = [stays]
    await servers.refresh()
    assert verl.followed == [stays], "it is dropped at once"
    assert verl.servers[hybrid].version == UNKNOWN, "its calls in flight are answered by other weights"
    verl.listed = [stays, hybrid]  # verl adds it before it has its weights
    await servers.refresh()
    assert verl.followed == [stays]
    await servers.begin_batch(5)
    assert verl.labels == {stays: "5", hybrid: "5"}


async def test_a_server_with_a_wrong_version_gets_no_calls(verl: Verl) -> None:
    stays, deaf = verl.listed
    servers = ServerList(verl.listed, verl.urls, verl.follow)
    await servers.begin_batch(3)
    verl.servers[deaf].refuses = True
    await servers.begin_batch(4)
    assert verl.followed == [stays]
    await servers.refresh()
    assert verl.followed == [stays]
    verl.servers[deaf].refuses = False
    await servers.refresh()
    assert verl.labels == {stays: "4", deaf: "4"}


async def test_a_server_that_leaves_gets_no_calls_while_another_one_does_not_answer(verl: Verl) -> None:
    silent = verl.listed[0]
    servers = ServerList(verl.listed, verl.urls, verl.follow)
    await servers.begin_batch(3)
    verl.servers[silent].answers.clear()
    verl.listed = [silent]
    beginning = asyncio.create_task(servers.begin_batch(4))
    await eventually(lambda: verl.followed == [silent])
    verl.servers[silent].answers.set()
    await beginning


async def test_a_server_that_never_reported_a_number_serves_without_a_version(verl: Verl) -> None:
    _, deaf = verl.listed
    verl.servers[deaf].refuses = True
    servers = ServerList(verl.listed, verl.urls, verl.follow)
    await servers.begin_batch(3)
    assert verl.labels[deaf] == "default"


async def test_a_server_that_reports_its_own_number_is_left_alone(verl: Verl) -> None:
    own, other = verl.listed
    verl.servers[own].version = "7"
    servers = ServerList(verl.listed, verl.urls, verl.follow)
    await servers.begin_batch(3)
    assert verl.labels == {own: "7", other: "3"}


async def test_the_list_stays_unchanged_if_verl_does_not_answer(verl: Verl, caplog: pytest.LogCaptureFixture) -> None:
    servers = ServerList(verl.listed, verl.urls, verl.follow)
    await servers.begin_batch(3)
    verl.down = True
    await servers.refresh()
    await servers.begin_batch(4)
    assert verl.followed == verl.listed
    assert set(verl.labels.values()) == {"4"}
    assert "their list stays unchanged" in caplog.text


@pytest.mark.parametrize("ours", ["gateway", "gateway-1", "router", "dialer"])
def test_a_restart_of_ours_is_a_warning_and_its_end_with_the_run_is_none(
    ours: str, caplog: pytest.LogCaptureFixture
) -> None:
    report, killed = _ServingLog(), "it ended with code -9. It was killed for memory"
    events = [(ours, "died", killed), (ours, "restarted", ""), ("engine-0", "died", "ended")]
    for name, kind, detail in [*events, (ours, "died", "it ended with code -15")]:
        report(ServingEvent(0.0, name, cast(EventKind, kind), detail))
    assert caplog.messages == [f"{ours} restarted: {killed}", "engine-0 died: ended"]
