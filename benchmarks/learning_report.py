"""Tables and pictures of what `learning_curves.py`, `lost_rollouts.py` and `many_turns.py` have measured."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from common import Table, drawing

Results = Mapping[str, Any]
Run = Mapping[str, Any]
TASKS = {"lake": "FrozenLake-v0", "rooms": "rooms with a tool"}  # of many turns
TIMELINE = {  # of the generation of a step, and whose time each part is
    "until the first invoke: plan and manifest": "ours, and the emulated AWS's",
    "until the first agent starts": "the emulated AgentCore's",
    "agents at work, until the last one returns": "everyone's: the later invokes, too",
    "until the last result is here: trajectory, S3, SQS": "the wrapper's, the emulated AWS's and ours",
    "until all sessions are closed, and S3 holds the last manifest": "ours, and the emulated AWS's",
    "outside of the step: engines resumed and paused, report, rows, verl's polls": "ours and verl's",
}
CALLS = ("model_s", "agent_s")  # medians over the rollouts of a step
ENDS = 3  # steps that count as the beginning and the end of a training
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # by degrees of freedom, from 1


def runs_of(results: Results, name: str) -> list[Run]:
    """Return the runs of a variant, or of a training, by seed."""
    runs = (run for run in results["runs"] if name in (run.get("variant"), run.get("name")))
    return sorted(runs, key=lambda run: int(run["seed"]))


def by_variant(results: Results) -> dict[str, list[Run]]:
    return {run["variant"]: runs_of(results, run["variant"]) for run in results["runs"]}


def final(run: Run) -> float:
    """Return which part of the replies is right in the last third of the steps."""
    return statistics.fmean(run["right"][-(len(run["right"]) // 3) :])


def area(run: Run) -> float:
    """Return which part of the replies is right over all steps: more if the run learns sooner."""
    return statistics.fmean(run["right"])


def outcomes(results: Results) -> Table:
    """Return one line for each variant: how far, and how fast, it has learned."""
    lines = []
    for variant, runs in by_variant(results).items():
        first, ends = statistics.fmean(run["right"][0] for run in runs), [final(run) for run in runs]
        last = _with_spread(ends), f"{min(ends):.3f} to {max(ends):.3f}"
        lines.append([variant, str(len(runs)), f"{first:.3f}", *last, _with_spread([area(run) for run in runs])])
    return Table(("run", "seeds", "first step", "last third", "lowest to highest", "all steps"), lines)


def differences(results: Results, reference: str) -> Table:
    """Return one line for each other variant: its runs less those of the reference, by seed."""
    others = {run["seed"]: run for run in runs_of(results, reference)}
    lines = []
    for variant, runs in by_variant(results).items():
        if variant != reference:
            pairs = [(run, others[run["seed"]]) for run in runs if run["seed"] in others]
            cells = [interval([measure(one) - measure(other) for one, other in pairs]) for measure in (final, area)]
            lines.append([f"{variant}, less {reference}", str(len(pairs)), *cells])
    return Table(("difference", "seeds", "last third", "all steps"), lines)


def interval(values: Sequence[float]) -> str:
    """Return the mean and its 95 % confidence interval by Student's t, which takes two values."""
    mean = statistics.fmean(values)
    if not 2 <= len(values) <= len(_T_95) + 1:
        return f"{mean:+.3f}"
    half = _T_95[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"


def parts(results: Results) -> Table:
    """Return one line for each part of a step that takes time, in seconds, and one for the whole step."""
    variants = by_variant(results)
    lines = []
    for name in results["runs"][0]["parts_s"]:
        means = [statistics.fmean(run["parts_s"][name] for run in runs) for runs in variants.values()]
        if max(means) >= 0.005:
            lines.append([f"`{name}`" if name != "rest" else name, *(f"{mean:.2f}" for mean in means)])
    steps = [statistics.fmean(s for run in runs for s in run["step_s"][1:]) for runs in variants.values()]
    return Table(("part of a step, s", *variants), [*lines, ["all", *(f"{mean:.2f}" for mean in steps)]])


def on_a_gpu(results: Results) -> Table:
    """Return one line for each loop: how far it has learned, how fast it was, and how busy the device."""
    lines = []
    for variant, [run] in by_variant(results).items():
        seconds = sum(run["step_s"][1:])
        rollouts = run.get("rollouts")
        lines.append(
            [
                *(variant, str(len(run["right"])), _change([run["right"]])),
                f"{max(run['prob_diff']):.1e}",
                f"{seconds / max(1, len(run['step_s']) - 1):.1f}",
                f"{sum(run['tokens'][1:]) / seconds:,.0f}" if seconds else "",
                "" if run["busy"] is None else f"{run['busy']:.0f} %",
                f"{run['mib']:,}",
                f"{rollouts['trainable']:,} of {rollouts['planned']:,}" if rollouts else "",
                f"{rollouts['one step']:,}" if rollouts else "",
                str(run["started"]),
            ]
        )
    header = ("run", "steps", "reward", "probability difference", "s a step", "tokens/s, prompts too", "device busy")
    return Table((*header, "MiB at most", "rollouts trained", "agents at once", "processes of verl"), lines)


def timeline(results: Results) -> Table:
    """Return one line for each part of the generation of our steps."""
    [run] = runs_of(results, "ours")
    lines = [[part, f"{run['timeline_s'][part]:.2f}", whose] for part, whose in TIMELINE.items()]
    return Table(("part of `gen`", "s", "whose"), lines)


def cpu(results: Results) -> Table:
    """Return one line for each kind of process, with the CPU seconds that it spends on a step."""
    spent = {variant: run["cpu_s"] for variant, [run] in by_variant(results).items()}
    kinds = sorted({kind for each in spent.values() for kind in each})
    kinds.sort(key=lambda kind: -spent["ours"].get(kind, 0.0))
    lines = [[kind, *(f"{each.get(kind, 0.0):.2f}" for each in spent.values())] for kind in kinds]
    total = ["all", *(f"{sum(each.values()):.2f}" for each in spent.values())]
    return Table(("processes", *spent), [*lines, total])


def losses(results: Results) -> Table:
    """Return one line for each variant: what was lost and trained, over all seeds."""
    lines = []
    for variant, runs in by_variant(results).items():
        sums = [sum(run[name] for run in runs) for name in ("planned", "sessions", "lost", "trained")]
        counts = [f"{count:,}" for count in sums]
        lines.append([variant, *counts, f"{sums[2] / sums[1]:.0%}", _change(run["calls"] for run in runs)])
    counts = ["rollouts planned", "sessions", "of them lost", "rollouts trained", "lost"]
    return Table(("run", *counts, "model calls of a rollout"), lines)


def learned(results: Results) -> Table:
    """Return one line for each task of many turns: how far the model has learned it."""
    lines = []
    for name, runs in _trained(results):
        rewards = [[step["reward"] for step in run["steps"]] for run in runs]
        gains = [statistics.fmean(curve[-ENDS:]) - statistics.fmean(curve[:ENDS]) for curve in rewards]
        by_seed = ", ".join(_change([curve]) for curve in rewards)
        counts = [str(len(runs)), str(len(rewards[0]))]
        lines.append([name, *counts, _change(rewards), by_seed, interval(gains), _by_step(runs, "won")])
    return Table(("task", "seeds", "steps", "reward", "reward, by seed", "gain", "reward of 1"), lines)


def in_play(results: Results) -> Table:
    """Return one line for each task of many turns: what its rollouts consist of."""
    lines = []
    for name, runs in _trained(results):
        steps = [step for run in runs for step in run["steps"]]
        cells = [
            f"{sum(step['rollouts'] for step in steps):,}",
            *(_by_step(runs, what) for what in ("turns", "segments", "tool_calls", "sampled_tokens")),
            f"{max(step['prob_diff'] for step in steps):.1e}",
            f"{statistics.median(step['seconds'] for step in steps):.1f}",
        ]
        lines.append([name, *cells])
    per_rollout = ("turns", "segments", "tool calls", "sampled tokens")
    return Table(("task", "rollouts trained", *per_rollout, "probability difference", "s a step"), lines)


def _trained(results: Results) -> list[tuple[str, list[Run]]]:
    return [(title, runs) for name, title in TASKS.items() if (runs := runs_of(results, name))]


def _with_spread(values: Sequence[float]) -> str:
    mean = f"{statistics.fmean(values):.3f}"
    return f"{mean} ± {statistics.stdev(values):.3f}" if len(values) > 1 else mean


def _by_step(runs: Sequence[Run], what: str) -> str:
    return _change([step[what] for step in run["steps"]] for run in runs)


def _change(curves: Iterable[Sequence[float]]) -> str:
    """Return the means over all seeds at the beginning and at the end; one of them if they are equal."""
    curves = [*curves]
    ends = [[value for curve in curves for value in curve[at]] for at in (slice(ENDS), slice(-ENDS, None))]
    return " -> ".join(dict.fromkeys(f"{statistics.fmean(values):.3g}" for values in ends))


def picture(results: Results, names: Sequence[str], label: str, neighbours: int = 1) -> str:
    """Return an SVG with a line for each variant or training: the mean of the seeds, in a band of all seeds.

    All values are smoothed over `neighbours` steps on each side. `label` is the vertical axis.
    """
    with drawing(1, 1, 7.6, 4) as (axes, written):
        axis = axes[0, 0]
        for name in names:
            if not (runs := runs_of(results, name)):
                continue
            curves = [
                _smoothed(run["right"] if "right" in run else [step["reward"] for step in run["steps"]], neighbours)
                for run in runs
            ]
            by_step = [*zip(*curves, strict=True)]
            steps = range(1, len(by_step) + 1)
            [line] = axis.plot(
                steps, [*map(statistics.fmean, by_step)], label=f"{TASKS.get(name, name)} ({len(curves)} seeds)"
            )
            low, high = ([edge(values) for values in by_step] for edge in (min, max))
            axis.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        axis.set(xlabel="step", ylabel=label, ylim=(0, 1))
        axis.grid(axis="y", alpha=0.4)
        axis.legend(frameon=False)
    return written.getvalue()


def _smoothed(values: Sequence[float], neighbours: int) -> list[float]:
    """Return the mean of each value and its neighbours on each side; fewer at the ends."""
    return [statistics.fmean(values[max(0, at - neighbours) : at + neighbours + 1]) for at in range(len(values))]
