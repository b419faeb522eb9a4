"""The middleware of verl's vLLM servers, before the gateway's engine client and scripted servers of vLLM 0.24.0."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from agent_wrapper.contract import VersionSpan
from rollout_backend.errors import EngineUnavailable, PreflightError
from rollout_backend.model.gateway.engine.client import EngineClient, EngineRefused
from rollout_backend.model.gateway.engine.engines import Engines
from rollout_backend.model.gateway.engine.protocol import EngineRequest, VllmProtocol
from rollout_backend.model.serving.external_engine import check_vllm
from rollout_backend.verl import vllm_middleware
from rollout_backend.verl.verl_api import ADAPTER
from rollout_backend.verl.vllm_middleware import GENERATE, WeightVersions, attach
from tests.emulators.scripted_vllm import ScriptedVllm

VERLS_ID = 123
PARAMS = {"temperature": 1.0, "max_new_tokens": 40, "stop_token_ids": [2]}


class Engine:
    """vLLM's engine client. `loaded` has the ids of its adapters; None: it was started without --enable-lora."""

    def __init__(self, logprobs_mode: str, loaded: set[int] | None) -> None:
        self.model_config = SimpleNamespace(logprobs_mode=logprobs_mode)
        self.vllm_config = SimpleNamespace(lora_config=None if loaded is None else SimpleNamespace(max_loras=1))
        self.loaded = loaded
        self.loaded_next = loaded  # after the next time that it is asked

    async def list_loras(self) -> set[int]:
        loaded, self.loaded = self.loaded, self.loaded_next
        return loaded or set()


class VerlServer(ScriptedVllm):
    """A vLLM 0.24.0 server with the middleware, and verl's actor in the same process, which has `global_steps`.

    The engine has crashed if a request needs an adapter that it does not have, as vLLM's would.
    """

    def __init__(
        self, *replies: str, logprobs_mode: str = "processed_logprobs", loaded: set[int] | None = None
    ) -> None:
        self.global_steps: int | None = None
        self.engine = Engine(logprobs_mode, loaded)
        self.crashed = False
        super().__init__(replies, old_format=True)

    def _app(self) -> Any:
        app = super()._app()
        app.state.engine_client = self.engine
        app.state.openai_serving_models = SimpleNamespace(lora_requests=self.adapters)
        app.add_middleware(WeightVersions)
        return app

    async def _translated(self, body: dict[str, Any]) -> dict[str, Any]:
        named = self.adapters.get(body.get("model", ""))
        if named is not None and named.lora_int_id not in (self.engine.loaded or ()):
            self.crashed = True
            raise ValueError("the engine has no such adapter")
        return await super()._translated(body)


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace verl's constants and vLLM's class: vLLM is not installed here."""
    adapter = SimpleNamespace(lora_name=ADAPTER, lora_int_id=VERLS_ID)
    monkeypatch.setattr(vllm_middleware, "vllm_adapter", lambda: adapter)


@pytest.fixture
async def client() -> AsyncIterator[Any]:
    clients = []

    async def generate(server: VerlServer, **more: Any) -> Any:
        client = EngineClient(Engines(server.url), 120.0, 3, VllmProtocol(), after_abort_s=0.0)
        clients.append(client)
        await client.start()
        return await client.generate(EngineRequest([1, 2], {**PARAMS, **more.pop("params", {})}, "s", **more))

    yield generate
    for each in clients:
        await each.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_each_reply_has_the_version_of_verls_actor(client: Any, stream: bool) -> None:
    progress = (lambda *_: None) if stream else None
    with VerlServer(*["one two three"] * 2) as server:
        server.global_steps = 7
        unattached = await client(server, progress=progress)
        attach(server)
        attached = await client(server, progress=progress)
    assert attached.token_ids == unattached.token_ids
    assert attached.logprobs == unattached.logprobs
    assert unattached.weight_versions == ()
    assert attached.weight_versions == (VersionSpan(version="7", start=0, end=len(attached.token_ids)),)


@pytest.mark.parametrize("says_abort", [True, False])
async def test_a_stream_that_a_pause_aborts_is_resumed_under_the_next_version(client: Any, says_abort: bool) -> None:
    with VerlServer("one two", " end") as server:
        attach(server)
        server.global_steps, server.aborted_after, server.says_abort = 7, 3, says_abort

        def progress(ids: list[int], _: Any) -> None:
            if len(ids) == 3:
                server.global_steps, server.aborted_after = 8, None

        completion = await client(server, progress=progress)
    spans = [(span.version, span.start, span.end) for span in completion.weight_versions]
    assert spans == [("7", 0, 3), ("8", 3, len(completion.token_ids))]
    assert completion.finish_reason == "stop"


async def test_a_server_that_may_be_asleep_is_checked_without_a_request_for_tokens() -> None:
    with VerlServer() as server:
        server.paused = True
        await asyncio.wait_for(check_vllm(server.url), 120)
        assert server.requests == []
    advice = r"set actor_rollout_ref\.rollout\.logprobs_mode=processed_logprobs, not raw_logprobs"
    with VerlServer(logprobs_mode="raw_logprobs") as server, pytest.raises(PreflightError, match=advice):
        await check_vllm(server.url)


# --- LoRA -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_samples_with_verls_adapter_and_its_tokens_say_so(client: Any, stream: bool) -> None:
    with VerlServer("one two three", loaded={VERLS_ID}) as server:
        attach(server)
        server.global_steps = 3
        progress = (lambda *_: None) if stream else None
        completion = await client(server, adapter=ADAPTER, progress=progress)
    assert server.sampled_with == [ADAPTER]
    [span] = completion.weight_versions
    assert span == VersionSpan(version=f"{ADAPTER}@3", start=0, end=len(completion.token_ids))


async def test_no_call_samples_from_the_base_model_while_verl_trains_an_adapter(client: Any) -> None:
    with VerlServer("one", "two", loaded={VERLS_ID}) as server:
        attach(server)
        await client(server, adapter=ADAPTER)
        for other in ("", "scripted", str(VERLS_ID)):
            with pytest.raises(EngineRefused, match=f"sampled without the adapter: name the model '{ADAPTER}'"):
                await client(server, adapter=other)
    assert server.sampled_with == [ADAPTER]


async def test_a_call_never_reaches_an_engine_without_the_adapter(client: Any) -> None:
    with VerlServer("one", loaded=set()) as server:
        attach(server)
        server.adapters[ADAPTER] = vllm_middleware.vllm_adapter()  # an earlier call has added it
        with pytest.raises(EngineUnavailable, match="the engine has no LoRA adapter yet"):
            await client(server, adapter=ADAPTER)
    assert server.requests == []
    assert not server.crashed


async def test_a_call_is_retried_until_verl_has_loaded_the_adapter(client: Any) -> None:
    """verl removes the adapter before it loads the next one."""
    with VerlServer("one", loaded=set()) as server:
        attach(server)
        server.engine.loaded_next = {VERLS_ID}
        assert (await client(server, adapter=ADAPTER)).finish_reason == "stop"


@pytest.mark.parametrize("body", [b"not json", b"[1]", b'{"model": null}'])
async def test_a_body_without_a_model_is_refused(body: bytes) -> None:
    with VerlServer(loaded={VERLS_ID}) as server:
        async with aiohttp.ClientSession() as http, http.post(server.url + GENERATE, data=body) as reply:
            assert reply.status == 400
    assert server.requests == []


# --- single messages ------------------------------------------------------------------------------------------


async def sent(kind: str, bodies: list[tuple[bytes, int]], arrived_at: int) -> bytes:
    """Return what is sent for the bodies of a reply. Each comes with the version at its time."""
    server = SimpleNamespace(global_steps=arrived_at, engine=Engine("processed_logprobs", loaded=None))
    attach(server)
    app = SimpleNamespace(state=SimpleNamespace(engine_client=server.engine))
    out: list[dict[str, Any]] = []

    async def reply(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", kind.encode()), (b"content-length", b"1")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number, (body, version) in enumerate(bodies, start=1):
            server.global_steps = version
            await send({"type": "http.response.body", "body": body, "more_body": number < len(bodies)})

    async def keep(message: dict[str, Any]) -> None:
        out.append(message)

    await WeightVersions(reply)({"type": "http", "path": GENERATE, "app": app}, None, keep)  # type: ignore[arg-type]
    body = b"".join(message.get("body", b"") for message in out)
    if kind == "application/json":
        assert dict(out[0]["headers"])[b"content-length"] == str(len(body)).encode()
    return body


def piece(ids: list[int], finish: str | None = None) -> bytes:
    return b"data: " + json.dumps({"choices": [{"token_ids": ids, "finish_reason": finish}]}).encode() + b"\n\n"


def choices_of(stream: bytes) -> list[dict[str, Any]]:
    lines = [line for line in stream.split(b"\n\n") if line.startswith(b"data: {")]
    return [choice for line in lines for choice in json.loads(line.removeprefix(b"data: "))["choices"]]


@pytest.mark.parametrize(
    ("arrived_at", "at", "finish", "version"),
    [(7, 7, "stop", "7"), (7, 8, "stop", "8"), (7, 7, "abort", "7"), (7, 8, "abort", None)],
)
async def test_a_version_that_is_not_certain_is_not_written(
    arrived_at: int, at: int, finish: str, version: str | None
) -> None:
    """A call that waited for a resume has the new version. Tokens that come with their abort may be of either."""
    whole = json.dumps({"choices": [{"token_ids": [5], "finish_reason": finish}]}).encode()
    [choice] = json.loads(await sent("application/json", [(whole, at)], arrived_at))["choices"]
    assert choice["weight_version"] == version
    stream = await sent("text/event-stream", [(piece([5], finish), at), (b"data: [DONE]\n\n", at)], arrived_at)
    assert choices_of(stream)[0]["weight_version"] == version


async def test_a_stream_keeps_the_version_of_its_first_tokens() -> None:
    bodies = [(piece([5]), 8), (piece([6]), 8), (piece([7], "abort"), 9), (b"data: [DONE]\n\n", 9)]
    choices = choices_of(await sent("text/event-stream", bodies, 7))
    assert [choice["weight_version"] for choice in choices if "weight_version" in choice] == ["8"]
    assert [token for choice in choices for token in choice["token_ids"]] == [5, 6, 7]
    assert choices[-1]["finish_reason"] == "abort"


async def test_events_that_are_cut_anywhere_arrive_whole() -> None:
    stream = piece([5]) + piece([6]) + b'data: {"usage": {}, "choices": []}\n\n' + b"data: [DONE]\n\n"
    pieces = [(bytes([byte]), 7) for byte in stream]
    out = await sent("text/event-stream", pieces, 7)
    assert out == await sent("text/event-stream", [(stream, 7)], 7)
    assert out.endswith(b"data: [DONE]\n\n")
    assert choices_of(out)[-1]["finish_reason"] == "abort", "it ended without a reason"


async def test_an_error_in_a_stream_is_no_abort() -> None:
    stream = piece([5]) + b'data: {"error": {"message": "the engine died", "code": 500}}\n\n' + b"data: [DONE]\n\n"
    out = await sent("text/event-stream", [(stream, 7)], 7)
    assert b"abort" not in out
    assert b"the engine died" in out
