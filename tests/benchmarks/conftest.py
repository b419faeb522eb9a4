from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Return a function that imports a module of benchmarks/ or docs/."""
    for folder in ("benchmarks", "docs"):
        monkeypatch.syspath_prepend(ROOT / folder)
    return importlib.import_module
