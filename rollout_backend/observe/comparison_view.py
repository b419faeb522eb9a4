"""Prints the comparison of two runs in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rollout_backend.observe.comparison import Comparison, Difference, RewardDifference

_TASKS_SHOWN = 10


def print_comparison(console: Console, found: Comparison) -> None:
    """Print how two runs differ, the rewards last."""
    first, second = found.first, found.second
    _print_table(console, "settings", first, second, _rows(found.settings))
    _print_table(console, "versions and agent", first, second, _rows(found.versions))
    _print_table(console, "rollouts", first, second, _rows(found.outcomes))
    _print_table(console, "mean of a rollout", first, second, _length_rows(found))
    changed = [task for task in found.rewards if task.first != task.second]
    rows = [
        (task.task_id, f"{task.first:.3f}", f"{task.second:.3f}", f"{task.second - task.first:+.3f}")
        for task in changed[:_TASKS_SHOWN]
    ]
    _print_table(console, "reward by task", first, second, rows, "difference")
    if len(changed) > _TASKS_SHOWN:
        console.print(f"... and {len(changed) - _TASKS_SHOWN} more tasks whose rewards differ: --json has all")
    for count, what in (
        (found.changed_tasks, "have the same id and another payload, and are not compared"),
        (found.only_first, f"have a reward in {first} only"),
        (found.only_second, f"have a reward in {second} only"),
    ):
        if count:
            console.print(f"tasks that {what}: {count}", highlight=False, soft_wrap=True)
    console.print(reward_sentence(found.reward), highlight=False, soft_wrap=True)


def reward_sentence(reward: RewardDifference | None) -> str:
    """Say by how much rewards differ, and whether that may be chance."""
    if reward is None:
        return "no task has a reward in both runs, so rewards are not compared"
    means = f"mean reward {reward.first:.3f} and {reward.second:.3f} over {_tasks(reward.tasks)} of both runs"
    if reward.low is None or reward.high is None:
        return f"{means}: {reward.mean:+.3f}; too few tasks to say whether that is chance"
    if reward.low == reward.high == 0:
        return f"{means}: equal on each task"
    chance = "may be chance" if reward.low <= 0 <= reward.high else "is more than chance"
    return f"{means}: {reward.mean:+.3f} (95% interval {reward.low:+.3f} to {reward.high:+.3f}), which {chance}"


def _tasks(count: int) -> str:
    return "1 task" if count == 1 else f"{count} tasks"


def _rows(differences: Iterable[Difference]) -> Sequence[tuple[str, ...]]:
    return [(each.name, _text(each.first), _text(each.second)) for each in differences]


def _length_rows(found: Comparison) -> Sequence[tuple[str, ...]]:
    first, second = found.lengths
    if first is None or second is None:
        return []
    rows = [
        ("turns", f"{first.turns:.2f}", f"{second.turns:.2f}"),
        ("sampled tokens", f"{first.sampled_tokens:.1f}", f"{second.sampled_tokens:.1f}"),
    ]
    if first.agent_s is not None and second.agent_s is not None:
        rows.append(("seconds of the agent", f"{first.agent_s:.1f}", f"{second.agent_s:.1f}"))
    return rows


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
