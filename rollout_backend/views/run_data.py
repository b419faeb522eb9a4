"""Read run directories for reports and tables, and list the runs in a folder."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, SecretStr
from pydantic_core import PydanticUndefined

from agent_wrapper.contract import ContractError, Rollout
from rollout_backend.config import RolloutConfig, load_config
from rollout_backend.core.earlier_batches import describe_batch, order_of, validates
from rollout_backend.errors import ConfigError
from rollout_backend.run.accounts.archive import CONFIG, RunArchive
from rollout_backend.run.accounts.cost import Cost, Prices
from rollout_backend.run.accounts.findings import StepOverview, findings_of
from rollout_backend.run.accounts.records import RolloutRecord
from rollout_backend.run.accounts.run_info import RUNS_S, TRAINERS, RunStart, RunState, all_settings
from rollout_backend.run.accounts.step_report import StepReport
from rollout_backend.run.accounts.summary import StepSummary, summarize
from rollout_backend.run.accounts.task_totals import TaskTotals


@dataclass(frozen=True)
class StepData:
    """One step of a run, without the records of its rollouts, which are read when they are needed."""

    archive: RunArchive = field(repr=False)
    step: int
    name: str
    """Its number as the trainer counts it, such as `15` or `15 validation`, or else that of its files."""
    validates: bool
    summary: StepSummary
    overview: StepOverview
    changed_at: float
    """When its newest file changed."""
    running: tuple[RolloutRecord, ...] = ()
    """The records of a step that has not ended."""
    runs: bool = False
    """Whether these were written within the last minute."""

    def read_records(self) -> Sequence[RolloutRecord]:
        """Return the records of all planned rollouts.

        Raises:
            ConfigError: a record cannot be read.
        """
        with reading(self.archive, self.step):
            return self.running or self.archive.read_records(self.step)

    def read_report(self) -> StepReport | None:
        """Return the report; None if the step is running or was interrupted.

        Raises:
            ConfigError: it cannot be read.
        """
        with reading(self.archive, self.step):
            return self.archive.read_report(self.step) if self.overview.has_report else None

    def read_totals(self) -> TaskTotals:
        """Return the totals of each task, by which runs are compared.

        Raises:
            ConfigError: a record cannot be read.
        """
        with reading(self.archive, self.step):
            return TaskTotals.of(self.running, {}) if self.running else self.archive.read_totals(self.step)

    def cost(self, prices: Prices | None) -> Cost | None:
        """Estimate the cost of the step; None without prices."""
        return prices.cost_of(self.summary) if prices is not None else None

    @property
    def open(self) -> tuple[RolloutRecord, ...]:
        """Return the open rollouts of a running step, those with the least time left first."""
        found = [record for record in self.running if record.outcome is None] if self.runs else []
        return tuple(sorted(found, key=lambda each: (each.invoked_at is None, each.deadline or 0.0)))


@dataclass(frozen=True)
class RunData:
    """A run with at least one step. `config` is None if the directory has no readable settings."""

    run_dir: Path
    run_id: str
    steps: tuple[StepData, ...]
    config: RolloutConfig | None
    state: str = ""
    """As `describe_state` returns it, unless the run ended normally."""

    @property
    def training(self) -> tuple[StepData, ...]:
        """Return the training steps. If there are only validations, return those."""
        return tuple(step for step in self.steps if not step.validates) or self.steps

    @property
    def prices(self) -> Prices | None:
        """Return the prices from the run's settings, if they name any."""
        return Prices.of(self.config) if self.config is not None else None


def read_run(run_dir: Path, known: Mapping[int, StepData] | None = None) -> RunData:
    """Read a run directory, including running steps. `known` holds steps that were read before.

    Raises:
        ConfigError: the folder holds no step, or a file of another version.
    """
    archive, found = RunArchive(run_dir), dict[int, StepData]()
    running, is_training, state = archive.running_steps(), _is_training(archive), run_state(archive)
    for step in sorted({*archive.steps(), *running}, key=order_of):
        before = (known or {}).get(step)
        # A file is missing if a running step has just ended without a record.
        with contextlib.suppress(FileNotFoundError):
            if before is not None and step not in running and before.changed_at == archive.changed_at(step):
                found[step] = before
            else:
                found[step] = _read_step(archive, step, is_training, running.get(step), state)
    if not found:
        raise ConfigError(f"{run_dir} holds no records of a step: steps/*.rollouts.jsonl")
    shown = describe_state(state, archive.info_renewed_at()) if state not in ("running", "ended", None) else ""
    return RunData(run_dir, read_run_id(run_dir), tuple(found.values()), read_config(run_dir), shown)


def read_steps(run_dir: Path, only: Sequence[int] | None = None) -> Iterator[StepData]:
    """Read the steps of a run one by one, in order; only the numbers in `only`, if given.

    Raises:
        ConfigError: the folder holds no step, or a file of another version.
    """
    archive = RunArchive(run_dir)
    steps = archive.steps()
    if not steps:
        raise ConfigError(f"{run_dir} holds no records of a step: steps/*.rollouts.jsonl")
    is_training = _is_training(archive)
    for step in steps if only is None else only:
        yield _read_step(archive, step, is_training)


def training_steps(archive: RunArchive) -> list[int]:
    """Return the numbers of the recorded training steps. If only validations are recorded, return theirs."""
    steps, is_training = archive.steps(), _is_training(archive)
    return [step for step in steps if not (is_training and validates(step))] or steps


def step_namer(archive: RunArchive) -> Callable[[int], str]:
    """Return the function that names a run's steps: in a training as the trainer counts them."""
    return (lambda step: describe_batch(step)[0]) if _is_training(archive) else str


def name_steps(archive: RunArchive, steps: Sequence[int]) -> str:
    """Return the names of the first and the last of these steps, such as `steps 1 to 15`."""
    names = list(map(step_namer(archive), (*steps[:1], *steps[1:][-1:])))
    return f"step{'s' * (len(names) > 1)} {' to '.join(names)}" if names else "no step"


def find_step(archive: RunArchive, name: str) -> int:
    """Return the number of a begun step of a run by its name.

    Raises:
        ConfigError: the run has no such step.
    """
    name_of, steps = step_namer(archive), archive.begun_steps()
    numbers = {name_of(step): step for step in steps}
    name = str(int(name)) if name.isdecimal() else name
    if name in numbers:
        return numbers[name]
    why = f"step {name} of {archive.run_dir} has no records: it has those of {name_steps(archive, steps)}"
    if name.isdecimal() and int(name) in steps:
        why += f"; the files {int(name):08d} hold step {name_of(int(name))}"
    raise ConfigError(why)


def read_rollout(archive: RunArchive, record: RolloutRecord) -> Rollout | None:
    """Return the stored result that settled a rollout, or None."""
    try:
        return archive.read_result(record) if record.result is not None else None
    except ContractError:
        return None


def read_run_id(run_dir: Path) -> str:
    """Return a run's id, from its newest report or the name of its directory."""
    for path in sorted(run_dir.glob("steps/*[0-9].json"), reverse=True):
        try:
            return StepReport.model_validate_json(path.read_bytes()).run_id
        except ValueError:
            continue
    return run_dir.absolute().name


def last_start(archive: RunArchive) -> RunStart | None:
    """Return the last start of a run; None if it is unknown, or `run.json` cannot be read."""
    try:
        info = archive.read_info()
    except ValueError:
        return None
    return info.starts[-1] if info is not None else None


def run_state(archive: RunArchive) -> RunState | None:
    """Return the current state of a run; None if it is unknown."""
    start = last_start(archive)
    return start.current_state(archive.info_renewed_at()) if start is not None else None


def describe_state(state: str, seen_at: float) -> str:
    """Return a run's state in words. `seen_at` is when its process last renewed `run.json`."""
    return f"silent since {datetime.fromtimestamp(seen_at, UTC):%Y-%m-%d %H:%M} UTC" if state == "silent" else state


def _is_training(archive: RunArchive) -> bool:
    start = last_start(archive)
    return start is not None and start.by in TRAINERS


@contextlib.contextmanager
def reading(archive: RunArchive, step: int) -> Iterator[None]:
    """Raise a ConfigError that names the step if a file cannot be read within this context."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"step {step:08d} in {archive.run_dir / 'steps'} cannot be read: {error}") from None


def _read_step(
    archive: RunArchive,
    step: int,
    is_training: bool,
    written_at: float | None = None,
    state: RunState | None = None,
) -> StepData:
    """Read a step. `written_at`: when a running step's records were written; None for a step that has ended."""
    name, is_validation = describe_batch(step) if is_training else (str(step), False)
    with reading(archive, step):
        if written_at is not None:
            # FileNotFoundError: the step has ended, so its records are now complete.
            with contextlib.suppress(FileNotFoundError):
                running = tuple(archive.read_running(step))
                runs = state in ("running", None) and time.time() < written_at + RUNS_S
                summary = summarize(running)
                overview = StepOverview(findings_of(None, summary, runs=runs))
                return StepData(
                    archive, step, name, is_validation, summary, overview, written_at, running=running, runs=runs
                )
        summary, overview = archive.read_summary(step), archive.read_overview(step)
    return StepData(archive, step, name, is_validation, summary, overview, archive.changed_at(step))


def read_config(run_dir: Path) -> RolloutConfig | None:
    """Return the settings of a run; None if its directory has no readable ones."""
    path = run_dir / CONFIG
    try:
        return load_config(path, env={}) if path.is_file() else None
    except ConfigError:
        return None


def changed_settings(config: BaseModel) -> Iterator[tuple[str, str]]:
    """Yield the names and values of settings that are required or differ from their defaults, without secrets."""
    for name, value, about in all_settings(config):
        default = about.get_default(call_default_factory=False)
        if isinstance(value, SecretStr):
            yield name, "(secret)"
        elif name.rpartition(".")[2] == "endpoint_url" and value is not None:
            # The URL's path may let callers run code.
            yield name, urlsplit(value)._replace(path="", query="").geturl()
        elif value != default and not (default is PydanticUndefined and not value) and name != "run_id":
            yield name, str(value)


class RunOverview(BaseModel, frozen=True):
    """Overview of one run. Times are in unix seconds."""

    run_id: str
    folder: str
    began: float | None
    """Last start; None: its `run.json` cannot be read."""
    state: str
    """A `RunState`, or `unknown`."""
    error: str = ""
    """Why its last start failed."""
    steps: int
    seen_at: float | None
    """When its process last renewed the run's directory."""
    completed: int
    planned: int | None
    """None if unknown: the run was killed or is running, and its settings cannot be read."""
    mean_reward: float | None
    """Mean reward of the completed rollouts."""


def list_runs(runs: Path) -> list[RunOverview]:
    """Return the runs in a folder, the most recently started one first."""
    found = [
        summarize_run(path) for path in runs.glob("*") if (path / "run.json").is_file() or (path / "steps").is_dir()
    ]
    return sorted(found, key=lambda run: (run.began or 0.0, run.run_id), reverse=True)


def summarize_run(folder: Path) -> RunOverview:
    """Return the state of the run in a folder."""
    archive = RunArchive(folder)
    try:
        info = archive.read_info()
    except ValueError:
        info = None
    steps, seen_at = archive.begun_steps(), archive.info_renewed_at()
    error = info.starts[-1].error if info is not None else ""
    completed = planned = rewards = 0
    reward_sum = 0.0
    ended = {*archive.steps()}
    for step in steps:
        # The step is running, or was killed.
        if step not in ended:
            planned += _planned(archive, step) or 0
            completed += len(archive.results(step))
            continue
        try:
            summary = archive.read_summary(step)
        except ValueError as damage:
            error = error or f"a record of step {step_namer(archive)(step)} cannot be read: {damage}"
            continue
        planned, completed = planned + summary.planned, completed + summary.completed
        rewards, reward_sum = rewards + summary.completed_rewards, reward_sum + summary.completed_reward_sum
    return RunOverview(
        run_id=folder.absolute().name,
        folder=str(folder),
        began=info.starts[-1].process.since if info is not None else None,
        state=info.starts[-1].current_state(seen_at) if info is not None else "unknown",
        error=error,
        steps=len(steps),
        seen_at=seen_at or None,
        completed=completed,
        planned=planned or None,
        mean_reward=reward_sum / rewards if rewards else None,
    )


def _planned(archive: RunArchive, step: int) -> int | None:
    """Return the number of rollouts that a step without records plans, from its tasks and the run's settings."""
    try:
        group = yaml.safe_load((archive.run_dir / CONFIG).read_text())["group"]
        tasks = archive.tasks_file(step).read_bytes().count(b"\n")
        return tasks * (int(group["size"]) + int(group["oversample"]))
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None
