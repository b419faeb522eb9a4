"""Add the names of the called tools to tool results: some templates render them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]


def with_tool_names(messages: Sequence[Message], start: int = 0) -> list[Message]:
    """Return the messages from `start` on, each tool result with the name of the tool whose call it answers.

    That is the latest call with its id before it. A result whose call is not among the messages is not changed.
    """
    return [with_tool_name(messages, i) for i in range(start, len(messages))]


def with_tool_name(messages: Sequence[Message], i: int) -> Message:
    """Return message `i`; if it is a tool result, with the name of the tool."""
    message = messages[i]
    if message["role"] != "tool" or "name" in message:
        return message
    call_id = message.get("tool_call_id")
    for before in reversed(range(i)):
        for call in reversed(messages[before].get("tool_calls") or ()):
            if call.get("id") == call_id:
                return {"name": call["function"]["name"], **message}
    return message
