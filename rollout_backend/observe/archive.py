"""The run directory: local copies of every result and every step's report.

RUN_DIR/rollouts/STEP/ROLLOUT_ID     the result, as read from S3
RUN_DIR/steps/STEP.json              the step's report
RUN_DIR/logs/                        logs of the servers that this run starts

Invariant: S3 is the source of truth, so a disk that cannot be written loses these copies and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from agent_wrapper.contract import Rollout
from rollout_backend.atomic_file import write_file
from rollout_backend.core.report import StepReport

log = logging.getLogger(__name__)


class RunArchive:
    """The run directory of one run."""

    def __init__(self, run_dir: Path, write: Callable[[Path, bytes], None] = write_file) -> None:
        """`write` replaces a file atomically, or raises OSError."""
        self.run_dir = run_dir
        self.write = write
        self.logs = run_dir / "logs"
        self._failing = False  # the last write failed and was logged

    def write_rollout(self, rollout: Rollout) -> bool:
        """Write a result. Return False if the write failed."""
        path = self.run_dir / "rollouts" / f"{rollout.step:08d}" / rollout.rollout_id
        return self.try_to_write(path, rollout.encode())

    def write_report(self, report: StepReport) -> Path | None:
        """Write a step's report and return its path; None if the write failed."""
        path = self.run_dir / "steps" / f"{report.step:08d}.json"
        return path if self.try_to_write(path, report.model_dump_json(indent=1).encode()) else None

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
