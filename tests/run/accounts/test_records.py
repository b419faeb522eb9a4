import pytest

from agent_wrapper.contract import Outcome, Rollout, Segment, Trajectory, Turn
from rollout_backend.core.seal import Sealer
from rollout_backend.run.accounts.records import ResultSummary, RolloutRecord, StepRecords
from rollout_backend.run.accounts.summary import summarize
from rollouts import make_claims, make_ledger, make_rollout
from run_folders import make_record


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


@pytest.mark.parametrize(("seal", "seconds"), [(None, None), ("made up", None), (4.5, 4.5)])
def test_the_seconds_until_the_first_call_are_those_of_the_seal(seal, seconds):
    if seal == 4.5:
        trajectory = Trajectory(model="m", segments=rollout_of(1).segments)
        seal = Sealer("s" * 32).seal(trajectory, make_claims("s", expires_at=1.0), first_call_s=seal).seal
    assert ResultSummary.of(rollout_of(1).model_copy(update={"seal": seal})).first_call_s == seconds


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
    done, lost, refused, waiting = StepRecords(
        ledger, lambda entry: f"log of {entry.last_session_id}", [make_rollout("a.done", reward=0.0)]
    ).all()

    result = ResultSummary(
        reward=0.0, turns=1, segments=1, sampled_tokens=2, trained_tokens=2, prompt_tokens=3, cached_tokens=None,
        cut_replies=0, model_s=0.0, agent_s=1.0,
    )  # fmt: skip
    planned = {"step": 3, "task_id": "a", "group_usable": True}
    assert done == make_record(
        "a.done", **planned, trainable=True, session_ids=("s1",), log="log of s1", planned_at=100.0, result=result,
        first_invoked_at=104.0, invoked_at=104.0, accepted_at=105.0, result_at=106.0, settled_at=106.0,
    )  # fmt: skip
    assert lost == make_record(
        "a.lost", **planned, outcome=Outcome.INFRA_ERROR, reason="container_error", message="424", attempts=2,
        is_replacement=True, session_ids=("s2", "s3"), log="log of s3", planned_at=101.0, first_invoked_at=107.0,
        invoked_at=109.0, accepted_at=None, result_at=None, settled_at=110.0,
    )  # fmt: skip
    assert (refused.attempts, refused.session_ids, refused.log) == (0, (), None)
    assert (refused.first_invoked_at, refused.invoked_at) == (None, 111)
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
    final = running.all()
    assert [found[each.rollout_id] for each in final] == [*final]


def test_the_hit_rate_of_a_step_is_over_the_rollouts_whose_engine_reports_it():
    def hit(*rollouts: Rollout) -> float | None:
        ledger = make_ledger(0, lambda: 0.0)
        for i in range(len(rollouts)):
            ledger.plan(f"a.{i}", "a")
        named = [rollout.model_copy(update={"rollout_id": f"a.{i}"}) for i, rollout in enumerate(rollouts)]
        return summarize(StepRecords(ledger, lambda entry: "", named).all()).cache_hit

    assert hit(rollout_of(3), rollout_of(None, None)) == 3 / 4
    assert hit(rollout_of(None)) is None
