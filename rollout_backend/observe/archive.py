"""The run directory: local copies of every result and every step's report.

RUN_DIR/rollouts/STEP/ROLLOUT_ID     the result, as read from S3
RUN_DIR/steps/STEP.json              the step's report
RUN_DIR/steps/STEP.rollouts.jsonl    one line for each planned rollout: its record
RUN_DIR/logs/                        logs of the servers that this run starts

Invariants:

- S3 is the source of truth, so a disk that cannot be written loses these copies and nothing else.
- A step's records are written when it ends, even by an error. A killed process leaves none of its open steps.
- Results are written in a thread, so that a slow disk delays no other result. If `_MAX_PENDING` of them wait, the
  caller writes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

from agent_wrapper.contract import Rollout
from rollout_backend.atomic_file import write_file
from rollout_backend.core.records import RolloutRecord
from rollout_backend.core.report import StepReport

log = logging.getLogger(__name__)

_RECORDS = ".rollouts.jsonl"
_MAX_PENDING = 256  # results that are held in memory until they are written


class RunArchive:
    """The run directory of one run."""

    def __init__(
        self, run_dir: Path, write: Callable[[Path, bytes], None] = write_file, executor: Executor | None = None
    ) -> None:
        """`write` replaces a file atomically, or raises OSError. `executor` writes results; by default a thread."""
        self.run_dir = run_dir
        self.write = write
        self.logs = run_dir / "logs"
        self._failing = False  # the last write failed and was logged
        self._executor = executor or ThreadPoolExecutor(1, "archive")
        self._pending = 0

    def write_rollout(self, rollout: Rollout, data: bytes) -> Future[bool]:
        """Write a result, which is `data` in its encoded form. The future's result is False if the write failed."""
        path = self.run_dir / "rollouts" / f"{rollout.step:08d}" / rollout.rollout_id
        if self._pending >= _MAX_PENDING:
            written: Future[bool] = Future()
            written.set_result(self.try_to_write(path, data))
            return written
        self._pending += 1
        return self._executor.submit(self._write_pending, path, data)

    def _write_pending(self, path: Path, data: bytes) -> bool:
        self._pending -= 1  # a count that is one off for a moment only shifts the bound
        return self.try_to_write(path, data)

    def close(self) -> None:
        """Wait until all results are written."""
        self._executor.shutdown()

    def write_report(self, report: StepReport) -> Path | None:
        """Write a step's report and return its path; None if the write failed."""
        path = self.run_dir / "steps" / f"{report.step:08d}.json"
        return path if self.try_to_write(path, report.model_dump_json(indent=1).encode()) else None

    def write_records(self, step: int, records: Sequence[RolloutRecord]) -> None:
        """Write the records of a step, in place of earlier ones. Without records, do nothing."""
        if records:
            lines = "".join(f"{record.model_dump_json()}\n" for record in records)
            self.try_to_write(self.run_dir / "steps" / f"{step:08d}{_RECORDS}", lines.encode())

    def find_records(self, rollout_id: str) -> list[RolloutRecord]:
        """Return the records of rollouts with that id, one per step, oldest first.

        Raises:
            ValueError: a line is not a record.
        """
        found = []
        for path in sorted(self.run_dir.glob(f"steps/*{_RECORDS}")):
            lines = path.read_text().split("\n")  # a message may hold other line separators
            records = [RolloutRecord.model_validate_json(line) for line in lines if f'"{rollout_id}"' in line]
            found += [record for record in records if record.rollout_id == rollout_id]
        return found

    def find_rollout(self, rollout_id: str) -> list[Path]:
        """Return the paths of results with that id, one per step, oldest first."""
        return sorted(path for path in self.run_dir.glob("rollouts/*/*") if path.name == rollout_id)

    def try_to_write(self, path: Path, data: bytes) -> bool:
        """Write a file. Return False if the disk refuses it; the first failure is logged."""
        try:
            self.write(path, data)
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
