from agent_wrapper.contract import Outcome
from rollout_backend.core.ledger import Ledger, PlannedRollout
from rollout_backend.core.records import ResultSummary, records_of
from rollouts import make_rollout


def test_every_planned_rollout_has_one_record():
    times = iter(range(100, 200))
    ledger = Ledger(3, lambda: next(times))
    names = ("done", "lost", "refused", "waiting")
    ledger.plan(PlannedRollout(f"a.{name}", "a", is_replacement=name == "lost") for name in names)  # 100 to 103
    ledger.start_attempt("a.done", "s1", deadline=1.0)  # 104
    ledger.accept("a.done")  # 105
    ledger.record_result("a.done", Outcome.COMPLETED, trainable=True)  # 106
    ledger.start_attempt("a.lost", "s2", deadline=1.0)  # 107
    ledger.accept("a.lost")  # 108
    ledger.abandon_attempt("a.lost")
    ledger.start_attempt("a.lost", "s3", deadline=1.0)  # 109
    ledger.abandon_attempt("a.lost")
    ledger.settle("a.lost", Outcome.INFRA_ERROR, "container_error", "424")  # 110
    ledger.start_attempt("a.refused", "s4", deadline=1.0)  # 111
    ledger.undo_attempt("a.refused")
    ledger.session_never_opened("a.refused", "s4")
    ledger.settle("a.refused", Outcome.INFRA_ERROR, "throttled", "429")  # 112
    done, lost, refused, waiting = records_of(
        ledger, lambda entry: f"log of {entry.last_session_id}", [make_rollout("a.done", reward=0.0)]
    )

    assert (done.step, done.rollout_id, done.task_id, done.trainable, done.group_usable) == (
        3, "a.done", "a", True, True,
    )  # fmt: skip
    assert (done.outcome, done.reason, done.attempts, done.session_ids) == (Outcome.COMPLETED, "", 1, ("s1",))
    assert (done.planned_at, done.invoked_at, done.accepted_at, done.result_at, done.settled_at) == (
        100, 104, 105, 106, 106,
    )  # fmt: skip

    assert done.result == ResultSummary(
        reward=0.0, turns=1, segments=1, sampled_tokens=2, prompt_tokens=3, cached_tokens=0, cut_replies=0,
        model_s=0.0, agent_s=1.0,
    )  # fmt: skip
    assert (done.reward, lost.reward, lost.result) == (0.0, None, None)

    assert (lost.outcome, lost.reason, lost.message) == (Outcome.INFRA_ERROR, "container_error", "424")
    assert (lost.attempts, lost.session_ids, lost.log) == (2, ("s2", "s3"), "log of s3")
    assert (lost.invoked_at, lost.accepted_at, lost.result_at, lost.settled_at) == (109, None, None, 110)
    assert (lost.is_replacement, done.is_replacement) == (True, False)

    assert (refused.attempts, refused.session_ids, refused.log, refused.invoked_at) == (0, (), None, 111)

    assert (waiting.outcome, waiting.log, waiting.invoked_at, waiting.settled_at) == (None, None, None, None)
