"""Build the page of all steps of a run: all values that its template shows."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_backend.base import formats
from rollout_backend.run.accounts.cost import Cost
from rollout_backend.run.accounts.findings import Finding, Level
from rollout_backend.run.accounts.summary import Learning, StepSummary, add
from rollout_backend.run.accounts.task_totals import REWARD
from rollout_backend.views.comparison import shown_comparison
from rollout_backend.views.page.charts import HEIGHT, SERIES_WIDTH, SHADES, nice, polyline
from rollout_backend.views.run_data import RunData, StepData, changed_settings

_MAX_TASKS, _MAX_CELLS, _FINDINGS = 200, 20_000, 8
# Maximum number of step ranges listed for one finding.
_RANGES = 4


@dataclass(frozen=True)
class StepEntry:
    """A step with its cost, and the link to its page, or None if it has no page."""

    data: StepData
    link: str | None
    cost: Cost | None

    @property
    def summary(self) -> StepSummary:
        return self.data.summary


def training_context(run: RunData, links: Mapping[int, str], against: RunData | None = None) -> dict[str, Any]:
    """Return the values for `training.html`. `links` are the links to pages of steps."""
    trained = run.training

    def entry(step: StepData) -> StepEntry:
        return StepEntry(step, links.get(step.step), step.cost(run.prices))

    steps = [*map(entry, trained)]
    summaries = [step.summary for step in trained]
    began, ended = min(each.began for each in summaries), max(each.ended for each in summaries)
    # Of a running step, nothing is left out yet.
    ended_steps = [step.summary for step in trained if not step.runs]
    left_out: Counter[str] = sum((Counter(each.left_out) for each in ended_steps), Counter())
    gaps = [max(0.0, after.began - before.ended) for before, after in pairwise(summaries)]
    # Each step, with the time until the next one.
    timed = [*zip(steps, [*gaps, 0.0], strict=True)]
    longest = max(step.summary.seconds + gap for step, gap in timed) or 1.0
    reasons = [reason for reason, _ in left_out.most_common()]
    most_lost = max((sum(each.left_out.values()) for each in ended_steps), default=0)
    return {
        "run": run,
        "steps": steps,
        "validations": [entry(step) for step in run.steps if step.validates and step not in trained],
        "began": datetime.fromtimestamp(began, UTC),
        "seconds": ended - began,
        "between": sum(gaps),
        "cost": run.prices.cost_of_steps(step.summary for step in run.steps) if run.prices is not None else None,
        "planned": sum(each.planned for each in summaries),
        "settled": sum(each.planned for each in ended_steps),
        "sampled": sum(each.sampled_tokens for each in summaries),
        "findings": _findings(steps),
        "learned": _learned(trained, [step for step in run.steps if step.validates and step not in trained]),
        "reward": _curve(steps, [each.mean_reward for each in summaries], [each.spread for each in summaries]),
        "lengths": _curve(
            steps,
            [each.lengths and each.lengths[0] for each in summaries],
            [each.lengths and (0.0, each.lengths[1]) for each in summaries],
        ),
        "staleness": _curve(steps, [step.overview.staleness for step in trained], [None] * len(steps)),
        "learning": _stacks(steps, map(_learning, steps)),
        "left_out": left_out,
        "reasons": reasons,
        "losses": _stacks(steps, [_losses(step, reasons, most_lost) for step in steps]),
        "most_lost": most_lost,
        "phases": _stacks(steps, [_phases(step, gap, longest) for step, gap in timed]),
        "longest": longest,
        "spent": add(each.spent for each in summaries).parts,
        "tasks": _tasks(trained),
        **shown_comparison(trained, against, () if against is None else against.training),
        "settings": [*changed_settings(run.config)] if run.config is not None else None,
    }


def _findings(steps: Sequence[StepEntry]) -> list[tuple[StepEntry, str, Finding]]:
    """Return the most important findings, each with its newest step and the names of all its steps.

    Findings that differ only in their numbers are merged.
    """
    found: dict[tuple[Level, str], list[tuple[int, Finding]]] = defaultdict(list)
    for number, step in enumerate(steps):
        for finding in step.data.overview.findings:
            if finding.level is not Level.NOTE:
                found[finding.level, re.sub(r"[\d.,]+", "0", finding.text)].append((number, finding))
    ordered = sorted(found.items(), key=lambda each: (each[0][0], -each[1][-1][0]))
    return [
        (steps[of_kind[-1][0]], _named(steps, [number for number, _ in of_kind]), of_kind[-1][1])
        for _, of_kind in ordered[:_FINDINGS]
    ]


def _named(steps: Sequence[StepEntry], numbers: Sequence[int]) -> str:
    """Return the names of steps, such as `step 3` or `steps 3, 12 to 15`, of which only the last ones are listed."""
    ranges: list[list[int]] = []
    for number in dict.fromkeys(numbers):
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    names = [" to ".join(steps[number].data.name for number in each) for each in ranges]
    listed = ", ".join(names[-_RANGES:])
    more = (
        f"{len(numbers)} steps, the last ones " if len(names) > _RANGES else "steps " if len(numbers) > 1 else "step "
    )
    return f"{more}{listed}"


def _learned(steps: Sequence[StepData], validations: Sequence[StepData]) -> list[str]:
    """Describe how rewards and solved tasks changed from the first to the last step that has rewards."""
    found = []
    for what, of_kind in (("reward", steps), ("held-out reward", validations)):
        ended = [each for each in of_kind if not each.runs and each.summary.mean_reward is not None]
        if not ended or (what == "reward" and len(ended) < 2):
            continue
        first, last = ended[0].summary, ended[-1].summary
        words = f"{what} {formats.number(first.mean_reward)}"
        if len(ended) > 1:
            unit = "steps" if what == "reward" else "validations"
            words += f" to {formats.number(last.mean_reward)} in {len(ended)} {unit}"
        found.append(words)
        if what == "reward" and first.tasks and last.tasks:
            solved = [f"{each.tasks_of(Learning.ALWAYS)} of {each.tasks}" for each in (first, last)]
            found.append(f"tasks always solved: {solved[0]} in the first step, {solved[1]} in the last")
    return found


def _curve(
    steps: Sequence[StepEntry], values: Sequence[float | None], bands: Sequence[tuple[float, ...] | None]
) -> dict[str, Any] | None:
    """Lay out values over steps, with a band around them; None without values."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    low = min([0.0, *known, *(band[0] for band in bands if band)])
    top = max([*known, *(band[1] for band in bands if band)])
    top = nice(top) if top > 0 else max(low + 1, 0.0)

    def y(value: float) -> float:
        return round(HEIGHT - HEIGHT * (value - low) / (top - low), 1)

    def x(number: int) -> float:
        return round(SERIES_WIDTH * (number + 0.5) / len(steps), 1)

    drawn = [(x(number), band) for number, band in enumerate(bands) if band is not None]
    edge = [*((at, y(band[1])) for at, band in drawn), *((at, y(band[0])) for at, band in reversed(drawn))]
    # The x and y coordinates, label and link.
    dots = [
        (x(number), y(value), f"step {steps[number].data.name}: {formats.number(value)}", steps[number].link)
        for number, value in enumerate(values)
        if value is not None
    ]
    return {
        "top": top,
        "low": low,
        "line": polyline((x(number), None if value is None else y(value)) for number, value in enumerate(values)),
        "band": f"{polyline(edge)}z" if edge else "",
        "dots": dots,
        "points": [(at, words) for at, _, words, _ in dots],
    }


def _stacks(steps: Sequence[StepEntry], parts: Iterable[Sequence[tuple[str, float, str]]]) -> dict[str, Any]:
    """Lay out a column per step, of parts with a class, a height from 0 to 1, and a label.

    `points` are the x coordinates of the columns' middles, with their parts as text.
    """
    columns, points = [], []
    for number, (step, of_step) in enumerate(zip(steps, parts, strict=True)):
        top, stacked, name = 1.0, [], f"step {step.data.name}"
        for css, height, words in of_step:
            if height > 0:
                top -= height
                stacked.append((css, top, height, f"{name}: {words}"))
        columns.append(stacked)
        listed = "; ".join(words for _, height, words in of_step if height > 0) or "none"
        points.append((round(SERIES_WIDTH * (number + 0.5) / len(steps), 1), f"{name}: {listed}"))
    return {"columns": columns, "points": points}


def _learning(step: StepEntry) -> list[tuple[str, float, str]]:
    of = step.summary.tasks or 1
    found = [(learning, step.summary.tasks_of(learning)) for learning in Learning]
    return [(each.name.lower(), number / of, f"{each}: {number} of {of} tasks") for each, number in found]


def _losses(step: StepEntry, reasons: Sequence[str], most: int) -> list[tuple[str, float, str]]:
    left_out = {} if step.data.runs else step.summary.left_out
    lost = [(number, reason, left_out.get(reason, 0)) for number, reason in enumerate(reasons)]
    return [(f"k{number % 6}", each / (most or 1), f"{reason}: {each}") for number, reason, each in lost]


def _phases(step: StepEntry, gap: float, longest: float) -> list[tuple[str, float, str]]:
    """Split the seconds of a step into the phases of its rollouts, plus the time until the next step."""
    summary = step.summary
    parts = [
        (key, share * summary.seconds / longest, f"{name}: {share:.0%}")
        for key, name, _, share in summary.spent.parts
    ]
    return [*parts, ("between", gap / longest, f"until the next step: {gap:.0f} s")]


def _tasks(steps: Sequence[StepData]) -> dict[str, Any]:
    """Return the mean rewards of tasks that several steps planned, one row per task."""
    hashes, means, sizes = list[NDArray[np.int64]](), list[NDArray[np.float64]](), list[int]()
    for step in steps:
        totals = step.read_totals()
        hashes.append(np.fromiter(map(hash, totals.task_ids), np.int64))
        # NaN without a reward. A long training has a million means, and their tasks' names would take much more.
        means.append(np.array(totals.means(REWARD), dtype=float))
        sizes.append(len(totals.task_ids))
    mean, ends, found = np.concatenate(means), np.cumsum(sizes), np.concatenate(hashes)
    order = np.argsort(found, kind="stable")
    _, firsts, times = np.unique(found[order], return_index=True, return_counts=True)
    # The positions of each repeated task among the tasks of all steps.
    repeated = [order[first : first + count] for first, count in zip(firsts, times, strict=True) if count > 1]
    rewards = mean[np.concatenate(repeated)] if repeated else np.zeros(0)
    rewards = rewards[~np.isnan(rewards)]
    low, high = min(0.0, float(rewards.min(initial=0.0))), float(rewards.max()) if len(rewards) else 1.0
    high = high if high > low else low + 1
    ordered = sorted(((_gain(mean[each]), int(each[0]), each) for each in repeated), key=lambda each: each[:2])
    half = min(_MAX_TASKS, _MAX_CELLS * len(ordered) // max(len(rewards), 1)) // 2
    shown = ordered if len(ordered) <= 2 * half else [*ordered[:half], *ordered[-half:]]
    names: dict[int, str] = {}
    first_steps = np.searchsorted(ends, [first for _, first, _ in shown], side="right").tolist()
    for number in set(first_steps):
        names |= dict(enumerate(steps[number].read_totals().task_ids, int(ends[number]) - sizes[number]))
    rows = []
    for gain, first, places in shown:
        numbers = np.searchsorted(ends, places, side="right").tolist()
        rows.append((names[first], gain, [*_cells(numbers, mean[places].tolist(), low, high)]))
    return {"rows": rows, "of": len(ordered), "once": int((times == 1).sum()), "low": low, "high": high}


def _gain(means: NDArray[np.float64]) -> float:
    values = means[~np.isnan(means)]
    return float(values[-1] - values[0]) if len(values) else 0.0


def _cells(
    steps: Sequence[int], means: Sequence[float], low: float, high: float
) -> Iterator[tuple[int, int | None, float | None]]:
    """Yield the place of each step, the shade of the task's mean, and the mean; None without a reward."""
    for number, mean in zip(steps, means, strict=True):
        missing = math.isnan(mean)
        yield number, None if missing else round(SHADES * (mean - low) / (high - low)), None if missing else mean
