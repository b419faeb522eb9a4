"""Lease a run to one manager at a time, with a fencing token.

Invariants:

- `runs/RUN/lease` in the bucket names the holder. Every write of it is conditional on what was read before, so two
  managers never both hold a run;
- a manager takes over only a run that was released, whose holder's process is dead on this machine, or whose holder
  has not renewed its lease for `janitor.lease_s`;
- the former holder stays on record until the next one has started everything else, so that the former one's janitor
  still cleans up if that start fails;
- the fencing token grows with each claim, even if the lease was deleted. Manifests carry it, and a manager that has
  lost the run starts, stops, writes and deletes nothing of it;
- a silent S3 delays a renewal by a quarter of the lease, and never ends the renewals.
"""

import asyncio
import functools
import logging
import os
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self, TypeVar

from pydantic import BaseModel, ValidationError
from tenacity import wait_fixed

from agent_wrapper.contract import lease_key
from agent_wrapper.shared.processes import boot_clock
from rollout_backend.agents.runtimes.base import SessionCalls
from rollout_backend.base.logs import report_failure
from rollout_backend.base.retry import retry_until
from rollout_backend.errors import (
    LeaseUnconfirmed,
    ResultMissing,
    RolloutBackendError,
    RunHeld,
    StoreError,
    WriteConflict,
)
from rollout_backend.run.collect.manifest_store import largest_fencing_token
from rollout_backend.run.collect.store import ObjectStore

log = logging.getLogger(__name__)

_T = TypeVar("_T")
# S3 timestamps have a resolution of 1 s.
_CLOCK_S = 2.0
# Time for S3 to answer, while a run starts and before a step returns.
_RETRY_S = 300.0
_PAUSE_S = 2.0
# Minimum time for one call to S3, even if the lease is short.
_LEAST_TRY_S = 5.0
# Share of the lease time, counted from a renewal, during which no takeover is possible.
_VALID_SHARE = 0.75


class LeaseHolder(BaseModel, frozen=True):
    """A manager's process."""

    id: str
    host: str
    machine: str
    """Identifies the kernel and the process namespace in which `pid` is valid."""
    pid: int
    started: int = 0
    """Start time of the process in kernel ticks, because pids are reused."""
    since: float
    """Unix seconds."""

    @classmethod
    def this_process(cls) -> Self:
        pid = os.getpid()
        host = os.uname().nodename
        return cls(
            id=f"{host}-{pid}-{uuid.uuid4().hex[:8]}",
            host=host,
            machine=_machine(),
            pid=pid,
            started=process_start(pid) or 0,
            since=time.time(),
        )

    @property
    def is_local(self) -> bool:
        """Whether its process is on this machine."""
        return self.machine == _machine()

    def is_dead(self) -> bool:
        """Return True if its process has ended. Only a process on the same machine can know."""
        return self.is_local and process_start(self.pid) != self.started

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"process {self.pid} on {self.host}, since {since}"


class LeaseRecord(BaseModel, frozen=True):
    """The content of `runs/RUN/lease`. `manager_id` repeats the holder's id, for the janitor."""

    manager_id: str | None = None
    fencing_token: int = 0
    holder: LeaseHolder | None = None
    released: bool = False
    starting: LeaseHolder | None = None
    """A manager that has found the run free and is starting its services. It holds the run afterwards."""
    renewals: int = 0
    lease_s: float = 60.0
    """Duration of the lease of the manager that wrote this, which renews it several times within that time."""

    def manager(self, age_s: float) -> LeaseHolder | None:
        """Return the manager that has the run and has not released it. `age_s` is the age of this record."""
        if age_s > self.lease_s + _CLOCK_S:
            return None
        return self.starting or (None if self.released else self.holder)


@dataclass(frozen=True)
class _Seen:
    record: LeaseRecord
    etag: str | None
    """None if there is no object."""
    age_s: float = 0.0


class RunLease:
    """One manager's lease on its run: `begin`, start everything else, `claim`, and finally `release`."""

    def __init__(
        self,
        store: ObjectStore,
        run_id: str,
        me: LeaseHolder,
        lease_s: float,
        *,
        is_dead: Callable[[LeaseHolder], bool] = LeaseHolder.is_dead,
        on_status: Callable[[str], object] = lambda text: None,
        retry_s: float = _RETRY_S,
    ) -> None:
        """Prepare a lease; nothing is written yet. `on_status` is called with a line for each wait."""
        self.me = me
        # The holder on record when this manager began.
        self.previous_manager_id: str | None = None
        self.held = False
        self.lost: RunHeld | None = None
        self.key = lease_key(store.config.prefix, run_id)
        self._store = store
        self._run_id = run_id
        self._lease_s = lease_s
        self._is_dead = is_dead
        self._on_status = on_status
        self._retry_s = retry_s
        self._record = LeaseRecord()
        self._least_token = 0
        self._etag: str | None = None
        self._try_s = max(_LEAST_TRY_S, lease_s / 4)
        # Time of `_clock` before the last accepted write was sent.
        self._renewed_at = float("-inf")
        self._writing = asyncio.Lock()
        # Replaced at each renewal, and when the run is lost.
        self._changed = asyncio.Event()
        self._renewing: asyncio.Task[None] | None = None
        self._was_free = True

    @property
    def fencing_token(self) -> int:
        return self._record.fencing_token

    async def may_delete_queue(self) -> bool:
        """Return whether this manager may delete the run's queue: its lease is valid, or no other manager held the
        run when it began. Otherwise the queue may belong to another manager, or to a dead run, whose janitor deletes
        it."""
        if self.held and not self.is_confirmed and self.lost is None:
            try:
                async with self._writing:
                    await self._put(self._record)
            except RolloutBackendError as error:
                log.warning("%s: the run's queue is left, as another manager may have the run", error)
                return False
        return self.lost is None and (self.held or self._was_free)

    def mark_lost(self, error: RunHeld) -> None:
        """Record that another manager has the run, as one of its writes shows."""
        self.lost = self.lost or error
        self._notify()

    async def begin(self) -> None:
        """Announce that this manager is starting.

        Raises:
            RunHeld: another manager holds the run, or is starting it.
            StoreError: S3 did not answer for some minutes.
        """
        while True:
            seen = await self._wait_available()
            self._was_free = seen.record.manager_id is None or seen.record.released
            self.previous_manager_id = seen.record.manager_id
            self._etag = seen.etag
            # The lease may have been deleted, or be that of a backup.
            is_lost = not seen.record.fencing_token
            read = functools.partial(largest_fencing_token, self._store, self._run_id, every=is_lost)
            self._least_token = 1 + await self._retry(read)
            try:
                await self._retry(lambda: self._put(seen.record.model_copy(update={"starting": self.me})))  # noqa: B023
                break
            except WriteConflict:
                # Another manager was first, or the holder is back.
                continue
        self._renewing = asyncio.create_task(self._renew())
        self._renewing.add_done_callback(report_failure("the renewal of the run's lease"))

    async def claim(self) -> None:
        """Become the holder, once everything else has started. Raises RunHeld or StoreError."""
        claimed = {"manager_id": self.me.id, "holder": self.me, "released": False, "starting": None}
        async with self._writing:
            while self.lost is None and not self.held:
                token = max(self._record.fencing_token + 1, self._least_token, int(time.time()))
                record = self._record.model_copy(update={**claimed, "fencing_token": token})
                try:
                    await self._retry(lambda: self._put(record))  # noqa: B023
                    self.held = True
                except WriteConflict:
                    await self._retry(self._resolve_conflict)
        if self.lost is not None:
            raise self.lost

    async def wait_lost(self) -> None:
        """Wait until another manager has the run, and raise RunHeld then."""
        while self.lost is None:
            await self._changed.wait()
        raise self.lost

    @property
    def is_confirmed(self) -> bool:
        """Whether the lease is known to be valid, so that no other manager can hold the run."""
        age_s = _clock() - self._renewed_at
        return self.lost is None and age_s <= _VALID_SHARE * self._lease_s

    async def wait_confirmed(self) -> None:
        """Wait until the lease is known to be valid. Raises RunHeld."""
        while self.lost is None and not self.is_confirmed:
            await self._changed.wait()
        if self.lost is not None:
            raise self.lost

    async def try_to_confirm(self) -> bool:
        """Wait until the lease is known to be valid. Return False if S3 does not answer for minutes after its end.

        A manager that could not renew its lease must not return a step's result, or stop a session, before it knows
        whether another manager has taken the run over. Raises RunHeld.
        """
        try:
            async with asyncio.timeout(max(0.0, self._left_s)):
                await self.wait_confirmed()
        except TimeoutError:
            return False
        return True

    @property
    def is_silent(self) -> bool:
        """Return whether the lease ended minutes ago and S3 has not answered since."""
        return self._left_s <= 0

    @property
    def _left_s(self) -> float:
        return self._renewed_at + _VALID_SHARE * self._lease_s + self._retry_s - _clock()

    async def release(self) -> None:
        """Release the lease, so that the next manager need not wait for it to expire."""
        if self._renewing is None:
            return
        self._renewing.cancel()
        await asyncio.gather(self._renewing, return_exceptions=True)
        if self.lost is not None:
            return
        try:
            await self._put(
                self._record.model_copy(update={"released": self.held or self._record.released, "starting": None})
            )
        except WriteConflict:
            # Another manager has the run by now.
            pass
        except RolloutBackendError as error:
            log.warning("%s: a start on another machine waits %g s before it takes the run", error, self._lease_s)

    # --- the record ---------------------------------------------------------------------------------------

    async def _wait_available(self) -> _Seen:
        """Return the record once no other manager has the run. A manager on another machine gets the time in which it
        would renew its lease. Raises RunHeld."""
        first = seen = await self._retry(self._read)
        while (other := seen.record.manager(seen.age_s)) and other.id != self.me.id and not self._is_dead(other):
            lease_s = seen.record.lease_s
            if other.machine == self.me.machine or seen.etag != first.etag:
                raise self._held_by(other, lease_s)
            self._on_status(f"the run is held by {other}: waiting up to {lease_s:g} s for a sign of life of it")
            await asyncio.sleep(lease_s / 8)
            seen = await self._retry(self._read)
        return seen

    async def _read(self) -> _Seen:
        try:
            stored = await self._in_time(self._store.fetch(self.key))
        except ResultMissing:
            return _Seen(LeaseRecord(), None)
        try:
            return _Seen(LeaseRecord.model_validate_json(stored.body), stored.etag, stored.age_s)
        except ValidationError:
            log.warning("%s is no record of a run's holder and is replaced", self.key)
            return _Seen(LeaseRecord(), stored.etag)

    async def _put(self, record: LeaseRecord) -> None:
        """Write the record if it is unchanged in S3. Raises WriteConflict or StoreError."""
        sent_at = _clock()
        # The count makes each write differ from all others.
        record = record.model_copy(update={"renewals": record.renewals + 1, "lease_s": self._lease_s})
        body = record.model_dump_json(indent=1).encode()
        self._etag = await self._in_time(self._store.put_if_match(self.key, body, self._etag))
        self._record, self._renewed_at = record, sent_at
        self._notify()

    async def _in_time(self, call: Awaitable[_T]) -> _T:
        """Await a call to S3 for a part of the lease at most. Raises StoreError."""
        try:
            async with asyncio.timeout(self._try_s):
                return await call
        except TimeoutError as error:
            raise StoreError(f"S3 gave no answer for {self.key!r} within {self._try_s:g} s") from error

    async def _renew(self) -> None:
        pause, failing = self._lease_s / 4, False
        while self.lost is None:
            await asyncio.sleep(pause)
            try:
                async with self._writing:
                    try:
                        await self._put(self._record)
                        pause, failing = self._lease_s / 4, False
                    except WriteConflict:
                        await self._resolve_conflict()
                        pause = 0.0
            # This includes expired credentials, with which the run's own calls end it, and defects: without renewals
            # no agent would start, and nothing would say why.
            except Exception as error:
                if not failing:
                    is_defect = not isinstance(error, RolloutBackendError)
                    text = (
                        "%s: the run's lease cannot be renewed; once it has expired, no agent is started until then"
                    )
                    log.log(logging.ERROR if is_defect else logging.WARNING, text, error, exc_info=is_defect)
                pause, failing = min(_PAUSE_S, self._lease_s / 4), True

    async def _resolve_conflict(self) -> None:
        """Resolve a write conflict: the record is another manager's, or still this one's under another ETag."""
        seen = await self._read()
        # A deleted record is written again.
        record = self._record if seen.etag is None else seen.record
        mine = record.holder if self.held else record.starting
        if mine is not None and mine.id == self.me.id:
            # Another manager may have begun because this one was silent; this one is back.
            self._etag = seen.etag
            self._record = record.model_copy(update={"starting": None}) if self.held else record
            return
        other = record.starting or record.holder
        self.mark_lost(self._taken_by(other) if self.held or other is None else self._held_by(other, record.lease_s))

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _retry(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Retry a call until S3 answers. Raises StoreError after some minutes."""
        until = asyncio.get_running_loop().time() + self._retry_s
        return await retry_until(until, call, StoreError, wait_fixed(_PAUSE_S))

    def _held_by(self, other: LeaseHolder, lease_s: float) -> RunHeld:
        return RunHeld(
            f"run {self._run_id!r} is held by another manager ({other}). Stop that one, or give this run another "
            f"run_id. If it is dead, the run can be started {lease_s:g} s (janitor.lease_s) after its last "
            "sign of life"
        )

    def _taken_by(self, other: LeaseHolder | None) -> RunHeld:
        return RunHeld(
            f"run {self._run_id!r} was taken over by another manager ({other or 'unknown'}), because this one "
            f"({self.me}) had not renewed its lease. This one stops and leaves sessions, queue and manifests to the "
            "other. Keep one of the two, or give one another run_id"
        )


class FencedRuntime:
    """A runtime that starts and stops sessions only while this manager's lease is valid.

    The call queue waits for the lease. A call whose lease has expired since its admission raises LeaseUnconfirmed.
    """

    def __init__(self, runtime: SessionCalls, lease: RunLease) -> None:
        self._runtime = runtime
        self._lease = lease

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        self._require_lease()
        return await self._runtime.invoke(session_id, payload)

    async def stop(self, session_id: str) -> bool | None:
        """Stop a session, which another manager that has taken the run over may have adopted."""
        self._require_lease()
        return await self._runtime.stop(session_id)

    def _require_lease(self) -> None:
        if not self._lease.is_confirmed:
            raise LeaseUnconfirmed("another manager may have taken the run over: its lease could not be renewed")

    def adopt(self, session_id: str, payload: Callable[[], bytes]) -> None:
        self._runtime.adopt(session_id, payload)


def _clock() -> float:
    """Return the loop's time, plus the time for which this machine was suspended, during which the lease expires."""
    return asyncio.get_running_loop().time() + boot_clock() - time.monotonic()


def _machine() -> str:
    """Return an id that two processes share if and only if each can check whether the other is alive."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        # These files exist only on Linux.
        return f"{os.uname().nodename} {uuid.getnode():x}"


def process_start(pid: int) -> int | None:
    """Return the process's start time in kernel ticks; 0 if it is unknown, None if the process has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            # The process belongs to another user, and is alive.
            pass
        return 0
    return None if state in "ZX" else int(fields[18])
