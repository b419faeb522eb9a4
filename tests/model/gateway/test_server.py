"""The gateway over HTTP, in the Chat Completions API: calls, streams, limits, keys, sealing, and failures."""

import json
import math
from collections import Counter

import anthropic
import httpx
import openai
import pytest

from agent_wrapper.contract import Rollout, Trajectory
from builders import assistant, function_tool, hang_up, stream_data, system, until, user
from rollout_backend.core.seal import Sealer
from rollout_backend.model.gateway import model_call_executor
from rollout_backend.model.gateway.engine.client import EngineClient
from rollout_backend.model.gateway.stats import count
from rollout_backend.workbench.local.scripted import Fail, ToolCall

MODEL = "scripted"
USER = [user("What is 2 + 3?")]
TOOLS = [function_tool("add", "Adds.")]
CALL = {"model": MODEL, "messages": USER}
COSTLY = {"type": "string", "pattern": "^(.{0,300}x){0,300}$"}
OBJECT = {"type": "object", "properties": {"a": COSTLY}}
COSTLY_TOOL = {"type": "function", "function": {"name": "f", "parameters": OBJECT, "strict": True}}


def ask(client: openai.OpenAI, messages=USER, **more):
    return client.chat.completions.create(model=MODEL, messages=messages, **more)


def deltas_of(lines) -> list[dict]:
    return [chunk["choices"][0]["delta"] for chunk in stream_data(lines)]


def text_of(deltas: list[dict]) -> str:
    return "".join(delta.get("content", "") for delta in deltas)


# --- calls ------------------------------------------------------------------------------------------------


def test_a_call_is_answered_and_recorded(play):
    gateway = play(["5"])
    answer = ask(gateway.client(), logprobs=True)
    [sent] = gateway.engine.requests
    [choice] = answer.choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("5", None, "stop")
    assert [bytes(entry.bytes) for entry in choice.logprobs.content] == [b"5", b"<|im_end|>"]
    assert choice.logprobs.content[0].logprob == -0.5
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(sent["input_ids"]), 2)
    assert (sent["return_logprob"], sent["logprob_start_len"]) == (True, -1)
    trajectory = gateway.trajectory()
    [segment] = trajectory.segments
    assert trajectory.model == MODEL
    assert segment.token_ids.tolist()[:-2] == sent["input_ids"]
    assert segment.response_mask.tolist()[-3:] == [0, 1, 1]
    assert segment.logprobs[-1] == -0.5
    assert math.isnan(segment.logprobs[0])
    [turn] = segment.turns
    assert (turn.finish_reason, turn.weight_versions[0].version) == ("stop", "0")
    assert [message["content"] for message in segment.messages] == ["What is 2 + 3?", "5"]


def test_a_slow_stream_is_kept_alive(play, held):
    gateway = play(held, keepalive_s=0.05)
    with gateway.stream(CALL) as response:
        lines = response.iter_lines()
        while not next(lines).startswith(": "):
            pass
        held.go.set()
        rest = list(lines)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert text_of(deltas_of(rest)) == "at last"
    assert [line for line in rest if line][-1] == "data: [DONE]"


def test_a_slow_stream_that_fails_ends_with_an_error_event(play, held):
    gateway = play(lambda prompt: held(prompt) and Fail(400, "no good"), keepalive_s=0.05)
    stream = ask(gateway.client(), stream=True)
    held.go.set()
    with pytest.raises(openai.APIError, match="no good"):
        list(stream)
    assert gateway.stats().errors == {"engine_refused": 1}


@pytest.mark.parametrize("cumulative", [False, True])
def test_a_stream_sends_what_is_sampled_before_the_rest_is(play, held, cumulative):
    gateway = play([held.pieces("I look ", f"twice.{ToolCall('add', {'a': 1})}")], engine_attempts=1)
    gateway.engine.cumulative = cumulative
    with gateway.stream({**CALL, "tools": TOOLS}) as response:
        lines, text = response.iter_lines(), ""
        while text != "I look":
            text += text_of(deltas_of([next(lines)]))
        held.go.set()
        rest = stream_data(lines)
    deltas = [chunk["choices"][0]["delta"] for chunk in rest]
    assert text_of(deltas) == " twice."
    [call] = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}
    assert rest[-1]["choices"][0]["finish_reason"] == "tool_calls"
    [segment] = gateway.trajectory().segments
    assert segment.messages[-1]["content"] == "I look twice."
    assert segment.messages[-1]["tool_calls"][0]["id"] == call["id"]
    assert segment.sampled_tokens == len(f"I look twice.{ToolCall('add', {'a': 1})}<")
    assert set(segment.logprobs[segment.turns[0].start :]) == {-0.5}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_aborts_its_call_and_nothing_is_recorded(play, held, stream):
    gateway = play((lambda _: held.pieces("Once upon a time")) if stream else held)
    if stream:
        with gateway.stream(CALL) as response:
            next(response.iter_lines())
    else:
        hang_up(gateway.url, gateway.key(), CALL, lambda: held.asked.acquire(timeout=120))
    until(lambda: gateway.engine.aborted == 1)
    until(lambda: gateway.stats().client_disconnects == 1)
    held.go.set()
    assert gateway.stats().calls_in_flight == 0
    assert gateway.trajectory().segments == ()


# --- several choices, one call at a time, constrained replies ----------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_is_a_separate_turn(play, stream):
    words = iter(["one", "two", "three", "four"])
    gateway = play(lambda _: next(words))
    answer = ask(gateway.client(seed=1), n=3, stream=stream)
    if stream:
        choices = [choice for chunk in answer for choice in chunk.choices]
        said = ["".join(c.delta.content or "" for c in choices if c.index == i) for i in range(3)]
    else:
        said = [choice.message.content for choice in answer.choices]
        assert answer.usage.completion_tokens == len("onetwothree") + 3
    assert len({request["sampling_params"]["sampling_seed"] for request in gateway.engine.requests}) == 3
    assert len({tuple(request["input_ids"]) for request in gateway.engine.requests}) == 1
    ask(gateway.client(), [*USER, assistant(said[1]), *USER])
    assert sorted(said) == ["one", "three", "two"]
    segments = gateway.trajectory().segments
    assert [segment.split_reason for segment in segments] == ["first_call", "branched", "branched"]
    assert [len(segment.turns) for segment in segments] == [1, 2, 1]
    assert gateway.stats().calls == 2


def test_if_one_choice_fails_the_call_fails(play):
    gateway = play(["x", Fail(400, "no good")])
    with pytest.raises(openai.InternalServerError, match="no good"):
        ask(gateway.client(), n=2)
    assert gateway.trajectory().segments == ()


@pytest.mark.parametrize("stream", [False, True])
def test_a_constrained_reply_has_no_logprobs_to_train_on(play, stream):
    gateway = play(['{"a": 1}', "free"])
    answer = ask(gateway.client(), response_format={"type": "json_object"}, stream=stream)
    parts = [choice.delta for chunk in answer for choice in chunk.choices] if stream else [answer.choices[0].message]
    assert "".join(part.content or "" for part in parts) == '{"a": 1}'
    ask(gateway.client(), [user("Freely now.")])
    params = [request["sampling_params"] for request in gateway.engine.requests]
    assert json.loads(params[0]["json_schema"]) == {"type": "object"}
    assert "json_schema" not in params[1]
    forced, free = gateway.trajectory().segments
    assert all(math.isnan(logprob) for logprob in forced.logprobs)
    assert free.logprobs[-1] == -0.5
    assert gateway.stats().constrained == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_ignored_the_constraint_is_an_error(play, stream):
    """As behind sglang-router, which drops structural tags: the model answers freely."""
    gateway = play(["I had rather talk.", "Well."])
    with pytest.raises(openai.APIError, match="because it got no structural_tag"):
        ask(gateway.client(), tools=TOOLS, tool_choice="required", stream=stream)
    assert "structural_tag" in gateway.engine.requests[0]["sampling_params"]
    assert gateway.stats().errors == {"constrained_decoding_unavailable": 1}
    ask(gateway.client(), tools=TOOLS)
    trajectory = gateway.trajectory()
    assert trajectory.unanswered_calls == 0
    assert [len(segment.turns) for segment in trajectory.segments] == [1]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_constraints_are_refused_if_switched_off_or_if_the_engine_cannot_apply_them(play, serve, caplog, more, param):
    able = play(lambda _: Fail(400, "not supported with --grammar-backend none"))
    unable = able.post({**CALL, **more})
    asked = len(able.engine.requests)
    refused = serve(able.engine.url, gateway={"constrained_decoding": "refuse"}).post({**CALL, **more})
    assert len(able.engine.requests) == asked
    assert (unable.status_code, unable.json()["error"]["code"]) == (400, "constrained_decoding_unavailable")
    assert "an engine refused a model call: its form" in caplog.text  # engines quote the form, which is the agent's
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_a_grammar_that_an_engine_broke_off_reaches_no_engine_again(play):
    """Neither by the gateway's retries, nor by the client's, nor under another form."""
    gateway = play([Fail(502, "the engine is gone"), "free"])
    lost = gateway.post({**CALL, "response_format": {"type": "json_object"}})
    assert (lost.status_code, lost.headers["x-should-retry"]) == (503, "false")
    for more in ({"response_format": {"type": "json_object"}}, {"tools": TOOLS, "tool_choice": "required"}):
        again = gateway.post({**CALL, **more})
        assert (again.status_code, again.json()["error"]["code"]) == (503, "constrained_call_lost")
    assert len(gateway.engine.requests) == 1
    assert gateway.post(CALL).status_code == 200
    assert gateway.trajectory().unanswered_calls > 0  # the rollout is repeated, and the loss is no reward


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": COSTLY}}},
        ),
        ("chat/completions", {"tools": [COSTLY_TOOL], "tool_choice": "required"}),
        ("responses", {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": COSTLY}}}),
        (
            "responses",
            {"input": "a", "tools": [{**COSTLY_TOOL["function"], "type": "function"}], "tool_choice": "required"},
        ),
        ("messages", {"max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": COSTLY}}}),
        (
            "messages",
            {"max_tokens": 9, "tools": [{"name": "f", "input_schema": OBJECT}], "tool_choice": {"type": "any"}},
        ),
    ],
)
def test_no_api_lets_a_costly_grammar_reach_an_engine(play, path, more):
    gateway = play(["{}"])
    body = {"model": MODEL, **({} if "input" in more else {"messages": USER}), **more}
    refused = gateway.post(body, path=f"/v1/{path}")
    assert refused.status_code == 400
    assert "a pattern in it has too many" in refused.text or "patterns have more than" in refused.text
    assert gateway.engine.requests == []


def test_a_session_may_ask_for_a_limited_number_of_replies(play, monkeypatch):
    monkeypatch.setattr(model_call_executor, "_MAX_CHOICES", 3)
    gateway = play(lambda _: "a")
    assert gateway.post({**CALL, "n": 2}).status_code == 200
    refused = gateway.post({**CALL, "n": 2})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "session_calls_exceeded")
    assert len(gateway.engine.requests) == 2


def test_a_session_samples_at_most_its_budget_and_is_named_if_it_runs_on(play):
    gateway = play(lambda _: "xxxx", gateway={"session_tokens": 12})
    client = gateway.client()
    replies = [ask(client).choices[0] for _ in range(3)]
    assert [(reply.message.content, reply.finish_reason) for reply in replies] == [
        ("xxxx", "stop"),
        ("xxxx", "stop"),
        ("xx", "length"),
    ]
    assert gateway.stats().largest == {"r": 12}
    for _ in range(2):
        with pytest.raises(openai.BadRequestError) as used_up:
            ask(client)
        assert used_up.value.code == "session_tokens_exceeded"
    assert gateway.stats().runaways == {"r": 12}
    assert ask(gateway.client("s2")).choices[0].message.content == "xxxx"
    gateway.instruct("revoke", {"session_ids": ["s1"]}).raise_for_status()
    assert gateway.post(CALL).status_code == 410
    assert gateway.post(b"", path="/v1/rollout/heartbeat").status_code == 410
    assert gateway.stats().after_stop == {"s1": 2}


def test_no_call_makes_the_rows_of_a_session_larger_than_a_result(play):
    gateway = play(lambda _: "x", max_result_bytes=9 * 600)  # 600 tokens
    first, second, third = ([user(f"{n} {'y' * 200}")] for n in range(3))
    assert [gateway.post({**CALL, "messages": each}).status_code for each in (first, second)] == [200, 200]
    for more in ({"messages": third}, {"messages": first, "n": 2}):
        refused = gateway.post({**CALL, **more})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "trajectory_too_large")
    assert len(gateway.engine.requests) == 2
    assert gateway.post({**CALL, "messages": [*first, assistant("x"), user("z")]}).status_code == 200
    assert gateway.seal().headers["X-Rollout-Max-Result-Bytes"] == "5400"
    sealed = gateway.trajectory()
    assert [len(segment.turns) for segment in sealed.segments] == [2, 1]
    assert sealed.unanswered_calls == 0


AS_AUTO = {"gateway": {"forced_tools": "as_auto"}}


@pytest.mark.parametrize(
    ("settings", "choice", "strict", "counted"),
    [
        (AS_AUTO, "required", False, {"tool_choice": 1}),
        (AS_AUTO, {"type": "function", "function": {"name": "add"}}, False, {"tool_choice": 1}),
        *(({}, "auto", True, {"tools.strict": 1}), ({}, "auto", False, {})),
    ],
)
def test_a_forced_or_strict_tool_may_be_called_freely_and_is_counted(play, settings, choice, strict, counted):
    gateway, (tool,) = play(["I would rather not."], **settings), TOOLS
    tools = [{**tool, "function": {**tool["function"], "strict": strict}}]
    answer = gateway.post({**CALL, "tools": tools, "tool_choice": choice}).json()
    assert answer["choices"][0]["message"]["content"] == "I would rather not."
    assert gateway.stats().ignored == counted
    (segment,) = gateway.trajectory().segments
    assert not math.isnan(segment.logprobs[-1])


def test_calls_of_tools_that_were_not_offered_are_counted_by_name(play):
    gateway = play([f"{ToolCall('sub', {'a': 1})}{ToolCall('add', {'a': 1})}"])
    gateway.post({**CALL, "tools": TOOLS}).raise_for_status()
    assert gateway.stats().unknown_tools == {"sub": 1}


def test_counted_names_are_bounded(play):
    counts = Counter()
    for i in range(1000):
        count(counts, [f"{i:0128}x"])
    assert (len(counts), counts["(others)"], max(map(len, counts))) == (101, 900, 128)
    gateway = play(["5"], gateway={})
    gateway.post({**CALL, **{f"{i:0128}x": [] for i in range(1000)}}).raise_for_status()
    assert len(gateway.stats().ignored) == 100


LEFT_OUT = [{"model": "small"}, {"system": "Write a title"}, {"header": "x-side: yes"}]
SIDE = [
    ({"model": "small"}, {}),
    ({"messages": [system("Write a title."), *USER]}, {}),
    ({}, {"X-Side": "yes"}),
]


@pytest.mark.parametrize(("body", "headers"), SIDE)
def test_conversations_may_be_left_out_of_training(play, body, headers):
    gateway = play(lambda _: "5", leave_out=LEFT_OUT)
    kept = {**CALL, "messages": [system("Be brief."), *USER]}
    for each, more in ((kept, {"X-Side": "no"}), ({**kept, **body}, headers), ({**kept, **body}, headers)):
        gateway.post(each, headers=more).raise_for_status()
    assert gateway.stats().left_out == 2
    (segment,) = gateway.trajectory().segments
    assert (len(segment.turns), sum(segment.response_mask)) == (1, len("5<"))


def test_a_side_call_within_a_conversation_is_a_part_of_the_prompt(play):
    gateway = play(lambda _: "5", leave_out=LEFT_OUT)
    said = [*USER]
    for headers in ({}, {"x-side": "yes"}, {}):
        gateway.post({**CALL, "messages": said}, headers=headers).raise_for_status()
        said += [assistant("5"), user("And?")]
    (segment,) = gateway.trajectory().segments
    assert (len(segment.turns), sum(segment.response_mask)) == (2, 2 * len("5<"))


# --- paths ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["/v1", "/v1/v1", "", "/v1/", "//v1"])
def test_one_base_url_serves_every_client(play, prefix):
    gateway = play(lambda _: "x")
    asked = {**CALL, "max_tokens": 5}
    bodies = {"/chat/completions": asked, "/messages": asked, "/responses": {"model": MODEL, "input": "a"}}
    for path, body in bodies.items():
        assert gateway.post(body, path=prefix + path).status_code == 200, path
    headers = {"x-api-key": gateway.key()}
    with httpx.Client(base_url=gateway.url, headers=headers, timeout=120) as http:
        counted = http.post(f"{prefix}/messages/count_tokens", json=asked)
        assert counted.json()["input_tokens"] == len(gateway.engine.requests[-2]["input_ids"])
        counted = http.post(f"{prefix}/responses/input_tokens", json=bodies["/responses"])
        prompt = len(gateway.engine.requests[-1]["input_ids"])
        assert counted.json() == {"object": "response.input_tokens", "input_tokens": prompt}
        models = http.get(f"{prefix}/models").json()
        assert models["data"] == [http.get(f"{prefix}/models/{MODEL}").json()]
        assert {"created", "owned_by", "display_name", "created_at"} <= set(models["data"][0])
        assert http.get(f"{prefix}/models/gpt-9").status_code == 404


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/", "/v1/messages?beta=true", "/v1/chat/completions", "/v1/models"])
@pytest.mark.parametrize("method", ["HEAD", "OPTIONS"])
def test_a_probe_is_answered(shared_gateway, method, path):
    answer = httpx.request(method, shared_gateway.url + path, headers=shared_gateway.headers(), timeout=120)
    assert (answer.is_success, answer.content) == (True, b"")


def test_a_model_may_have_slashes_in_its_name(play, byte_model):
    name = "org/team/model-1"
    gateway = play(["5"], model=byte_model.model_copy(update={"name": name}))
    assert gateway.client().models.retrieve(name).id == name
    for spelled in (name, name.replace("/", "%2F")):
        answer = httpx.get(f"{gateway.url}/v1/models/{spelled}", headers=gateway.headers(), timeout=120)
        assert answer.json()["id"] == name


def test_a_session_of_another_shard_is_refused(serve):
    gateways = [serve(gateway={"processes": 2, "public_url": "http://x{shard}"}, shard=i) for i in (0, 1)]
    assert sorted(gateway.seal("s1").status_code for gateway in gateways) == [200, 421]


# --- sampling ---------------------------------------------------------------------------------------------


def test_the_trainers_sampling_overrides_the_agents(play):
    gateway = play(lambda _: "x")
    client = gateway.client(temperature=0.8, top_p=0.9, top_k=5, max_tokens=50)
    ask(client, temperature=0.1, top_p=0.9, presence_penalty=1.0, max_tokens=7)
    ask(client, max_completion_tokens=500)
    first, second = (request["sampling_params"] for request in gateway.engine.requests)
    assert first.items() >= {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "max_new_tokens": 7}.items()
    assert second["max_new_tokens"] == 50
    assert "presence_penalty" not in first
    assert gateway.stats().overridden == {"temperature": 1, "presence_penalty": 1}


def test_an_agent_sets_what_the_settings_allow(play):
    gateway = play(lambda _: "x", gateway={"agent_sampling_overrides": ["temperature", "seed"]})
    ask(gateway.client(), temperature=0.1, top_p=0.5, seed=3, n=2)
    params = [request["sampling_params"] for request in gateway.engine.requests]
    assert {(each["temperature"], each["top_p"], each["sampling_seed"]) for each in params} == {
        (0.1, 1.0, 3),
        (0.1, 1.0, 4),
    }
    assert gateway.stats().overridden == {"top_p": 1}


def test_a_reply_has_the_seed_of_its_step_task_rollout_and_turn(play):
    gateway = play(lambda _: "x")
    planned = {"rollout_id": "task.1", "step": 2, "seed": 1}
    sessions = [
        planned,
        {**planned, "attempt": 2},
        {**planned, "rollout_id": "task.1.g1"},  # planned again by a restarted trainer
        {**planned, "step": 3},
        {**planned, "rollout_id": "task.2"},
        {**planned, "seed": 2},
    ]
    for i, claims in enumerate(sessions):
        client = gateway.client(f"s{i}", **claims)
        ask(client)
        ask(client)
    seeds = [request["sampling_params"]["sampling_seed"] for request in gateway.engine.requests]
    first, *others = [tuple(seeds[i : i + 2]) for i in range(0, len(seeds), 2)]
    assert others[:2] == [first, first]
    assert len({*first, *(seed for pair in others[2:] for seed in pair)}) == 8


# --- keys, sealing, revoking ------------------------------------------------------------------------------


def test_keys_of_the_previous_secret_are_accepted_and_none_older(serve):
    gateway = serve(previous_secret="the-previous-secret-" * 2)
    keys = [gateway.key(), *(gateway.key(secret=f"the-{age}-secret-" * 2) for age in ("previous", "oldest"))]
    statuses = [
        httpx.get(f"{gateway.url}/v1/models", headers={"x-api-key": key}, timeout=120).status_code for key in keys
    ]
    assert statuses == [200, 200, 401]


def test_one_valid_key_of_two_is_enough(shared_gateway):
    key = shared_gateway.key()
    for token, api_key, status in ((key, "sk-own", 200), ("sk-own", key, 200), ("sk-own", "sk-other", 401)):
        headers = {"Authorization": f"Bearer {token}", "x-api-key": api_key}
        assert httpx.get(f"{shared_gateway.url}/v1/models", headers=headers, timeout=120).status_code == status


def test_a_sealed_session_is_closed_and_returns_the_same_trajectory_again(play):
    gateway = play(lambda _: "x")
    ask(gateway.client())
    assert gateway.seal().content == gateway.seal().content
    with pytest.raises(openai.APIStatusError) as closed:
        ask(gateway.client())
    assert (closed.value.status_code, closed.value.code) == (410, "session_closed")
    stats = gateway.stats()
    assert (stats.sessions_open, stats.sessions_closed) == (0, 1)


def test_a_key_in_the_path_replaces_those_in_the_headers_and_is_never_logged(play, caplog):
    caplog.set_level("DEBUG")
    gateway = play(lambda _: "x", gateway={"key_in_path": True})
    base = f"{gateway.url}/k/{gateway.key()}"
    with openai.OpenAI(base_url=f"{base}/v1", api_key="sk-wired-in", max_retries=0) as client:
        assert ask(client).choices[0].message.content == "x"
    with anthropic.Anthropic(base_url=f"{base}/v1", api_key="sk-wired-in", max_retries=0) as client:
        assert client.messages.create(model=MODEL, max_tokens=9, messages=USER).content[0].text == "x"
    assert len(gateway.trajectory().segments[0].turns) + len(gateway.trajectory().segments[1:]) == 2
    for path in ("", "/", "/models/", "//models"):
        assert httpx.get(f"{base}/v1{path}", timeout=120).status_code == 200
    refused = [
        httpx.get(f"{gateway.url}/k/{gateway.key('s2', secret='x' * 32)}/v1/models", timeout=120),
        httpx.get(f"{base}/v1/nothing", timeout=120),
        httpx.get(f"{base}/control/stats", headers=gateway.control, timeout=120),
        httpx.get(f"{gateway.url}/k/{gateway.control['Authorization'].split()[1]}/control/stats", timeout=120),
    ]
    assert [answer.status_code for answer in refused] == [401, 404, 404, 404]
    assert "GET /v1/nothing: Not Found" in refused[1].text
    records = [
        record for record in caplog.records if not record.name.startswith(("httpx", "httpcore", "openai", "anth"))
    ]
    assert gateway.key() not in " ".join(record.getMessage() for record in records)


def test_a_key_in_the_path_is_refused_by_default(play):
    gateway = play([])
    answer = httpx.get(f"{gateway.url}/k/{gateway.key()}/v1/models", timeout=120)
    assert answer.status_code == 404
    assert "GET /k/.../v1/models: Not Found" in answer.text


def test_a_trajectory_is_the_same_in_json(play):
    gateway = play([f"hm \u00e9 {ToolCall('add', {'a': 0.5})}"], seal_secret="a-seal-secret-" * 4)
    ask(gateway.client(), tools=TOOLS)
    answer = gateway.post(b"", path="/v1/rollout/trajectory", headers={"Accept": "application/json"})
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["segments"][0]["logprobs"][-1] == -0.5
    compact = gateway.seal()
    assert compact.headers["content-type"] == "application/octet-stream"
    given, found = Trajectory.decode(answer.content), Trajectory.decode(compact.content)
    assert (given.encode(), found.seal is not None) == (found.encode(), True)
    ids = {"run_id": "run", "step": 0, "rollout_id": "r", "attempt": 1, "session_id": "s1", "task_id": "t"}
    fields = {**ids, "schema_version": 1, "outcome": "completed", "reward": 1, **json.loads(answer.content)}
    del fields["unanswered_calls"]
    Sealer("a-seal-secret-" * 4).check(Rollout.decode(json.dumps(fields).encode()))


def test_sealing_aborts_calls_in_flight_and_ends_streams_with_an_error(play, held, in_thread):
    gateway = play(lambda prompt: held.pieces("Once upon a time") if "stream" in prompt else held(prompt))
    call = in_thread(gateway.post, CALL)
    held.asked.acquire()
    with gateway.stream({**CALL, "messages": [user("As a stream.")]}) as response:
        lines = response.iter_lines()
        next(lines)
        assert gateway.stats().calls_in_flight == 2
        assert gateway.trajectory().segments == ()
        assert stream_data(lines)[-1]["error"]["code"] == "session_closed"
    assert call.result(120).status_code == 410
    until(lambda: gateway.engine.aborted == 2)


def test_revoking_closes_sessions_with_and_without_calls(play, held, in_thread):
    gateway = play(held, gateway={})
    call = in_thread(gateway.post, CALL)
    held.asked.acquire()
    assert gateway.instruct("revoke", {"session_ids": ["s1", "s9"]}).json() == {"revoked": 2}
    assert call.result(120).status_code == 410
    for session in ("s1", "s9"):
        assert gateway.seal(session).status_code == 410
        assert gateway.post(CALL, session).status_code == 410
    assert gateway.stats().sessions_open == 0


def test_heartbeats_are_reported_once_and_open_no_session(serve):
    gateway = serve()

    def beat(session: str, **key) -> int:
        headers = gateway.headers(session, **key)
        return httpx.post(f"{gateway.url}/v1/rollout/heartbeat", headers=headers, timeout=120).status_code

    def heard() -> dict[str, list[str]]:
        return gateway.instruct("heartbeats").json()

    assert [beat("s1"), beat("s1"), beat("s2")] == [204] * 3
    assert gateway.seal("s3").status_code == 200
    assert heard() == {"beats": ["s1", "s2"], "calls": ["s3"]}
    assert heard() == {"beats": [], "calls": []}
    assert beat("s3") == 204, "a sealed session's container still has its result to publish"
    gateway.instruct("revoke", {"session_ids": ["s1"]})
    assert [beat("s1"), beat("s4", lives_s=-1), beat("s4", secret="x" * 32)] == [410, 401, 401]
    assert heard() == {"beats": ["s3"], "calls": []}
    assert gateway.stats().sessions_open == 0


def test_the_control_api_needs_its_own_key(serve):
    gateway = serve()
    for headers in ({}, gateway.headers(), {b"Authorization": "Bearer é".encode()}):
        with httpx.Client(base_url=f"{gateway.url}/control", headers=headers, timeout=120) as http:
            answers = http.get("/stats"), http.post("/revoke", json={"session_ids": ["s1"]}), http.post("/heartbeats")
        assert [answer.status_code for answer in answers] == [401] * 3
    assert gateway.seal().status_code == 200
    assert gateway.instruct("revoke", {"ids": []}).status_code == 400


# --- failures ---------------------------------------------------------------------------------------------


def test_an_unanswered_call_is_counted_until_it_is_repeated(play):
    down = True
    gateway = play(lambda _: Fail(500) if down else "5")
    question, other = CALL, {**CALL, "messages": [*USER, *USER]}
    for body, session in ((question, "a"), (question, "b"), (other, "b"), (other, "c")):
        response = gateway.post(body, session)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
        assert int(response.headers["retry-after"]) > 0
    down = False
    for session in "abc":
        assert gateway.post(question, session).status_code == 200
    assert gateway.post({**CALL, "model": "another"}, "a").status_code == 404
    unanswered = {session: gateway.trajectory(session).unanswered_calls for session in "abc"}
    assert unanswered == {"a": 0, "b": 1, "c": 1}


def test_a_conversation_over_the_context_length_is_refused_and_a_reply_over_it_is_cut(play):
    gateway = play(lambda _: "x" * 5000)
    cut = ask(gateway.client("s2"), [user("y")])
    assert (cut.choices[0].finish_reason, cut.usage.total_tokens) == ("length", 4096)
    fits = 4096 - cut.usage.prompt_tokens
    assert ask(gateway.client("s3"), [user("y" * fits)]).usage.completion_tokens == 1
    for length in (fits + 1, 5000):
        with pytest.raises(
            openai.BadRequestError, match="This model's maximum context length is 4096 tokens"
        ) as error:
            ask(gateway.client(), [user("y" * length)])
        assert error.value.code == "context_length_exceeded"
    assert len(gateway.engine.requests) == 2


def test_a_large_body_is_refused(serve):
    gateway = serve(gateway={"max_body_bytes": 2000})
    response = gateway.post({**CALL, "messages": [user("x" * 4000)]})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    chunks = (b"x" * 100 for _ in range(40))
    chunked = httpx.post(f"{gateway.url}/v1/chat/completions", content=chunks, headers=gateway.headers(), timeout=120)
    assert chunked.status_code == 413


def test_each_conversation_of_an_unrecorded_key_has_a_routing_key(play, monkeypatch):
    """`rollout serve` prints one key: with one routing key, all agents would call one engine."""
    keys = []
    generate = EngineClient.generate

    async def record(self, request):
        keys.append(request.routing_key)
        return await generate(self, request)

    monkeypatch.setattr(EngineClient, "generate", record)
    client = play(["hello"] * 9).client(is_recorded=False)
    for name in "abc":
        messages = [user(f"I am {name}.")]
        for _ in range(2):
            ask(client, messages)
            messages += [assistant("hello"), user("And then?")]
    for prompt in ("one", "one", "two"):
        client.completions.create(model=MODEL, prompt=prompt)
    assert [keys.count(key) for key in dict.fromkeys(keys)] == [2, 2, 2, 2, 1]
