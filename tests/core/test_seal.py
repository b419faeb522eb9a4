"""The seal of a trajectory: an altered one, or one of another session, is refused."""

from array import array
from dataclasses import replace
from math import nan

import pytest
from pydantic.dataclasses import dataclass

from agent_wrapper.contract import (
    ContractError,
    Failure,
    Outcome,
    Rollout,
    Sampling,
    Segment,
    Trajectory,
    Turn,
    VersionSpan,
)
from rollout_backend.core.seal import SealClaims, Sealer, digest_of
from rollout_backend.core.session_key import SessionClaims, issue, read_claims, sign_claims

SECRET = "a-seal-secret-" * 4
SEALER = Sealer(SECRET)
IDS = {"run_id": "run", "step": 3, "rollout_id": "task.0", "attempt": 2, "session_id": "session-a"}
CLAIMS = SessionClaims(**IDS, sampling=Sampling(), expires_at=1e12)


def segment(**more) -> Segment:
    fields = {
        "token_ids": [5, 6, 7, 8],
        "response_mask": [0, 0, 1, 1],
        "logprobs": [None, None, -0.25, -0.0],
        "turns": [
            Turn(
                start=2,
                end=4,
                finish_reason="stop",
                weight_versions=[VersionSpan(version="7", start=2, end=4)],
                cached_tokens=1,
                seconds=2.0,
            )
        ],
        "messages": [{"role": "user", "content": "h\u00e9"}, {"role": "assistant", "content": "ho", "n": 1.0}],
    }
    return Segment.model_validate({**fields, **more})


def sealed(trajectory: Trajectory | None = None, claims: SessionClaims = CLAIMS, sealer: Sealer = SEALER) -> str:
    seal = sealer.seal(trajectory or Trajectory(model="m", segments=(segment(),)), claims).seal
    assert seal is not None
    return seal


def rollout(**more) -> Rollout:
    fields = {
        **IDS,
        "task_id": "task",
        "outcome": Outcome.COMPLETED,
        "reward": 1.0,
        "model": "m",
        "segments": (segment(),),
        "seal": sealed(),
    }
    return Rollout.model_validate({**fields, **more})


def refusal(**more) -> str:
    with pytest.raises(ContractError) as caught:
        SEALER.check(rollout(**more))
    assert caught.value.field == "seal"
    return caught.value.reason


def test_a_sealed_rollout_is_accepted_in_each_format():
    SEALER.check(Rollout.decode(rollout().encode()))
    SEALER.check(Rollout.decode(rollout().to_json()))
    trajectory = SEALER.seal(Trajectory(model="m", segments=(segment(), segment())), CLAIMS)
    back = Trajectory.decode(trajectory.encode())
    SEALER.check(rollout(segments=back.segments, seal=back.seal))


def test_equal_values_have_equal_digests():
    payload = array("f", [nan] * 2 + [-0.25, 0.0])
    payload[1] = -payload[1]  # another NaN, bit by bit
    other = segment(
        logprobs=payload, messages=[*segment().messages[:1], {"role": "assistant", "content": "ho", "n": 1}]
    )
    assert digest_of([other]) == digest_of([segment()])

    call = {"args": {"a": 1, "b": [2, 1e300]}, "name": "x"}
    again = {"name": "x", "args": {"b": [2.0, 1e300], "a": 1.0}}
    assert digest_of([segment(messages=[call])]) == digest_of([segment(messages=[again])])


@pytest.mark.parametrize("other", [{"n": "1"}, {"n": 1.5}, {"n": True}, {"n": [1]}, {"m": 1}, {"n": 1, "m": None}])
def test_other_values_have_other_digests(other):
    assert digest_of([segment(messages=[other])]) != digest_of([segment(messages=[{"n": 1}])])


TURN = segment().turns[0]
ALTERED = {
    "a token": segment(token_ids=[5, 6, 7, 9]),
    "a given token": segment(token_ids=[4, 6, 7, 8]),
    "a logprob": segment(logprobs=[None, None, -0.25, -0.1]),
    "a logprob left out": segment(logprobs=[None, None, None, -0.0]),
    "the mask": segment(response_mask=[0, 0, 0, 1], turns=[replace(TURN, start=3, weight_versions=())]),
    "a weight version": segment(turns=[replace(TURN, weight_versions=(VersionSpan(version="8", start=2, end=4),))]),
    "a turn's seconds": segment(turns=[replace(TURN, seconds=1.0)]),
    "a turn's cached tokens": segment(turns=[replace(TURN, cached_tokens=None)]),
    "a finish reason": segment(turns=[replace(TURN, finish_reason="length")]),
    "how it began": segment(split_reason="branched"),
    "a message": segment(messages=[{"role": "user", "content": "ha"}]),
}


@pytest.mark.parametrize("altered", ALTERED.values(), ids=ALTERED)
def test_an_altered_segment_is_refused(altered):
    assert "not what was sampled" in refusal(segments=[altered])


@pytest.mark.parametrize("count", [0, 2])
def test_a_dropped_or_duplicated_segment_is_refused(count):
    two = Trajectory(model="m", segments=(segment(), segment(token_ids=[1, 2, 3, 4])))
    segments = [two.segments[1]] if not count else [*two.segments, two.segments[1]]
    assert "not what was sampled" in refusal(segments=segments, seal=sealed(two))


@pytest.mark.parametrize(
    ("field", "other"),
    [("run_id", "run-2"), ("step", 4), ("rollout_id", "task.1"), ("attempt", 3), ("session_id", "session-b")],
)
def test_the_trajectory_of_another_session_is_refused(field, other):
    theirs = CLAIMS.model_copy(update={field: other})
    assert refusal(seal=sealed(claims=theirs)).startswith(f"is of {field} {other!r}, and the rollout of ")
    assert "is of model 'm'" in refusal(model="another")


def test_a_seal_with_another_secret_or_none_is_refused():
    assert "not one that this run's gateway made" in refusal(seal=sealed(sealer=Sealer("x" * 48)))
    claims = read_claims(sealed(), SealClaims)
    assert "not one that this" in refusal(seal=sign_claims(SECRET.encode(), claims))  # the key is derived
    assert "not one that this" in refusal(seal=sealed().partition(".")[0])
    assert "not one that this" in refusal(seal="no.seal.atall")
    assert "not one that this" in refusal(seal=issue(SECRET, CLAIMS)), "a session's key is no seal"
    assert "gateway.require_seal" in refusal(seal=None)


def test_the_number_of_lost_calls_cannot_be_hidden():
    lost = Trajectory(model="m", segments=(segment(),), unanswered_calls=2)
    assert "counts 2 model calls" in refusal(seal=sealed(lost))


@pytest.mark.parametrize(("reason", "reward"), [("agent_failure", -1.0), ("no_reward", None)])
def test_an_agent_error_that_is_or_can_be_scored_needs_a_seal(reason, reward):
    failure = Failure(reason=reason, message="gave up")
    assert "is missing" in refusal(outcome=Outcome.AGENT_ERROR, failure=failure, reward=reward, seal=None)


def test_a_rollout_that_is_not_trained_needs_no_seal():
    failure = Failure(reason="agent_deadline", message="late")
    SEALER.check(rollout(outcome=Outcome.TIMED_OUT, failure=failure, reward=None, seal=None))


def test_different_secrets_have_different_fingerprints():
    assert Sealer(SECRET).fingerprints == SEALER.fingerprints != Sealer("x" * 48).fingerprints


def test_a_field_that_is_added_to_the_contract_leaves_seals_valid():
    @dataclass(frozen=True, kw_only=True)
    class LaterTurn(Turn):
        queued_s: float = 1.0

    class LaterSegment(Segment):
        turns: tuple[LaterTurn, ...] = ()
        note: str = "new"

    fields = segment().model_dump()
    later = LaterSegment.model_validate(fields)
    assert later.model_dump()["turns"][0]["queued_s"] == 1.0
    assert digest_of([later]) == digest_of([segment()])


def test_the_digest_without_images_is_unchanged():
    seen = segment(logprobs=[None, None, -0.25, -0.5], messages=[{"role": "user", "content": "h"}])
    spans = (VersionSpan(version="7", start=2, end=4),)
    turn = Turn(start=2, end=4, finish_reason="stop", weight_versions=spans, cached_tokens=0)
    found = digest_of([seen.model_copy(update={"turns": (turn,)})])
    assert found == "f13b7ed7d204e0d856f1496e44b9c2b0d49cb63b0dda7f053093268a3ee6a895"
