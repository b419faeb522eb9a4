import pytest

from agent_wrapper.contract import Outcome, Rollout, Segment, Turn
from rollout_backend.results.records import ResultSummary, RolloutRecord, StepRecords, records_of
from rollout_backend.results.summary import summarize
from rollouts import make_ledger, make_rollout


def rollout_of(*cached: int | None) -> Rollout:
    """Return a rollout of turns with prompts of 4 tokens and more; the engine reports these as cached."""
    turns = [
        Turn(start=4 * i, end=4 * i + 1, finish_reason="stop", weight_versions=(), cached_tokens=tokens)
        for i, tokens in enumerate(cached, 1)
    ]
    n = turns[-1].end
    sampled = [int(any(turn.start == i for turn in turns)) for i in range(n)]
    segment = Segment(token_ids=[*range(n)], response_mask=sampled, logprobs=[None] * n, turns=tuple(turns))
    return make_rollout(segments=[segment])


@pytest.mark.parametrize(
    ("cached", "hit"), [((None, None), None), ((0, None), None), ((0, 0), 0.0), ((1, 8), 9 / 12)]
)
def test_cached_tokens_are_unknown_unless_the_engine_reports_them_for_each_turn(cached, hit):
    assert ResultSummary.of(rollout_of(*cached)).cache_hit == hit


def test_every_planned_rollout_has_one_record():
    times = iter(range(100, 200))
    ledger = make_ledger(3, lambda: next(times))
    names = ("done", "lost", "refused", "waiting")
    for name in names:  # 100 to 103
        ledger.plan(f"a.{name}", "a", is_replacement=name == "lost")
    ledger.entries["a.done"].start_attempt("s1", 1, 1.0)  # 104
    ledger.entries["a.done"].accept()  # 105
    ledger.entries["a.done"].deliver(Outcome.COMPLETED, trainable=True)  # 106
    ledger.entries["a.lost"].start_attempt("s2", 1, 1.0)  # 107
    ledger.entries["a.lost"].accept()  # 108
    ledger.entries["a.lost"].abandon_attempt()
    ledger.entries["a.lost"].start_attempt("s3", 1, 1.0)  # 109
    ledger.entries["a.lost"].abandon_attempt()
    ledger.entries["a.lost"].settle(Outcome.INFRA_ERROR, "container_error", "424")  # 110
    ledger.entries["a.refused"].start_attempt("s4", 1, 1.0)  # 111
    ledger.entries["a.refused"].refuse_attempt()
    ledger.session_never_opened("a.refused", "s4")
    ledger.entries["a.refused"].settle(Outcome.INFRA_ERROR, "throttled", "429")  # 112
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
        reward=0.0, turns=1, segments=1, sampled_tokens=2, trained_tokens=2, prompt_tokens=3, cached_tokens=None,
        cut_replies=0, model_s=0.0, agent_s=1.0,
    )  # fmt: skip
    assert (done.reward, lost.reward, lost.result) == (0.0, None, None)

    assert (lost.outcome, lost.reason, lost.message) == (Outcome.INFRA_ERROR, "container_error", "424")
    assert (lost.attempts, lost.session_ids, lost.log) == (2, ("s2", "s3"), "log of s3")
    assert (lost.invoked_at, lost.accepted_at, lost.result_at, lost.settled_at) == (109, None, None, 110)
    assert (lost.is_replacement, done.is_replacement) == (True, False)

    assert (refused.attempts, refused.session_ids, refused.log, refused.invoked_at) == (0, (), None, 111)

    assert (waiting.outcome, waiting.log, waiting.invoked_at, waiting.settled_at) == (None, None, None, None)


def test_the_records_of_a_running_step_follow_its_ledger():
    ledger, received = make_ledger(0, lambda: 1.0), [make_rollout("a.0", reward=0.5)]
    for i in range(3):
        ledger.plan(f"a.{i}", "a")
    running = StepRecords(ledger, lambda entry: "log", received)

    def read() -> dict[str, RolloutRecord]:
        lines = running.lines(lambda entry: entry.deadline or 900.0)
        return {each.rollout_id: each for each in map(RolloutRecord.model_validate_json, lines)}

    assert {each.deadline for each in read().values()} == {900.0}
    ledger.entries["a.1"].start_attempt("s1", 1, 70.0)
    ledger.entries["a.0"].deliver(Outcome.COMPLETED, trainable=True)
    found = read()
    assert (found["a.0"].reward, found["a.0"].deadline, found["a.1"].deadline) == (0.5, None, 70.0)
    received.append(make_rollout("a.1"))
    ledger.entries["a.1"].deliver(Outcome.COMPLETED, trainable=True)
    ledger.entries["a.2"].settle(Outcome.CANCELLED, "target_reached")
    found = read()
    final = records_of(ledger, lambda entry: "log", received)
    assert [found[each.rollout_id] for each in final] == [*final]


def test_the_hit_rate_of_a_step_is_over_the_rollouts_whose_engine_reports_it():
    def hit(*rollouts: Rollout) -> float | None:
        ledger = make_ledger(0, lambda: 0.0)
        for i in range(len(rollouts)):
            ledger.plan(f"a.{i}", "a")
        named = [rollout.model_copy(update={"rollout_id": f"a.{i}"}) for i, rollout in enumerate(rollouts)]
        return summarize(records_of(ledger, lambda entry: "", named)).cache_hit

    assert hit(rollout_of(3), rollout_of(None, None)) == 3 / 4
    assert hit(rollout_of(None)) is None
