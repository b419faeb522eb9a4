"""Build the page of all steps of a run: all values that its template shows."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from statistics import fmean
from typing import Any

from rollout_backend.core import formats
from rollout_backend.results.comparison import shown_comparison
from rollout_backend.results.cost import Cost, Prices
from rollout_backend.results.findings import Level
from rollout_backend.results.page.charts import HEIGHT, SERIES_WIDTH, SHADES, nice, polyline
from rollout_backend.results.run_data import RunData, StepData, changed_settings
from rollout_backend.results.summary import Learning, add, percentiles, span

_MAX_TASKS, _FINDINGS = 200, 8


@dataclass(frozen=True)
class StepEntry:
    """A step with its numbers and the link to its page, or None if it has no page."""

    data: StepData
    link: str | None
    spread: tuple[float, ...] | None  # 10th and 90th percentile of its tasks' mean rewards
    lengths: tuple[float, ...] | None  # mean and 90th percentile of the number of sampled tokens
    left_out: Mapping[str, int]  # untrained rollouts by reason
    cost: Cost | None

    @property
    def staleness(self) -> float | None:
        report = self.data.report
        return report.staleness.mean if report is not None and report.staleness is not None else None


def entry_of(step: StepData, link: str | None, prices: Prices | None) -> StepEntry:
    """Return the numbers of one step."""
    means = [task.mean for task in step.summary.tasks if task.mean is not None]
    tokens = [record.result.sampled_tokens for record in step.records if record.result is not None]
    return StepEntry(
        step,
        link,
        percentiles(means, 10, 90) if means else None,
        (fmean(tokens), *percentiles(tokens, 90)) if tokens else None,
        Counter(
            (record.reason or str(record.outcome or "not settled")) if not record.trainable else "group not usable"
            for record in step.records
            if not record.trained
        ),
        step.cost(prices),
    )


def training_context(run: RunData, links: Mapping[int, str], against: RunData | None = None) -> dict[str, Any]:
    """Return the values for `training.html`. `links` are the links to pages of steps."""
    trained = run.training
    steps = [entry_of(step, links.get(step.step), run.prices) for step in trained]
    records = [record for step in trained for record in step.records]
    began, ended = span(records)
    left_out: Counter[str] = sum((Counter(step.left_out) for step in steps), Counter())
    gaps = [max(0.0, span(after.records)[0] - span(before.records)[1]) for before, after in pairwise(trained)]
    timed = [*zip(steps, [*gaps, 0.0], strict=True)]  # each step, with the time until the next
    longest = max(step.data.summary.seconds + gap for step, gap in timed) or 1.0
    reasons = [reason for reason, _ in left_out.most_common()]
    most_lost = max(sum(step.left_out.values()) for step in steps)
    return {
        "run": run,
        "steps": steps,
        "validations": [
            entry_of(step, links.get(step.step), run.prices)
            for step in run.steps
            if step.validates and step not in trained
        ],
        "began": datetime.fromtimestamp(began, UTC),
        "seconds": ended - began,
        "between": sum(gaps),
        "cost": run.prices.cost_of_steps(step.records for step in run.steps) if run.prices is not None else None,
        "planned": len(records),
        "sampled": sum(step.data.summary.sampled_tokens for step in steps),
        "findings": _findings(steps),
        "reward": _curve(
            steps,
            [step.data.summary.mean_reward for step in steps],
            [step.spread for step in steps],
        ),
        "lengths": _curve(
            steps,
            [None if step.lengths is None else step.lengths[0] for step in steps],
            [None if step.lengths is None else (0.0, step.lengths[1]) for step in steps],
        ),
        "staleness": _curve(steps, [step.staleness for step in steps], [None] * len(steps)),
        "learning": _stacks(steps, map(_learning, steps)),
        "left_out": left_out,
        "reasons": reasons,
        "losses": _stacks(steps, [_losses(step, reasons, most_lost) for step in steps]),
        "most_lost": most_lost,
        "phases": _stacks(steps, [_phases(step, gap, longest) for step, gap in timed]),
        "longest": longest,
        "spent": add(step.data.summary.spent for step in steps).parts,
        "tasks": _tasks(steps),
        **shown_comparison(run, trained, against, () if against is None else against.training),
        "settings": [*changed_settings(run.config)] if run.config is not None else None,
    }


def _findings(steps: Sequence[StepEntry]) -> list[tuple[StepEntry, Any]]:
    """Return the most important findings, those of the newest steps first."""
    found = [
        (step, finding)
        for step in reversed(steps)
        for finding in step.data.findings
        if finding.level is not Level.NOTE
    ]
    return sorted(found, key=lambda each: each[1].level)[:_FINDINGS]


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
    dots = [  # x, y, label, link
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
    of = len(step.data.summary.tasks) or 1
    found = [(learning, step.data.summary.tasks_of(learning)) for learning in Learning]
    return [(each.name.lower(), number / of, f"{each}: {number} of {of} tasks") for each, number in found]


def _losses(step: StepEntry, reasons: Sequence[str], most: int) -> list[tuple[str, float, str]]:
    lost = [(number, reason, step.left_out.get(reason, 0)) for number, reason in enumerate(reasons)]
    return [(f"k{number % 6}", left_out / (most or 1), f"{reason}: {left_out}") for number, reason, left_out in lost]


def _phases(step: StepEntry, gap: float, longest: float) -> list[tuple[str, float, str]]:
    """Split the seconds of a step into the phases of its rollouts, plus the time until the next step."""
    summary = step.data.summary
    parts = [
        (key, share * summary.seconds / longest, f"{name}: {share:.0%}")
        for key, name, _, share in summary.spent.parts
    ]
    return [*parts, ("between", gap / longest, f"until the next step: {gap:.0f} s")]


def _tasks(steps: Sequence[StepEntry]) -> dict[str, Any]:
    """Return the mean rewards of tasks that several steps planned, one row per task."""
    means: dict[str, dict[int, float | None]] = defaultdict(dict)
    for number, step in enumerate(steps):
        for task in step.data.summary.tasks:
            means[task.task_id][number] = task.mean
    repeated = {task: found for task, found in means.items() if len(found) > 1}
    known = [value for found in repeated.values() for value in found.values() if value is not None]
    low, high = min([0.0, *known]), max(known, default=1.0)
    high = high if high > low else low + 1

    def gain(found: Mapping[int, float | None]) -> float:
        values = [value for _, value in sorted(found.items()) if value is not None]
        return values[-1] - values[0] if values else 0.0

    ordered = sorted(repeated.items(), key=lambda each: (gain(each[1]), each[0]))
    half = _MAX_TASKS // 2
    shown = ordered if len(ordered) <= _MAX_TASKS else [*ordered[:half], *ordered[-half:]]
    return {
        "rows": [
            (
                task,
                gain(found),
                [
                    (number, None if mean is None else round(SHADES * (mean - low) / (high - low)), mean)
                    for number, mean in sorted(found.items())
                ],
            )
            for task, found in shown
        ],
        "of": len(repeated),
        "once": len(means) - len(repeated),
        "low": low,
        "high": high,
    }
