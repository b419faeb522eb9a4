import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_wrapper.contract import Outcome
from rollout_backend.errors import LedgerError
from rollout_backend.ledger import Arrival, Ledger, Phase, PlannedRollout

IDS = ["a.0", "a.1", "b.0"]


def planned(*ids: str) -> Ledger:
    ledger = Ledger(step=3)
    ledger.plan(PlannedRollout(rid, rid[0]) for rid in ids)
    return ledger


def test_a_rollout_goes_from_plan_to_settlement():
    ledger = planned("a.0")
    assert ledger.phases()[Phase.PLANNED] == 1
    assert ledger.attempt("a.0", "s1", deadline=10.0) == 1
    ledger.accept("a.0")
    assert ledger.phases()[Phase.RUNNING] == 1
    assert ledger.arrive("a.0", Outcome.COMPLETED, trainable=True) is Arrival.FIRST
    ledger.session_closed("s1")
    ledger.reconcile()
    assert ledger.counts()[Outcome.COMPLETED] == 1


def test_each_attempt_has_a_session_that_must_be_closed():
    ledger = planned("a.0")
    ledger.attempt("a.0", "s1", deadline=1.0)
    assert ledger.attempt("a.0", "s2", deadline=2.0) == 2
    ledger.arrive("a.0", Outcome.COMPLETED)
    ledger.session_closed("s2")
    with pytest.raises(LedgerError, match="1 sessions open: s1"):
        ledger.reconcile()


def test_a_result_that_overtakes_the_invokes_answer_stands():
    ledger = planned("a.0")
    ledger.attempt("a.0", "s1", deadline=1.0)
    ledger.arrive("a.0", Outcome.COMPLETED)
    ledger.accept("a.0")
    assert ledger.entries["a.0"].phase is Phase.SETTLED


def test_the_first_settlement_stands_and_the_rest_is_counted_apart():
    ledger = planned(*IDS)
    ledger.arrive("a.0", Outcome.COMPLETED, trainable=True)
    assert ledger.arrive("a.0", Outcome.AGENT_ERROR) is Arrival.DUPLICATE
    assert ledger.settle("a.1", Outcome.TIMED_OUT, "no_result")
    assert ledger.arrive("a.1", Outcome.COMPLETED, trainable=True) is Arrival.LATE
    assert not ledger.settle("a.0", Outcome.CANCELLED, "x")
    assert ledger.arrive("zzz", Outcome.COMPLETED) is Arrival.UNKNOWN
    assert (ledger.duplicates, ledger.late, ledger.unknown) == (1, 1, 1)
    assert ledger.entries["a.0"].outcome is Outcome.COMPLETED
    assert ledger.entries["a.1"].outcome is Outcome.TIMED_OUT
    assert not ledger.entries["a.1"].trainable


def test_an_open_rollout_does_not_reconcile_and_every_line_is_printed():
    ledger = planned(*IDS)
    ledger.arrive("a.0", Outcome.COMPLETED)
    with pytest.raises(LedgerError) as caught:
        ledger.reconcile()
    assert "planned 3, settled 1" in str(caught.value)
    assert all(rid in str(caught.value) for rid in IDS)


def test_a_session_that_would_not_close_is_named_and_not_open():
    ledger = planned("a.0")
    ledger.attempt("a.0", "s1", deadline=1.0)
    ledger.settle("a.0", Outcome.INFRA_ERROR, "x")
    ledger.session_unclosed("s1", "503")
    ledger.reconcile()
    assert ledger.unclosed_sessions == {"s1": "503"}


def test_nothing_is_planned_twice():
    with pytest.raises(LedgerError, match=r"'a\.0' is planned twice"):
        planned("a.0", "a.0")


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["attempt", "accept", "arrive", "settle"]),
        st.sampled_from(IDS),
        st.sampled_from(list(Outcome)),
    ),
    max_size=40,
)


@given(EVENTS)
def test_whatever_happens_each_rollout_ends_in_one_class(events):
    ledger = planned(*IDS)
    first: dict[str, Outcome] = {}
    repeats = 0
    for i, (event, rid, outcome) in enumerate(events):
        match event:
            case "attempt":
                if ledger.wants(rid):
                    ledger.attempt(rid, f"s{i}", deadline=float(i))
            case "accept":
                ledger.accept(rid)
            case "arrive":
                ledger.arrive(rid, outcome)
                repeats += rid in first
                first.setdefault(rid, outcome)
            case "settle":
                ledger.settle(rid, outcome, "x")
                first.setdefault(rid, outcome)
    assert {rid: entry.outcome for rid, entry in ledger.entries.items() if entry.outcome} == first
    assert ledger.duplicates + ledger.late == repeats
    assert sum(ledger.counts().values()) + len(list(ledger.open_entries())) == len(IDS)
