"""Reads messages in the OpenAI format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from agent_wrapper.contract import Segment


def replies_by_turn(segment: Segment) -> dict[int, int]:
    """Return the index of the message that each turn sampled; empty if the messages do not hold them all."""
    replies = [i for i, message in enumerate(segment.messages) if message.get("role") == "assistant"]
    turns = len(segment.turns)
    # The last replies are the sampled ones; earlier ones were given.
    return dict(enumerate(replies[-turns:])) if 0 < turns <= len(replies) else {}


def text_of(content: object) -> str:
    """Return the text of a message's content. Other parts are named, such as `[image_url]`."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "\n".join(map(_text_of_part, content))
    return json.dumps(content, ensure_ascii=False) if content else ""


def _text_of_part(part: object) -> str:
    if isinstance(part, Mapping):
        return part["text"] if isinstance(part.get("text"), str) else f"[{part.get('type', 'part')}]"
    return str(part)
