"""Families by properties: every renderer of the package reads calls whole and shows every message, or says why not.

docs/models.md says which family is exact in what.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import family_matrix
from builders import assistant, function_tool, system, tool_result, user
from families import FAMILIES, GEMMA, HERMES, KIMI, MISTRAL, Family
from family_matrix import CASES, Reading, expected, parsers, reading
from rollout_backend.model.dialects.openai_chat import OpenAIChat
from rollout_backend.model.gateway.model_call_executor import CallRenderer
from rollout_backend.model.gateway.sessions.conversations import Conversations
from rollout_backend.model.model_call import ApiError, ModelCall
from rollout_backend.model.rendering.renderer import known_renderers
from rollout_backend.model.rendering.reply import StreamingParser, read_reply
from rollout_backend.model.rendering.segments import Completion
from rollout_backend.model.serving.install import find_engine

WIDE = (pytest.mark.slow, pytest.mark.release)
QUICK = ("qwen3", "qwen3.5", "glm-5", "minimax-m2", "nemotron-3", "default+qwen3.5")
TEXT = {"type": "string"}
TOOLS = [
    function_tool("put", "Does put.", a=TEXT, b=TEXT),
    function_tool("note", "Does note.", v={"anyOf": [TEXT, {"type": "null"}]}, w={"type": ["string", "null"]}),
    function_tool("bash", "Does bash.", command=TEXT),
]


def test_every_renderer_of_the_package_is_a_family_here():
    assert {family.name.partition("+")[0] for family in FAMILIES} | {"auto"} == set(known_renderers())


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, id=each.name, marks=() if each.name in QUICK else WIDE) for each in FAMILIES],
)
def family(request) -> Family:
    return request.param


@pytest.mark.parametrize("case", CASES)
def test_the_outcome_of_a_case_is_the_one_that_the_page_shows(family, case):
    if not expected(family, case):
        pytest.skip("it does not apply")
    for pieces in (1, 7):
        found = reading(family, CASES[case].write(family), pieces=pieces)
        assert CASES[case].outcome(found) == expected(family, case)
        assert found.malformed == (expected(family, case) == "reasoning" and case == "open")


@pytest.mark.engine
@pytest.mark.slow
def test_the_outcomes_are_those_of_sglangs_parsers():
    asked = [(family, case) for family in FAMILIES if parsers(family) for case in CASES if expected(family, case)]
    replies = [
        {
            "text": CASES[case].write(family).replace(":opensource", ""),
            "reasoning": parsers(family)[0],
            "calls": parsers(family)[1],
            "opened": bool(family.opened),
            "tools": family_matrix.TOOLS,
        }
        for family, case in asked
    ]
    script = Path(__file__).parents[3] / "support" / "sglang_parsers.py"
    done = subprocess.run(
        [find_engine(), script], input=json.dumps(replies), capture_output=True, text=True, check=True, timeout=500
    )
    found = [Reading(**each) for each in json.loads(done.stdout.splitlines()[-1])]
    outcomes = [
        CASES[case].outcome(replace(each, calls=[(name, given) for name, given in each.calls]))
        for (_, case), each in zip(asked, found, strict=True)
    ]
    differ = {
        (family.name, case): outcome.partition(":")[0]
        for (family, case), outcome in zip(asked, outcomes, strict=True)
        if outcome != expected(family, case)
    }
    assert differ == family_matrix.SGLANG_DIFFERS
    assert len(outcomes) > 100


# --- calls ----------------------------------------------------------------------------------------------------


def read(family: Family, text: str, history=()):
    bundle, call = family.bundle(), ModelCall("m", list(history), tools=TOOLS)
    prompt = bundle.render([user("Go.")], TOOLS)
    ids = family.ids(text)
    parsed = bundle.renderer.parse_response(ids, tools=TOOLS, prompt_ids=prompt)
    reply = read_reply(parsed, bundle.decode(ids[:-1]), call, Completion(tuple(ids), ()), call.call_ids)
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in reply.message.get("tool_calls", ())
    ]
    stream = StreamingParser(bundle, prompt, call)
    sent = []
    for token in ids[:-1]:
        deltas = stream.add([token])
        sent += stream.parse() if stream.tokens_to_parse else deltas
    rest, streamed = stream.end(reply)
    assert [delta.tool_call["function"] for delta in [*sent, *rest] if delta.kind == "tool_call"] == [
        call["function"] for call in reply.message.get("tool_calls", ())
    ]
    assert (streamed.message["content"] or "").strip() == (reply.message["content"] or "").strip()
    return reply, calls


VALUES = [
    *("\n    if ready:\n        return 1\n\n", "   ", "\n", "\n\n", "\u00a0x\u00a0", "trail  ", "", "\r\nx\r\n"),
    *("</parameter>", "x</parameter>\n", "</parameter>\n\n</parameter> \n\n"),
    *("Gr\u00fc\u00dfe \u65e5\u672c \U0001f642 \u2028 \u200b", '"q"', "42", "null", '{"a": 1}'),
]


@pytest.mark.parametrize("value", VALUES)
def test_a_string_is_returned_verbatim(family, value):
    assert read(family, family.call("put", {"a": value, "b": "z"}))[1] == [("put", {"a": value, "b": "z"})]


@pytest.mark.parametrize("value", ["42", '{"k": 1}', "nullable", "true"])
@pytest.mark.parametrize("key", ["v", "w"])
def test_a_nullable_string_is_a_string(family, key, value):
    assert read(family, family.call("note", {key: value}))[1] == [("note", {key: value})]


TAGS = (
    *("</parameter>", "</function>", "</tool_call>", "</arg_value>", "</invoke>", "</minimax:tool_call>", "```"),
    *("</parameter>\n</function>\n</tool_call>", "</parameter>\n</invoke>", "</arg_value></tool_call>"),
    *(
        "</tool_call:opensource>",
        "</arg_value:opensource>",
        "</\uff5cDSML\uff5cparameter>",
        "</\uff5cDSML\uff5cinvoke>",
    ),
    *("</tool_calls:opensource>", "</\uff5cDSML\uff5ctool_calls>"),
)


@pytest.mark.parametrize("tag", TAGS)
def test_a_closing_tag_in_a_value_belongs_to_it(family, tag):
    value = f"<x>{tag}1</x>"
    assert read(family, family.call("put", {"a": value, "b": "2"}))[1] == [("put", {"a": value, "b": "2"})]


def test_a_call_that_is_quoted_in_a_value_belongs_to_it(family):
    if (family.is_json and family.write not in (HERMES, KIMI)) or family.is_python or family.write is GEMMA:
        pytest.skip("quoted in JSON, the tokens of this format end its call, which is then text")
    quoted = f"Like {family.call('bash', {'command': 'rm'}).strip()} this."
    assert read(family, family.call("put", {"a": quoted, "b": "2"}))[1] == [("put", {"a": quoted, "b": "2"})]


def broken(family: Family) -> dict[str, str]:
    ls = family.call("bash", {"command": "ls"})
    if family.is_json:
        cases = {
            "another key": ls.replace('"arguments"', '"input"').replace('"parameters"', '"input"'),
            "a doubled parameter": ls.replace('{"command"', '{"command": "pwd", "command"'),
            "an empty call": "<tool_call></tool_call>bash ls" if family.write is HERMES else ls,
            "text after the name": ls.replace("bash:0", "bash:0 x"),
            "text left over": ls.replace('"ls"}', '"ls"} x')
            if family.write is not MISTRAL
            else ls,  # nothing closes it
        }
        return {what: text for what, text in cases.items() if text != ls}
    if family.is_python:
        pair = ls[ls.index("command") : ls.index(")")]
        return {
            "a doubled parameter": ls.replace(pair, f"{pair}, {pair}"),
            "text left over": ls.replace(pair, f"{pair} x"),
            "text after a call": ls.replace(")", ") x"),
            "a value without its name": ls.replace("command=", ""),
            "a name for a value": ls.replace(pair, "command=ls"),
            "a string that is not closed": ls.replace(pair, pair[:-1]),
        }
    empty = family.call("bash", {})
    start = next(i for i, (one, other) in enumerate(zip(ls, empty, strict=False)) if one != other)
    end = len(ls) - (len(empty) - start)
    head, pair, tail = ls[:start], ls[start:end], ls[end:]
    opened = pair[: pair.index("ls") + 2]
    return {
        "a doubled parameter": head + pair + pair + tail,
        "text left over": head + "Hello " + pair + tail,
        "text after a parameter": head + pair + "Hello " + tail,
        "a parameter that is never closed": head + opened + tail,
        "another call in an open parameter": head + opened + "\n" + ls,
        "a name with a space": ls.replace("bash", "bash x"),
        "JSON": ls[: ls.index("bash")] + '{"name": "bash", "arguments": {"command": "ls"}}' + tail,
        "a call that opens inside": head + ls,
    }


def test_what_is_no_whole_call_is_text(family):
    after = "" if family.is_json and family.write is not HERMES else " After."  # which the package's parser drops
    for what, text in broken(family).items():
        reply, calls = read(family, text + after)
        assert calls == [], what
        assert reply.malformed_tool_calls, what
        for word in ("bash", "ls", after.strip()):
            assert word in reply.message["content"], what


@pytest.mark.parametrize("before", ["I look.\n\n", ""])
def test_a_function_needs_no_tag_around_it(family, before):
    ls, pwd = (family.call("bash", {"command": command}) for command in ("ls", "pwd"))
    if "<tool_call>\n<function=" not in ls:
        pytest.skip("another format")
    for opened in ("<tool_call>\n", ""):
        for between in ("\n</tool_call>\n<tool_call>\n", "\n</tool_call>\n", "\n"):
            for closed in ("\n</tool_call>", ""):
                bare = (call.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>") for call in (ls, pwd))
                reply, calls = read(family, f"{before}{opened}{between.join(bare)}{closed}")
                assert calls == [("bash", {"command": "ls"}), ("bash", {"command": "pwd"})]
                assert (reply.message["content"] or "").rstrip().endswith(before.rstrip())
    reply, calls = read(family, f"{before}<function=bash>\n<parameter=command>\nls\n</tool_call>")
    assert (calls, reply.malformed_tool_calls) == ([], 1)
    assert f"{before}<function=bash>" in reply.message["content"]
    assert "a</tool_call>b" in read(family, "a</tool_call>b")[0].message["content"]


def test_a_call_may_have_no_arguments(family):
    if family.write is MISTRAL:
        pytest.skip("its calls have an object as arguments")
    call = family.call("bash", {})
    alone = family.is_json and not family.takes_objects
    for nothing in ("", "null") if alone else ('""', "null") if family.is_json else ("{}",):
        reply, calls = read(family, nothing.join(call.rsplit("{}", 1)))
        assert (reply.malformed_tool_calls, calls) == (0, [("bash", {})])


def test_gpt_oss_may_leave_out_the_namespace_of_tools(family):
    if family.name != "gpt-oss":
        pytest.skip("another format")
    ls = family.call("bash", {"command": "ls"})
    for call in (
        ls.replace("functions.", ""),
        "<|start|>assistant<|channel|>analysis to=bash code" + ls[ls.index("<|message|>") :],
    ):
        assert read(family, call)[1] == [("bash", {"command": "ls"})]
    for name in ("python", "bash2"):
        assert read(family, ls.replace("functions.bash", name))[1] == []
    assert read(family, ls.replace("functions.bash", "bash").removesuffix("}"))[0].malformed_tool_calls == 1


def test_the_messages_of_gpt_oss_are_read_in_linear_time(family):
    if family.name != "gpt-oss":
        pytest.skip("another format")
    read = []

    class Counted(list):
        def __getitem__(self, key):
            read.append(len(range(len(self))[key]) if isinstance(key, slice) else 1)
            return super().__getitem__(key)

    ids = Counted(family.ids(family.text.format("x") * 1000))
    assert len(list(family.bundle().renderer.inner._messages(ids))) == 999
    assert sum(read) < 3 * len(ids)


def test_llama_3_may_mark_a_call(family):
    if family.name != "llama-3":
        pytest.skip("another format")
    reply, calls = read(family, f"<|python_tag|>{family.call('bash', {'command': 'ls'})}")
    assert (reply.message["content"], calls) == (None, [("bash", {"command": "ls"})])
    reply, calls = read(family, "<|python_tag|>print(1)")
    assert (reply.message["content"], calls) == ("<|python_tag|>print(1)", [])


def test_text_around_calls_is_kept(family):
    if family.name in ("gpt-oss", "llama-3", "default+granite-3"):
        pytest.skip("a call ends the reply, or is all of it")
    one, two = family.call("bash", {"command": "ls"}), family.call("bash", {"command": "pwd"})
    for said in (f"Before.\n{one} Between. {two}\nAfter.", f"{one}{two} After."):
        reply, calls = read(family, said)
        assert calls == [("bash", {"command": "ls"}), ("bash", {"command": "pwd"})]
        for word in ("Before.", "Between.", "After."):
            assert reply.message["content"].count(word) == said.count(word)


def test_ids_of_calls_are_unique_in_a_conversation(family):
    if family.name == "default+granite-3":
        pytest.skip("a call ends the reply")
    history = []
    for _ in range(3):
        reply, calls = read(
            family, "".join(family.call("bash", {"command": "ls"}) for _ in range(family.parallel + 1)), history
        )
        assert calls
        history += [reply.message, *(tool_result(call["id"], "R") for call in reply.message["tool_calls"])]
    ids = [call["id"] for message in history for call in message.get("tool_calls", ())]
    assert len(set(ids)) == len(ids)


def test_the_results_of_several_calls_extend_the_row(family):
    bundle = family.bundle()
    prompt = bundle.render([user("Go.")], TOOLS)
    sampled = family.ids("".join(family.call("bash", {"command": "ls"}) for _ in range(family.parallel + 1)))
    results = [{**tool_result(f"abcdefgh{i}", f"R{i}"), "name": "bash"} for i in range(family.parallel + 1)]
    added = bundle.renderer.continuation(prompt, sampled, results, tools=TOOLS)
    if family.name.startswith("default") or family.name == "deepseek-r1":
        assert added is None
        return
    shown = bundle.decode(added)
    assert [shown.index(result["content"]) for result in results] == sorted(
        shown.index(result["content"]) for result in results
    )
    if bundle.sorts_results:
        conversations, call = Conversations(bundle), ModelCall("m", [user("Go.")], tools=TOOLS)
        first = conversations.prepare(call.messages, TOOLS)
        completion = Completion(tuple(sampled), (None,) * len(sampled))
        parsed = bundle.renderer.parse_response(sampled, tools=TOOLS, prompt_ids=first.ids)
        reply = read_reply(parsed, "", call, completion).message
        conversations.record(first, completion, reply)
        answers = [
            {**result, "tool_call_id": called["id"]}
            for result, called in zip(results, reply["tool_calls"], strict=True)
        ]
        for sent in (answers, answers[::-1]):
            history = [user("Go."), reply, *sent]
            assert list(conversations.prepare(history, TOOLS).ids) == [*prompt, *sampled, *added]
            assert prompt_of(family, history, TOOLS)[-len(added) :] == added


def test_a_reply_may_have_a_thousand_calls(family):
    if not family.parallel or family.name == "default+granite-3":
        pytest.skip("a call ends the reply, or is all of it")
    parsed = family.bundle().renderer.parse_response(family.ids(family.call("bash", {}) * 1000), tools=TOOLS)
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("bash", {})] * 1000


def test_a_reply_is_rendered_as_it_was_sampled(family):
    """So that the next call extends the row."""
    if not family.name.startswith("default+"):
        pytest.skip("its turns are bridged")
    if family.name in ("default+qwen3.5", "default+glm", "default+deepseek-v3"):
        pytest.skip("the template of this vocabulary writes calls in another way")
    bundle = family.bundle()
    prompt = prompt_of(family, [user("Go.")], TOOLS)
    thought = "I must." if family.reasons else None
    sampled = family.ids(family.say(thought, "", [("put", '{"a": " x", "b": "y"}')]).removesuffix(family.end))
    parsed = bundle.renderer.parse_response(sampled, tools=TOOLS, prompt_ids=prompt)
    reply = read_reply(
        parsed, bundle.decode(sampled), ModelCall("m", [], tools=TOOLS), Completion(tuple(sampled), ())
    ).message
    assert reply.get("reasoning_content") == thought
    [call] = reply["tool_calls"]
    whole = prompt_of(family, [user("Go."), reply, tool_result(call["id"], "R1")], TOOLS)
    assert bundle.decode(whole).startswith(bundle.decode([*prompt, *sampled]))


# --- the history ----------------------------------------------------------------------------------------------


def prompt_of(family: Family, messages: list[dict[str, Any]], tools: Any = None) -> list[int]:
    body = {"model": "m", "messages": messages, **({"tools": tools} if tools else {})}
    call = OpenAIChat().parse(json.dumps(body).encode())
    bundle = family.bundle()
    return list(CallRenderer(bundle, 0, 1 << 20).prepare(Conversations(bundle), call).ids)


def with_call(arguments: Any) -> dict[str, Any]:
    function = {"name": "bash", **({} if arguments is ... else {"arguments": arguments})}
    return {"role": "assistant", "content": None, "tool_calls": [
        {"id": "abcdefgh1", "type": "function", "function": function}]}  # fmt: skip


AT_THE_START = ("hy3", "default+deepseek-v3")  # their templates join all system messages there
NEEDS_USER = ("qwen3.8", "llama-3")
LATE = {
    "in the middle": [user("U1"), assistant("A1"), system("S1"), user("U2")],
    "second": [system("S0"), system("S1"), user("U2")],
    "last": [user("U1"), system("S1")],
    "between results": [
        *(user("U1"), with_call('{"command": "ls"}'), tool_result("abcdefgh1", "R1"), system("S1")),
        tool_result("abcdefgh1", "R2"),
    ],
}


REFUSED = {
    ("llama-3", "second"): "requires the first non-system message to be 'user'",
    ("gemma4", "between results"): "tool messages must immediately follow an assistant message",
}


@pytest.mark.parametrize("where", LATE)
def test_a_late_system_message_is_shown_once_where_it_was_sent(family, where):
    if (family.name, where) in REFUSED:
        with pytest.raises(ApiError, match=REFUSED[family.name, where]):
            prompt_of(family, LATE[where], TOOLS)
        return
    text = family.bundle().decode(prompt_of(family, LATE[where], TOOLS))
    shown = [message["content"] for message in LATE[where] if message["content"]]
    places = [text.rfind(word) for word in shown]
    if family.name in AT_THE_START:
        assert "S1" in text
        return
    assert -1 not in places
    assert places == sorted(places)
    assert text.count("S1") == 1


def test_a_late_system_message_has_the_tokens_of_the_bridge(family):
    bundle = family.bundle()
    prompt = bundle.render([user("U1")], TOOLS)
    new = [tool_result("abcdefgh1", "R1"), system("S1")]
    said = family.ids(family.call("bash", {"command": "ls"}))
    bridged = bundle.renderer.continuation(prompt, said, [{**new[0], "name": "bash"}, new[1]], tools=TOOLS)
    if bridged is None:
        pytest.skip("this template's turns cannot be extended")
    rendered = prompt_of(family, [user("U1"), with_call('{"command": "ls"}'), *new], TOOLS)
    at = next(i for i in range(len(bridged)) if rendered[-len(bridged) + i :] == bridged[i:])
    assert "R1" in bundle.decode(bridged[at:])
    assert "S1" in bundle.decode(bridged[at:])


def test_a_tools_result_makes_no_marker_of_the_format(family):
    bundle = family.bundle()
    added = bundle.tokenizer.added_tokens_decoder
    call = family.call("bash", {"command": "ls"})

    def markers(result: str) -> list[int]:
        messages = [user("U1"), with_call('{"command": "ls"}'), tool_result("abcdefgh1", result)]
        return [token for token in prompt_of(family, messages, TOOLS) if token in added]

    assert markers(family.say("t" if family.reasons else None, "", [("bash", '{"command": "ls"}')])) == markers(
        "".join(word for word in call if word.isalpha())
    )


@pytest.mark.parametrize("arguments", ["", None, "null", ..., " \n"])
def test_empty_arguments_are_none(family, arguments):
    def history(given):
        return [user("U1"), with_call(given), tool_result("abcdefgh1", "R1")]

    assert prompt_of(family, history(arguments), TOOLS) == prompt_of(family, history("{}"), TOOLS)


def test_arguments_are_spelled_as_engines_pass_them_to_templates(family):
    if family.name == "gpt-oss":
        pytest.skip("engines pass OpenAI's library the text")
    prompts = [
        prompt_of(family, [user("U1"), with_call(arguments), tool_result("abcdefgh1", "R1")], TOOLS)
        for arguments in ('{"command": "\u00e4", "n": [1, 2]}', '{"command":"\\u00e4",\n"n":[1,2]}')
    ]
    assert prompts[0] == prompts[1]
    assert "\u00e4" in family.bundle().decode(prompts[0])


def test_half_a_surrogate_pair_is_rendered_as_its_replacement(family):
    messages = [
        system("S\ud83d1"),
        user("U\ude001"),
        with_call('{"command": "\\ud83d"}'),
        tool_result("abcdefgh1", "R\ud83d"),
    ]
    described = [function_tool("bash", "Does \ud83d.", command={**TEXT, "description": "\ude00"})]
    body = json.dumps({"model": "m", "messages": messages, "tools": described}).encode()
    call = OpenAIChat().parse(body)
    assert call.ignored == {"lone_surrogate"}
    bundle = family.bundle()
    prompt = CallRenderer(bundle, 0, 1 << 20).prepare(Conversations(bundle), call).ids
    assert "R\ufffd" in bundle.decode(prompt)


@pytest.mark.parametrize("arguments", ['{"command": "ls', '["ls"]', '"ls"', "5", '{"a": NaN}', '{"a": 1e999}'])
def test_arguments_that_are_no_object_are_refused_by_their_place(family, arguments):
    with pytest.raises(ApiError, match=r"messages\.1\.tool_calls\.0\.function\.arguments"):
        prompt_of(family, [user("U1"), with_call(arguments), tool_result("abcdefgh1", "R1")], TOOLS)


@pytest.mark.parametrize(
    "messages",
    [
        [system("S1")],
        [with_call('{"command": "ls"}'), tool_result("abcdefgh1", "R1")],
    ],
)
def test_a_conversation_without_a_user_message_is_rendered_or_refused_for_that(family, messages):
    if family.name in NEEDS_USER:
        with pytest.raises(ApiError, match="no user message"):
            prompt_of(family, messages, TOOLS)
        return
    text = family.bundle().decode(prompt_of(family, messages, TOOLS))
    assert all(message["content"] in text for message in messages if message["content"])
