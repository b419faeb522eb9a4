"""docs/models.md: its table is whole, and the renderer that it shows runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import openai
import pytest

from rollout_backend.config import ModelConfig
from rollout_backend.errors import ConfigError
from rollout_backend.local.scripted import BYTE_MODEL, ScriptedEngine
from rollout_backend.rendering.renderer import known_renderers, load_renderer

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
USER = {"role": "user", "content": "1 + 2?"}


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


def test_a_renderer_of_ones_own_serves_a_tool_conversation(own, serve):
    with ScriptedEngine(['CALL add {"a": 1}', "CALL add {broken", "It is 3."]) as engine:
        gateway = serve(engine.url, model=own, bundle=load_renderer(own))
        client: openai.OpenAI = gateway.client()

        def ask(messages):
            return client.chat.completions.create(model="m", messages=messages, tools=[TOOL]).choices[0].message

        called = ask([USER])
        (call,) = called.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        messages = [USER, called.model_dump(exclude_none=True)]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "3<|im_end|>"})
        broken = ask(messages)
        assert broken.content == "CALL add {broken"
        assert not broken.tool_calls
        messages += [broken.model_dump(exclude_none=True), {"role": "user", "content": "That was no JSON."}]
        assert ask(messages).content == "It is 3."
        (segment,) = gateway.trajectory().segments
        assert len(segment.turns) == 3
        assert gateway.stats().malformed_tool_calls == 1
        prompt = engine.requests[-1]["input_ids"]
    end = load_renderer(own).renderer.get_stop_token_ids()[0]
    assert prompt.count(end) == 6  # system, user, call, result, call, user: the result's text ended nothing


def test_it_takes_its_options(own):
    model = own.model_copy(update={"renderer_options": {"tools_title": "Tools:"}})
    bundle = load_renderer(model)
    assert bundle.decode(bundle.render([USER], [TOOL])).startswith("<|im_start|>system:Tools:\n")
    with pytest.raises(ConfigError, match=r"renderer_options: .*MyRenderer does not take them(.|\n)*nonsense"):
        load_renderer(own.model_copy(update={"renderer_options": {"nonsense": 1}}))


def test_a_bridge_that_is_none_and_a_parser_that_raises_end_no_episode(tmp_path, serve):
    file = tmp_path / "bad.py"
    file.write_text(
        "from rollout_backend.rendering.chatml import ChatMLRenderer\n"
        "class Bad(ChatMLRenderer):\n"
        "    def parse_response(self, token_ids, **more):\n"
        "        raise RuntimeError('a bug')\n"
        "    def bridge_to_next_turn(self, prompt, completion, new, **more):\n"
        "        return super().bridge_to_next_turn(prompt[1:], completion, new, **more)\n"
    )
    model = ModelConfig(path=BYTE_MODEL, renderer=f"{file}:Bad", name="m", context_length=4096)
    with ScriptedEngine(["one", "two"]) as engine:
        gateway = serve(engine.url, model=model, bundle=load_renderer(model))
        client = gateway.client()
        first = client.chat.completions.create(model="m", messages=[USER]).choices[0].message
        assert first.content == "one"
        messages = [USER, first.model_dump(exclude_none=True), {"role": "user", "content": "more"}]
        assert client.chat.completions.create(model="m", messages=messages).choices[0].message.content == "two"
        prompt = engine.requests[-1]["input_ids"]
        assert prompt[0] == load_renderer(model).tokenizer.convert_tokens_to_ids("<|im_start|>")
        assert gateway.stats().malformed_tool_calls == 2
