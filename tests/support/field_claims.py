"""Claims about how the gateway handles each field that the SDKs document. `test_fields.py` checks them.

A claim has a value to try. Fields are grouped by type, and `Type.at` is the path of the type in the base request.
The gateway must refuse an unlisted type wherever the SDK allows it.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Claim:
    value: Any
    also: dict[str, Any] = field(default_factory=dict)  # other fields, sent both with and without this one
    reply: str = "5"


class Honoured(Claim):
    """Changes what the engine is asked, or the reply. What it may hold is looked at as well."""


class Harmless(Claim):
    """Changes neither the prompt nor how it is sampled."""


class Ignored(Harmless):
    """Also counted by its name."""


class Trainers(Claim):
    """The trainer decides: counted as overridden, and the engine is asked the same."""


class Refused(Claim):
    """Answered 400 with a message that names it."""


@dataclass(frozen=True)
class Type:
    at: tuple[str | int, ...]
    fields: dict[str, Claim]
    given: Any = None  # put there first, or at `given_at`
    given_at: tuple[str | int, ...] = ()


def each(claim: type[Claim], value: Any, *names: str) -> dict[str, Claim]:
    return dict.fromkeys(names, claim(value))


ASK = "What is 2 + 3?"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TAG = Refused("nonsense")
CACHE = Ignored({"type": "ephemeral"})
BREAKPOINT = Ignored({"mode": "explicit"})
CACHING = {
    "prompt_cache_key": Ignored("k"),
    "prompt_cache_options": Ignored({"mode": "implicit"}),
    "prompt_cache_retention": Ignored("24h"),
}
ACCOUNT = {
    **each(Ignored, "x", "safety_identifier", "user"),
    "service_tier": Ignored("flex"),
    "store": Ignored(True),
}

STREAM_OPTIONS = Type(
    ("stream_options",),
    {"include_obfuscation": Harmless(True), "include_usage": Harmless(True)},
    given={"include_usage": False},
)
_FUNCTION = {"name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": True}
_CALLED = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CHAT = {
    "model": "scripted",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": [{"type": "text", "text": ASK}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "I add."}, {"type": "refusal", "refusal": "No."}],
            "reasoning_content": "hm",
            "tool_calls": [_CALLED],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "5"}]},
    ],
    "tools": [{"type": "function", "function": _FUNCTION}],
}
_MESSAGE = {"content": Honoured("else"), "role": TAG}
_NAMED = {**_MESSAGE, "name": Ignored("ann")}  # this model's template shows none
CHAT_TYPES = {
    "CompletionCreateParamsStreaming": Type(
        (),
        {
            **CACHING,
            **ACCOUNT,
            "metadata": Ignored({"a": "b"}),
            **each(Trainers, 0.5, "temperature", "top_p", "frequency_penalty", "presence_penalty"),
            **each(Trainers, "low", "reasoning_effort", "verbosity"),
            **each(Honoured, 1, "max_tokens", "max_completion_tokens"),
            "audio": Refused({"format": "wav", "voice": "alloy"}),
            "function_call": Refused("auto"),
            "functions": Refused([{"name": "f"}]),
            "logit_bias": Trainers({"5": 1}),
            "logprobs": Honoured(True),
            "messages": Honoured([{"role": "user", "content": "else"}]),
            "modalities": Refused(["audio"]),
            "model": Refused("other"),
            "moderation": Refused({"model": "m"}),
            "n": Honoured(2),
            "parallel_tool_calls": Honoured(False, reply=CALL + CALL),
            "prediction": Ignored({"type": "content", "content": "5"}),
            "response_format": Honoured({"type": "json_object"}),
            "seed": Trainers(7),
            "stop": Honoured("5"),
            "stream": Honoured(True),
            "stream_options": Honoured({"include_usage": True}, also={"stream": True}),
            "tool_choice": Honoured("required", reply=CALL),
            "tools": Honoured([{"type": "function", "function": {"name": "sub"}}]),
            "top_logprobs": Refused(2),
            "web_search_options": Refused({}),
        },
    ),
    "ChatCompletionSystemMessageParam": Type(("messages", 0), _NAMED),
    "ChatCompletionDeveloperMessageParam": Type(("messages", 1), _NAMED),
    "ChatCompletionUserMessageParam": Type(("messages", 2), _NAMED),
    "ChatCompletionAssistantMessageParam": Type(
        ("messages", 3),
        {
            **_NAMED,
            "audio": Refused({"id": "a"}),
            "function_call": Refused({"name": "f", "arguments": "{}"}),
            "refusal": Honoured("No.", also={"content": None}),
            "tool_calls": Honoured([]),
        },
    ),
    "ChatCompletionToolMessageParam": Type(("messages", 4), {**_MESSAGE, "tool_call_id": Harmless("c2")}),
    "ChatCompletionContentPartTextParam": Type(
        ("messages", 2, "content", 0),
        {"text": Honoured("else"), "type": TAG, "prompt_cache_breakpoint": BREAKPOINT},
    ),
    "ChatCompletionContentPartRefusalParam": Type(
        ("messages", 3, "content", 1), {"refusal": Honoured("else"), "type": TAG}
    ),
    "ChatCompletionMessageFunctionToolCallParam": Type(
        ("messages", 3, "tool_calls", 0),
        {"id": Harmless("c2"), "function": Honoured({"name": "sub", "arguments": "{}"}), "type": TAG},
    ),
    "Function": Type(
        ("messages", 3, "tool_calls", 0, "function"), {"name": Honoured("sub"), "arguments": Honoured("{}")}
    ),
    "ChatCompletionFunctionToolParam": Type(("tools", 0), {"function": Honoured({"name": "sub"}), "type": TAG}),
    "FunctionDefinition": Type(
        ("tools", 0, "function"),
        {
            **each(Honoured, "else", "name", "description"),
            "parameters": Honoured({"type": "object"}),
            "strict": Honoured(False),
        },
    ),
    "ChatCompletionNamedToolChoiceParam": Type(
        ("tool_choice",),
        {"function": Refused({"name": "nobody"}), "type": TAG},
        given={"type": "function", "function": {"name": "add"}},
    ),
    "ChatCompletionStreamOptionsParam": STREAM_OPTIONS,
    "ResponseFormatText": Type(("response_format",), {"type": TAG}, given={"type": "text"}),
    "ResponseFormatJSONObject": Type(("response_format",), {"type": TAG}, given={"type": "json_object"}),
    "ResponseFormatJSONSchema": Type(
        ("response_format",),
        {"type": TAG, "json_schema": Honoured({"name": "n", "schema": {"type": "object"}})},
        given={"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    ),
    "JSONSchema": Type(
        ("response_format", "json_schema"),
        {
            **each(Harmless, "else", "name", "description"),
            "schema": Honoured({"type": "object"}),
            "strict": Harmless(True),
        },
        given={"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        given_at=("response_format",),
    ),
}

COMPLETIONS = {"model": "scripted", "prompt": ASK}
COMPLETIONS_TYPES = {
    "CompletionCreateParamsStreaming": Type(
        (),
        {
            **each(Trainers, 0.5, "temperature", "top_p", "frequency_penalty", "presence_penalty"),
            "best_of": Refused(2),
            "echo": Refused(True),
            "logit_bias": Trainers({"5": 1}),
            "logprobs": Honoured(0),
            "max_tokens": Honoured(1),
            "model": Refused("other"),
            "n": Honoured(2),
            "prompt": Honoured("else"),
            "seed": Trainers(7),
            "stop": Honoured("5"),
            "stream": Honoured(True),
            "stream_options": Honoured({"include_usage": True}, also={"stream": True}),
            "suffix": Refused("end"),
            "user": Ignored("x"),
        },
    ),
    "ChatCompletionStreamOptionsParam": STREAM_OPTIONS,
}

RESPONSES = {
    "model": "scripted",
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": ASK}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I add."}, {"type": "refusal", "refusal": "No."}],
        },
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "5"}]},
    ],
    "tools": [{"type": "function", **_FUNCTION}],
}
_CUSTOM_CALL = {"type": "custom_tool_call", "call_id": "c1", "name": "add", "input": "a"}
_CUSTOM_TOOL = {"type": "custom", "name": "patch", "description": "Patches."}
_NAMESPACE = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [{"type": "function", **_FUNCTION}],
}
_ITEM = {**each(Harmless, "x", "id", "call_id"), "status": Harmless("completed"), "type": TAG}
_NO_CALLER = {"caller": Refused({"type": "program", "caller_id": "p"})}
_NAMED_TOOL = {**each(Honoured, "else", "name", "description"), "type": TAG}
_ASYNC = {"async": Refused(True)}
_CUSTOM = {**_NAMED_TOOL, **_ASYNC, "allowed_callers": Refused(["programmatic"]), "defer_loading": Ignored(True)}
_FUNCTION_FIELDS = {
    **_CUSTOM,
    "parameters": Honoured({"type": "object"}),
    "strict": Honoured(False),
    "output_schema": Refused({"type": "object"}),
}
_GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
_INPUT_TEXT = {"text": Honoured("else"), "type": TAG, "prompt_cache_breakpoint": BREAKPOINT}
_INPUT_MESSAGE = {**_MESSAGE, "type": TAG, "phase": Harmless("commentary"), "status": Harmless("completed")}
RESPONSES_TYPES = {
    "ResponseCreateParamsStreaming": Type(
        (),
        {
            **CACHING,
            **ACCOUNT,
            "metadata": Harmless({"a": "b"}),  # repeated in the answer
            **each(Trainers, 0.5, "temperature", "top_p"),
            "access_programs": Ignored({"a": "b"}),
            "background": Refused(True),
            "background_options": Ignored({"completion_window": "2h"}),
            "context_management": Ignored([{"type": "compaction"}]),
            "conversation": Refused("conv_1"),
            "image": Refused({"context_compression": "enabled"}),
            "include": Harmless(["reasoning.encrypted_content"]),
            "input": Honoured("else"),
            "instructions": Honoured("else"),
            "max_output_tokens": Honoured(1),
            "max_tool_calls": Ignored(1),  # of tools that OpenAI runs itself
            "model": Refused("other"),
            "moderation": Refused({"model": "m"}),
            "parallel_tool_calls": Honoured(False, reply=CALL + CALL),
            "previous_response_id": Refused("resp_1"),
            "prompt": Refused({"id": "p"}),
            "reasoning": Trainers({"effort": "low"}),
            "stream": Honoured(True),
            "stream_options": Ignored({"include_obfuscation": True}),
            "text": Honoured({"format": {"type": "json_object"}}),
            "tool_choice": Honoured("required", reply=CALL),
            "tools": Honoured([]),
            "top_logprobs": Refused(2),
            "truncation": Refused("auto"),
        },
    ),
    "EasyInputMessageParam": Type(("input", 0), _INPUT_MESSAGE),
    "Message": Type(("input", 1), _INPUT_MESSAGE),
    "ResponseReasoningItemParam": Type(  # a template may show the reasoning; this one does not
        ("input", 2),
        {**_ITEM, **each(Harmless, [], "content", "summary"), "encrypted_content": Harmless("x")},
    ),
    "ResponseOutputMessageParam": Type(("input", 3), {**_INPUT_MESSAGE, "id": Harmless("x")}),
    "ResponseFunctionToolCallParam": Type(
        ("input", 4),
        {
            **_ITEM,
            **_NO_CALLER,
            **_ASYNC,
            "arguments": Honoured("{}"),
            **each(Honoured, "sub", "name", "namespace"),
        },
    ),
    "ResponseCustomToolCallParam": Type(
        ("input", 4),
        {**_ITEM, **_NO_CALLER, **_ASYNC, **each(Honoured, "sub", "input", "name", "namespace")},
        given=_CUSTOM_CALL,
    ),
    "FunctionCallOutput": Type(
        ("input", 5), {**_ITEM, **_NO_CALLER, **each(Harmless, "x", "name", "namespace"), "output": Honoured("else")}
    ),
    "ResponseCustomToolCallOutputParam": Type(
        ("input", 5),
        {**_ITEM, **_NO_CALLER, "output": Honoured("else")},
        given={"type": "custom_tool_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "5"}]},
    ),
    "ResponseInputTextParam": Type(("input", 0, "content", 0), _INPUT_TEXT),
    "ResponseInputTextContentParam": Type(("input", 5, "output", 0), _INPUT_TEXT),
    "ResponseOutputTextParam": Type(
        ("input", 3, "content", 0),
        {"text": Honoured("else"), "type": TAG, **each(Harmless, [], "annotations", "logprobs")},
    ),
    "ResponseOutputRefusalParam": Type(("input", 3, "content", 1), {"refusal": Honoured("else"), "type": TAG}),
    "FunctionToolParam": Type(("tools", 0), _FUNCTION_FIELDS),
    "CustomToolParam": Type(("tools", 0), {**_CUSTOM, "format": Honoured(_GRAMMAR)}, given=_CUSTOM_TOOL),
    "Text": Type(
        ("tools", 0, "format"),
        {"type": TAG},
        given={**_CUSTOM_TOOL, "format": {"type": "text"}},
        given_at=("tools", 0),
    ),
    "Grammar": Type(
        ("tools", 0, "format"),
        {"type": TAG, **each(Honoured, "else", "syntax", "definition")},
        given={**_CUSTOM_TOOL, "format": _GRAMMAR},
        given_at=("tools", 0),
    ),
    "NamespaceToolParam": Type(("tools", 0), {**_NAMED_TOOL, "tools": Honoured([_CUSTOM_TOOL])}, given=_NAMESPACE),
    "ToolFunction": Type(("tools", 0, "tools", 0), _FUNCTION_FIELDS, given=_NAMESPACE, given_at=("tools", 0)),
    "ToolChoiceFunctionParam": Type(
        ("tool_choice",), {"name": Refused("nobody"), "type": TAG}, given={"type": "function", "name": "add"}
    ),
    "ResponseTextConfigParam": Type(
        ("text",), {"format": Honoured({"type": "json_object"}), "verbosity": Trainers("low")}, given={}
    ),
    "ResponseFormatText": Type(("text", "format"), {"type": TAG}, given={"type": "text"}),
    "ResponseFormatJSONObject": Type(("text", "format"), {"type": TAG}, given={"type": "json_object"}),
    "ResponseFormatTextJSONSchemaConfigParam": Type(
        ("text", "format"),
        {
            **each(Harmless, "else", "name", "description"),
            "type": TAG,
            "schema": Honoured({"type": "object"}),
            "strict": Harmless(True),
        },
        given={"type": "json_schema", "name": "n", "schema": SCHEMA},
    ),
}

MESSAGES = {
    "model": "scripted",
    "max_tokens": 500,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": ASK}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I add."},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                {"type": "tool_use", "id": "c2", "name": "add", "input": {"a": 2}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "5"}]},
                {"type": "tool_result", "tool_use_id": "c2"},
            ],
        },
    ],
    "tools": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}],
}
_TOOL_CHOICE = {"disable_parallel_tool_use": Honoured(True, reply=CALL + CALL), "type": TAG}
_FORMAT = {"type": TAG, "schema": Honoured({"type": "object"})}
MESSAGES_TYPES = {  # Anthropic's beta types are named as these are, after "Beta"
    "MessageCreateParamsStreaming": Type(
        (),
        {
            **each(Trainers, 0.5, "temperature", "top_p"),
            **each(Ignored, "x", "inference_geo", "user_profile_id", "speed", "workspace_id"),
            "betas": Ignored(["b"]),
            "billing_policy": Ignored({"type": "billing_policy", "bill_to": "self"}),
            "cache_control": CACHE,
            "compaction": Refused({"type": "enabled"}),
            "container": Refused("c"),
            "context_management": Ignored({"edits": [{"type": "clear_tool_uses_20250919"}]}),
            "diagnostics": Ignored({"previous_message_id": "m"}),
            "fallback_credit_token": Ignored({"mode": "m", "token": "t"}),
            "fallbacks": Refused([{"model": "other"}]),
            "max_tokens": Honoured(1),
            "mcp_servers": Refused([{"type": "url", "url": "u", "name": "n"}]),
            "messages": Honoured([{"role": "user", "content": "else"}]),
            "metadata": Ignored({"user_id": "u"}),
            "model": Refused("other"),
            "output_config": Honoured({"format": {"type": "json_schema", "schema": SCHEMA}}),
            "output_format": Honoured({"type": "json_schema", "schema": SCHEMA}),
            "service_tier": Ignored("auto"),
            "stop_sequences": Honoured(["5"]),
            "stream": Honoured(True),
            "system": Honoured("else"),
            "thread": Refused({"type": "create"}),
            "thinking": Trainers({"type": "enabled", "budget_tokens": 1024}),
            "tool_choice": Honoured({"type": "any"}, reply=CALL),
            "tools": Honoured([]),
            "top_k": Trainers(5),
        },
    ),
    "MessageParam": Type(
        ("messages", 0),
        {**_MESSAGE, "clear_at": Refused("next_user_message"), "output_config": Trainers({"effort": "low"})},
    ),
    "TextBlockParam": Type(
        ("messages", 0, "content", 0),
        {"cache_control": CACHE, "citations": Harmless([]), "text": Honoured("else"), "type": TAG},
    ),
    "ThinkingBlockParam": Type(  # a template may show the thinking; this one does not
        ("messages", 1, "content", 0), {**each(Harmless, "x", "thinking", "signature"), "type": TAG}
    ),
    "RedactedThinkingBlockParam": Type(("messages", 1, "content", 1), {"data": Harmless("y"), "type": TAG}),
    "ToolUseBlockParam": Type(
        ("messages", 1, "content", 3),
        {
            "cache_control": CACHE,
            "caller": Refused({"type": "code_execution_20250825", "tool_id": "t"}),
            "id": Harmless("c3"),
            "input": Honoured({"a": 7}),
            "name": Honoured("sub"),
            "toolset_name": Refused("t"),
            "type": TAG,
        },
    ),
    "ToolResultBlockParam": Type(
        ("messages", 2, "content", 1),
        {
            "cache_control": CACHE,
            "content": Honoured("else"),
            "is_error": Honoured(True),  # where the content does not say so
            "tool_use_id": Harmless("c3"),
            "toolset_name": Refused("t"),
            "type": TAG,
        },
    ),
    "ToolParam": Type(
        ("tools", 0),
        {
            **each(Honoured, "else", "name", "description"),
            "allowed_callers": Refused(["code_execution_20250825"]),
            "cache_control": CACHE,
            "defer_loading": Ignored(True),
            "eager_input_streaming": Ignored(True),
            "input_examples": Refused([{"a": 1}]),
            "input_schema": Honoured({"type": "object"}),
            "strict": Honoured(True),
            "type": TAG,
        },
    ),
    "InputSchemaTyped": Type(
        ("tools", 0, "input_schema"),
        {"properties": Honoured({}), "required": Honoured(["a"]), "type": Honoured("array")},
    ),
    "ToolChoiceAutoParam": Type(("tool_choice",), _TOOL_CHOICE, given={"type": "auto"}),
    "ToolChoiceAnyParam": Type(
        ("tool_choice",),
        {**_TOOL_CHOICE, "disable_parallel_tool_use": Honoured(True, reply=CALL)},
        given={"type": "any"},
    ),
    "ToolChoiceToolParam": Type(
        ("tool_choice",),
        {"disable_parallel_tool_use": Harmless(True, reply=CALL), "name": Refused("nobody"), "type": TAG},
        given={"type": "tool", "name": "add"},
    ),
    "ToolChoiceNoneParam": Type(("tool_choice",), {"type": TAG}, given={"type": "none"}),
    "OutputConfigParam": Type(
        ("output_config",),
        {
            "effort": Trainers("low"),
            "format": Honoured({"type": "json_schema", "schema": SCHEMA}),
            "task_budget": Refused({"type": "tokens", "total": 1000}),
        },
        given={},
    ),
    "JSONOutputFormatParam": Type(
        ("output_config", "format"), _FORMAT, given={"type": "json_schema", "schema": SCHEMA}
    ),
}
