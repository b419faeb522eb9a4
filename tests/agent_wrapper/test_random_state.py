import os
import random
import sys

import numpy
import pytest

from agent_wrapper.app import reseed


def test_processes_of_one_snapshot_draw_different_numbers() -> None:
    state, numpy_state = random.getstate(), numpy.random.get_state()
    drawn = set()
    try:
        for _ in range(3):
            random.seed(7)
            numpy.random.seed(7)
            reseed("session")
            drawn.add((random.random(), numpy.random.random()))
    finally:
        random.setstate(state)
        numpy.random.set_state(numpy_state)
    assert len({first for first, _ in drawn}) == len({second for _, second in drawn}) == 3


def test_numpy_is_not_imported_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    state = random.getstate()
    monkeypatch.delitem(sys.modules, "numpy")
    reseed("session")
    assert "numpy" not in sys.modules
    random.setstate(state)


def test_sessions_differ_even_if_the_kernels_generator_was_restored_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", lambda size: bytes(size))
    drawn = set()
    for session in ("a", "b"):
        reseed(session)
        drawn.add(random.random())
    assert len(drawn) == 2
