"""Tables and pictures of what `learning_curves.py`, `lost_rollouts.py` and `many_turns.py` have measured. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from report import Table

Results = Mapping[str, Any]
Run = Mapping[str, Any]

Curves = Sequence[Sequence[float]]  # [seeds, steps], each value from 0 to 1

VERL, OURS, AS_0, DROPPED = "verl", "ours", "lost as 0", "groups dropped"
PATH, LOSSES = (VERL, OURS), (OURS, AS_0, DROPPED)  # which variants answer which question
PATH_PAIRS, LOSS_PAIRS = ((OURS, VERL),), ((AS_0, OURS), (DROPPED, OURS))
GAMES = {"lake": "FrozenLake-v0", "rooms": "rooms with a tool"}
TIMELINE = {  # of the generation of a step, and whose time each part is
    "until the first invoke: plan and manifest": "ours, and the emulated AWS's",
    "until the first agent starts": "the emulated AgentCore's",
    "agents at work, until the last one returns": "everyone's: the later invokes, too",
    "until the last result is here: trajectory, S3, SQS": "the wrapper's, the emulated AWS's and ours",
    "until all sessions are closed, and S3 holds the last manifest": "ours, and the emulated AWS's",
    "outside of the step: engines resumed and paused, report, rows, verl's polls": "ours and verl's",
}
CALLS = ("model_s", "agent_s")  # medians over the rollouts of a step
ENDS = 3  # steps that count as the beginning and the end of a game's training
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # by degrees of freedom, from 1
_COLOURS = ("#1f6feb", "#9a6700", "#1a7f37", "#cf222e")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _LEGEND = 760, 380, 56, 14, 44, 26  # pixels


def runs_of(results: Results, name: str) -> list[Run]:
    """Return the runs of a variant, or of a game, by seed."""
    runs = (run for run in results["runs"] if name in (run.get("variant"), run.get("name")))
    return sorted(runs, key=lambda run: int(run["seed"]))


def final(run: Run) -> float:
    """Return which part of the replies is right in the last third of the steps."""
    return statistics.fmean(run["right"][-(len(run["right"]) // 3) :])


def area(run: Run) -> float:
    """Return which part of the replies is right over all steps: more if the run learns sooner."""
    return statistics.fmean(run["right"])


def outcomes(results: Results, variants: Sequence[str]) -> Table:
    """Return one line for each variant: how far, and how fast, it has learned."""
    header = ("run", "seeds", "first step", "last third", "lowest to highest", "all steps", "s a step")
    lines = []
    for variant in variants:
        runs = runs_of(results, variant)
        if not runs:
            continue
        ends = [final(run) for run in runs]
        lines.append(
            [
                variant,
                str(len(runs)),
                f"{statistics.fmean(run['right'][0] for run in runs):.3f}",
                _with_spread(ends),
                f"{min(ends):.3f} to {max(ends):.3f}",
                _with_spread([area(run) for run in runs]),
                f"{seconds(runs):.2f}",
            ]
        )
    return Table("outcomes", header, lines)


def seconds(runs: Sequence[Run]) -> float:
    """Return the mean time of a step, without the first ones, which also load and compile."""
    return statistics.fmean(value for run in runs for value in run["step_s"][1:])


def differences(results: Results, pairs: Sequence[tuple[str, str]]) -> Table:
    """Return one line for each pair of variants: the first less the second, by seed."""
    lines = []
    for variant, reference in pairs:
        runs = paired(results, variant, reference)
        if runs:
            cells = [_interval([measure(one) - measure(other) for one, other in runs]) for measure in (final, area)]
            lines.append([f"{variant}, less {reference}", str(len(runs)), *cells])
    return Table("differences", ("difference", "seeds", "last third", "all steps"), lines)


def paired(results: Results, variant: str, reference: str) -> list[tuple[Run, Run]]:
    others = {run["seed"]: run for run in runs_of(results, reference)}
    return [(run, others[run["seed"]]) for run in runs_of(results, variant) if run["seed"] in others]


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the mean, by Student's t; None for fewer than two values."""
    if not 2 <= len(values) <= len(_T_95) + 1:
        return None
    half = _T_95[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


def parts(results: Results, variants: Sequence[str]) -> Table:
    """Return one line for each part of a step that takes time, in seconds."""
    by_variant = {variant: runs for variant in variants if (runs := runs_of(results, variant))}
    names = next(iter(by_variant.values()))[0]["parts_s"] if by_variant else {}
    lines = []
    for name in names:
        means = [statistics.fmean(run["parts_s"][name] for run in runs) for runs in by_variant.values()]
        if max(means) >= 0.005:
            lines.append([f"`{name}`" if name != "rest" else name, *(f"{mean:.2f}" for mean in means)])
    return Table("parts", ("part of a step, s", *by_variant), lines)


def timeline(results: Results) -> Table:
    """Return one line for each part of the generation of our steps."""
    [run] = runs_of(results, OURS)
    lines = [[part, f"{run['timeline_s'][part]:.2f}", whose] for part, whose in TIMELINE.items()]
    return Table("timeline", ("part of `gen`", "s", "whose"), lines)


def cpu(results: Results) -> Table:
    """Return one line for each kind of process, with the CPU seconds that it spends on a step."""
    spent = {variant: runs_of(results, variant)[0]["cpu_s"] for variant in PATH}
    kinds = sorted(
        {kind for each in spent.values() for kind in each}, key=lambda kind: (-spent[OURS].get(kind, 0.0), kind)
    )
    lines = [[kind, *(f"{each.get(kind, 0.0):.2f}" for each in spent.values())] for kind in kinds]
    total = ["all", *(f"{sum(each.values()):.2f}" for each in spent.values())]
    return Table("cpu", ("processes", *spent), [*lines, total])


def losses(results: Results) -> Table:
    """Return one line for each variant: what was lost and trained, over all seeds."""
    lines = []
    for variant in LOSSES:
        if runs := runs_of(results, variant):
            sums = [sum(run[name] for run in runs) for name in ("planned", "sessions", "lost", "trained")]
            lines.append(
                [
                    variant,
                    *(f"{count:,}" for count in sums),
                    f"{sums[2] / sums[1]:.0%}",
                    _change([run["calls"] for run in runs]),
                ]
            )
    counts = ("rollouts planned", "sessions", "of them lost", "rollouts trained", "lost")
    return Table("losses", ("run", *counts, "model calls of a rollout"), lines)


def _with_spread(values: Sequence[float]) -> str:
    mean = f"{statistics.fmean(values):.3f}"
    return f"{mean} ± {statistics.stdev(values):.3f}" if len(values) > 1 else mean


def _interval(values: Sequence[float]) -> str:
    found = interval(values)
    mean = f"{statistics.fmean(values):+.3f}"
    return mean if found is None else f"{mean} ({found[0]:+.3f} to {found[1]:+.3f})"


# --- games of many turns --------------------------------------------------------------------------------


def learned(results: Results) -> Table:
    """Return one line for each training: how far it has learned."""
    lines = []
    for name, title in GAMES.items():
        if not (runs := runs_of(results, name)):
            continue
        gains = [_end(run, "reward") - _end(run, "reward", first=True) for run in runs]
        lines.append(
            [
                title,
                str(len(runs)),
                str(len(runs[0]["steps"])),
                _change(_by_step(runs, "reward")),
                ", ".join(_change(_by_step([run], "reward")) for run in runs),
                _interval(gains),
                _change(_by_step(runs, "won")),
            ]
        )
    header = ("task", "seeds", "steps", "reward", "reward, by seed", "gain", "reward of 1")
    return Table("learned", header, lines)


def in_play(results: Results) -> Table:
    """Return one line for each training: of what its rollouts consist."""
    lines = []
    for name, title in GAMES.items():
        if not (runs := runs_of(results, name)):
            continue
        steps = [step for run in runs for step in run["steps"]]
        lines.append(
            [
                title,
                f"{sum(step['rollouts'] for step in steps):,}",
                *(_change(_by_step(runs, what)) for what in ("turns", "segments", "tool_calls", "sampled_tokens")),
                f"{max(step['prob_diff'] for step in steps):.1e}",
                f"{statistics.median(step['seconds'] for step in steps):.1f}",
            ]
        )
    per_rollout = ("turns", "segments", "tool calls", "sampled tokens")
    return Table("in play", ("task", "rollouts trained", *per_rollout, "probability difference", "s a step"), lines)


def _by_step(runs: Sequence[Run], what: str) -> Curves:
    return [[step[what] for step in run["steps"]] for run in runs]


def _end(run: Run, what: str, *, first: bool = False) -> float:
    values = [step[what] for step in run["steps"]]
    return statistics.fmean(values[:ENDS] if first else values[-ENDS:])


def _change(curves: Curves) -> str:
    """Return the means over all seeds at the beginning and at the end; one of them if they are equal."""
    ends = [[value for curve in curves for value in curve[at]] for at in (slice(ENDS), slice(-ENDS, None))]
    return " -> ".join(dict.fromkeys(f"{statistics.fmean(values):.3g}" for values in ends))


# --- pictures --------------------------------------------------------------------------------


def smoothed(values: Sequence[float], neighbours: int) -> list[float]:
    """Return the mean of each value and its neighbours on each side; fewer at the ends."""
    return [statistics.fmean(values[max(0, at - neighbours) : at + neighbours + 1]) for at in range(len(values))]


def picture(results: Results, names: Sequence[str], label: str, neighbours: int = 1) -> str:
    """Return an SVG with a line for each variant or game: the mean of the seeds, in a band from lowest to highest.

    All values are smoothed over `neighbours` steps on each side. `label` is the vertical axis.
    """
    found = {}
    for name in names:
        if runs := runs_of(results, name):
            curves = [run["right"] if "right" in run else [step["reward"] for step in run["steps"]] for run in runs]
            found[GAMES.get(name, name)] = [smoothed(curve, neighbours) for curve in curves]
    steps = max((len(curve) for curves in found.values() for curve in curves), default=2)
    elements = [*_axes(steps, label)]
    colours = dict(zip(found, _COLOURS, strict=False))
    elements += [_band(curves, colours[name], steps) for name, curves in found.items()]
    elements += [_mean(curves, colours[name], steps) for name, curves in found.items()]
    x = float(_LEFT)
    for name, curves in found.items():
        text = f"{name} ({len(curves)} seeds)"
        elements.append(f"<rect x='{x:.0f}' y='{_HEIGHT + 6}' width='12' height='12' fill='{colours[name]}'/>")
        elements.append(_text(x + 17, _HEIGHT + 16, text))
        x += 40 + 7 * len(text)
    height = _HEIGHT + _LEGEND
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{_WIDTH}' height='{height}' viewBox='0 0 {_WIDTH} {height}'>"
    )
    style = "<style>text { font: 12px sans-serif; fill: #24292f }</style>"
    return "\n".join([head, style, "<rect width='100%' height='100%' fill='white'/>", *elements, "</svg>\n"])


def _axes(steps: int, label: str) -> Iterator[str]:
    for tenth in range(0, 11, 2):
        y = _y(tenth / 10)
        yield f"<line x1='{_LEFT}' y1='{y:.1f}' x2='{_WIDTH - 10}' y2='{y:.1f}' stroke='#d6dbe1'/>"
        yield _text(_LEFT - 8, y + 4, f"{tenth / 10:.1f}", "text-anchor='end'")
    for step in [1, *range(5, steps + 1, 5)]:
        yield _text(_x(step - 1, steps), _HEIGHT - _BOTTOM + 18, str(step), "text-anchor='middle'")
    yield _text(_WIDTH / 2, _HEIGHT - 8, "step", "text-anchor='middle'")
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    yield _text(14, middle, label, f"text-anchor='middle' transform='rotate(-90 14 {middle:.0f})'")


def _mean(curves: Curves, colour: str, steps: int) -> str:
    points = _points([statistics.fmean(values) for values in zip(*curves, strict=True)], steps)
    return f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='2'/>"


def _band(curves: Curves, colour: str, steps: int) -> str:
    low, high = ([edge(values) for values in zip(*curves, strict=True)] for edge in (min, max))
    there, back = _points(high, steps), " ".join(reversed(_points(low, steps).split()))
    return f"<polygon points='{there} {back}' fill='{colour}' fill-opacity='0.15'/>"


def _points(values: Sequence[float], steps: int) -> str:
    return " ".join(f"{_x(at, steps):.1f},{_y(value):.1f}" for at, value in enumerate(values))


def _x(at: int, steps: int) -> float:
    return _LEFT + 6 + (_WIDTH - _LEFT - 22) * at / max(1, steps - 1)


def _y(value: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * value


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {more}>{escape(text)}</text>"
