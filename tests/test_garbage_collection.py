"""The thresholds of the garbage collector during steps, and after them."""

import gc

import pytest

from rollout_backend.garbage_collection import exempt_loaded_objects, rare_full_collections


@pytest.fixture(autouse=True)
def _restored():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_overlapping_steps_restore_the_thresholds_once_the_last_one_ends():
    gc.set_threshold(700, 10, 10)
    first, second = rare_full_collections(), rare_full_collections()
    first.__enter__()
    assert gc.get_threshold() != (700, 10, 10)
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold() != (700, 10, 10)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, 10)


def test_a_collector_that_is_switched_off_stays_off():
    gc.set_threshold(0)
    with rare_full_collections():
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold()[0] == 0


def test_a_server_collects_only_what_was_made_after_its_start():
    exempt_loaded_objects()
    try:
        assert gc.get_freeze_count() > 1000
        assert gc.get_threshold()[0] > 700
    finally:
        gc.unfreeze()


def test_a_server_does_not_visit_older_objects_while_sessions_open():
    exempt_loaded_objects()
    try:
        before = [generation["collections"] for generation in gc.get_stats()]
        kept = [[] for _ in range(200_000)]
        young, *older = [now["collections"] - then for now, then in zip(gc.get_stats(), before, strict=True)]
        assert young > 10
        assert older == [0, 0], len(kept)
    finally:
        gc.unfreeze()
