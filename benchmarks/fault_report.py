"""Tables and a picture of what `benchmarks/faults.py` has counted. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fault_cases import SYSTEMS
from report import Table, svg, text_at

Results = Mapping[str, Any]
WRONG = {"invented": "with an invented reward", "foreign": "with foreign tokens", "duplicated": "doubled"}
COUNTS = ("delivered", "lost", "duplicated", "invented", "foreign", "leaked", "again")
_TITLE, _CELL, _LINE = 400, 150, 20  # pixels
_COLOURS = {"delivered": "#1f6feb", "missing": "#d6dbe1", "lost": "#57606a", "wrong": "#cf222e", "leaked": "#bf8700"}


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
        broken = sum(row["ended"] != "yes" for row in rows)
        lines.append([system, str(len(rows)), *sums, str(broken)])
    return Table("sums", ("system", "faults", *COUNTS, "steps that did not end by themselves"), lines)


def matrix(results: Results) -> Table:
    """Return one line for each fault."""
    systems = systems_of(results)
    by_place = {(row["fault"], row["system"]): row for row in results["rows"]}
    lines = [
        [title, *(_cell(by_place.get((name, system)), planned(results)) for system in systems)]
        for name, title in results["cases"].items()
        if any((name, system) in by_place for system in systems)
    ]
    return Table("matrix", ("fault", *systems), lines)


def _met(results: Results) -> list[dict[str, Any]]:
    return [row for row in results["rows"] if "not_applicable" not in row]


def _cell(row: Mapping[str, Any] | None, all_of_them: int) -> str:
    if row is None:
        return ""
    if "not_applicable" in row:
        return f"n/a: {row['not_applicable']}"
    parts = [f"**{row['delivered']}**" if row["delivered"] == all_of_them else f"{row['delivered']}"]
    parts += [f"{row['lost']} lost"] if row["lost"] else []
    parts += [f"{row[name]} {text}" for name, text in WRONG.items() if row[name]]
    parts += [f"{row['leaked']} leaked"] if row["leaked"] else []
    parts += [f"{row['again']} run again"] if row["again"] else []
    parts += [f"the step: `{row['ended'].replace('|', '/')}`"] if row["ended"] != "yes" else []
    return ", ".join(parts)


def picture(results: Results) -> str:
    """Return an SVG with a bar for each fault and system, as long as the step's rollouts."""
    systems, by_place = systems_of(results), {(row["fault"], row["system"]): row for row in results["rows"]}
    names = [name for name in results["cases"] if any((name, system) in by_place for system in systems)]
    width, height = _TITLE + _CELL * len(systems) + 10, _LINE * (len(names) + 3)
    elements = [text_at(_TITLE + _CELL * i, 16, system, "font-weight='bold'") for i, system in enumerate(systems)]
    for at, name in enumerate(names, start=1):
        y = _LINE * at + 4
        elements.append(text_at(_TITLE - 8, y + 12, results["cases"][name], "text-anchor='end'"))
        for i, system in enumerate(systems):
            elements += _bar(_TITLE + _CELL * i, y, by_place.get((name, system)), planned(results))
    x = 8.0
    for name, colour in _COLOURS.items():
        text = {"wrong": "trained wrongly", "leaked": "sessions leaked", "missing": "missing and reported"}.get(
            name, name
        )
        elements.append(f"<rect x='{x}' y='{height - 22}' width='10' height='10' fill='{colour}'/>")
        elements.append(text_at(x + 14, height - 13, text))
        x += 30 + 7 * len(text)
    return svg(width, height, elements)


def _bar(left: float, y: float, row: Mapping[str, Any] | None, all_of_them: int) -> Iterator[str]:
    if row is None or "not_applicable" in row:
        yield text_at(left, y + 12, "" if row is None else "n/a", "fill-opacity='0.5'")
        return
    wrong = sum(row[name] for name in WRONG)
    known = {"delivered": row["delivered"], "wrong": wrong, "lost": row["lost"]}
    room = _CELL - 20
    for name, rollouts in {**known, "missing": max(0, all_of_them - sum(known.values()))}.items():
        wide = room * rollouts / all_of_them
        if wide:
            yield f"<rect x='{left:.1f}' y='{y}' width='{wide:.1f}' height='11' fill='{_COLOURS[name]}'/>"
        left += wide
    if row["leaked"]:
        wide = room * min(row["leaked"], all_of_them) / all_of_them
        yield (
            f"<rect x='{left - room:.1f}' y='{y + 12}' width='{wide:.1f}' height='4' fill='{_COLOURS['leaked']}'/>"
        )


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
