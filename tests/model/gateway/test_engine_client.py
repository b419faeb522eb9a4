import asyncio
import json

import pytest
from aiohttp import web

from builders import background, eventually, served
from rollout_backend.errors import EngineUnavailable
from rollout_backend.model.gateway.engine.client import ConstrainedCallLost, EngineClient, EngineRefused
from rollout_backend.model.gateway.engine.engines import AdapterVersions, CallsPaused, Engines
from rollout_backend.model.gateway.engine.protocol import EngineRequest
from rollout_backend.model.rendering.token_bytes import StopStrings
from rollout_backend.model.serving.server_process import free_port

PARAMS = {"max_new_tokens": 10, "temperature": 1.0}


def spans(completion):
    return [(span.version, span.start, span.end) for span in completion.weight_versions]


def reply(ids, kind="stop", versions=None, **meta):
    meta.setdefault("output_token_logprobs", [[-0.25, token, None] for token in ids])
    if versions is not None:
        meta["weight_versions"] = [{"version": v, "start": s, "end": e} for v, s, e in versions]
    return {"output_ids": list(ids), "meta_info": {"finish_reason": {"type": kind}, **meta}}


@pytest.fixture
async def engine():
    """A server with a list of replies: a body, (status, text), "cut", "hang", or a list of events; and a client."""

    class Engine:
        replies: list
        bodies: list
        hosts: list[str]
        ended: list[str]
        url: str
        aborted = asyncio.Event()
        abort_asked = asyncio.Event()
        read_to_the_end = False

        async def handle(self, request: web.Request) -> web.StreamResponse:
            if request.path == "/abort_request":
                self.ended.append((await request.json())["rid"])
                self.abort_asked.set()
                return web.Response()
            self.bodies.append((await request.json(), request.headers["X-SMG-Routing-Key"]))
            self.hosts.append(request.host)
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
                await asyncio.sleep(600)
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
                if event == "run until aborted":
                    await self.abort_asked.wait()
                    event = piece([10], 4, "abort")
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            else:
                await response.write(b"data: [DONE]\n\n")
                await response.write_eof()
                self.read_to_the_end = True
            return response

        async def generate(
            self, replies, ids=(1, 2), params=PARAMS, attempts=3, timeout_s=120.0, engines=None, adapters=None, **more
        ):
            self.replies, self.bodies, self.hosts, self.ended = list(replies), [], [], []
            engines = engines or Engines(self.url)
            client = EngineClient(engines, timeout_s, attempts, adapters=adapters, after_abort_s=0.0)
            await client.start()
            try:
                return await client.generate(EngineRequest(ids, params, **{"routing_key": "session-1", **more}))
            finally:
                await client.close()

    engine = Engine()
    async with served(engine.handle, handler_cancellation=True) as engine.url:
        yield engine


async def test_a_completion_has_the_sampled_tokens_and_their_versions(engine):
    completion = await engine.generate([reply([7, 8, 9], versions=[("a", 0, 1), ("b", 1, 3)], cached_tokens=2)])
    assert completion.token_ids == (7, 8, 9)
    assert completion.logprobs == (-0.25, -0.25, -0.25)
    assert spans(completion) == [("a", 0, 1), ("b", 1, 3)]
    assert (completion.finish_reason, completion.cached_tokens, completion.matched) == ("stop", 2, None)
    body, key = engine.bodies[0]
    assert key == "session-1"
    assert body["input_ids"] == [1, 2]
    assert body["sampling_params"] == PARAMS
    assert body["rid"]


async def test_a_call_names_its_adapter_and_its_tokens_carry_the_version(engine):
    adapters = AdapterVersions({"math": 3})
    sampled = reply([7, 8], weight_version="0")
    assert (await engine.generate([sampled], adapters=adapters)).weight_versions[0].version == "0"
    assert "lora_path" not in engine.bodies[0][0]
    completion = await engine.generate([sampled], adapters=adapters, adapter="math")
    assert engine.bodies[0][0]["lora_path"] == "math@3"
    assert spans(completion) == [("math@3", 0, 2)]
    completion = await engine.generate([reply([7, 8])], adapters=adapters, adapter="math")  # no version in the reply
    assert spans(completion) == [("math@3", 0, 2)]


async def test_an_adapter_of_the_engines_operator_carries_the_reported_version(engine):
    completion = await engine.generate([reply([7, 8], versions=[("4", 0, 1), ("5", 1, 2)])], adapter="theirs")
    assert engine.bodies[0][0]["lora_path"] == "theirs"
    assert [span.version for span in completion.weight_versions] == ["theirs@4", "theirs@5"]
    assert (await engine.generate([reply([7, 8])], adapter="theirs")).weight_versions == ()


async def test_a_call_aborted_for_a_new_version_resumes_with_it(engine):
    aborted, rest = reply([7], "abort", weight_version="0"), reply([8], weight_version="0")
    unchanged = AdapterVersions({"math": 1})
    completion = await engine.generate([aborted, rest], adapters=unchanged, adapter="math")
    assert [body["lora_path"] for body, _ in engine.bodies] == ["math@1", "math@1"]
    assert spans(completion) == [("math@1", 0, 2)]

    class Updated(AdapterVersions):
        def newest(self, name):
            self.replace({"math": 1 + (len(engine.bodies) > 0)})
            return super().newest(name)

    completion = await engine.generate([aborted, rest], adapters=Updated(), adapter="math")
    assert [body["lora_path"] for body, _ in engine.bodies] == ["math@1", "math@2"]
    assert engine.bodies[1][0]["input_ids"] == [1, 2, 7]
    assert spans(completion) == [("math@1", 0, 1), ("math@2", 1, 2)]
    refused = (400, "The following requested LoRA adapters are not loaded: math@1")
    completion = await engine.generate([refused, rest], adapters=Updated(), adapter="math")
    assert spans(completion) == [("math@2", 0, 1)]


@pytest.mark.parametrize("versions", [[("a", 0, 1)], [("a", 0, 1), ("b", 0, 2)]])
async def test_versions_that_do_not_cover_the_tokens_are_dropped(engine, versions):
    assert (await engine.generate([reply([7, 8], versions=versions)])).weight_versions == ()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([], (None, None)),
        ([[-1.0, 7, None]], (None, None)),
        ([[-1.0, 9, None], [-2.0, 8, None]], (None, -2.0)),
        ([[None, 7, None], [float("-inf"), 8, None]], (None, None)),
    ],
)
async def test_missing_logprobs_are_none(engine, given, wanted):
    assert (await engine.generate([reply([7, 8], output_token_logprobs=given)])).logprobs == wanted


@pytest.mark.parametrize("failure", [(500, "oops"), (429, ""), "cut"])
async def test_a_transient_failure_is_retried_with_another_request_id(engine, failure):
    completion = await engine.generate([failure, reply([7])])
    assert completion.token_ids == (7,)
    rids = [body["rid"] for body, _ in engine.bodies]
    assert len(set(rids)) == 2


async def test_a_lasting_failure_is_reported_with_the_engines_message(engine):
    with pytest.raises(EngineUnavailable, match=r"in 2 attempts.*no worker is up"):
        await engine.generate([(503, "no worker is up")] * 2, attempts=2)


async def test_a_call_ends_at_its_timeout(engine):
    with pytest.raises(EngineUnavailable, match=r"within 0\.2 s"):
        await engine.generate(["hang"], timeout_s=0.2)


async def test_a_generation_that_is_aborted_more_often_than_it_has_attempts_continues_from_its_tokens(engine):
    completion = await engine.generate(
        [
            reply([7, 8], "abort", versions=[("1", 0, 2)], cached_tokens=1),
            reply([9], "abort", versions=[("2", 0, 1)], cached_tokens=4),
            reply([10, 11], "stop", versions=[("2", 0, 2)]),
        ],
        attempts=1,
    )
    assert completion.token_ids == (7, 8, 9, 10, 11)
    assert completion.logprobs == (-0.25,) * 5
    assert spans(completion) == [("1", 0, 2), ("2", 2, 5)]
    assert completion.cached_tokens == 1
    assert [body["input_ids"] for body, _ in engine.bodies] == [[1, 2], [1, 2, 7, 8], [1, 2, 7, 8, 9]]
    assert [body["sampling_params"]["max_new_tokens"] for body, _ in engine.bodies] == [10, 8, 7]


async def test_an_abort_at_the_last_token_ends_the_reply_with_length(engine):
    completion = await engine.generate([reply(range(10), "abort")])
    assert (len(completion.token_ids), completion.finish_reason) == (10, "length")


async def test_repeated_aborts_are_reported_as_unavailable(engine):
    with pytest.raises(EngineUnavailable, match="aborted"):
        await engine.generate([reply([], "abort")] * 3)


# --- streams ----------------------------------------------------------------------------------------------


def piece(ids, total, kind=None, version="1", **meta):
    """Return an event of a stream: its tokens, and the number of tokens of the attempt so far."""
    event = reply(ids, kind, weight_version=version, completion_tokens=total, **meta)
    return event if kind else {**event, "meta_info": {**event["meta_info"], "finish_reason": None}}


class Progress:
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
async def test_the_progress_of_a_stream_is_reported(engine, events):
    progress = Progress()
    completion = await engine.generate([events], progress=progress)
    assert progress.seen == [(7,), (7, 8, 9)]
    assert completion.token_ids == (7, 8, 9, 10)
    assert completion.logprobs == (-0.25,) * 4
    assert spans(completion) == [("1", 0, 4)]
    body, _ = engine.bodies[0]
    assert body["stream"] is True
    assert body["sampling_params"]["stream_interval"] > 1


@pytest.mark.parametrize("end", [piece([8], 2, "abort"), "cut"])
async def test_a_stream_that_ends_early_continues_from_its_tokens(engine, end):
    progress = Progress()
    completion = await engine.generate(
        [[piece([7, 8], 2), end], [piece([9], 1, version="2"), piece([10], 2, "stop", version="2")]],
        progress=progress,
    )
    assert completion.token_ids == (7, 8, 9, 10)
    assert completion.logprobs == (-0.25,) * 4
    assert spans(completion) == [("1", 0, 2), ("2", 2, 4)]
    assert progress.seen == [(7, 8), (7, 8, 9)]
    assert engine.bodies[1][0]["input_ids"] == [1, 2, 7, 8]


async def test_a_stream_cut_while_the_weights_changed_has_no_version(engine):
    events = [[piece([7], 1), piece([8], 2, version="2"), "cut"], [piece([9], 1, "stop", version="2")]]
    completion = await engine.generate(events, progress=Progress())
    assert (completion.token_ids, completion.weight_versions) == ((7, 8, 9), ())


async def test_errors_in_a_stream_are_refusals_or_retried(engine):
    with pytest.raises(EngineRefused, match="too long"):
        await engine.generate([[{"error": {"message": "too long", "code": 400}}]], progress=Progress())
    refused = piece([], 0, "abort")
    refused["meta_info"]["finish_reason"] |= {"status_code": 400, "message": "no grammar"}
    with pytest.raises(EngineRefused, match="no grammar"):
        await engine.generate([[refused]], progress=Progress())
    busy = [{"error": {"message": "busy", "code": 503}}]
    assert (await engine.generate([busy, [piece([7], 1, "stop")]], progress=Progress())).token_ids == (7,)


async def test_a_large_event_is_read(engine):
    ids = list(range(20_000))
    params = {**PARAMS, "max_new_tokens": 30_000}
    completion = await engine.generate([[piece(ids, len(ids), "stop")]], params=params, progress=Progress())
    assert completion.token_ids == tuple(ids)


async def test_a_generation_that_cannot_be_resumed_starts_again(engine):
    completion = await engine.generate([reply([7, 8], "abort"), reply([9])], resumable=False)
    assert completion.token_ids == (9,)
    assert [body["input_ids"] for body, _ in engine.bodies] == [[1, 2], [1, 2]]


@pytest.mark.parametrize("leaves", ["at a stop string", "as its call is cancelled"])
async def test_an_engine_is_told_by_id_which_request_has_no_reader_left(engine, leaves):
    """SGLang 0.5.12 looks for closed connections every 2 s. A router forwards no abort, so the engines get it."""
    routing = Engines(engine.url)
    routing.urls = (engine.url,)
    if leaves == "at a stop string":
        await engine.generate([[piece([7, 8, 9], 3), "run until aborted"]], engines=routing, stops=STOPS)
    else:
        sampled = asyncio.Event()
        streams = [[piece([7], 1), "run until aborted"]]
        call = asyncio.create_task(engine.generate(streams, engines=routing, progress=lambda *_: sampled.set()))
        await sampled.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert engine.ended == [engine.bodies[0][0]["rid"]]
    assert engine.read_to_the_end  # SGLang's pause waits for requests whose connection is open


STOPS = StopStrings(["END"], {7: b"one ", 8: b"E", 9: b"ND two", 10: b"three"})


async def test_a_stop_string_cuts_the_stream_at_the_token_that_completes_it(engine):
    versions = [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 4}]
    events = [piece([7], 1), piece([8, 9, 10], 4, weight_versions=versions), "hang"]
    progress = Progress()
    completion = await engine.generate([events], progress=progress, stops=STOPS)
    assert (completion.token_ids, completion.logprobs) == ((7, 8, 9), (-0.25,) * 3)
    assert (completion.finish_reason, completion.matched) == ("stop", "END")
    assert spans(completion) == [("1", 0, 2), ("2", 2, 3)]
    assert progress.seen == [(7,)]
    await asyncio.wait_for(engine.aborted.wait(), 60)


async def test_a_stop_string_across_an_abort_is_found(engine):
    completion = await engine.generate([[piece([7, 8], 2, "abort")], [piece([9, 10], 2, "stop")]], stops=STOPS)
    assert (completion.token_ids, completion.matched) == ((7, 8, 9), "END")
    assert completion.logprobs == (-0.25,) * 3
    assert spans(completion) == [("1", 0, 3)]


async def test_an_engine_that_does_not_stream_is_supported(engine):
    progress = Progress()
    assert (await engine.generate([reply([7, 8])], progress=progress)).token_ids == (7, 8)
    assert progress.seen == []


# --- calls that bypass the router -------------------------------------------------------------------------

FORCED = {**PARAMS, "structural_tag": "{}"}
URLS = [f"http://10.0.0.{i}:30000" for i in range(8)]


@pytest.fixture
def engines() -> Engines:
    engines = Engines("http://router")
    engines.urls = URLS
    return engines


@pytest.mark.parametrize("params", [FORCED, {**PARAMS, "json_schema": "{}"}, {**PARAMS, "logit_bias": {"7": -100}}])
async def test_calls_that_a_router_would_change_go_to_one_engine_per_session(engines, params):
    first = {key: await engines.url_for(params, key) for key in map(str, range(200))}
    assert set(first.values()) == set(URLS)  # all of them have work
    gone = first["0"]
    engines.urls = [url for url in reversed(URLS) if url != gone]
    after = {key: await engines.url_for(params, key) for key in first}
    assert all(after[key] == url for key, url in first.items() if url != gone)
    assert gone not in after.values()


async def test_the_router_gets_what_it_forwards_unchanged(engines):
    assert await engines.url_for({**PARAMS, "stop": ["x"]}, "s") == engines.url


async def test_failed_engines_are_tried_last(engines):
    order: list[str] = []
    for _ in URLS:
        order.append(await engines.url_for(FORCED, "s", order))
    assert sorted(order) == sorted(URLS)
    assert await engines.url_for(FORCED, "s", order) == order[0]


@pytest.mark.parametrize(("all_calls_direct", "params"), [(True, PARAMS), (False, FORCED)])
@pytest.mark.parametrize(("first", "attempts"), [(503, 1), ({"workers": []}, 100)])  # it waits, and is retried
async def test_a_call_past_the_router_goes_to_an_engine_once_one_is_listed(
    engine, all_calls_direct, params, first, attempts
):
    answers, asked = iter([first]), set()

    async def router(request: web.Request) -> web.Response:
        asked.add(request.path)
        answer = next(answers, {"workers": [{"url": engine.url}]})
        return web.Response(status=answer) if isinstance(answer, int) else web.json_response(answer)

    async with served(router) as url:
        engines = Engines(url, all_calls_direct)
        async with background(engines.poll(lambda loads: None, 0.01)):
            await asyncio.sleep(0)  # it has begun
            completion = await engine.generate([reply([7])], params=params, engines=engines, attempts=attempts)
    assert (completion.token_ids, len(engine.hosts), asked) == ((7,), 1, {"/workers"})


@pytest.fixture
def two_engines(engine) -> Engines:
    engines = Engines(engine.url)
    engines.urls = [engine.url, engine.url.replace("127.0.0.1", "localhost")]  # the same server
    return engines


@pytest.mark.parametrize("params", [FORCED, {**PARAMS, "json_schema": "{}"}])
@pytest.mark.parametrize("busy", [(503, "starting"), (500, "out of memory"), (429, "full")])
async def test_a_constrained_call_that_an_engine_refuses_is_retried_at_another(engine, two_engines, params, busy):
    completion = await engine.generate([busy, reply([7])], params=params, engines=two_engines, resumable=False)
    assert completion.token_ids == (7,)
    assert sorted(engine.hosts) == sorted(url.removeprefix("http://") for url in two_engines.urls)
    assert all(body["sampling_params"].keys() >= params.keys() for body, _ in engine.bodies)


@pytest.mark.parametrize("lost", ["cut", [piece([7], 1), "cut"], (502, "bad gateway"), (504, "timeout")])
@pytest.mark.parametrize("stops", [None, StopStrings(["END"], {})])
async def test_a_constrained_call_is_not_repeated_once_its_connection_breaks(engine, two_engines, lost, stops):
    """Its grammar may have ended the engine, and would end the next one."""
    with pytest.raises(ConstrainedCallLost):
        await engine.generate([lost, reply([7])], params=FORCED, engines=two_engines, stops=stops, resumable=False)
    assert len(engine.bodies) == 1
    free = await engine.generate([lost, [piece([7], 1, "stop")]], engines=two_engines, stops=stops)
    assert free.token_ids[-1] == 7
    assert len(engine.bodies) == 2


async def test_a_constrained_call_that_no_engine_received_is_retried(engine, two_engines):
    gone = f"http://127.0.0.1:{free_port()}"
    two_engines.urls = [gone, engine.url]
    for key in map(str, range(8)):  # some of them begin at the engine that is gone
        await engine.generate([reply([7])], params=FORCED, engines=two_engines, routing_key=key, resumable=False)


async def test_an_engine_that_aborts_keeps_the_call(engine):
    engines = Engines(engine.url)
    engines.urls = [engine.url, engine.url.replace("127.0.0.1", "localhost")]
    await engine.generate([reply([7], "abort"), reply([7])], params=FORCED, engines=engines, resumable=False)
    assert len(set(engine.hosts)) == 1


# --- pauses -----------------------------------------------------------------------------------------------


async def test_a_pause_cancels_running_calls_and_waits_until_they_have_ended():
    calls, ended = Engines("http://engine"), asyncio.Event()

    async def call() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    running = asyncio.create_task(calls.run(call()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await calls.pause()
    assert ended.is_set()
    with pytest.raises(CallsPaused):
        await running
    with pytest.raises(CallsPaused):
        await calls.run(call())
    waiting = asyncio.create_task(calls.wait_resumed())
    calls.resume()
    await waiting


async def test_a_cancelled_caller_does_not_pause_calls():
    calls = Engines("http://engine")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await calls.run(asyncio.Event().wait())
    assert not calls.paused


# --- a router that restarts -------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [False, True])
async def test_a_call_waits_until_a_restarted_router_has_its_engines(lost):
    port = free_port()
    engines = Engines(f"http://127.0.0.1:{port}")
    engines.urls = URLS[:3]
    listed, asked = [0], []

    async def handle(request: web.Request) -> web.Response:
        if request.path == "/workers":
            listed.append(min(len(listed), 2 if lost else 3))  # one more at each request
            workers = [{"url": url, "is_healthy": True} for url in URLS[: listed[-1]]]
            return web.json_response({"workers": workers})
        asked.append(listed[-1])
        return web.json_response(reply([7]))

    client = EngineClient(engines, 120.0)
    engines.restart_limit_s = 0.2 if lost else 120.0
    await client.start()
    call = asyncio.create_task(client.generate(EngineRequest((1, 2), PARAMS, "session-1")))
    await eventually(lambda: engines.restart is not None)
    async with served(handle, port=port):
        assert (await call).token_ids == (7,)
        await client.close()
    assert lost or asked == [3]
