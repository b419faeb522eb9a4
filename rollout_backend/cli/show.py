"""`rollout show`: print a run, a step, a task, a rollout or a turn."""

from __future__ import annotations

import contextlib
import json
import shlex
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent_wrapper.contract import ContractError, Rollout
from rollout_backend.cli.common import RUNS, StepName, complete_run, console, find_run
from rollout_backend.errors import ConfigError

if TYPE_CHECKING:
    from rollout_backend.run.accounts.archive import RunArchive
    from rollout_backend.run.accounts.records import RolloutRecord
    from rollout_backend.views.terminal.run_view import RunView
    from rollout_backend.views.terminal.view import TaskView

_LISTED = 20


def complete_id(context: typer.Context, incomplete: str) -> list[str]:
    """Complete the id of a run, or of a task in a run's newest step. If one task matches, include its rollouts."""
    from rollout_backend.run.accounts.archive import RunArchive, RunNames

    run = context.params.get("run")
    runs = complete_run(incomplete) if run is None else []
    try:
        archive = RunArchive(find_run(run))
        names = RunNames(archive, archive.begun_steps()[-1:])
    except (ConfigError, OSError, ValueError):
        return runs
    found = names.starting_with(incomplete)
    if len(found) == 1:
        found = (found[0], *names.rollouts(found[0]))
    return [*runs, *found]


def show(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN|TASK|ROLLOUT]",
            help="Run (id in ./runs, or folder), task, or rollout such as task-00003.1. A unique prefix "
            "of an id is enough. Default: the newest run in ./runs.",
            autocompletion=complete_id,
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Run of the task or rollout. Default: the newest run in ./runs.",
            autocompletion=complete_run,
        ),
    ] = None,
    step: StepName = None,
    turn: Annotated[
        int | None, typer.Option(min=0, help="Only this turn (model call) of the rollout, counted from 0.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, one object per line.")] = False,
) -> None:
    """Show a run, one of its steps, a task, a rollout, or a single turn.

    For a run: its numbers, what to look at first, and where to look next. For a task: its rollouts with their rewards
    and reasons. For a rollout: its conversation, attempts, sessions and log, or how and why it ended without a
    result. For a turn: messages in and out, tokens, log probabilities, time and weight version.
    """
    if turn is not None and name is None:
        raise ConfigError("--turn shows a turn of one rollout: name the rollout")
    folder = _run_named(name) if name is not None and run is None else None
    if folder is not None:
        name = None
    else:
        folder = find_run(run)
    shown = _Shown(folder, step, turn, as_json)
    try:
        if name is None:
            shown.run()
        elif not shown.rollout(name) and not shown.task(name):
            _show_similar(shown, name, step, other_runs=run is None)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"a record in {folder / 'steps'} cannot be read: {error}") from None


def _show_similar(shown: _Shown, name: str, step: str | None, *, other_runs: bool) -> None:
    """Show the id that starts with the name. Raises ConfigError with the candidates unless there is exactly one."""
    from rollout_backend.run.accounts.archive import RunNames

    names = RunNames(shown.archive, shown.steps())
    found = (name,) if name in names.tasks else names.starting_with(name)
    runs = complete_run(name) if other_runs and name not in names.tasks else []
    several = [*found, *runs]
    if len(several) > 1:
        more = [f"and {len(several) - _LISTED} more"] if len(several) > _LISTED else []
        lines = "\n  ".join([*several[:_LISTED], *more])
        raise ConfigError(f"several ids begin with {name!r}: name one of them\n  {lines}")
    if runs:
        _Shown(find_run(runs[0]), step, shown.turn, shown.as_json).run()
    elif not found:
        nearest = names.nearest(name)
        advice = f"did you mean {nearest}? Or name" if nearest else "name"
        raise ConfigError(f"{shown.place} holds no task and no rollout {name!r}; {advice} another run with --run")
    elif not shown.rollout(found[0]) and not shown.task(found[0]):
        results = ", ".join(names.rollouts(found[0])) or "none"
        raise ConfigError(
            f"the step of task {found[0]!r} has not ended, or was killed, so {shown.place} has no records of it. "
            f"Its results so far, which `rollout show` prints: {results}"
        )


class _Shown:
    """Shows parts of one run."""

    def __init__(self, folder: Path, step: str | None, turn: int | None, as_json: bool) -> None:
        from rollout_backend.run.accounts.archive import RunArchive
        from rollout_backend.views.run_data import find_step, step_namer

        self.folder, self.turn, self.as_json = folder, turn, as_json
        self.archive: RunArchive = RunArchive(folder)
        self.step_name = step_namer(self.archive)
        self.step = None if step is None else find_step(self.archive, step)
        self.place = f"{folder}" if step is None else f"step {step} of {folder}"

    def steps(self) -> list[int]:
        return [step for step in self.archive.begun_steps() if self.step in (None, step)]

    @cached_property
    def option(self) -> str:
        """Return the option that a later `rollout show` needs to find this run."""
        # ./runs may contain no run.
        with contextlib.suppress(ConfigError):
            if find_run(None).samefile(self.folder):
                return ""
        return f" --run {shlex.quote(str(self.folder))}"

    def _print(self, view: RunView | TaskView) -> None:
        print(json.dumps(view.fields())) if self.as_json else view.print(console)

    def run(self) -> None:
        from rollout_backend.views.terminal.run_view import STEPS, RunView

        if self.turn is not None:
            raise ConfigError("--turn shows a turn of one rollout: name the rollout")
        self._print(RunView.read(self.folder, self.step, self.option, last=None if self.as_json else STEPS))

    def task(self, task_id: str) -> bool:
        """Show a task's rollouts, step by step. Return False if the run has no such task."""
        from rollout_backend.views.run_data import read_run_id
        from rollout_backend.views.terminal.view import TaskView

        records = [record for record in self.archive.find_task(task_id) if self.step in (None, record.step)]
        if records and self.turn is not None:
            ids = ", ".join(dict.fromkeys(record.rollout_id for record in records))
            raise ConfigError(f"--turn shows a turn of one rollout, and {task_id} is a task: name one of {ids}")
        for step in dict.fromkeys(record.step for record in records):
            mine = tuple(record for record in records if record.step == step)
            tasks = {}
            # Without tasks, show the records without the payload.
            with contextlib.suppress(ConfigError):
                tasks = self.archive.read_tasks(step)
            payload = tasks.get(task_id, {}).get("payload")
            self._print(
                TaskView(read_run_id(self.folder), step, self.step_name(step), task_id, payload, mine, self.option)
            )
        return bool(records)

    def rollout(self, rollout_id: str) -> bool:
        """Show a rollout, or one of its turns, in each step. Return False if the run has no such rollout."""
        records = {record.step: record for record in self.archive.find_records(rollout_id)}
        results = {found.step: found for found in map(_read_rollout, self.archive.find_rollout(rollout_id))}
        steps = [step for step in sorted({*records, *results}) if self.step in (None, step)]
        for step in steps:
            record, result = records.get(step), results.get(step)
            if result is not None and record is not None and not record.is_of(result):
                result = None
            if self.turn is not None:
                self._turn(result, rollout_id, self.step_name(step))
            else:
                self._one(record, result, self.step_name(step))
        return bool(steps)

    def _one(self, record: RolloutRecord | None, result: Rollout | None, step: str) -> None:
        from rollout_backend.views.terminal.view import print_record, print_rollout

        if self.as_json:
            found = result or record
            assert found is not None
            print(found.model_dump_json())
            return
        if result is not None:
            print_rollout(console, result, step)
        if record is not None:
            print_record(console, record, step, with_outcome=result is None)

    def _turn(self, result: Rollout | None, rollout_id: str, step: str) -> None:
        from rollout_backend.model.rendering.token_bytes import TokenText
        from rollout_backend.views.run_data import read_config
        from rollout_backend.views.terminal.turn_view import TurnView

        assert self.turn is not None
        if result is None:
            why = f"rollout show {rollout_id}{self.option} says why"
            raise ConfigError(f"{rollout_id} has no turns, because no result was stored: {why}")
        view = TurnView.of(result, self.turn, step, self.option)
        if self.as_json:
            print(json.dumps(view.fields()))
            return
        config = read_config(self.folder)
        view.print(console, TokenText.load(config.model.path) if config is not None else None)


def _run_named(name: str) -> Path | None:
    """Return the directory of the run with that id in ./runs, or at that path, or None."""
    if not name or (RUNS / name).is_dir():
        return find_run(name)
    return Path(name) if any((Path(name) / part).exists() for part in ("run.json", "steps", "rollouts")) else None


def _read_rollout(path: Path) -> Rollout:
    try:
        return Rollout.decode(path.read_bytes())
    except ContractError as error:
        raise ConfigError(f"{path} is not a rollout: {error}") from None
