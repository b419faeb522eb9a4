"""The thresholds of the garbage collector during steps, and after them."""

import gc

import pytest

from rollout_backend.base.garbage_collection import exempt_loaded_objects, rare_full_collections


@pytest.fixture(autouse=True)
def _restored():
    before, callbacks = gc.get_threshold(), [*gc.callbacks]
    yield
    gc.set_threshold(*before)
    gc.callbacks[:] = callbacks


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


def test_a_server_does_not_visit_older_objects_while_sessions_open():
    exempt_loaded_objects()
    before = [generation["collections"] for generation in gc.get_stats()]
    kept = [[] for _ in range(200_000)]
    young, *older = [now["collections"] - then for now, then in zip(gc.get_stats(), before, strict=True)]
    assert young > 10
    assert older == [0, 0], len(kept)


def runs_of_old_objects():
    return gc.get_stats()[2]["collections"]


def make_a_full_run_due():
    """Keep so many objects, in so many runs of younger ones, that Python makes a full run at its next opportunity."""
    gc.collect()
    gc.set_threshold(0)
    kept = [[] for _ in range(len(gc.get_objects()))]
    for _ in range(12):
        gc.collect(1)
    gc.set_threshold(700, 10, 10)
    return kept


def test_no_full_run_is_made_during_a_step():
    due, before = make_a_full_run_due(), runs_of_old_objects()
    with rare_full_collections():
        kept = [[] for _ in range(500_000)]
        assert runs_of_old_objects() == before, (len(kept), len(due))


def test_steps_without_work_between_them_do_not_postpone_a_full_run_for_ever():
    gc.collect()  # so that none is due
    before = runs_of_old_objects()
    for _ in range(20):
        with rare_full_collections():
            pass
    assert runs_of_old_objects() == before + 1


def test_steps_that_overlap_for_ever_do_not_postpone_a_full_run_for_ever():
    gc.collect()
    gc.set_threshold(700, 10, 10)
    before = runs_of_old_objects()
    with rare_full_collections():
        kept = []
        for _ in range(20):
            with rare_full_collections():
                kept.append([[] for _ in range(60_000)])
                gc.collect(1)  # as after a million objects
    assert runs_of_old_objects() > before
