"""The run directory: the settings of a run, and local copies of its results and step reports.

RUN_DIR/config.yaml                  every setting, without secrets
RUN_DIR/run.json                     each start of the run: versions, agent, how it ended (`RunInfo`)
RUN_DIR/rollouts/STEP/ROLLOUT_ID     the result, as read from S3
RUN_DIR/artifacts/STEP/ROLLOUT_ID    the artifacts that a scorer was given
RUN_DIR/steps/STEP.tasks.jsonl       the step's tasks
RUN_DIR/steps/STEP.json              the step's report
RUN_DIR/steps/STEP.rollouts.jsonl    one line for each planned rollout: its record
RUN_DIR/steps/STEP.summary.jsonl     a summary of the records, the report and the tasks, which is computed again
                                     if missing
RUN_DIR/steps/STEP.running.jsonl     the records while the step runs, with deadlines; replaced every few seconds
RUN_DIR/rescored/NAME/               rewards that a scorer computed later: see `rescoring`
RUN_DIR/logs/                        logs of the servers that this run starts

Invariants:

- S3 is the source of truth, so a disk that cannot be written loses only these copies.
- No file holds a secret, so the directory can be shared.
- A step's records are written when it ends, even with an error. A killed process leaves the `STEP.running.jsonl` of
  each open step.
- A run writes in a thread, in order, and waits for it as `base.disk` allows. Of the results that wait to be written,
  at most `_MAX_PENDING_BYTES` are in memory; the others are not copied.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json, to_json

from agent_wrapper.contract import ContractError, Rollout, unpack_artifacts
from rollout_backend.base.addresses import is_loopback
from rollout_backend.base.atomic_file import write_file
from rollout_backend.base.disk import Disk
from rollout_backend.config import RolloutConfig
from rollout_backend.core.earlier_batches import order_of
from rollout_backend.core.tasks import Task, task_of
from rollout_backend.errors import ConfigError
from rollout_backend.run.accounts.findings import StepOverview
from rollout_backend.run.accounts.local_copies import LocalCopies
from rollout_backend.run.accounts.records import ResultSummary, RolloutRecord
from rollout_backend.run.accounts.run_info import RunInfo, RunStart, RunState, secret_settings, settings_yaml
from rollout_backend.run.accounts.step_report import StepReport
from rollout_backend.run.accounts.summary import StepSummary, summarize
from rollout_backend.run.accounts.task_totals import TaskTotals

log = logging.getLogger(__name__)

CONFIG = "config.yaml"
_INFO = "run.json"
_TASKS, _REPORT, _RECORDS, _RUNNING = ".tasks.jsonl", ".json", ".rollouts.jsonl", ".running.jsonl"
SUMMARY = ".summary.jsonl"
# Limit for the results held in memory until they are written.
_MAX_PENDING_BYTES = 10**9
_COMPARED = 10_000
"""Number of newest task ids that are compared with a mistyped id."""


class RunArchive:
    """The directory of one run."""

    def __init__(
        self,
        run_dir: Path,
        write: Callable[[Path, bytes], None] = write_file,
        copies_gb: float | None = None,
    ) -> None:
        """`write` replaces a file atomically, or raises OSError. `copies_gb` is `storage.local_copies_gb`."""
        self.run_dir = run_dir
        self.write = write
        self.logs = run_dir / "logs"
        # Whether the last write failed and was logged.
        self._failing = False
        self._disk = Disk(run_dir)
        self.submit, self.wait, self.close = self._disk.submit, self._disk.wait, self._disk.close
        self._pending_bytes = 0
        self._info: RunInfo | None = None
        self._copies = LocalCopies(run_dir, copies_gb)
        self._counting = threading.Lock()

    def write_failed_start(self, config: RolloutConfig, start: RunStart, error: str) -> None:
        """Add a failed start to `run.json`. The settings of an earlier start are kept, so that the run can resume."""
        stored = self.run_dir / CONFIG
        text = stored.read_bytes() if stored.is_file() else None
        self.write_start(config, start)
        if text is not None:
            self.try_to_write(stored, text, private=not stored.stat().st_mode & 0o077)
        self.write_end("failed", error)

    def write_start(self, config: RolloutConfig, start: RunStart) -> None:
        """Write the settings with which the run starts, and add the start to `run.json`."""
        try:
            before = self.read_info()
        except ValueError as error:
            log.warning("%s is replaced, because it cannot be read: %s", self.run_dir / _INFO, error)
            before = None
        starts = (*(before.starts if before is not None else ()), start)
        self._info = RunInfo(run_id=config.run_id, secrets=tuple(secret_settings(config)), starts=starts)
        # The URL of a local runtime lets callers run code.
        is_local = is_loopback(config.runtime.agents_host or "")
        self.try_to_write(self.run_dir / CONFIG, settings_yaml(config).encode(), private=is_local)
        self._write_info(self._info)

    def write_end(self, state: RunState, error: str = "") -> None:
        """Record how the last start ended. Does nothing without a start."""
        if self._info is not None:
            self._write_info(self._info.with_last(state=state, error=error, ended_at=time.time()))

    def write_last_step_end(self) -> None:
        """Record that the last step's rollouts have ended: the run has then ended when its process exits."""
        if self._info is not None:
            self._info = self._info.with_last(last_step_ended=True)
            self.submit(self._write_info, self._info)

    def renew_info(self) -> None:
        """Renew the time of `run.json`, by which readers on other machines know that this process runs."""

        def renew() -> None:
            # If this fails, only the heartbeat is lost.
            with contextlib.suppress(OSError):
                os.utime(self.run_dir / _INFO)

        self.submit(renew)

    def info_renewed_at(self) -> float:
        """Return when `run.json` was last written or renewed, in Unix seconds; 0 if the file does not exist."""
        try:
            return (self.run_dir / _INFO).stat().st_mtime
        except OSError:
            return 0.0

    def read_info(self) -> RunInfo | None:
        """Return the content of `run.json`; None if the file does not exist.

        Raises:
            ValueError: another version of this package wrote it, or it is damaged.
        """
        try:
            return RunInfo.model_validate_json((self.run_dir / _INFO).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _write_info(self, info: RunInfo) -> None:
        self.try_to_write(self.run_dir / _INFO, info.model_dump_json(indent=1).encode())

    def write_tasks(self, step: int, tasks: Sequence[Task]) -> None:
        """Write the tasks of a step as a task file."""
        lines = (f"{json.dumps(task.as_row(), ensure_ascii=False)}\n" for task in tasks)
        self.submit(lambda: self.try_to_write(self.tasks_file(step), "".join(lines).encode()))

    def tasks_file(self, step: int) -> Path:
        """Return the path of the file that `write_tasks` writes."""
        return self._step_file(step, _TASKS)

    def read_tasks(self, *steps: int) -> dict[str, dict[str, Any]]:
        """Return the rows of these steps' task files by task id. A step without a file has none.

        Raises:
            ConfigError: a file is malformed.
        """
        found: dict[str, dict[str, Any]] = {}
        for file in map(self.tasks_file, steps):
            try:
                rows = [from_json(line) for line in file.read_bytes().split(b"\n") if line] if file.is_file() else []
                found |= {str(row["task_id"]): row for row in rows if isinstance(row["payload"], dict)}
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{file} cannot be read: {error}") from None
        return found

    def write_rollout(self, rollout: Rollout, data: bytes) -> Future[bool]:
        """Write a result; `data` is its encoded form. The future's result is False if the write failed."""
        return self._copy(rollout.step, self._result_file(rollout.step, rollout.rollout_id), data)

    def _copy(self, step: int, path: Path, data: bytes) -> Future[bool]:
        with self._counting:
            fits = self._pending_bytes + len(data) <= _MAX_PENDING_BYTES
            self._pending_bytes += len(data) if fits else 0
        if fits:
            return self.submit(self._write_copy, step, path, data)
        if not self._failing:
            log.warning("%s does not answer: results are not copied there. S3 has them", self.run_dir)
        self._failing = True
        refused: Future[bool] = Future()
        refused.set_result(False)
        return refused

    def _write_copy(self, step: int, path: Path, data: bytes) -> bool:
        with self._counting:
            self._pending_bytes -= len(data)
        if self._copies.make_room(step, len(data)):
            return self.try_to_write(path, data)
        if not self._failing:
            log.warning(
                "%s is not copied here: the copies of one step reach storage.local_copies_gb or the last tenth of "
                "the disk, which is kept for the gateway's journal. S3 has the result",
                path.name,
            )
        self._failing = True
        return False

    def write_artifacts(self, rollout: Rollout, data: bytes) -> None:
        """Write the artifacts of a rollout; `data` is their encoded form."""
        self._copy(rollout.step, self._artifacts_file(rollout), data)

    def read_artifacts(self, rollout: Rollout) -> dict[str, bytes]:
        """Return the artifacts of a stored result, by name.

        Raises:
            ContractError: they are missing, damaged or different.
        """
        if not rollout.artifacts:
            return {}
        path = self._artifacts_file(rollout)
        try:
            return unpack_artifacts(path.read_bytes(), rollout.artifacts)
        except OSError as error:
            raise ContractError("artifacts", f"{path} cannot be read: {error.strerror or error}") from None

    def _artifacts_file(self, rollout: Rollout) -> Path:
        return self.run_dir / "artifacts" / f"{rollout.step:08d}" / Path(rollout.rollout_id).name

    def write_report(self, report: StepReport) -> Path | None:
        """Write a step's report and return its path; None if the write failed."""
        path = self._step_file(report.step, _REPORT)
        if not self.try_to_write(path, report.model_dump_json(indent=1).encode()):
            return None
        if self._step_file(report.step, _RECORDS).is_file():
            self.submit(self.read_overview, report.step)
        return path

    def read_report(self, step: int) -> StepReport | None:
        """Return a step's report; None if the step was interrupted and has none.

        Raises:
            ValueError: another version of this package wrote it, or it is damaged.
        """
        try:
            return StepReport.model_validate_json(self._step_file(step, _REPORT).read_bytes())
        except FileNotFoundError:
            return None

    def write_records(self, step: int, records: Sequence[RolloutRecord]) -> None:
        """Write the records of a step and their summary, replacing earlier ones. Does nothing without records."""
        if records:
            lines = "".join(f"{record.model_dump_json()}\n" for record in records)
            if self.try_to_write(self._step_file(step, _RECORDS), lines.encode()):
                # The writer's thread runs this after all pending writes of the step's other files.
                self.submit(self._summarize, step, records)
            self.submit(self._step_file(step, _RUNNING).unlink, missing_ok=True)

    def write_running(self, step: int, lines: Sequence[str]) -> Future[bool]:
        """Write the records of a running step, replacing earlier ones."""
        data = "".join(f"{line}\n" for line in lines).encode()
        return self.submit(self.try_to_write, self._step_file(step, _RUNNING), data)

    def read_running(self, step: int) -> list[RolloutRecord]:
        """Return the records of a step that was running when they were last written.

        Raises:
            ValueError: a line is not a record.
            FileNotFoundError: the step has ended.
        """
        lines = self._step_file(step, _RUNNING).read_bytes().split(b"\n")
        return [RolloutRecord.model_validate_json(line) for line in lines if line]

    def running_steps(self) -> dict[int, float]:
        """Return the steps that were running when their records were last written, with that time in Unix seconds."""
        found = {}
        for step in self._steps_with(_RUNNING):
            # The file is missing if the step has just ended.
            with contextlib.suppress(FileNotFoundError):
                written_at = self._step_file(step, _RUNNING).stat().st_mtime
                ended = self._step_file(step, _RECORDS)
                if not ended.is_file() or ended.stat().st_mtime < written_at:
                    found[step] = written_at
        return found

    def find_records(self, rollout_id: str) -> list[RolloutRecord]:
        """Return the records of rollouts with that id, one per step, oldest first.

        Raises:
            ValueError: a line is not a record.
        """
        found = self._records_with(rollout_id, task_of(rollout_id))
        return [record for record in found if record.rollout_id == rollout_id]

    def find_task(self, task_id: str) -> list[RolloutRecord]:
        """Return the records of a task's rollouts, oldest step first.

        Raises:
            ValueError: a line is not a record.
        """
        return [record for record in self._records_with(task_id, task_id) if record.task_id == task_id]

    def _records_with(self, name: str, task_id: str) -> Iterator[RolloutRecord]:
        """Yield the records of a task that contain a name. Other records are not decoded and steps without the task
        are not read, because that takes minutes for a training."""
        quoted, task = to_json(name), to_json(task_id)
        for step in self.steps():
            if task not in self._stored_summary(step)[1]:
                continue
            for line in self.record_lines(step):
                if quoted in line:
                    yield RolloutRecord.model_validate_json(line)

    def read_records(self, step: int) -> list[RolloutRecord]:
        """Return the records of a step; empty if it has none.

        Raises:
            ValueError: a line is not a record.
        """
        found = []
        for number, line in enumerate(self.record_lines(step), 1):
            try:
                found.append(RolloutRecord.model_validate_json(line))
            except ValidationError as error:
                name = self._step_file(step, _RECORDS).name
                raise ValueError(f"line {number} of {name} is no record: {error.errors()[0]['msg']}") from None
        return found

    def read_summary(self, step: int) -> StepSummary:
        """Return the numbers of a step that has records.

        Raises:
            ValueError: a line is not a record.
        """
        return self._stored_summary(step)[0].summary

    def read_overview(self, step: int) -> StepOverview:
        """Return the overview of a step that has records, for pages of many steps.

        Raises:
            ValueError: a record or the report is damaged, or another version of this package wrote it.
        """
        stored, totals = self._stored_summary(step)
        path = self._step_file(step, _REPORT)
        report = _stamp(path) if path.is_file() else None
        if stored.overview is None or stored.report != report:
            overview = StepOverview.of(self.read_report(step), stored.summary)
            stored = stored.model_copy(update={"report": report, "overview": overview})
            self._store_summary(step, stored, totals)
        assert stored.overview is not None
        return stored.overview

    def read_totals(self, step: int) -> TaskTotals:
        """Return the tasks of a step that has records.

        Raises:
            ValueError: a line is not a record.
        """
        return TaskTotals.model_validate_json(self._stored_summary(step)[1])

    def _stored_summary(self, step: int) -> tuple[_StoredSummary, bytes]:
        try:
            about, totals = self._step_file(step, SUMMARY).read_bytes().splitlines()
            stored = _StoredSummary.model_validate_json(about)
            if stored.records == _stamp(self._step_file(step, _RECORDS)):
                return stored, totals
        except (OSError, ValueError):
            # The file is missing, damaged, or of another version, so it is computed again.
            pass
        return self._summarize(step)

    def _summarize(self, step: int, records: Sequence[RolloutRecord] | None = None) -> tuple[_StoredSummary, bytes]:
        """Compute the summary of a step from its records, and write it for the next reader if the disk accepts it."""
        stamp = _stamp(self._step_file(step, _RECORDS))
        found = self.read_records(step) if records is None else records
        try:
            tasks = self.read_tasks(step)
        except ConfigError:
            tasks = {}
        stored = _StoredSummary(records=stamp, summary=summarize(found))
        totals = TaskTotals.of(found, tasks).model_dump_json().encode()
        self._store_summary(step, stored, totals)
        return stored, totals

    def _store_summary(self, step: int, stored: _StoredSummary, totals: bytes) -> None:
        with contextlib.suppress(OSError):
            self.write(self._step_file(step, SUMMARY), stored.model_dump_json().encode() + b"\n" + totals + b"\n")

    def record_lines(self, step: int) -> list[bytes]:
        """Return the records of a step as JSON; empty if it has none."""
        path = self._step_file(step, _RECORDS)
        return [line for line in path.read_bytes().split(b"\n") if line] if path.is_file() else []

    def steps(self) -> list[int]:
        """Return the numbers of the steps that have records."""
        return sorted(self._steps_with(_RECORDS), key=order_of)

    def _steps_with(self, kind: str) -> list[int]:
        """Return the steps with a file of this kind. Other files, such as a copy or macOS's `._NAME`, are ignored."""
        names = (path.name.removesuffix(kind) for path in self.run_dir.glob(f"steps/*{kind}"))
        return [int(name) for name in names if name.isdecimal()]

    def begun_steps(self) -> list[int]:
        """Return the numbers of steps with tasks, records or results, including killed steps."""
        files = [*self.run_dir.glob("steps/[0-9]*"), *self.run_dir.glob("rollouts/[0-9]*")]
        return sorted(
            {int(name) for path in files if (name := path.name.partition(".")[0]).isdecimal()}, key=order_of
        )

    def results(self, step: int) -> list[Path]:
        """Return the paths of a step's results."""
        return sorted(path for path in self._results(step).glob("*") if not path.name.startswith("."))

    def changed_at(self, step: int) -> float:
        """Return when a step's records or report changed last, in Unix seconds. The step must have records."""
        files = (self._step_file(step, kind) for kind in (_RECORDS, _REPORT))
        return max(file.stat().st_mtime for file in files if file.is_file())

    def _step_file(self, step: int, kind: str) -> Path:
        return self.run_dir / "steps" / f"{step:08d}{kind}"

    def read_result(self, record: RolloutRecord) -> Rollout:
        """Return the stored result that settled a rollout.

        Raises:
            ContractError: it is missing, damaged or different.
        """
        path = self._result_file(record.step, record.rollout_id)
        try:
            rollout = Rollout.decode(path.read_bytes())
        except OSError as error:
            raise ContractError("result", f"{path} cannot be read: {error.strerror or error}") from None
        for field in ("step", "rollout_id", "task_id", "outcome"):
            wanted, found = getattr(record, field), getattr(rollout, field)
            if found != wanted:
                raise ContractError(field, f"is {found!r} in the result, and {wanted!r} in the record")
        if ResultSummary.of(rollout) != record.result:
            raise ContractError("result", "is not the one that the record summarizes")
        return rollout

    def _result_file(self, step: int, rollout_id: str) -> Path:
        return self._results(step) / Path(rollout_id).name

    def _results(self, step: int) -> Path:
        return self.run_dir / "rollouts" / f"{step:08d}"

    def find_rollout(self, rollout_id: str) -> list[Path]:
        """Return the paths of results with that id, one per step, oldest first."""
        return sorted(path for path in self.run_dir.glob("rollouts/*/*") if path.name == rollout_id)

    def try_to_write(self, path: Path, data: bytes, *, private: bool = False) -> bool:
        """Write a file. Return False if the disk refuses it; the first failure is logged."""
        try:
            write_file(path, data, private=True) if private else self.write(path, data)
        except OSError as error:
            if not self._failing:
                log.warning(
                    "%s cannot be written (%s): results are stored only in S3 until writing works again. Free space "
                    "on the disk of output_dir",
                    path,
                    error.strerror or error,
                )
            self._failing = True
            return False
        self._failing = False
        return True


class _StoredSummary(BaseModel, frozen=True):
    """The first line of a step's summary file; the second one has its `TaskTotals`."""

    records: tuple[int, int]
    """Size and modification time of the records when the summary was computed."""
    summary: StepSummary
    report: tuple[int, int] | None = None
    """Size and modification time of the report; None if there was no report."""
    overview: StepOverview | None = None


def _stamp(path: Path) -> tuple[int, int]:
    about = path.stat()
    return about.st_size, about.st_mtime_ns


class RunNames:
    """The ids of the tasks and rollouts of some steps. Only the rollouts of a requested task are read."""

    def __init__(self, archive: RunArchive, steps: Sequence[int]) -> None:
        """Read the ids of the tasks, and of the results of steps without records, which are running or were killed.

        Raises:
            ValueError: a record is damaged.
        """
        self._archive, self._steps = archive, steps
        tasks: dict[str, None] = {}
        results: dict[str, None] = {}
        ended = {*archive.steps()}
        for step in steps:
            if step in ended:
                tasks |= dict.fromkeys(archive.read_totals(step).task_ids)
            else:
                with contextlib.suppress(ConfigError):
                    tasks |= dict.fromkeys(archive.read_tasks(step))
                results |= dict.fromkeys(path.name for path in archive.results(step))
        self.tasks, self._results = tuple(tasks), tuple(results)

    def starting_with(self, prefix: str) -> tuple[str, ...]:
        """Return the tasks whose ids start with the prefix or, if there are none, the rollouts."""
        if found := tuple(name for name in self.tasks if name.startswith(prefix)):
            return found
        return tuple(name for name in self.rollouts(prefix.rpartition(".")[0]) if name.startswith(prefix))

    def rollouts(self, task_id: str) -> tuple[str, ...]:
        """Return the rollouts of a task, those without a record last."""
        records = self._archive.find_task(task_id) if task_id in self.tasks else []
        ids = [record.rollout_id for record in records if record.step in self._steps]
        return tuple(dict.fromkeys((*ids, *(each for each in self._results if each.startswith(f"{task_id}.")))))

    def nearest(self, wanted: str) -> str | None:
        """Return the most similar of the newest ids; None if all differ too much."""
        task, dot, number = wanted.rpartition(".")
        newest = (*self._results, *self.tasks[-_COMPARED:])
        found = next(iter(difflib.get_close_matches(task if number.isdecimal() else wanted, newest, 1)), None)
        rollout = f"{found}{dot}{number}"
        return rollout if found and number.isdecimal() and rollout in self.rollouts(found) else found
