"""Fetch results and failure markers from S3, validate them, and deliver them to their step.

Invariants:

- A key is fetched by one caller at a time, so each result is read and delivered once.
- A result counts only if it names the session that the manifest assigns to its rollout and attempt. Only that
  attempt's container knows the session id, so a container cannot write a result for another.
- An invalid failure marker changes nothing: the rollout's result can still arrive. An invalid result occupies the
  rollout's only key permanently, so the rollout ends as `invalid_result` and is replaced.
"""

import asyncio
import logging
from collections import defaultdict
from enum import Enum
from weakref import WeakValueDictionary

from agent_wrapper.contract import ContractError, ResultName, Rollout
from rollout_backend.collect.decode import ResultDecoder
from rollout_backend.collect.quarantine import Quarantine
from rollout_backend.collect.sink import ResultSink
from rollout_backend.collect.store import ObjectStore
from rollout_backend.errors import ResultMissing, StoreError
from rollout_backend.logs import log_fields

log = logging.getLogger(__name__)


class FetchStatus(Enum):
    """The outcome of fetching one object from S3."""

    HANDLED = "handled"  # delivered to the step, as a valid or invalid result
    ABSENT = "absent"  # S3 answered that the object does not exist
    UNKNOWN = "unknown"  # S3 did not answer, or did not store the quarantine record: retry later


class KeyLocks:
    """One lock per key. Unused locks are dropped."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, key: str) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())


class ResultFetcher:
    """Fetches the results of one run, up to `max_fetches` concurrently."""

    def __init__(self, store: ObjectStore, decoder: ResultDecoder, quarantine: Quarantine, max_fetches: int) -> None:
        self._store = store
        self._decoder = decoder
        self._quarantine = quarantine
        self._slots = asyncio.Semaphore(max_fetches)
        self._locks = KeyLocks()
        self._refused_markers: dict[int, set[str]] = defaultdict(set)  # keys of refused failure markers, by step

    @property
    def is_busy(self) -> bool:
        return self._slots.locked()

    async def fetch(
        self, sink: ResultSink, name: ResultName, key: str, announced_at: float | None = None
    ) -> FetchStatus:
        """Fetch a result or failure marker and deliver it. `announced_at` is None if it was not announced."""
        if key in self._refused_markers.get(sink.step, ()):
            return FetchStatus.HANDLED
        with log_fields(step=name.step, rollout=name.rollout_id):
            async with self._locks.of(key):
                return await self._fetch(sink, name, key, announced_at)

    async def _fetch(self, sink: ResultSink, name: ResultName, key: str, announced_at: float | None) -> FetchStatus:
        loop = asyncio.get_running_loop()
        async with self._slots:
            if not sink.is_wanted(name.rollout_id, name.attempt):  # delivered while this call waited
                if announced_at is not None:
                    sink.record_duplicate(name.rollout_id)
                return FetchStatus.HANDLED
            began = loop.time()
            try:
                data = await self._store.get(key)
            except ResultMissing:
                return FetchStatus.ABSENT
            except StoreError as error:
                log.warning("%s; it is retried", error)
                return FetchStatus.UNKNOWN
            except ContractError as error:
                return await self.reject(sink, name, key, error, b"")
            try:
                rollout = await self._decoder.decode(data, name)
                check_session(sink, rollout)
            except ContractError as error:
                return await self.reject(sink, name, key, error, data)
        sink.on_result(rollout, data, announced_at, name.attempt is not None, loop.time() - began)
        return FetchStatus.HANDLED

    async def reject(
        self, sink: ResultSink, name: ResultName, key: str, error: ContractError, evidence: bytes
    ) -> FetchStatus:
        """Quarantine an invalid object. A result settles its rollout; a failure marker is not fetched again."""
        log.warning("%s is invalid: %s", key, error)
        if not await self._quarantine.record(key, error, evidence):
            return FetchStatus.UNKNOWN
        if name.attempt is None:
            sink.on_invalid_result(name.rollout_id, error)
        else:
            self._refused_markers[sink.step].add(key)
        return FetchStatus.HANDLED

    def forget(self, step: int) -> None:
        """Forget the refused failure markers of a step that has ended."""
        self._refused_markers.pop(step, None)


def check_session(sink: ResultSink, rollout: Rollout) -> None:
    """Raise ContractError unless this attempt's container wrote the result: only it knows the session id."""
    expected = sink.session_id(rollout.rollout_id, rollout.attempt)
    if rollout.session_id != expected:
        raise ContractError(
            "session_id",
            f"is not that of attempt {rollout.attempt} of {rollout.rollout_id!r}: another container wrote this. Set "
            "storage.presigned=true to prevent it",
        )
