"""What is to be rolled out: one task is one prompt, and a step gives each task a group of rollouts.

A task file is JSONL or parquet. Each line or row has `payload`, an object that goes to the agent as it is, and may
have `task_id`. A file that cannot be read whole is refused, with the line named, before anything starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_wrapper.contract import REQUEST_FIELD, Sampling
from rollout_backend.errors import TaskFileError

MAX_TASK_ID = 100  # leaves room for the rollout's number in a 128-character id


@dataclass(frozen=True)
class Task:
    """One prompt. `payload` goes to the agent verbatim."""

    task_id: str
    payload: Mapping[str, Any]
    rollouts: int | None = None  # default: group.size
    sampling: Sampling | None = None  # default: the settings' sampling

    def __post_init__(self) -> None:
        if not re.fullmatch(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_TASK_ID - 1}}}", self.task_id):
            raise TaskFileError(
                f"task_id {self.task_id!r} must be 1 to {MAX_TASK_ID} letters, digits, '.', '_' or '-', "
                "and begin with a letter or a digit"
            )
        if REQUEST_FIELD in self.payload:
            raise TaskFileError(f"the payload of task {self.task_id!r} must not have a field {REQUEST_FIELD!r}")


def unique(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """The tasks of one step.

    Raises:
        TaskFileError: none at all, or two with one id: their rollouts could not be told apart.
    """
    found: dict[str, Task] = {}
    for task in tasks:
        if task.task_id in found:
            raise TaskFileError(f"task_id {task.task_id!r} occurs twice in one step; ids must differ")
        found[task.task_id] = task
    if not found:
        raise TaskFileError("there is no task to roll out")
    return tuple(found.values())


def read_tasks(path: str | Path) -> tuple[Task, ...]:
    """Reads a whole task file.

    Raises:
        TaskFileError: the file, the line or the row that is at fault, and what is wrong with it.
    """
    tasks = []
    for i, (where, row) in enumerate(read_rows(path)):
        try:
            tasks.append(_task(row, default_id=f"task-{i:05d}"))
        except TaskFileError as error:
            raise TaskFileError(f"{path}, {where}: {error}") from None
    return unique(tasks)


def read_rows(path: str | Path) -> Iterator[tuple[str, object]]:
    """The rows of a .jsonl or .parquet file as they stand, each with the words for where it stands.

    Raises:
        TaskFileError: there is no such file, or the line at fault.
    """
    path = Path(path)
    if not path.is_file():
        raise TaskFileError(f"there is no task file {path}")
    match path.suffix:
        case ".jsonl":
            return _jsonl(path)
        case ".parquet":
            return _parquet(path)
        case other:
            raise TaskFileError(
                f"{path} must be a .jsonl or a .parquet file, not {other or 'a file without a suffix'}"
            )


def _task(row: object, default_id: str) -> Task:
    if not isinstance(row, dict):
        raise TaskFileError("must be an object with a payload")
    unknown = set(row) - {"task_id", "payload"}
    if unknown:
        raise TaskFileError(f"unknown field {sorted(unknown)[0]!r}; what the agent needs goes inside payload")
    payload = row.get("payload")
    if not isinstance(payload, dict):
        raise TaskFileError("payload is missing, or is not an object")
    task_id = row.get("task_id")
    if not isinstance(task_id, str | None):
        raise TaskFileError(f"task_id is {task_id!r}, which is not a text")
    return Task(task_id if task_id is not None else default_id, payload)


def _jsonl(path: Path) -> Iterator[tuple[str, object]]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TaskFileError(f"{path} is not UTF-8: {error}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield f"line {number}", json.loads(line)
        except ValueError as error:
            raise TaskFileError(f"{path}, line {number}: not JSON: {error}") from None


def _parquet(path: Path) -> Iterator[tuple[str, object]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise TaskFileError(f"{path} is not a parquet file: {error}") from None
    for number, row in enumerate(table.to_pylist()):
        # A struct column is the union of all rows' fields; a field that a row lacks reads as null. A column of
        # JSON text keeps each payload as it was written.
        payload = row.get("payload")
        if isinstance(payload, str):
            try:
                row["payload"] = json.loads(payload)
            except ValueError as error:
                raise TaskFileError(f"{path}, row {number}: payload is not JSON: {error}") from None
        yield f"row {number}", row
