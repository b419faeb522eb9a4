import dataclasses
import json

import pytest

from rollout_backend.model.model_call import ApiError, ModelCall
from rollout_backend.model.rendering.constrained_decoding import Constraints

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "required": ["a"]}}}
SUB = {"type": "function", "function": {"name": "sub"}}
SCHEMA = {"type": "array"}
COSTLY = {"type": "string", "pattern": "(" * 250_000 + "a" + ")" * 250_000}
COSTLY_TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {**COSTLY, "pattern": "(" * 99}}}},
}


def tag(name: str, schema: dict) -> dict:
    return {
        "type": "tag",
        "begin": f'<tool_call>\n{{"name": "{name}", "arguments": ',
        "content": {"type": "json_schema", "json_schema": schema},
        "end": "}\n</tool_call>",
    }


def calls(*tags: dict, first: bool = False) -> dict:
    return {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": list(tags),
        "at_least_one": True,
        "stop_after_first": first,
    }


ADD_TAG, SUB_TAG = tag("add", {"type": "object", "required": ["a"]}), tag("sub", {"type": "object"})
JSON = {"type": "json_schema", "json_schema": SCHEMA}


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"tools": [ADD, SUB], "tool_choice": "required"}, calls(ADD_TAG, SUB_TAG)),
        (
            {"tools": [ADD, SUB], "tool_choice": "required", "parallel_tool_calls": False},
            calls(ADD_TAG, SUB_TAG, first=True),
        ),
        ({"tools": [ADD, SUB], "tool_choice": "required", "tool_name": "sub"}, calls(SUB_TAG, first=True)),
        ({"tools": [ADD], "tool_choice": "required", "json_schema": SCHEMA}, calls(ADD_TAG)),
        ({"tools": [ADD], "json_schema": SCHEMA}, {"type": "or", "elements": [JSON, calls(ADD_TAG)]}),
    ],
)
def test_forced_tool_calls_are_a_structural_tag(bundle, asked, wanted):
    params = Constraints(bundle, allowed=True).params(ModelCall("m", [], **asked), [])
    assert json.loads(params.pop("structural_tag")) == {"type": "structural_tag", "format": wanted}
    assert params == {}


@pytest.mark.parametrize("asked", [{}, {"tools": [ADD]}, {"tools": [ADD], "tool_choice": "none"}])
def test_a_call_that_asks_for_no_form_is_sampled_freely(asked):
    assert not ModelCall("m", [], **asked).is_constrained


@pytest.mark.parametrize("asked", [{}, {"tools": [ADD], "tool_choice": "none"}])
def test_json_alone_is_a_schema(bundle, asked):
    call = ModelCall("m", [], json_schema=SCHEMA, **asked)
    assert Constraints(bundle, True).params(call, []) == {"json_schema": json.dumps(SCHEMA)}


def test_reasoning_may_precede_the_constrained_part(bundle):
    class Reasons:
        """Parses <think>...</think>; a prompt that ends in token 7 has opened it."""

        def parse_response(self, ids, tools=None, prompt_ids=None):
            text = bundle.decode(ids)
            opened = bool(prompt_ids) and prompt_ids[-1] == 7
            parsed = bundle.renderer.parse_response(ids, tools=tools, prompt_ids=prompt_ids)
            thought = text if opened else text.partition("<think>")[2].partition("</think>")[0]
            return dataclasses.replace(parsed, reasoning_content=thought or None)

    constraints = Constraints(dataclasses.replace(bundle, renderer=Reasons()), allowed=True)
    call = ModelCall("m", [], json_schema=SCHEMA)

    def after(begin: str) -> dict:
        thought = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": "</think>"}
        return {"type": "sequence", "elements": [thought, {"type": "regex", "pattern": "\\n*"}, JSON]}

    forms = [json.loads(constraints.params(call, prompt)["structural_tag"])["format"] for prompt in ([3], [7])]
    assert forms == [{"type": "or", "elements": [after("<think>"), JSON]}, after("")]


@pytest.mark.parametrize(
    "asked",
    [
        {"json_schema": COSTLY},
        {"json_schema": {"type": "array", "items": COSTLY}},
        {"tools": [ADD], "json_schema": COSTLY},
        {"tools": [ADD, COSTLY_TOOL], "tool_choice": "required"},
        {"tools": [COSTLY_TOOL], "json_schema": SCHEMA},
    ],
)
def test_no_engine_gets_a_form_that_is_costly_to_compile(bundle, asked):
    where = asked.get("tool_choice", "response_format").replace("required", "tool_choice")
    with pytest.raises(ApiError, match=f"{where}: the engine cannot compile this form cheaply: a pattern") as refused:
        Constraints(bundle, True).params(ModelCall("m", [], **asked), [])
    assert (refused.value.status, refused.value.param) == (400, where)


def test_a_constraint_that_is_switched_off_or_unknown_is_refused(bundle):
    call = ModelCall("m", [], tools=[ADD], tool_choice="required")
    with pytest.raises(ApiError, match=r"tool_choice.*sampled freely"):
        Constraints(bundle, allowed=False).params(call, [])

    class Reads:
        def parse_response(self, ids, tools=None, prompt_ids=None):
            return bundle.renderer.parse_response([], tools=tools, prompt_ids=prompt_ids)

    unknown = Constraints(dataclasses.replace(bundle, renderer=Reads()), allowed=True)
    with pytest.raises(ApiError, match="tool_choice: the tool call format of the renderer chatml"):
        unknown.params(call, [])
    with pytest.raises(ApiError, match="response_format: the tool call format"):
        unknown.params(ModelCall("m", [], tools=[ADD], json_schema=SCHEMA), [])
    assert unknown.params(ModelCall("m", [], json_schema=SCHEMA), []) == {"json_schema": json.dumps(SCHEMA)}
