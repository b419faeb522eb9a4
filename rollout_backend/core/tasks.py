"""Read tasks and task files. A task is one prompt; a step runs a group of rollouts of each task.

A task file is JSONL or Parquet. Each line or row has `payload`, an object that the agent receives unchanged, and
optionally `task_id`, `priority`, and `private`, an object that only the training side's scorer receives. A file with
an invalid line, or with a payload that cannot reach an agent, is refused before anything starts, and the error names
the line. Instead of a file, `harbor:FOLDER` names a folder of Harbor tasks; `harbor-supported:FOLDER` leaves out
tasks that cannot run.
"""

import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

from agent_wrapper.contract.codec import MAX_DEPTH
from rollout_backend.config import GroupConfig, RuntimeConfig
from rollout_backend.core.harbor import PREFIX, SUPPORTED_PREFIX, VERIFIER, read_harbor_tasks
from rollout_backend.core.task import MAX_TASK_ID as MAX_TASK_ID
from rollout_backend.core.task import Task as Task
from rollout_backend.errors import ConfigError, TaskFileError

log = logging.getLogger(__name__)

_ROLLOUT_ID = re.compile(r"(.+)\.([0-9]+)(\.g[0-9]+)?")


def planned_rollouts(tasks: Iterable[Task], group: GroupConfig) -> int:
    """Return the number of rollouts that a step plans."""
    return sum((task.rollouts or group.size) + group.oversample for task in tasks)


def rollout_id(task_id: str, number: int, generation: int = 0) -> str:
    """Return the id of a task's rollout. See `Manifest.generation`.

    The id ends in a number or in the generation, so that the rollouts of two tasks never share an id.
    """
    return f"{task_id}.{number}" + (f".g{generation}" if generation else "")


def sibling_id(rollout_id: str, number: int) -> str:
    """Return the id of another rollout of the same group."""
    match = _ROLLOUT_ID.fullmatch(rollout_id)
    assert match is not None, f"{rollout_id!r} is not the id of a rollout"
    return f"{match[1]}.{number}{match[3] or ''}"


def task_of(rollout_id: str) -> str:
    """Return the id of the task of a rollout; empty if this is not the id of a rollout."""
    match = _ROLLOUT_ID.fullmatch(rollout_id)
    return match[1] if match is not None else ""


def planned_id(rollout_id: str) -> str:
    """Return the id that the rollout had before the trainer was restarted."""
    match = _ROLLOUT_ID.fullmatch(rollout_id)
    return rollout_id.removesuffix(match[3] or "") if match is not None else rollout_id


def check_private(tasks: Iterable[Task], scored: bool) -> None:
    """Raise ConfigError if a task has a private part but no scorer is configured (`scored`) to read it."""
    given = next((task for task in tasks if task.private is not None), None)
    if given is not None and not scored:
        if "harbor" in (given.private or {}):
            raise ConfigError(f"task {given.task_id!r} is scored by its tests: set scoring.function={VERIFIER}")
        raise ConfigError(
            f"task {given.task_id!r} has a private part, which only a scorer receives: set scoring.function or "
            "scoring.command, or remove it"
        )


def check_unique(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """Check that the ids of a step's tasks are unique, and return the tasks.

    Raises:
        TaskFileError: there are no tasks, or two have the same id, so that their rollouts could not be distinguished.
    """
    found: dict[str, Task] = {}
    for task in tasks:
        if task.task_id in found:
            raise TaskFileError(f"task_id {task.task_id!r} occurs twice in one step; ids must differ")
        found[task.task_id] = task
    if not found:
        raise TaskFileError("there is no task to roll out")
    return tuple(found.values())


def read_tasks(path: str | Path, runtime: RuntimeConfig | None = None) -> tuple[Task, ...]:
    """Read a whole task file. Harbor tasks must be able to run, on `runtime` if it is given; `harbor-supported:`
    leaves out the others.

    Raises:
        TaskFileError: names the file and the invalid line or row, and says what is wrong.
    """
    tasks, places = [], dict[str, str]()
    for i, (where, row) in enumerate(read_rows(path, runtime)):
        try:
            task = _task(row, default_id=f"task-{i:05d}")
            if (first := places.setdefault(task.task_id, where)) != where:
                raise TaskFileError(f"task_id {task.task_id!r} occurs twice, first in {first}; ids must differ")
        except TaskFileError as error:
            raise TaskFileError(f"{path}, {where}: {error}") from None
        tasks.append(task)
    return check_unique(tasks)


def read_rows(path: str | Path, runtime: RuntimeConfig | None = None) -> Iterator[tuple[str, object]]:
    """Yield the rows of a .jsonl or .parquet file, or of `harbor:FOLDER`, each with its location for error messages.

    Raises:
        TaskFileError: the file does not exist, or a line is invalid.
    """
    for prefix in (PREFIX, SUPPORTED_PREFIX):
        if str(path).startswith(prefix):
            return read_harbor_tasks(Path(str(path).removeprefix(prefix)), prefix == SUPPORTED_PREFIX, runtime)
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
    unknown = set(row) - {"task_id", "payload", "private", "priority"}
    if unknown:
        raise TaskFileError(
            f"unknown field {sorted(unknown)[0]!r}; what the agent needs goes inside payload, what only "
            "a scorer needs inside private"
        )
    payload = row.get("payload")
    if not isinstance(payload, dict):
        raise TaskFileError("payload is missing, or is not an object")
    task_id = row.get("task_id")
    if not isinstance(task_id, str | None):
        raise TaskFileError(f"task_id is {task_id!r}, which is not a string")
    private = row.get("private")
    if not isinstance(private, dict | None):
        raise TaskFileError("private is not an object")
    return Task(task_id if task_id is not None else default_id, payload, priority=priority_of(row), private=private)


def priority_of(row: Mapping[str, Any]) -> int:
    """Return the priority in a task's row; 0 if it has none. Raises TaskFileError."""
    value = row.get("priority")
    # Pandas writes integers next to a null as floats, and the null as NaN.
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return 0
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TaskFileError(f"priority is {value!r}, and must be a whole number; a higher one starts first")
    return int(value)


def read_json(text: str) -> Any:
    """Parse JSON. Raises ValueError also for duplicate keys and for nesting that Python cannot read."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError(f"it is nested too deep; agents are given {MAX_DEPTH} levels at most") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice in one object")
    return found


class _Nulls:
    """Finds fields that are null in some rows and set in others, because dataset libraries add such nulls."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._null: set[str] = set()
        self._given: set[str] = set()

    def add(self, value: object, place: str) -> None:
        todo = [(value, place)]
        while todo:
            value, place = todo.pop()
            (self._null if value is None else self._given).add(place)
            if isinstance(value, dict):
                todo += [(each, f"{place}.{key}") for key, each in value.items()]
            elif isinstance(value, list):
                todo += [(each, f"{place}[]") for each in value]

    def warn(self) -> None:
        if filled := sorted(self._null & self._given):
            names = ", ".join(filled[:5]) + (f" and {len(filled) - 5} more" if len(filled) > 5 else "")
            log.warning(
                "%s: %s: null in some rows, with a value in others. Dataset libraries add a null for each field that "
                "a row lacks, and agents and scorers get it. To keep each row as it was, remove these nulls, or "
                "write payload and private to Parquet as JSON text",
                self._path,
                names,
            )


def _jsonl(path: Path) -> Iterator[tuple[str, object]]:
    nulls = _Nulls(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TaskFileError(f"{path} is not UTF-8: {error}") from None
    # `splitlines` would also split at U+2028, U+2029 and U+0085, which JSON strings may contain.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = read_json(line)
        except ValueError as error:
            raise TaskFileError(f"{path}, line {number}: not JSON: {error}") from None
        if isinstance(row, dict):
            for column in ("payload", "private"):
                nulls.add(row.get(column), column)
        yield f"line {number}", row
    nulls.warn()


def _parquet(path: Path) -> Iterator[tuple[str, object]]:
    import pyarrow
    import pyarrow.parquet

    try:
        # PyArrow takes a relative path with a colon for a URL.
        table = pyarrow.parquet.read_table(path.absolute())
    except (pyarrow.ArrowException, OSError) as error:
        raise TaskFileError(f"{path} is not a parquet file: {error}") from None
    for each in table.schema:
        # PyArrow reads maps as lists of pairs.
        if "map<" in str(each.type):
            raise TaskFileError(f"{path}: the column {each.name} holds maps of Parquet: write it as JSON text")
    try:
        rows = table.to_pylist()
    except (ArithmeticError, LookupError, ValueError, pyarrow.ArrowException) as error:
        raise TaskFileError(f"{path} has a string, time or time zone that cannot be read: {error}") from None
    nulls = _Nulls(path)
    for number, row in enumerate(rows):
        # A struct column has the fields of all rows, and a field that a row lacks is read as null. A column of JSON
        # strings keeps each payload as it was written.
        for column in ("payload", "private"):
            value = row.get(column)
            if not isinstance(value, str):
                nulls.add(value, column)
                continue
            try:
                row[column] = read_json(value)
            except ValueError as error:
                raise TaskFileError(f"{path}, row {number}: {column} is not JSON: {error}") from None
        yield f"row {number}", row
    nulls.warn()
