"""An engine that accepts calls and answers none costs time, and neither a call nor its tokens."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

import pytest
from aiohttp import web

from builders import eventually, served, skip
from rollout_backend.model.gateway.engine import liveness
from rollout_backend.model.gateway.engine.client import EngineClient, _SilenceWatch
from rollout_backend.model.gateway.engine.engines import Engines
from rollout_backend.model.gateway.engine.protocol import EngineRequest, SglangProtocol, VllmProtocol

SILENCE_S = 0.4
GENERATE = (SglangProtocol.path, VllmProtocol.path)
COUNTERS = ("/v1/loads", "/metrics")
REPLY = list(range(8))


def _ids(body):
    return body.get("input_ids") or body["token_ids"]


def _reply(path, ids, ended=True):
    """A whole reply or a chunk of a stream."""
    if path == VllmProtocol.path:
        content = [{"logprob": -0.5, "token_id": token} for token in ids]
        choice = {"token_ids": ids, "finish_reason": "stop" if ended else None, "logprobs": {"content": content}}
        return {"choices": [choice], "usage": {"completion_tokens": len(ids)} if ended else None}
    pairs = [[-0.5, token, None] for token in ids]
    meta = {"finish_reason": {"type": "stop"} if ended else None, "completion_tokens": len(ids)}
    return {"output_ids": ids, "meta_info": meta | {"output_token_logprobs": pairs}}


class Engine:
    """Continues a prompt of one token to `REPLY`, unless it hangs. Health and other pages are always answered."""

    def __init__(self):
        self.prompts = []
        self.probes = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self.answers_probes = True
        self.piece = len(REPLY)  # tokens of a stream until it is cut
        self.stalls = False  # after the first piece of a stream
        self.work = 0

    async def handle(self, request):
        if request.path in COUNTERS:
            rank = {"num_running_reqs": 1, "num_used_tokens": self.work}
            text = f"vllm:generation_tokens_total{{}} {self.work}\n"
            return web.json_response({"loads": [rank]}) if request.path == "/v1/loads" else web.Response(text=text)
        if request.path not in GENERATE:
            return web.json_response({}, status=404 if request.path == "/abort_request" else 200)
        body = await request.json()
        if _ids(body) == [0]:
            self.probes += 1
            if not self.answers_probes:
                await asyncio.Event().wait()
            return web.json_response(_reply(request.path, [7]))
        self.prompts.append(_ids(body))
        await self.answers.wait()
        rest = REPLY[len(_ids(body)) - 1 :]
        if not body.get("stream"):
            return web.json_response(_reply(request.path, rest))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        piece = rest[: self.piece]
        event = web.json_response(_reply(request.path, piece, ended=piece == rest)).text
        await response.write(f"data: {event}\n\n".encode())
        if self.stalls:
            self.stalls = False
            await asyncio.Event().wait()
        return response

    def hang(self):
        self.answers.clear()
        self.answers_probes = False


@pytest.fixture(params=[SglangProtocol, VllmProtocol])
async def start(request, monkeypatch):
    """Start engines and a client of them."""
    monkeypatch.setattr(liveness, "_PROBE_AGAIN_S", 0.05)
    async with AsyncExitStack() as stack:

        async def start(*engines, router=None, **options):
            urls = [
                await stack.enter_async_context(served(each.handle, handler_cancellation=True, shutdown_timeout=0.1))
                for each in (*engines, *([router] if router else ()))
            ]
            direct = Engines(urls[-1], all_calls_direct=router is None)
            direct.urls = urls[: len(engines)]
            client = EngineClient(
                direct, 120.0, protocol=request.param(), silence_s=SILENCE_S, after_abort_s=0.0, **options
            )
            await client.start()
            stack.push_async_callback(client.close)
            return client, direct

        yield start


def asked(is_streamed=False, **more):
    return EngineRequest([1], {"max_new_tokens": 8}, progress=(lambda *_: None) if is_streamed else None, **more)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_call_leaves_a_hung_engine_which_gets_no_other_until_it_samples(start, is_streamed):
    hung, idle = Engine(), Engine()
    client, engines = await start(hung, idle)
    hung.hang()
    keys = [f"session-{i}" for i in range(60)]
    mine = [key for key in keys if engines._ranked(key, ()) == engines.urls[0]]
    for key in mine[:5]:
        completion = await client.generate(asked(is_streamed, routing_key=key))
        assert completion.token_ids == tuple(REPLY)
    assert (len(hung.prompts), len(idle.prompts)) == (1, 5)
    hung.answers.set()
    hung.answers_probes = True
    await eventually(lambda: not engines.hung)
    await client.generate(asked(is_streamed, routing_key=mine[0]))
    assert len(hung.prompts) == 2


async def test_a_call_through_the_router_goes_past_it_while_an_engine_hangs(start):
    """The router keeps a session at its engine, whose health check it trusts."""
    hung, idle, router = Engine(), Engine(), Engine()
    client, _ = await start(hung, idle, router=router)
    hung.hang()
    router.hang()
    for _ in range(3):
        assert (await client.generate(asked())).token_ids == tuple(REPLY)
    if router.prompts:  # SGLang's protocol
        assert (len(router.prompts), len(idle.prompts)) == (1, 3)


async def test_a_call_that_ends_while_its_engine_is_examined_is_watched_no_longer():
    """Otherwise each such call would examine its engine again and again."""
    examined = asyncio.Event()

    class Hangs:
        async def examine(self, url):
            examined.set()
            await asyncio.Event().wait()

    watch = _SilenceWatch(Hangs(), Engines("http://engine"), "http://engine", asked(), SILENCE_S)
    async with watch.cut:
        watch.start()
        skip(3600)
        await examined.wait()
        watch.end()
    await asyncio.wait([watch._examination])
    assert watch._timer.when() < asyncio.get_running_loop().time(), "another examination is due"


async def test_a_stream_that_falls_silent_continues_from_its_tokens(start):
    engine = Engine()
    engine.piece, engine.stalls = 4, True
    client, _ = await start(engine)
    assert (await client.generate(asked(True))).token_ids == tuple(REPLY)
    assert engine.prompts == [[1], [1, *REPLY[:4]]]


async def test_an_attempt_with_progress_does_not_count(start):
    engine = Engine()
    engine.piece = 1
    client, _ = await start(engine, attempts=2)
    assert (await client.generate(asked(True))).token_ids == tuple(REPLY)
    assert len(engine.prompts) == len(REPLY)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_call_that_an_engine_has_lost_is_repeated(start, is_streamed):
    engine = Engine()
    engine.answers.clear()
    client, _ = await start(engine)
    call = asyncio.create_task(client.generate(asked(is_streamed)))
    await eventually(lambda: engine.probes)
    engine.answers.set()
    assert (await call).token_ids == tuple(REPLY)


@pytest.mark.parametrize("sign", ["answers to others", "counters", "nowhere to go", "a long reply"])
async def test_a_call_waits_in_an_engine_that_may_answer_it(start, sign):
    """As in a long queue, while a long prompt is read, or while all engines load weights."""
    slow, other = Engine(), Engine()
    client, engines = await start(*([slow] if sign == "nowhere to go" else [slow, other]))
    slow.hang()
    key = next(f"{i}" for i in range(99) if engines._ranked(f"{i}", ()) == engines.urls[0])
    request = asked(routing_key=key)
    if sign == "a long reply":
        slow.answers_probes = True
        request.params["max_new_tokens"] = 10_000
    call = asyncio.create_task(client.generate(request))
    until = asyncio.get_running_loop().time() + 4 * SILENCE_S
    while asyncio.get_running_loop().time() < until:
        slow.work += sign == "counters"
        if sign == "answers to others":
            client._hangs.answered(engines.urls[0])
        await asyncio.sleep(SILENCE_S / 20)
    assert not call.done()
    slow.answers.set()
    assert (await call).token_ids == tuple(REPLY)
    assert Counter(map(tuple, slow.prompts)) == {(1,): 1}
    assert other.prompts == []
