"""Make valid, sealed results fast: for load tests of what collects them.

All results share their tokens, which are encoded and compressed once. Only the fields that identify a rollout differ.
They come first in the object, in an uncompressed block of the same zstd frame, so a result of 1 MB takes 50 us to
make, and is decoded as one that a wrapper has written.
"""

from __future__ import annotations

import random
from array import array
from typing import Any

import msgpack
import zstandard

from agent_wrapper.contract import Outcome, Rollout, RolloutRequest, Sampling, Segment, Trajectory, Turn, VersionSpan
from rollout_backend.core.seal import SealClaims, Sealer
from rollout_backend.core.session_key import SessionClaims, read_claims, sign_claims

MODEL = "scripted"
_VOCABULARY = 150_000
_TURN = 1000  # tokens, of which half are sampled
_CHARACTERS = 4  # of text per token
_WORDS = [random.Random(i).randbytes(4).hex()[: 3 + i % 6] for i in range(5000)]
_IDENTITY = ("run_id", "step", "task_id", "rollout_id", "attempt", "session_id")
_SEALED = frozenset(_IDENTITY) & SealClaims.model_fields.keys()
_VARYING = frozenset({*_IDENTITY, "seal", "reward", "finished_at"})
_RAW_BLOCK, _FRAME_OF_4_SIZE_BYTES = 0, 0xA0
_LARGEST_BLOCK = 128 * 1024


class ReadyMadeResults:
    """Results of one run, with `tokens` tokens each: about 7 bytes per token when compressed."""

    def __init__(self, tokens: int, secret: str) -> None:
        """`secret` is the run's, which seals them."""
        segments = (_segment(tokens),)
        sealer = Sealer(secret)
        self._key = sealer._keys[0]
        self._seal = _template_of_seal(sealer, Trajectory(model=MODEL, segments=segments))
        rollout = Rollout(
            run_id="run",
            step=0,
            task_id="task",
            rollout_id="task.0",
            attempt=1,
            session_id="session",
            outcome=Outcome.COMPLETED,
            reward=1.0,
            model=MODEL,
            segments=segments,
            started_at=1.0,
        )
        fields = rollout.model_dump(mode="python")
        self._fields = len(fields)
        shared = b"".join(_packed(name, value) for name, value in fields.items() if name not in _VARYING)
        self._shared_size, self._shared_blocks = len(shared), _blocks(shared)

    def make(self, request: RolloutRequest, finished_at: float) -> tuple[bytes, bytes]:
        """Return an encoded result in two parts; the second is the same object for all of them."""
        identity = {name: getattr(request, name) for name in _IDENTITY}
        sealed = self._seal.model_copy(update={name: identity[name] for name in _SEALED})
        seal = sign_claims(self._key, sealed)
        varying = {**identity, "seal": seal, "reward": 1.0, "finished_at": finished_at}
        head = b"\xde" + self._fields.to_bytes(2, "big") + b"".join(_packed(*item) for item in varying.items())
        assert len(head) <= _LARGEST_BLOCK
        size = len(head) + self._shared_size
        frame = zstandard.FRAME_HEADER + bytes([_FRAME_OF_4_SIZE_BYTES]) + size.to_bytes(4, "little")
        return frame + (len(head) << 3 | _RAW_BLOCK).to_bytes(3, "little") + head, self._shared_blocks


def _template_of_seal(sealer: Sealer, trajectory: Trajectory) -> SealClaims:
    claims = SessionClaims(
        run_id="run", step=0, rollout_id="task.0", attempt=1, session_id="s", sampling=Sampling(), expires_at=0
    )
    seal = sealer.seal(trajectory, claims).seal
    assert seal is not None
    return read_claims(seal, SealClaims)


def _packed(name: str, value: Any) -> bytes:
    return bytes(msgpack.packb(name)) + bytes(msgpack.packb(value))


def _blocks(data: bytes) -> bytes:
    """Return the blocks of a compressed frame without the frame's header: what is put before them does not matter."""
    frame = zstandard.ZstdCompressor(level=3).compress(data)
    descriptor = frame[4]
    single = bool(descriptor & 0x20)
    sizes = (1 if single else 0, 2, 4, 8)[descriptor >> 6]
    return frame[5 + (not single) + sizes :]


def _segment(tokens: int) -> Segment:
    """Return a conversation whose model calls sampled half of the tokens, with the text of it."""
    rng = random.Random(tokens)
    mask, turns, messages = bytearray(tokens), [], []
    for begin in range(0, tokens, _TURN):
        end = min(begin + _TURN, tokens)
        start = (begin + end) // 2
        mask[start:end] = b"\x01" * (end - start)
        span = VersionSpan(version="7", start=start, end=end)
        turns.append(Turn(start=start, end=end, finish_reason="stop", weight_versions=(span,), seconds=1.5))
        for role, size in (("user", start - begin), ("assistant", end - start)):
            text = " ".join(rng.choices(_WORDS, k=1 + size * _CHARACTERS // 6))
            messages.append({"role": role, "content": text})
    return Segment(
        token_ids=array("i", (rng.randrange(_VOCABULARY) for _ in range(tokens))),
        response_mask=array("B", bytes(mask)),
        logprobs=array("f", (-rng.expovariate(2.0) if sampled else float("nan") for sampled in mask)),
        turns=tuple(turns),
        messages=tuple(messages),
    )
