"""Reads results in the older text format as rollouts that carry only messages. Pure.

One JSON object under the result's key:

    {"rollout_data": [{"formatted_request": {"messages": [...], "tools": [...]}}, ...],
     "rewards": 1.0, "status_code": 200, "stop_reason": "end_turn", "input_id": "task-a",
     "session_id": "rollout-5d41402abc4b2a76b9719d911017c592", "attempt": 1}

- `rollout_data`: one entry for each model call, with the conversation up to and including the reply. A call that
  continues an earlier one belongs to the same conversation. Only the last message of each call counts as sampled.
- `rewards`: a number, a list of one number, or a list with one number for each call. The last is the reward.
- `status_code`: 200 (default) is a completed rollout. 408, 429, 502, 503 and 504 are infra_error. Others are
  agent_error; 500 is written for any exception that the agent raised.
- `stop_reason`: how the last call ended. If it is not a normal end (`_NORMAL_ENDS`), the rollout is agent_error.
- `input_id`: the task's id or the rollout's id.
- `session_id`, `attempt`: copied from the request, as in the contract's own formats.

Invariants:

- The format is accepted only with `collect.text_format: true`, because it has no seal.
- A failed rollout has no reward, even if `rewards` has a value.
- Malformed input raises `ContractError` with the field's name.

Other fields are kept as extras.
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
    from_fields,
)
from agent_wrapper.contract.codec import unpack
from rollout_backend.core.tasks import task_of

_FIELDS = frozenset({"rollout_data", "rewards", "status_code"})
_NORMAL_ENDS = frozenset({"end_turn", "stop", "stop_sequence", "max_tokens", "length"})
_INFRA = frozenset({408, 429, 502, 503, 504})


def read_result(
    data: bytes, max_bytes: int, *, run_id: str, step: int, rollout_id: str, text_format: bool = False
) -> Rollout:
    """Decode a result in either of the contract's formats, or in the text format, which its fields identify.

    Raises:
        ContractError: names the invalid field.
    """
    fields = unpack(data, max_bytes)
    if "schema_version" in fields or not _FIELDS & fields.keys():
        return from_fields(Rollout, fields, max_bytes)
    if not text_format:
        raise ContractError(
            "object",
            "is in the older text format: set collect.text_format=true to accept it, or write the contract's own "
            "format",
        )
    return read_text_format(fields, run_id=run_id, step=step, rollout_id=rollout_id)


def read_text_format(fields: Mapping[str, Any], *, run_id: str, step: int, rollout_id: str) -> Rollout:
    """Return the rollout of an object in the text format. The ids are those of its key.

    Raises:
        ContractError: names the invalid field.
    """
    rest = dict(fields)
    task_id = task_of(rollout_id)
    if (input_id := rest.pop("input_id", None)) not in (task_id, rollout_id):
        raise ContractError("input_id", f"is {input_id!r} in the result of {rollout_id!r}; write the task's id")
    status, stop = rest.pop("status_code", None), rest.get("stop_reason")
    if not isinstance(status, int | None) or isinstance(status, bool):
        raise ContractError("status_code", f"is {status!r}, which is not a whole number")
    if not isinstance(stop, str | None):
        raise ContractError("stop_reason", f"is {stop!r}, which is not a string")
    turns, rewards = rest.pop("rollout_data", None), rest.pop("rewards", None)
    attempt, session_id = _pop(rest, "attempt"), _pop(rest, "session_id")
    failure = outcome = reward = None
    if status not in (None, 200):
        outcome = Outcome.INFRA_ERROR if status in _INFRA else Outcome.AGENT_ERROR
        failure = Failure(reason="status_code", message=f"the agent wrote status code {status}: {stop}")
    elif stop is not None and stop not in _NORMAL_ENDS:
        outcome = Outcome.AGENT_ERROR
        failure = Failure(reason="stop_reason", message=f"the agent's last model call did not end normally: {stop}")
    else:
        outcome = Outcome.COMPLETED
        reward = _reward(rewards, turns)
    return Rollout.parse(
        {
            "run_id": run_id,
            "step": step,
            "task_id": task_id,
            "rollout_id": rollout_id,
            "attempt": attempt,
            "session_id": session_id,
            "outcome": outcome,
            "reward": reward,
            "failure": failure,
            "extras": rest if failure is None else {**rest, "rewards": rewards},
            "conversations": _conversations(turns) if turns is not None or failure is None else (),
        }
    )


def _pop(rest: dict[str, Any], field: str) -> Any:
    if field not in rest:
        raise ContractError(field, "is missing: copy it from the request")
    return rest.pop(field)


def _reward(rewards: object, turns: object) -> float:
    listed = rewards if isinstance(rewards, list) else [rewards]
    calls = len(turns) if isinstance(turns, list) else 0
    if len(listed) not in (1, calls):
        raise ContractError(
            "rewards", f"has {len(listed)} entries for {calls} model calls; write one, or one for each call"
        )
    checked = [
        _number(reward, f"rewards.{i}" if isinstance(rewards, list) else "rewards") for i, reward in enumerate(listed)
    ]
    return checked[-1]


def _number(value: object, field: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ContractError(field, f"is {str(value)[:100]}, which is not a finite number")
    return float(value)


class _OpenConversation:
    """A conversation that later calls may continue."""

    def __init__(self, tools: list[Any]) -> None:
        self.messages: list[Any] = []
        self.tools = tools
        self.replies: list[int] = []

    def is_continued_by(self, messages: Sequence[Any], tools: list[Any]) -> bool:
        return self.tools == tools and messages[: len(self.messages)] == self.messages

    def extend(self, messages: list[Any]) -> None:
        last = len(messages) - 1
        if messages[last].get("role") == "assistant" and last not in self.replies[-1:]:
            self.replies.append(last)
        self.messages = messages


def _conversations(turns: object) -> tuple[Conversation, ...]:
    if not isinstance(turns, list) or not turns:
        raise ContractError("rollout_data", "is not a list of at least one model call")
    found: list[_OpenConversation] = []
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
        conversation = next((one for one in reversed(found) if one.is_continued_by(messages, tools)), None)
        if conversation is None:
            if len(found) == MAX_CONVERSATIONS:
                raise ContractError("rollout_data", f"holds more than {MAX_CONVERSATIONS} conversations")
            conversation = _OpenConversation(tools)
            found.append(conversation)
        conversation.extend(messages)
    return tuple(
        Conversation.parse(
            {"messages": one.messages, "tools": one.tools, "replies": one.replies},
            f"rollout_data, conversation {i}: ",
        )
        for i, one in enumerate(found)
    )
