import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_wrapper.contract import Outcome
from rollout_backend.core.ledger import NO_RESULT, Ledger, Phase
from rollout_backend.core.session_ends import SessionEnd
from rollout_backend.errors import LedgerError
from rollouts import make_ledger

IDS = ["a.0", "a.1", "b.0"]


def planned(*ids: str) -> Ledger:
    ledger = make_ledger(3)
    for rid in ids:
        ledger.plan(rid, rid[0])
    return ledger


def test_each_attempt_has_a_session_that_must_be_closed():
    ledger = planned("a.0")
    ledger.entries["a.0"].start_attempt("s1", 1, 1.0)
    ledger.entries["a.0"].start_attempt("s2", 2, 2.0)
    ledger.entries["a.0"].deliver(Outcome.COMPLETED)
    ledger.session_closed("s2")
    with pytest.raises(LedgerError, match="1 sessions open: s1"):
        ledger.reconcile()
    ledger.session_closed("s1")
    ledger.reconcile()
    with pytest.raises(LedgerError, match=r"'a\.0' is planned twice"):
        ledger.plan("a.0", "a")


def test_an_open_rollout_does_not_reconcile_and_every_line_is_printed():
    ledger = planned(*IDS)
    ledger.entries["a.0"].deliver(Outcome.COMPLETED)
    with pytest.raises(LedgerError) as caught:
        ledger.reconcile()
    assert "planned 3, settled 1" in str(caught.value)
    assert all(rid in str(caught.value) for rid in IDS)
    with pytest.raises(LedgerError, match="step 15 validation does not reconcile: "):
        ledger.reconcile("15 validation")


def test_an_unclosed_session_is_named_and_not_counted_as_open():
    ledger = planned("a.0")
    ledger.entries["a.0"].start_attempt("s1", 1, 1.0)
    ledger.entries["a.0"].settle(Outcome.INFRA_ERROR, "x")
    ledger.session_unclosed("s1", "503")
    ledger.reconcile()
    assert ledger.unclosed_sessions == {"s1": "503"}


def test_overdue_rollouts_are_returned_once():
    ledger = planned(*IDS)
    for rollout_id, deadline in zip(IDS, (30.0, 10.0, 20.0), strict=True):
        ledger.entries[rollout_id].start_attempt(f"session of {rollout_id}", 1, deadline)
    first, second, third = (ledger.entries[rollout_id] for rollout_id in ("a.1", "b.0", "a.0"))
    assert ledger.take_overdue(9.0) == ([], 10.0)
    assert ledger.take_overdue(15.0) == ([first], 20.0)
    first.abandon_attempt()
    first.start_attempt("another", 2, 40.0)
    second.settle(Outcome.CANCELLED, "x")  # its deadline no longer counts
    assert ledger.take_overdue(20.0) == ([], 30.0)
    first.end_session(SessionEnd("session of a.1", "evicted", "of the abandoned attempt"))
    assert ledger.take_overdue(20.0) == ([], 30.0)
    first.end_session(SessionEnd("another", "evicted", ""))
    assert ledger.take_overdue(20.0) == ([first], 30.0)
    assert ledger.take_overdue(50.0) == ([third], math.inf)
    ledger.watch(third)  # S3 did not answer
    assert ledger.take_overdue(50.0) == ([third], math.inf)


def test_changed_groups_are_returned_once():
    ledger = planned(*IDS)
    assert ledger.take_changed_groups() == ["a", "b"]
    ledger.entries["b.0"].settle(Outcome.CANCELLED, "x")
    assert ledger.take_changed_groups() == ["b"]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["start_attempt", "accept", "record_result", "settle", "abandon_attempt", "replace"]),
        st.sampled_from(IDS),
        st.sampled_from(list(Outcome)),
    ),
    max_size=40,
)


def play(ledger: Ledger, number: int, event: str, rid: str, outcome: Outcome) -> None:
    match event:
        case "start_attempt":
            if ledger.entries[rid].outcome is None:
                ledger.entries[rid].start_attempt(f"s{number}", 1, float(number))
        case "accept":
            ledger.entries[rid].accept()
        case "record_result":
            reason = "" if number % 3 else "no_model_call"
            ledger.entries[rid].deliver(outcome, reason, trainable=bool(number % 2))
        case "settle":
            ledger.entries[rid].settle(outcome, NO_RESULT)
        case "abandon_attempt":
            ledger.entries[rid].abandon_attempt()
        case "replace":
            ledger.plan(f"{rid[0]}.{number + 2}", rid[0], is_replacement=True)


@given(EVENTS)
def test_any_events_settle_each_rollout_in_one_class(events):
    ledger = planned(*IDS)
    first: dict[str, tuple[Outcome, str]] = {}
    again: Counter[str] = Counter()
    for number, (event, rid, outcome) in enumerate(events):
        if event in ("start_attempt", "accept", "record_result", "settle"):
            play(ledger, number, event, rid, outcome)
        if event == "record_result" and rid in first:
            again[first[rid][1]] += 1
        if event in ("record_result", "settle"):
            first.setdefault(rid, (outcome, event))
    entries = ledger.entries.values()
    settled = {entry.rollout_id: entry.outcome for entry in entries if entry.phase is Phase.SETTLED}
    assert settled == {rid: outcome for rid, (outcome, _) in first.items()}
    assert all(first[entry.rollout_id][1] == "record_result" for entry in entries if entry.trainable)
    ledger.count_extra("never planned")
    assert (ledger.duplicates, ledger.late, ledger.unknown) == (again["record_result"], again["settle"], 1)
    assert sum(ledger.counts().values()) + len(list(ledger.open_entries())) == len(IDS)


@given(EVENTS)
def test_counts_equal_a_full_recount(events):
    ledger = planned(*IDS)
    for number, (event, rid, outcome) in enumerate(events):
        play(ledger, number, event, rid, outcome)
        entries = list(ledger.entries.values())
        assert ledger.counts() == {each: sum(entry.outcome is each for entry in entries) for each in Outcome}
        assert ledger.phases() == {each: sum(entry.phase is each for entry in entries) for each in Phase}
        assert ledger.open == len(list(ledger.open_entries()))
        for task_id, group in ledger.groups.items():
            own = [entry for entry in entries if entry.task_id == task_id]
            assert list(group.open) == [entry.rollout_id for entry in own if entry.outcome is None]
            assert group.trainable == sum(entry.trainable for entry in own)
            assert group.lost == sum(entry.lost for entry in own)
            assert group.replacements == sum(entry.is_replacement for entry in own)


def test_a_rollout_took_the_time_since_the_first_invoke_that_may_have_opened_its_session():
    now = [0.0]
    ledger = planned("a.0")
    ledger.clock = lambda: now[0]
    entry = ledger.entries["a.0"]
    entry.start_attempt("s1", 1, 100.0)
    entry.refuse_attempt()
    ledger.session_never_opened("a.0", "s1")
    for now[0] in (10.0, 40.0):
        entry.start_attempt("s1", 1, 100.0)
        entry.refuse_attempt()
    now[0] = 42.0
    entry.deliver(Outcome.COMPLETED)
    assert entry.took == 32.0


def test_an_agent_runs_from_the_acceptance_of_its_invoke():
    now = [0.0]
    ledger = planned("a.0")
    ledger.clock = lambda: now[0]
    entry = ledger.entries["a.0"]
    entry.start_attempt("s1", 1, 100.0)
    now[0] = 60.0
    entry.accept()
    assert (entry.began, entry.deadline) == (60.0, 160.0)


def test_the_failure_marker_of_a_session_that_a_refused_invoke_opened_counts():
    entry = planned("a.0").entries["a.0"]
    entry.start_attempt("s1", 1, 100.0)
    entry.refuse_attempt()
    assert (entry.attempt, entry.attempts, entry.session_id) == (1, 0, None)
