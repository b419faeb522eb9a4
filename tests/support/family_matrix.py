"""What the families do where they differ: docs/models.md shows the outcomes, and tests compare them with the parsers.

A case is a reply of the model. Its outcome is read from what the agent gets, in the words that the page shows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from builders import function_tool, user
from families import FAMILIES, GEMMA, Family
from rollout_backend.model.model_call import Choice, ModelCall
from rollout_backend.model.rendering.reply import StreamingParser, read_reply
from rollout_backend.model.rendering.segments import Completion

TEXT = {"type": "string"}
TOOLS = [
    function_tool("find", "Does find.", q=TEXT, who={"anyOf": [TEXT, {"type": "null"}]}),
    function_tool("docs.search", "Does search.", q=TEXT),
]


@dataclass(frozen=True)
class Reading:
    """A reply as its reader gets it."""

    content: str
    reasoning: str
    calls: Sequence[tuple[str, Any]]
    malformed: int = 0


def tagged(family: Family) -> bool:
    """Whether a value of this format has no type of its own."""
    return not family.is_json and not family.is_python


def markers(family: Family) -> tuple[str, str]:
    begin, _, end = family.thought.partition("{}")
    return (begin.strip(), end.strip()) if family.thought else ("<think>", family.opened.strip() or "</think>")


def _opening(family: Family) -> str:
    return "" if family.opened else family.thought.partition("{}")[0].removeprefix(family.begun)


def _call(family: Family, name: str = "find", **values: Any) -> str:
    return family.call(name, values)


def _draft(family: Family) -> str:
    return family.say(f"I could {_call(family, q='x')} but no.", "It is 4.", []).removesuffix(
        family.final or family.end
    )


def _after_draft(family: Family) -> str:
    call = _call(family, q="y")
    return (
        family.say(f"I could {_call(family, q='x')} but no.", "", []).removesuffix(family.final or family.end) + call
    )


def _open(family: Family) -> str:
    return f"{_opening(family)}I look.{_call(family, q='x')}"


def _marker(family: Family) -> str:
    begin, end = markers(family)
    answer = f"Write {begin}plan{end} first."
    return family.say("t" if family.reasons else None, answer, []).removesuffix(family.final or family.end)


def _nested(family: Family) -> str:
    said = family.say(f"Write {markers(family)[0]} plan first.", "It is 4.", [])
    return said.removesuffix(family.final or family.end)


def _after_reasoning(family: Family, call: str) -> str:
    return (f"t{family.opened}" if family.opened else "") + call.removeprefix(family.begun)


def _nullable(family: Family) -> str:
    call = _call(family, who="null").replace('<|"|>', "").replace('string="true"', 'string="false"')
    return _after_reasoning(family, call)


def _bare(family: Family) -> str:
    return _after_reasoning(family, _call(family, q="10001").replace('<|"|>', ""))


def _dotted(family: Family) -> str:
    return _after_reasoning(family, _call(family, "docs.search", q="x").replace("functions.", ""))


def _one_of(**outcomes: Callable[[Reading], bool]) -> Callable[[Reading], str]:
    return lambda reading: next((word for word, holds in outcomes.items() if holds(reading)), f"other: {reading}")


def _called(name: str, **arguments: Any) -> Callable[[Reading], bool]:
    return lambda reading: list(reading.calls) == [(name, arguments)]


_KEPT = _one_of(
    reasoning=lambda r: not r.calls and "It is 4." in r.content and "but no." in r.reasoning,
    call=lambda r: bool(r.calls),
)
_SAID = "plan"


@dataclass(frozen=True)
class Case:
    title: str
    write: Callable[[Family], str]
    outcome: Callable[[Reading], str]
    applies: Callable[[Family], bool]
    usual: str


def _reasons(family: Family) -> bool:
    """Whether the reasoning ends at a marker. gpt-oss and Inkling have messages for each part of a reply."""
    return family.reasons and family.name not in ("gpt-oss", "inkling")


CASES: Mapping[str, Case] = {
    "draft": Case("a call drafted in closed reasoning", _draft, _KEPT, _reasons, "reasoning"),
    "after": Case(
        "a call after a draft",
        _after_draft,
        _one_of(call=_called("find", q="y")),
        lambda family: _reasons(family) and not family.name.startswith("default+granite"),
        "call",
    ),
    "open": Case(
        "a call in open reasoning",
        _open,
        _one_of(call=_called("find", q="x"), reasoning=lambda r: not r.calls and "find" in r.reasoning),
        _reasons,
        "call",
    ),
    "marker": Case(
        "markers of reasoning in an answer",
        _marker,
        _one_of(text=lambda r: _SAID in r.content and r.content.count("<") + r.content.count("[") == 2),
        lambda family: family.name not in ("gpt-oss", "inkling"),
        "text",
    ),
    "nested": Case(
        "an opening marker in reasoning",
        _nested,
        _one_of(
            kept=lambda r: (
                r.content == "It is 4." and re.fullmatch(r"Write [<\[]\S+( plan|thought\n plan) first.", r.reasoning)
            ),
            dropped=lambda r: r.content == "It is 4.",
        ),
        _reasons,
        "kept",
    ),
    "null": Case(
        "`null` of a nullable string",
        _nullable,
        _one_of(null=_called("find", who=None), string=_called("find", who="null")),
        tagged,
        "null",
    ),
    "bare": Case(
        "a number for a string",
        _bare,
        _one_of(string=_called("find", q="10001"), number=_called("find", q=10001)),
        lambda family: tagged(family) or family.write is GEMMA,
        "string",
    ),
    "dotted": Case(
        "a dotted name", _dotted, _one_of(whole=_called("docs.search", q="x")), lambda family: True, "whole"
    ),
}
# By family, or by its renderer or parser. Of an open call, the reference is SGLang's parser of the family.
EXCEPTIONS: Mapping[str, Mapping[str, str]] = {
    f"{prefix}{name}": {"open": "reasoning"}
    for name in ("deepseek-v3", "deepseek-r1", "mistral", "seed-oss", "lfm2")
    for prefix in ("", "default+")
}


# The parsers of reasoning and of tool calls of a family in SGLang, by the name of a renderer or of a `tool_parser`.
SGLANG: Mapping[str, tuple[str | None, str]] = {
    **dict.fromkeys(("qwen3", "qwen3-vl"), ("qwen3", "qwen25")),
    **dict.fromkeys(("qwen3.5", "qwen3.6", "qwen3.8", "prime-qwen3"), ("qwen3", "qwen3_coder")),
    **dict.fromkeys(("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"), ("nemotron_3", "qwen3_coder")),
    "glm-4.5": ("glm45", "glm45"),
    **dict.fromkeys(("glm", "glm-5", "glm-5.1", "glm-5.3"), ("glm45", "glm47")),
    **dict.fromkeys(("laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1"), ("poolside_v1", "poolside_v1")),
    "minimax-m2": ("minimax", "minimax-m2"),
    **dict.fromkeys(("hy3", "hunyuan-a13b"), ("hunyuan", "hunyuan")),
    "deepseek-v3": ("deepseek-v3", "deepseekv3"),
    "deepseek-r1": ("deepseek-r1", "deepseekv3"),
    "deepseek-v4": ("deepseek-v4", "deepseekv4"),
    **dict.fromkeys(("kimi-k2", "kimi-k2.5"), ("kimi_k2", "kimi_k2")),
    "gemma4": ("gemma4", "gemma4"),
    "mistral": ("mistral", "mistral"),
    "lfm2": ("qwen3", "lfm2"),
    "llama-3": (None, "llama3"),
}


# What SGLang 0.5.23 reads instead. In open reasoning, vLLM executes the calls of these three.
SGLANG_DIFFERS: Mapping[tuple[str, str], str] = {
    **dict.fromkeys((("minimax-m2", "open"), ("deepseek-v4", "open"), ("gemma4", "open")), "reasoning"),
    **dict.fromkeys((("hy3", "null"), ("gemma4", "null")), "string"),
    ("gemma4", "bare"): "number",
    **dict.fromkeys(
        (("glm-4.5", "null"), ("default+hunyuan-a13b", "marker"), ("default+hunyuan-a13b", "dotted")), "other"
    ),
}


def parsers(family: Family) -> tuple[str | None, str] | None:
    return SGLANG.get(family.name.removeprefix("default+"))


def expected(family: Family, case: str) -> str:
    """Return the outcome, or "" if the case does not apply."""
    if not CASES[case].applies(family):
        return ""
    return EXCEPTIONS.get(family.name, {}).get(case, CASES[case].usual)


def reading(family: Family, said: str, *, pieces: int = 1) -> Reading:
    """Return a reply as the agent gets it. Fails if the stream in these pieces differs from the whole."""
    bundle, call = family.bundle(), ModelCall("m", [user("Go.")], tools=TOOLS)
    prompt = bundle.render([user("Go.")], TOOLS)
    ids = list(bundle.tokenizer.encode(said + family.end, add_special_tokens=False))
    parsed = bundle.renderer.parse_response(ids, tools=TOOLS, prompt_ids=prompt)
    reply = read_reply(parsed, bundle.decode(ids[:-1]), call, Completion(tuple(ids), ()))
    stream = StreamingParser(bundle, prompt, call)
    sent = []
    for at in range(0, len(ids) - 1, pieces):
        deltas = stream.add(ids[at : min(at + pieces, len(ids) - 1)])
        sent += stream.parse() if stream.tokens_to_parse else deltas
    rest, streamed = stream.end(reply)
    whole, joined = _reading(reply), _reading(streamed)
    assert joined == whole, (joined, whole)
    early = [delta.tool_call["function"] for delta in [*sent, *rest] if delta.kind == "tool_call"]
    assert [(each["name"], json.loads(each["arguments"])) for each in early] == list(whole.calls)
    return whole


def _reading(reply: Choice) -> Reading:
    message = reply.message
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [(function["name"], json.loads(function["arguments"])) for function in functions]
    content, reasoning = message["content"] or "", message.get("reasoning_content") or ""
    return Reading(content.strip(), reasoning.strip(), calls, reply.malformed_tool_calls)


def _cell(family: Family, case: str) -> str:
    theirs = SGLANG_DIFFERS.get((family.name, case))
    return (expected(family, case) or "-") + (f" (SGLang: {theirs})" if theirs else "")


def table() -> list[str]:
    """Return the lines of the page's table."""
    head = ["family", *(case.title for case in CASES.values())]
    rows = [[f"`{family.name}`", *(_cell(family, case) for case in CASES)] for family in FAMILIES]
    return [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]]
