"""The engine client with vLLM's protocol, before a scripted engine that speaks it, and the whole gateway."""

from dataclasses import replace

import pytest

from agent_wrapper.contract import VersionSpan
from builders import assistant, user
from gateway_fixtures import make_app
from rollout_backend.errors import ConfigError
from rollout_backend.model.gateway.engine.client import EngineClient, EngineRefused
from rollout_backend.model.gateway.engine.engines import Engines
from rollout_backend.model.gateway.engine.protocol import EngineRequest, VllmProtocol
from rollout_backend.model.rendering.token_bytes import StopStrings
from rollout_backend.workbench.local.scripted import LOGPROB, Fail, ScriptedEngine, ToolCall
from tests.emulators.scripted_vllm import ScriptedVllm

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
PARAMS = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "max_new_tokens": 40, "stop_token_ids": [2]}


@pytest.fixture
def engine():
    with ScriptedVllm(["one two three"] * 4) as engine:
        yield engine


@pytest.fixture
def generate(engine):
    async def call(params=PARAMS, attempts=3, **more):
        client = EngineClient(Engines(engine.url), 120.0, attempts, protocol=VllmProtocol(), after_abort_s=0.0)
        await client.start()
        try:
            return await client.generate(EngineRequest([1, 2], params, "s", **more))
        finally:
            await client.close()

    return call


def ids_of(engine, text):
    ids = engine.tokenizer.encode(text, add_special_tokens=False).ids
    return (*ids, engine.tokenizer.token_to_id("<|im_end|>"))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_has_the_sampled_tokens_and_their_versions(engine, generate, stream):
    engine.cached_tokens = 1
    engine.weight_version = "7"
    seen: list[int] = []
    progress = (lambda ids, _: seen.append(len(ids))) if stream else None
    completion = await generate(progress=progress)
    ids = ids_of(engine, "one two three")
    assert (completion.token_ids, completion.logprobs) == (ids, (LOGPROB,) * len(ids))
    assert completion.weight_versions == (VersionSpan(version="7", start=0, end=len(ids)),)
    assert (completion.finish_reason, completion.cached_tokens) == ("stop", 1)
    assert bool(seen) is stream


async def test_each_parameter_has_vllms_name(engine, generate):
    params = {**PARAMS, "sampling_seed": 3, "logit_bias": {"5": -100.0}}
    await generate(params)
    await generate({**params, "json_schema": '{"type": "object"}'})
    await generate({**params, "structural_tag": '{"type": "structural_tag"}'})
    plain, schema, tag = (body["sampling_params"] for body in engine.requests)
    assert plain == {
        "temperature": 0.7, "top_p": 0.9, "top_k": -1, "max_tokens": 40, "stop_token_ids": [2], "seed": 3,
        "logit_bias": {"5": -100.0}, "logprobs": 0, "detokenize": False,
    }  # fmt: skip
    assert schema["structured_outputs"] == {"json": {"type": "object"}}
    assert tag["structured_outputs"] == {"structural_tag": '{"type": "structural_tag"}'}
    assert engine.ignored == []
    with pytest.raises(ValueError, match="ignore_eos has no translation"):
        await generate({**PARAMS, "ignore_eos": True})


def test_a_request_names_its_adapter_as_the_model():
    assert VllmProtocol().body(EngineRequest([1], PARAMS, adapter="math@3"))["model"] == "math@3"
    assert "model" not in VllmProtocol().body(EngineRequest([1], PARAMS))


async def test_a_missing_logprob_is_none(engine, generate):
    engine.missing_logprobs = frozenset({1})
    assert (await generate()).logprobs[:3] == (LOGPROB, None, LOGPROB)
    assert (await generate(progress=lambda *_: None)).logprobs[:3] == (LOGPROB, None, LOGPROB)


@pytest.mark.parametrize("says_abort", [True, False])
async def test_an_aborted_stream_is_resumed_from_its_tokens(engine, generate, says_abort):
    """0.24.0 ends some aborted streams with `[DONE]` and without a finish_reason."""
    engine.aborted_after, engine.says_abort = 3, says_abort
    engine.replies = ["one two", " end"]

    def progress(ids, _):
        if len(ids) == 3:
            engine.aborted_after = None

    completion = await generate(progress=progress)
    ids = ids_of(engine, "one two")[:3] + ids_of(engine, " end")
    assert (completion.token_ids, completion.logprobs) == (ids, (LOGPROB,) * len(ids))
    first, second = engine.requests
    assert second["token_ids"] == [*first["token_ids"], *ids[:3]]
    assert second["sampling_params"]["max_tokens"] == 37
    assert bool(completion.weight_versions) is says_abort  # the end of a stream has them


async def test_a_stop_string_ends_the_reply_at_the_engine(engine, generate):
    bytes_of = {token: engine.tokenizer.decode([token]).encode() for token in range(259)}
    completion = await generate(stops=StopStrings(["two"], bytes_of))
    assert engine.tokenizer.decode(completion.token_ids) == "one two"
    assert (completion.finish_reason, completion.matched) == ("stop", "two")
    assert completion.weight_versions == (VersionSpan(version="0", start=0, end=7),)
    assert engine.requests[0]["sampling_params"]["stop"] == ["two"]
    assert engine.aborted == 0


async def test_the_format_of_0_24():
    with ScriptedVllm(["one"], old_format=True) as engine:
        client = EngineClient(Engines(engine.url), 120.0, 1, protocol=VllmProtocol())
        await client.start()
        completion = await client.generate(EngineRequest([1], PARAMS, "s"))
        await client.close()
    assert completion.logprobs == (LOGPROB,) * 4
    assert completion.weight_versions == ()


async def test_failures(generate, engine):
    engine.replies = [Fail(500, "busy"), Fail(400, "too long"), "late"]
    with pytest.raises(EngineRefused, match="too long"):
        await generate()
    engine._scale_out = False
    with pytest.raises(EngineRefused, match="--enable-scale-out"):
        await generate()


# --- the gateway ------------------------------------------------------------------------------------------


def test_a_conversation_with_a_tool_is_one_segment(serve):
    script = [ToolCall("add", {"a": 1}), "It is 2.", "Done."]
    with ScriptedVllm(script) as engine:
        gateway = serve(engine.url, engine_name="vllm")
        messages = [user("1 + 1?")]
        client = gateway.client()
        for stream in (False, True, False):
            answer = client.chat.completions.create(model="scripted", messages=messages, tools=TOOLS, stream=stream)
            if stream:
                text = "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
                messages += [{"role": "assistant", "content": text}, user("And?")]
                continue
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "2"})
        (segment,) = gateway.trajectory().segments
        assert [body["sampling_params"]["logprobs"] for body in engine.requests] == [0, 0, 0]
    assert len(segment.turns) == 3
    for turn in segment.turns:
        assert all(logprob == LOGPROB for logprob in segment.logprobs[turn.start : turn.end])
        assert [span.version for span in turn.weight_versions] == ["0"]


@pytest.mark.parametrize(("make", "name"), [(ScriptedEngine, "sglang"), (ScriptedVllm, "vllm")])
def test_the_model_reads_a_request_as_its_engine_shows_it(serve, byte_bundle, make, name):
    """SGLang leaves out tools that must not be called, and makes a reply at the end the user's."""
    parts = [{"type": "text", "text": text} for text in ("1", "+ 1?")]
    messages = [user(parts), assistant("2?")]
    call = {"model": "scripted", "messages": messages, "tools": TOOLS, "tool_choice": "none"}
    with make(["2"]) as engine:
        serve(engine.url, engine_name=name).post(call).raise_for_status()
        [sent] = engine.requests
    sglang = [user("1 + 1?"), user("2?")], None
    seen = sglang if name == "sglang" else ([user("1\n+ 1?"), messages[1]], TOOLS)
    assert (sent.get("input_ids") or sent["token_ids"]) == byte_bundle.render(*seen)


def test_images_are_refused_at_the_start(byte_model, byte_bundle):
    with pytest.raises(ConfigError, match=r"serving\.engine=vllm: set gateway\.max_images=0"):
        make_app("", byte_model, replace(byte_bundle, vision=object()), engine_name="vllm")


async def test_a_reply_whose_end_was_received_is_complete_without_the_rest(engine, generate, monkeypatch):
    """Sampling on from there would add tokens after the end of the turn."""

    async def cut(*_):
        raise ConnectionResetError

    original = engine._events

    async def events(parts, body):
        async for piece in original(parts, body):
            yield piece
            if b'"finish_reason": "stop"' in piece:
                await cut()

    monkeypatch.setattr(engine, "_events", events)
    completion = await generate(progress=lambda *_: None)
    assert completion.token_ids == ids_of(engine, "one two three")
    assert len(engine.requests) == 1
