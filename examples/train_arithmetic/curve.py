"""Read the metrics of verl's `file` logger, and write a table, a CSV file and a picture of the training."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

COLUMNS = {  # ours: verl's
    "reward": "critic/score/mean",
    "rollout_probs_diff_max": "training/rollout_probs_diff_max",
    "grad_norm": "actor/grad_norm",
    "response_length": "response_length/mean",
    "entropy": "actor/entropy",
    "rollouts": "rollouts/planned/sum",
    "left_out": "rollouts/left_out/sum",
    "staleness": "rollouts/staleness/mean",
    "seconds": "timing_s/step",
    "rollout_seconds": "timing_s/gen",
    "update_seconds": "timing_s/update_actor",
    "weight_sync_seconds": "timing_s/update_weights",
}
STALENESS = "training/off_policy/trajectory_staleness_worst/max"  # only the v1 trainer has it
TABLE = {"step": "d", "reward": ".3f", "rollout_probs_diff_max": ".1e", "grad_norm": ".3f", "weight_version": "d"}
FIELDS = ["step", *COLUMNS, "weight_version"]


class Curve:
    """The metrics of one training run. verl writes `source` line by line; the file may not exist yet."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.shown = 0

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each finished step. A value that verl did not measure is None."""
        if not self.source.exists():
            return []
        whole, _, _ = self.source.read_text().rpartition("\n")
        return [row(json.loads(line)) for line in whole.splitlines()]

    def show_new(self) -> None:
        """Print the rows that are new since the last call."""
        rows = self.rows()
        if rows and not self.shown:
            print("  ".join(f"{name:>9}" for name in TABLE), flush=True)
        for new in rows[self.shown :]:
            print(
                "  ".join(f"{shown(new[name], form):>{max(len(name), 9)}}" for name, form in TABLE.items()),
                flush=True,
            )
        self.shown = len(rows)

    def write(self, folder: Path) -> None:
        """Write `curve.csv` and, if matplotlib is installed, `curve.png`."""
        rows = self.rows()
        with (folder / "curve.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(rows)
        written = [folder / "curve.csv"]
        try:
            import matplotlib as mpl
        except ImportError:
            print("no curve.png: matplotlib is not installed")
        else:
            mpl.use("Agg")
            draw(rows, folder / "curve.png")
            written.append(folder / "curve.png")
        print("written:", *written)


def row(logged: dict[str, Any]) -> dict[str, Any]:
    step, data = int(logged["step"]), logged["data"]
    # The legacy trainer can log the metrics of this backend only as timings.
    found = {name: data.get(key, data.get(f"timing_s/{key}")) for name, key in COLUMNS.items()}
    # A weight version is the number of the step that produced it; 0 is the initial model. verl counts how many steps
    # the oldest token's weights lag behind those that a synchronous step samples with.
    lag = data.get(STALENESS)
    version = None if lag is None else step - 1 - int(lag)
    return {"step": step, **found, "weight_version": version}


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib import pyplot

    figure, (reward, match) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6), height_ratios=(2, 1))
    steps = [row["step"] for row in rows]
    reward.plot(steps, [row["reward"] for row in rows], marker="o")
    reward.set(ylabel="mean reward", ylim=(-0.02, 1.02))
    match.semilogy(steps, [row["rollout_probs_diff_max"] for row in rows], marker="o", color="tab:red")
    match.set(xlabel="step", ylabel="engine vs. trainer\nprobability, worst", ylim=(1e-9, 1))
    match.xaxis.get_major_locator().set_params(integer=True)
    for axes in (reward, match):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
