"""What a page shows of another run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout_backend.results.archive import RunArchive
from rollout_backend.results.comparison import REWARD, Difference, compare
from rollout_backend.results.records import RolloutRecord
from rollout_backend.results.run_comparison import changed_tasks, read_tasks
from rollout_backend.results.run_data import RunData


def comparison(
    run: RunData, records: Sequence[RolloutRecord], against: RunData | None, others: Sequence[RolloutRecord]
) -> dict[str, Any]:
    """Return the values that templates show of a run to compare with, which has the records `others`."""
    differences: tuple[Difference, ...] = ()
    if against is not None:
        tasks = (read_tasks(RunArchive(each.run_dir)) for each in (against, run))
        differences = compare(others, records, changed_tasks(*tasks))
    return {
        "against": against,
        "differences": differences,
        "reward_change": next((each for each in differences if each.name == REWARD), None),
        "common_tasks": max((each.tasks for each in differences), default=0),
    }
