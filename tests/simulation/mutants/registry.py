"""The registry of mutants. A mutant is a function that returns a patch; its docstring says what is broken."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

Patch = contextlib.AbstractContextManager[Any]
MUTANTS: dict[str, Callable[[], Patch]] = {}


def mutant(make: Callable[[], Patch]) -> Callable[[], Patch]:
    """Register a mutant under its function's name."""
    MUTANTS[make.__name__] = make
    return make


def mutated(name: str) -> Patch:
    """Return a context in which this mutant replaces the production code."""
    return MUTANTS[name]()


@contextlib.contextmanager
def all_of(*patches: Patch) -> Iterator[None]:
    """Apply several patches at once."""
    with contextlib.ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield
