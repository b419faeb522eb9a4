"""Tables and a picture of what `benchmarks/faults.py` has counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common import Table, drawing
from fault_cases import SYSTEMS

Results = Mapping[str, Any]
Row = Mapping[str, Any]
WRONG = {"invented": "with an invented reward", "foreign": "with foreign tokens", "duplicated": "doubled"}
OTHERS = {"leaked": "leaked", "again": "run again"}
COUNTS = ("delivered", "lost", *("duplicated", "invented", "foreign"), *OTHERS)
_BARS = {"delivered": "#1f6feb", "trained wrongly": "#cf222e", "lost": "#57606a", "missing and reported": "#d6dbe1"}


def planned(results: Results) -> int:
    """Return the rollouts of one step."""
    return int(results["settings"]["groups"] * results["settings"]["group"])


def systems_of(results: Results) -> list[str]:
    found = {row["system"] for row in results["rows"]}
    return [system for system in SYSTEMS if system in found]


def totals(results: Results) -> Table:
    """Return one line for each system: the sums over the faults that it can meet."""
    lines = []
    for system in systems_of(results):
        rows = [row for row in _met(results) if row["system"] == system and row["fault"] != "none"]
        sums = [str(sum(row[name] for row in rows)) for name in COUNTS]
        sums[0] += f" of {len(rows) * planned(results)}"
        lines.append([system, str(len(rows)), *sums, str(sum(row["ended"] != "yes" for row in rows))])
    return Table(("system", "faults", *COUNTS, "steps that did not end by themselves"), lines)


def matrix(results: Results) -> Table:
    """Return one line for each fault."""
    systems, by_place = systems_of(results), {(row["fault"], row["system"]): row for row in results["rows"]}
    lines = [
        [title, *(_cell(by_place.get((name, system), {}), planned(results)) for system in systems)]
        for name, title in results["cases"].items()
        if any((name, system) in by_place for system in systems)
    ]
    return Table(("fault", *systems), lines)


def _met(results: Results) -> list[Row]:
    return [row for row in results["rows"] if "not_applicable" not in row]


def _cell(row: Row, all_of_them: int) -> str:
    if "delivered" not in row:
        return f"n/a: {row['not_applicable']}" if row else ""
    parts = [f"**{row['delivered']}**" if row["delivered"] == all_of_them else f"{row['delivered']}"]
    parts += [f"{row[name]} {text}" for name, text in ({"lost": "lost"} | WRONG | OTHERS).items() if row[name]]
    parts += [f"the step: `{row['ended'].replace('|', '/')}`"] if row["ended"] != "yes" else []
    return ", ".join(parts)


def picture(results: Results) -> str:
    """Return an SVG with a bar for each fault and system, as long as the step's rollouts."""
    systems, titles = systems_of(results), results["cases"]
    places = {name: -place for place, name in enumerate(titles)}
    with drawing(1, len(systems), 4.2 + 1.5 * len(systems), 0.5 + len(titles) / 4, sharey=True) as (axes, written):
        for axis, system in zip(axes[0], systems, strict=True):
            for row in _met(results):
                if row["system"] == system:
                    left, wrong = 0, sum(row[name] for name in WRONG)
                    lengths = [row["delivered"], wrong, row["lost"]]
                    lengths.append(max(0, planned(results) - sum(lengths)))
                    for length, colour in zip(lengths, _BARS.values(), strict=True):
                        if length:
                            axis.barh(places[row["fault"]], length, left=left, height=0.6, color=colour)
                        left += length
                    if row["leaked"]:
                        axis.barh(places[row["fault"]] - 0.4, row["leaked"], height=0.2, color="#bf8700")
            axis.set_title(system)
            axis.set_xticks([])
        axes[0, 0].set_yticks([*places.values()], [*titles.values()])
        handles = [axes[0, 0].barh(0, 0, color=colour) for colour in (*_BARS.values(), "#bf8700")]
        names = [*_BARS, "sessions leaked"]
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0)}
        axes[0, 0].figure.legend(handles, names, **place, ncols=len(names), frameon=False)
    return written.getvalue()


def reasons(results: Results) -> Sequence[str]:
    """Return why each system's rollouts are missing, one line for each fault and system."""
    order = list(results["cases"])
    found = [row for row in _met(results) if row["missing"]]
    found.sort(key=lambda row: (order.index(row["fault"]), SYSTEMS.index(row["system"])))
    return [
        f"{results['cases'][row['fault']]}, {row['system']}: "
        + ", ".join(f"{count} `{reason}`" for reason, count in row["missing"].items())
        for row in found
    ]
