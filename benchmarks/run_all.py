"""Run all benchmarks, and write their results: `make bench`.

    python benchmarks/run_all.py --only collection

It takes about an hour on two cores, and more at the first time, when it installs the rivals. `results.json` has the
date, machine and command of each part, and its figures in `parts`, or the reason why there are none in `failed`.
`docs/make_performance.py` makes a page of it.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common import ROOT, Table, arguments, drawing, kept_folder, machine, shown, today, write

PARTS = {  # the environment of each
    "collection": ".venv",
    "gateway": ".venv",
    "training_step": ".venv-verl",
    "wrapper": ".venv",
    "ceilings": ".venv",
    "large_step": ".venv-verl",
}
Results = Mapping[str, Any]
Row = Mapping[str, Any]
AT_ONCE = 1e5  # sessions per second, from which a work is called "at once"
FLOORS = ("checked HTTP", "bare proxy", "no gateway")  # what transport, libraries and stand-ins allow
BLUE, GREY, LIGHT = "#1f6feb", "#9aa4b2", "#d6dbe1"


def _collected(row: Row) -> str:
    rate = "at once" if row["rate"] >= AT_ONCE else f"at {row['rate']:g}/s"
    size = "" if row["tokens"] == 1200 else f" of {row['tokens']:,} tokens"
    return f"{row['rollouts']:,} results{size} {rate}"


def _called(row: Row) -> str:
    kind = "streamed calls" if row["stream"] else "calls"
    rate = "without a pause" if row["rate"] is None else f"at {row['rate']:g}/s"
    return f"{kind} with {row['history']:,} tokens {rate}, {row['in_flight']:,} in flight"


WORK: dict[str, Callable[[Row], str]] = {
    "collection": _collected,
    "gateway": _called,
    "training_step": lambda row: "a step of the tiny model",
    "wrapper": lambda row: "a container",
    "ceilings": lambda row: "a call",
    "large_step": lambda row: f"{row['sessions']:,} sessions, {row['turns']} turns",
}
COLUMNS = {
    "collection": {
        "p50_s": "p50, s", "p99_s": "p99, s", "cpu_ms": "CPU per rollout, ms", "calls": "calls",
        "last_s": "last result, s", "peak_mib": "peak, MiB",
    },
    "gateway": {
        "calls_per_s": "calls/s", "cpu_ms": "CPU per call, ms", "added_p50_ms": "added p50, ms",
        "added_p99_ms": "added p99, ms", "session_kib": "KiB per session", "errors": "errors",
    },
    "large_step": {
        "tokens": "tokens of a session", "refused": "calls refused",
        "cpu_ms": "gateway: CPU per call, ms", "early_cpu_ms": "in the first quarter of the turns, ms",
        "late_cpu_ms": "in the last quarter of the turns, ms", "gateway_mib": "gateway: peak, MiB",
        "gateway_s": "gateway: all calls and trajectories, s",
        "journal_kib": "gateway's journal: KiB per session", "trajectory_kib": "trajectory: KiB as JSON",
        "trajectory_cpu_ms": "gateway: CPU per trajectory, ms",
        "collect_cpu_ms": "trainer: CPU per result, ms", "collect_mib": "trainer: peak, MiB",
        "rows_ms": "trainer: CPU per rollout's rows, ms", "put_ms": "TransferQueue's client: CPU per row, ms",
        "row_bytes": "row: bytes per token", "queue_bytes": "TransferQueue: memory per token, bytes",
        "advantage_bytes": "verl's advantages: peak per padded token, bytes",
        "metrics_bytes": "verl's metrics: peak per padded token, bytes", "load": "load average before",
    },
}  # fmt: skip
FIGURES = {"training_step": "part", "wrapper": "figure", "ceilings": "call"}  # where each system has a column
TURNED = {"large_step"}  # where each work has a column
FIVE = (  # the summary: part, work, and figure
    ("collection", "512 results at 25/s", "p50_s"),
    ("collection", "1,024 results at once", "cpu_ms"),
    ("gateway", "calls with 2,048 tokens without a pause, 32 in flight", "calls_per_s"),
    ("gateway", "calls with 2,048 tokens at 500/s, 100 in flight", "added_p50_ms"),
    ("training_step", "a step of the tiny model", "total"),
)


def rows_of(results: Results, part: str) -> list[Row]:
    """Return the rows with figures, by work."""
    rows = [row for row in results["parts"].get(part, []) if "failed" not in row]
    works = [*dict.fromkeys(map(WORK[part], rows))]
    return sorted(rows, key=lambda row: works.index(WORK[part](row)))


def summary(results: Results) -> Table:
    """Return five figures of ours, of the rivals that did the same work, and of the floor."""
    lines = []
    for part, work, key in FIVE:
        found = {row["system"]: row[key] for row in rows_of(results, part) if WORK[part](row) == work}
        if "ours" not in found:
            continue
        ours, floors = found.pop("ours"), [found.pop(name) for name in FLOORS if name in found]
        floor = floors[0] if floors else None
        rivals = ", ".join(f"{shown(value)} ({name})" for name, value in found.items())
        name = COLUMNS[part][key] if part in COLUMNS else "s"
        lines.append([work, name, shown(ours), rivals, shown(floor), shown(ours / floor if floor else None)])
    return Table(("work", "figure", "ours", "rivals", "floor", "ours / floor"), lines)


def table(results: Results, part: str) -> Table:
    """Return one line for each work and system, or for each figure of them."""
    rows = rows_of(results, part)
    if part not in COLUMNS:
        names = [name for name in rows[0] if name != "system" and any(row.get(name, 0) >= 0.005 for row in rows)]
        form = "{:.2f}".format if part == "training_step" else shown
        lines = [[name, *(form(row[name]) if name in row else "" for row in rows)] for name in names]
        return Table((FIGURES[part], *(row["system"] for row in rows)), lines)
    columns = COLUMNS[part]
    if part in TURNED:
        measured = {name: label for name, label in columns.items() if any(name in row for row in rows)}
        lines = [[label, *(shown(row.get(name)) for row in rows)] for name, label in measured.items()]
        return Table(("figure", *map(WORK[part], rows)), lines)
    lines = [[WORK[part](row), row["system"], *map(shown, map(row.get, columns))] for row in rows]
    return Table(("work", "system", *columns.values()), lines)


def compared(results: Results) -> Table:
    """Return the CPU time of each work of ours that earlier code did, too, with the floor in parentheses."""
    now = {part: rows_of(results, part) for part in results["earlier"][0]["rows"]}
    series = [*(each["rows"] for each in results["earlier"]), now]
    spent = [
        {(part, WORK[part](row), row["system"]): row["cpu_ms"] for part in rows for row in rows[part]}
        for rows in series
    ]
    lines = []
    for part, work, system in spent[-1]:
        if system == "ours" and all((part, work, system) in each for each in spent):
            cells = []
            for each in spent:
                floors = (f" ({shown(each[part, work, name])})" for name in FLOORS if (part, work, name) in each)
                cells.append(shown(each[part, work, system]) + next(floors, ""))
            lines.append([work, *cells])
    return Table(("work", *(each["title"] for each in results["earlier"]), "now"), lines)


def failures(results: Results) -> list[str]:
    """Return one line for each part and each rival that has no figures, with the reason."""
    found = [f"{part}: {reason}" for part, reason in results["failed"].items()]
    for part, rows in results["parts"].items():
        found += [f"{row['system']}, {WORK[part](row)}: {row['failed']}" for row in rows if "failed" in row]
    return found


def picture(results: Results) -> str:
    """Return an SVG with bars of the works that others did, too."""
    panels = (
        ("collection", "p99_s", "from a result's PUT to the trainer: p50 to p99 in s, log scale"),
        ("collection", "cpu_ms", "CPU of the trainer's process per rollout, in ms"),
        ("gateway", "cpu_ms", "CPU of the gateway's process per call, in ms"),
        ("training_step", "total", "a training step on the CPU, in s"),
    )
    rows = [_compared(results, part, key) for part, key, _ in panels]
    heights = [max(1, len(each)) for each in rows]
    with drawing(4, 1, 9, 2 + sum(heights) / 5, height_ratios=heights) as (axes, written):
        for axis, (part, key, title), bars in zip(axes[:, 0], panels, rows, strict=True):
            systems = [row["system"] for row in bars]
            colours = [BLUE if name.startswith("ours") else LIGHT if name in FLOORS else GREY for name in systems]
            starts = [row["p50_s"] if key == "p99_s" else 0.0 for row in bars]
            widths = [row[key] - start for row, start in zip(bars, starts, strict=True)]
            drawn = axis.barh(range(len(bars)), widths, left=starts, color=colours)
            axis.bar_label(drawn, [shown(row[key]) for row in bars], padding=3)
            axis.set_yticks(range(len(bars)), [f"{WORK[part](row)}: {row['system']}" for row in bars])
            axis.set_title(title, loc="right", fontweight="bold")
            axis.set_xscale("log" if any(starts) else "linear")
            axis.invert_yaxis()
            axis.margins(x=0.15)
    return written.getvalue()


def _compared(results: Results, part: str, key: str) -> list[Row]:
    """Return the rows of the works that others did, too, with this figure."""
    rows = [row for row in rows_of(results, part) if key in row and row.get("rate", 0) != 500]
    works = Counter(map(WORK[part], rows))
    return [row for row in rows if works[WORK[part](row)] > 1]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench")
    args = parser.parse_args()
    out: Path = args.out.absolute()
    kinds = ("parts", "failed", "commands", "seconds", "dates", "machines")
    results: dict[str, Any] = {kind: {} for kind in kinds}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    with kept_folder():
        for part in args.only:
            began, found = time.monotonic(), out / f"{part}.json"
            found.unlink(missing_ok=True)
            command = [f"{PARTS[part]}/bin/python", f"benchmarks/{part}.py", *(["--smoke"] if args.smoke else [])]
            results["commands"][part] = " ".join(command)
            print(f"\n$ {' '.join(command)}", flush=True)
            # The file goes to the end, so that the command that is published is the one to repeat it.
            done = subprocess.run([*command, "--json", str(found)], cwd=ROOT, env=env, check=False)
            if done.returncode:
                results["failed"][part] = f"ended with {done.returncode}"
            else:
                results["parts"][part] = json.loads(found.read_text())
            results["dates"][part], results["machines"][part] = today(), machine()
            results["seconds"][part] = round(time.monotonic() - began)
    write(out / "results.json", results)
    (out / "results.svg").write_text(picture(results))
    for part in results["parts"]:
        print(f"\n{table(results, part).markdown()}")
    print(f"\n{summary(results).markdown()}")
    for line in failures(results):
        print(f"no figure: {line}")
    print(f"\n{sum(results['seconds'].values())} s; written: {out / 'results.json'} {out / 'results.svg'}")
    sys.exit(bool(results["failed"]))


if __name__ == "__main__":
    main()
