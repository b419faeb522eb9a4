"""Fetch results and failure markers from S3, validate them, and deliver them to their step.

Invariants:

- A key is fetched by one caller at a time, so each result is read and delivered once.
- Large results are decoded off the event loop, one at a time, so that several hostile ones cannot exhaust the memory
  together.
- A result counts only if it satisfies the contract, belongs to its key, has a valid seal if it needs one, and names
  the session that the manifest assigns to its rollout and attempt. Only that attempt's container knows its id, so a
  container cannot write a result for another.
- An invalid failure marker changes nothing: the rollout's result can still arrive. An invalid result occupies the
  rollout's only key permanently, so the rollout ends as `invalid_result` and is replaced.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Protocol
from weakref import WeakValueDictionary

from agent_wrapper.contract import ContractError, Outcome, ResultName, Rollout, quarantine_prefix
from agent_wrapper.contract.codec import ExpandedBeyondCap, unpacked_size
from rollout_backend.base.logs import log_fields
from rollout_backend.errors import ResultMissing, StoreError
from rollout_backend.run.collect.store import ObjectStore

log = logging.getLogger(__name__)

# Decoding takes 5 ms per MB in the compact form and 30 ms in JSON; a hostile object of 64 KiB takes up to 20 ms.
_LARGE_BYTES = 64 * 1024
_EVIDENCE_BYTES = 4096
# The limit for writing the record of one object, which holds a slot.
_RECORD_S = 60.0


class ResultSink(Protocol):
    """A step that receives results."""

    step: int

    def is_wanted(self, rollout_id: str, attempt: int | None = None) -> bool:
        """Return whether to fetch the rollout's result or, with `attempt`, this attempt's failure marker. Whether it
        counts is decided once it arrives."""
        ...

    def record_duplicate(self, rollout_id: str) -> None:
        """Count an announcement that is not wanted: already settled, never planned, or from an abandoned attempt."""
        ...

    def on_result(
        self,
        rollout: Rollout,
        data: bytes,
        announced_at: float | None,
        failure_marker: bool = False,
        fetch_s: float = 0.0,
    ) -> None:
        """Accept a valid result or failure marker; `data` is its encoded form. `announced_at` is None if it was found
        by listing. `fetch_s` is the time of its fetch and validation."""
        ...

    def on_invalid_result(self, rollout_id: str, error: ContractError) -> None:
        """Settle a rollout whose result is invalid."""
        ...

    def session_id(self, rollout_id: str, attempt: int) -> str:
        """Return the session id that this attempt's result must name."""
        ...

    def pending(self) -> list[tuple[str, int]]:
        """Return the unsettled rollouts, each with the number of its current attempt."""
        ...


class ResultDecoder:
    """Decodes the results of one run."""

    def __init__(self, run_id: str, max_bytes: int, verify: Callable[[Rollout], None] | None = None) -> None:
        """`verify` raises ContractError for tokens that the gateway did not seal. See `core.seal`."""
        self._run_id = run_id
        self._max_bytes = max_bytes
        self._verify = verify
        self._large = ThreadPoolExecutor(1, "decode")

    async def decode(self, data: bytes, name: ResultName) -> Rollout:
        """Decode the result or failure marker that was stored under the key of `name`.

        Raises:
            ContractError: the object is invalid; names the field.
        """
        if unpacked_size(data) < _LARGE_BYTES:
            with contextlib.suppress(ExpandedBeyondCap):
                # A small object may contain large shared segments.
                return self._decode(data, name, min(_LARGE_BYTES, self._max_bytes))
        # A thread, not a process: the event loop waits for at most one call into C (28 ms of 81 ms for a compact
        # result of 9 MB), and a process would take as long to send the decoded result back. It goes from one result
        # to the next without the loop, because each hand-over would first wait for the interpreter's lock.
        return await asyncio.get_running_loop().run_in_executor(
            self._large, self._decode, data, name, self._max_bytes
        )

    def _decode(self, data: bytes, name: ResultName, max_bytes: int) -> Rollout:
        rollout = Rollout.decode(data, max_bytes)
        self._check(rollout, name)
        if self._verify is not None:
            self._verify(rollout)
        return rollout

    def _check(self, rollout: Rollout, name: ResultName) -> None:
        wanted: dict[str, object] = {"run_id": self._run_id, "step": name.step, "rollout_id": name.rollout_id}
        if name.attempt is not None:
            wanted |= {"attempt": name.attempt, "outcome": Outcome.INFRA_ERROR}
        for field, value in wanted.items():
            if getattr(rollout, field) != value:
                raise ContractError(field, f"is {getattr(rollout, field)!r} in the result of {value!r}")
        if rollout.score is not None:
            raise ContractError("score", "is set, which only the training side may do")


class Quarantine:
    """The quarantine of one run."""

    def __init__(self, store: ObjectStore, run_id: str) -> None:
        self._store = store
        self._run_id = run_id

    async def record(self, what: str, error: ContractError, evidence: bytes) -> bool:
        """Record an object's key or a message's id, why it is unusable, and the first 4 KiB of its content.

        The record's key is derived from its content, so a repeated record is stored once. Return False if S3 did not
        store it: retry later.
        """
        record = {
            "what": what,
            "reason": str(error),
            "bytes": len(evidence),
            "sha256": hashlib.sha256(evidence).hexdigest(),
            "begins": evidence[:_EVIDENCE_BYTES].decode("utf-8", errors="backslashreplace"),
        }
        body = json.dumps(record, indent=1).encode()
        folder = quarantine_prefix(self._store.config.prefix, self._run_id)
        try:
            async with asyncio.timeout(_RECORD_S):
                await self._store.put(f"{folder}{hashlib.sha256(body).hexdigest()[:24]}.json", body)
        except (StoreError, TimeoutError) as failure:
            log.warning("%s; it is retried", str(failure) or f"S3 did not take the record of {what} in time")
            return False
        return True


class FetchStatus(Enum):
    """The outcome of fetching one object from S3."""

    HANDLED = "handled"
    """The object was delivered to the step, as a valid or invalid result."""
    ABSENT = "absent"
    """S3 answered that the object does not exist."""
    UNKNOWN = "unknown"
    """S3 did not answer, or did not store the quarantine record: retry later."""


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
        # Keys of refused failure markers, by step.
        self._refused_markers: dict[int, set[str]] = defaultdict(set)

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
            if not sink.is_wanted(name.rollout_id, name.attempt):
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
