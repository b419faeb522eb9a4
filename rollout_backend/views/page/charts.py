"""Compute the geometry of a step's charts: SVG paths and labels. The templates contain the markup."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from statistics import correlation
from typing import Any, NamedTuple

import numpy as np

from agent_wrapper.contract import Outcome
from rollout_backend.base import formats
from rollout_backend.run.accounts.records import RolloutRecord
from rollout_backend.run.accounts.summary import Learning, TaskRewards, duration, percentiles, span

# Width of a full-width chart.
WIDTH = 1110
# Size of a chart over time or steps.
SERIES_WIDTH, HEIGHT = 500.0, 150.0
# Shades for rewards, in addition to the one for the lowest.
SHADES = 10
_BINS, _POINTS, _DOTS = 24, 160, 2000


def heatmap(tasks: Sequence[TaskRewards], place: dict[str, int]) -> dict[str, Any]:
    """Lay out the rewards of a step, with one column per task and one cell per rollout; columns wrap into bands.

    `place` maps each rollout to its index in the page's data.
    """
    rewards = [reward for task in tasks for reward in task.rewards]
    low, high = min([0.0, *rewards]), max(rewards, default=1.0)
    high = high if high > low else low + 1
    rows = max((len(task.records) for task in tasks), default=0)
    named = len(tasks) <= 56
    pitch = min(30.0, max(19.0, WIDTH / max(len(tasks), 1))) if named else 10.0
    size, per_band = pitch - (2 if named else 1), int(WIDTH // pitch)
    band_height = rows * pitch + (0 if rows == 1 else 6)
    paths: dict[str, list[str]] = defaultdict(list)
    for number, task in enumerate(tasks):
        x, top = number % per_band * pitch, number // per_band * band_height
        for row, record in enumerate(task.records):
            cell = f"M{x:g} {top + row * pitch:g}h{size:g}v{size:g}h-{size:g}z"
            shade = None if record.reward is None else round(SHADES * (record.reward - low) / (high - low))
            paths[f"miss {record.outcome or 'open'}" if shade is None else f"q{shade}"].append(cell)
    return {
        # One path per class: a shade, or how a rollout without a reward ended.
        "paths": [(name, "".join(cells)) for name, cells in sorted(paths.items())],
        "columns": [
            {"task_id": task.task_id, "x": number * pitch + size / 2, "teaches": task.learning is Learning.MIXED}
            for number, task in enumerate(tasks if named else ())
        ],
        "size": size,
        "height": math.ceil(len(tasks) / per_band) * band_height,
        "low": low,
        "high": high,
        # A script uses the grid to find the rollout at a position.
        "grid": {
            "cells": [[place[record.rollout_id] for record in task.records] for task in tasks],
            "pitch": pitch,
            "size": size,
            "perBand": per_band,
            "band": band_height,
        },
    }


def timeline(records: Sequence[RolloutRecord], place: dict[str, int]) -> dict[str, Any]:
    """Lay out when each rollout started, worked and ended: one line per rollout, ordered by invoke."""
    began, ended = span(records)
    seconds = max(ended - began, 1e-6)
    shown = sorted((each for each in records if each.invoked_at is not None), key=lambda each: each.invoked_at or 0.0)
    height = min(420.0, max(70.0, 6.0 * len(shown)))
    pitch = height / max(len(shown), 1)

    def at(time: float) -> float:
        return round((time - began) / seconds * WIDTH, 1)

    paths: dict[str, list[str]] = defaultdict(list)
    for number, record in enumerate(shown):
        y = f"{(number + 0.5) * pitch:.2f}"
        start = record.invoked_at or began
        accepted = record.accepted_at
        end = record.settled_at if record.settled_at is not None else ended
        css = "work" if record.outcome is Outcome.COMPLETED else f"work {record.outcome or 'open'}"
        if accepted is not None:
            paths["starting"].append(f"M{at(start):g} {y}H{max(at(accepted), at(start) + 0.8):g}")
            start = accepted
        paths[css].append(f"M{at(start):g} {y}H{max(at(end), at(start) + 0.8):g}")
    ends = sorted(each.settled_at for each in shown if each.settled_at is not None)
    return {
        "paths": [(name, "".join(lines)) for name, lines in sorted(paths.items())],
        "pitch": pitch,
        "height": height,
        "seconds": seconds,
        # The x coordinate of the last invoke.
        "ramp": at(max((each.invoked_at or began for each in shown), default=began)),
        # The x coordinate at which 95 % of the rollouts had ended.
        "tail": at(ends[max(0, int(len(ends) * 0.95) - 1)] if ends else ended),
        "grid": {"lines": [place[record.rollout_id] for record in shown], "linePitch": pitch},
    }


def polyline(points: Iterable[tuple[float, float | None]]) -> str:
    """Return the path of a line, with gaps where a point has no y."""
    out, pen = [], "M"
    for x, y in points:
        out.append("" if y is None else f"{pen}{x:.1f} {y:.1f}")
        pen = "M" if y is None else "L"
    return "".join(out)


class Line(NamedTuple):
    """A named line of a series. `values` has None for unknown values."""

    name: str
    css: str
    values: Sequence[float | None]
    top: float
    unit: str = ""

    @property
    def path(self) -> str:
        """Return the line's path."""
        step = SERIES_WIDTH / max(len(self.values) - 1, 1)
        heights = [None if value is None else HEIGHT - HEIGHT * value / self.top for value in self.values]
        return polyline((number * step, y) for number, y in enumerate(heights))


def _series(lines: Sequence[Line], seconds: float) -> dict[str, Any]:
    """Lay out lines over the same period. `points` are the x coordinates of the values, with the values as text."""
    every = max(len(lines[0].values) - 1, 1)
    points = []
    for number, values in enumerate(zip(*(line.values for line in lines), strict=True)):
        known = ((line, value) for line, value in zip(lines, values, strict=True) if value is not None)
        words = ", ".join(f"{line.name} {formats.number(value)}{line.unit}" for line, value in known)
        x, after = round(SERIES_WIDTH * number / every, 1), seconds * number / every
        points.append((x, f"after {formats.number(after)} s: {words}"))
    return {
        "lines": lines,
        "seconds": seconds,
        "points": points,
        "peak": max(each or 0.0 for each in lines[0].values),
    }


def activity(records: Sequence[RolloutRecord]) -> dict[str, Any]:
    """Return the number of working and of finished rollouts over time."""
    began, ended = span(records)
    seconds = max(ended - began, 1e-6)
    work, done = [0] * (_POINTS + 1), [0] * (_POINTS + 1)

    def bin_of(time: float) -> int:
        return min(_POINTS, max(0, math.ceil((time - began) / seconds * _POINTS)))

    for record in records:
        if record.accepted_at is not None:
            work[bin_of(record.accepted_at)] += 1
        if record.settled_at is not None:
            done[bin_of(record.settled_at)] += 1
            if record.accepted_at is not None:
                work[bin_of(record.settled_at)] -= 1
    top = nice(max(len(records), 1))
    at_work, finished = tuple(accumulate(work)), tuple(accumulate(done))
    return _series([Line("at work", "a", at_work, top), Line("finished", "b", finished, top)], seconds)


def throughput(records: Sequence[RolloutRecord]) -> dict[str, Any]:
    """Return sampled tokens per second and cache hits over time.

    A rollout's tokens are spread evenly over its working time, because results do not record when each was sampled;
    its cache hits count at its end.
    """
    began, ended = span(records)
    seconds = max(ended - began, 1e-6)
    rates, prompts, cached = [0.0] * (_POINTS + 2), [0] * (_POINTS + 1), [0] * (_POINTS + 1)
    for record in records:
        if record.result is None or record.accepted_at is None or record.settled_at is None:
            continue
        first = max(0, int((record.accepted_at - began) / seconds * _POINTS))
        last = min(_POINTS, max(first, int((record.settled_at - began) / seconds * _POINTS)))
        rate = record.result.sampled_tokens / ((last - first + 1) * seconds / _POINTS)
        rates[first] += rate
        rates[last + 1] -= rate
        if record.result.cached_tokens is not None:
            prompts[last] += record.result.prompt_tokens
            cached[last] += record.result.cached_tokens
    tokens = tuple(max(0.0, value) for value in accumulate(rates[:-1]))
    hits = tuple(100 * hit / all_ if all_ else None for hit, all_ in zip(cached, prompts, strict=True))
    lines = [Line("tokens/s", "a", tokens, nice(max([*tokens, 1.0])))]
    if any(prompts):
        lines.append(Line("cache hits", "c", _bridged(hits), 100.0, " %"))
    return _series(lines, seconds)


def _bridged(values: Sequence[float | None]) -> tuple[float | None, ...]:
    """Fill gaps with the last known value, up to the last known one."""
    known = [number for number, value in enumerate(values) if value is not None]
    out, last = [], None
    for number, value in enumerate(values):
        last = value if value is not None else last
        out.append(last if known and number <= known[-1] else None)
    return tuple(out)


def nice(top: float) -> float:
    """Return a round number of at least `top`, for the end of an axis."""
    unit = 10.0 ** math.floor(math.log10(max(top, 1e-9)))
    return next(each * unit for each in (1, 2, 2.5, 4, 5, 8, 10) if each * unit >= top * (1 - 1e-9))


def histogram(values: Sequence[float]) -> dict[str, Any] | None:
    """Return the distribution of the values in bins of equal width, with two percentiles; None without values."""
    if not values:
        return None
    low, high = min(values), max(values)
    high = high if high > low else low + 1
    counts, edges = np.histogram(values, _BINS, (low, high))
    return {
        # Height from 0 to 1, count, range.
        "bars": [
            (number / max(counts), number, f"{formats.number(start)} to {formats.number(end)}")
            for number, (start, end) in zip(counts.tolist(), pairwise(edges), strict=True)
        ],
        "low": low,
        "high": high,
        # Name, value, position from 0 to 1.
        "marks": [
            (name, value, (value - low) / (high - low))
            for name, value in zip(("p50", "p95"), percentiles(values, 50, 95), strict=True)
        ],
    }


def scatter(records: Sequence[RolloutRecord]) -> dict[str, Any] | None:
    """Lay out rewards against lengths for a bounded number of rollouts; None without a reward."""
    pairs = [(each.result.sampled_tokens, each.reward) for each in records if each.result and each.reward is not None]
    if not pairs:
        return None
    tokens, rewards = zip(*pairs, strict=True)
    low, high, shortest, longest = min(rewards), max(rewards), min(tokens), max(tokens)
    high = high if high > low else low + 1
    every = math.ceil(len(pairs) / _DOTS)
    # Spread equal rewards slightly, so that their number is visible.
    dots = [
        (300 * (x - shortest) / max(longest - shortest, 1), 94 - 88 * (y - low) / (high - low) + i * 7919 % 13 - 6)
        for i, (x, y) in enumerate(pairs[::every])
    ]
    varied = len(set(tokens)) > 1 and len(set(rewards)) > 1
    return {
        "path": "".join(f"M{x:.1f} {y:.1f}h0" for x, y in dots),
        "dots": len(dots),
        "of": len(pairs),
        "shortest": shortest,
        "longest": longest,
        "low": low,
        "high": high,
        "correlation": correlation(tokens, rewards) if varied else None,
    }


def durations(records: Iterable[RolloutRecord]) -> list[float]:
    """Return the seconds of the completed rollouts."""
    times = (duration(record) for record in records if record.outcome is Outcome.COMPLETED)
    return [seconds for seconds in times if seconds is not None]
