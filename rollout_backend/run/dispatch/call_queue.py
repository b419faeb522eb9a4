"""Admit calls to the runtime: in order, at the granted rates, within the number of sessions. A run has one queue.

Invariants:

- a call is sent only after it was admitted, and its response is reported to the rate that admitted it;
- a rollout waits only once before it starts: its first invoke and its slot, one of `max_sessions`, are admitted
  together;
- calls that finish rollouts precede calls that start them. Polls and new sessions take turns, because a poll of an
  agent that still runs finishes nothing; the last poll of a rollout that would otherwise end precedes every call;
- invokes are ordered by the priority of their task, highest first, then by arrival;
- refused invokes slow down neither polls nor stops;
- a cancelled waiter leaves the queue and gives its place to the next one;
- while the run's lease is not confirmed, no call is admitted, and each keeps its place;
- a rate change also applies to waiting calls: no waiter sleeps for a time computed before the change;
- results come first: one turn of the event loop, which also receives them, admits at most `_PER_TURN` calls. While
  results wait because `collect.max_fetches` are being fetched, `_PAUSE_S` pass between two such turns.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from heapq import heappop, heappush
from itertools import count
from typing import Protocol, Self

from rollout_backend.config import RuntimeConfig
from rollout_backend.core.ledger import CallTally
from rollout_backend.errors import LeaseUnconfirmed, OutcomeUnknown, RolloutBackendError, RunHeld, RuntimeCallError
from rollout_backend.run.dispatch.rate_limiter import AdaptiveRate, TokenBucket

log = logging.getLogger(__name__)

# Preparing and sending an invoke takes 0.3 ms.
_PER_TURN = 2
# With a backlog of results, 100 calls per second continue, so that no backlog stops a run.
_PAUSE_S = 0.02
# Calls that wait for the run's lease look at it this often.
_LEASE_PAUSE_S = 0.1


class CallKind(IntEnum):
    """The kinds of calls, in the order in which they are admitted, except that polls and invokes take turns.

    `STOP` closes the session of a settled rollout, and `STOP_EARLIER` one that an earlier execution may have left
    open. `VERIFY` starts the verifier of a result. A poll is an invoke of an open session, which asks for its result:
    `LAST_POLL` before its rollout ends without one. `START` is the first invoke of a rollout, and takes a slot.
    """

    LAST_POLL = 0
    STOP = 1
    VERIFY = 2
    POLL = 3
    INVOKE = 4
    START = 5
    STOP_EARLIER = 6


_POLLS = (CallKind.LAST_POLL, CallKind.POLL)
_INVOKES = (CallKind.INVOKE, CallKind.START)
_STOPS = (CallKind.STOP, CallKind.STOP_EARLIER)


class Lease(Protocol):
    """The run's lease, which calls wait for. See `RunLease`."""

    @property
    def lost(self) -> RunHeld | None: ...

    @property
    def is_confirmed(self) -> bool: ...

    @property
    def is_silent(self) -> bool: ...


class CallQueue:
    def __init__(self, invoke_per_s: float, stop_per_s: float, calls_per_s: float | None = None) -> None:
        """`calls_per_s` limits invokes and stops together, for a runtime that counts them in one quota."""
        self._invokes = AdaptiveRate(invoke_per_s)
        self._polls = AdaptiveRate(invoke_per_s)
        # Polls are invokes too: they share the quota, but a refused session says nothing about the open ones.
        self._invokes_and_polls = TokenBucket(invoke_per_s)
        self._stops = AdaptiveRate(stop_per_s)
        self._shared = AdaptiveRate(calls_per_s) if calls_per_s is not None else None
        self.free_slots = math.inf
        # None if calls need no lease.
        self.lease: Lease | None = None
        # Heaps of waiting calls: negative priority, order of arrival, and the future that admits the call.
        self._waiting: dict[CallKind, list[tuple[int, int, asyncio.Future[None]]]] = {call: [] for call in CallKind}
        self._arrivals = count()
        self._polled_last = False
        self._timer: asyncio.TimerHandle | None = None
        self._has_backlog: Callable[[], bool] = lambda: False
        # Calls admitted in this turn of the event loop.
        self._admitted = 0

    @classmethod
    def from_config(cls, rates: RuntimeConfig) -> Self:
        return cls(rates.invoke_per_s, rates.stop_per_s, rates.calls_per_s)

    def yield_to(self, has_backlog: Callable[[], bool]) -> None:
        """Slow calls down while `has_backlog`, which returns whether results wait."""
        self._has_backlog = has_backlog

    @property
    def invoke_per_s(self) -> float:
        """Return how many invokes are admitted per second at most, at this moment."""
        return min(rate.rate for rate in self._rates(CallKind.INVOKE))

    @property
    def polls_per_s(self) -> float:
        """Return how many last polls are admitted per second at most, at this moment."""
        return min(rate.rate for rate in self._rates(CallKind.LAST_POLL))

    async def admit(self, call: CallKind, priority: int = 0) -> None:
        """Wait until a call of this kind may be sent.

        Raises:
            RunHeld: another manager has taken the run over.
            RuntimeCallError: a stop has waited for the run's lease for minutes, because S3 does not answer.
        """
        turn = asyncio.get_running_loop().create_future()
        heappush(self._waiting[call], (-priority, next(self._arrivals), turn))
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                # The call was admitted and cancelled in the same turn.
                self.give_back(call)
            else:
                self._serve()
            raise

    def give_back(self, call: CallKind) -> None:
        """Give back the turn of a call that is not sent."""
        for rate in self._rates(call):
            rate.give_back()
        self.change_slots(call is CallKind.START)

    def change_slots(self, free: float) -> None:
        """Free this many slots, or take them if the number is negative."""
        self.free_slots += free
        self._serve()

    @contextmanager
    def track(self, call: CallKind, tally: CallTally) -> Iterator[None]:
        """Report the outcome of the call in this block to its rate and to the step's tally."""
        sent_at = asyncio.get_running_loop().time()
        try:
            yield
        except (OutcomeUnknown, LeaseUnconfirmed):
            # The runtime has neither granted nor refused the call.
            raise
        except RuntimeCallError as error:
            if error.slow_down:
                self._refused(call, error, sent_at, tally)
            else:
                self._granted(call, sent_at, tally)
            raise
        else:
            self._granted(call, sent_at, tally)

    def _refused(self, call: CallKind, error: RuntimeCallError, sent_at: float, tally: CallTally) -> None:
        rate, now = self._adaptive(call), asyncio.get_running_loop().time()
        if rate.rate == rate.ceiling:
            # Log once each time the rate drops below its ceiling.
            what = "stops" if call in _STOPS else "polls" if call in _POLLS else "invokes"
            log.warning("the runtime refuses %s (%s): they slow down and are retried", what, error)
        rate.refused(sent_at, now, error.retry_after_s)
        tally.refused(now)
        self._serve()

    def _granted(self, call: CallKind, sent_at: float, tally: CallTally) -> None:
        if self._adaptive(call).granted(sent_at):
            self._serve()
        tally.granted(asyncio.get_running_loop().time())

    def _rates(self, call: CallKind) -> tuple[TokenBucket, ...]:
        own: tuple[TokenBucket, ...] = (self._stops,)
        if call not in _STOPS:
            own = (self._polls if call in _POLLS else self._invokes, self._invokes_and_polls)
        return own if self._shared is None else (*own, self._shared)

    def _adaptive(self, call: CallKind) -> AdaptiveRate:
        """Return the rate that adapts to responses. A quota of new or active sessions may refuse an invoke, but no
        stop; only the quota of calls refuses a stop."""
        if call in _STOPS:
            return self._shared or self._stops
        return self._polls if call in _POLLS else self._invokes

    def _serve(self) -> None:
        """Admit the calls that are due, as far as this turn of the event loop allows, and set a timer for the next
        one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self.lease is not None and not self.lease.is_confirmed:
            self._refuse_without(self.lease)
        while (dues := self._dues(now)) and min(dues.values()) == 0:
            if self._admitted == _PER_TURN:
                # `_next_turn` continues.
                return
            if not self._admitted:
                loop.call_later(_PAUSE_S if self._has_backlog() else 0, self._next_turn)
            self._admitted += 1
            call = min((call for call in dues if dues[call] == 0), key=self._place)
            for rate in self._rates(call):
                rate.take(now)
            self.free_slots -= call is CallKind.START
            if call is CallKind.POLL or call in _INVOKES:
                self._polled_last = call is CallKind.POLL
            heappop(self._waiting[call])[-1].set_result(None)
        if dues:
            self._timer = loop.call_later(min(dues.values()), self._serve)

    def _refuse_without(self, lease: Lease) -> None:
        """Refuse all calls of a lost run. While S3 is silent, refuse stops, for which the end of a step waits."""
        for call, waiting in self._waiting.items():
            error: RolloutBackendError | None = lease.lost
            if error is None and lease.is_silent and call in _STOPS:
                error = RuntimeCallError("S3 does not answer, so another manager may have taken the run over")
            if error is not None:
                for *_, turn in waiting:
                    if not turn.done():
                        turn.set_exception(error)

    def _dues(self, now: float) -> dict[CallKind, float]:
        """Return the seconds until the next waiting call of each kind may be sent."""
        least = 0.0 if self.lease is None or self.lease.is_confirmed else _LEASE_PAUSE_S
        dues = {}
        for call, waiting in self._waiting.items():
            # Skip waiters that were cancelled or refused.
            while waiting and waiting[0][-1].done():
                heappop(waiting)
            if waiting and (call is not CallKind.START or self.free_slots >= 1):
                dues[call] = max(least, *(rate.due(now) for rate in self._rates(call)))
        return dues

    def _place(self, call: CallKind) -> tuple[int, int, int]:
        """Return the sort key of the next waiting call of a kind. Both kinds of invokes have one order."""
        after_invokes = call is CallKind.POLL and self._polled_last
        order = CallKind.START if after_invokes else CallKind.INVOKE if call in _INVOKES else call
        priority, arrival, _ = self._waiting[call][0]
        return order, priority, arrival

    def _next_turn(self) -> None:
        self._admitted = 0
        self._serve()


class Slot:
    """A rollout's place among the sessions of a run, taken with its first admitted invoke and freed on exit."""

    def __init__(self, queue: CallQueue, priority: int) -> None:
        self._queue = queue
        self._priority = priority
        self._taken = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._taken:
            self._taken = False
            self._queue.change_slots(1)

    def take(self) -> None:
        """Take a slot for a session that runs already, even if none is free."""
        self._taken = True
        self._queue.change_slots(-1)

    async def admit_invoke(self) -> None:
        """Wait until the rollout's next invoke may be sent."""
        await self._queue.admit(CallKind.INVOKE if self._taken else CallKind.START, self._priority)
        self._taken = True
