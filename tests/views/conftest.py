"""A run's folder from a fixed seed and its report, and a console whose output tests can read."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from made_runs import MadeRun, make_run
from report_page import Page
from rollout_backend.views.page.report import write_report


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of 12 tasks with 6 rollouts each."""
    return make_run(tmp_path_factory.mktemp("runs") / "run-a", MadeRun(tasks=12, group=6, lost=0.2))


@pytest.fixture(scope="module")
def page(made: Path) -> Page:
    return Page(write_report(made))


class Screen:
    def __init__(self, terminal: bool = False) -> None:
        self._file = io.StringIO()
        self.console = Console(file=self._file, width=140, color_system=None, force_terminal=terminal)

    @property
    def text(self) -> str:
        return self._file.getvalue()


@pytest.fixture
def make_screen() -> Callable[..., Screen]:
    return Screen


@pytest.fixture
def screen() -> Screen:
    return Screen()
