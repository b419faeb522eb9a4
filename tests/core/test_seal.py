"""What was sampled, sealed: nothing of it can be altered, and no other session's can stand in its place."""

import os
import stat
from array import array
from math import nan

import jwt
import pytest

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
from rollout_backend.config import RolloutConfig
from rollout_backend.core.seal import Sealer, digest_of
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.errors import ConfigError
from rollout_backend.local.scripted import BYTE_MODEL, Fail, ScriptedEngine
from rollout_backend.serving.run_secret import SECRET_FILE, run_secret

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


@pytest.mark.parametrize("form", [Rollout.encode, Rollout.to_json])
def test_what_was_sampled_passes_in_either_form(form):
    SEALER.check(Rollout.decode(form(rollout())))


def test_a_seal_passes_through_the_compact_trajectory():
    trajectory = SEALER.seal(Trajectory(model="m", segments=(segment(), segment())), CLAIMS)
    back = Trajectory.decode(trajectory.encode())
    SEALER.check(rollout(segments=back.segments, seal=back.seal))


def test_every_nan_is_one_and_whole_numbers_are_numbers():
    payload = array("f", [nan] * 2 + [-0.25, 0.0])
    payload[1] = -payload[1]  # another NaN, bit by bit
    other = segment(
        logprobs=payload, messages=[*segment().messages[:1], {"role": "assistant", "content": "ho", "n": 1}]
    )
    assert digest_of([other]) == digest_of([segment()])


TURN = segment().turns[0]
ALTERED = {
    "a token": segment(token_ids=[5, 6, 7, 9]),
    "a given token": segment(token_ids=[4, 6, 7, 8]),
    "a logprob": segment(logprobs=[None, None, -0.25, -0.1]),
    "a logprob left out": segment(logprobs=[None, None, None, -0.0]),
    "the mask": segment(
        response_mask=[0, 0, 0, 1], turns=[TURN.model_copy(update={"start": 3, "weight_versions": ()})]
    ),
    "a weight version": segment(
        turns=[TURN.model_copy(update={"weight_versions": (VersionSpan(version="8", start=2, end=4),)})]
    ),
    "a finish reason": segment(turns=[TURN.model_copy(update={"finish_reason": "length"})]),
    "how it began": segment(split_reason="branched"),
    "a message": segment(messages=[{"role": "user", "content": "ha"}]),
}


@pytest.mark.parametrize("altered", ALTERED.values(), ids=ALTERED)
def test_nothing_of_it_can_be_altered(altered):
    assert "not what was sampled" in refusal(segments=[altered])


@pytest.mark.parametrize("count", [0, 2])
def test_no_segment_can_be_dropped_or_doubled(count):
    two = Trajectory(model="m", segments=(segment(), segment(token_ids=[1, 2, 3, 4])))
    segments = [two.segments[1]] if not count else [*two.segments, two.segments[1]]
    assert "not what was sampled" in refusal(segments=segments, seal=sealed(two))


@pytest.mark.parametrize(
    ("field", "other"),
    [("run_id", "run-2"), ("step", 4), ("rollout_id", "task.1"), ("attempt", 3), ("session_id", "session-b")],
)
def test_the_trajectory_of_another_session_is_no_good(field, other):
    theirs = CLAIMS.model_copy(update={field: other})
    assert refusal(seal=sealed(claims=theirs)).startswith(f"is of {field} {other!r}, and the rollout of ")


def test_another_models_trajectory_is_no_good():
    assert "is of model 'm'" in refusal(model="another")


def test_a_seal_of_another_secret_or_of_none_is_no_good():
    assert "not one that this run's gateway made" in refusal(seal=sealed(sealer=Sealer("x" * 48)))
    claims = jwt.decode(sealed(), options={"verify_signature": False})
    assert "not one that this" in refusal(seal=jwt.encode(claims, None, algorithm="none"))
    assert "not one that this" in refusal(seal=jwt.encode(claims, SECRET, algorithm="HS256"))  # the key is derived
    assert "not one that this" in refusal(seal="no.seal.atall")
    assert "gateway.require_seal" in refusal(seal=None)


def test_a_session_key_is_no_seal():
    from rollout_backend.core.session_key import issue

    assert "not one that this" in refusal(seal=issue(SECRET, CLAIMS))


def test_model_calls_lost_on_our_side_cannot_be_kept_quiet():
    lost = Trajectory(model="m", segments=(segment(),), unanswered_calls=2)
    assert "counts 2 model calls" in refusal(seal=sealed(lost))


def test_an_error_that_the_agent_scored_needs_a_seal_too():
    failure = Failure(reason="agent_failure", message="gave up")
    assert "is missing" in refusal(outcome=Outcome.AGENT_ERROR, failure=failure, reward=-1.0, seal=None)


def test_what_cannot_be_trained_needs_none():
    failure = Failure(reason="agent_deadline", message="late")
    SEALER.check(rollout(outcome=Outcome.TIMED_OUT, failure=failure, reward=None, seal=None))
    SEALER.check(rollout(segments=(), conversations=[{"messages": [{"role": "assistant"}]}], seal=None))


# --- the gateway ------------------------------------------------------------------------------------------


def test_the_gateway_seals_for_the_session_of_the_key(serve):
    with ScriptedEngine(["seven"]) as engine:
        served = serve(engine.url, seal_secret=SECRET)
        served.client().chat.completions.create(model="scripted", messages=[{"role": "user", "content": "3 + 4?"}])
        found = served.trajectory()
    mine = {"run_id": "run", "step": 0, "rollout_id": "r", "attempt": 1, "session_id": "s1"}
    SEALER.check(rollout(**mine, model=found.model, segments=found.segments, seal=found.seal))
    assert "is of session_id" in refusal(
        **{**mine, "session_id": "s2"}, model=found.model, segments=found.segments, seal=found.seal
    )


def test_the_gateway_counts_lost_calls_into_the_seal(serve):
    with ScriptedEngine(["seven", *[Fail(500)] * 4]) as engine:
        served = serve(engine.url, seal_secret=SECRET)
        client = served.client()
        client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "3 + 4?"}])
        with pytest.raises(Exception, match="engine"):
            client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "And 4 + 5?"}])
        found = served.trajectory()
    assert found.unanswered_calls == 1
    honest = found.model_copy(update={"unanswered_calls": 0})  # as a container would like to have it
    mine = {"run_id": "run", "step": 0, "rollout_id": "r", "attempt": 1, "session_id": "s1"}
    assert "counts 1 model calls" in refusal(**mine, model=honest.model, segments=honest.segments, seal=honest.seal)


# --- the secret -------------------------------------------------------------------------------------------


def settings(tmp_path, **gateway) -> RolloutConfig:
    return RolloutConfig.parse(
        {
            "run_id": "run",
            "model": {"path": BYTE_MODEL},
            "storage": {"bucket": "bucket"},
            "runtime": {"kind": "http", "url": "http://agents"},
            "gateway": gateway,
            "output_dir": tmp_path,
        }
    )


def test_a_runs_secret_is_made_once_and_for_nobody_else_to_read(tmp_path):
    first = run_secret(settings(tmp_path))
    assert len(first) >= 48
    assert run_secret(settings(tmp_path)) == first
    assert stat.S_IMODE((tmp_path / "run" / SECRET_FILE).stat().st_mode) == 0o600
    assert os.listdir(tmp_path / "run") == [SECRET_FILE]
    assert run_secret(settings(tmp_path / "another machine")) != first


def test_the_settings_secret_counts_and_is_never_shown(tmp_path):
    config = settings(tmp_path, secret=SECRET)
    assert run_secret(config) == SECRET
    assert not (tmp_path / "run").exists()
    assert SECRET not in repr(config) + config.model_dump_json()
    with pytest.raises(ConfigError, match=r"gateway\.secret"):
        settings(tmp_path, secret="short")


@pytest.mark.parametrize(
    ("text", "mode", "words"), [(SECRET, 0o644, "others may read"), ("short", 0o600, "holds no secret of at least")]
)
def test_a_secret_that_is_none_is_refused(tmp_path, text, mode, words):
    path = tmp_path / "run" / SECRET_FILE
    path.parent.mkdir()
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=words):
        run_secret(settings(tmp_path))


def test_a_fingerprint_tells_secrets_apart():
    assert Sealer(SECRET).fingerprint == SEALER.fingerprint != Sealer("x" * 48).fingerprint


def test_a_seal_without_images_is_what_it_was_before_there_were_any():
    seen = segment(logprobs=[None, None, -0.25, -0.5], messages=[{"role": "user", "content": "h"}])
    turn = Turn(start=2, end=4, finish_reason="stop", weight_versions=(VersionSpan(version="7", start=2, end=4),))
    found = digest_of([seen.model_copy(update={"turns": (turn,)})])
    assert found == "412c1f285d8a25ebf85efe65746565234a475ef907f592b6944985941486df5e"
