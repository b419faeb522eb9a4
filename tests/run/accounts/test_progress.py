"""The totals of a running step, and when its agents have made their first call."""

import pytest

from agent_wrapper.contract import Outcome, Rollout
from rollout_backend.model.gateway.stats import GatewayStats
from rollout_backend.run.accounts.cost import Usage
from rollout_backend.run.accounts.findings import FailureCount
from rollout_backend.run.accounts.progress import FirstCall, StepTotals
from rollout_backend.run.accounts.records import StepRecords
from rollouts import make_ledger, make_rollout


class Step:
    """A step whose rollouts a test starts and settles; its clock advances by a second with each."""

    def __init__(self, *ids: str) -> None:
        self.now = 100.0
        self.ledger = make_ledger(0, lambda: self.now)
        for each in ids:
            self.ledger.plan(each, each.rpartition(".")[0])
        self.results: list[Rollout] = []
        self.totals = StepTotals(StepRecords(self.ledger, lambda entry: "", self.results))

    def start(self, rollout_id: str) -> None:
        self.now += 1
        self.ledger.entries[rollout_id].start_attempt(f"session-{rollout_id}", 1, 1000.0)
        self.ledger.entries[rollout_id].accept()

    def finish(self, rollout_id: str, reward: float) -> None:
        self.now += 1
        self.results.append(make_rollout(rollout_id, reward=reward))
        self.ledger.entries[rollout_id].deliver(Outcome.COMPLETED, trainable=True)


def test_results_and_groups_are_added_once():
    step = Step("a.0", "a.1", "b.0", "b.1")
    step.start("a.0")
    step.ledger.entries["a.0"].abandon_attempt()
    for rollout_id, reward in {"a.0": 0.0, "a.1": 1.0, "b.0": 1.0}.items():
        step.start(rollout_id)
        step.finish(rollout_id, reward)
        step.totals.update()
        step.totals.update()
    totals = step.totals
    assert (totals.rewards, totals.reward_sum, totals.turns, totals.spread) == (3, 2.0, 3, {"a": True})
    assert (totals.sampled_tokens, totals.trained_tokens) == (6, 6)
    assert (totals.trainable, totals.wasted) == (Usage(3.0, 0.0, 3), Usage(1.0))
    assert totals.seconds == [1.0, 1.0, 1.0]
    assert totals.p95_s is None
    step.finish("b.1", 1.0)
    totals.update()
    assert totals.spread == {"a": True, "b": False}
    assert [each.rollout_id for each in totals.last()] == ["b.1", "b.0"]
    assert totals.last()[0].seconds is None


def test_failures_are_counted_by_reason_with_the_first_message():
    step = Step("a.0", "a.1", "a.2")
    for i, outcome in enumerate((Outcome.INFRA_ERROR, Outcome.INFRA_ERROR, Outcome.TIMED_OUT)):
        step.ledger.entries[f"a.{i}"].settle(outcome, "reason", f"message {i}")
        step.totals.update()
    assert list(step.totals.failures.values()) == [
        FailureCount(Outcome.INFRA_ERROR, "reason", 2, "a.0", "message 0"),
        FailureCount(Outcome.TIMED_OUT, "reason", 1, "a.2", "message 2"),
    ]


def stats(in_flight: int = 0, calls: int = 0, **errors: int) -> GatewayStats:
    return GatewayStats(calls=calls, calls_in_flight=in_flight, errors=errors)


@pytest.fixture
def first_call() -> FirstCall:
    return FirstCall("http://gateway:8000", "gateway.public_url")


def test_the_warning_comes_after_30_seconds_in_which_agents_ran(first_call):
    for now, running in ((0, 0), (100, 3), (129, 3)):
        first_call.observe(now, running, stats(not_found=9))
        assert first_call.warning == ""
    first_call.observe(130, 3, stats(not_found=9))
    assert first_call.warning == (
        "no model call has arrived for 30 s, and agents run: can they reach http://gateway:8000 (gateway.public_url)?"
    )


def test_time_without_agents_does_not_count(first_call):
    for now, running in ((0, 1), (20, 0), (40, 1), (69, 1)):
        first_call.observe(now, running, stats())
        assert first_call.warning == ""


@pytest.mark.parametrize(
    "later", [stats(calls=1), stats(in_flight=1), stats(invalid_api_key=1)], ids=["answered", "in flight", "refused"]
)
def test_any_call_withdraws_the_warning(first_call, later):
    first_call.observe(0, 1, stats())
    first_call.observe(60, 1, stats())
    assert first_call.warning
    first_call.observe(65, 1, later)
    assert (first_call.arrived, first_call.warning) == (True, "")
