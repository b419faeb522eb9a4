from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from builders import load_module

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def examples() -> Path:
    return EXAMPLES


@pytest.fixture(scope="session")
def load() -> Callable[[str], ModuleType]:
    """Import one file of the examples. Several of them share a name."""
    return lambda path: load_module(EXAMPLES / path)
