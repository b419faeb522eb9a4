"""Store content that several segments share only once.

An agent that rewrites its history (masks old tool results or drops old messages) opens a segment with each model
call. If each were stored in full, the size of the result would grow quadratically.

In both encodings, a segment may have the field `shared`:

- `segment` and `tokens`: its first `tokens` tokens are those of an earlier segment, all from prompts: their mask is 0
  and their logprobs are NaN. `token_ids`, `response_mask` and `logprobs` hold only the rest.
- `messages`: the indices of its messages among all messages stored by this and earlier segments, in order. The
  segment's own `messages` holds only those that no earlier segment stores.

Invariant: the size of the expanded segments is checked before they are built.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent_wrapper.contract.codec import ContractError, ExpandedBeyondCap

# Only this many of the latest segments are compared.
_CANDIDATES = 8
_LEAST_TOKENS = 16
TOKEN_BYTES = 9
"""Bytes of an id, a mask and a logprob."""
_UNKNOWN = array("f", [float("nan")])


class CheckedMessages(tuple[dict[str, Any], ...]):
    """Messages that were validated before. Several segments may share the objects."""

    __slots__ = ()


def add_to_schema(schema: dict[str, Any]) -> None:
    """Add the encoded field to the JSON schema of a segment."""
    number = {"type": "integer", "minimum": 0}
    fields = {"segment": number, "tokens": number, "messages": {"type": "array", "items": number}}
    schema["properties"]["shared"] = {
        "type": "object",
        "properties": fields,
        "required": [*fields],
        "additionalProperties": False,
    }


def share(segments: Sequence[Any]) -> list[dict[str, Any]]:
    """Return, for each segment, the fields that are stored in place of its own."""
    # The numbers of the stored messages, by their JSON.
    numbers: dict[str, int] = {}
    # The JSON of messages, by the id of the object.
    known: dict[int, str] = {}
    ids: list[bytes] = []
    stored = []
    for segment in segments:
        texts = [known.get(id(each)) or known.setdefault(id(each), json.dumps(each)) for each in segment.messages]
        count = len(numbers)
        own = [each for each, text in zip(segment.messages, texts, strict=True) if _add(numbers, text)]
        places = [numbers[text] for text in texts]
        ids.append(segment.token_ids.tobytes())
        source, tokens = _prefix(ids, segment)
        fields: dict[str, Any] = {"messages": own}
        if tokens or places != [*range(count, count + len(own))]:
            fields |= {
                "token_ids": segment.token_ids[tokens:],
                "response_mask": segment.response_mask[tokens:],
                "logprobs": segment.logprobs[tokens:],
                "shared": {"segment": source, "tokens": tokens, "messages": array("i", places)},
            }
        stored.append(fields)
    return stored


def _add(numbers: dict[str, int], text: str) -> bool:
    """Assign the next number to a string. Return False if it already has one."""
    count = len(numbers)
    return numbers.setdefault(text, count) == count


def _prefix(ids: Sequence[bytes], segment: Any) -> tuple[int, int]:
    """Return the earlier segment that shares the most prompt tokens with the last one of `ids`, and their number."""
    given = segment.turns[0].start if segment.turns else 0
    if segment.logprobs[:given].tobytes() != (_UNKNOWN * given).tobytes():
        return 0, 0
    own = ids[-1][: 4 * given]
    # `shared` counts bytes.
    source, shared = 0, 0
    for i in range(len(ids) - 2, max(-1, len(ids) - 2 - _CANDIDATES), -1):
        longest = min(len(own), len(ids[i]))
        if longest <= shared or ids[i][: shared + 4] != own[: shared + 4]:
            continue
        # The first `low` bytes are equal.
        low, high = shared + 4, longest
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if ids[i][low:middle] == own[low:middle] else (low, middle - 1)
        source, shared = i, low // 4 * 4
    return (source, shared // 4) if shared >= 4 * _LEAST_TOKENS else (0, 0)


def expand(
    segments: object,
    max_bytes: int,
    parsers: Mapping[str, Callable[[object], array[Any]]],
    check_messages: Callable[[object], tuple[dict[str, Any], ...]],
) -> None:
    """Replace the fields of segments that share something with the complete fields.

    Args:
        segments: The decoded field; anything other than a list of maps is left unchanged.
        max_bytes: The limit for all expanded segments together.
        parsers: Return the arrays of `token_ids`, `response_mask`, `logprobs` and `shared`. Raise ValueError.
        check_messages: Returns validated messages. Raises ValueError.

    Raises:
        ContractError: a field is invalid, or the size exceeds the limit.
    """
    if not isinstance(segments, list) or not all(isinstance(each, dict) for each in segments):
        return
    if not any("shared" in each for each in segments):
        return
    pool: list[dict[str, Any]] = []
    size = 0
    for i, segment in enumerate(segments):
        shared = segment.pop("shared", None)
        try:
            own = check_messages(segment.get("messages", ()))
            arrays = {name: parsers[name](segment.get(name)) for name in ("token_ids", "response_mask", "logprobs")}
            size += len(arrays["token_ids"]) * TOKEN_BYTES
            pool += own
            messages = own
            if shared is not None:
                source, tokens, places = _read(shared, segments, i, parsers["shared"], len(pool))
                size += tokens * TOKEN_BYTES + len(places) * 8
                if size > max_bytes:
                    reason = f"{size} bytes are shared so far, more than the cap of {max_bytes}"
                    raise ExpandedBeyondCap(f"segments.{i}", reason)
                arrays["token_ids"] = source[:tokens] + arrays["token_ids"]
                arrays["response_mask"] = array("B", bytes(tokens)) + arrays["response_mask"]
                arrays["logprobs"] = _UNKNOWN * tokens + arrays["logprobs"]
                messages = tuple(pool[place] for place in places)
        except ContractError:
            raise
        except ValueError as error:
            raise ContractError(f"segments.{i}", str(error)) from None
        segment.update(arrays, messages=CheckedMessages(messages))


def _read(
    shared: object,
    segments: Sequence[Mapping[str, Any]],
    before: int,
    parse: Callable[[object], array[Any]],
    known: int,
) -> tuple[array[Any], int, array[Any]]:
    """Return the token ids of the earlier segment, the number of shared tokens, and the numbers of the messages."""
    if not isinstance(shared, dict) or shared.keys() != {"segment", "tokens", "messages"}:
        raise ValueError("shared must have segment, tokens and messages")
    number, tokens, places = shared["segment"], shared["tokens"], parse(shared["messages"])
    if type(number) is not int or type(tokens) is not int or tokens < 0 or number < 0:
        raise ValueError("shared.segment and shared.tokens must be whole numbers")
    if tokens and number >= before:
        raise ValueError(f"shared.segment is {number}, which is not an earlier segment")
    source = segments[number]["token_ids"] if tokens else array("i")
    if tokens > len(source):
        raise ValueError(f"shared.tokens is {tokens}, and segment {number} has {len(source)}")
    if places and not (min(places) >= 0 and max(places) < known):
        raise ValueError(f"shared.messages names a message that is not among the first {known}")
    return source, tokens, places
