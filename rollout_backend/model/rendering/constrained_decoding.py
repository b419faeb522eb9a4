"""Constrain replies to a format (a tool call, JSON with a schema) with the engine's constrained decoding. Pure.

Invariants:

- A format that the renderer's grammar cannot express is refused, never approximated.
- A format that may be too expensive for an engine to compile is refused: see `grammar_budget`.
- The constraint starts after the model's reasoning.

The tokens of a constrained reply do not come from the model's own distribution, so its logprobs cannot be trained.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rollout_backend.model.model_call import ApiError, ModelCall
from rollout_backend.model.rendering.grammar_budget import check_form
from rollout_backend.model.rendering.guarded_renderer import RendererBundle

_WORD = "zqxj"
_THINK, _THOUGHT = "<think>", "</think>"


@dataclass(frozen=True)
class _ToolFormat:
    """The format of a model's tool calls: `begin`, which contains the name, the arguments in `style`, then `end`."""

    begin: str
    end: str
    style: str
    trigger: str
    sample: str
    """`{"a": "zqxj"}` in that style."""

    def tag(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        function = tool["function"]
        schema = function.get("parameters") or {"type": "object"}
        content = {"type": "json_schema", "json_schema": schema}
        if self.style != "json":
            content["style"] = self.style
        return {"type": "tag", "begin": self.begin % function["name"], "content": content, "end": self.end}


_FORMATS = (
    _ToolFormat(
        begin='<tool_call>\n{"name": "%s", "arguments": ',
        end="}\n</tool_call>",
        style="json",
        trigger="<tool_call>",
        sample='{"a": "zqxj"}',
    ),
    _ToolFormat(
        begin="<tool_call>\n<function=%s>\n",
        end="\n</function>\n</tool_call>",
        style="qwen_xml",
        trigger="<tool_call>",
        sample="<parameter=a>\nzqxj\n</parameter>",
    ),
)


class Constraints:
    """Builds the decoding constraints of calls for one renderer."""

    def __init__(self, bundle: RendererBundle, allowed: bool) -> None:
        self._bundle = bundle
        self._allowed = allowed

    def params(self, call: ModelCall, prompt_ids: Sequence[int]) -> dict[str, str]:
        """Return the sampling parameters that constrain the reply. The call must be `is_constrained`.

        Raises:
            ApiError: status 400 if constrained decoding is disabled, cannot express the format for this renderer,
                or would be too expensive.
        """
        forced = call.tool_choice == "required"
        where = "tool_choice" if forced else "response_format"
        if not self._allowed:
            advice = "use auto" if forced else "ask for JSON in the prompt"
            raise ApiError(
                400,
                f"{where}: the model is sampled freely here (gateway.constrained_decoding=refuse); {advice}",
                param=where,
            )
        calls = self._calls(call, where) if forced or call.offers_tools else None
        reply: dict[str, Any] = {"type": "json_schema", "json_schema": call.json_schema}
        if forced:
            assert calls is not None
            reply = calls
        elif calls is not None:
            reply = {"type": "or", "elements": [reply, calls]}
        try:
            check_form(reply)
        except ValueError as error:
            raise ApiError(
                400,
                f"{where}: the engine cannot compile this form cheaply: {error}; simplify the schema",
                param=where,
            ) from None
        thinking = self._with_reasoning(reply, prompt_ids)
        if thinking is reply and reply["type"] == "json_schema":
            # Every grammar backend supports a plain JSON schema.
            return {"json_schema": json.dumps(call.json_schema)}
        return {"structural_tag": json.dumps({"type": "structural_tag", "format": thinking})}

    def _calls(self, call: ModelCall, where: str) -> dict[str, Any]:
        tool_format = self._tool_format
        if tool_format is None:
            raise ApiError(
                400,
                f"{where}: the tool call format of the renderer {self._bundle.name} is not supported, so no call can "
                "be forced or combined with JSON; use tool_choice auto without a response format",
                param=where,
            )
        tools = [tool for tool in call.tools or () if call.tool_name in (None, tool["function"]["name"])]
        return {
            "type": "triggered_tags",
            "triggers": [tool_format.trigger],
            "tags": [tool_format.tag(tool) for tool in tools],
            "at_least_one": True,
            "stop_after_first": call.tool_name is not None or not call.parallel_tool_calls,
        }

    def _with_reasoning(self, reply: dict[str, Any], prompt_ids: Sequence[int]) -> dict[str, Any]:
        def after(begin: str) -> dict[str, Any]:
            thought = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": _THOUGHT}
            return {"type": "sequence", "elements": [thought, {"type": "regex", "pattern": "\\n*"}, reply]}

        if _WORD in (self._parse(_WORD, prompt_ids).reasoning_content or ""):
            # The prompt has already opened the reasoning.
            return after("")
        if self._may_reason:
            return {"type": "or", "elements": [after(_THINK), reply]}
        return reply

    @cached_property
    def _tool_format(self) -> _ToolFormat | None:
        return next((known for known in _FORMATS if self._reads(known)), None)

    @cached_property
    def _may_reason(self) -> bool:
        return _WORD in (self._parse(f"{_THINK}{_WORD}{_THOUGHT}").reasoning_content or "")

    def _reads(self, tool_format: _ToolFormat) -> bool:
        parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        parsed = self._parse(tool_format.begin % "f" + tool_format.sample + tool_format.end, tools=tools)
        return [(str(call.status), call.name, call.arguments) for call in parsed.tool_calls] == [
            ("ok", "f", {"a": _WORD})
        ]

    def _parse(self, text: str, prompt_ids: Sequence[int] = (), tools: Any = None) -> Any:
        ids = self._bundle.tokenizer.encode(text, add_special_tokens=False)
        return self._bundle.renderer.parse_response(list(ids), tools=tools, prompt_ids=list(prompt_ids))
