"""A console whose output tests can read."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console


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
