"""Tables and the picture of what `long_run.py` has measured. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from report import STACK, Table, shown, svg, text_at

KILLED = ("trainer", "gateway", "engine", "janitor")
POINTS = 120  # of a line in the picture
_WIDTH, _LEFT, _RIGHT, _PANEL, _HEAD = 760, 60, 130, 130, 24  # pixels


def account(results: Mapping[str, Any]) -> Table:
    """Return the accounts, one line for each figure."""
    found = results["account"]
    killed = Counter(kind for _, kind in results["kills"])
    lost = found["planned"] - found["outcomes"].get("completed", 0)
    lines = {
        "killed": ", ".join(f"{killed[kind]} x {kind}" for kind in KILLED),
        "steps": f"{found['steps']:,}",
        "rollouts planned, each once": f"{found['planned once']:,} of {found['planned']:,}",
        "lost": str(lost),
        "trained": f"{found['trained']:,}",
        "results in S3": f"{found['results in S3']:,}",
        "finished and run again": str(found["finished and run again"]),
        "continued under the next trainer": f"{found['reattached']:,}",
        "finished under an earlier trainer": f"{found['resumed']:,}",
        "trainers that ended by themselves": str(len(found["failures"])),
        "left at the end": ", ".join(f"{count} {what}" for what, count in found["left"].items()),
    }
    return Table("account", ("", "count"), [[*line] for line in lines.items()])


def growth(results: Mapping[str, Any]) -> Table:
    header = ("process", "within", "samples", "hours", "MiB", "MiB an hour", "descriptors", "descriptors an hour")
    lines = [
        [
            *(line["kind"], line["what"], f"{line['samples']:,}", f"{line['hours']:.2f}"),
            *(f"{line['mib']:.1f}", f"{line['mib_per_h']:+.2f}"),
            *(f"{line['descriptors']:.0f}", f"{line['descriptors_per_h']:+.2f}"),
        ]
        for line in results["growth"]
    ]
    return Table("growth", header, lines)


def picture(results: Mapping[str, Any]) -> str:
    """Return an SVG with a panel for memory, descriptors, lag, restarts and rollouts, and a mark for each kill."""
    series, hours = results["series"], results["account"]["hours"]
    panels: list[tuple[str, dict[str, list[float | None]]]] = [
        (title, {name.partition(", ")[0]: values for name, values in series.items() if name.endswith(f", {unit}")})
        for title, unit in (("resident memory, MiB", "MiB"), ("open descriptors", "descriptors"))
    ]
    lag = {name: series[f"lag, {name}"] for name in ("median", "largest") if f"lag, {name}" in series}
    panels.append(("from a result's PUT to the trainer, s", lag))
    panels.append(("from a trainer's start to its first step, s", {"trainer": series.get("restart, s", [])}))
    panels.append((f"rollouts completed in {60 * hours / POINTS:.1f} minutes", {"completed": series["completed"]}))
    height = len(panels) * (_PANEL + _HEAD) + 2 * _HEAD
    elements: list[str] = []
    for i, (title, lines) in enumerate(panels):
        elements += _panel(title, lines, i * (_PANEL + _HEAD), hours)
    top = len(panels) * (_PANEL + _HEAD)
    colours = dict(zip(KILLED, STACK, strict=False))
    elements += [
        f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{top + 4}' y2='{top + 18}' stroke='{colours[kind]}'/>"
        for hour, kind in results["kills"]
        if (x := _LEFT + (_WIDTH - _LEFT - _RIGHT) * hour / hours)
    ]
    elements.append(text_at(_WIDTH - _RIGHT + 8, top + 15, f"{len(results['kills'])} kills"))
    return svg(_WIDTH, height, elements)


def _panel(title: str, lines: Mapping[str, list[float | None]], top: int, hours: float) -> Iterator[str]:
    most = max((value for values in lines.values() for value in values if value is not None), default=1.0) or 1.0
    bottom, width = top + _HEAD + _PANEL - 20, _WIDTH - _LEFT - _RIGHT
    yield text_at(_LEFT, top + 16, title, "font-weight='bold'")
    for part in (0.0, 0.5, 1.0):
        y = bottom - part * (_PANEL - 20)
        yield f"<line x1='{_LEFT}' y1='{y:.1f}' x2='{_LEFT + width}' y2='{y:.1f}' stroke='#d6dbe1'/>"
        yield text_at(_LEFT - 6, y + 4, shown(part * most), "text-anchor='end'")
        yield text_at(_LEFT + part * width, bottom + 15, f"{part * hours:.2g} h", "text-anchor='middle'")
    for i, (name, values) in enumerate(lines.items()):
        points = " ".join(
            f"{_LEFT + width * (at + 0.5) / POINTS:.1f},{bottom - (_PANEL - 20) * value / most:.1f}"
            for at, value in enumerate(values)
            if value is not None
        )
        yield f"<polyline points='{points}' fill='none' stroke='{STACK[i]}' stroke-width='1.5'/>"
        yield text_at(_LEFT + width + 8, top + _HEAD + 14 + 16 * i, name, f"style='fill: {STACK[i]}'")
