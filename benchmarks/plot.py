"""Draw the benchmarks' results as one SVG picture: a panel of horizontal bars for each of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

import report

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
        yield _text(0, top + 18, self.title, "font-weight='bold'")
        low = min((start for bar in self.bars for start, _, _ in bar.spans), default=0.0) if self.log else 0.0
        high = max((end for bar in self.bars for _, end, _ in bar.spans), default=1.0)
        y = top + HEAD
        for bar in self.bars:
            yield _text(LABELS - 8, y + 12, bar.label, "text-anchor='end'")
            at = float(LABELS)
            for start, end, colour in bar.spans:
                left, at = (LABELS + self._place(value, low, high) for value in (start, end))
                yield (
                    f"<rect x='{left:.1f}' y='{y + 2}' width='{max(1.5, at - left):.1f}' height='{LINE - 5}' "
                    f"fill='{colour}'/>"
                )
            yield _text(at + 6, y + 12, bar.value)
            y += LINE
        x = LABELS
        for name, colour in self.legend:
            yield f"<rect x='{x}' y='{y + 4}' width='10' height='10' fill='{colour}'/>"
            yield _text(x + 14, y + 13, name)
            x += 22 + 7 * len(name)

    def _place(self, value: float, low: float, high: float) -> float:
        room = WIDTH - LABELS - VALUES
        if not self.log:
            return room * value / high if high else 0.0
        # One tenth of the room is left of the lowest value.
        return room * (0.1 + 0.9 * math.log(value / low) / math.log(high / low)) if high > low else room


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y}' {more}>{escape(text)}</text>"


def picture(results: Mapping[str, Any]) -> str:
    """Return the SVG."""
    parts = results["parts"]
    panels = [panel for panel in (_waits(parts), _cpu(parts), _calls(parts), _step(parts)) if panel.bars]
    elements, top = [], 8
    for panel in panels:
        elements += panel.draw(top)
        top += panel.height
    head = f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{top}' viewBox='0 0 {WIDTH} {top}'>"
    style = "<style>text { font: 12px sans-serif; fill: #24292f }</style>"
    background = "<rect width='100%' height='100%' fill='white'/>"
    return "\n".join([head, style, background, *elements, "</svg>\n"])


def _colour(system: str) -> str:
    if system == "ours":
        return OURS
    return FLOOR if system in report.FLOORS else THEIRS


def _compared(ours: Sequence[Any], rivals: Sequence[Any], same: Any) -> Iterator[dict[str, Any]]:
    """Yield what was measured of the works that a rival has done too, ours first in each."""
    theirs = [one for one in rivals if "failed" not in one]
    for one in ours:
        of_work = [rival for rival in theirs if same(rival) == same(one)]
        if of_work:
            yield {**one, "system": "ours"}
            yield from of_work


def _collected(parts: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(_compared(parts.get("collection", []), parts.get("rival_collection", []), report._work))


def _waits(parts: Mapping[str, Any]) -> Panel:
    bars = [
        Bar(
            f"{report.work_name(one)}: {one['system']}",
            [(one["p50_s"], one["p99_s"], _colour(one["system"]))],
            f"{report.shown(one['p50_s'])} to {report.shown(one['p99_s'])}",
        )
        for one in _collected(parts)
    ]
    return Panel("From a result's PUT to the trainer's hands: p50 to p99 in s, log scale", bars, log=True)


def _cpu(parts: Mapping[str, Any]) -> Panel:
    bars = [
        Bar(
            f"{report.work_name(one)}: {one['system']}",
            [(0.0, one["cpu_ms"], _colour(one["system"]))],
            report.shown(one["cpu_ms"]),
        )
        for one in _collected(parts)
    ]
    return Panel("CPU of the trainer's process per rollout, in ms", bars)


def _calls(parts: Mapping[str, Any]) -> Panel:
    ours, rivals = (parts.get(name, {"rows": []})["rows"] for name in ("gateway", "rival_gateways"))
    bars = [
        Bar(
            f"{one['history']:,} tokens{', streamed' if one['stream'] else ''}: {one['system']}",
            [(0.0, one["cpu_ms"], _colour(one["system"]))],
            report.shown(one["cpu_ms"]),
        )
        for one in _compared(ours, rivals, report._load)
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
