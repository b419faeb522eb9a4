import json
import math
import threading
import time

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_backend.local.scripted import Fail, Pieces, ScriptedEngine, ToolCall
from rollout_backend.serving.server_process import free_port

MODEL = "scripted"
USER = [{"role": "user", "content": "What is 2 + 3?"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
    }
]


def until(condition, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def post(gateway, body: bytes | dict, key: str | None = None, path: str = "/v1/chat/completions") -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key if key is not None else gateway.key()}"}
    return httpx.post(gateway.url + path, content=content, headers=headers, timeout=30)


def ask(client: openai.OpenAI, messages=USER, **more):
    return client.chat.completions.create(model=MODEL, messages=messages, **more)


def chunks(lines) -> list[dict]:
    """The data of a stream's events, but for the last, which is [DONE]."""
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


class Held:
    """A script whose answers wait until they are let go."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)
        self.go = threading.Event()

    def __call__(self, prompt: str) -> str:
        self.asked.release()
        self.go.wait(30)
        return "at last"


@pytest.fixture
def held():
    script = Held()
    with ScriptedEngine(script) as engine:
        script.engine = engine
        yield script
        script.go.set()


# --- calls ------------------------------------------------------------------------------------------------


def test_a_plain_call(serve):
    with ScriptedEngine(["5"]) as engine:
        gateway = serve(engine.url)
        answer = ask(gateway.client(), logprobs=True)
        sent = engine.requests[0]
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("5", None, "stop")
    assert [entry.token for entry in choice.logprobs.content] == ["5", "<|im_end|>"]
    assert choice.logprobs.content[0].logprob == -0.5
    assert answer.usage.prompt_tokens == len(sent["input_ids"])
    assert answer.usage.completion_tokens == 2
    assert sent["return_logprob"] is True
    assert sent["logprob_start_len"] == -1
    trajectory = gateway.trajectory()
    (segment,) = trajectory.segments
    assert trajectory.model == MODEL
    assert segment.token_ids.tolist()[:-2] == sent["input_ids"]
    assert segment.response_mask.tolist()[-3:] == [0, 1, 1]
    assert segment.logprobs[-1] == -0.5
    assert math.isnan(segment.logprobs[0])
    (turn,) = segment.turns
    assert (turn.finish_reason, turn.weight_versions[0].version) == ("stop", "0")
    assert [message["content"] for message in segment.messages] == ["What is 2 + 3?", "5"]


def tool_turns(client: openai.OpenAI, stream: bool):
    """An agent that answers tool calls until there are none, and asks once more."""
    messages = [{"role": "system", "content": "Use tools."}, *USER]
    for _ in range(4):
        if stream:
            with client.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS) as events:
                reply = events.get_final_completion().choices[0]
        else:
            reply = ask(client, messages, tools=TOOLS).choices[0]
        messages.append(reply.message.model_dump(exclude={"parsed"}))
        if reply.finish_reason == "tool_calls":
            for call in reply.message.tool_calls:
                result = str(sum(json.loads(call.function.arguments).values()))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        else:
            messages.append({"role": "user", "content": [{"type": "text", "text": "Sure?"}]})
    return messages


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_tools_is_one_segment(serve, bundle, stream):
    two = f"I add twice.\n{ToolCall('add', {'a': 2, 'b': 3})}\n{ToolCall('add', {'a': 1})}"
    with ScriptedEngine([ToolCall("add", {"a": 2, "b": 3}), two, "It is 5.", "Yes."]) as engine:
        gateway = serve(engine.url)
        messages = tool_turns(gateway.client(), stream)
        prompts = [request["input_ids"] for request in engine.requests]
    assert [message["content"] for message in messages if message["role"] == "tool"] == ["5", "5", "1"]
    (segment,) = gateway.trajectory().segments
    assert len(segment.turns) == 4
    assert [segment.token_ids.tolist()[: turn.start] for turn in segment.turns] == prompts
    text = bundle.decode(segment.token_ids)
    assert text.count("<tool_response>") == 3
    assert text.endswith(
        "It is 5.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>"
    )
    assert gateway.stats().segments == {"first_call": 1}


def test_a_stream_has_the_whole_answer_and_its_usage(serve):
    with ScriptedEngine([f"hm {ToolCall('add', {'a': 1})}", "5"]) as engine:
        gateway = serve(engine.url)
        chunks = list(ask(gateway.client(), stream=True, tools=TOOLS, stream_options={"include_usage": True}))
        plain = list(ask(gateway.client("s2"), stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hm"
    (call,) = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or ()]
    assert (call.index, call.function.name, json.loads(call.function.arguments)) == (0, "add", {"a": 1})
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
    assert chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in plain)


def test_a_slow_stream_is_kept_alive(serve, held):
    gateway = serve(held.engine.url, keepalive_s=0.05)
    body = {"model": MODEL, "messages": USER, "stream": True}
    headers = {"Authorization": f"Bearer {gateway.key()}"}
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, headers=headers) as response:
        lines = response.iter_lines()
        while not next(lines).startswith(": "):
            pass
        held.go.set()
        rest = list(lines)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks(rest)) == "at last"
    assert [line for line in rest if line][-1] == "data: [DONE]"


def test_a_slow_stream_that_fails_says_so_as_an_event(serve):
    go = threading.Event()

    def fails(_: str) -> Fail:
        go.wait(30)
        return Fail(400, "no good")

    with ScriptedEngine(fails) as engine:
        gateway = serve(engine.url, keepalive_s=0.05)
        stream = ask(gateway.client(), stream=True)
        go.set()
        with pytest.raises(openai.APIError, match="no good"):
            list(stream)
        assert gateway.stats().errors == {"engine_refused": 1}


def streamed(gateway, body: dict, path: str = "/v1/chat/completions"):
    headers = {"Authorization": f"Bearer {gateway.key()}"}
    return httpx.stream("POST", gateway.url + path, json={"model": MODEL, **body}, headers=headers, timeout=30)


@pytest.mark.parametrize("cumulative", [False, True])
def test_a_stream_tells_what_is_sampled_before_the_rest_is(serve, cumulative):
    go = threading.Event()

    def parts():
        yield "I look "
        go.wait(30)
        yield f"twice.{ToolCall('add', {'a': 1})}"

    with ScriptedEngine([Pieces(parts()), "done"]) as engine:
        engine.cumulative = cumulative
        gateway = serve(engine.url)
        with streamed(gateway, {"messages": USER, "tools": TOOLS, "stream": True}) as response:
            lines, text = response.iter_lines(), ""
            while text != "I look":
                text += "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks([next(lines)]))
            go.set()
            rest = chunks(lines)
    deltas = [chunk["choices"][0]["delta"] for chunk in rest]
    assert "".join(delta.get("content", "") for delta in deltas) == " twice."
    (call,) = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}
    assert rest[-1]["choices"][0]["finish_reason"] == "tool_calls"
    (segment,) = gateway.trajectory().segments
    assert segment.messages[-1]["content"] == "I look twice."
    assert segment.messages[-1]["tool_calls"][0]["id"] == call["id"]
    assert segment.sampled_tokens == len(f"I look twice.{ToolCall('add', {'a': 1})}<")
    assert set(segment.logprobs[segment.turns[0].start :]) == {-0.5}


def test_a_stream_that_is_left_aborts_its_call_and_leaves_no_trace(serve):
    def parts():
        yield "Once upon a time"
        threading.Event().wait(5)
        yield "x"

    with ScriptedEngine(lambda _: Pieces(parts())) as engine:
        gateway = serve(engine.url)
        with streamed(gateway, {"messages": USER, "stream": True}) as response:
            next(response.iter_lines())
        until(lambda: engine.aborted == 1)
        until(lambda: gateway.stats().hung_up == 1)
        assert gateway.stats().calls_in_flight == 0
    assert gateway.trajectory().segments == ()


def test_to_seal_ends_a_stream_with_an_error(serve):
    def parts():
        yield "Once upon a time"
        threading.Event().wait(5)
        yield "x"

    with ScriptedEngine(lambda _: Pieces(parts())) as engine:
        gateway = serve(engine.url)
        with streamed(gateway, {"messages": USER, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            assert gateway.trajectory().segments == ()
            assert chunks(lines)[-1]["error"]["code"] == "session_closed"


# --- several choices, one call at a time, forced forms -----------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_turns_of_their_own(serve, stream):
    words = iter(["one", "two", "three", "four"])
    with ScriptedEngine(lambda _: next(words)) as engine:
        gateway = serve(engine.url)
        answer = ask(gateway.client(seed=1), n=3, stream=stream)
        if stream:
            told = [choice for chunk in answer for choice in chunk.choices]
            said = ["".join(c.delta.content or "" for c in told if c.index == i) for i in range(3)]
        else:
            said = [choice.message.content for choice in answer.choices]
            assert answer.usage.completion_tokens == len("onetwothree") + 3
        seeds = {request["sampling_params"]["sampling_seed"] for request in engine.requests}
        assert {tuple(request["input_ids"]) for request in engine.requests} == {
            tuple(engine.requests[0]["input_ids"])
        }
        ask(gateway.client(), [*USER, {"role": "assistant", "content": said[1]}, *USER])
    assert sorted(said) == ["one", "three", "two"]
    assert len(seeds) == 3
    segments = gateway.trajectory().segments
    assert [segment.split_reason for segment in segments] == ["first_call", "branched", "branched"]
    assert [len(segment.turns) for segment in segments] == [1, 2, 1]
    assert gateway.stats().calls == 2


def test_one_choice_that_fails_fails_them_all(serve):
    with ScriptedEngine(["x", Fail(400, "no good")]) as engine:
        gateway = serve(engine.url)
        with pytest.raises(openai.InternalServerError, match="no good"):
            ask(gateway.client(), n=2)
    assert gateway.trajectory().segments == ()


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_the_first_is_returned_and_all_are_tokens(serve, stream):
    two = f"{ToolCall('add', {'a': 1})}{ToolCall('add', {'a': 2})}"
    with ScriptedEngine([two]) as engine:
        gateway = serve(engine.url)
        answer = ask(gateway.client(), tools=TOOLS, parallel_tool_calls=False, stream=stream)
        if stream:
            calls = [call for chunk in answer for choice in chunk.choices for call in choice.delta.tool_calls or ()]
        else:
            calls = answer.choices[0].message.tool_calls
    (call,) = calls
    assert json.loads(call.function.arguments) == {"a": 1}
    (segment,) = gateway.trajectory().segments
    assert segment.sampled_tokens == len(two) + 1
    assert gateway.stats().extra_tool_calls == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_reply_has_no_logprobs_to_train_on(serve, stream):
    with ScriptedEngine(['{"a": 1}', "free"]) as engine:
        gateway = serve(engine.url)
        answer = ask(gateway.client(), response_format={"type": "json_object"}, stream=stream)
        told = answer if stream else [answer]
        parts = [choice.delta if stream else choice.message for part in told for choice in part.choices]
        assert "".join(part.content or "" for part in parts) == '{"a": 1}'
        ask(gateway.client(), [{"role": "user", "content": "Freely now."}])
        params = [request["sampling_params"] for request in engine.requests]
    assert json.loads(params[0]["json_schema"]) == {"type": "object"}
    assert "json_schema" not in params[1]
    forced, free = gateway.trajectory().segments
    assert all(math.isnan(logprob) for logprob in forced.logprobs)
    assert free.logprobs[-1] == -0.5
    assert gateway.stats().constrained == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_that_did_not_reach_the_engine_is_told(serve, stream):
    """As behind sglang-router, which passes no structural tags on: the model answers freely."""
    with ScriptedEngine(["I had rather talk.", "Well."]) as engine:
        gateway = serve(engine.url)
        with pytest.raises(openai.APIError, match="because it got no structural_tag"):
            ask(gateway.client(), tools=TOOLS, tool_choice="required", stream=stream)
        assert "structural_tag" in engine.requests[0]["sampling_params"]
        assert gateway.stats().errors == {"constrained_decoding_unavailable": 1}
        ask(gateway.client(), tools=TOOLS)
    trajectory = gateway.trajectory()
    assert trajectory.unanswered_calls == 0
    assert [len(segment.turns) for segment in trajectory.segments] == [1]


@pytest.mark.parametrize(
    "more", [{"response_format": {"type": "json_object"}}, {"tools": TOOLS, "tool_choice": "required"}]
)
def test_forcing_can_be_switched_off_and_an_engine_may_not_be_able_to(serve, more):
    with ScriptedEngine(lambda _: Fail(400, "not supported with --grammar-backend none")) as engine:
        unable = post(serve(engine.url), {"model": MODEL, "messages": USER, **more})
        asked = len(engine.requests)
        refused = post(
            serve(engine.url, gateway={"constrained_decoding": "refuse"}), {"model": MODEL, "messages": USER, **more}
        )
        assert len(engine.requests) == asked
    assert (unable.status_code, unable.json()["error"]["code"]) == (400, "constrained_decoding_unavailable")
    assert (refused.status_code, refused.json()["error"]["param"]) == (
        400,
        "tool_choice" if "tools" in more else "response_format",
    )


# --- budgets ----------------------------------------------------------------------------------------------


def test_a_session_samples_no_more_than_it_may(serve):
    with ScriptedEngine(lambda _: "xxxx") as engine:
        gateway = serve(engine.url, gateway={"session_tokens": 12})
        client = gateway.client()
        replies = [ask(client).choices[0] for _ in range(3)]
        with pytest.raises(openai.BadRequestError) as used_up:
            ask(client)
        assert ask(gateway.client("s2")).choices[0].message.content == "xxxx"
    assert [reply.message.content for reply in replies] == ["xxxx", "xxxx", "xx"]
    assert [reply.finish_reason for reply in replies] == ["stop", "stop", "length"]
    assert used_up.value.code == "session_tokens_exceeded"
    assert gateway.stats().errors == {"session_tokens_exceeded": 1}
    assert sum(segment.sampled_tokens for segment in gateway.trajectory().segments) == 12


# --- where it is found ------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["/v1", "/v1/v1", ""])
def test_one_base_url_serves_every_client(serve, echo, prefix):
    gateway = serve(echo.url)
    messages = {"model": MODEL, "messages": USER, "max_tokens": 5}
    bodies = {"/chat/completions": messages, "/messages": messages, "/responses": {"model": MODEL, "input": "a"}}
    for path, body in bodies.items():
        assert post(gateway, body, path=prefix + path).status_code == 200, path
    headers = {"x-api-key": gateway.key()}
    counted = httpx.post(f"{gateway.url}{prefix}/messages/count_tokens", json=messages, headers=headers)
    assert counted.json()["input_tokens"] == len(echo.requests[-2]["input_ids"])
    models = httpx.get(f"{gateway.url}{prefix}/models", headers=headers).json()
    assert models["data"] == [httpx.get(f"{gateway.url}{prefix}/models/{MODEL}", headers=headers).json()]
    assert {"created", "owned_by", "display_name", "created_at"} <= set(models["data"][0])
    assert httpx.get(f"{gateway.url}{prefix}/models/gpt-9", headers=headers).status_code == 404


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/chat/completions", {"error"}),
        ("/v1/responses", {"error"}),
        ("/v1/messages", {"type", "error", "request_id"}),
    ],
)
def test_an_error_has_the_shape_of_the_api_that_was_called(serve, path, shape):
    gateway = serve("http://127.0.0.1:1")
    for key, status in ((gateway.key(), 400), ("nonsense", 401)):
        response = post(gateway, b"{", key, path)
        assert (response.status_code, set(response.json())) == (status, shape)


def test_an_unknown_path_is_an_error_as_the_client_reads_it(serve):
    gateway = serve("http://127.0.0.1:1")
    response = httpx.get(f"{gateway.url}/v1/nonsense", headers={"anthropic-version": "2023-06-01"})
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")


def test_the_session_of_another_shard_is_refused(serve):
    gateways = [
        serve("http://127.0.0.1:1", gateway={"processes": 2, "public_url": "x{shard}"}, shard=i) for i in (0, 1)
    ]
    statuses = [gateway.seal("s1").status_code for gateway in gateways]
    assert sorted(statuses) == [200, 421]


def test_a_malformed_tool_call_is_returned_as_text(serve):
    with ScriptedEngine(["<tool_call>\n{'name': 'add'}\n</tool_call>"]) as engine:
        gateway = serve(engine.url)
        (choice,) = ask(gateway.client(), tools=TOOLS).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert "{'name': 'add'}" in choice.message.content
    assert gateway.stats().malformed_tool_calls == 1


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_nothing_is_a_tool_call(serve, more):
    with ScriptedEngine([ToolCall("add")]) as engine:
        (choice,) = ask(serve(engine.url).client(), **more).choices
    assert choice.message.tool_calls is None
    assert choice.message.content == str(ToolCall("add"))


def test_a_stop_string_ends_the_reply_and_is_not_part_of_it(serve):
    with ScriptedEngine(["one two three", "four"]) as engine:
        gateway = serve(engine.url)
        client = gateway.client()
        (choice,) = ask(client, stop=" two").choices
        reply = {"role": "assistant", "content": choice.message.content}
        ask(client, [*USER, reply, *USER])
    assert (choice.message.content, choice.finish_reason) == ("one", "stop")
    (segment,) = gateway.trajectory().segments
    assert segment.sampled_tokens == len("one two") + len("four<")  # what was sampled, the stop string included


def test_conversations_of_one_session_interleave(serve):
    with ScriptedEngine(lambda prompt: str(prompt.count("user"))) as engine:
        gateway = serve(engine.url)
        client = gateway.client()
        histories = {"a": [], "b": []}
        for _ in range(3):
            for name, history in histories.items():
                history.append({"role": "user", "content": name})
                history.append(ask(client, history).choices[0].message.model_dump())
    segments = gateway.trajectory().segments
    assert [len(segment.turns) for segment in segments] == [3, 3]
    assert [segment.split_reason for segment in segments] == ["first_call", "new_conversation"]


def test_concurrent_calls_of_one_session_are_all_recorded(serve):
    with ScriptedEngine(lambda prompt: "x") as engine:
        gateway = serve(engine.url)
        client = gateway.client()
        threads = [threading.Thread(target=ask, args=(client,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    segments = gateway.trajectory().segments
    assert [segment.split_reason for segment in segments][1:] == ["branched"] * 7 or len(segments) == 8
    assert sum(segment.sampled_tokens for segment in segments) == 16


# --- sampling ---------------------------------------------------------------------------------------------


def test_the_trainers_sampling_wins(serve):
    with ScriptedEngine(lambda _: "x") as engine:
        gateway = serve(engine.url)
        client = gateway.client(temperature=0.8, top_p=0.9, top_k=5, max_tokens=50)
        ask(client, temperature=0.1, top_p=0.9, presence_penalty=1.0, max_tokens=7)
        ask(client, max_completion_tokens=500)
        params = [request["sampling_params"] for request in engine.requests]
    assert {name: params[0][name] for name in ("temperature", "top_p", "top_k", "max_new_tokens")} == {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 5,
        "max_new_tokens": 7,
    }
    assert params[1]["max_new_tokens"] == 50
    assert "presence_penalty" not in params[0]
    assert gateway.stats().overridden == {"temperature": 1, "presence_penalty": 1}


def test_an_agent_may_set_what_it_is_allowed_to(serve):
    with ScriptedEngine(lambda _: "x") as engine:
        gateway = serve(engine.url, gateway={"agent_sampling_overrides": ["temperature", "seed"]})
        ask(gateway.client(), temperature=0.1, top_p=0.5, seed=3)
        params = engine.requests[0]["sampling_params"]
    assert (params["temperature"], params["top_p"], params["sampling_seed"]) == (0.1, 1.0, 3)
    assert gateway.stats().overridden == {"top_p": 1}


def test_a_seed_gives_each_call_a_seed_of_its_own(serve):
    with ScriptedEngine(lambda _: "x") as engine:
        client = serve(engine.url).client(seed=1)
        ask(client)
        ask(client)
        seeds = [request["sampling_params"]["sampling_seed"] for request in engine.requests]
    assert seeds[0] != seeds[1]


# --- keys, sealing, revoking ------------------------------------------------------------------------------


def test_a_bad_key_is_refused(serve):
    gateway = serve("http://127.0.0.1:1")
    for key in ("nonsense", gateway.key(secret="other-secret" * 4), gateway.key(lives_s=-1)):
        with pytest.raises(openai.AuthenticationError) as refused:
            ask(gateway.client_with(key))
        assert refused.value.code == "invalid_api_key"
        assert key not in str(refused.value)
    assert gateway.stats().errors == {"invalid_api_key": 3}


def test_a_key_reaches_its_own_session_only(serve):
    with ScriptedEngine(lambda _: "x") as engine:
        gateway = serve(engine.url)
        ask(gateway.client("s1"))
        assert gateway.trajectory("s2").segments == ()
        assert len(gateway.trajectory("s1").segments) == 1


def test_a_sealed_session_is_closed_and_repeats_its_trajectory(serve):
    with ScriptedEngine(lambda _: "x") as engine:
        gateway = serve(engine.url)
        ask(gateway.client())
        first, second = gateway.seal().content, gateway.seal().content
        assert first == second
        with pytest.raises(openai.APIStatusError) as closed:
            ask(gateway.client())
    assert (closed.value.status_code, closed.value.code) == (410, "session_closed")
    stats = gateway.stats()
    assert (stats.sessions_open, stats.sessions_closed) == (0, 1)


def test_sealing_aborts_calls_in_flight(serve, held):
    gateway = serve(held.engine.url)
    errors = []

    def call() -> None:
        with pytest.raises(openai.APIStatusError) as error:
            ask(gateway.client())
        errors.append(error.value.status_code)

    thread = threading.Thread(target=call)
    thread.start()
    held.asked.acquire()
    assert gateway.stats().calls_in_flight == 1
    assert gateway.trajectory().segments == ()
    thread.join(10)
    assert errors == [410]
    until(lambda: held.engine.aborted == 1)


def test_revoking_closes_sessions_that_called_and_those_that_did_not(serve, held):
    gateway = serve(held.engine.url)
    statuses = []
    thread = threading.Thread(
        target=lambda: statuses.append(post(gateway, {"model": MODEL, "messages": USER}).status_code)
    )
    thread.start()
    held.asked.acquire()
    revoked = httpx.post(f"{gateway.url}/control/revoke", json={"session_ids": ["s1", "s9"]}, headers=gateway.control)
    assert revoked.json() == {"revoked": 2}
    thread.join(10)
    assert statuses == [410]
    for session in ("s1", "s9"):
        assert gateway.seal(session).status_code == 410
        assert post(gateway, {"model": MODEL, "messages": USER}, gateway.key(session)).status_code == 410
    assert gateway.stats().sessions_open == 0


def test_heartbeats_are_handed_over_once_and_open_no_session(serve, held):
    gateway = serve(held.engine.url)

    def beat(session: str, **how) -> int:
        headers = {"Authorization": f"Bearer {gateway.key(session, **how)}"}
        return httpx.post(f"{gateway.url}/v1/rollout/heartbeat", headers=headers).status_code

    def heard() -> dict[str, list[str]]:
        return httpx.post(f"{gateway.url}/control/heartbeats", headers=gateway.control).json()

    assert [beat("s1"), beat("s1"), beat("s2")] == [204] * 3
    assert gateway.seal("s3").status_code == 200
    assert heard() == {"beats": ["s1", "s2"], "calls": ["s3"]}
    assert heard() == {"beats": [], "calls": []}
    assert beat("s3") == 204, "a sealed session's container still has its result to publish"
    httpx.post(f"{gateway.url}/control/revoke", json={"session_ids": ["s1"]}, headers=gateway.control)
    assert beat("s1") == 410
    assert beat("s4", lives_s=-1) == 401
    assert beat("s4", secret="x" * 32) == 401
    assert heard() == {"beats": ["s3"], "calls": []}
    assert gateway.stats().sessions_open == 0


def test_the_control_api_needs_its_own_key(serve):
    gateway = serve("http://127.0.0.1:1")
    for headers in ({}, {"Authorization": f"Bearer {gateway.key()}"}, {b"Authorization": "Bearer é".encode()}):
        assert httpx.get(f"{gateway.url}/control/stats", headers=headers).status_code == 401
        body = {"session_ids": ["s1"]}
        assert httpx.post(f"{gateway.url}/control/revoke", json=body, headers=headers).status_code == 401
        assert httpx.post(f"{gateway.url}/control/heartbeats", headers=headers).status_code == 401
    assert gateway.seal().status_code == 200
    bad = httpx.post(f"{gateway.url}/control/revoke", json={"ids": []}, headers=gateway.control)
    assert bad.status_code == 400


def test_a_client_that_hangs_up_aborts_its_call_and_leaves_no_trace(serve, held):
    gateway = serve(held.engine.url)
    with pytest.raises(openai.APITimeoutError):
        ask(gateway.client().with_options(timeout=0.3))
    until(lambda: held.engine.aborted == 1)
    until(lambda: gateway.stats().hung_up == 1)
    held.go.set()
    assert gateway.trajectory().segments == ()


# --- failures ---------------------------------------------------------------------------------------------


def test_an_engine_that_is_down_is_a_503_to_try_again(serve):
    gateway = serve(f"http://127.0.0.1:{free_port()}")
    response = post(gateway, {"model": MODEL, "messages": USER})
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0
    assert response.json()["error"]["code"] == "engine_unavailable"
    assert gateway.trajectory().segments == ()


def test_a_call_that_was_never_answered_is_counted_until_it_is_made_again(serve):
    down = True
    with ScriptedEngine(lambda _: Fail(500) if down else "5") as engine:
        gateway = serve(engine.url, engine_attempts=2)
        question, other = {"model": MODEL, "messages": USER}, {"model": MODEL, "messages": [*USER, *USER]}
        for body, session in ((question, "a"), (question, "b"), (other, "b"), (other, "c")):
            assert post(gateway, body, gateway.key(session)).status_code == 503
        down = False
        for body, session in ((question, "a"), (question, "b"), (question, "c")):
            assert post(gateway, body, gateway.key(session)).status_code == 200
        assert post(gateway, {"model": "another", "messages": USER}, gateway.key("a")).status_code == 404
    unanswered = {session: gateway.trajectory(session).unanswered_calls for session in "abc"}
    assert unanswered == {"a": 0, "b": 1, "c": 1}


def test_a_passing_failure_of_the_engine_is_not_seen_by_the_agent(serve):
    with ScriptedEngine([Fail(503), "5"]) as engine:
        gateway = serve(engine.url)
        assert ask(gateway.client()).choices[0].message.content == "5"
    assert gateway.stats().errors == {}


def test_too_long_a_conversation_is_a_clear_400(serve):
    with ScriptedEngine(lambda _: "x" * 5000) as engine:
        gateway = serve(engine.url)
        with pytest.raises(openai.BadRequestError) as error:
            ask(gateway.client(), [{"role": "user", "content": "y" * 5000}])
        assert error.value.code == "context_length_exceeded"
        assert engine.requests == []
        cut = ask(gateway.client("s2"))
        assert cut.choices[0].finish_reason == "length"
        assert cut.usage.total_tokens == 4096


def test_an_unknown_model_is_named(serve):
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-9'") as error:
        serve("http://127.0.0.1:1").client().chat.completions.create(model="gpt-9", messages=USER)
    assert error.value.code == "model_not_found"


def test_the_model_is_listed(serve):
    gateway = serve("http://127.0.0.1:1")
    assert [model.id for model in gateway.client().models.list()] == [MODEL]
    assert httpx.get(f"{gateway.url}/v1/models").status_code == 401
    assert httpx.get(f"{gateway.url}/health").json() == {"status": "ok"}


def test_a_large_body_is_refused(serve):
    gateway = serve("http://127.0.0.1:1", gateway={"max_body_bytes": 2000})
    response = post(gateway, {"model": MODEL, "messages": [{"role": "user", "content": "x" * 4000}]})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    chunked = httpx.post(
        f"{gateway.url}/v1/chat/completions",
        content=(b"x" * 100 for _ in range(40)),
        headers={"Authorization": f"Bearer {gateway.key()}"},
    )
    assert chunked.status_code == 413


def test_one_call_too_many_is_a_429_to_try_again(serve, held):
    gateway = serve(held.engine.url, gateway={"max_concurrent_calls": 1})
    thread = threading.Thread(target=ask, args=(gateway.client(),))
    thread.start()
    held.asked.acquire()
    response = post(gateway, {"model": MODEL, "messages": USER}, gateway.key("s2"))
    held.go.set()
    thread.join()
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json()["error"]["code"] == "rate_limit_exceeded"
    assert post(gateway, {"model": MODEL, "messages": USER}, gateway.key("s2")).status_code == 200


def test_a_refused_call_counts_as_unanswered_until_it_is_made_again(serve, held):
    gateway = serve(held.engine.url, gateway={"max_concurrent_calls": 1})
    thread = threading.Thread(target=ask, args=(gateway.client(),))
    thread.start()
    held.asked.acquire()
    for session in ("s2", "s3"):
        assert post(gateway, {"model": MODEL, "messages": USER}, gateway.key(session)).status_code == 429
    held.go.set()
    thread.join()
    assert post(gateway, {"model": MODEL, "messages": USER}, gateway.key("s2")).status_code == 200
    assert [gateway.trajectory(session).unanswered_calls for session in ("s1", "s2", "s3")] == [0, 0, 1]


def test_an_unknown_path_answers_in_the_apis_shape(serve):
    response = httpx.post(f"{serve('http://127.0.0.1:1').url}/v1/nonsense")
    assert response.status_code == 404
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = ["content", "role", "name", "tool_calls", "tool_call_id", "id", "type", "function", "arguments", "text"]
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "x"])},
        optional={
            "content": json_values | st.text() | st.just([{"type": "text", "text": "a"}]),
            "name": st.text(max_size=5),
            "tool_call_id": st.text(max_size=5) | st.none(),
            "tool_calls": st.lists(
                st.fixed_dictionaries(
                    {"function": st.fixed_dictionaries({"name": st.text(), "arguments": st.text() | json_values})}
                ),
                max_size=2,
            ),
        },
    ),
    max_size=4,
)
bodies = st.fixed_dictionaries(
    {"model": st.just(MODEL), "messages": messages | json_values},
    optional={
        "tools": st.just(TOOLS) | json_values | st.lists(json_values, max_size=2),
        "stop": json_values,
        "temperature": json_values,
        "seed": json_values,
        "max_tokens": json_values,
        "n": json_values,
        "stream": st.booleans() | json_values,
        "logprobs": json_values,
        "response_format": json_values,
        "tool_choice": json_values,
    },
)


@pytest.fixture(scope="module")
def echo():
    with ScriptedEngine(lambda _: "<tool_call>{") as engine:
        yield engine


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=bodies.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=60))
def test_no_body_makes_a_500(shared, body):
    gateway, http = shared
    response = http.post("/v1/chat/completions", content=body, headers={"Authorization": f"Bearer {gateway.key()}"})
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]


@pytest.fixture
def shared(serve, echo):
    gateway = serve(echo.url)
    with httpx.Client(base_url=gateway.url) as http:
        yield gateway, http
    assert gateway.seal().status_code == 200


@pytest.mark.parametrize(
    "more",
    [
        {"n": 17},
        {"n": 0},
        {"top_logprobs": 2, "logprobs": True},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": TOOLS},
        {"functions": [{"name": "f"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": []},
        {"temperature": -1},
        {"tools": [{"type": "web_search"}]},
        {"stop": [""]},
        {"stop": ""},
        {"stop": ["a"] * 17},
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(serve, more):
    gateway = serve("http://127.0.0.1:1")
    response = post(gateway, {"model": MODEL, "messages": USER, **more})
    assert response.status_code == 400
    assert next(iter(more)) in response.json()["error"]["message"]


def test_half_a_character_is_refused(serve):
    response = post(
        serve("http://127.0.0.1:1"), {"model": MODEL, "messages": [{"role": "user", "content": "\ud800"}]}
    )
    assert response.status_code == 400


def test_deep_nesting_does_no_harm(serve, echo):
    gateway = serve(echo.url)
    deep = b"[" * 10_000
    assert post(gateway, deep).status_code == 400
    arguments = {"id": "c", "type": "function", "function": {"name": "f", "arguments": deep.decode()[:3000]}}
    body = {"model": MODEL, "messages": [*USER, {"role": "assistant", "tool_calls": [arguments]}, *USER]}
    assert post(gateway, body).status_code in (200, 400)
