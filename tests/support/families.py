"""Families of models: a renderer, a real tokenizer, and how the models write."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from renderers import hy3

from rollout_backend.config import ModelConfig
from rollout_backend.model.rendering.guarded_renderer import RendererBundle
from rollout_backend.model.rendering.renderer import load_renderer
from vocabularies import tokenizer_folder

Writer = Callable[[str, str], str]
"""Writes a call, from a tool's name and its arguments as JSON."""


def in_json(head: str, tail: str) -> Writer:
    return lambda name, arguments: head.replace("NAME", name) + arguments + tail


def in_python(head: str, tail: str, quote: Callable[[str], str]) -> Writer:
    def write(name: str, arguments: str) -> str:
        values = json.loads(arguments).items()
        return f"{head}{name}({', '.join(f'{key}={quote(value)}' for key, value in values)}){tail}"

    return write


def in_tags(head: str, pair: str, tail: str, between: str = "") -> Writer:
    def write(name: str, arguments: str) -> str:
        pairs = (
            pair.replace("KEY", key).replace("VALUE", value if isinstance(value, str) else json.dumps(value))
            for key, value in json.loads(arguments).items()
        )
        return head.replace("NAME", name) + between.join(pairs) + tail

    return write


HERMES = in_json('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>")
_LLAMA = in_json('{"name": "NAME", "parameters": ', "}")
_GPT_OSS = in_json("<|start|>assistant to=functions.NAME<|channel|>commentary <|constrain|>json<|message|>", "")
_DEEPSEEK = in_json(
    "<\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>NAME\n```json\n",
    "\n```<\uff5ctool\u2581call\u2581end\uff5c>",
)
KIMI = in_json(
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>",
    "<|tool_call_end|><|tool_calls_section_end|>",
)
_INKLING = in_json(
    '<|content_text|><|end_message|><|message_model|>NAME<|content_invoke_tool_json|>{"name": "NAME", "args": ',
    "}<|end_message|>",
)
MISTRAL = in_json("[TOOL_CALLS]NAME[ARGS]", "")
_LISTS = {
    name: in_json(f'{begin}[{{"name": "NAME", "arguments": ', f"}}]{end}")
    for name, begin, end in (
        ("nemotron-nano-v2", "<TOOLCALL>", "</TOOLCALL>"),
        ("hunyuan-a13b", "<tool_calls>", "</tool_calls>"),
        ("granite-3", "<|tool_call|>", ""),
    )
}
_QWEN = in_tags(
    "<tool_call>\n<function=NAME>\n", "<parameter=KEY>\nVALUE\n</parameter>\n", "</function>\n</tool_call>"
)
_SEED = in_tags(
    "\n<seed:tool_call>\n<function=NAME>\n", "<parameter=KEY>VALUE</parameter>\n", "</function>\n</seed:tool_call>"
)
_LFM2 = in_python("<|tool_call_start|>[", "]<|tool_call_end|>", repr)
_OLMO3 = in_python("<function_calls>\n", "\n</function_calls>", lambda value: json.dumps(value, ensure_ascii=False))
_GLM = in_tags("<tool_call>NAME", "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>", "</tool_call>")
_GLM_LINES = in_tags("<tool_call>NAME\n", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n", "</tool_call>")
_MINIMAX = in_tags(
    '<minimax:tool_call>\n<invoke name="NAME">\n',
    '<parameter name="KEY">VALUE</parameter>\n',
    "</invoke>\n</minimax:tool_call>",
)
_HUNYUAN = in_tags(
    f"{hy3._TOOL_CALLS}\n{hy3._TOOL_CALL}NAME{hy3._TOOL_SEP}\n",
    f"{hy3._ARG_KEY}KEY{hy3._ARG_KEY_END}\n{hy3._ARG_VALUE}VALUE{hy3._ARG_VALUE_END}\n",
    f"{hy3._TOOL_CALL_END}\n{hy3._TOOL_CALLS_END}",
)
_DSML = in_tags(
    '\n\n<\uff5cDSML\uff5ctool_calls>\n<\uff5cDSML\uff5cinvoke name="NAME">\n',
    '<\uff5cDSML\uff5cparameter name="KEY" string="true">VALUE</\uff5cDSML\uff5cparameter>\n',
    "</\uff5cDSML\uff5cinvoke>\n</\uff5cDSML\uff5ctool_calls>",
)
GEMMA = in_tags("<|tool_call>call:NAME{", 'KEY:<|"|>VALUE<|"|>', "}<tool_call|>", ",")


@dataclass(frozen=True)
class Family:
    """`name` is the renderer, or `default+PARSER` for the model's own template with a tool parser."""

    name: str
    tokenizer: str
    write: Writer
    end: str = "<|im_end|>"
    final: str = ""  # of a reply without calls, if that ends in another way
    opened: str = ""  # how reasoning ends that the prompt begins
    begun: str = ""  # start of a reply that the prompt contains
    thought: str = ""  # reasoning that the model begins, with {} for its text
    text: str = "{}"
    between: str = ""
    frame: tuple[str, str] = ("", "")  # around all calls
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def is_json(self) -> bool:
        return self.write in (HERMES, _LLAMA, _GPT_OSS, _DEEPSEEK, KIMI, _INKLING, MISTRAL, *_LISTS.values())

    @property
    def is_python(self) -> bool:
        return self.write in (_LFM2, _OLMO3)

    @property
    def takes_objects(self) -> bool:
        """Whether a call is a JSON object, with the arguments in it."""
        return self.write in (HERMES, _LLAMA, _INKLING, *_LISTS.values())

    @property
    def reasons(self) -> bool:
        return bool(self.opened or self.thought)

    @property
    def parallel(self) -> bool:
        return self.write not in (_LLAMA, _GPT_OSS)

    @cache  # noqa: B019  # a few families
    def bundle(self) -> RendererBundle:
        renderer, _, parser = self.name.partition("+")
        options = {"tool_parser": parser} if parser else dict(self.options)
        return load_renderer(
            ModelConfig(path=tokenizer_folder(self.tokenizer), renderer=renderer, renderer_options=options)
        )

    def call(self, name: str, values: dict[str, Any]) -> str:
        return self._calls([(name, json.dumps(values))])

    def say(self, reasoning: str | None, content: str, calls: Sequence[tuple[str, str]]) -> str:
        """Return a whole reply, whose calls are names with arguments in JSON."""
        thought = self.thought.format(reasoning) if reasoning is not None else ""
        if self.opened:
            thought = f"{reasoning or ''}{self.opened}"
        text = self.text.format(content) if content or not calls else ""
        said = self.between.join(filter(None, [text, self._calls(calls)]))
        return (thought + said).removeprefix(self.begun) + (self.end if calls else self.final or self.end)

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a reply with this text, after reasoning of one word if the prompt begins it."""
        said = (f"t{self.opened}" if self.opened else "") + text.removeprefix(self.begun) + self.end
        return list(self.bundle().tokenizer.encode(said, add_special_tokens=False))

    def _calls(self, calls: Sequence[tuple[str, str]]) -> str:
        written = self.between.join(self.write(*call) for call in calls)
        return self.frame[0] + written + self.frame[1] if calls else ""


_THINK = "\n</think>\n\n"
_OPENS = "<think>{}</think>"
_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
_SECTION = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
FAMILIES = [
    Family("qwen3", "qwen3", HERMES, thought="<think>\n{}\n</think>\n\n", between="\n"),
    Family("qwen3-vl", "qwen3", HERMES, thought=_OPENS),
    Family("chatml", "qwen3", HERMES),
    Family("default+qwen3", "qwen3", HERMES, thought="<think>\n{}\n</think>\n\n"),
    Family("default+qwen3.5", "qwen3", _QWEN, thought=_OPENS),
    Family("default+glm", "glm-4.7", _GLM, "<|user|>", opened="</think>"),
    Family("default+deepseek-v3", "deepseek-v3", _DEEPSEEK, _END, thought=_OPENS, frame=_SECTION),
    Family("default+mistral", "mistral", MISTRAL, thought="[THINK]{}[/THINK]"),
    Family("default+seed-oss", "seed-oss", _SEED, thought="<seed:think>{}</seed:think>"),
    Family("default+lfm2", "lfm2", _LFM2, thought="<think>{}</think>"),
    Family("default+olmo3", "olmo3", _OLMO3),
    *(Family(f"default+{name}", name, write) for name, write in _LISTS.items()),
    Family("prime-qwen3", "qwen3", _QWEN, thought=_OPENS),
    *(
        Family(name, "qwen3.5", _QWEN, opened=_THINK, options=(("enable_thinking", True),))
        for name in ("qwen3.5", "qwen3.6", "qwen3.8")
    ),
    *(Family(name, "qwen3", _QWEN, opened=_THINK) for name in ("nemotron-3", "nemotron-3-ultra", "nemotron-3.5")),
    Family("glm-4.5", "glm-4.5", _GLM_LINES, "<|observation|>", opened="</think>\n"),
    *(
        Family(name, "glm-4.7", _GLM, "<|observation|>", "<|user|>", opened="</think>")
        for name in ("glm-5", "glm-5.1", "glm-5.3")
    ),
    *(
        Family(name, "laguna", _GLM_LINES, "</assistant>", thought=_OPENS)
        for name in ("laguna-xs.2", "laguna-m.1", "laguna-xs-2.1")
    ),
    Family("laguna-s-2.1", "laguna", _GLM_LINES, "</assistant>", opened="</think>"),
    Family("minimax-m2", "minimax-m2", _MINIMAX, "[e~[", opened=_THINK),
    Family("hy3", "hy3", _HUNYUAN, hy3._EOS, thought=f"{hy3._THINK}{{}}{hy3._THINK_END}"),
    Family(
        *("gpt-oss", "gpt-oss", _GPT_OSS, "<|call|>", "<|return|>"),
        begun="<|start|>assistant",
        thought="<|channel|>analysis<|message|>{}<|end|>",
        text="<|start|>assistant<|channel|>final<|message|>{}",
    ),
    Family("llama-3", "llama-3", _LLAMA, "<|eot_id|>"),
    Family("deepseek-v3", "deepseek-v3", _DEEPSEEK, _END, thought=_OPENS, frame=_SECTION),
    Family("deepseek-r1", "deepseek-r1", _DEEPSEEK, _END, opened="</think>", frame=_SECTION),
    Family("deepseek-v4", "deepseek-v4", _DSML, _END, opened="</think>", options=(("enable_thinking", True),)),
    Family("kimi-k2", "kimi-k2", KIMI, thought=_OPENS),
    Family("kimi-k2.5", "kimi-k2", KIMI, opened="</think>"),
    Family("gemma4", "gemma4", GEMMA, "<|tool_response>", thought="<|channel>thought\n{}<channel|>"),
    Family("inkling", "inkling", _INKLING, "<|content_model_end_sampling|>"),
]
