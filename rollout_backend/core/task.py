"""Define a task: one prompt."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agent_wrapper.contract import REQUEST_FIELD, Sampling
from agent_wrapper.contract.codec import MAX_DEPTH
from agent_wrapper.shared.json_values import check_json_value
from rollout_backend.errors import TaskFileError

# A rollout id has at most 128 characters and also contains the rollout's number.
MAX_TASK_ID = 100


@dataclass(frozen=True)
class Task:
    """One prompt. `payload` goes to the agent verbatim; `private` goes to the scorer and never to a container."""

    task_id: str
    payload: Mapping[str, Any]
    rollouts: int | None = None
    """Default: `group.size`."""
    sampling: Sampling | None = None
    """Default: the configured sampling."""
    priority: int = 0
    """Rollouts of tasks with a higher priority start first, of all that wait in the run."""
    private: Mapping[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        shape = rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_TASK_ID - 1}}}"
        if not (isinstance(self.task_id, str) and re.fullmatch(shape, self.task_id)):
            raise TaskFileError(
                f"task_id {self.task_id!r} must be 1 to {MAX_TASK_ID} letters, digits, '.', '_' or '-', "
                "and begin with a letter or a digit"
            )
        if self.rollouts is not None and not (isinstance(self.rollouts, int) and self.rollouts >= 1):
            raise TaskFileError(f"task {self.task_id!r} has rollouts={self.rollouts!r}: it must be an int from 1 on")
        if type(self.priority) is not int:
            raise TaskFileError(f"task {self.task_id!r} has priority={self.priority!r}: it must be an int")
        if REQUEST_FIELD in self.payload:
            raise TaskFileError(f"the payload of task {self.task_id!r} must not have a field {REQUEST_FIELD!r}")
        try:
            check_json_value(dict(self.payload), "payload", MAX_DEPTH)
        except ValueError as error:
            raise TaskFileError(f"task {self.task_id!r} cannot reach an agent: {error}") from None
        try:
            check_json_value(dict(self.private or {}), "private", MAX_DEPTH)
        except ValueError as error:
            raise TaskFileError(f"task {self.task_id!r} cannot reach a scorer: {error}") from None

    @property
    def agent_s(self) -> float | None:
        """Return the agent's time limit from task.toml, if it has one."""
        limit: float | None = (self.private or {}).get("harbor", {}).get("agent_timeout_s")
        return limit

    def as_row(self) -> dict[str, Any]:
        """Return the task as a row of a task file."""
        more = {"private": self.private and dict(self.private), "priority": self.priority or None}
        given = {name: value for name, value in more.items() if value is not None}
        return {"task_id": self.task_id, "payload": dict(self.payload), **given}
