"""Prints old and new rewards of a run in a terminal."""

from __future__ import annotations

from rich.console import Console

from agent_wrapper.contract import readable
from rollout_backend.results.rescoring import Rescoring
from rollout_backend.results.terminal.comparison_view import print_task_rewards, reward_sentence

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
