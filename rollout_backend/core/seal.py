"""Sign and verify trajectories. A seal is the gateway's signature over everything that a session sampled.

Invariants:

- A trainable rollout carries the seal of its session's complete and unaltered trajectory: no token, mask, logprob,
  weight version, turn or message may be changed, dropped or added. Only the reward comes from the agent.
- A seal records how many model calls of the session were lost on the training side. If any were, no reward is
  allowed.
- A rollout has the same digest in both of the contract's encodings: numbers are compared by value, and all NaNs are
  equal.

A seal's key is derived from the run's seal secret. Its claims are readable but cannot be altered.
"""

import hashlib
import hmac
from collections.abc import Callable, Iterable
from typing import Any

import msgpack
import numpy as np
from pydantic import BaseModel

from agent_wrapper.contract import ContractError, Rollout, Segment, Trajectory
from rollout_backend.core.session_key import ClaimsRefused, SessionClaims, read_claims, sign_claims, verify_claims

# The range of msgpack's integers.
_LEAST, _END = -(2**63), 2**64
_OF_THE_ROLLOUT = ("run_id", "step", "rollout_id", "attempt", "session_id", "model")


class SealClaims(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Claims of a seal: the session of the trajectory, a digest of its segments, and the number of lost calls."""

    run_id: str
    step: int
    rollout_id: str
    attempt: int
    session_id: str
    model: str
    segments: str
    unanswered_calls: int
    first_call_s: float | None = None
    """Seconds from the session's invoke to its first model call; None without a call."""


class Sealer:
    """Creates and verifies seals. Both need the secret. Seals of the `previous` secret are also valid."""

    def __init__(self, secret: str, previous: str | None = None) -> None:
        given = (each for each in (secret, previous) if each is not None)
        self._keys = [hmac.digest(each.encode(), b"the seal of a trajectory", "sha256") for each in given]

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Return an identifier of each secret and of the seals' format. It does not reveal the secret. The first one
        belongs to the secret that new seals use."""
        return tuple(hmac.digest(key, b"fingerprint of format 3", "sha256").hex()[:16] for key in self._keys)

    def seal(self, trajectory: Trajectory, claims: SessionClaims, first_call_s: float | None = None) -> Trajectory:
        """Return the trajectory with a seal for the session that `claims` names."""
        seal = SealClaims(
            run_id=claims.run_id,
            step=claims.step,
            rollout_id=claims.rollout_id,
            attempt=claims.attempt,
            session_id=claims.session_id,
            model=trajectory.model,
            segments=digest_of(trajectory.segments),
            unanswered_calls=trajectory.unanswered_calls,
            first_call_s=first_call_s,
        )
        return trajectory.model_copy(update={"seal": sign_claims(self._keys[0], seal)})

    def check(self, rollout: Rollout) -> None:
        """Verify the seal of a rollout that is trainable, or will be with a scorer's reward. Others need none.

        Raises:
            ContractError: for the field `seal`; says how the rollout differs from the gateway's trajectory.
        """
        _check(rollout, lambda seal: verify_claims(self._keys, seal, SealClaims))


def check_without_secret(rollout: Rollout) -> None:
    """Check a rollout against its seal without verifying the signature. Detects damage, but not forgery.

    Raises:
        ContractError: as for `Sealer.check`.
    """
    _check(rollout, lambda seal: read_claims(seal, SealClaims))


def read_seal(rollout: Rollout) -> SealClaims | None:
    """Return the claims of a rollout's seal, without verifying them; None if it has no readable seal."""
    try:
        return read_claims(rollout.seal or "", SealClaims)
    except ClaimsRefused:
        return None


def _check(rollout: Rollout, read: Callable[[str], SealClaims]) -> None:
    if not rollout.can_be_scored or not rollout.sampled_tokens:
        return
    if rollout.seal is None:
        raise ContractError(
            "seal",
            "is missing: publish the trajectory's own with its segments, or set gateway.require_seal=false",
        )
    try:
        seal = read(rollout.seal)
    except ClaimsRefused:
        raise ContractError("seal", "is not one that this run's gateway made") from None
    for field in _OF_THE_ROLLOUT:
        sealed, found = getattr(seal, field), getattr(rollout, field)
        if sealed != found:
            raise ContractError("seal", f"is of {field} {sealed!r}, and the rollout of {found!r}")
    if seal.segments != digest_of(rollout.segments):
        raise ContractError("seal", "is of other segments: these are not what was sampled in the session")
    if seal.unanswered_calls:
        raise ContractError(
            "seal",
            f"counts {seal.unanswered_calls} model calls lost on the training side, so no reward is allowed",
        )


def digest_of(segments: Iterable[Segment]) -> str:
    """Return the SHA-256 of what was sampled: each segment's arrays, and its `_others`, each preceded by its length.

    Only fields named here and in `_others` are sealed, so a new field of the contract leaves stored seals valid.
    """
    state = hashlib.sha256(b"rollout-backend segments 3")
    packer = msgpack.Packer()
    # By object id, because segments may share thousands of messages.
    packed: dict[int, bytes] = {}
    for segment in segments:
        for message in segment.messages:
            if id(message) not in packed:
                packed[id(message)] = packer.pack(_plain(message))
        parts = [
            np.asarray(segment.token_ids, dtype="<i4").tobytes(),
            segment.response_mask.tobytes(),
            _logprobs(segment),
            packer.pack(_plain(_others(segment))),
            packer.pack_array_header(len(segment.messages))
            + b"".join(packed[id(message)] for message in segment.messages),
        ]
        # `_others` includes the shape of the experts.
        if segment.routed_experts is not None:
            parts.append(segment.routed_experts.ids)
        for part in parts:
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
    return state.hexdigest()


def _others(segment: Segment) -> list[Any]:
    experts = segment.routed_experts
    return [
        segment.split_reason,
        [
            (
                (turn.start, turn.end, turn.finish_reason, turn.cached_tokens, turn.seconds),
                [(span.version, span.start, span.end) for span in turn.weight_versions],
            )
            for turn in segment.turns
        ],
        [(image.start, image.end, image.sha256, image.media_type) for image in segment.images],
        None if experts is None else (experts.layers, experts.topk, experts.id_bytes),
    ]


def _logprobs(segment: Segment) -> bytes:
    # The addition converts -0 to 0.
    values = np.asarray(segment.logprobs, dtype="<f4") + np.float32(0)
    values[np.isnan(values)] = np.nan
    return values.astype("<f4").tobytes()


def _plain(value: Any) -> Any:
    """Sort keys, and convert whole floats to integers: some JSON libraries do not distinguish 1.0 from 1."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return {key: _plain(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    whole = isinstance(value, float) and value.is_integer() and _LEAST <= value < _END
    return int(value) if whole else value
