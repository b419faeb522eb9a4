"""Admit calls to the runtime by priority and at the granted rates. A run has one queue for all of them.

Invariants:

- a call is sent only after it was admitted, and its response is reported to the rate that admitted it;
- a cancelled waiter leaves the queue and gives its place to the next one;
- a rate change also applies to calls that already wait: no waiter sleeps for a time computed before the change;
- results come first: one turn of the event loop, on which they arrive too, admits at most `_PER_TURN` calls. While
  results wait because `collect.max_fetches` are being fetched, `_PAUSE_S` pass between two such turns.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Self

from rollout_backend.config import RuntimeConfig
from rollout_backend.core.ledger import CallTally
from rollout_backend.dispatch.rate_limiter import AdaptiveRate
from rollout_backend.errors import OutcomeUnknown, RuntimeCallError

log = logging.getLogger(__name__)

_PER_TURN = 2  # preparing and sending an invoke takes 0.3 ms
_PAUSE_S = 0.02  # 100 calls per second continue, so that no backlog of results stops a run


class CallKind(IntEnum):
    """The kinds of calls, in the order of their priority."""

    STOP = 0  # of a session whose rollout is settled: it frees a slot
    INVOKE = 1
    STOP_EARLIER = 2  # of a session that an earlier execution may have left open
    POLL = 3  # an invoke of an open session, which asks for its result


_INVOKES = (CallKind.INVOKE, CallKind.POLL)


class CallQueue:
    def __init__(self, invoke_per_s: float, stop_per_s: float, calls_per_s: float | None = None) -> None:
        """`calls_per_s` limits invokes and stops together, for a runtime that counts them in one quota."""
        self._invokes = AdaptiveRate(invoke_per_s)
        self._stops = AdaptiveRate(stop_per_s)
        self._shared = AdaptiveRate(calls_per_s) if calls_per_s is not None else None
        self._waiting: dict[CallKind, deque[asyncio.Future[None]]] = {call: deque() for call in CallKind}
        self._timer: asyncio.TimerHandle | None = None
        self._has_backlog: Callable[[], bool] = lambda: False
        self._admitted = 0  # in this turn of the event loop

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

    async def admit(self, call: CallKind) -> None:
        """Wait until a call of this kind may be sent."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting[call].append(turn)
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # admitted and cancelled in the same turn
                for rate in self._rates(call):
                    rate.give_back()
            self._serve()
            raise

    @contextmanager
    def track(self, call: CallKind, tally: CallTally) -> Iterator[None]:
        """Report the outcome of the call in this block to its rate and to the step's tally."""
        sent_at = asyncio.get_running_loop().time()
        try:
            yield
        except OutcomeUnknown:
            raise  # neither granted nor refused
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
        if rate.rate == rate.ceiling:  # log once each time the rate drops below its ceiling
            what = "invokes" if rate is self._invokes else "stops"
            log.warning("the runtime refuses %s (%s): they slow down and are retried", what, error)
        rate.refused(sent_at, now, error.retry_after_s)
        tally.refused(now)
        self._serve()

    def _granted(self, call: CallKind, sent_at: float, tally: CallTally) -> None:
        if self._adaptive(call).granted(sent_at):
            self._serve()
        tally.granted(asyncio.get_running_loop().time())

    def _rates(self, call: CallKind) -> tuple[AdaptiveRate, ...]:
        own = self._invokes if call in _INVOKES else self._stops
        return (own,) if self._shared is None else (own, self._shared)

    def _adaptive(self, call: CallKind) -> AdaptiveRate:
        """Return the rate that adapts to responses. A quota of new or active sessions may refuse an invoke, but no
        stop; only the quota of calls refuses a stop."""
        return self._invokes if call in _INVOKES else self._shared or self._stops

    def _serve(self) -> None:
        """Admit the calls that are due, as far as this turn of the event loop allows, and set a timer for the next
        one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        now, soonest = loop.time(), float("inf")
        for call, waiting in self._waiting.items():
            rates = self._rates(call)
            while waiting:
                if waiting[0].done():  # cancelled
                    waiting.popleft()
                    continue
                due = max(rate.due(now) for rate in rates)
                if due > 0:
                    soonest = min(soonest, due)
                    break
                if self._admitted == _PER_TURN:
                    return  # `_next_turn` comes
                if not self._admitted:
                    loop.call_later(_PAUSE_S if self._has_backlog() else 0, self._next_turn)
                self._admitted += 1
                for rate in rates:
                    rate.take(now)
                waiting.popleft().set_result(None)
        if soonest < float("inf"):
            self._timer = loop.call_later(soonest, self._serve)

    def _next_turn(self) -> None:
        self._admitted = 0
        self._serve()
