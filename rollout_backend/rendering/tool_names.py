"""Add the names of the called tools to tool results: some templates render them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]


def with_tool_names(messages: Sequence[Message]) -> list[Message]:
    """Return the messages, each tool result with the name of the tool whose call it answers.

    A result whose call is not among the messages is not changed.
    """
    names = {
        call.get("id"): call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()
    }
    return [
        {"name": names[message.get("tool_call_id")], **message}
        if message["role"] == "tool" and message.get("tool_call_id") in names
        else message
        for message in messages
    ]
