"""Give verl the rows of task files as a dataset.

    data.train_files=tasks.jsonl                                   # or .parquet, or a list of files
    data.custom_cls.path=pkg://rollout_backend.verl.dataset
    data.custom_cls.name=PayloadDataset

`PayloadDataset` reads files whose rows have a `payload`: an object or its JSON text, which the agent gets unchanged.
In parquet, prefer the text: a struct column has the fields of all rows, and null where a row lacks one. A row may
have a `task_id`, a `priority`, a `private` part for a scorer, and other columns for verl, such as `data_source`, by
which verl groups its validation metrics (default: the file's name). A `prompt` column is not needed.

verl's own dataset works without a `payload`, too. `task_rows.payload_of` describes what the agent gets in that case.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from rollout_backend.core.tasks import Task, priority_of, read_rows
from rollout_backend.errors import TaskFileError
from rollout_backend.verl import early_checks
from rollout_backend.verl.task_rows import private_of, read_payload

PLACEHOLDER = "(the agent makes its prompt from its payload)"


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

        - `prompt_key`: the payload's field that verl shows as the prompt: a string or a list of messages. Without
          one, verl shows a placeholder. The model always sees what the agent sends.
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
    private = None if columns.get("private") is None else read_payload(columns["private"], "private")
    task = Task(
        task_id if task_id is not None else f"task-{number:05d}",
        read_payload(columns["payload"]),
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
