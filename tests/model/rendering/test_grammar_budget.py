"""No form of a reply that an agent asks for costs an engine more than some seconds, and common ones are accepted."""

import pytest

from rollout_backend.model.rendering.grammar_budget import check_form

STRING = {"type": "string"}


def pattern(text: str) -> dict:
    return {"type": "string", "pattern": text}


def nested(levels: int, kind: str) -> dict:
    schema: dict = STRING
    for _ in range(levels):
        schema = {"anyOf": [schema]} if kind == "anyOf" else {"type": "object", "properties": {"a": schema}}
    return schema


def properties(n: int, schema: dict = STRING) -> dict:
    return {"type": "object", "properties": {f"p{i}": schema for i in range(n)}}


COSTLY = {
    "parentheses": pattern("^" + "(" * 250_000 + "a" + ")" * 250_000 + "$"),
    "a few parentheses": pattern("(" * 17 + "a" + ")" * 17),
    "open parentheses": pattern("(" * 17),
    "groups without names": pattern("(?:" * 17 + "a" + ")" * 17),
    "product of repetitions": pattern("^(.{0,300}x){0,300}$"),
    "a small product": pattern("^(.{0,30}x){0,30}$"),
    "a deep product": pattern("(" * 10 + "a" + "){0,2}" * 10),
    "an exact product": pattern("((a{9}){9}){9}"),
    "an open product": pattern("((.{20,}){20,}){20,}"),
    "one repetition": pattern("^a{999999999}$"),
    "more digits than an integer has": pattern("^a{99999999999999999999999}$"),
    "options": pattern("^" + ".?" * 50 + "$"),
    "empty alternatives": pattern("^" + "(|.)" * 50 + "$"),
    "alternatives": pattern("^" + "(.|..)" * 50 + "$"),
    "two ranges": pattern("^.{0,64}.{0,64}$"),
    "many ranges": pattern("^" + ".{0,5}" * 7 + "$"),
    "a repeated range": pattern("^(.{1,5}){16}$"),
    "a range after a class with a bracket": pattern(r"^[]\]{9}]{0,64}[^]x]{0,64}$"),
    "a range in a lookahead": pattern("^(?=(.{0,300}x){0,300})a$"),
    "an open group after a product": pattern("(.{0,300}x){0,300}|a("),
    "a bracket after a product": pattern("(.{0,300}x){0,300})"),
    "a long pattern": pattern("a" * 10_000),
    "many patterns": properties(100, pattern("^[a-z]{1,64}$")),
    "names as patterns": {"type": "object", "patternProperties": {"^(.{0,30}x){0,30}$": STRING}},
    "names of all properties": {"type": "object", "propertyNames": pattern("^(.{0,30}x){0,30}$")},
    "a definition": {"$ref": "#/$defs/a", "$defs": {"a": pattern("^(.{0,30}x){0,30}$")}},
    "depth": nested(33, "properties"),
    "depth of unions": nested(300, "anyOf"),
    "properties": properties(1000),
    "properties of many objects": properties(20, properties(200)),
    "a least number of properties": {**properties(150), "minProperties": 1},
    "a largest number of properties": {**properties(150), "maxProperties": 75},
    "addresses": properties(100, {"type": "string", "format": "email"}),
    "templates of addresses": properties(30, {"type": "string", "format": "uri-template"}),
    "lengths": {"type": "array", "prefixItems": [{"type": "string", "maxLength": n} for n in range(500, 530)]},
    "a long constant": {"const": "x" * 100_000},
    "a long value": {"enum": ["x" * 100_000]},
    "a long name": {"type": "object", "properties": {"x" * 100_000: STRING}},
    "bytes": {"enum": ["x" * 5_000] * 60},
}
COMMON = [
    {},
    {"type": "object"},
    pattern("^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"),
    pattern("^[a-zA-Z0-9_-]{1,64}$"),
    pattern("^.{1,255}$"),
    pattern(r"^(\+\d{1,3})?\s?\(?\d{3}\)?[\s.-]?\d{3}[\s.-]?\d{4}$"),
    pattern(r"^-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?$"),
    pattern(r"^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z]{2,}$"),
    pattern(r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d{1,6})?(Z|[+-]\d{2}:\d{2})$"),
    pattern("^(red|green|blue|orange)$"),
    pattern("^((25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)\\.){3}(25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)$"),
    pattern("not ) balanced ( {x} [a"),
    properties(200),
    {**properties(60), "minProperties": 1, "maxProperties": 20},
    properties(60, {"type": "string", "format": "uri"}),
    properties(400, {"type": "string", "format": "date-time"}),
    {"type": "object", "additionalProperties": STRING, "minProperties": 10**9},
    nested(20, "properties"),
    {"enum": [f"value {i}" for i in range(5_000)]},
    {"type": "array", "items": STRING, "minItems": 10**9, "maxItems": 10**12},
    properties(10, {"type": "string", "minLength": 1, "maxLength": 10_000}),
    properties(3, {"type": "string", "description": "pattern: (((((((((((((((((((((((((((", "default": "a"}),
    {"type": "object", "properties": {"pattern": STRING, "properties": STRING, "maxLength": {"type": "integer"}}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}}}},
]


@pytest.mark.parametrize("schema", COSTLY.values(), ids=COSTLY)
def test_a_form_that_is_costly_to_compile_is_refused(schema):
    with pytest.raises(ValueError, match=r"^(it|its|a) "):
        check_form({"type": "json_schema", "json_schema": schema})


@pytest.mark.parametrize("schema", COMMON, ids=repr)
def test_a_common_form_is_accepted(schema):
    check_form({"type": "json_schema", "json_schema": schema})
