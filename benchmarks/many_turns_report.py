"""Tables and the picture of what `benchmarks/many_turns.py` has measured. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import curves
from report import Table

Results = Mapping[str, Any]
Run = Mapping[str, Any]

TITLES = {"lake": "FrozenLake-v0", "sums": "sums with a tool"}
ENDS = 3  # steps that count as the beginning and the end of a run


def runs_of(results: Results, name: str) -> list[Run]:
    """Return the finished runs of a training by seed."""
    return sorted((run for run in results["runs"] if run["name"] == name), key=lambda run: int(run["seed"]))


def first(run: Run, what: str) -> float:
    """Return the mean of a value over the first steps."""
    return statistics.fmean(step[what] for step in run["steps"][:ENDS])


def last(run: Run, what: str) -> float:
    """Return the mean of a value over the last steps."""
    return statistics.fmean(step[what] for step in run["steps"][-ENDS:])


def learned(results: Results) -> Table:
    """Return one line for each training: how far it has learned."""
    lines = []
    for name, title in TITLES.items():
        if not (runs := runs_of(results, name)):
            continue
        ends = [last(run, "reward") for run in runs]
        lines.append(
            [
                title,
                str(len(runs)),
                str(len(runs[0]["steps"])),
                _change(runs, "reward"),
                f"{min(ends):.2f} to {max(ends):.2f}",
                f"{sum(last(run, 'reward') > first(run, 'reward') for run in runs)} of {len(runs)}",
                _change(runs, "won"),
            ]
        )
    header = ("task", "seeds", "steps", "reward", "at the end, by seed", "seeds that gained", "reward of 1")
    return Table("learned", header, lines)


def in_play(results: Results) -> Table:
    """Return one line for each training: of what its rollouts consist."""
    lines = []
    for name, title in TITLES.items():
        if not (runs := runs_of(results, name)):
            continue
        steps = [step for run in runs for step in run["steps"]]
        lines.append(
            [
                title,
                f"{sum(step['rollouts'] for step in steps):,}",
                *(_change(runs, what) for what in ("turns", "segments", "tool_calls", "sampled_tokens")),
                f"{max(step['prob_diff'] for step in steps):.1e}",
                f"{statistics.median(step['seconds'] for step in steps):.1f}",
            ]
        )
    per_rollout = ("turns", "segments", "tool calls", "sampled tokens")
    return Table("in play", ("task", "rollouts trained", *per_rollout, "probability difference", "s a step"), lines)


def _change(runs: Sequence[Run], what: str) -> str:
    """Return the means over all seeds at the beginning and at the end; one of them if they are equal."""
    ends: Sequence[Callable[[Run, str], float]] = (first, last)
    shown = [f"{statistics.fmean(end(run, what) for run in runs):.3g}" for end in ends]
    return " -> ".join(dict.fromkeys(shown))


def games(results: Results) -> Table:
    """Return one line for each game that SmolLM2-135M has played without training, best first."""
    rows = [row for run in runs_of(results, "games") for row in run["games"]]
    rows.sort(key=lambda row: (-row["reward"], row["game"]))
    header = ("game", "reward", "best", "groups whose rewards differ", "turns", "ended by an invalid move")
    lines = [
        [
            row["game"],
            *(f"{row[what]:.2f}" for what in ("reward", "best")),
            f"{row['with_spread']} of {row['groups']}",
            f"{row['turns']:.1f}",
            f"{row['invalid']:.0%}",
        ]
        for row in rows
    ]
    return Table("games", header, lines)


def picture(results: Results) -> str:
    """Return an SVG with the reward over the steps of each training."""
    lines = {
        title: [[step["reward"] for step in run["steps"]] for run in runs_of(results, name)]
        for name, title in TITLES.items()
    }
    return curves.picture(lines, "reward")
