"""Compare messages as rendered, and find which part of a sampled reply an agent sent back. Pure.

Invariants:

- These differences are ignored: text parts or a string, None or "", whitespace at the ends of a reply, the spacing of
  a tool call's arguments, the order of their keys, how a number is written (JavaScript writes 1.0 as 1), defaults of
  the tool's schema filled in, tool call ids that the template does not render, and fields that no template renders.
- Reasoning is not compared, whether it is a field or markup before the content, because most agents do not send it
  back. It only distinguishes equal replies, and is all that is left of a reply that was cut in its reasoning.
- An agent read the beginning of a reply if it sends back the beginning of its content, or all of its content and the
  first of its calls. That part ends at the token that completes it, as at a stop string.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from rollout_backend.model.dialects.base import to_json
from rollout_backend.model.rendering.reasoning import OTHER_MARKERS, THINK, split

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None
Defaults = Mapping[str, Mapping[str, Any]]
"""The defaults of each tool's arguments."""

# No encoder fails on a call's arguments of this depth.
_MAX_DEPTH = 200
_INT64, _EXACT_DIGITS = 2**63, 22
_MARKERS = (THINK, *OTHER_MARKERS)


def compared(message: Message, defaults: Defaults, *, with_ids: bool) -> list[object]:
    """Return the compared parts of a message, as JSON."""
    answers = message.get("tool_call_id") if with_ids else None
    content = message.get("content") or ""
    if message["role"] == "assistant" and isinstance(content, str):
        content = _without_markup(content, closed=True)[1]
    calls = _calls(message, defaults, with_ids=with_ids)
    return [message["role"], content, message.get("name"), answers, calls]


def reasoning_of(message: Message) -> str:
    return (message.get("reasoning_content") or "").strip()


def _calls(message: Message, defaults: Defaults, *, with_ids: bool) -> list[list[object]]:
    return [
        [
            call.get("id") if with_ids else None,
            function["name"],
            _arguments(function["arguments"], defaults.get(function["name"], {})),
        ]
        for call in message.get("tool_calls") or ()
        if (function := call["function"])
    ]


def _without_markup(content: str, *, closed: bool = False) -> tuple[str, str]:
    """Return the reasoning at the start of a content, and the rest. `closed` ignores reasoning without an end."""
    for markers in _MARKERS:
        reasoning, end = split(content, markers, opened=False) or ("", None)
        if end is not None:
            return reasoning.strip(), content[end:].strip()
        if reasoning and not closed:
            return reasoning.strip(), ""
    return "", content.strip()


# --- parts of replies ---------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """The compared parts of a reply or of its beginning."""

    reasoning: str
    content: str
    calls: list[list[object]]

    @classmethod
    def of(cls, message: Message, defaults: Defaults) -> _Part | None:
        content = message.get("content") or ""
        if not isinstance(content, str):
            return None
        return cls(reasoning_of(message), content.strip(), _calls(message, defaults, with_ids=False))

    def begins(self, whole: _Part) -> bool:
        """Return whether these are the first words and calls of `whole`."""
        if not self.content and not self.calls:
            return bool(self.reasoning) and whole.reasoning.startswith(self.reasoning)
        return whole.content.startswith(self.content) and whole.calls[: len(self.calls)] == self.calls

    def is_all_of(self, whole: _Part) -> bool:
        if not whole.content and not whole.calls:
            return self == whole
        return (self.content, self.calls) == (whole.content, whole.calls)


def begins(back: Message, said: Message, defaults: Defaults) -> bool:
    """Return whether the message `back` is the beginning of the reply `said`."""
    whole = _Part.of(said, defaults)
    return whole is not None and _sent_back(back, whole, defaults) is not None


def count_tokens_read(
    back: Message, tokens: int, read: Callable[[int, bool], Message], decode: Callable[[int], str], defaults: Defaults
) -> int | None:
    """Return how many of a reply's tokens the agent sent back as the message `back`; None if it sent something else.

    `read` returns the message of the first tokens, with or without a word after them, and `decode` their text.
    """
    whole = _Part.of(read(tokens, False), defaults)
    part = None if whole is None else _sent_back(back, whole, defaults)
    if whole is None or part is None:
        return None
    if part.is_all_of(whole):
        return tokens

    def is_read(n: int) -> bool:
        # A word after an open call would belong to it.
        said = _Part.of(read(n, bool(part.calls)), defaults)
        # Some parsers return reasoning as content until it is closed.
        return said is not None and part.begins(said) and bool(said.reasoning or not whole.reasoning)

    few, end = 0, tokens
    while end - few > 1:
        middle = (few + end) // 2
        few, end = (few, middle) if is_read(middle) else (middle, end)
    said = _Part.of(read(end, False), defaults)
    if said is None or said.calls != part.calls or (part.calls and said.content != part.content):
        return None
    # Keep as many blanks as the agent did.
    content = back.get("content") or ""
    text = decode(end).rstrip()
    length = len(text) + len(content) - len(content.rstrip())
    while end < tokens and len(decode(end)) < length and decode(end + 1).rstrip() == text:
        end += 1
    return end


def _sent_back(back: Message, whole: _Part, defaults: Defaults) -> _Part | None:
    """Return the beginning of `whole` that the agent sent back; None if it sent something else."""
    sent = _Part.of(back, defaults)
    if sent is None:
        return None
    return next((part for part in _readings(sent, whole.reasoning) if part.begins(whole)), None)


def _readings(sent: _Part, reasoning: str) -> Iterator[_Part]:
    """Yield a message, and its variants without the reasoning that its content shows, with or without markup."""
    yield sent
    marked, content = _without_markup(sent.content)
    if marked or content != sent.content:
        yield sent._replace(reasoning=marked, content=content)
    if reasoning and sent.content.startswith(reasoning):
        rest = sent.content[len(reasoning) :].lstrip()
        for _, close in _MARKERS:
            rest = rest.removeprefix(close).lstrip()
        yield sent._replace(reasoning=reasoning, content=rest)
    elif sent.content and reasoning.startswith(sent.content):
        yield sent._replace(reasoning=sent.content, content="")


# --- arguments ----------------------------------------------------------------------------------------------------


def _arguments(text: str, defaults: Mapping[str, Any]) -> object:
    """Parse arguments and remove defaults: agents that validate a call send it back with them filled in."""
    try:
        value = _ARGUMENTS.decode(text)
        if text.count("{") + text.count("[") > _MAX_DEPTH:
            # A value that orjson cannot encode may exceed the interpreter's stack in the digest.
            orjson.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return text
    if isinstance(value, dict):
        return [
            {
                name: item
                for name, item in value.items()
                if name not in defaults or (type(item), item) != (type(defaults[name]), defaults[name])
            }
        ]
    return [value]


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number of JSON")
    return int(number) if number.is_integer() and -_INT64 <= number < _INT64 else number


def _integer(text: str) -> float | str:
    """Return an integer in a form that is cheap to digest: orjson takes 64 bits, and `json` is many times slower.

    JavaScript writes floats below 1e21 without an exponent.
    """
    if len(text) > _EXACT_DIGITS:
        return f"int:{text}"
    number = int(text)
    if -_INT64 <= number < _INT64:
        return number
    return float(number) if int(float(number)) == number else f"int:{text}"


_ARGUMENTS = json.JSONDecoder(parse_float=_number, parse_int=_integer, parse_constant=_number)


def defaults_of(tools: Tools) -> Defaults:
    """Return the defaults in the tools' schemas."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools or ():
        parameters = tool["function"].get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        found[tool["function"]["name"]] = {
            name: _ARGUMENTS.decode(to_json(schema["default"]).decode())
            for name, schema in (properties.items() if isinstance(properties, Mapping) else ())
            if isinstance(schema, Mapping) and "default" in schema
        }
    return found
