"""Replies of each family, streamed while they are sampled."""

import json

import pytest

from rollout_backend.core.model_call import ModelCall
from rollout_backend.gateway.rendering_thread import RenderingThread
from rollout_backend.rendering.reply import StreamingParser, read_reply

USER = {"role": "user", "content": "Add one and two."}
THOUGHT = "One < two. Let me\nsee 🙂."
ANSWERS = {
    "text": ("Grüße, `1 < 2`\n\nEnd.", []),
    "call": ("", [("add", '{"a": 1, "b": 2}')]),
    "text and call": ("I add.", [("add", '{"a": 1, "b": 2}')]),
    "two calls": ("Both.", [("add", '{"a": 1, "b": 2}'), ("write", '{"text": "x"}')]),
}


def test_the_bytes_of_the_tokens_are_those_of_the_text(family, bundle):
    said = family.say(THOUGHT if family.reasons else None, " a\u00e9\U0001f600\u2028\n\n  b", [])
    ids = bundle.tokenizer.encode(said, add_special_tokens=False)
    assert b"".join(bundle.token_bytes[token] for token in ids) == said.encode()
    assert len(bundle.token_bytes) >= len(bundle.tokenizer)


def test_no_stop_string_matches_in_a_token_that_is_not_shown(family, bundle):
    ids = bundle.tokenizer.encode(family.say("7" if family.reasons else None, "42", []), add_special_tokens=False)
    end = bundle.token_bytes[ids[-1]].decode()
    strings = [end, end[2:6], *(["<|channel|>", "hanne", "mess"] if family.name == "gpt-oss" else [])]
    thread = RenderingThread(bundle, 0, 4096)
    assert thread.stop_strings(ModelCall("m", [], stop=tuple(strings))).find(ids) is None
    assert thread.stop_strings(ModelCall("m", [], stop=("42",))).find(ids) is not None
    if family.name == "gpt-oss":  # the text of a completion has the names of special tokens
        assert thread.stop_strings(ModelCall("m", [], prompt="", stop=("<|channel|>",))).find(ids) is not None


@pytest.mark.parametrize("size", [1, 3, 50])
@pytest.mark.parametrize("reasons", [True, False])
@pytest.mark.parametrize("answer", ANSWERS)
def test_the_streamed_parts_are_the_whole_message(family, bundle, tools, answer, reasons, size):
    content, calls = ANSWERS[answer]
    if len(calls) > 1 and not family.parallel:
        pytest.skip("one call is all that this format has in a turn")
    if calls and family.name == "llama-3":
        content = ""  # it calls or it speaks
    thought = THOUGHT if reasons and family.reasons else None
    prompt = bundle.render([USER], tools)
    ids = bundle.tokenizer.encode(family.say(thought, content, calls), add_special_tokens=False)
    increments = StreamingParser(bundle, prompt, tools=tools, tools_offered=True)
    early = [
        delta
        for at in range(0, len(ids) - 1, size)
        for delta in increments.feed(ids[at : min(at + size, len(ids) - 1)])
    ]
    parsed = bundle.renderer.parse_response(list(ids), tools=tools, prompt_ids=prompt)
    whole = read_reply(parsed, bundle.decode(ids[:-1]), finish_reason="stop", tools_offered=True)
    late, reply = increments.end(whole)

    def sent(kind: str, deltas) -> str:
        return "".join(delta.text for delta in deltas if delta.kind == kind)

    assert sent("text", [*early, *late]) == (reply.message["content"] or "")
    assert (reply.message["content"] or "").strip() == (whole.message["content"] or "").strip() == content
    assert reply.message.get("reasoning_content", "").strip() == (thought or "")
    found = [delta.tool_call["function"] for delta in [*early, *late] if delta.kind == "tool_call"]
    assert [(call["name"], json.loads(call["arguments"])) for call in found] == [
        (name, json.loads(arguments)) for name, arguments in calls
    ]
    assert sent("text", early).strip() == content
    assert sent("reasoning", early).strip() == (thought or "")
