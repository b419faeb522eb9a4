"""S3: strongly consistent, with conditional writes. A call may fail before or after it has its effect.

A call without an answer ends after its client's limit. In an outage that limit is longer than most of its owners can
wait, because the client repeats what has no answer.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from functools import lru_cache, partial
from typing import NoReturn

from agent_wrapper.contract import Rollout
from rollout_backend.config import StorageConfig
from rollout_backend.errors import ResultMissing, StoreError, WriteConflict
from rollout_backend.run.collect.store import StoredObject
from tests.simulation.environment import Environment
from tests.simulation.run_holder import RunHolder
from tests.simulation.trainer import Trainer

BUCKET = "rollouts"
MAX_RESULT_BYTES = 256 * 1024  # once unpacked
_TRIES = 3  # by the SDK
SILENT_S = 65.0  # limit of one request, as of the client of AWS
_SILENT_OUTAGE_S = 300.0  # limit of a call with its repetitions, as of `ResultStore.get_s`
_SLOW_GET_S = 15.0


class Bucket:
    """The bucket: its objects, and when they were written, read and listed."""

    def __init__(self, env: Environment, holder: RunHolder) -> None:
        self.env = env
        self.objects: dict[str, bytes] = {}
        self.written_at: dict[str, float] = {}  # by key: when an agent wrote it
        self.put_at: dict[str, float] = {}  # by key: when a trainer wrote it
        self.absent_at: dict[str, float] = {}  # by key: when a GET was last answered with 404
        self.listed_at: dict[str, float] = {}  # by prefix: when it was last listed
        self.list_tried: dict[str, float] = {}  # by prefix: when a listing was last requested
        self.outages: dict[str, tuple[float, float]] = {}  # by kind of call: start and end
        for kind in ("PUT", "GET", "LIST"):
            if env.chance("s3_outage"):
                self.outages[kind] = env.draw_times(60, 120)
        self.silent_outages = {kind for kind in self.outages if env.is_silent("outage")}
        self._holder = holder
        self._decoded = lru_cache(maxsize=None)(partial(Rollout.decode, max_bytes=MAX_RESULT_BYTES))

    def put(self, key: str, body: bytes) -> None:
        """Write an object of a trainer."""
        self._holder.wrote(key, self.objects.get(key), body)
        self.objects[key], self.put_at[key] = body, self.env.now()
        if "/steps/" in key:  # translated from another protocol
            self.written_at[key] = self.env.now()

    def put_new(self, key: str, body: bytes) -> bool:
        """Write an object of an agent, with `If-None-Match: *`. Return False if the key is taken."""
        if key in self.objects:
            return False
        self.objects[key] = body
        return True

    def result(self, key: str) -> Rollout:
        """Return the result that is stored under this key. Raises ContractError."""
        return self._decoded(self.objects[key])

    def is_out(self, kind: str) -> bool:
        """Return whether calls of this kind have an outage now."""
        since, until = self.outages.get(kind, (0.0, 0.0))
        return since <= self.env.now() < until

    def refuses(self, kind: str) -> bool:
        """Return whether a trainer's call fails now."""
        return self.env.chance("s3") or self.is_out(kind)

    def is_silent(self, kind: str) -> bool:
        """Return whether a trainer's call gets no answer now."""
        return self.env.is_silent("s3") or (kind in self.silent_outages and self.is_out(kind))


class SimStore:
    """An `ObjectStore` for one trainer."""

    def __init__(self, bucket: Bucket, trainer: Trainer) -> None:
        self.config = StorageConfig(bucket=BUCKET, max_result_bytes=MAX_RESULT_BYTES)
        self._bucket = bucket
        self._env = bucket.env
        self._trainer = trainer
        self._reading: set[str] = set()

    async def get(self, key: str) -> bytes:
        return (await self.fetch(key)).body

    async def fetch(self, key: str) -> StoredObject:
        await self._read("GET")
        if "/steps/" in key:
            await self._read_slowly(key)
        if "/steps/" in key and self._env.chance("surprise"):
            raise ZeroDivisionError("a defect over this object")
        if key not in self._bucket.objects:
            self._bucket.absent_at[key] = self._env.now()
            raise ResultMissing(f"nothing is stored under {key!r}")
        body = self._bucket.objects[key]
        return StoredObject(body, _etag(body), self._env.now() - self._bucket.put_at.get(key, 0.0))

    async def put(self, key: str, body: bytes) -> None:
        await self._put(key, body, lambda: None)

    async def put_if_match(self, key: str, body: bytes, etag: str | None) -> str:
        def check() -> None:
            stored = self._bucket.objects.get(key)
            if stored != body and etag != (None if stored is None else _etag(stored)):
                raise WriteConflict(f"{key!r} has changed since it was read")

        await self._put(key, body, check)
        return _etag(body)

    async def keys(self, prefix: str) -> AsyncIterator[str]:
        self._bucket.list_tried[prefix] = self._env.now()
        await self._read("LIST")
        self._bucket.listed_at[prefix] = self._env.now()
        for key in sorted(key for key in self._bucket.objects if key.startswith(prefix)):
            yield key

    async def _read(self, kind: str) -> None:
        """Raises StoreError, or Killed."""
        if self._bucket.is_silent(kind):
            await self._time_out(kind)
        await self._call(kind)

    async def _time_out(self, kind: str) -> NoReturn:
        await asyncio.sleep(_SILENT_OUTAGE_S if self._bucket.is_out(kind) else SILENT_S)
        self._trainer.require_alive()
        raise StoreError(f"S3 gave no answer to a {kind}")

    async def _call(self, kind: str) -> None:
        """Raises StoreError, or Killed."""
        if self._env.now() < self._trainer.cut_off_until:
            await self._env.passes(5)
            raise StoreError("S3 is not reached")
        for _ in range(_TRIES):
            await self._env.passes(0.1)
            self._trainer.require_alive()
            if not self._bucket.refuses(kind):
                return
        raise StoreError(f"S3 refused a {kind}: 503 SlowDown")

    async def _read_slowly(self, key: str) -> None:
        if key in self._reading:
            self._env.evidence.read_twice.append(key)
        self._reading.add(key)
        try:
            await self._env.passes(_SLOW_GET_S * self._env.faults.slow_gets)
        finally:
            self._reading.discard(key)

    async def _put(self, key: str, body: bytes, check: Callable[[], None]) -> None:
        async def carried_out() -> None:
            is_silent = self._bucket.is_silent("PUT")
            if is_silent and self._env.is_lost():
                await self._time_out("PUT")
            await self._call("PUT")
            check()
            self._bucket.put(key, body)
            if is_silent:
                await self._time_out("PUT")

        # A sent request completes even if its caller is cancelled.
        await asyncio.shield(asyncio.create_task(carried_out()))


def _etag(body: bytes) -> str:
    return hashlib.md5(body, usedforsecurity=False).hexdigest()
