"""The totals of a running step follow its ledger and its results."""

from agent_wrapper.contract import Outcome, Rollout
from rollout_backend.core.ledger import PlannedRollout
from rollout_backend.results.findings import FailureCount
from rollout_backend.results.progress import StepTotals
from rollouts import make_ledger, make_rollout


class Step:
    """A step whose rollouts a test starts and settles; its clock advances by a second with each."""

    def __init__(self, *ids: str) -> None:
        self.now = 100.0
        self.ledger = make_ledger(0, lambda: self.now)
        self.ledger.plan([PlannedRollout(each, each.rpartition(".")[0]) for each in ids])
        self.results: list[Rollout] = []
        self.totals = StepTotals(self.ledger, self.results)

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
    for rollout_id, reward in {"a.0": 0.0, "a.1": 1.0, "b.0": 1.0}.items():
        step.start(rollout_id)
        step.finish(rollout_id, reward)
        step.totals.update()
        step.totals.update()
    totals = step.totals
    assert (totals.rewards, totals.reward_sum, totals.turns, totals.spread) == (3, 2.0, 3, {"a": True})
    assert (totals.sampled_tokens, totals.trained_tokens) == (6, 6)
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
