"""Datasets for verl, and the payload and the task id of each of their rows.

    data.train_files=tasks.jsonl                                   # or .parquet, or a list of files
    data.custom_cls.path=pkg://rollout_backend.verl.dataset
    data.custom_cls.name=PayloadDataset

`PayloadDataset` reads files whose rows have a `payload`: an object or its JSON text, which the agent gets unchanged.
In parquet, prefer the text: a struct column has the fields of all rows, and null where a row lacks one. A row may
have a `task_id`, a `priority`, a `private` part for a scorer, and other columns for verl, such as `data_source`, by
which verl groups its validation metrics (default: the file's name). A `prompt` column is not needed.

verl's own dataset works without a `payload`, too. `payload_of` describes what the agent gets in that case.

Tasks are named after rows, because verl draws new uids in each step: a row has the same task id in each step, each
epoch and each run, and no two tasks of a batch have the same id.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from agent_wrapper.contract.codec import MAX_DEPTH
from rollout_backend.base.names import derived_name
from rollout_backend.core.tasks import MAX_TASK_ID, Task, priority_of, read_json, read_rows
from rollout_backend.errors import TaskFileError
from rollout_backend.verl import early_checks

PLACEHOLDER = "(the agent makes its prompt from its payload)"
# Leave room for a number and for the suffix of a greedy rollout.
_LONGEST_ID = MAX_TASK_ID - 16
# The payload includes these columns of verl's own dataset.
_COPIED = ("data_source", "task_id")


# torch has no types here.
class PayloadDataset(Dataset):  # type: ignore[misc]
    """The rows of task files. `payload` is kept as JSON text, so that verl's collation cannot change it.

    All files are read and checked when verl makes the dataset, before it starts an engine.
    """

    def __init__(
        self,
        data_files: str | Iterable[str],
        tokenizer: Any,
        config: Mapping[str, Any],
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        """Read the files; verl calls this. `config` is verl's `data` section, of which these keys are used:

        - `prompt_key`: the payload's field that verl shows as the prompt: a text or a list of messages. Without one,
          verl shows a placeholder. The model always sees what the agent sends.
        - `shuffle` and `seed`: choose the rows if `max_samples` is smaller than the number of rows.
        - `train_batch_size`: the rows of `train_files` must fill a batch.

        Raises:
            TaskFileError: names the file, the row, and what to change.
            ConfigError, PreflightError: the run cannot start. verl has started no engine yet.
        """
        # Imported late because the module imports verl.
        from rollout_backend.verl.verl_api import copy_to_local

        backend = early_checks.check(config)
        runtime = None if backend is None else backend.runtime
        scored = backend is not None and backend.scoring.enabled

        prompt_key = str(config.get("prompt_key", "prompt"))
        rows: list[dict[str, Any]] = []
        for name in [data_files] if isinstance(data_files, str) else list(data_files):
            path = Path(copy_to_local(name, cache_dir=config.get("cache_dir"), use_shm=config.get("use_shm", False)))
            for where, row in read_rows(path, runtime):
                try:
                    rows.append(_checked(row, len(rows), prompt_key, data_source=path.stem, scored=scored))
                except TaskFileError as error:
                    raise TaskFileError(f"{name}, {where}: {error}") from None
        if not rows:
            raise TaskFileError(
                f"{data_files} has no rows: set data.train_files and data.val_files to files with rows"
            )
        fields = dict.fromkeys(key for row in rows for key in row)
        # verl's batches need the same fields in every row.
        rows = [{**fields, **row} for row in rows]
        if 0 < max_samples < len(rows):
            rows = [rows[i] for i in _choose(len(rows), max_samples, config)]
        of_training = data_files == config.get("train_files") and max_samples == config.get("train_max_samples", -1)
        size = int(config.get("train_batch_size") or 0)
        if of_training and len(rows) < size and not early_checks.validates_only(config):
            raise TaskFileError(
                f"data.train_files has {len(rows)} rows, and data.train_batch_size is {size}: verl trains full "
                "batches only, so lower it, or add rows"
            )
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: int) -> dict[str, Any]:
        # The legacy trainer's batch needs at least one tensor.
        return {**self._rows[at], "dummy_tensor": torch.zeros(1, dtype=torch.uint8)}


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
        return _payload(payload)
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
        return _payload(own, "private")
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


def _checked(row: object, number: int, prompt_key: str, data_source: str, *, scored: bool) -> dict[str, Any]:
    columns = row if isinstance(row, dict) else {}
    if columns.get("payload") is None:
        raise TaskFileError(
            f"there is no payload, only {sorted(columns)}. Put what the agent needs into a `payload` column, as an "
            "object or its JSON text; or leave data.custom_cls out, and the agent gets verl's own columns"
        )
    task_id = columns.get("task_id")
    if not isinstance(task_id, str | None):
        raise TaskFileError(f"task_id is {task_id!r}, which is not a string")
    private = None if columns.get("private") is None else _payload(columns["private"], "private")
    task = Task(
        task_id if task_id is not None else f"task-{number:05d}",
        _payload(columns["payload"]),
        priority=priority_of(columns),
        private=private_of(columns, scored=scored),
    )
    return {
        "data_source": data_source,
        "extra_info": {"index": number},
        "index": number,
        **{str(key): value for key, value in columns.items() if value is not None},
        "task_id": task.task_id,
        "payload": json.dumps(task.payload),
        **({} if private is None else {"private": json.dumps(private)}),
        "raw_prompt": _prompt_messages(task.payload.get(prompt_key)),
    }


def _prompt_messages(prompt: object) -> list[dict[str, Any]]:
    if isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt):
        return prompt
    return [{"role": "user", "content": prompt if isinstance(prompt, str) else PLACEHOLDER}]


def _choose(total: int, count: int, config: Mapping[str, Any]) -> list[int]:
    if not config.get("shuffle", False):
        return list(range(count))
    chosen: list[int] = np.random.default_rng(config.get("seed")).choice(total, size=count, replace=False).tolist()
    return chosen


def _payload(value: object, name: str = "payload") -> dict[str, Any]:
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
