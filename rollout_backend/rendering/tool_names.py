"""Add the names of called tools to tool results, because some templates render them."""

from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]


def with_tool_names(messages: Sequence[Message], start: int = 0) -> list[Message]:
    """Return the messages from `start` on, with the called tool's name added to each tool result.

    The name comes from the latest earlier call with the result's id. A result without such a call is not changed.
    """
    return [with_tool_name(messages, i) for i in range(start, len(messages))]


def with_tool_name(messages: Sequence[Message], i: int) -> Message:
    """Return message `i`, with the tool's name if it is a tool result."""
    message = messages[i]
    if message["role"] != "tool" or "name" in message:
        return message
    call_id = message.get("tool_call_id")
    for before in reversed(range(i)):
        for call in reversed(messages[before].get("tool_calls") or ()):
            if call.get("id") == call_id:
                return {"name": call["function"]["name"], **message}
    return message
