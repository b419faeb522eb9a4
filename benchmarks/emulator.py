"""Serve an emulated AWS whose agents work for some time, and then publish ready-made results: for `collection.py`.

The argument is the work, as JSON. `GET /_emulator/log` returns when each result was published (seconds of the
machine's monotonic clock), and the number of calls by operation; `/_emulator/reset` forgets that.
"""

import asyncio
import gc
import json
import random
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any

import msgpack
import zstandard
from emulated_aws import Cloud

from agent_wrapper.contract import (
    REQUEST_FIELD,
    Announcement,
    Outcome,
    Rollout,
    Sampling,
    Segment,
    Trajectory,
    Turn,
    VersionSpan,
    result_key,
)
from rollout_backend.core.seal import SealClaims, Sealer
from rollout_backend.core.session_key import SessionClaims, read_claims, sign_claims

MODEL = "scripted"
_TURN = 1000  # tokens, of which half are sampled
_IDENTITY = ("run_id", "step", "task_id", "rollout_id", "attempt", "session_id")
_SEALED = frozenset(_IDENTITY) & SealClaims.model_fields.keys()
_VARYING = frozenset({*_IDENTITY, "seal", "finished_at"})


class ReadyMadeResults:
    """Valid, sealed results of one run. All share their tokens, which are encoded and compressed once.

    Only the fields that identify a rollout differ. They come first in the object, in an uncompressed block of the
    same zstd frame, so a result of 1 MB takes 50 us to make, and is decoded as one that a wrapper has written.
    """

    def __init__(self, tokens: int, secret: str) -> None:
        segments = (_segment(tokens),)
        ids = {"run_id": "run", "step": 0, "rollout_id": "t.0", "attempt": 1, "session_id": "s"}
        sealer, claims = Sealer(secret), SessionClaims(**ids, sampling=Sampling(), expires_at=0)
        seal = sealer.seal(Trajectory(model=MODEL, segments=segments), claims).seal
        self._key, self._seal = sealer._keys[0], read_claims(seal, SealClaims)
        rollout = Rollout(
            **ids, task_id="t", outcome=Outcome.COMPLETED, reward=1.0, model=MODEL, segments=segments, started_at=1.0
        )
        fields = rollout.model_dump(mode="python")
        self._fields = len(fields)
        shared = b"".join(_packed(name, value) for name, value in fields.items() if name not in _VARYING)
        frame = zstandard.ZstdCompressor(level=3).compress(shared)
        # Blocks do not depend on what is put before them.
        self._size, self._blocks = len(shared), frame[zstandard.frame_header_size(frame) :]

    def make(self, request: dict[str, Any]) -> tuple[bytes, bytes]:
        """Return an encoded result in two parts; the second is the same object for all of them."""
        identity = {name: request[name] for name in _IDENTITY}
        sealed = self._seal.model_copy(update={name: identity[name] for name in _SEALED})
        varying = {**identity, "seal": sign_claims(self._key, sealed), "finished_at": time.time()}
        head = b"\xde" + self._fields.to_bytes(2, "big") + b"".join(_packed(*item) for item in varying.items())
        frame = zstandard.FRAME_HEADER + b"\xa0" + (len(head) + self._size).to_bytes(4, "little")
        return frame + (len(head) << 3).to_bytes(3, "little") + head, self._blocks


def _packed(name: str, value: Any) -> bytes:
    return bytes(msgpack.packb(name)) + bytes(msgpack.packb(value))


def _segment(tokens: int) -> Segment:
    """Return a conversation whose model calls sampled half of the tokens, with the text of it."""
    rng = random.Random(tokens)
    words = [rng.randbytes(4).hex()[: 3 + i % 6] for i in range(5000)]
    mask, turns, messages = bytearray(tokens), [], []
    for begin in range(0, tokens, _TURN):
        end = min(begin + _TURN, tokens)
        start = (begin + end) // 2
        mask[start:end] = b"\x01" * (end - start)
        span = VersionSpan(version="7", start=start, end=end)
        turns.append(Turn(start=start, end=end, finish_reason="stop", weight_versions=(span,), seconds=1.5))
        for role, size in (("user", start - begin), ("assistant", end - start)):
            messages.append({"role": role, "content": " ".join(rng.choices(words, k=1 + size * 2 // 3))})
    return Segment(
        token_ids=array("i", (rng.randrange(150_000) for _ in range(tokens))),
        response_mask=array("B", bytes(mask)),
        logprobs=array("f", (-rng.expovariate(2.0) if sampled else float("nan") for sampled in mask)),
        turns=tuple(turns),
        messages=tuple(messages),
    )


class Emulator(Cloud):
    """S3, SQS and a runtime. The toolkit's results are JSON with as many bytes as ours."""

    def __init__(self, work: dict[str, Any]) -> None:
        s3_s, sqs_s, runtime_s = work.get("latencies_s", (0.03, 0.01, 0.15))
        super().__init__(s3_s=s3_s, sqs_s=sqs_s, runtime_s=runtime_s)
        self._agent_s, self._random = work["agent_s"], random.Random(0)
        self._results = ReadyMadeResults(work["tokens"], work["secret"])
        size = sum(map(len, self._results.make({**dict.fromkeys(_IDENTITY, "s" * 30), "step": 0, "attempt": 1})))
        self._toolkits = {"rewards": [1.0], "status_code": 200, "stop_reason": "end_turn", "messages": "x" * size}
        self._open: set[str] = set()
        self._published: dict[str, float] = {}  # by the last part of the key, or by the toolkit's name of the rollout

    def control(self, name: str) -> Any:
        if name == "reset":
            self.calls.clear()
            self._published.clear()
        return {"published": self._published, "calls": self.calls}

    def begin_ours(self, session_id: str, request: dict[str, Any]) -> None:
        target = request["result"]
        key = result_key(target["prefix"], request["run_id"], request["step"], request["rollout_id"])

        def publish() -> None:
            self._store(target["bucket"], key, key.rpartition("/")[2], *self._results.make(request))
            self.sqs.send(target["queue_url"], Announcement(bucket=target["bucket"], key=key).encode())

        self._begin(session_id, publish)

    def begin_by_s3(self, session_id: str, key: str, payload: dict[str, Any]) -> None:
        asked, body = payload[REQUEST_FIELD], json.dumps(self._toolkits).encode()
        self._begin(session_id, lambda: self._store(asked["s3_bucket"], key, asked["input_id"], body))

    def call_by_http(self, session_id: str, name: str, start: bool, payload: dict[str, Any]) -> dict[str, Any]:
        if name in self._published:
            return {"status": "completed", "result": self._toolkits}
        if start:
            self._begin(session_id, lambda: self._published.setdefault(name, time.monotonic()))
        return {"status": "in_progress"}

    async def stop(self, session_id: str) -> bool:
        was_open = session_id in self._open
        self._open.discard(session_id)
        return was_open

    def _begin(self, session_id: str, end: Callable[[], object]) -> None:
        if session_id in self._open:  # a repeated call
            return
        self._open.add(session_id)
        asyncio.get_running_loop().call_later(self._agent_s * self._random.uniform(0.5, 1.5), end)

    def _store(self, bucket: str, key: str, name: str, *body: bytes) -> None:
        self.s3.put(bucket, key, *body)
        self._published[name] = time.monotonic()


async def serve(work: dict[str, Any]) -> None:
    async with Emulator(work).serve(work["port"]):
        await asyncio.Event().wait()


if __name__ == "__main__":
    gc.freeze()
    gc.disable()  # a collection of 100,000 messages would take 0.1 s
    asyncio.run(serve(json.loads(sys.argv[1])))
