"""A run's folder on this machine: every result that arrived and every step's report, to be read later.

RUN_DIR/rollouts/STEP/ROLLOUT_ID     as it was taken from S3
RUN_DIR/steps/STEP.json              the step's report
RUN_DIR/logs/                        of the servers we run
"""

from __future__ import annotations

import os
from pathlib import Path

from agent_wrapper.contract import Rollout
from rollout_backend.report import StepReport


class RunArchive:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.logs = run_dir / "logs"

    def keep(self, rollout: Rollout) -> None:
        _write(self.run_dir / "rollouts" / f"{rollout.step:08d}" / rollout.rollout_id, rollout.encode())

    def keep_report(self, report: StepReport) -> Path:
        path = self.run_dir / "steps" / f"{report.step:08d}.json"
        _write(path, report.model_dump_json(indent=1).encode())
        return path

    def find(self, rollout_id: str) -> list[Path]:
        """Where results of that id are kept, one per step that had it, oldest first."""
        return sorted(path for path in self.run_dir.glob("rollouts/*/*") if path.name == rollout_id)


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(data)
    os.replace(part, path)
