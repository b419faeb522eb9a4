"""The gateway matches stop strings, because an engine without a tokenizer rejects them or crashes."""

import pytest

from builders import assistant, function_tool, user
from rollout_backend.workbench.local.scripted import Fail

USER = [user("count")]
TEXT = "one two \u00e9 three"


def chat(gateway, stop, stream: bool, **more):
    """Return the text, why it ended, and the number of sampled tokens."""
    ask = {"model": "scripted", "messages": USER, "stop": stop, **more}
    create = gateway.client().chat.completions.create
    if not stream:
        answer = create(**ask)
        return answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage.completion_tokens
    chunks = list(create(**ask, stream=True, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    [reason] = [choice.finish_reason for choice in choices if choice.finish_reason]
    return "".join(choice.delta.content or "" for choice in choices), reason, chunks[-1].usage.completion_tokens


def messages(gateway, stop, stream: bool):
    client = gateway.anthropic()
    ask = {"model": "scripted", "max_tokens": 100, "messages": USER, "stop_sequences": stop}
    if stream:
        with client.messages.stream(**ask) as events:
            answer = events.get_final_message()
    else:
        answer = client.messages.create(**ask)
    text = "".join(block.text for block in answer.content)
    assert answer.stop_reason == "stop_sequence"
    return text, "stop", answer.usage.output_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", [chat, messages])
def test_an_engine_without_a_tokenizer_is_never_sent_a_stop_string(play, bundle, api, stream):
    gateway = play([TEXT])
    assert api(gateway, ["never", " \u00e9"], stream) == ("one two", "stop", len("one two \u00e9".encode()))
    [asked] = gateway.engine.requests
    assert "stop" not in asked["sampling_params"]
    [segment] = gateway.trajectory().segments
    [turn] = segment.turns
    assert bundle.decode(segment.token_ids[turn.start :]) == "one two \u00e9"
    assert (turn.finish_reason, turn.end) == ("stop", len(segment.token_ids))
    assert turn.weight_versions[-1].end == turn.end


@pytest.mark.parametrize(
    ("text", "stop", "wanted"),
    [
        ("one END\n two", "END\n", "one "),
        ("\n\nHuman: hi", "\n\nHuman:", ""),
        ("abc", ["abc", "b"], "a"),
        ("xabc", ["c", "abc"], "x"),
        ("<think>why END</think>so", "END", "<think>why "),
        ("<|im_end|>", "<|im_end|>", ""),
        ("\U0001f600\U0001f601", "\U0001f601", "\U0001f600"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_ends_before_its_stop_string(play, text, stop, wanted, stream):
    assert chat(play([text]), stop, stream)[:2] == (wanted, "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_before_the_stop_string_is_returned(play, stream):
    gateway = play(['<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>Observation: made up'])
    text, reason, _ = chat(gateway, "Observation:", stream, tools=[function_tool("f")])
    assert (text or "", reason) == ("", "tool_calls")


def test_a_conversation_continues_from_the_sampled_tokens(play):
    gateway = play([TEXT, "four"])
    reply = chat(gateway, " \u00e9", False)[0]
    gateway.client().chat.completions.create(model="scripted", messages=[*USER, assistant(reply), user("and?")])
    [segment] = gateway.trajectory().segments
    assert len(segment.turns) == 2


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 404, 422])
def test_an_engines_refusal_is_a_500_that_is_not_retried(play, status):
    gateway = play([Fail(status, "unknown sampling parameter")])
    answer = gateway.post({"model": "scripted", "messages": USER})
    assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")
    assert answer.json()["error"]["code"] == "engine_refused"
    assert "unknown sampling parameter" in answer.json()["error"]["message"]
    assert len(gateway.engine.requests) == 1
    assert gateway.trajectory().unanswered_calls == 1
