"""Draw how a value changes over the steps of trainings, as an SVG. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

Curves = Sequence[Sequence[float]]  # [seeds, steps], each value from 0 to 1

_COLOURS = ("#1f6feb", "#9a6700", "#1a7f37", "#cf222e")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _LEGEND = 760, 380, 56, 14, 44, 26  # pixels


def smoothed(values: Sequence[float], neighbours: int) -> list[float]:
    """Return the mean of each value and its neighbours on each side; fewer at the ends."""
    return [statistics.fmean(values[max(0, at - neighbours) : at + neighbours + 1]) for at in range(len(values))]


def picture(lines: Mapping[str, Curves], label: str, neighbours: int = 1) -> str:
    """Return a line for each name: the mean of the seeds, in a band from the lowest to the highest.

    All values are smoothed over `neighbours` steps on each side. `label` is the vertical axis.
    """
    found = {name: [smoothed(curve, neighbours) for curve in curves] for name, curves in lines.items() if curves}
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
