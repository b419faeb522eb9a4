"""Pure: results in the older text format, read as rollouts that carry only messages.

One JSON object under the result's key:

    {"rollout_data": [{"formatted_request": {"messages": [...], "tools": [...]}}, ...],
     "rewards": 1.0, "status_code": 200, "stop_reason": "end_turn", "input_id": "task-a"}

- `rollout_data`: one entry for each model call, with the conversation up to and with its reply. A call that goes on
  from an earlier one is one conversation with it; of each call only the last message counts as the model's.
- `rewards`: a number, or a list of one, or of one for each call; the last is the rollout's reward.
- `status_code`: 200, which is also the default, is a completed rollout. 408, 429, 502, 503 and 504 are infra_error.
  Anything else is agent_error: 500 is what is written for whatever the agent raised.
- `stop_reason`: how the last call ended; with one that is no end of a reply (`_ENDS`) the rollout is agent_error.
- `input_id`: the task's id, or the rollout's own.

What must always hold: a rollout that failed has no reward, whatever stands under `rewards`; what is malformed raises
`ContractError` with the field's name. Other fields are kept as extras. The format names neither attempt nor session
nor times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from agent_wrapper.contract import (
    MAX_CONVERSATIONS,
    ContractError,
    Conversation,
    Failure,
    Outcome,
    Rollout,
    read_json,
)

_FIELDS = frozenset({"rollout_data", "rewards", "status_code"})
_ENDS = frozenset({"end_turn", "stop", "stop_sequence", "max_tokens", "length"})
_INFRA = frozenset({408, 429, 502, 503, 504})


def read_result(data: bytes, max_bytes: int, *, run_id: str, step: int, rollout_id: str) -> Rollout:
    """A result in whichever form it was written: the contract's two, or the text format, known by its fields.

    Raises:
        ContractError: names the field at fault.
    """
    fields = _text_fields(data) if len(data) <= max_bytes else None
    if fields is None:
        return Rollout.decode(data, max_bytes)
    return read_text_format(fields, run_id=run_id, step=step, rollout_id=rollout_id)


def read_text_format(fields: Mapping[str, Any], *, run_id: str, step: int, rollout_id: str) -> Rollout:
    """The rollout of a text format object, whose ids are those of the key that it stood under.

    Raises:
        ContractError: names the field at fault.
    """
    rest = dict(fields)
    task_id = rollout_id.rpartition(".")[0] or rollout_id
    if (input_id := rest.pop("input_id", None)) not in (task_id, rollout_id):
        raise ContractError("input_id", f"is {input_id!r} in the result of {rollout_id!r}; write the task's id")
    status, stop = rest.pop("status_code", None), rest.get("stop_reason")
    if not isinstance(status, int | None) or isinstance(status, bool):
        raise ContractError("status_code", f"is {status!r}, which is not a whole number")
    if not isinstance(stop, str | None):
        raise ContractError("stop_reason", f"is {stop!r}, which is not a text")
    turns, rewards = rest.pop("rollout_data", None), rest.pop("rewards", None)
    failure = outcome = reward = None
    if status not in (None, 200):
        outcome = Outcome.INFRA_ERROR if status in _INFRA else Outcome.AGENT_ERROR
        failure = Failure(reason="status_code", message=f"the agent wrote status code {status}: {stop}")
    elif stop is not None and stop not in _ENDS:
        outcome = Outcome.AGENT_ERROR
        failure = Failure(reason="stop_reason", message=f"the agent's last model call did not end, but: {stop}")
    else:
        outcome = Outcome.COMPLETED
        reward = _reward(rewards, turns)
    return Rollout.parse(
        {
            "run_id": run_id,
            "step": step,
            "task_id": task_id,
            "rollout_id": rollout_id,
            "attempt": 1,
            "session_id": "",
            "outcome": outcome,
            "reward": reward,
            "failure": failure,
            "extras": rest if failure is None else {**rest, "rewards": rewards},
            "conversations": _conversations(turns) if turns is not None or failure is None else (),
        }
    )


def _text_fields(data: bytes) -> dict[str, Any] | None:
    """The object's fields if it is of this format."""
    if data.lstrip()[:1] != b"{":
        return None
    fields = read_json(data)
    return fields if isinstance(fields, dict) and "schema_version" not in fields and _FIELDS & fields.keys() else None


def _reward(rewards: object, turns: object) -> float:
    listed = rewards if isinstance(rewards, list) else [rewards]
    calls = len(turns) if isinstance(turns, list) else 0
    if len(listed) not in (1, calls):
        raise ContractError(
            "rewards", f"has {len(listed)} entries for {calls} model calls; wanted 1, or one for each"
        )
    checked = [
        _number(reward, f"rewards.{i}" if isinstance(rewards, list) else "rewards") for i, reward in enumerate(listed)
    ]
    return checked[-1]


def _number(value: object, field: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ContractError(field, f"is {str(value)[:100]}, which is not a finite number")
    return float(value)


class _Open:
    """A conversation that later calls may go on with."""

    def __init__(self, tools: list[Any]) -> None:
        self.messages: list[Any] = []
        self.tools = tools
        self.replies: list[int] = []

    def precedes(self, messages: Sequence[Any], tools: list[Any]) -> bool:
        return self.tools == tools and messages[: len(self.messages)] == self.messages

    def go_on(self, messages: list[Any]) -> None:
        last = len(messages) - 1
        if messages[last].get("role") == "assistant" and last not in self.replies[-1:]:
            self.replies.append(last)
        self.messages = messages


def _conversations(turns: object) -> tuple[Conversation, ...]:
    if not isinstance(turns, list) or not turns:
        raise ContractError("rollout_data", "is not a list of at least one model call")
    found: list[_Open] = []
    for i, turn in enumerate(turns):
        where = f"rollout_data.{i}.formatted_request"
        request = turn.get("formatted_request") if isinstance(turn, dict) else None
        if not isinstance(request, dict):
            raise ContractError(where, "is missing, or is not an object")
        messages, tools = request.get("messages"), request.get("tools") or []
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise ContractError(f"{where}.messages", "is not a list of at least one message")
        if not isinstance(tools, list):
            raise ContractError(f"{where}.tools", "is not a list")
        conversation = next((one for one in reversed(found) if one.precedes(messages, tools)), None)
        if conversation is None:
            if len(found) == MAX_CONVERSATIONS:
                raise ContractError("rollout_data", f"holds more than {MAX_CONVERSATIONS} conversations")
            conversation = _Open(tools)
            found.append(conversation)
        conversation.go_on(messages)
    return tuple(
        Conversation.parse(
            {"messages": one.messages, "tools": one.tools, "replies": one.replies},
            f"rollout_data, conversation {i}: ",
        )
        for i, one in enumerate(found)
    )
