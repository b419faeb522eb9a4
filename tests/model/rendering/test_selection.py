"""`auto` chooses by what the model's chat template does, in bounded time, and says why."""

from __future__ import annotations

import itertools
import json
import logging
from typing import Any

import pytest

from builders import assistant, function_tool, run_config, tool_result, user
from gateway_fixtures import make_gateway
from rollout_backend.config import ModelConfig
from rollout_backend.errors import ConfigError
from rollout_backend.model.rendering.renderer import load_renderer
from rollout_backend.model.rendering.selection import bounded
from rollout_backend.run.checks.model import check_renderer, check_tools
from rollout_backend.workbench.local.scripted import BYTE_MODEL, ScriptedEngine
from vocabularies import byte_vocabulary, model_folder, template

TOOLS = [function_tool("bash", "Does bash.", command={"type": "string"})]
SLOW = pytest.mark.slow


def thinking_2507() -> str:
    """Qwen3-Thinking-2507's template is Qwen3's, but for the end of a prompt."""
    before, end, _ = template("qwen3").partition("{{- '<|im_start|>assistant\\n' }}")
    assert end
    return before + "{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"


# As SmolLM3's template: the model's date and mode, tools that are only described, no calls, results as the user's.
SMOLLM3 = """{{- '<|im_start|>system\n## Metadata\n\nToday Date: ' ~ strftime_now('%d %B %Y') ~ '\n' }}
{{- 'Reasoning Mode: ' ~ ('/think' if enable_thinking | default(true) else '/no_think') }}
{{- '\n\n## Custom Instructions\n\n' }}
{{- messages[0].content.rstrip() if messages[0].role == 'system' else 'You are an assistant named SmolLM.' }}
{%- if tools %}{{- '\n\n### Tools\n\n<tools>\n' }}{%- for t in tools %}{{- (t | string) ~ '\n' }}{%- endfor %}
{{- '</tools>\n\nFor each function call, return a json object within <tool_call></tool_call> XML tags:\n' }}
{{- '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' }}{%- endif %}
{{- '\n\n<|im_end|>\n' }}
{%- for m in messages %}{%- set content = m.content if m.content is string else '' %}
{%- if m.role in ('user', 'tool') %}{{- '<|im_start|>user\n' ~ content ~ '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant\n' ~ content.lstrip('\n') ~ '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# The templates of public models: vocabulary, file in TRL (None: the tokenizer's own) or text, renderer, options.
REAL = [
    pytest.param("qwen3", None, "qwen3", {}, id="Qwen3"),
    pytest.param("qwen3", thinking_2507, "qwen3", {"opens_thinking": True}, id="Qwen3-Thinking-2507"),
    pytest.param("qwen3", SMOLLM3, "default", {"tool_parser": "qwen3"}, id="SmolLM3"),
    pytest.param("qwen3.5", "qwen3_5_nothink", "qwen3.5", {"enable_thinking": False}, id="small Qwen3.5", marks=SLOW),
    *(
        pytest.param(*case, id=f"{case[0]}-{case[1]}", marks=SLOW)
        for case in [
            ("qwen3", "qwen2_5", "chatml", {}),
            ("qwen3", "qwen3_instruct_2507", "qwen3", {}),
            ("qwen3.5", "qwen3_vl", "qwen3-vl", {}),
            ("qwen3.5", "qwen3_5_think", "qwen3.5", {}),
            ("qwen3.5", "qwen3_6", "qwen3.6", {}),
            ("qwen3.5", "qwen3_8", "qwen3.8", {}),
            ("glm-4.5", "glm4moe", "glm-4.5", {}),
            ("glm-4.5", None, "default", {"tool_parser": "glm"}),  # GLM-4.5V's reply begins in a new line
            ("glm-4.7", None, "glm-5", {}),
            ("gpt-oss", "gptoss", "gpt-oss", {}),
            ("llama-3", None, "llama-3", {}),
            ("llama-3", "llama3_1", "llama-3", {}),
            ("deepseek-v3", None, "default", {"tool_parser": "deepseek-v3"}),
            ("deepseek-r1", None, "deepseek-r1", {}),
            ("deepseek-v3.1", None, "default", {"tool_parser": "deepseek-v3.1"}),
            ("qwen3", "nemotron_3_nano", "nemotron-3", {}),
            ("qwen3", "nemotron_3_ultra", "nemotron-3-ultra", {}),
            ("gemma4", "gemma4_v5", "gemma4", {}),
            *(("lfm2", name, "default", {"tool_parser": "lfm2"}) for name in ("lfm2", "lfm2_v2", "lfm2_2_5")),
            *(
                (name, None, "default", {"tool_parser": name})
                for name in ("seed-oss", "olmo3", "nemotron-nano-v2", "hunyuan-a13b", "granite-3", "mistral")
            ),
        ]
    ),
]


def load(path, **model: Any):
    return load_renderer(ModelConfig(path=path, **model))


def options_of(bundle, names) -> dict[str, Any]:
    return {name: getattr(bundle.renderer.inner.config, name) for name in names}


@pytest.mark.parametrize(("tokenizer", "own", "renderer", "options"), REAL)
def test_the_template_of_a_public_model_selects_its_renderer(tmp_path, tokenizer, own, renderer, options):
    """In a folder whose name says something wrong."""
    text = own() if callable(own) else own if own is None or "{" in own else template(own)
    bundle = load(model_folder(tmp_path / "Llama-3.2-3B-Instruct-FP8", tokenizer, text))
    assert (bundle.name, options_of(bundle, options)) == (renderer, options)
    assert bundle.reads_tool_calls
    assert "chat template" in bundle.reason


@pytest.mark.parametrize(
    ("tokenizer", "own", "parser"),
    [
        ("qwen3", "qwen3_training", "qwen3"),
        pytest.param("qwen3.5", "qwen3_5_think_training", "qwen3.5", marks=SLOW),
        pytest.param("deepseek-v3", "deepseekv3_training", "deepseek-v3", marks=SLOW),
    ],
)
def test_a_template_that_only_appends_is_rendered_exactly(tmp_path, tokenizer, own, parser):
    """A renderer that is nearly like it would show the model other prompts than its engine does."""
    bundle = load(model_folder(tmp_path / "Qwen3-8B", tokenizer, template(own)))
    messages = [user("Q"), assistant("A", reasoning_content="hm"), user("R")]
    ids = bundle.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert bundle.render(messages, None) == ids
    assert bundle.name != "default" or options_of(bundle, ["tool_parser"]) == {"tool_parser": parser}


def test_names_decide_between_renderers_that_fit_equally_well(tmp_path):
    """They differ only in a late system message, which this template refuses."""
    late = "{% if messages|length == 4 and messages[2].role == 'system' %}{{ raise_exception('') }}{% endif %}"
    for name, renderer in (("Qwen3-4B-Instruct-2507", "qwen3"), ("Qwen3-VL-4B-Instruct", "qwen3-vl")):
        folder = model_folder(tmp_path / name, "qwen3", late + template("qwen3_instruct_2507"))
        assert load(folder).name == renderer


def test_a_template_without_reasoning_shows_none_and_a_question_extends_the_row(tmp_path):
    folder = model_folder(tmp_path / "model", "qwen3", template("qwen3_instruct_2507"))
    bundle, own = load(folder), load(folder, renderer="default")
    asked, replies = user("Q"), [assistant("A", reasoning_content="hm"), assistant("<think>\nhm\n</think>\n\nA")]
    for reply in replies:
        for messages in ([asked, reply], [asked, reply, asked]):
            assert bundle.render(messages, None) == own.render(messages, None)
    end = bundle.stop_token_ids[:1]
    assert bundle.renderer.continuation(bundle.render([asked], None), [*bundle.marker_ids("A"), *end], [asked])


@pytest.mark.parametrize(
    ("own", "thinks"), [pytest.param("qwen3_5_think", True, marks=SLOW), pytest.param(None, False, marks=SLOW)]
)
def test_a_named_renderer_thinks_as_the_template_says(tmp_path, own, thinks):
    """Without a template, the folder's name says the size."""
    without_one = "hy3"  # Qwen's vocabulary, with more markers
    folder = model_folder(tmp_path / "Qwen3.5-0.8B", without_one, own and template(own))
    for given in ({}, {"enable_thinking": True}):
        bundle = load(folder, renderer="qwen3.5", renderer_options=given)
        prompt = bundle.decode(bundle.render([user("Q")], None))
        assert prompt.endswith("<think>\n" if thinks or given else "</think>\n\n")


def test_a_prompt_that_opens_the_reasoning_is_bridged(tmp_path):
    path = model_folder(tmp_path / "my-model", byte_vocabulary(tmp_path / "bytes"), thinking_2507())
    model = ModelConfig(path=path, name="m", renderer="qwen3", context_length=4096)
    bundle = load_renderer(model)
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    replies = [f"I look.\n</think>\n\n{call}", "Nothing.\n</think>\n\nEmpty.", "So.\n</think>\n\nYes."]
    messages = [user("List.")]
    with (
        ScriptedEngine(replies, path, end="<|im_end|>") as engine,
        make_gateway(engine.url, model, bundle, engine=engine) as gateway,
    ):
        for following in (tool_result("c1", ""), user("Sure?"), user("")):
            reply = gateway.client().chat.completions.create(model="m", messages=messages, tools=TOOLS)
            prompt = bundle.tokenizer.apply_chat_template(
                messages, tools=TOOLS, add_generation_prompt=True, return_dict=False
            )
            assert engine.requests[-1]["input_ids"] == prompt
            messages += [reply.choices[0].message.model_dump(exclude_none=True), following]
        segments = gateway.trajectory().segments
    assert [segment.split_reason for segment in segments] == ["first_call", "rerendered"]
    assert messages[-2]["content"] == "Yes."


# --- templates of nobody ------------------------------------------------------------------------------------

CHATML = """{%- if tools %}{{ '<|im_start|>system\nYou have: ' }}{{ tools | tojson }}{{ '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}CALL{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
EACH = "{% for k, v in c.function.arguments.items() %}PAIR{% endfor %}"
CALLS = {
    "qwen3": '<tool_call>\n{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>',
    "qwen3.5": "<tool_call>\n<function={{ c.function.name }}>\n"
    + EACH.replace("PAIR", "<parameter={{ k }}>\n{{ v }}\n</parameter>\n")
    + "</function>\n</tool_call>",
    "glm": "<tool_call>{{ c.function.name }}"
    + EACH.replace("PAIR", "<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>")
    + "</tool_call>",
    "minimax-m2": '<minimax:tool_call>\n<invoke name="{{ c.function.name }}">\n'
    + EACH.replace("PAIR", '<parameter name="{{ k }}">{{ v }}</parameter>\n')
    + "</invoke>\n</minimax:tool_call>",
    "deepseek-v4": '<\uff5cDSML\uff5cfunction_calls>\n<\uff5cDSML\uff5cinvoke name="{{ c.function.name }}">\n'
    + EACH.replace(
        "PAIR",
        "<\uff5cDSML\uff5cparameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
        "{{ v if v is string else v | tojson }}"
        "</\uff5cDSML\uff5cparameter>\n",
    )
    + "</\uff5cDSML\uff5cinvoke>\n</\uff5cDSML\uff5cfunction_calls>",
    "deepseek-v3.1": "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>"
    "{{ c.function.name }}<\uff5ctool\u2581sep\uff5c>{{ c.function.arguments | tojson }}"
    "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>",
    "mistral": "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}",
}
UNKNOWN = "[CALL {{ c.function.name }} {{ c.function.arguments | tojson }}]"


@pytest.fixture
def folder(tmp_path):
    numbers = itertools.count()

    def make(text: str, name: str = "my-model"):
        vocabulary = "qwen3" if name.startswith("Qwen3") else BYTE_MODEL
        return model_folder(tmp_path / str(next(numbers)) / name, vocabulary, text)

    return make


@pytest.mark.parametrize("parser", CALLS)
def test_the_calls_of_another_template_are_read_by_its_parser(folder, parser):
    bundle = load(folder(CHATML.replace("CALL", CALLS[parser])))
    assert (bundle.name, options_of(bundle, ["tool_parser"])) == ("default", {"tool_parser": parser})
    called = {"type": "function", "function": {"name": "bash", "arguments": json.dumps({"command": " ls\n"})}}
    prompt = bundle.render([user("Q")], TOOLS)
    whole = bundle.renderer.render_ids(
        [user("Q"), {"role": "assistant", "content": "So.", "tool_calls": [called]}], tools=TOOLS
    )
    parsed = bundle.renderer.parse_response(whole[len(prompt) : -1], tools=TOOLS, prompt_ids=prompt)
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("bash", {"command": " ls\n"})]
    assert parsed.content.strip() == "So."


def test_a_template_may_write_the_end_of_reasoning_before_a_call(folder):
    """As a public template of DeepSeek V3.2, whose prompts begin the reply with more than that."""
    bundle = load(folder(CHATML.replace("CALL", f"</think>{CALLS['deepseek-v4']}")))
    assert options_of(bundle, ["tool_parser"]) == {"tool_parser": "deepseek-v4"}


@pytest.mark.parametrize(
    ("own", "renderer", "said"),
    [
        (SMOLLM3, "auto", "shows no tool calls"),
        (CHATML.replace("CALL", CALLS["qwen3"]), "default", "agents with tools will not get their calls"),
    ],
)
def test_calls_that_get_lost_are_named(folder, own, renderer, said):
    [found] = check_tools(run_config(model={"path": folder(own), "renderer": renderer}))
    assert (found.level, said in found.text) == ("warning", True), found


STEP = CHATML.replace(
    "{{ m.content or '' }}",
    "{% if m.reasoning_content %}{{ '<think>\\n' ~ m.reasoning_content ~ '\\n</think>\\n' }}{% endif %}"
    "{{ m.content or '' }}{{ '\\n' if m.content and m.tool_calls }}",
).replace("CALL", CALLS["qwen3"])


@pytest.mark.parametrize("begun", ["", "<think>", "<think>\n"])
@pytest.mark.parametrize("content", ["", "I do."])
def test_white_space_that_a_template_writes_is_no_part_of_a_message(folder, begun, content):
    """Otherwise the template would write it twice, and each call would open a row."""
    path = folder(STEP.replace("assistant\n' }}", f"assistant\n{begun}' }}}}"))
    bundle = load(path, renderer="default", renderer_options={"tool_parser": "qwen3"})
    prompt = bundle.render([user("Q")], TOOLS)
    called = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    said = f"<think>\nHm.\n\nSo.\n</think>\n{content}{content and chr(10)}{called}".removeprefix(begun)
    ids = bundle.tokenizer.encode(said, add_special_tokens=False)
    parsed = bundle.renderer.parse_response(ids, tools=TOOLS, prompt_ids=prompt)
    assert (parsed.reasoning_content, parsed.content) == ("Hm.\n\nSo.", content)
    call = {"type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    reply = {"role": "assistant", "reasoning_content": "Hm.\n\nSo.", "content": content, "tool_calls": [call]}
    whole = bundle.render([user("Q"), reply, tool_result("c1", "R")], TOOLS)
    assert whole[: len(prompt) + len(ids)] == [*prompt, *ids]


def test_calls_that_a_template_only_describes_are_read(folder):
    text = CHATML.replace("{% for c in m.tool_calls or [] %}CALL{% endfor %}", "").replace(
        "You have: ", "Say <tool_call>\n<function=name>\n<parameter=key>value</parameter></function></tool_call>: "
    )
    assert options_of(load(folder(text)), ["tool_parser"]) == {"tool_parser": "qwen3.5"}


@pytest.mark.parametrize("calls", [UNKNOWN, CALLS["qwen3.5"].replace("tool_call>", "seed:tool_call>")])
def test_tools_of_a_model_whose_calls_nobody_reads_are_refused_at_the_first_call(folder, play, caplog, calls):
    path = folder(CHATML.replace("CALL", calls))
    model = ModelConfig(path=path, name="m", context_length=4096)
    with caplog.at_level(logging.WARNING):
        bundle = load_renderer(model)
    assert "no tool_parser reads its tool calls" in caplog.text
    found = check_renderer(run_config(model={"path": path}))
    assert found.level == "warning"
    assert "Agents that offer tools are refused (400): this model's tool calls cannot be parsed" in found.text
    gateway = play(["one", "two"], model=model, bundle=bundle)
    ask = gateway.client().chat.completions.create
    with pytest.raises(Exception, match=r"cannot be parsed\. Set model\.renderer .* or tool_parser") as refused:
        ask(model="m", messages=[user("Q")], tools=TOOLS)
    assert (refused.value.status_code, refused.value.code) == (400, "no_tool_parser")
    assert ask(model="m", messages=[user("Q")]).choices
    assert ask(model="m", messages=[user("Q")], tools=TOOLS, tool_choice="none").choices


@pytest.mark.parametrize(("images", "level"), [({}, "warning"), ({"max_images": 0}, "ok")])
def test_a_renderer_that_shows_no_images_of_a_model_that_takes_them_is_named(tmp_path, images, level):
    """Qwen3-VL-Thinking's prompts end as those of Qwen3-Thinking-2507, which no renderer with images has."""
    path = model_folder(tmp_path / "Qwen3-VL-4B-Thinking", "qwen3", thinking_2507())
    (path / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessorFast"}')
    found = check_renderer(run_config(model={"path": path}, gateway=images))
    assert (found.level, "does not render them: calls with images are refused (400)" in found.text) == (
        level,
        level == "warning",
    )


ENDLESS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3


def test_an_endless_template_is_stopped(folder):
    with pytest.raises(ConfigError, match=r"template .*more than 2 s of CPU time"):
        load(folder(CHATML + ENDLESS))


@SLOW
def test_an_endless_template_leaves_the_name_and_the_renderers_that_need_no_template(folder):
    with pytest.raises(ConfigError, match="is too slow"):
        load(folder("{% if tools %}" + ENDLESS + "{% endif %}[{{ messages[0].content }}]"))
    assert load(folder(CHATML + ENDLESS, "Qwen3-8B")).name == "qwen3"
    assert load(folder(CHATML + ENDLESS, "Qwen3"), renderer="qwen3").name == "qwen3"


def test_code_that_catches_everything_is_stopped_too():
    def endless():
        while True:
            try:
                json.dumps([1])
            except Exception:
                raise AssertionError from None

    with pytest.raises(TimeoutError):
        bounded(endless, 0.2)
    with pytest.raises(KeyError):
        bounded(lambda: {}["a"])
    assert bounded(lambda: 7) == 7


RAISES = "{{ raise_exception('no') }}"


def test_a_template_that_always_fails_leaves_the_name(folder):
    assert load(folder(RAISES, "Qwen3-8B-FP8")).name == "qwen3"
    for broken in (RAISES, "{% if"):
        with pytest.raises(ConfigError, match=r"no renderer is known for my-model, and its chat template fails"):
            load(folder(broken))


@pytest.mark.parametrize(
    "refuses",
    [
        "{% if not tools %}" + RAISES + "{% endif %}",
        "{% for m in messages %}{% if m.role == 'system' and loop.index0 %}" + RAISES + "{% endif %}{% endfor %}",
        "{% for m in messages %}{% if m.role == 'tool' %}" + RAISES + "{% endif %}{% endfor %}",
    ],
)
def test_a_template_that_refuses_some_conversations_is_compared_in_the_others(folder, refuses):
    bundle = load(folder(refuses + CHATML.replace("CALL", CALLS["qwen3.5"])))
    assert (bundle.name, options_of(bundle, ["tool_parser"])) == ("default", {"tool_parser": "qwen3.5"})


def test_a_folder_without_a_template_is_known_by_name(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"my-model, and it has no chat template: set model\.renderer"):
        load(folder(""))
    with pytest.raises(ConfigError, match=r"fits PrimeIntellect/Qwen3-0\.6B, Qwen/Qwen3-0\.6B.* prime-qwen3, qwen3"):
        load(folder("", "Qwen3-0.6B"))
    hub = model_folder(tmp_path / "models--PrimeIntellect--Qwen3-0.6B" / "snapshots" / "0123abcd", "qwen3", "")
    assert load(hub).name == "prime-qwen3"
