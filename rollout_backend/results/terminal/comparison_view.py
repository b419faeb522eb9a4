"""Print the differences between two runs, or between two versions of a run's rewards."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agent_wrapper.contract import readable
from rollout_backend.core.formats import count
from rollout_backend.results.comparison import Comparison, Difference, Entry, TaskReward
from rollout_backend.results.rescoring import Rescoring
from rollout_backend.results.terminal.view import print_text

_TASKS_SHOWN = 10


def print_comparison(console: Console, found: Comparison) -> None:
    """Print the differences between two runs, the rewards last."""
    first, second = found.first, found.second
    _print_table(console, "settings", first, second, _rows(found.settings))
    _print_table(console, "versions and agent", first, second, _rows(found.versions))
    _print_table(console, "rollouts", first, second, _rows(found.outcomes))
    means = [(each.name, *_numbers(each)) for each in found.measures]
    _print_table(console, "mean over common tasks", first, second, means, "difference, 95%")
    print_task_rewards(console, first, second, found.rewards)
    for number, what in (
        (found.changed_tasks, "have the same id and another payload, and are not compared"),
        (found.only_first, f"have a reward in {first} only"),
        (found.only_second, f"have a reward in {second} only"),
    ):
        if number:
            print_text(console, f"tasks that {what}: {number}")
    print_text(console, reward_sentence(found.reward))


def print_task_rewards(console: Console, first: str, second: str, rewards: Iterable[TaskReward]) -> None:
    """Print the tasks whose rewards differ most."""
    changed = [task for task in rewards if task.first != task.second]
    rows = [
        (task.task_id, f"{task.first:.3f}", f"{task.second:.3f}", f"{task.second - task.first:+.3f}")
        for task in changed[:_TASKS_SHOWN]
    ]
    _print_table(console, "reward by task", first, second, rows, "difference")
    if len(changed) > _TASKS_SHOWN:
        console.print(f"... and {len(changed) - _TASKS_SHOWN} more tasks whose rewards differ: --json has all")


def reward_sentence(reward: Difference | None, both: str = "both runs") -> str:
    """Describe by how much rewards differ, and whether that may be chance."""
    if reward is None:
        return f"no task has a reward in {both}, so rewards are not compared"
    change, margin = reward.change.value, reward.change.margin
    means = f"mean reward {reward.first:.3f} and {reward.second:.3f} over {count(reward.tasks, 'task')} of {both}"
    if margin is None:
        return f"{means}: {change:+.3f}; too few tasks to say whether that is chance"
    if change == margin == 0:
        return f"{means}: equal on each task"
    chance = "is more than chance" if reward.is_clear else "may be chance"
    interval = f"95% interval {change - margin:+.3f} to {change + margin:+.3f}"
    return f"{means}: {change:+.3f} ({interval}), which {chance}"


def _rows(entries: Iterable[Entry]) -> Sequence[tuple[str, ...]]:
    return [(each.name, _text(each.first), _text(each.second)) for each in entries]


def _numbers(found: Difference) -> tuple[str, str, str]:
    margin = "" if found.change.margin is None else f" ± {found.change.margin:.3f}"
    return f"{found.first:.3f}", f"{found.second:.3f}", f"{found.change.value:+.3f}{margin}"


def _print_table(
    console: Console, title: str, first: str, second: str, rows: Sequence[tuple[str, ...]], *more: str
) -> None:
    if not rows:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (title, first, second, *more):
        table.add_column(escape(name), overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
    console.print()


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


_FAILURES_SHOWN = 20


def print_rescoring(console: Console, found: Rescoring) -> None:
    """Print the tasks whose rewards differ most, the rollouts that have no new reward, and the difference."""
    print_task_rewards(console, "stored", found.scorer.function, found.tasks)
    lines = [f"{each.rollout_id}, step {each.step}: {readable(each.error)}" for each in found.failures]
    if len(lines) > _FAILURES_SHOWN:
        lines[_FAILURES_SHOWN:] = [f"... and {len(lines) - _FAILURES_SHOWN} more: --json has all"]
    scored = [each for each in found.rollouts if each.new is not None]
    changed = sum(each.new != each.old for each in scored)
    counts = f"{len(scored)} of {len(found.rollouts)} completed rollouts scored, {changed} with another reward"
    lines += [
        f"{counts}, {len(found.failures)} without a new reward" if found.failures else counts,
        reward_sentence(found.reward, "both versions"),
        f"new version: {found.folder}",
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
