"""The gateway matches stop strings, because an engine without a tokenizer rejects them or crashes."""

from __future__ import annotations

import anthropic
import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_wrapper.contract import Outcome
from agent_wrapper.outcome import classify
from agent_wrapper.runner import Raised
from rollout_backend.local.scripted import Fail, Pieces, ScriptedEngine
from rollout_backend.rendering.stop_strings import Stop, StopStrings
from rollout_backend.rendering.token_bytes import token_bytes

USER = [{"role": "user", "content": "count"}]
TEXT = "one two \u00e9 three"
VERSIONS = ("0.5.23", "0.5.12")


def engine_of(replies, version="0.5.23") -> ScriptedEngine:
    return ScriptedEngine(replies, skip_tokenizer_init=True, version=version)


def chat(gateway, stop, stream: bool, **more):
    """The text, why it ended, and the tokens that were sampled."""
    client = gateway.client()
    if not stream:
        answer = client.chat.completions.create(model="scripted", messages=USER, stop=stop, **more)
        return answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage.completion_tokens
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model="scripted", messages=USER, stop=stop, stream=True, stream_options=options, **more
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    (reason,) = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    return text, reason, chunks[-1].usage.completion_tokens


def messages(gateway, stop, stream: bool, **more):
    client = anthropic.Anthropic(base_url=gateway.url, api_key=gateway.key(), max_retries=0)
    asked = {"model": "scripted", "max_tokens": 100, "messages": USER, "stop_sequences": stop, **more}
    if stream:
        with client.messages.stream(**asked) as events:
            answer = events.get_final_message()
    else:
        answer = client.messages.create(**asked)
    text = "".join(block.text for block in answer.content)
    return (
        text,
        {"stop_sequence": "stop", "end_turn": "stop", "max_tokens": "length"}[answer.stop_reason],
        (answer.usage.output_tokens),
    )


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", [chat, messages])
def test_a_server_without_a_tokenizer_is_never_sent_one(serve, bundle, api, stream, version):
    with engine_of([TEXT], version) as engine:
        gateway = serve(engine.url)
        assert api(gateway, ["never", " \u00e9"], stream) == ("one two", "stop", len("one two \u00e9".encode()))
        assert not engine.crashed
        (asked,) = engine.requests
        assert "stop" not in asked["sampling_params"]
        (segment,) = gateway.trajectory().segments
        assert bundle.decode(segment.token_ids[segment.turns[0].start :]) == "one two \u00e9"
        assert (segment.turns[0].finish_reason, segment.turns[0].end) == ("stop", len(segment.token_ids))
        assert segment.turns[0].weight_versions[-1].end == segment.turns[0].end


@pytest.mark.parametrize("stream", [False, True])
def test_the_generation_is_aborted_at_the_stop_string(serve, stream):
    def parts():
        yield "one END of"
        while True:
            yield " more"

    with engine_of([Pieces(parts())]) as engine:
        gateway = serve(engine.url)
        assert chat(gateway, "END", stream)[:2] == ("one ", "stop")
        assert engine.requests[0]["stream"]


@pytest.mark.parametrize(
    ("text", "stop", "wanted"),
    [
        ("one END\n two", "END\n", "one "),
        ("\n\nHuman: hi", "\n\nHuman:", ""),
        ("a\n\nb", "\n\n", "a"),
        ("abc", ["abc", "b"], "a"),
        ("xabc", ["c", "abc"], "x"),
        ("<think>why END</think>so", "END", "<think>why "),
        ("<|im_end|>", "<|im_end|>", ""),
        ("it ends by itself", "never", "it ends by itself"),
        ("\U0001f600\U0001f601", "\U0001f601", "\U0001f600"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_ends_before_its_stop_string(serve, text, stop, wanted, stream):
    with engine_of([text]) as engine:
        assert chat(serve(engine.url), stop, stream)[:2] == (wanted, "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_before_the_stop_string_is_a_call(serve, stream):
    said = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>Observation: made up'
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with engine_of([said]) as engine:
        text, reason, _ = chat(serve(engine.url), "Observation:", stream, tools=tools)
        assert (text or "", reason) == ("", "tool_calls")


def test_the_conversation_goes_on_from_the_tokens_that_were_sampled(serve):
    with engine_of([TEXT, "four"]) as engine:
        gateway = serve(engine.url)
        reply = chat(gateway, " \u00e9", False)[0]
        more = [*USER, {"role": "assistant", "content": reply}, {"role": "user", "content": "go on"}]
        gateway.client().chat.completions.create(model="scripted", messages=more)
        (segment,) = gateway.trajectory().segments
        assert len(segment.turns) == 2


def test_a_limit_before_the_stop_string_is_a_limit(serve):
    with engine_of([TEXT]) as engine:
        assert chat(serve(engine.url), "three", False, max_tokens=5) == ("one t", "length", 5)


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 404, 422])
def test_an_engines_refusal_is_not_the_agents_fault(serve, status):
    with ScriptedEngine([Fail(status, "unknown sampling parameter")]) as engine:
        gateway = serve(engine.url)
        key = gateway.key()
        answer = httpx.post(
            f"{gateway.url}/v1/chat/completions",
            headers={"Authorization": f"Bearer {key}"},
            json={"model": "scripted", "messages": USER},
        )
        assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")
        assert answer.json()["error"]["code"] == "engine_refused"
        assert "unknown sampling parameter" in answer.json()["error"]["message"]
        assert len(engine.requests) == 1
        assert gateway.trajectory().unanswered_calls == 1


def test_clients_do_not_repeat_a_refused_call(serve):
    with ScriptedEngine(lambda _: Fail(400, "no")) as engine:
        gateway = serve(engine.url)
        client = gateway.client().with_options(max_retries=3)
        with pytest.raises(openai.InternalServerError, match="engine refused") as raised:
            client.chat.completions.create(model="scripted", messages=USER)
        ending = classify(Raised(raised.value), f"{gateway.url}/v1")
        assert ending.outcome is Outcome.INFRA_ERROR
        assert ending.failure.reason == "model_unavailable"
        assert len(engine.requests) == 1


# --- pure -------------------------------------------------------------------------------------------------

TOKENS = {i: bytes([i]) for i in range(256)} | {300: b"one ", 301: "\u00e9".encode() + b"E", 302: b"ND!", 303: b""}


@pytest.mark.parametrize(
    ("strings", "ids", "wanted"),
    [
        (["END"], [300, 301, 302, 300], Stop(3, "END")),
        (["\u00e9"], [300, 0xC3, 0xA9], Stop(3, "\u00e9")),
        (["e"], [300, 303], Stop(1, "e")),
        (["absent"], [300, 301], None),
        (["e", "ne "], [300], Stop(1, "e")),
        ([], [300], None),
    ],
)
def test_the_token_in_which_a_string_completes(strings, ids, wanted):
    stops = StopStrings(strings, TOKENS)
    assert stops.find(ids) == wanted
    assert all(stops.find(ids, n) == wanted for n in range(wanted.tokens if wanted else len(ids)))


def test_no_stop_string_matches_in_a_token_that_is_not_shown():
    assert StopStrings(["e"], TOKENS, silent_tokens=[300]).find([300]) is None


text = st.text(alphabet="ab\u00e9", max_size=12)


@settings(max_examples=300)
@given(text, st.lists(text.filter(len), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_what_is_clear_is_no_part_of_a_stop_string(said, strings, random):
    whole, cuts = said.encode(), []
    while sum(map(len, cuts)) < len(whole):
        at = sum(map(len, cuts))
        cuts.append(whole[at : at + random.randint(1, 4)])
    stops = StopStrings(strings, dict(enumerate(cuts)))
    ids = list(range(len(cuts)))
    found = stops.find(ids)
    ends = [whole.find(s.encode()) + len(s.encode()) for s in strings if s.encode() in whole]
    assert (found is None) == (not ends)
    if found is not None:
        assert len(b"".join(cuts[: found.tokens - 1])) < min(ends) <= len(b"".join(cuts[: found.tokens]))
    for n in range(found.tokens if found else len(ids)):
        begins = whole.find(found.string.encode()) if found else len(whole)
        assert len(b"".join(cuts[: stops.clear(ids[:n])])) <= begins


def test_the_bytes_of_the_tokens_are_those_of_the_text(bundle):
    said = " a\u00e9\U0001f600\n<|im_end|>"
    ids = bundle.tokenizer.encode(said, add_special_tokens=False)
    found = token_bytes(bundle.tokenizer)
    assert b"".join(found[token] for token in ids) == said.encode()
