"""Read a row of verl's batches or of its own dataset: the payload, the scorer's part and the task id.

Tasks are named after rows, because verl draws new uids in each step: a row has the same task id in each step, each
epoch and each run, and no two tasks of a batch have the same id.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from agent_wrapper.contract.codec import MAX_DEPTH
from rollout_backend.base.names import derived_name
from rollout_backend.core.tasks import MAX_TASK_ID, Task, priority_of, read_json, read_rows
from rollout_backend.errors import TaskFileError

# Leave room for a number and for the suffix of a greedy rollout.
_LONGEST_ID = MAX_TASK_ID - 16
# The payload includes these columns of verl's own dataset.
_COPIED = ("data_source", "task_id")


def payload_of(row: Mapping[str, Any], *, scored: bool = False) -> dict[str, Any]:
    """Return the agent's payload for a row of verl's batch. `scored`: a scorer computes the reward.

    If the row has a `payload` (an object or its JSON text), that object is returned. Otherwise the payload is made
    of the columns of verl's own datasets:

    | in the payload | from |
    |---|---|
    | `messages` | `raw_prompt` (the column named by `data.prompt_key`), the whole conversation |
    | `prompt` | the text of its last message, if that is text |
    | `ground_truth` | `reward_model.ground_truth`, if present and not `scored` |
    | `extra_info` | the same column, if present and not `scored`: datasets keep answers there |
    | `data_source`, `task_id` | the same columns, if present |

    Raises:
        TaskFileError: the row has neither payload nor prompt, or a value is not valid JSON; names it.
    """
    payload = row.get("payload")
    if payload is not None:
        return read_payload(payload)
    messages = row.get("raw_prompt")
    if messages is None:
        raise TaskFileError(
            "the dataset gives neither a payload nor a raw_prompt: add a payload column and set data.custom_cls to "
            "rollout_backend.verl.dataset.PayloadDataset"
        )
    found: dict[str, Any] = {"messages": _plain(messages, "raw_prompt")}
    last = found["messages"][-1] if found["messages"] else {}
    if isinstance(last, dict) and isinstance(last.get("content"), str):
        found["prompt"] = last["content"]
    answers = _answers(row)
    if scored:
        return found | {
            key: _plain(row[key], key) for key in _COPIED if row.get(key) is not None and key not in answers
        }
    return found | answers | {key: _plain(row[key], key) for key in _COPIED if row.get(key) is not None}


def private_of(row: Mapping[str, Any], *, scored: bool) -> dict[str, Any] | None:
    """Return the part of a row that only the scorer gets.

    This is the column `private`, or else the columns for verl's reward functions: `ground_truth` (of `reward_model`),
    `data_source` and `extra_info`. Return None if the row has no column `private` and no scorer computes the reward.

    Raises:
        TaskFileError: a value is not valid JSON; names it.
    """
    own = row.get("private")
    if own is not None:
        return read_payload(own, "private")
    if not scored:
        return None
    source = row.get("data_source")
    return _answers(row) | ({} if source is None else {"data_source": _plain(source, "data_source")})


def _answers(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of verl's datasets that may hold the answer."""
    found: dict[str, Any] = {}
    reward_model = row.get("reward_model")
    if isinstance(reward_model, Mapping) and reward_model.get("ground_truth") is not None:
        found["ground_truth"] = _plain(reward_model["ground_truth"], "reward_model.ground_truth")
    if row.get("extra_info") is not None:
        found["extra_info"] = _plain(row["extra_info"], "extra_info")
    return found


def read_payload(value: object, name: str = "payload") -> dict[str, Any]:
    """Return `value`, decoded if it is JSON. Raises TaskFileError unless it is an object."""
    if isinstance(value, str):
        try:
            value = read_json(value)
        except ValueError as error:
            raise TaskFileError(f"{name} is a string, but not valid JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise TaskFileError(f"{name} must be an object or its JSON text, not {type(value).__name__}")
    try:
        plain: dict[str, Any] = _plain(value, name)
    except RecursionError:
        raise TaskFileError(f"{name} is nested too deeply: the limit is {MAX_DEPTH} levels") from None
    return plain


def _plain(value: Any, where: str) -> Any:
    """Return the value in JSON's types: verl's collation turns lists and numbers into numpy arrays and scalars."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}.{i}") for i, item in enumerate(value)]
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise TaskFileError(f"{where} is {value!r}, which is not valid JSON: write it as a string or a number")


def task_id_of(row: Mapping[str, Any], payload: Mapping[str, Any]) -> str:
    """Return the row's `task_id`, or `task-` and a digest of the payload if it has none.

    Characters that an id cannot have are replaced, and a digest keeps different ids different.
    """
    given = row.get("task_id")
    if given is None:
        text = json.dumps(payload, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return f"task-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return derived_name(str(given), "A-Za-z0-9._-", _LONGEST_ID)


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


# --- verl's own dataset -----------------------------------------------------------------------------------


def check_own_dataset(data: Mapping[str, Any], *, scored: bool) -> None:
    """Check the rows of verl's own dataset. `data` is verl's section. verl reads a row when a step draws it.

    Raises:
        TaskFileError: names the file, the row, and what to change.
    """
    from rollout_backend.verl.verl_api import copy_to_local

    if (data.get("custom_cls") or {}).get("path"):
        return
    prompt_key = str(data.get("prompt_key", "prompt"))
    for files in (data.get("train_files"), data.get("val_files")):
        for name in [files] if isinstance(files, str) else list(files or ()):
            path = Path(copy_to_local(name, cache_dir=data.get("cache_dir"), use_shm=data.get("use_shm", False)))
            # verl itself reports a missing file.
            for where, row in _own_rows(path, prompt_key) if path.is_file() else ():
                try:
                    _check_own(row, prompt_key, scored)
                except TaskFileError as error:
                    raise TaskFileError(f"{name}, {where}: {error}") from None


def _own_rows(path: Path, prompt_key: str) -> Iterator[tuple[str, object]]:
    """Yield the rows with the columns that reach an agent or a scorer: others may hold images."""
    if path.suffix != ".parquet":
        yield from read_rows(path) if path.suffix == ".jsonl" else ()
        return
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    columns = (prompt_key, "payload", "private", "priority", "reward_model", "extra_info", *_COPIED)
    named = [name for name in columns if name in file.schema_arrow.names]
    rows = (row for batch in file.iter_batches(columns=named) for row in batch.to_pylist())
    for number, row in enumerate(rows, 1):
        yield f"row {number}", row


def _check_own(row: object, prompt_key: str, scored: bool) -> None:
    if not isinstance(row, dict):
        raise TaskFileError("it is not an object")
    prompt = row.get(prompt_key)
    if row.get("payload") is None and not (isinstance(prompt, list) and prompt):
        raise TaskFileError(f"{prompt_key} (data.prompt_key) is {prompt!r:.100}, and must be a list of messages")
    columns = {**row, "raw_prompt": prompt}
    payload = payload_of(columns, scored=scored)
    private = private_of(columns, scored=scored)
    Task(task_id_of(columns, payload), payload, priority=priority_of(columns), private=private)
