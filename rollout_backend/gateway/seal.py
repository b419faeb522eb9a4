"""Seals: the gateway's word that these segments, of this session and no other, are what was sampled.

What must always hold:

- A rollout that may be trained carries the seal of its own session's trajectory, whole and unaltered: no token, mask,
  logprob, weight version, turn or message may be changed, dropped or added. Its reward is the agent's word alone.
- A session in which model calls were lost on our side is sealed with their number, and such a seal allows no reward.
- A rollout has the same digest in both of the contract's encodings: numbers are compared as numbers, and every NaN is
  the same.

A seal is a JWT (HS256) with a key of its own, made of the run's seal secret. It hides nothing: whoever holds one can
read its claims, but not alter them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable
from typing import Any

import jwt
import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from agent_wrapper.contract import ContractError, Rollout, Segment, Trajectory
from rollout_backend.gateway.tokens import SessionClaims

_ALGORITHM = "HS256"
_OF_THE_ROLLOUT = ("run_id", "step", "rollout_id", "attempt", "session_id", "model")


class _Seal(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    step: int
    rollout_id: str
    attempt: int
    session_id: str
    model: str
    segments: str
    unanswered_calls: int


class Sealer:
    """Makes seals and checks them. Whoever knows the secret can do both."""

    def __init__(self, secret: str) -> None:
        self._key = hmac.digest(secret.encode(), b"the seal of a trajectory", "sha256")

    @property
    def fingerprint(self) -> str:
        """Tells one secret from another, and nothing of either."""
        return hmac.digest(self._key, b"fingerprint", "sha256").hex()[:16]

    def seal(self, trajectory: Trajectory, claims: SessionClaims) -> Trajectory:
        """The trajectory of the session of `claims`, with its seal."""
        seal = _Seal(
            run_id=claims.run_id,
            step=claims.step,
            rollout_id=claims.rollout_id,
            attempt=claims.attempt,
            session_id=claims.session_id,
            model=trajectory.model,
            segments=digest_of(trajectory.segments),
            unanswered_calls=trajectory.unanswered_calls,
        )
        signed = jwt.encode(seal.model_dump(), self._key, algorithm=_ALGORITHM)
        return trajectory.model_copy(update={"seal": signed})

    def check(self, rollout: Rollout) -> None:
        """Passes what is sealed, and what needs no seal: without a reward or a sampled token nothing is trained.

        Raises:
            ContractError: of the field `seal`; says in which way the rollout is not what the gateway handed out.
        """
        if not rollout.trainable:
            return
        if rollout.seal is None:
            raise ContractError(
                "seal",
                "is missing: publish the trajectory's own with its segments. An image made before there were seals "
                "needs the wrapper of this version, or the settings gateway.require_seal=false",
            )
        try:
            seal = _Seal.model_validate(jwt.decode(rollout.seal, self._key, algorithms=[_ALGORITHM]))
        except (jwt.PyJWTError, ValidationError):
            raise ContractError("seal", "is not one that this run's gateway made") from None
        for field in _OF_THE_ROLLOUT:
            sealed, found = getattr(seal, field), getattr(rollout, field)
            if sealed != found:
                raise ContractError("seal", f"is of {field} {sealed!r}, and the rollout of {found!r}")
        if seal.segments != digest_of(rollout.segments):
            raise ContractError("seal", "is of other segments: these are not what was sampled in the session")
        if seal.unanswered_calls:
            raise ContractError(
                "seal", f"tells of {seal.unanswered_calls} model calls lost on our side, so there can be no reward"
            )


def digest_of(segments: Iterable[Segment]) -> str:
    """SHA-256 over each segment's arrays and, as JSON, its other fields; each part with its length before it."""
    state = hashlib.sha256(b"rollout-backend segments 1")
    for segment in segments:
        rest = segment.model_dump(mode="json", exclude={"token_ids", "mask", "logprobs"})
        parts = (
            np.asarray(segment.token_ids, dtype="<i4").tobytes(),
            segment.mask.tobytes(),
            _logprobs(segment),
            json.dumps(_plain(rest), sort_keys=True, separators=(",", ":")).encode(),
        )
        for part in parts:
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
    return state.hexdigest()


def _logprobs(segment: Segment) -> bytes:
    values = np.asarray(segment.logprobs, dtype="<f4") + np.float32(0)  # which makes -0 0
    values[np.isnan(values)] = np.nan
    return values.astype("<f4").tobytes()


def _plain(value: Any) -> Any:
    """With whole numbers as integers: not every language's JSON tells 1.0 from 1."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
