import json
from contextlib import nullcontext

import pytest

from rollout_backend.config import ModelConfig
from rollout_backend.errors import ConfigError
from rollout_backend.model.rendering.chatml import ChatMLRenderer
from rollout_backend.model.rendering.renderer import load_renderer
from rollout_backend.workbench.local.scripted import BYTE_MODEL
from vocabularies import model_folder, tokenizer_folder


@pytest.fixture
def folder(tmp_path):
    """Return a function that makes the byte model's folder, with another template."""
    return lambda template=None: model_folder(tmp_path / "model", BYTE_MODEL, template)


def test_auto_selects_chatml_if_it_equals_the_models_template():
    bundle = load_renderer(ModelConfig(path=BYTE_MODEL))
    assert (bundle.name, type(bundle.renderer.inner)) == ("chatml", ChatMLRenderer)
    assert bundle.stop_token_ids == (bundle.tokenizer.convert_tokens_to_ids("<|im_end|>"),)


@pytest.mark.parametrize(
    ("renderer", "message"),
    [
        ("nonsense", "known are auto, chatml, deepseek"),
        ("no.such.Class", "cannot be used"),
        ("qwen3", "qwen3 cannot be used with"),
    ],
)
def test_an_unusable_renderer_is_reported(renderer, message):
    with pytest.raises(ConfigError, match=message):
        load_renderer(ModelConfig(path=BYTE_MODEL, renderer=renderer))


def test_a_folder_without_a_tokenizer_is_reported(tmp_path):
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        load_renderer(ModelConfig(path=tmp_path))
    with pytest.raises(ConfigError, match="there is no folder"):
        load_renderer(ModelConfig(path=tmp_path / "nowhere"))


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "MARK"}'}}
PRINTS = {
    "an object": "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}",
    "JSON": "{{ c.function.arguments | tojson }}",
    "text": "{{ 'x' + c.function.arguments }}",
    "what it gets": "{{ c.function.arguments }}",
}


@pytest.mark.parametrize("prints", PRINTS)
@pytest.mark.parametrize("condition", ["true", "m['content'] is none"])
def test_the_models_template_gets_calls_in_the_form_that_it_shows(folder, prints, condition):
    calls = f"{{% if {condition} %}}{{% for c in m.tool_calls or [] %}}{PRINTS[prints]}{{% endfor %}}{{% endif %}}"
    path = folder(f"{{% for m in messages %}}{{{{ m.role }}}}{calls}{{% endfor %}}")
    bundle = load_renderer(ModelConfig(path=path, renderer="default"))
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    shown = bundle.decode(bundle.render(messages, None))
    assert ("a=MARK;" if prints == "an object" else '{"a": "MARK"}') in shown


@pytest.mark.parametrize("refuses", ["{{ raise_exception('only first') }}", ""])
def test_a_late_system_message_that_the_models_template_does_not_show_is_refused_by_its_place(folder, refuses):
    template = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}REFUSES{% else %}{{ m.content }}"
    path = folder(template.replace("REFUSES", refuses) + "{% endif %}{% endfor %}")
    bundle = load_renderer(ModelConfig(path=path, renderer="default"))
    said = [{"role": role, "content": role} for role in ("system", "user", "system")]
    assert bundle.decode(bundle.render(said[:2], None)) == "systemuser"
    with pytest.raises(ValueError, match=r"messages\.2: .* shows a system message only at the start"):
        bundle.render(said, None)


@pytest.mark.parametrize("parser", [{}, {"reasoning_parser": "think"}])
@pytest.mark.parametrize("opens", [True, False])
def test_reasoning_that_the_models_template_opens_is_read_after_any_header(folder, opens, parser):
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[A]"
    path = folder(template + ("<think>\n" if opens else ""))
    bundle = load_renderer(ModelConfig(path=path, renderer="default", renderer_options=parser))
    prompt = bundle.render([{"role": "user", "content": "<think>"}], None)
    said = bundle.tokenizer.encode("I see.</think>Yes.", add_special_tokens=False)
    parsed = bundle.renderer.parse_response(said, prompt_ids=prompt)
    read = ("Yes.", "I see.") if opens else ("I see.</think>Yes.", None)
    assert (parsed.content, parsed.reasoning_content) == read
    parsed = bundle.renderer.parse_response(said[:6], prompt_ids=prompt)
    assert (parsed.content, parsed.reasoning_content) == (("", "I see.") if opens else ("I see.", None))


def test_renderer_options():
    for parser, refused in (("qwen3", False), ("nonsense", True)):
        model = ModelConfig(path=BYTE_MODEL, renderer="default", renderer_options={"tool_parser": parser})
        with pytest.raises(ConfigError, match="default cannot be used") if refused else nullcontext():
            assert load_renderer(model).renderer.inner.supports_tools
    for name in ("chatml", "qwen3"):
        with pytest.raises(ConfigError, match=rf"renderer_options: {name} does not take them(.|\n)*nonsense"):
            load_renderer(ModelConfig(path=BYTE_MODEL, renderer=name, renderer_options={"nonsense": 1}))


def test_the_default_renderer_needs_a_template(folder):
    path = folder("")
    with pytest.raises(ConfigError, match="needs a chat template"):
        load_renderer(ModelConfig(path=path, renderer="default"))


def test_an_end_token_unknown_to_the_renderer_is_not_text(folder):
    path = folder()
    (path / "generation_config.json").write_text('{"eos_token_id": 1}')
    bundle = load_renderer(ModelConfig(path=path, renderer="chatml"))
    said = bundle.tokenizer.encode("Hi", add_special_tokens=False)
    assert bundle.renderer.parse_response([*said, 1]).content == "Hi"


OWN_TOKENIZER = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast
Path(__file__).with_name("ran").touch()
class Own(PreTrainedTokenizerFast):
    pass
"""


def test_code_of_the_model_runs_only_if_trusted(folder, monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    path = folder()
    (path / "own.py").write_text(OWN_TOKENIZER.replace("__file__", repr(str(path / "own.py"))))
    file = path / "tokenizer_config.json"
    config = {
        **json.loads(file.read_text()),
        "auto_map": {"AutoTokenizer": [None, "own.Own"]},
        "tokenizer_class": "Own",
    }
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"Python code of the model\. Read it.*model\.trust_remote_code=true"):
        load_renderer(ModelConfig(path=path, renderer="chatml"))
    assert not (path / "ran").exists()
    bundle = load_renderer(ModelConfig(path=path, renderer="chatml", trust_remote_code=True))
    assert (path / "ran").exists()
    assert type(bundle.tokenizer).__name__ == "Own"


class Counted(str):
    """A marker that counts the characters of the texts to which it is added."""

    characters = 0

    def __radd__(self, text):
        Counted.characters += len(text)
        return text + str(self)


def test_the_work_on_repeated_marks_of_reasoning_is_linear():
    bundle = load_renderer(
        ModelConfig(path=tokenizer_folder("qwen3"), name="m", renderer="qwen3", context_length=8192)
    )
    bundle.renderer._reasoning_open = Counted("<think>")
    thought = "a" + "<think>b" * 3000
    ids = bundle.tokenizer.encode(f"<think>\n{thought}\n</think>\n\nYes.<|im_end|>", add_special_tokens=False)
    parsed = bundle.renderer.parse_response(ids, prompt_ids=[])
    assert (parsed.reasoning_content, parsed.content) == (thought, "Yes.")
    assert Counted.characters <= len(thought)
