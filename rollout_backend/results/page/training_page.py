"""Build the page of all steps of a run: all values that its template shows."""

import operator
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import reduce
from itertools import pairwise
from statistics import fmean
from typing import Any

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


@dataclass(frozen=True)
class Column:
    """The stacked parts of one step: a class, a height from 0 to 1, and a label."""

    link: str | None
    name: str
    parts: tuple[tuple[str, float, float, str], ...]  # class, top, height, label


@dataclass(frozen=True)
class Curve:
    """Values over steps, with a band around them."""

    top: float
    low: float
    line: str
    band: str
    dots: tuple[tuple[float, float, str, str | None], ...]  # x, y, label, link

    @property
    def points(self) -> list[tuple[float, str]]:
        """Return the x coordinate of each value, with its label."""
        return [(x, words) for x, _, words, _ in self.dots]


def points_of(columns: Sequence[Column]) -> list[tuple[float, str]]:
    """Return the x coordinate of each column's middle, with its parts as text."""
    return [
        (
            round(SERIES_WIDTH * (number + 0.5) / len(columns), 1),
            f"{column.name}: {'; '.join(words for *_, words in column.parts) or 'none'}",
        )
        for number, column in enumerate(columns)
    ]


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
            (record.reason or "completed") if not record.trainable else "group not usable"
            for record in step.records
            if not record.trained
        ),
        step.cost(prices),
    )


def training_context(run: RunData, links: Mapping[int, str], against: RunData | None = None) -> dict[str, Any]:
    """Return the values for `training.html`. `links` are the links to pages of steps."""
    trained = [step for step in run.steps if not step.validates] or list(run.steps)
    steps = [entry_of(step, links.get(step.step), run.prices) for step in trained]
    records = [record for step in trained for record in step.records]
    others = [each for step in against.steps for each in step.records] if against is not None else []
    began, ended = span(records)
    left_out: Counter[str] = sum((Counter(step.left_out) for step in steps), Counter())
    gaps = [max(0.0, span(after.records)[0] - span(before.records)[1]) for before, after in pairwise(trained)]
    reasons = [reason for reason, _ in left_out.most_common()]
    costs = [step.cost for step in steps if step.cost is not None]
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
        "cost": reduce(operator.add, costs) if costs else None,
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
        "points_of": points_of,
        "learning": [_learning(step) for step in steps],
        "left_out": left_out,
        "reasons": reasons,
        "losses": _losses(steps, reasons),
        "most_lost": max((sum(step.left_out.values()) for step in steps), default=0),
        "phases": _phases(steps, gaps),
        "longest": _longest(steps, gaps),
        "spent": add(step.data.summary.spent for step in steps).parts,
        "tasks": _tasks(steps),
        **shown_comparison(run, records, against, others),
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
) -> Curve | None:
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
    return Curve(
        top,
        low,
        polyline((x(number), None if value is None else y(value)) for number, value in enumerate(values)),
        f"{polyline(edge)}z" if edge else "",
        tuple(
            (x(number), y(value), f"step {steps[number].data.name}: {value:.4g}", steps[number].link)
            for number, value in enumerate(values)
            if value is not None
        ),
    )


def _stack(step: StepEntry, parts: Sequence[tuple[str, float, str]]) -> Column:
    top, out = 1.0, []
    for css, part, words in parts:
        if part > 0:
            top -= part
            out.append((css, top, part, words))
    return Column(step.link, f"step {step.data.name}", tuple(out))


def _learning(step: StepEntry) -> Column:
    of = len(step.data.summary.tasks) or 1
    found = [(learning, step.data.summary.tasks_of(learning)) for learning in Learning]
    return _stack(
        step, [(each.name.lower(), number / of, f"{each}: {number} of {of} tasks") for each, number in found]
    )


def _losses(steps: Sequence[StepEntry], reasons: Sequence[str]) -> list[Column]:
    most = max((sum(step.left_out.values()) for step in steps), default=0) or 1
    return [
        _stack(
            step,
            [
                (
                    f"k{reasons.index(reason) % 6}",
                    step.left_out.get(reason, 0) / most,
                    f"{reason}: {step.left_out.get(reason, 0)}",
                )
                for reason in reasons
            ],
        )
        for step in steps
    ]


def _phases(steps: Sequence[StepEntry], gaps: Sequence[float]) -> list[Column]:
    """Split the seconds of each step into the phases of its rollouts, plus the time until the next step."""
    longest, out = _longest(steps, gaps), []
    for step, gap in zip(steps, [*gaps, 0.0], strict=True):
        parts = [
            (key, share * step.data.summary.seconds / longest, f"{name}: {share:.0%}")
            for key, name, _, share in step.data.summary.spent.parts
        ]
        out.append(_stack(step, [*parts, ("between", gap / longest, f"until the next step: {gap:.0f} s")]))
    return out


def _longest(steps: Sequence[StepEntry], gaps: Sequence[float]) -> float:
    """Return the duration of the longest step, including the time until the next."""
    return max(step.data.summary.seconds + gap for step, gap in zip(steps, [*gaps, 0.0], strict=True)) or 1.0


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
