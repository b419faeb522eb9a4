"""Tables and pictures of what `benchmarks/learning_curves.py` has measured. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import curves
from report import Table

Results = Mapping[str, Any]
Run = Mapping[str, Any]

VERL, OURS, FAULTS, AS_0 = "verl", "ours", "ours, faults", "faults as 0"
VARIANTS = (VERL, OURS, FAULTS, AS_0)
PATH, LOSSES = (VERL, OURS), (OURS, FAULTS, AS_0)  # which variants answer which question
PATH_PAIRS, LOSS_PAIRS = ((OURS, VERL),), ((FAULTS, OURS), (AS_0, OURS), (AS_0, FAULTS))
LAST = 10  # steps that count as the end of a run
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # by degrees of freedom, from 1


def runs_of(results: Results, variant: str) -> list[Run]:
    """Return the runs of a variant by seed."""
    return sorted((run for run in results["runs"] if run["variant"] == variant), key=lambda run: run["seed"])


def final(run: Run) -> float:
    """Return which part of the replies is right in the last steps."""
    return statistics.fmean(run["right"][-LAST:])


def area(run: Run) -> float:
    """Return which part of the replies is right over all steps: more if the run learns sooner."""
    return statistics.fmean(run["right"])


def outcomes(results: Results, variants: Sequence[str]) -> Table:
    """Return one line for each variant: how far, and how fast, it has learned."""
    header = ("run", "seeds", "first step", f"last {LAST} steps", "lowest to highest", "all steps", "s a step")
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
    return Table("differences", ("difference", "seeds", f"last {LAST} steps", "all steps"), lines)


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


def losses(results: Results) -> Table:
    """Return one column for each variant of this backend: what was lost, and what became of it, over all seeds."""
    columns = {variant: _losses(variant, runs) for variant in LOSSES if (runs := runs_of(results, variant))}
    names = next(iter(columns.values()), {})
    lines = [[name, *(column[name] for column in columns.values())] for name in names]
    return Table("losses", ("over all seeds", *columns), lines)


def _losses(variant: str, runs: Sequence[Run]) -> dict[str, str]:
    sums: Counter[str] = Counter()
    for run in runs:
        sums.update({name: run[name] for name in ("planned", "sessions", "attempts", "trainable", "throttled")})
        sums.update(run["lost"])
        sums["unbalanced"] += run["unbalanced_steps"]
    invented = sums["killed"] + sums["late"] if variant == AS_0 else 0
    hit = sums["killed"] + sums["late"] + sums["throttled"]
    counts = {
        "rollouts planned": sums["planned"],
        "sessions killed": sums["killed"],
        "sessions late": sums["late"],
        "invokes throttled": sums["throttled"],
        "attempts repeated after a loss": sums["attempts"] - sums["planned"],
        "rollouts left out": sums["planned"] - sums["trainable"],
        "rollouts trained with the agent's reward": sums["trainable"] - invented,
        "rollouts trained with an invented 0": invented,
        "steps whose accounts do not balance": sums["unbalanced"],
    }
    shown = {name: f"{count:,}" for name, count in counts.items()}
    return {**shown, "killed, late or throttled": f"{100 * hit / (sums['sessions'] + sums['throttled']):.1f} %"}


def reasons(results: Results, variant: str) -> dict[str, int]:
    """Return why the variant's rollouts were left out, over all seeds."""
    found: Counter[str] = Counter()
    for run in runs_of(results, variant):
        found.update(run.get("reasons", {}))
    return dict(found.most_common())


def _with_spread(values: Sequence[float]) -> str:
    mean = f"{statistics.fmean(values):.3f}"
    return f"{mean} ± {statistics.stdev(values):.3f}" if len(values) > 1 else mean


def _interval(values: Sequence[float]) -> str:
    found = interval(values)
    mean = f"{statistics.fmean(values):+.3f}"
    return mean if found is None else f"{mean} ({found[0]:+.3f} to {found[1]:+.3f})"


def picture(results: Results, variants: Sequence[str]) -> str:
    """Return an SVG with a line for each variant: the mean of the seeds, in a band from lowest to highest."""
    lines = {variant: [run["right"] for run in runs_of(results, variant)] for variant in variants}
    return curves.picture(lines, "right replies", neighbours=3)
