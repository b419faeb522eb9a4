from dataclasses import replace

import pytest
from renderers import ParsedResponse, ParsedToolCall, ToolCallParseStatus

from rollout_backend.model.model_call import ModelCall
from rollout_backend.model.rendering.reply import read_reply
from rollout_backend.model.rendering.segments import Completion

SAMPLED = Completion((1, 2), (None, None))
OFFERS = ModelCall("m", [], tools=[{}])
GOOD = ParsedToolCall(raw="{}", name="f", arguments={"a": "ü"})
BAD = ParsedToolCall(raw='{"name": "f"', status=ToolCallParseStatus.UNCLOSED_BLOCK)
UNKNOWN = ParsedToolCall(raw="{}", name="g", arguments={}, status=ToolCallParseStatus.UNKNOWN_TOOL, id="own")


def test_a_reply_has_parsed_calls_and_the_text_of_broken_ones():
    parsed = ParsedResponse(content="text", reasoning_content="why", tool_calls=[GOOD, BAD, UNKNOWN])
    reply = read_reply(parsed, "all of it", OFFERS, SAMPLED)
    assert reply.message["content"] == 'text\n{"name": "f"'
    assert reply.message["reasoning_content"] == "why"
    assert [call["function"]["name"] for call in reply.message["tool_calls"]] == ["f", "g"]
    assert reply.message["tool_calls"][0]["function"]["arguments"] == '{"a": "ü"}'
    assert reply.message["tool_calls"][1]["id"] == "own"
    assert (reply.finish_reason, reply.malformed_tool_calls) == ("tool_calls", 1)


@pytest.mark.parametrize(("content", "raw"), [("", BAD.raw), (BAD.raw, f"{BAD.raw}\n")])
def test_a_broken_call_is_shown_once(content, raw):
    parsed = ParsedResponse(content=content, tool_calls=[replace(BAD, raw=raw)])
    reply = read_reply(parsed, "", OFFERS, SAMPLED)
    assert (reply.message, reply.finish_reason) == ({"role": "assistant", "content": BAD.raw}, "stop")


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("<f>", "", None),
        ("<think>why</think>\n\nso <f>{}", "so", "why"),
        ("<think>\n</think><f>{}", "", ""),
    ],
)
def test_without_tools_the_text_is_the_content(text, content, reasoning):
    parsed = ParsedResponse(content=content, reasoning_content=reasoning, tool_calls=[GOOD])
    reply = read_reply(parsed, text, ModelCall("m", []), SAMPLED)
    assert reply.message["content"] == text.rpartition("</think>")[2].strip()
    assert reply.message.get("reasoning_content") == (reasoning or None)


def test_without_parallel_calls_the_first_is_returned():
    parsed = ParsedResponse(content="", tool_calls=[UNKNOWN, GOOD, GOOD])
    reply = read_reply(parsed, "", replace(OFFERS, parallel_tool_calls=False), SAMPLED)
    assert [call["id"] for call in reply.message["tool_calls"]] == ["own"]
    assert reply.extra_tool_calls == 2


@pytest.mark.parametrize(
    ("content", "reasoning", "wanted"), [("one two", None, ("one", None)), ("", "one two", ("", "one"))]
)
def test_a_stop_string_is_not_part_of_the_reply(content, reasoning, wanted):
    parsed = ParsedResponse(content=content, reasoning_content=reasoning)
    reply = read_reply(parsed, "", OFFERS, replace(SAMPLED, matched=" two"))
    assert (reply.message["content"], reply.message.get("reasoning_content")) == wanted
