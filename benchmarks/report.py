"""Tables and a picture of what the benchmarks have measured. Pure: the results are the JSON that `run_all.py` writes.

`results["parts"]` has the output of each benchmark by its name, or the reason why there is none in
`results["failed"]`. A part that is missing has no table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape

Results = Mapping[str, Any]
AT_ONCE = 1e5  # sessions per second, from which a work is called "at once"
CHECKED, BARE, BARE_PROXY = "checked HTTP", "bare HTTP", "bare proxy"  # what transport and libraries allow
FLOORS = (CHECKED, BARE, BARE_PROXY)


@dataclass(frozen=True)
class Figure:
    """One line of the summary. A rival without a figure is left out."""

    part: str
    work: str
    name: str  # with its unit
    ours: float
    rivals: Mapping[str, float] = field(default_factory=dict)
    floor: float | None = None

    @property
    def ratio(self) -> float | None:
        """How many times the floor ours takes, or which part of the floor's speed ours has."""
        return self.ours / self.floor if self.floor else None

    def cells(self) -> list[str]:
        rivals = ", ".join(f"{shown(value)} ({name})" for name, value in self.rivals.items())
        floor, ratio = ("" if value is None else shown(value) for value in (self.floor, self.ratio))
        return [self.work, self.name, shown(self.ours), rivals, floor, ratio]


SUMMARY = ("work", "figure", "ours", "rivals", "floor", "ours / floor")


@dataclass(frozen=True)
class Table:
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

    def text(self) -> str:
        widths = [max(len(row[i]) for row in [self.header, *self.rows]) for i in range(len(self.header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in
                 [self.header, *self.rows]]  # fmt: skip
        return "\n".join([self.title, *lines])


def shown(value: float) -> str:
    """Return a number with three significant digits."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def summary(results: Results) -> Table:
    return Table("summary", SUMMARY, [figure.cells() for figure in figures(results)])


def figures(results: Results) -> list[Figure]:
    parts = results["parts"]
    found: list[Figure] = []
    for part, of_part in FIGURES.items():
        if part in parts:
            found += of_part(parts)
    return found


# --- collection -------------------------------------------------------------------------------------------

_COLLECTED = {"p50_s": "p50, s", "p99_s": "p99, s", "cpu_ms": "CPU per rollout, ms"}


def _collection(parts: Mapping[str, Any]) -> Iterator[Figure]:
    rivals = [one for one in parts.get("rival_collection", []) if "failed" not in one]
    for ours in parts["collection"]:
        same = {one["system"]: one for one in rivals if _work(one) == _work(ours)}
        checked, bare = (same.pop(name, None) for name in (CHECKED, BARE))
        floor = checked or bare
        if same or floor:
            for key, name in _COLLECTED.items():
                of_rivals = {system: one[key] for system, one in same.items()}
                yield Figure("collection", work_name(ours), name, ours[key], of_rivals, floor and floor[key])


def _work(one: Mapping[str, Any]) -> tuple[Any, ...]:
    return one["rollouts"], one["rate"], one["agent_s"], one["tokens"]


def work_name(one: Mapping[str, Any]) -> str:
    rate = "at once" if one["rate"] >= AT_ONCE else f"at {one['rate']:g}/s"
    size = "" if one["tokens"] == 1200 else f" of {one['tokens']:,} tokens"
    agents = "" if one["agent_s"] == 1 else f", agents of {one['agent_s']:g} s"
    return f"{one['rollouts']:,} results{size} {rate}{agents}"


def collection_tables(results: Results) -> Iterator[Table]:
    """Yield one table of all systems. The closing is what is left to do when the trainer has the last result."""
    parts = results["parts"]
    header = ("work", "system", "p50, s", "p99, s", "CPU, ms", "calls", "closing, s", "step, s", "peak, MiB")
    keys = ("p50_s", "p99_s", "cpu_ms", "calls", "closing_s", "step_s", "peak_mib")
    rows = []
    measured = [{"system": "ours", **one} for one in parts.get("collection", [])] + parts.get("rival_collection", [])
    for work in dict.fromkeys(_work(one) for one in measured):
        for one in measured:
            if _work(one) == work and "failed" not in one:
                calls = {**one, "calls": sum(one["calls"].values())}
                rows.append([work_name(one), one["system"], *(shown(calls[key]) for key in keys)])
    if rows:
        yield Table("collection", header, rows)


# --- gateway ----------------------------------------------------------------------------------------------


def _gateway(parts: Mapping[str, Any]) -> Iterator[Figure]:
    rivals = [one for one in parts.get("rival_gateways", {"rows": []})["rows"] if "failed" not in one]
    for ours in parts["gateway"]["rows"]:
        same = {one["system"]: one for one in rivals if _load(one) == _load(ours)}
        floor = same.pop(BARE_PROXY, None)
        if same or floor:
            for key, name in _load_figures(ours):
                of_rivals = {system: one[key] for system, one in same.items() if one[key] is not None}
                yield Figure("gateway", load_name(ours), name, ours[key], of_rivals, floor and floor[key])


def _load(one: Mapping[str, Any]) -> tuple[Any, ...]:
    return one["history"], one["stream"], one["asked_in_flight"], one["rate"]


def _load_figures(one: Mapping[str, Any]) -> list[tuple[str, str]]:
    if one["rate"] is None:
        return [("cpu_ms", "CPU per call, ms"), ("calls_per_s", "calls/s")]
    return [("added_p50_ms", "added p50, ms"), ("added_p99_ms", "added p99, ms")]


def load_name(one: Mapping[str, Any]) -> str:
    kind = "streamed calls" if one["stream"] else "calls"
    rate = "without a pause" if one["rate"] is None else f"at {one['rate']:g}/s"
    return f"{kind} with {one['history']:,} tokens {rate}, {one['asked_in_flight']:,} in flight"


def gateway_tables(results: Results) -> Iterator[Table]:
    parts = results["parts"]
    header = ("work", "system", "calls/s", "CPU, ms", "added p50, ms", "added p99, ms", "KiB per session", "errors")
    keys = ("calls_per_s", "cpu_ms", "added_p50_ms", "added_p99_ms", "session_kib")
    ours = [{"system": "ours", **one} for one in parts.get("gateway", {"rows": []})["rows"]]
    measured = ours + parts.get("rival_gateways", {"rows": []})["rows"]
    rows = []
    for load in dict.fromkeys(_load(one) for one in measured):
        for one in measured:
            if _load(one) == load and "failed" not in one:
                cells = ["" if one[key] is None else shown(one[key]) for key in keys]
                rows.append([load_name(one), one["system"], *cells, one["errors"]])
    if rows:
        yield Table("gateway", header, rows)


# --- rows, wrapper, training step -------------------------------------------------------------------------


def _rows(parts: Mapping[str, Any]) -> Iterator[Figure]:
    made = parts["rows"]
    work = f"{made['rollouts']:,} rollouts, {made['tokens'] / 1e6:.1f} M tokens"
    rates = {name: rate / 1e6 for name, rate in made["tokens_per_core_s"].items()}
    for name, rate in rates.items():
        if not name.endswith(", floor"):
            floor = rates.get(f"{name}, floor")
            yield Figure("rows", work, f"{name}, M tokens/s", rate, {}, floor)


def _wrapper(parts: Mapping[str, Any]) -> Iterator[Figure]:
    found = {name: figures for name, figures in parts["wrapper"].items() if "failed" not in figures}
    floor, ours = found.pop("floor"), {name: found.pop(name) for name in ("credentials", "presigned URL")}
    for name, value in ours["credentials"].items():
        rivals = {rival: figures[name] for rival, figures in found.items() if name in figures}
        yield Figure("wrapper", "a container", name, value, rivals, floor.get(name))
    for name, value in ours["presigned URL"].items():
        if "rollout" in name:
            yield Figure("wrapper", "a container with presigned URLs", name, value)


def _training(parts: Mapping[str, Any]) -> Iterator[Figure]:
    found = parts["training_step"]
    work, runs = f"a step of the {found['model']} model", {"ours": found["ours"]} | _other_loops(found)
    totals = {name: sum(run.values()) for name, run in runs.items()}
    yield Figure("training_step", work, "s", totals.pop("ours"), totals)
    rollouts = {name: run["gen"] for name, run in runs.items()}
    yield Figure("training_step", work, "of it rollouts, s", rollouts.pop("ours"), rollouts)


def _other_loops(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: run for name, run in found.items() if isinstance(run, Mapping) and name != "ours"}


def training_tables(results: Results) -> Iterator[Table]:
    found = results["parts"].get("training_step")
    if found:
        runs = {"ours": found["ours"], **_other_loops(found)}
        names = [name for name in found["ours"] if any(run[name] >= 0.005 for run in runs.values())]
        rows = [[name, *(f"{run[name]:.2f}" for run in runs.values())] for name in names]
        total = ["total", *(f"{sum(run.values()):.2f}" for run in runs.values())]
        yield Table("training step, in s", ("part", *runs), [*rows, total])


FIGURES = {
    "collection": _collection,
    "gateway": _gateway,
    "rows": _rows,
    "wrapper": _wrapper,
    "training_step": _training,
}
DETAILS = {"collection": collection_tables, "gateway": gateway_tables, "training_step": training_tables}


def ceilings(results: Results) -> list[str]:
    """Return what the programs that stand in for AWS, agents and engines reach alone, one line each."""
    parts = results["parts"]
    found = [
        f"{name}: {shown(one['calls_per_s'])} calls/s on one core, {shown(one['cpu_us'])} µs of CPU per call"
        for name, one in parts.get("emulator", {}).items()
    ]
    return found + list(parts.get("gateway", {}).get("ceilings", []))


def failures(results: Results) -> list[str]:
    """Return one line for each part and each rival that has no figures, with the reason."""
    parts = results["parts"]
    found = [f"{part}: {reason}" for part, reason in results.get("failed", {}).items()]
    wrappers = parts.get("wrapper", {}).items()
    found += [f"{name}, a container: {one['failed']}" for name, one in wrappers if "failed" in one]
    for part in ("rival_collection", "rival_gateways"):
        measured = parts.get(part, [])
        for one in measured["rows"] if isinstance(measured, Mapping) else measured:
            if "failed" in one:
                name = work_name(one) if part == "rival_collection" else load_name(one)
                found.append(f"{one['system']}, {name}: {one['failed']}")
    return found


# --- the picture --------------------------------------------------------------------------------

WIDTH, LABELS, VALUES, LINE, HEAD = 900, 330, 110, 18, 34  # pixels
OURS, THEIRS, FLOOR = "#1f6feb", "#9aa4b2", "#d6dbe1"
STACK = ("#1f6feb", "#8250df", "#1a7f37", "#bf8700", "#cf222e", "#57606a", "#9aa4b2", "#d6dbe1")


@dataclass(frozen=True)
class Bar:
    label: str
    spans: Sequence[tuple[float, float, str]]  # from, to, colour
    value: str = ""


@dataclass(frozen=True)
class Panel:
    title: str
    bars: Sequence[Bar]
    log: bool = False
    legend: Sequence[tuple[str, str]] = ()  # name, colour

    @property
    def height(self) -> int:
        return HEAD + LINE * (len(self.bars) + bool(self.legend)) + 12

    def draw(self, top: int) -> Iterator[str]:
        """Yield the panel's elements."""
        yield text_at(0, top + 18, self.title, "font-weight='bold'")
        low = min((start for bar in self.bars for start, _, _ in bar.spans), default=0.0) if self.log else 0.0
        high = max((end for bar in self.bars for _, end, _ in bar.spans), default=1.0)
        y = top + HEAD
        for bar in self.bars:
            yield text_at(LABELS - 8, y + 12, bar.label, "text-anchor='end'")
            at = float(LABELS)
            for start, end, colour in bar.spans:
                left, at = (LABELS + self._place(value, low, high) for value in (start, end))
                yield (
                    f"<rect x='{left:.1f}' y='{y + 2}' width='{max(1.5, at - left):.1f}' height='{LINE - 5}' "
                    f"fill='{colour}'/>"
                )
            yield text_at(at + 6, y + 12, bar.value)
            y += LINE
        x = LABELS
        for name, colour in self.legend:
            yield f"<rect x='{x}' y='{y + 4}' width='10' height='10' fill='{colour}'/>"
            yield text_at(x + 14, y + 13, name)
            x += 22 + 7 * len(name)

    def _place(self, value: float, low: float, high: float) -> float:
        room = WIDTH - LABELS - VALUES
        if not self.log:
            return room * value / high if high else 0.0
        # One tenth of the room is left of the lowest value.
        return room * (0.1 + 0.9 * math.log(value / low) / math.log(high / low)) if high > low else room


def text_at(x: float, y: float, text: str, more: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y}' {more}>{escape(text)}</text>"


def svg(width: float, height: float, elements: Sequence[str]) -> str:
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' viewBox='0 0 {width} {height}'>"
    )
    style = "<style>text { font: 12px sans-serif; fill: #24292f }</style>"
    return "\n".join([head, style, "<rect width='100%' height='100%' fill='white'/>", *elements, "</svg>\n"])


def picture(results: Mapping[str, Any]) -> str:
    """Return the SVG."""
    parts = results["parts"]
    panels = [panel for panel in (_waits(parts), _cpu(parts), _calls(parts), _step(parts)) if panel.bars]
    elements, top = [], 8
    for panel in panels:
        elements += panel.draw(top)
        top += panel.height
    return svg(WIDTH, top, elements)


def _colour(system: str) -> str:
    if system == "ours":
        return OURS
    return FLOOR if system in FLOORS else THEIRS


def _compared(ours: Sequence[Any], rivals: Sequence[Any], same: Any) -> Iterator[dict[str, Any]]:
    """Yield what was measured of the works that a rival has done too, ours first in each."""
    theirs = [one for one in rivals if "failed" not in one]
    for one in ours:
        of_work = [rival for rival in theirs if same(rival) == same(one)]
        if of_work:
            yield {**one, "system": "ours"}
            yield from of_work


def _collected(parts: Mapping[str, Any], bar: Callable[[Mapping[str, Any]], tuple[float, float, str]]) -> list[Bar]:
    """Return a bar for each system and work: from, to, and what it says."""
    bars = []
    for one in _compared(parts.get("collection", []), parts.get("rival_collection", []), _work):
        start, end, value = bar(one)
        bars.append(Bar(f"{work_name(one)}: {one['system']}", [(start, end, _colour(one["system"]))], value))
    return bars


def _waits(parts: Mapping[str, Any]) -> Panel:
    bars = _collected(
        parts, lambda one: (one["p50_s"], one["p99_s"], f"{shown(one['p50_s'])} to {shown(one['p99_s'])}")
    )
    return Panel("From a result's PUT to the trainer's hands: p50 to p99 in s, log scale", bars, log=True)


def _cpu(parts: Mapping[str, Any]) -> Panel:
    bars = _collected(parts, lambda one: (0.0, one["cpu_ms"], shown(one["cpu_ms"])))
    return Panel("CPU of the trainer's process per rollout, in ms", bars)


def _calls(parts: Mapping[str, Any]) -> Panel:
    ours, rivals = (parts.get(name, {"rows": []})["rows"] for name in ("gateway", "rival_gateways"))
    bars = [
        Bar(
            f"{one['history']:,} tokens{', streamed' if one['stream'] else ''}: {one['system']}",
            [(0.0, one["cpu_ms"], _colour(one["system"]))],
            shown(one["cpu_ms"]),
        )
        for one in _compared(ours, rivals, _load)
        if one["rate"] is None
    ]
    return Panel("CPU of the gateway per model call, in ms", bars)


def _step(parts: Mapping[str, Any]) -> Panel:
    found = parts.get("training_step", {})
    runs = {name: run for name, run in found.items() if isinstance(run, Mapping)}
    names = [name for name in next(iter(runs.values()), {}) if any(run[name] >= 0.005 for run in runs.values())]
    colours = dict(zip(names, STACK, strict=False))
    bars = []
    for system, run in runs.items():
        spans, at = [], 0.0
        for name in names:
            spans.append((at, at + run[name], colours[name]))
            at += run[name]
        bars.append(Bar(system, spans, f"{at:.1f}"))
    return Panel("A training step on the CPU, in s", bars, legend=list(colours.items()))
