import asyncio
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tenacity import RetryCallState

from agent_wrapper.contract import VersionSpan
from rollout_backend.errors import EngineUnavailable
from rollout_backend.gateway.direct_routing import DirectRouting
from rollout_backend.gateway.engine_client import EngineClient, EngineRefused, _Aborted, _Retry, _wait
from rollout_backend.rendering.stop_strings import StopStrings
from rollout_backend.serving.server_process import free_port

PARAMS = {"max_new_tokens": 10, "temperature": 1.0}


def reply(ids, kind="stop", versions=None, **meta):
    meta.setdefault("output_token_logprobs", [[-0.25, token, None] for token in ids])
    if versions is not None:
        meta["weight_versions"] = [{"version": v, "start": s, "end": e} for v, s, e in versions]
    return {"output_ids": list(ids), "meta_info": {"finish_reason": {"type": kind}, **meta}}


@pytest.fixture
async def engine():
    """A server whose replies are a list of bodies, of (status, text), or of "cut"; and a client of it."""

    class Engine:
        replies: list
        bodies: list
        hosts: list[str]
        url: str
        asked = asyncio.Event()
        aborted = asyncio.Event()

        async def handle(self, request: web.Request) -> web.StreamResponse:
            self.bodies.append((await request.json(), request.headers["X-SMG-Routing-Key"]))
            self.hosts.append(request.host)
            self.asked.set()
            answer = self.replies.pop(0)
            if answer == "hang":
                await self.hang()
            if answer == "cut":
                request.transport.close()
                return web.Response()
            if isinstance(answer, tuple):
                return web.Response(status=answer[0], text=answer[1])
            if isinstance(answer, list) and answer:
                return await self.stream(request, answer)
            return web.json_response(answer)

        async def hang(self) -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.aborted.set()
                raise

        async def stream(self, request: web.Request, events: list) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for event in events:
                if event == "cut":
                    request.transport.close()
                    break
                if event == "hang":
                    await self.hang()
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            else:
                await response.write(b"data: [DONE]\n\n")
            return response

        async def generate(
            self, replies, ids=(1, 2), params=PARAMS, attempts=3, timeout_s=20.0, engines=None, **more
        ):
            self.replies, self.bodies, self.hosts = list(replies), [], []
            client = EngineClient(self.url, timeout_s, attempts, engines)
            await client.start()
            try:
                return await client.generate(ids, params, "session-1", **more)
            finally:
                await client.close()

    engine = Engine()
    app = web.Application()
    app.router.add_post("/generate", engine.handle)
    server = TestServer(app)
    await server.start_server()
    engine.url = str(server.make_url("/")).rstrip("/")
    yield engine
    await server.close()


async def test_a_completion_is_what_the_engine_sampled(engine):
    completion = await engine.generate([reply([7, 8, 9], versions=[("a", 0, 1), ("b", 1, 3)], cached_tokens=2)])
    assert completion.token_ids == (7, 8, 9)
    assert completion.logprobs == (-0.25, -0.25, -0.25)
    assert completion.weight_versions == (
        VersionSpan(version="a", start=0, end=1),
        VersionSpan(version="b", start=1, end=3),
    )
    assert (completion.finish_reason, completion.cached_tokens, completion.matched) == ("stop", 2, None)
    body, key = engine.bodies[0]
    assert key == "session-1"
    assert body["input_ids"] == [1, 2]
    assert body["sampling_params"] == PARAMS
    assert body["rid"]


async def test_one_version_is_that_of_all_tokens(engine):
    completion = await engine.generate([reply([7, 8], weight_version="v")])
    assert completion.weight_versions == (VersionSpan(version="v", start=0, end=2),)


@pytest.mark.parametrize("versions", [[("a", 0, 1)], [("a", 1, 2)], [("a", 0, 3)], [("a", 0, 1), ("b", 0, 2)]])
async def test_versions_that_do_not_cover_the_tokens_are_not_believed(engine, versions):
    assert (await engine.generate([reply([7, 8], versions=versions)])).weight_versions == ()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([], (None, None)),
        ([[-1.0, 7, None]], (-1.0, None)),
        ([[-1.0, 9, None], [-2.0, 8, None]], (None, -2.0)),
        ([[None, 7, None], [float("-inf"), 8, None]], (None, None)),
    ],
)
async def test_a_logprob_that_was_not_given_is_missing(engine, given, wanted):
    assert (await engine.generate([reply([7, 8], output_token_logprobs=given)])).logprobs == wanted


@pytest.mark.parametrize("failure", [(500, "oops"), (503, ""), (429, ""), "cut"])
async def test_a_passing_failure_is_tried_again_under_another_id(engine, failure):
    completion = await engine.generate([failure, reply([7])])
    assert completion.token_ids == (7,)
    rids = [body["rid"] for body, _ in engine.bodies]
    assert len(set(rids)) == 2


async def test_a_lasting_failure_ends_with_what_the_engine_said(engine):
    with pytest.raises(EngineUnavailable, match=r"in 2 attempts.*no worker is up"):
        await engine.generate([(503, "no worker is up")] * 2, attempts=2)


async def test_nobody_there_is_unavailable():
    client = EngineClient(f"http://127.0.0.1:{free_port()}", 5.0, attempts=2)
    await client.start()
    with pytest.raises(EngineUnavailable, match="2 attempts"):
        await client.generate([1], PARAMS, "s")
    await client.close()


async def test_a_refusal_is_not_tried_again(engine):
    with pytest.raises(EngineRefused, match="HTTP 400: bad params"):
        await engine.generate([(400, "bad params")])
    assert len(engine.bodies) == 1


async def test_a_call_ends_in_time(engine):
    with pytest.raises(EngineUnavailable, match=r"within 0\.2 s"):
        await engine.generate(["hang"], timeout_s=0.2)


async def test_to_cancel_a_call_ends_it_at_the_engine(engine):
    call = asyncio.create_task(engine.generate(["hang"]))
    await engine.asked.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.wait_for(engine.aborted.wait(), 5)


async def test_an_aborted_generation_goes_on_from_its_tokens(engine):
    completion = await engine.generate(
        [
            reply([7, 8], "abort", versions=[("1", 0, 2)], cached_tokens=1),
            reply([9], "abort", versions=[("2", 0, 1)], cached_tokens=4),
            reply([10, 11], "stop", versions=[("2", 0, 2)]),
        ]
    )
    assert completion.token_ids == (7, 8, 9, 10, 11)
    assert completion.logprobs == (-0.25,) * 5
    assert completion.weight_versions == (
        VersionSpan(version="1", start=0, end=2),
        VersionSpan(version="2", start=2, end=5),
    )
    assert completion.cached_tokens == 1
    assert [body["input_ids"] for body, _ in engine.bodies] == [[1, 2], [1, 2, 7, 8], [1, 2, 7, 8, 9]]
    assert [body["sampling_params"]["max_new_tokens"] for body, _ in engine.bodies] == [10, 8, 7]


async def test_an_abort_at_the_last_token_is_a_reply_at_its_limit(engine):
    completion = await engine.generate([reply(range(10), "abort")])
    assert (len(completion.token_ids), completion.finish_reason) == (10, "length")


async def test_aborts_without_end_are_unavailable(engine):
    with pytest.raises(EngineUnavailable, match="aborted"):
        await engine.generate([reply([], "abort")] * 3)


def test_after_an_abort_the_router_has_time_to_learn_that_the_engine_leaves():
    def wait(error, attempt=1):
        state = RetryCallState(None, None, (), {})
        state.attempt_number = attempt
        state.set_exception((type(error), error, None))
        return _wait(state)

    assert wait(_Aborted("paused")) == 1
    assert wait(_Aborted("paused"), attempt=5) >= 4
    assert wait(_Retry("HTTP 503")) < 1


@pytest.mark.parametrize("answer", [{}, {"output_ids": [1]}, {"output_ids": ["x"], "meta_info": {}}, []])
async def test_an_answer_of_another_shape_is_unavailable(engine, answer):
    with pytest.raises(EngineUnavailable, match="not what /generate answers"):
        await engine.generate([answer])


# --- streams ----------------------------------------------------------------------------------------------


def piece(ids, total, kind=None, version="1", **meta):
    """A piece of a stream: `ids` and how many the attempt has with them."""
    event = reply(ids, kind, weight_version=version, completion_tokens=total, **meta)
    return event if kind else {**event, "meta_info": {**event["meta_info"], "finish_reason": None}}


class Told:
    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, ids, logprobs) -> None:
        assert len(logprobs) == len(ids)
        self.seen.append(tuple(ids))


@pytest.mark.parametrize(
    "events",
    [
        [piece([7], 1), piece([8, 9], 3), piece([10], 4, "stop")],
        [piece([7], 1), piece([7, 8, 9], 3), piece([7, 8, 9, 10], 4, "stop")],
    ],
    ids=["incremental", "cumulative"],
)
async def test_a_stream_is_told_as_it_comes(engine, events):
    told = Told()
    completion = await engine.generate([events], progress=told)
    assert told.seen == [(7,), (7, 8, 9)]
    assert completion.token_ids == (7, 8, 9, 10)
    assert completion.logprobs == (-0.25,) * 4
    assert completion.weight_versions == (VersionSpan(version="1", start=0, end=4),)
    body, _ = engine.bodies[0]
    assert body["stream"] is True
    assert body["sampling_params"]["stream_interval"] > 1


@pytest.mark.parametrize("end", [piece([8], 2, "abort"), "cut"])
async def test_a_stream_that_ends_early_goes_on_from_its_tokens(engine, end):
    told = Told()
    completion = await engine.generate(
        [[piece([7, 8], 2), end], [piece([9], 1, version="2"), piece([10], 2, "stop", version="2")]], progress=told
    )
    assert completion.token_ids == (7, 8, 9, 10)
    assert completion.logprobs == (-0.25,) * 4
    assert completion.weight_versions == (
        VersionSpan(version="1", start=0, end=2),
        VersionSpan(version="2", start=2, end=4),
    )
    assert told.seen == [(7, 8), (7, 8, 9)]
    assert engine.bodies[1][0]["input_ids"] == [1, 2, 7, 8]


async def test_a_stream_cut_while_the_weights_changed_has_no_version(engine):
    events = [[piece([7], 1), piece([8], 2, version="2"), "cut"], [piece([9], 1, "stop", version="2")]]
    completion = await engine.generate(events, progress=Told())
    assert (completion.token_ids, completion.weight_versions) == ((7, 8, 9), ())


async def test_an_error_in_a_stream_is_told_apart(engine):
    with pytest.raises(EngineRefused, match="too long"):
        await engine.generate([[{"error": {"message": "too long", "code": 400}}]], progress=Told())
    refused = piece([], 0, "abort")
    refused["meta_info"]["finish_reason"] |= {"status_code": 400, "message": "no grammar"}
    with pytest.raises(EngineRefused, match="no grammar"):
        await engine.generate([[refused]], progress=Told())
    busy = [{"error": {"message": "busy", "code": 503}}]
    assert (await engine.generate([busy, [piece([7], 1, "stop")]], progress=Told())).token_ids == (7,)


async def test_an_event_may_be_large(engine):
    ids = list(range(20_000))
    params = {**PARAMS, "max_new_tokens": 30_000}
    completion = await engine.generate([[piece(ids, len(ids), "stop")]], params=params, progress=Told())
    assert completion.token_ids == tuple(ids)


async def test_what_cannot_be_resumed_starts_again(engine):
    completion = await engine.generate([reply([7, 8], "abort"), reply([9])], resumable=False)
    assert completion.token_ids == (9,)
    assert [body["input_ids"] for body, _ in engine.bodies] == [[1, 2], [1, 2]]


STOPS = StopStrings(["END"], {7: b"one ", 8: b"E", 9: b"ND two", 10: b"three"})


async def test_a_stop_string_cuts_the_stream_at_the_token_that_completes_it(engine):
    versions = [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 4}]
    events = [piece([7], 1), piece([8, 9, 10], 4, weight_versions=versions), "hang"]
    told = Told()
    completion = await engine.generate([events], progress=told, stops=STOPS)
    assert (completion.token_ids, completion.logprobs) == ((7, 8, 9), (-0.25,) * 3)
    assert (completion.finish_reason, completion.matched) == ("stop", "END")
    assert completion.weight_versions == (
        VersionSpan(version="1", start=0, end=2),
        VersionSpan(version="2", start=2, end=3),
    )
    assert told.seen == [(7,)]
    await asyncio.wait_for(engine.aborted.wait(), 10)


async def test_a_stop_string_may_span_an_abort(engine):
    completion = await engine.generate([[piece([7, 8], 2, "abort")], [piece([9, 10], 2, "stop")]], stops=STOPS)
    assert (completion.token_ids, completion.matched) == ((7, 8, 9), "END")
    assert completion.logprobs == (-0.25,) * 3
    assert completion.weight_versions == (VersionSpan(version="1", start=0, end=3),)


async def test_an_engine_that_does_not_stream_is_understood(engine):
    told = Told()
    assert (await engine.generate([reply([7, 8])], progress=told)).token_ids == (7, 8)
    assert told.seen == []


# --- what goes past the router ----------------------------------------------------------------------------


FORCED = {**PARAMS, "structural_tag": "{}"}
URLS = [f"http://10.0.0.{i}:30000" for i in range(8)]


@pytest.fixture
def engines() -> DirectRouting:
    engines = DirectRouting()
    engines.urls = URLS
    return engines


def test_what_a_router_passes_on_goes_to_the_router(engines):
    assert engines.for_call({**PARAMS, "json_schema": "{}", "stop": ["x"]}, "s") is None


@pytest.mark.parametrize("params", [FORCED, {**PARAMS, "logit_bias": {"7": -100}}])
def test_what_a_router_drops_goes_to_an_engine_and_a_session_stays_there(engines, params):
    first = {key: engines.for_call(params, key) for key in map(str, range(200))}
    assert set(first.values()) == set(URLS)  # all of them have work
    gone = first["0"]
    engines.urls = [url for url in reversed(URLS) if url != gone]
    after = {key: engines.for_call(params, key) for key in first}
    assert all(after[key] == url for key, url in first.items() if url != gone)
    assert gone not in after.values()


def test_where_no_engine_is_known_the_router_gets_it(engines):
    engines.urls = []
    assert engines.for_call(FORCED, "s") is None


def test_one_that_failed_is_passed_over_until_all_have(engines):
    order: list[str] = []
    for _ in URLS:
        order.append(engines.for_call(FORCED, "s", order))
    assert sorted(order) == sorted(URLS)
    assert engines.for_call(FORCED, "s", order) == order[0]


@pytest.mark.parametrize("failure", [(503, "starting"), "cut"])
async def test_a_call_goes_on_at_another_engine_where_it_keeps_its_form(engine, failure):
    engines = DirectRouting()
    same_server = engine.url.replace("127.0.0.1", "localhost")
    engines.urls = [engine.url, same_server]
    completion = await engine.generate([failure, reply([7])], params=FORCED, engines=engines)
    assert completion.token_ids == (7,)
    assert sorted(engine.hosts) == sorted(url.removeprefix("http://") for url in engines.urls)
    assert all("structural_tag" in body["sampling_params"] for body, _ in engine.bodies)


async def test_an_engine_that_aborts_is_well_and_keeps_the_call(engine):
    engines = DirectRouting()
    engines.urls = [engine.url, engine.url.replace("127.0.0.1", "localhost")]
    await engine.generate([reply([7], "abort"), reply([7])], params=FORCED, engines=engines, resumable=False)
    assert len(set(engine.hosts)) == 1
