"""Five families of models: their real tokenizers, and the format of their completions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from builders import function_tool
from rollout_backend.config import ModelConfig
from rollout_backend.rendering.renderer import RendererBundle, load_renderer
from vocabularies import tokenizer_folder

Call = tuple[str, str]
"""A tool's name and its arguments, as the model writes them."""


@dataclass(frozen=True)
class Family:
    """`say` writes a completion of reasoning, content and calls, with its end token."""

    name: str
    renderer: str
    tokenizer: str  # of TOKENIZERS
    say: Callable[[str | None, str, Sequence[Call]], str]
    reasons: bool = True
    parallel: bool = True
    carries_broken_json: bool = True  # whether the format of a call holds its arguments as JSON

    def __str__(self) -> str:
        return self.name


def _qwen3(reasoning: str | None, content: str, calls: Sequence[Call]) -> str:
    blocks = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in calls
    ]
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning is not None else ""
    return thought + "\n".join(filter(None, [content, *blocks])) + "<|im_end|>"


def _gpt_oss(reasoning: str | None, content: str, calls: Sequence[Call]) -> str:
    said = f"{reasoning or ''}<|end|>"  # the prompt has begun the reasoning
    if not calls:
        return said + f"<|start|>assistant<|channel|>final<|message|>{content}<|return|>"
    if content:
        said += f"<|start|>assistant<|channel|>commentary<|message|>{content}<|end|>"
    ((name, arguments),) = calls
    head = f"<|start|>assistant to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>"
    return f"{said}{head}{arguments}<|call|>"


def _llama3(reasoning: str | None, content: str, calls: Sequence[Call]) -> str:
    for name, arguments in calls:
        return f'{{"name": "{name}", "parameters": {arguments}}}<|eot_id|>'
    return f"{content}<|eot_id|>"


def _glm(reasoning: str | None, content: str, calls: Sequence[Call]) -> str:
    said = f"{reasoning or ''}</think>{content}"  # the prompt has begun the reasoning
    for name, arguments in calls:
        pairs = "".join(
            f"<arg_key>{key}</arg_key><arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>"
            for key, value in json.loads(arguments).items()
        )
        said += f"<tool_call>{name}{pairs}</tool_call>"
    return said + ("<|observation|>" if calls else "<|user|>")


def _deepseek(reasoning: str | None, content: str, calls: Sequence[Call]) -> str:
    def token(name: str) -> str:
        return f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>"

    blocks = "".join(
        f"{token('tool call begin')}function{token('tool sep')}{name}\n```json\n{args}\n```{token('tool call end')}"
        for name, args in calls
    )
    if blocks:
        blocks = token("tool calls begin") + blocks + token("tool calls end")
    return content + blocks + token("end of sentence")


FAMILIES = (
    Family("qwen3", "qwen3", "qwen3", _qwen3),
    Family("gpt-oss", "gpt-oss", "gpt-oss", _gpt_oss, parallel=False),
    Family("llama-3", "llama-3", "llama-3", _llama3, reasons=False, parallel=False),
    Family("glm-5", "glm-5", "glm-4.7", _glm, carries_broken_json=False),
    Family("deepseek-v3", "deepseek-v3", "deepseek-v3", _deepseek, reasons=False),
)


@pytest.fixture(
    scope="session",
    params=[pytest.param(each.name, marks=() if each.name == "qwen3" else pytest.mark.slow) for each in FAMILIES],
)
def family(request: pytest.FixtureRequest) -> Family:
    return next(each for each in FAMILIES if each.name == request.param)


@pytest.fixture(scope="session")
def bundle(family: Family) -> RendererBundle:
    """The family's renderer by name, over its real tokenizer."""
    return load_renderer(ModelConfig(path=tokenizer_folder(family.tokenizer), renderer=family.renderer))


TOOLS = [
    function_tool("add", "Does add.", a={"type": "integer"}, b={"type": "integer"}),
    function_tool("write", "Does write.", text={"type": "string"}, options={"type": "object"}),
]


@pytest.fixture(scope="session")
def tools() -> list[dict[str, Any]]:
    return TOOLS
