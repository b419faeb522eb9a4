"""Families by properties: every renderer of the package reads calls whole and shows every message, or says why not.

docs/models.md says which family is exact in what.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from renderers import hy3

from builders import assistant, function_tool, system, tool_result, user
from rollout_backend.config import ModelConfig
from rollout_backend.core.api_error import ApiError
from rollout_backend.core.model_call import ModelCall
from rollout_backend.dialects.openai_chat import OpenAIChat
from rollout_backend.gateway.rendering_thread import RenderingThread
from rollout_backend.gateway.sessions.conversations import Conversations
from rollout_backend.rendering.renderer import RendererBundle, known_renderers, load_renderer
from rollout_backend.rendering.reply import StreamingParser, read_reply
from rollout_backend.rendering.segments import Completion
from vocabularies import tokenizer_folder

WIDE = (pytest.mark.slow, pytest.mark.release)
QUICK = ("qwen3", "qwen3.5", "glm-5", "minimax-m2", "nemotron-3", "default+qwen3.5")
TEXT = {"type": "string"}
TOOLS = [
    function_tool("put", "Does put.", a=TEXT, b=TEXT),
    function_tool("note", "Does note.", v={"anyOf": [TEXT, {"type": "null"}]}, w={"type": ["string", "null"]}),
    function_tool("bash", "Does bash.", command=TEXT),
]
CALL = ModelCall("m", [], tools=TOOLS)


# --- the formats ----------------------------------------------------------------------------------------------


def _qwen(name: str, values: dict[str, str]) -> str:
    pairs = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


def _glm(name: str, values: dict[str, str]) -> str:
    pairs = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in values.items())
    return f"<tool_call>{name}{pairs}</tool_call>"


def _glm_lines(name: str, values: dict[str, str]) -> str:
    pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def _minimax(name: str, values: dict[str, str]) -> str:
    pairs = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in values.items())
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{pairs}</invoke>\n</minimax:tool_call>'


def _hunyuan(name: str, values: dict[str, str]) -> str:
    pairs = "".join(
        f"{hy3._ARG_KEY}{key}{hy3._ARG_KEY_END}\n{hy3._ARG_VALUE}{value}{hy3._ARG_VALUE_END}\n"
        for key, value in values.items()
    )
    call = f"{hy3._TOOL_CALL}{name}{hy3._TOOL_SEP}\n{pairs}{hy3._TOOL_CALL_END}"
    return f"{hy3._TOOL_CALLS}\n{call}\n{hy3._TOOL_CALLS_END}"


def _dsml(name: str, values: dict[str, str]) -> str:
    d = "\uff5cDSML\uff5c"
    pairs = "".join(
        f'<{d}parameter name="{key}" string="true">{value}</{d}parameter>\n' for key, value in values.items()
    )
    return f'\n\n<{d}tool_calls>\n<{d}invoke name="{name}">\n{pairs}</{d}invoke>\n</{d}tool_calls>'


def _hermes(name: str, values: dict[str, str]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(values)}}}\n</tool_call>'


def _llama(name: str, values: dict[str, str]) -> str:
    return f'{{"name": "{name}", "parameters": {json.dumps(values)}}}'


def _gpt_oss(name: str, values: dict[str, str]) -> str:
    head = f"<|start|>assistant to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>"
    return f"<|end|>{head}{json.dumps(values)}"


def _deepseek(name: str, values: dict[str, str]) -> str:
    marks = {mark: f"<\uff5c{mark.replace(' ', chr(0x2581))}\uff5c>" for mark in (
        "tool calls begin", "tool call begin", "tool sep", "tool call end", "tool calls end")}  # fmt: skip
    call = f"function{marks['tool sep']}{name}\n```json\n{json.dumps(values)}\n```"
    section = f"{marks['tool call begin']}{call}{marks['tool call end']}"
    return f"{marks['tool calls begin']}{section}{marks['tool calls end']}"


def _kimi(name: str, values: dict[str, str]) -> str:
    head = f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>"
    return f"<|tool_calls_section_begin|>{head}{json.dumps(values)}<|tool_call_end|><|tool_calls_section_end|>"


def _gemma(name: str, values: dict[str, str]) -> str:
    pairs = ",".join(f'{key}:<|"|>{value}<|"|>' for key, value in values.items())
    return f"<|tool_call>call:{name}{{{pairs}}}<tool_call|>"


def _inkling(name: str, values: dict[str, str]) -> str:
    call = json.dumps({"name": name, "args": values})
    return f"<|content_text|><|end_message|><|message_model|>{name}<|content_invoke_tool_json|>{call}<|end_message|>"


@dataclass(frozen=True)
class Family:
    """`name` is the renderer, or `default+PARSER` for the model's own template with a tool parser."""

    name: str
    tokenizer: str
    call: Any
    end: str = "<|im_end|>"
    thinks: str = ""  # how a reasoning of one word ends, if the prompt begins one

    @property
    def is_json(self) -> bool:
        return self.call in (_hermes, _llama, _gpt_oss, _deepseek, _kimi, _inkling)

    @cache  # noqa: B019  # a few families
    def bundle(self) -> RendererBundle:
        renderer, _, parser = self.name.partition("+")
        options = {"tool_parser": parser} if parser else {}
        return load_renderer(
            ModelConfig(path=tokenizer_folder(self.tokenizer), renderer=renderer, renderer_options=options)
        )

    def ids(self, text: str) -> list[int]:
        said = (f"t{self.thinks}" if self.thinks else "") + text + self.end
        return list(self.bundle().tokenizer.encode(said, add_special_tokens=False))


_THINK = "\n</think>\n\n"
_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
FAMILIES = [
    Family("qwen3", "qwen3", _hermes),
    Family("qwen3-vl", "qwen3", _hermes),
    Family("chatml", "qwen3", _hermes),
    Family("default+qwen3", "qwen3", _hermes),
    Family("default+qwen3.5", "qwen3", _qwen),
    Family("default+glm", "glm-4.7", _glm, "<|user|>", "</think>"),
    Family("default+deepseek-v3", "deepseek-v3", _deepseek, _END),
    Family("prime-qwen3", "qwen3", _qwen),
    *(Family(name, "qwen3.5", _qwen, thinks=_THINK) for name in ("qwen3.5", "qwen3.6", "qwen3.8")),
    *(Family(name, "qwen3", _qwen, thinks=_THINK) for name in ("nemotron-3", "nemotron-3-ultra", "nemotron-3.5")),
    Family("glm-4.5", "glm-4.5", _glm_lines, "<|observation|>", "</think>\n"),
    *(Family(name, "glm-4.7", _glm, "<|observation|>", "</think>") for name in ("glm-5", "glm-5.1", "glm-5.3")),
    *(Family(name, "laguna", _glm_lines, "</assistant>") for name in ("laguna-xs.2", "laguna-m.1", "laguna-xs-2.1")),
    Family("laguna-s-2.1", "laguna", _glm_lines, "</assistant>", "</think>"),
    Family("minimax-m2", "minimax-m2", _minimax, "[e~[", _THINK),
    Family("hy3", "hy3", _hunyuan, hy3._EOS),
    Family("gpt-oss", "gpt-oss", _gpt_oss, "<|call|>", ""),
    Family("llama-3", "llama-3", _llama, "<|eot_id|>"),
    Family("deepseek-v3", "deepseek-v3", _deepseek, _END),
    Family("deepseek-r1", "deepseek-r1", _deepseek, _END, "</think>"),
    Family("deepseek-v4", "deepseek-v4", _dsml, _END),
    Family("kimi-k2", "kimi-k2", _kimi),
    Family("kimi-k2.5", "kimi-k2", _kimi, thinks="</think>"),
    Family("gemma4", "gemma4", _gemma, "<|tool_response>"),
    Family("inkling", "inkling", _inkling, "<|content_model_end_sampling|>"),
]


def test_every_renderer_of_the_package_is_a_family_here():
    assert {family.name.partition("+")[0] for family in FAMILIES} | {"auto"} == set(known_renderers())


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, id=each.name, marks=() if each.name in QUICK else WIDE) for each in FAMILIES],
)
def family(request) -> Family:
    return request.param


# --- calls ----------------------------------------------------------------------------------------------------


def read(family: Family, text: str):
    bundle = family.bundle()
    prompt = bundle.render([user("Go.")], TOOLS)
    ids = family.ids(text)
    parsed = bundle.renderer.parse_response(ids, tools=TOOLS, prompt_ids=prompt)
    reply = read_reply(parsed, bundle.decode(ids[:-1]), CALL, Completion(tuple(ids), ()))
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in reply.message.get("tool_calls", ())
    ]
    stream = StreamingParser(bundle, prompt, CALL)
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
    *("\n    if ready:\n        return 1\n\n", "   ", "\n", "\u00a0x\u00a0", "trail  ", "", "\r\nx\r\n"),
    *("Gr\u00fc\u00dfe \u65e5\u672c \U0001f642 \u2028 \u200b", '"q"', "42", "null", '{"a": 1}'),
]


@pytest.mark.parametrize("value", VALUES)
def test_a_string_is_returned_verbatim(family, value):
    assert read(family, family.call("put", {"a": value, "b": "z"}))[1] == [("put", {"a": value, "b": "z"})]


@pytest.mark.parametrize("value", ["42", '{"k": 1}', "null"])
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
    if (family.is_json and family.call is not _hermes) or family.call is _gemma:
        pytest.skip("quoted in JSON, the tokens of this format end its call, which is then text")
    quoted = f"Like {family.call('bash', {'command': 'rm'}).strip()} this."
    assert read(family, family.call("put", {"a": quoted, "b": "2"}))[1] == [("put", {"a": quoted, "b": "2"})]


def broken(family: Family) -> dict[str, str]:
    ls = family.call("bash", {"command": "ls"})
    if family.is_json:
        cases = {
            "another key": ls.replace('"arguments"', '"input"').replace('"parameters"', '"input"'),
            "a doubled parameter": ls.replace('{"command"', '{"command": "pwd", "command"'),
            "text left over": ls.replace('"ls"}', '"ls"} x'),
        }
        return {what: text for what, text in cases.items() if text != ls}
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
    after = "" if family.is_json and family.call is not _hermes else " After."  # which the package's parser drops
    for what, text in broken(family).items():
        reply, calls = read(family, text + after)
        assert calls == [], what
        assert reply.malformed_tool_calls, what
        for word in ("bash", "ls", after.strip()):
            assert word in reply.message["content"], what


def test_text_around_calls_is_kept(family):
    if family.is_json and family.call is not _hermes:
        pytest.skip("the package's parser drops it")
    one, two = family.call("bash", {"command": "ls"}), family.call("bash", {"command": "pwd"})
    reply, calls = read(family, f"Before.\n{one} Between. {two}\nAfter.")
    assert calls == [("bash", {"command": "ls"}), ("bash", {"command": "pwd"})]
    assert [reply.message["content"].count(word) for word in ("Before.", "Between.", "After.")] == [1, 1, 1]


def test_text_after_a_call_is_kept(family):
    if family.name in ("gpt-oss", "llama-3"):
        pytest.skip("a call ends the reply, or is all of it")
    reply, calls = read(family, f"{family.call('bash', {'command': 'ls'})} After.")
    assert calls == [("bash", {"command": "ls"})]
    assert reply.message["content"].count("After.") == 1


# --- the history ----------------------------------------------------------------------------------------------


def prompt_of(family: Family, messages: list[dict[str, Any]], tools: Any = None) -> list[int]:
    body = {"model": "m", "messages": messages, **({"tools": tools} if tools else {})}
    call = OpenAIChat().parse(json.dumps(body).encode())
    bundle = family.bundle()
    return list(RenderingThread(bundle, 0, 1 << 20).prepare(Conversations(bundle), call).ids)


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


@pytest.mark.parametrize("where", LATE)
def test_a_late_system_message_is_shown_once_where_it_was_sent(family, where):
    if (family.name, where) == ("llama-3", "second"):
        with pytest.raises(ApiError, match="requires the first non-system message to be 'user'"):
            prompt_of(family, LATE[where], TOOLS)
        return
    if (family.name, where) == ("gemma4", "between results"):
        with pytest.raises(ApiError, match="tool messages must immediately follow an assistant message"):
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


@pytest.mark.parametrize("arguments", ["", None, "null", ..., " \n"])
def test_empty_arguments_are_none(family, arguments):
    def history(given):
        return [user("U1"), with_call(given), tool_result("abcdefgh1", "R1")]

    assert prompt_of(family, history(arguments), TOOLS) == prompt_of(family, history("{}"), TOOLS)


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
