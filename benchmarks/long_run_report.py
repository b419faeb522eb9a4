"""Tables and the picture of what `long_run.py` has measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from common import Table, drawing

KILLED = ("trainer", "gateway", "engine", "janitor")
POINTS = 120  # of a line in the picture


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
    return Table(("", "count"), [[*line] for line in lines.items()])


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
    return Table(header, lines)


def picture(results: Mapping[str, Any]) -> str:
    """Return an SVG with a panel for memory, descriptors, lag, restarts and rollouts, and a mark for each kill."""
    series, hours = results["series"], results["account"]["hours"]
    panels = {
        "resident memory, MiB": [name for name in series if name.endswith(", MiB")],
        "open descriptors": [name for name in series if name.endswith(", descriptors")],
        "from a result's PUT to the trainer, s": [name for name in series if name.startswith("lag, ")],
        "from a trainer's start to its first step, s": ["restart, s"],
        f"rollouts completed in {60 * hours / POINTS:.1f} minutes": ["completed"],
    }
    with drawing(len(panels), 1, 7.6, 9, sharex=True) as (axes, written):
        for axis, (title, names) in zip(axes[:, 0], panels.items(), strict=True):
            for name in names:
                points = [
                    (hours * (at + 0.5) / POINTS, value) for at, value in enumerate(series[name]) if value is not None
                ]
                axis.plot(*zip(*points, strict=True), label=name.removeprefix("lag, ").partition(",")[0])
            axis.set_title(title, loc="left")
            axis.set_ylim(bottom=0)
            axis.grid(axis="y", alpha=0.4)
            if len(names) > 1:
                axis.legend(frameon=False, bbox_to_anchor=(1, 1), loc="upper left")
        kills = [at for at, _ in results["kills"]]
        axes[-1, 0].plot(kills, [0.0] * len(kills), "|", color="black", clip_on=False)
        axes[-1, 0].set_xlabel(f"hours; a mark for each of {len(kills)} kills")
    return written.getvalue()
