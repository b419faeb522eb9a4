import json

import pytest
from renderers import ToolCallParseStatus
from transformers import AutoTokenizer

from builders import assistant, function_call, function_tool, system, tool_result, user
from rollout_backend.model.rendering.chatml import ChatMLRenderer
from rollout_backend.workbench.local.scripted import ToolCall

TOOLS = [function_tool("add", "Adds <b>two</b> numbers, naïvely.", a={"type": "number"})]
CALL = function_call("add", '{"a": 1}', "call_1")
CONVERSATIONS = [
    [user("What is 3 + 4?")],
    [user("  leading and trailing\n\n")],
    [system(""), user("")],
    [
        user("Grüße 日本 🙂\ttab"),
        assistant(" 7\n"),
        user("\nand 5?"),
    ],
]


@pytest.fixture(scope="module")
def renderer(bundle) -> ChatMLRenderer:
    return bundle.renderer


def ids_of(bundle, text: str) -> list[int]:
    return bundle.tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture(scope="module")
def own(smollm2):
    """The tokenizer of a model whose template adds a system message."""
    return AutoTokenizer.from_pretrained(smollm2, local_files_only=True)


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
def test_a_conversation_renders_as_with_the_models_template(own, messages, prompt):
    wanted = own.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=True, return_dict=False)
    assert ChatMLRenderer(own).render_ids(messages, add_generation_prompt=prompt) == wanted


def test_the_default_system_message_is_kept_with_tools(own):
    text = own.decode(ChatMLRenderer(own).render_ids(CONVERSATIONS[0], tools=TOOLS))
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.index("# Tools") < text.index(json.dumps(TOOLS[0], ensure_ascii=False)) < text.index("<|im_end|>")


def test_a_tool_conversation_renders_in_the_hermes_form(bundle, renderer):
    messages = [
        system("S"),
        user("U"),
        assistant("let me see", tool_calls=[CALL]),
        tool_result("call_1", "one"),
        tool_result("call_1", "two"),
    ]
    text = bundle.decode(renderer.render_ids(messages, tools=TOOLS, add_generation_prompt=True))
    assert text.startswith("<|im_start|>system\nS\n\n# Tools\n\n")
    assert text.endswith(
        "<|im_start|>assistant\nlet me see\n<tool_call>\n"
        '{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("<tool_call>{'name': 'add'}</tool_call>", ToolCallParseStatus.INVALID_JSON),
        ('<tool_call>{"name": "add", "argu', ToolCallParseStatus.UNCLOSED_BLOCK),
        ('<tool_call>{"name": 3}</tool_call>', ToolCallParseStatus.MISSING_NAME),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', ToolCallParseStatus.MALFORMED_STRUCTURE),
    ],
)
def test_a_malformed_call_stays_in_the_content(bundle, renderer, body, status):
    good = str(ToolCall("add", {"a": 2}))
    parsed = renderer.parse_response(ids_of(bundle, f"{good} then {body}"))
    assert parsed.content == f"then {body}"
    assert [call.status for call in parsed.tool_calls] == [ToolCallParseStatus.OK, status]


@pytest.mark.parametrize("arguments", ["{}", '"{}"'])
@pytest.mark.parametrize("end", ["\n</tool_call>", ""])
def test_arguments_may_be_text_and_the_closing_tag_may_be_missing(bundle, renderer, arguments, end):
    said = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}{end}<|im_end|>'
    parsed = renderer.parse_response(ids_of(bundle, said))
    called = [(call.name, call.arguments, call.status) for call in parsed.tool_calls]
    assert (called, parsed.content) == ([("add", {}, ToolCallParseStatus.OK)], "")


def test_a_continuation_is_what_a_new_rendering_has_after_the_reply(bundle, renderer):
    messages = [user("U")]
    prompt = renderer.render_ids(messages, tools=TOOLS, add_generation_prompt=True)
    reply = f"ok\n{ToolCall('add', {'a': 1})}"
    completion = ids_of(bundle, f"{reply}<|im_end|>")
    new = [tool_result("call_1", "1"), user("and?")]
    added = renderer.continuation(prompt, completion, new, tools=TOOLS)
    full = [*messages, assistant("ok", tool_calls=[CALL]), *new]
    assert prompt + completion + added == renderer.render_ids(full, tools=TOOLS, add_generation_prompt=True)


NEXT = "\n<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("said", "added"),
    [
        *(("7<|im_end|>", NEXT), ("a<|im_end|><|im_end|>", NEXT)),
        *(("cut off in the mid", f"<|im_end|>{NEXT}"), ("", f"<|im_end|>{NEXT}")),
        ("7<|im_end|>8", None),
    ],
)
def test_a_continuation_closes_a_turn_that_was_cut_and_drops_no_token(bundle, renderer, said, added):
    prompt = renderer.render_ids([user("U")], add_generation_prompt=True)
    found = renderer.continuation(prompt, ids_of(bundle, said), [user("next")])
    assert (None if found is None else bundle.decode(found)) == added


@pytest.mark.parametrize("new", [[], [assistant("B")]])
def test_there_is_no_continuation_without_new_messages_or_by_another_reply(bundle, renderer, new):
    prompt = renderer.render_ids([user("U")], add_generation_prompt=True)
    assert renderer.continuation(prompt, ids_of(bundle, "A<|im_end|>"), new) is None
