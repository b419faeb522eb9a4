"""A run's folder from a fixed seed, and its report."""

from __future__ import annotations

from pathlib import Path

import pytest

from made_runs import MadeRun, make_run
from report_page import Page
from rollout_backend.report.files import write_report


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of 12 tasks with 6 rollouts each."""
    return make_run(tmp_path_factory.mktemp("runs") / "run-a", MadeRun(tasks=12, group=6, lost=0.2))


@pytest.fixture(scope="module")
def page(made: Path) -> Page:
    return Page(write_report(made))
