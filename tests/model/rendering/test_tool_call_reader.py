"""Values by the tool's schema, and the work of reading broken replies."""

import json
import re

import pytest

from rollout_backend.model.rendering import tool_call_reader
from rollout_backend.model.rendering.tool_call_reader import FORMATS, ArgumentTypes, read_calls

ROOT = {
    "$defs": {
        "Name": {"type": "string"},
        "Count": {"type": "integer"},
        "Maybe": {"anyOf": [{"$ref": "#/$defs/Name"}, {"type": "null"}]},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Count"}]},
        "a/b": {"const": "7"},
    }
}
STRING, INTEGER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}

DSML = (
    '<\uff5cDSML\uff5cinvoke name="f">\n<\uff5cDSML\uff5cparameter name="a" string="false">TEXT'
    "</\uff5cDSML\uff5cparameter>\n</\uff5cDSML\uff5cinvoke>"
)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (STRING, "42", "42"),
        ({"$ref": "#/$defs/Maybe"}, "42", "42"),
        ({"$ref": "#/$defs/a~1b"}, "7", "7"),
        ({"$ref": "#/$defs/Loop"}, "7", 7),
        ({"$ref": "https://elsewhere"}, "7", 7),
        ({"allOf": [{"$ref": "#/$defs/Name"}, {"description": "d"}]}, "1e3", "1e3"),
        ({"type": "integer", "nullable": True}, "None", None),
        ({"anyOf": [INTEGER, NULL]}, "null", None),
        ({"oneOf": [STRING, INTEGER]}, "42", 42),
        ({"type": ["string", "integer"]}, "1.5", "1.5"),
        ({"type": ["string", "null"]}, "true", "true"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [STRING, NULL]}, "null", None),
        ({"oneOf": [{"$ref": "#/$defs/Name"}, NULL]}, "null", None),
        ({"$ref": "#/$defs/Maybe"}, "null", None),
        ({"type": "string", "nullable": True}, "null", None),
        ({"$ref": "#/$defs/Name", "nullable": True}, "null", None),
        ({"allOf": [{"$ref": "#/$defs/Name"}], "nullable": True}, "null", None),
        ({"type": ["string", "null"], "enum": ["null", None]}, "null", "null"),
        (STRING, "null", "null"),
        ({"anyOf": [STRING, {"type": "array"}]}, '["a"]', ["a"]),
        ({"anyOf": [STRING, {"type": "array"}]}, '{"a": 1}', '{"a": 1}'),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": ["auto", 1]}, "1", 1),
        ({"enum": ["a", None]}, "null", None),
        ({"const": "7"}, "7", "7"),
        ({"type": "boolean"}, "True", True),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "array"}, "['it\\'s', None, (1,)]", ["it's", None, [1]]),
        ({"anyOf": [{"type": "object"}, NULL]}, "\n{'a': True}", {"a": True}),
        ({"type": "object"}, "['a']", "['a']"),
        ({"type": "object"}, "{'a', f()}", "{'a', f()}"),
        ({"type": ["object", "string"]}, "{'a': 1}", "{'a': 1}"),
        ({}, "['a']", "['a']"),
        ({}, "ls -la", "ls -la"),
        ({}, "True", "True"),
        ({}, "42", 42),
        (None, "NaN", "NaN"),
        (True, '{"a": 1}', {"a": 1}),
    ],
)
def test_a_value_has_a_declared_type(schema, text, value):
    found = ArgumentTypes().typed(text, schema, ROOT)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("schema", [INTEGER, {"type": "object"}, {"enum": [1]}, {"anyOf": [INTEGER, NULL]}])
@pytest.mark.parametrize("text", ["ls", "1e999", '{"a": 1, "a": 2}', "{'a'}", "[" * 3000, "9" * 5000, ""])
def test_a_text_that_is_no_json_stays_text(schema, text):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}]
    for name, pair in (
        ("glm", f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>"),
        ("deepseek-v4", DSML.replace("TEXT", text)),
    ):
        _, [call] = read_calls(FORMATS[name], pair, tools)
        assert (call.arguments, call.status) == ({"a": text}, "ok")


def test_the_schema_of_an_argument_is_found_in_unions_and_references():
    parameters = {
        "$defs": {"Base": {"properties": {"a": STRING}}},
        "allOf": [{"$ref": "#/$defs/Base"}, {"properties": {"b": INTEGER}}],
        "additionalProperties": STRING,
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    pairs = "".join(f"<arg_key>{key}</arg_key><arg_value>1</arg_value>" for key in "abc")
    _, (call,) = read_calls(FORMATS["glm"], f"<tool_call>f{pairs}</tool_call>", tools)
    assert call.arguments == {"a": "1", "b": 1, "c": "1"}


class Counted(dict):
    """A schema that counts how often it is read, and ends a search that does not."""

    reads = 0

    def get(self, *args):
        Counted.reads += 1
        assert Counted.reads <= 100_000
        return super().get(*args)


@pytest.mark.parametrize("union", ["anyOf", "oneOf", "allOf"])
def test_a_schema_that_refers_to_itself_from_many_branches_is_read_once(union):
    Counted.reads = 0
    chain = {f"c{i}": Counted({union: [{"$ref": f"#/$defs/c{i + 1}"}] * 2}) for i in range(20)}
    itself = [{"$ref": "#/$defs/a"} for _ in range(30)]
    whole = Counted({union: [{"$ref": "#/$defs/c0"}, *itself, STRING]})
    parameters = {"$defs": {"a": whole, **chain}, "$ref": "#/$defs/a", "properties": {"b": {"$ref": "#/$defs/a"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    pairs = "".join(f"<arg_key>{key}</arg_key><arg_value>1</arg_value>" for key in "bc")
    _, (call,) = read_calls(FORMATS["glm"], f"<tool_call>f{pairs}</tool_call>", tools)
    assert call.arguments == {"b": "1", "c": 1}


@pytest.mark.parametrize("keys", [["a"] * 2000, [f"a{i}" for i in range(2000)]], ids=["the same", "different ones"])
def test_thousands_of_arguments_do_not_multiply_the_work_on_their_schema(keys):
    Counted.reads = 0
    union = {"anyOf": [Counted({"type": "integer"}) for _ in range(900)]}
    parameters = {"$defs": {"a": union}, "properties": {key: {"$ref": "#/$defs/a"} for key in keys}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    pairs = "".join(f"<arg_key>{key}</arg_key><arg_value>1</arg_value>" for key in keys)
    _, (call,) = read_calls(FORMATS["glm"], f"<tool_call>f{pairs}</tool_call>", tools)
    assert call.arguments == dict.fromkeys(keys, 1)


PIECES = {
    "qwen3.5": ("<tool_call>\n<function=f>\n<parameter=a>\n", "x</parameter>", "</function>\n", "</tool_call>"),
    "glm": ("<tool_call>f", "<arg_key>a</arg_key><arg_value>", "x</arg_value>", "</tool_call>"),
    "minimax-m2": ('<invoke name="f">', '<parameter name="a">', "x</parameter>", "</invoke>"),
    "qwen3": ("<tool_call>", '{"name": "f", "arguments": {', "}", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]f", "[ARGS]", '{"a": "x', '"}'),
    "lfm2": ("<|tool_call_start|>[f(", "a='x", "')", "]<|tool_call_end|>"),
    "nemotron-nano-v2": ("<TOOLCALL>[", '{"name": "f", "arguments": {', "}}", "]</TOOLCALL>"),
}


@pytest.mark.parametrize("name", PIECES)
def test_the_work_on_endless_tags_is_linear(name, monkeypatch):
    """Counts the texts that are searched and the values that are examined, not the seconds."""
    examined: list[int] = []
    opens = tool_call_reader._opens
    monkeypatch.setattr(
        tool_call_reader, "_opens", lambda form, value: (examined.append(len(value)), opens(form, value))[1]
    )
    pieces = PIECES[name]
    for unit in (*pieces, "".join(pieces), "".join(pieces[:2]), "".join(pieces[1:]), "".join(pieces[::2])):
        examined.clear()
        text = pieces[0] + unit * 3000
        said, calls = read_calls(FORMATS[name], text)
        assert sum(examined) <= len(text)
        assert sum(len(call.raw) for call in calls) <= len(text)
        assert len(said) <= len(text)


def test_no_reading_returns_another_call():
    """Cut a call anywhere and let another follow: no value is shortened, and none has a part of the other."""
    one = "<tool_call>\n<function=f>\n<parameter=a>\nfirst\n</parameter>\n</function>\n</tool_call>"
    two = one.replace("first", "second")
    for cut in range(1, len(one)):
        _, calls = read_calls(FORMATS["qwen3.5"], f"{one[:cut]}\n{two}")
        found = [json.dumps(call.arguments) for call in calls if call.status == "ok"]
        assert all(re.fullmatch(r'\{"a": "(first|second)"\}', arguments) for arguments in found), one[:cut]


MISTRAL = ['[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}', "[TOOL_CALLS]g[ARGS]{}"]


def test_a_call_that_nothing_closes_ends_with_its_arguments():
    both = "".join(MISTRAL)
    said, calls = read_calls(FORMATS["mistral"], f"So. {both}")
    assert [(call.name, call.arguments, call.status) for call in calls] == [
        ("f", {"a": "[TOOL_CALLS]"}, "ok"),
        ("g", {}, "ok"),
    ]
    assert said == "So. "
    said, [call] = read_calls(FORMATS["mistral"], f"{MISTRAL[1]} Done.")
    assert (said, call.status) == ("Done.", "ok")
    _, [call] = read_calls(FORMATS["mistral"], "[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{}")
    assert (call.name, call.id, call.arguments) == ("f", "abcdefgh1", {})
    whole = {len(MISTRAL[0]): 1, len(both): 2}
    for cut in range(1, len(both)):
        _, calls = read_calls(FORMATS["mistral"], both[:cut], whole=False)
        assert sum(call.status == "ok" for call in calls) == max(n for at, n in {0: 0, **whole}.items() if at <= cut)
    for broken in (
        "[TOOL_CALLS]f{}",
        "[TOOL_CALLS]f[ARGS]{}{}",
        '[TOOL_CALLS]f[ARGS]{"a" 1}',
        "[TOOL_CALLS]f[ARGS][1]",
    ):
        assert [call.status for call in read_calls(FORMATS["mistral"], broken)[1]] == ["unclosed_block"], broken
