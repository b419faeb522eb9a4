"""Build the assistant's message from a parsed reply. Pure.

Invariants:

- No sampled text is lost. A malformed tool call is returned as text, and so is any call if no tools were offered.
- With `parallel_tool_calls` false, the agent gets only the first call. The other calls were sampled, so they are
  counted and stay in the tokens that are trained and that the conversation continues from.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from rollout_backend.core.model_call import Choice, Message

_OK_STATUSES = frozenset({"ok", "unknown_tool"})  # the agent itself reports a tool that does not exist
_CLOSED_REASONING = re.compile(
    r"\A\s*(<think[^<>\s]*>\s*)?</think[^<>\s]*>\s*"
)  # remains of reasoning markup in the text


def read_reply(
    parsed: Any,
    text: str,
    *,
    sampled_tokens: int = 0,
    finish_reason: str,
    matched_stop: str | None = None,
    tools_offered: bool = False,
    parallel: bool = True,
) -> Choice:
    """Build the message from a `renderers.ParsedResponse`. `text` is the whole completion without its end token."""
    content, reasoning = content_and_reasoning(parsed, text, tools_offered)
    calls, malformed = [], 0
    for call in parsed.tool_calls if tools_offered else ():
        if is_complete(call):
            calls.append(tool_call(call))
        else:
            malformed += 1
            if call.raw not in content:
                content = f"{content}\n{call.raw}" if content else call.raw
    if matched_stop is not None:
        if content:
            content = _before(matched_stop, content)
        elif not calls:  # the stop string ended the reasoning
            reasoning = _before(matched_stop, reasoning)
    kept = calls if parallel else calls[:1]
    reason: Any = "tool_calls" if calls and finish_reason == "stop" else finish_reason
    return Choice(
        message(content, reasoning, kept),
        reason,
        sampled_tokens,
        matched_stop,
        malformed_tool_calls=malformed,
        extra_tool_calls=len(calls) - len(kept),
    )


def message(content: str, reasoning: str, calls: list[dict[str, Any]]) -> Message:
    made: Message = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning:
        made["reasoning_content"] = reasoning
    if calls:
        made["tool_calls"] = calls
    return made


def content_and_reasoning(parsed: Any, text: str, tools_offered: bool) -> tuple[str, str]:
    """Return content and reasoning, before stop strings and malformed calls are applied."""
    reasoning: str = parsed.reasoning_content or ""
    calls = parsed.tool_calls
    if tools_offered or not calls:
        return parsed.content, reasoning
    if parsed.reasoning_content is None:
        return text, reasoning
    text = text.partition(reasoning)[2] if reasoning else text
    begin = text.find(parsed.content) if parsed.content else -1
    if 0 <= begin < text.find(calls[0].raw):
        return text[begin:], reasoning
    return _CLOSED_REASONING.sub("", text), reasoning


def _before(stop: str, text: str) -> str:
    """Return `text` without the stop string that ended it. The parser may have stripped whitespace from either."""
    if stop in text:
        return text.partition(stop)[0]
    if text == stop.strip() or (stop.strip() and text.startswith(stop.lstrip())):
        return ""
    return text.removesuffix(stop.rstrip())


def is_complete(call: Any) -> bool:
    return str(call.status) in _OK_STATUSES and bool(call.name)


def tool_call(call: Any) -> dict[str, Any]:
    arguments = call.arguments if call.arguments is not None else {}
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call.id or f"call_{uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def logprob_entry(token: bytes, logprob: float | None) -> Mapping[str, Any]:
    """Return one token in the format of OpenAI's chat API. A token may be only part of a character."""
    known = logprob is not None and math.isfinite(logprob)
    return {
        "token": token.decode(errors="replace"),
        "logprob": logprob if known else None,
        "bytes": list(token),
        "top_logprobs": [],
    }
