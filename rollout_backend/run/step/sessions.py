"""Register, close and revoke the sessions of one step.

Invariants:

- a session is recorded in the run's folder before its first invoke, and as closed before its stop is sent;
- the key of a closed session is revoked once, within a second and before the step ends, unless its gateway does not
  answer in time: the key then expires;
- the close of a session continues even if the caller is cancelled.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from typing import Any

from rollout_backend.core.ledger import Ledger
from rollout_backend.errors import ServingError
from rollout_backend.run.dispatch.call_queue import CallKind
from rollout_backend.run.step.early_end import EarlyEnd
from rollout_backend.run.step.services import StepServices

log = logging.getLogger(__name__)

# Keys of sessions that end within this time are revoked in one call.
_TOGETHER_S = 1.0
# Limit of all revocations after the last agent: for one gateway that does not answer (150 s), and then for others.
_LAST_REVOKES_S = 180.0


class StepSessions:
    """The sessions of one step. `known` has those invoked or adopted, in order. `earlier_known` is set when the
    sessions of earlier trainers are adopted or being closed."""

    def __init__(self, services: StepServices, ledger: Ledger, early_end: EarlyEnd) -> None:
        """While `early_end.leave_open` is set, no session is closed."""
        self.known: dict[str, None] = {}
        self.earlier_known = False
        self.services = services
        self.ledger = ledger
        self._early_end = early_end
        self._to_revoke: dict[str, None] = {}
        self._revoked: set[str] = set()
        self._revoking = asyncio.Lock()
        self._revoke_timer: asyncio.TimerHandle | None = None
        self._revokes_end: float | None = None
        self.closing: set[asyncio.Task[None]] = set()

    async def register(
        self, session_id: str, report_log: Callable[[], Awaitable[None]], is_needed: Callable[[], bool]
    ) -> bool:
        """Record a session that is about to be invoked, and watch for its heartbeats. Return False if it is no longer
        needed once it is recorded, and a log without its record is reported."""
        is_new, needed = session_id not in self.known, False
        try:
            if is_new:
                await self.services.in_flight.record_invoked(self.ledger.step, session_id)
            await report_log()
            needed = is_needed()
        finally:
            if needed:
                self.watch(session_id)
            elif is_new:
                self.withdraw(session_id)
        return needed

    def withdraw(self, session_id: str) -> None:
        """Record that a registered session was not invoked after all."""
        self.known.pop(session_id, None)
        self._unwatch([session_id])
        self.services.in_flight.withdraw(self.ledger.step, session_id)

    async def adopt(self, session_ids: Collection[str]) -> None:
        """Let the gateways serve sessions that an earlier trainer started."""
        if not session_ids:
            return
        try:
            await self.services.gateways.adopt(session_ids)
        except ServingError as error:
            log.warning("sessions of an earlier trainer cannot be resumed, and end at their deadline: %s", error)

    async def close(self, session_id: str) -> None:
        """Close a session. Return when it is closed or recorded as unclosed. A cancelled caller also waits for this,
        because it holds a slot until then."""
        closing = self.in_background(self.stop(session_id))
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await asyncio.wait([closing])
            raise

    def close_later(self, session_id: str) -> None:
        """Close a session in the background, before the step ends."""
        self.in_background(self.stop(session_id))

    async def close_earlier(self, session_ids: Collection[str]) -> None:
        """Close sessions that earlier trainers may have left open, at a lower priority than this step's."""
        await self.revoke(session_ids)
        await asyncio.gather(*(self.stop(session_id, CallKind.STOP_EARLIER) for session_id in session_ids))

    def in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work that closes sessions. The step does not end before it is done."""
        closing = asyncio.create_task(work)
        self.closing.add(closing)
        closing.add_done_callback(self.closing.discard)
        closing.add_done_callback(self._early_end.abort_on_failure)
        return closing

    async def stop(self, session_id: str, call: CallKind = CallKind.STOP) -> None:
        """Stop a session and revoke its key, because an agent that the stop does not reach must not keep sampling."""
        if self._early_end.leave_open:
            return
        await self.services.in_flight.record_closed(self.ledger.step, session_id)
        self._unwatch([session_id])
        self._add_to_revoke([session_id])
        if self._to_revoke and self._revoke_timer is None:
            self._revoke_timer = asyncio.get_running_loop().call_later(_TOGETHER_S, self._revoke_later)
        if await self.services.dispatcher.close(session_id, self.ledger, call):
            await self.services.in_flight.record_stopped(self.ledger.step, session_id)

    async def revoke(self, session_ids: Iterable[str]) -> None:
        """Revoke the keys of these sessions and all pending ones, each once."""
        self._add_to_revoke(session_ids)
        await self._revoke_due()

    def _add_to_revoke(self, session_ids: Iterable[str]) -> None:
        self._to_revoke.update((each, None) for each in session_ids if each not in self._revoked)

    def _revoke_later(self) -> None:
        if not self._early_end.leave_open:
            self.in_background(self._revoke_due())

    async def _revoke_due(self) -> None:
        async with self._revoking:
            if self._revoke_timer is not None:
                self._revoke_timer.cancel()
                self._revoke_timer = None
            is_over = self._revokes_end is not None and asyncio.get_running_loop().time() >= self._revokes_end
            if is_over or not self._to_revoke:
                return
            due, self._to_revoke = list(self._to_revoke), {}
            self._revoked.update(due)
            try:
                async with asyncio.timeout_at(self._revokes_end):
                    await self.services.gateways.revoke(due)
            except (ServingError, TimeoutError) as error:
                self._revoked.difference_update(due)
                self._add_to_revoke(due)
                reason = str(error) or "the gateways did not answer before the step ended"
                log.warning("%d session keys could not be revoked and expire with their time: %s", len(due), reason)

    async def revoke_all(self) -> None:
        """Revoke the keys of all known sessions, and stop watching them. From then on, all revocations together may
        take three minutes."""
        self._revokes_end = asyncio.get_running_loop().time() + _LAST_REVOKES_S
        await self.revoke(self.known)
        self._unwatch(self.known)

    async def wait_closed(self) -> None:
        """Wait until every session that is being closed is closed, and its key revoked."""
        while self.closing:
            await asyncio.gather(*self.closing, return_exceptions=True)
        await self._revoke_due()

    def watch(self, session_id: str) -> None:
        """Watch the session's heartbeats from now on."""
        self.known[session_id] = None
        self.services.heartbeats.watch(session_id)

    def _unwatch(self, session_ids: Collection[str]) -> None:
        self.services.heartbeats.forget(session_ids)
        self.services.session_ends.forget(session_ids)
