"""However a client's call ends, it leaves its session as it was: the next call is read and answered."""

import asyncio

import httpx
import pytest

from builders import user
from gateway_fixtures import make_app, post_raw
from gateway_server import CONTROL_KEY, session_key
from rollout_backend.workbench.local.scripted import Fail, ScriptedEngine

CALL = {"model": "scripted", "messages": [user("Say something.")]}
PATH = "/v1/chat/completions"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", ["answered", "failed", "hung up", "stopped"])
async def test_a_session_with_one_call_at_a_time_makes_the_next_one(byte_model, byte_bundle, held, stream, end):
    waits = end in ("hung up", "stopped")
    first = {"answered": "ok", "failed": Fail(500)}.get(end) or (held.pieces("Once ") if stream else None)
    script = iter([first or held, "next"])
    headers = {"Authorization": f"Bearer {session_key('s1')}"}
    gone = asyncio.Event()

    async def send(message: dict) -> None:
        pass

    def reply(prompt: str) -> object:
        script_reply = next(script)
        return script_reply(prompt) if callable(script_reply) else script_reply

    with ScriptedEngine(reply) as engine:
        app = make_app(engine.url, byte_model, byte_bundle, gateway={"max_session_calls": 1}, engine_attempts=1)
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://g") as http,
        ):
            call = asyncio.create_task(post_raw(app, PATH, {**CALL, "stream": stream}, headers, gone, send))
            if waits:
                assert await asyncio.to_thread(held.asked.acquire, timeout=120)
                gone.set() if end == "hung up" else call.cancel()
            await asyncio.wait([call], timeout=120)
            assert call.cancelled() if end == "stopped" else call.result() is None
            held.go.set()
            answer = await http.post(PATH, json=CALL, headers=headers, timeout=120)
            assert answer.json()["choices"][0]["message"]["content"] == "next"
            control = {"Authorization": f"Bearer {CONTROL_KEY}"}
            stats = (await http.get("/control/stats", headers=control)).json()
            assert (stats["calls_in_flight"], stats["client_disconnects"]) == (0, end == "hung up")
