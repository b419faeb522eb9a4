"""docs/models.md: its table names every renderer, and the renderer that it shows works."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from builders import function_tool, tool_result, user
from rollout_backend.config import ModelConfig
from rollout_backend.errors import ConfigError
from rollout_backend.model.rendering.renderer import known_renderers, load_renderer
from rollout_backend.workbench.local.scripted import BYTE_MODEL

PAGE = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
TOOL = function_tool("add", a={"type": "integer"})
USER = user("1 + 2?")


def test_every_renderer_is_in_the_table():
    rows = re.findall(r"^\| (`[^|]*`) \| [^|]* \| [^|]* \| [^|]* \| [^|]*\|$", PAGE, flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert named - {"model.renderer"} == set(known_renderers()) - {"auto"}


@pytest.fixture
def own(tmp_path) -> ModelConfig:
    (code,) = re.findall(r"^```python\n(# my_renderer\.py\n.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    file = tmp_path / "my_renderer.py"
    file.write_text(code)
    return ModelConfig(path=BYTE_MODEL, renderer=f"{file}:MyRenderer", name="m", context_length=4096)


def ask(gateway, messages, **more):
    return gateway.client().chat.completions.create(model="m", messages=messages, **more).choices[0].message


def test_a_custom_renderer_serves_a_conversation_with_tools(own, play):
    bundle = load_renderer(own)
    gateway = play(['CALL add {"a": 1}', "CALL add {broken", "It is 3."], model=own, bundle=bundle)
    called = ask(gateway, [USER], tools=[TOOL])
    [call] = called.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    messages = [USER, called.model_dump(exclude_none=True), tool_result(call.id, "3<|im_end|>")]
    broken = ask(gateway, messages, tools=[TOOL])
    assert broken.content == "CALL add {broken"
    assert not broken.tool_calls
    messages += [broken.model_dump(exclude_none=True), user("That was no JSON.")]
    assert ask(gateway, messages, tools=[TOOL]).content == "It is 3."
    [segment] = gateway.trajectory().segments
    assert len(segment.turns) == 3
    assert gateway.stats().malformed_tool_calls == 1
    prompt = gateway.engine.requests[-1]["input_ids"]
    end = bundle.stop_token_ids[0]
    assert prompt.count(end) == 6  # system, user, call, result, call, user: the result's text ended nothing


def test_a_custom_renderer_takes_its_options(own):
    model = own.model_copy(update={"renderer_options": {"tools_title": "Tools:"}})
    bundle = load_renderer(model)
    assert bundle.decode(bundle.render([USER], [TOOL])).startswith("<|im_start|>system:Tools:\n")
    with pytest.raises(ConfigError, match=r"renderer_options: .*MyRenderer does not take them(.|\n)*nonsense"):
        load_renderer(own.model_copy(update={"renderer_options": {"nonsense": 1}}))


def test_a_wrong_bridge_and_a_parser_that_raises_do_not_end_a_conversation(tmp_path, play):
    file = tmp_path / "bad.py"
    file.write_text(
        "from rollout_backend.model.rendering.chatml import ChatMLRenderer\n"
        "class Bad(ChatMLRenderer):\n"
        "    def parse_response(self, token_ids, **more):\n"
        "        raise RuntimeError('a bug')\n"
        "    def bridge_to_next_turn(self, prompt, completion, new, **more):\n"
        "        return super().bridge_to_next_turn(prompt, completion[1:], new, **more)\n"
    )
    model = ModelConfig(path=BYTE_MODEL, renderer=f"{file}:Bad", name="m", context_length=4096)
    bundle = load_renderer(model)
    gateway = play(["one", "two"], model=model, bundle=bundle)
    first = ask(gateway, [USER])
    assert first.content == "one"
    messages = [USER, first.model_dump(exclude_none=True), user("more")]
    assert ask(gateway, messages).content == "two"
    assert gateway.engine.requests[-1]["input_ids"] == bundle.render(messages, None)
    assert gateway.stats().malformed_tool_calls == 2
