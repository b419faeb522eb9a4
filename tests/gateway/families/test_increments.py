"""Replies of each family, told while they are sampled."""

import json

import pytest

from rollout_backend.gateway.increments import Increments
from rollout_backend.gateway.reply import read_reply

USER = {"role": "user", "content": "Add one and two."}
THOUGHT = "One < two. Let me\nsee 🙂."
ANSWERS = {
    "text": ("Grüße, `1 < 2`\n\nEnd.", []),
    "call": ("", [("add", '{"a": 1, "b": 2}')]),
    "text and call": ("I add.", [("add", '{"a": 1, "b": 2}')]),
    "two calls": ("Both.", [("add", '{"a": 1, "b": 2}'), ("write", '{"text": "x"}')]),
}


@pytest.mark.parametrize("size", [1, 3, 50])
@pytest.mark.parametrize("reasons", [True, False])
@pytest.mark.parametrize("answer", ANSWERS)
def test_what_is_told_is_the_whole_message(family, bundle, tools, answer, reasons, size):
    content, calls = ANSWERS[answer]
    if len(calls) > 1 and not family.parallel:
        pytest.skip("one call is all that this format has in a turn")
    if calls and family.name == "llama-3":
        content = ""  # it calls or it speaks
    thought = THOUGHT if reasons and family.reasons else None
    prompt = bundle.render([USER], tools)
    ids = bundle.tokenizer.encode(family.say(thought, content, calls), add_special_tokens=False)
    increments = Increments(bundle, prompt, tools=tools, tools_offered=True)
    early = [
        delta
        for at in range(0, len(ids) - 1, size)
        for delta in increments.feed(ids[at : min(at + size, len(ids) - 1)])
    ]
    parsed = bundle.renderer.parse_response(list(ids), tools=tools, prompt_ids=prompt)
    whole = read_reply(parsed, bundle.decode(ids[:-1]), finish_reason="stop", tools_offered=True)
    late, reply = increments.end(whole)

    def told(kind: str, deltas) -> str:
        return "".join(delta.text for delta in deltas if delta.kind == kind)

    assert told("text", [*early, *late]) == (reply.message["content"] or "")
    assert (reply.message["content"] or "").strip() == (whole.message["content"] or "").strip() == content
    assert reply.message.get("reasoning_content", "").strip() == (thought or "")
    found = [delta.tool_call["function"] for delta in [*early, *late] if delta.kind == "tool_call"]
    assert [(call["name"], json.loads(call["arguments"])) for call in found] == [
        (name, json.loads(arguments)) for name, arguments in calls
    ]
    assert told("text", early).strip() == content
    assert told("reasoning", early).strip() == (thought or "")
