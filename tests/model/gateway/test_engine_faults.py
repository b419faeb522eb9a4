"""A damaged reply of an engine is repeated or ends in an error, in both protocols, and never gives other tokens."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from builders import served
from rollout_backend.errors import EngineUnavailable
from rollout_backend.model.gateway.engine.client import EngineClient
from rollout_backend.model.gateway.engine.engines import Engines
from rollout_backend.model.gateway.engine.protocol import EngineRequest, SglangProtocol, VllmProtocol

GOOD = [7, 7, 8, 9]
VOCABULARY = 100
Make = Callable[..., Any]


def sglang(ids: list[Any], total: int, finish: Any = None, logprobs: Any = None) -> Any:
    given = [[-0.5, token, None] for token in ids] if logprobs is None else logprobs
    meta = {"finish_reason": finish and {"type": finish}, "completion_tokens": total, "output_token_logprobs": given}
    return {"output_ids": ids, "meta_info": meta}


def vllm(ids: list[Any], total: int, finish: Any = None, logprobs: Any = None) -> Any:
    entries = [{"logprob": -0.5, "token_id": token} for token in ids] if logprobs is None else logprobs
    choice = {"token_ids": ids, "finish_reason": finish, "logprobs": {"content": entries}}
    return {"choices": [choice], "usage": {"completion_tokens": total} if finish else None}


def without(reply: Any, *names: str) -> Any:
    return json.loads(json.dumps(reply), object_hook=lambda each: {k: v for k, v in each.items() if k not in names})


WHOLE: dict[str, Callable[[Make], Any]] = {
    "nothing": lambda _: "",
    "a part of the JSON": lambda _: '{"output_ids": [7, 8',
    "a page of a proxy": lambda _: "<html>Bad gateway</html>",
    "an error with status 200": lambda _: {"error": {"message": "busy", "code": 503}},
    "no object": lambda _: [],
    "null": lambda _: None,
    "no ids": lambda make: without(make([7], 1, "stop"), "output_ids", "token_ids"),
    "no tokens": lambda make: make([], 0, "stop"),
    "an abort without tokens": lambda make: make([], 0, "abort"),
    "fewer tokens than counted": lambda make: make([7, 8], 4, "stop"),
    "more tokens than counted": lambda make: make([7, 8, 9], 2, "stop"),
    "a token of another vocabulary": lambda make: make([7, VOCABULARY], 2, "stop"),
    "a negative token": lambda make: make([7, -1], 2, "stop"),
    "a fraction of a token": lambda make: make([7.5], 1, "stop"),
    "a token as text": lambda make: make(["7"], 1, "stop"),
    "logprobs of another form": lambda make: make([7], 1, "stop", [{"token": "a"}]),
    "an unknown end": lambda make: make([7], 1, "repetition"),
}
STREAMS: dict[str, Callable[[Make], list[Any]]] = {
    "nothing": lambda _: [],
    "a cut event": lambda _: ['{"output_ids": [7'],
    "an error": lambda _: [{"error": {"message": "busy", "code": 503}}],
    "no tokens": lambda make: [make([], 0, "stop")],
    "a missing piece": lambda make: [make([7], 1), make([8], 3), make([9], 4, "stop")],
    "a missing first piece": lambda make: [make([7], 2), make([8, 9], 4, "stop")],
    "a repeated piece": lambda make: [make([7, 7], 2), make([7, 7], 2), make([8, 9], 4, "stop")],
    "a repeated and longer piece": lambda make: [make([7, 7], 2), make([7, 8], 3), make([9], 4, "stop")],
    "an earlier piece": lambda make: [make([7], 1), make([7, 8], 3), make([7], 1, "stop")],
    "a token of another vocabulary": lambda make: [make([7], 1), make([VOCABULARY], 2, "stop")],
    "logprobs of another form": lambda make: [make([7], 1), make([7], 2, "stop", [{"token": "a"}])],
    "no count": lambda make: [make([7], 1), without(make([7, 8], 3), "completion_tokens"), make([9], 4, "stop")],
}


@pytest.fixture(params=[(sglang, SglangProtocol), (vllm, VllmProtocol)], ids=["sglang", "vllm"])
async def ask(request):
    """Ask an engine whose first reply is damaged."""
    make, protocol = request.param
    replies: list[Any] = []

    async def handle(asked: web.Request) -> web.Response:
        body = await asked.json()
        sampled = len(body.get("input_ids") or body.get("token_ids") or "?") - 1
        reply = replies.pop() if replies else [make(GOOD[sampled:], len(GOOD) - sampled, "stop")]
        if body.get("stream"):
            events = [each if isinstance(each, str) else json.dumps(each) for each in reply]
            text = "".join(f"data: {each}\n\n" for each in [*events, "[DONE]"])
            return web.Response(text=text, content_type="text/event-stream")
        reply = reply[0] if reply and isinstance(reply, list) else reply
        return web.Response(text=reply if isinstance(reply, str) else json.dumps(reply))

    async with served(handle) as url:

        async def generate(reply: Any, progress: Any = None):
            replies[:] = [reply(make)]
            client = EngineClient(Engines(url), 120.0, 2, protocol(), vocabulary=VOCABULARY, after_abort_s=0.0)
            await client.start()
            try:
                return await client.generate(EngineRequest([1], {"max_new_tokens": 20}, progress=progress))
            finally:
                await client.close()

        yield generate


@pytest.mark.parametrize("fault", WHOLE)
async def test_a_damaged_reply_is_repeated(ask, fault):
    assert (await ask(WHOLE[fault])).token_ids == tuple(GOOD)


@pytest.mark.parametrize("fault", STREAMS)
async def test_a_damaged_stream_gives_no_other_tokens(ask, fault):
    try:
        completion = await ask(STREAMS[fault], lambda *_: None)
    except EngineUnavailable:
        return
    assert completion.token_ids == tuple(GOOD)
