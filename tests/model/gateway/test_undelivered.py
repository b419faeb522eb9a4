"""A reply that no client received, and that no later call continues, is not trained."""

import asyncio
import json
import re
from contextlib import AsyncExitStack

import httpx
import pytest

from agent_wrapper.contract import Trajectory
from builders import assistant, user
from gateway_fixtures import make_app, post_raw
from gateway_server import CONTROL_KEY, session_key
from rollout_backend.model.gateway.sessions import journal_folder
from rollout_backend.workbench.local.scripted import ScriptedEngine

ONE, TWO = user("One?"), user("Two?")


class Client:
    """Calls a gateway in this process, so that a test decides when a client goes."""

    def __init__(self, app, http: httpx.AsyncClient, key: str) -> None:
        self._app, self._http, self._headers = app, http, {"Authorization": f"Bearer {key}"}

    async def stats(self) -> dict:
        control = {"Authorization": f"Bearer {CONTROL_KEY}"}
        return (await self._http.get("/control/stats", headers=control)).json()

    async def post(self, body: dict, path: str = "/v1/chat/completions") -> httpx.Response:
        answer = await self._http.post(path, content=json.dumps(body), headers=self._headers, timeout=60)
        return answer.raise_for_status()

    async def seal(self) -> Trajectory:
        return Trajectory.decode((await self.post({}, "/v1/rollout/trajectory")).content)

    async def lose(self, body: dict) -> None:
        """Make a call whose connection takes no part of the answer, and closes once the engine has finished."""
        calls = (await self.stats())["calls"]
        gone = asyncio.Event()

        async def send(message: dict) -> None:
            if re.search(rb'"content":\s?"[^"]', message.get("body", b"")):  # in a stream, the first part of it
                while (await self.stats())["calls"] == calls:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                gone.set()
                await asyncio.Event().wait()

        async with asyncio.timeout(60):
            await post_raw(self._app, "/v1/chat/completions", body, self._headers, gone, send)


@pytest.fixture
async def start(byte_model, byte_bundle, tmp_path):
    """`await start(*replies)` is a client of a new gateway with one journal."""
    journal_id = journal_folder.prepare(tmp_path / "gateway" / "0-of-1")
    async with AsyncExitStack() as stack:
        running: list[AsyncExitStack] = []

        async def run(*replies: str) -> Client:
            if running:
                await running.pop().aclose()
            running.append(await stack.enter_async_context(AsyncExitStack()))
            engine = running[0].enter_context(ScriptedEngine(replies))
            app = make_app(engine.url, byte_model, byte_bundle, journal=tmp_path / "gateway" / "0-of-1")
            await running[0].enter_async_context(app.router.lifespan_context(app))
            http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")
            await running[0].enter_async_context(http)
            return Client(app, http, session_key("s1", journal_id=journal_id))

        yield run


def said(trajectory: Trajectory) -> list[str]:
    """Return the last message of each row."""
    return [segment.messages[-1]["content"] for segment in trajectory.segments]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("then", "rows", "undelivered"),
    [
        ({"messages": [TWO]}, ["Other words."], 1),
        ({"messages": [ONE]}, ["Some words."], 0),  # a retry gets the answer
        ({"messages": [ONE, assistant("Some words."), TWO]}, ["Other words."], 0),
        (None, [], 1),
    ],
    ids=["forgotten", "retried", "continued", "only call"],
)
async def test_a_reply_counts_if_it_was_received_retried_or_continued(start, stream, then, rows, undelivered):
    client = await start("Some words.", "Other words.")
    asked = {"model": "scripted", "stream": stream}
    await client.lose({**asked, "messages": [ONE]})
    if then is not None:
        await client.post({**asked, **then})
    sealed = await client.seal()
    assert said(sealed) == rows
    assert (await client.stats())["undelivered"] == undelivered
    assert sealed.unanswered_calls == 0
    assert said(await (await start()).seal()) == rows  # after a restart


async def test_a_row_ends_before_the_reply_that_was_lost(start):
    client = await start("First.", "More words.")
    await client.post({"model": "scripted", "messages": [ONE]})
    await client.lose({"model": "scripted", "messages": [ONE, assistant("First."), TWO]})
    (row,) = (await client.seal()).segments
    assert (len(row.turns), row.turns[-1].end, [*row.messages]) == (1, len(row.token_ids), [ONE, assistant("First.")])
