"""Reads what a report shows from a run's folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agent_wrapper.contract import ContractError, Rollout
from rollout_backend.config import RolloutConfig, load_config
from rollout_backend.core.batch_numbers import describe_batch
from rollout_backend.core.records import RolloutRecord
from rollout_backend.core.report import StepReport
from rollout_backend.errors import ConfigError
from rollout_backend.observe.archive import CONFIG, RunArchive

_RECORDS = ".rollouts.jsonl"


@dataclass(frozen=True)
class StepData:
    """One step of a run. `report` is None if the step was interrupted."""

    step: int
    name: str  # its number, or that of the trainer's global step
    validates: bool
    records: tuple[RolloutRecord, ...]
    report: StepReport | None
    changed_at: float  # of the newest of its files


@dataclass(frozen=True)
class RunData:
    """A run with at least one step. `config` is None if the folder holds no settings that can be read."""

    run_dir: Path
    run_id: str
    steps: tuple[StepData, ...]
    config: RolloutConfig | None

    def read_rollout(self, record: RolloutRecord) -> Rollout | None:
        """Return the stored result that settled a rollout; None if there is none."""
        path = self.run_dir / "rollouts" / f"{record.step:08d}" / Path(record.rollout_id).name
        try:
            rollout = Rollout.decode(path.read_bytes())
        except (OSError, ContractError):
            return None
        return rollout if record.is_of(rollout) else None


def read_run(run_dir: Path) -> RunData:
    """Read a run's folder.

    Raises:
        ConfigError: the folder holds no step, or a file of another version.
    """
    paths = sorted(run_dir.glob(f"steps/*{_RECORDS}"))
    if not paths:
        raise ConfigError(f"{run_dir} holds no records of a step: steps/*{_RECORDS}")
    archive = RunArchive(run_dir)
    by_verl = _is_by_verl(archive)
    steps = tuple(_read_step(archive, path, by_verl) for path in paths)
    names = [step.report.run_id for step in steps if step.report is not None]
    return RunData(run_dir, names[0] if names else run_dir.absolute().name, steps, _read_config(run_dir))


def _is_by_verl(archive: RunArchive) -> bool:
    try:
        info = archive.read_info()
    except ValueError:
        return False
    return info is not None and info.starts[-1].by == "verl"


def _read_step(archive: RunArchive, path: Path, by_verl: bool) -> StepData:
    number = path.name.removesuffix(_RECORDS)
    report = path.with_name(f"{number}.json")
    name, validates = describe_batch(int(number)) if by_verl else (str(int(number)), False)
    try:
        return StepData(
            int(number),
            name,
            validates,
            tuple(archive.read_records(int(number))),
            StepReport.model_validate_json(report.read_bytes()) if report.is_file() else None,
            max(each.stat().st_mtime for each in (path, report) if each.is_file()),
        )
    except ValueError as error:
        raise ConfigError(f"step {number} in {path.parent} cannot be read: {error}") from None


def _read_config(run_dir: Path) -> RolloutConfig | None:
    path = run_dir / CONFIG
    try:
        return load_config(path, env={}) if path.is_file() else None
    except ConfigError:
        return None
