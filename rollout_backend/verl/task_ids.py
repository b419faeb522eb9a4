"""Name the tasks of verl's batches after the rows of the dataset, because verl draws new uids in each step. Pure.

Invariants:

- A row has the same task id in each step, each epoch and each run.
- No two tasks of a batch have the same id.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from rollout_backend.core.tasks import MAX_TASK_ID

_INVALID = re.compile(r"^[^A-Za-z0-9]+|[^A-Za-z0-9._-]+")
_LONGEST = MAX_TASK_ID - 16  # leaves room for a number and for the suffix of a greedy rollout


def task_id_of(row: Mapping[str, Any], payload: Mapping[str, Any]) -> str:
    """Return the row's `task_id`, or `task-` and a digest of the payload if it has none.

    Characters that an id cannot have are replaced, and a digest keeps different ids different.
    """
    given = row.get("task_id")
    if given is None:
        text = json.dumps(payload, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return f"task-{_digest(text)}"
    name = _INVALID.sub("-", str(given)).strip("-")[:_LONGEST]
    return name if name and name == str(given) else f"{name[: _LONGEST - 13] or 'task'}-{_digest(str(given))}"


class TaskIds:
    """The ids of the tasks of one batch, by verl's uids."""

    def __init__(self) -> None:
        self._by_uid: dict[str, str] = {}
        self._taken: set[str] = set()

    def of(self, row: Mapping[str, Any], payload: Mapping[str, Any]) -> str:
        """Return the id of a row's task. If a batch has a row of the dataset twice, the second one gets a number."""
        uid = str(row["uid"])
        if uid not in self._by_uid:
            name = unique = task_id_of(row, payload)
            number = 1
            while unique in self._taken:
                number += 1
                unique = f"{name}-{number}"
            self._taken.add(unique)
            self._by_uid[uid] = unique
        return self._by_uid[uid]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
