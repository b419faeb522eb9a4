"""Admit calls to the runtime by priority and at the granted rates. A run has one queue for all of them.

Invariants:

- a call is sent only after it was admitted, and its response is reported to the rate that admitted it;
- calls that finish rollouts precede calls that start them. Polls and new sessions take turns, because a poll of an
  agent that still runs finishes nothing; the last poll before a rollout is given up precedes every call;
- refused invokes slow down neither polls nor stops;
- a cancelled waiter leaves the queue and gives its place to the next one;
- a rate change also applies to calls that already wait: no waiter sleeps for a time computed before the change;
- results come first: one turn of the event loop, which also receives them, admits at most `_PER_TURN` calls. While
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
from rollout_backend.errors import OutcomeUnknown, RuntimeCallError
from rollout_backend.run.dispatch.rate_limiter import AdaptiveRate, TokenBucket

log = logging.getLogger(__name__)

# Preparing and sending an invoke takes 0.3 ms.
_PER_TURN = 2
# With a backlog of results, 100 calls per second continue, so that no backlog stops a run.
_PAUSE_S = 0.02


class CallKind(IntEnum):
    """The kinds of calls, in the order of their priority, except that `POLL` and `INVOKE` take turns.

    `STOP` closes the session of a settled rollout, and `STOP_EARLIER` one that an earlier execution may have left
    open. `VERIFY` starts the verifier of a result. A poll is an invoke of an open session, which asks for its result:
    `LAST_POLL` before its rollout ends without one.
    """

    LAST_POLL = 0
    STOP = 1
    VERIFY = 2
    POLL = 3
    INVOKE = 4
    STOP_EARLIER = 5


_POLLS = (CallKind.LAST_POLL, CallKind.POLL)
_STOPS = (CallKind.STOP, CallKind.STOP_EARLIER)
_AFTER_AN_INVOKE = tuple(CallKind)
_AFTER_A_POLL = (
    CallKind.LAST_POLL, CallKind.STOP, CallKind.VERIFY, CallKind.INVOKE, CallKind.POLL, CallKind.STOP_EARLIER,
)  # fmt: skip


class CallQueue:
    def __init__(self, invoke_per_s: float, stop_per_s: float, calls_per_s: float | None = None) -> None:
        """`calls_per_s` limits invokes and stops together, for a runtime that counts them in one quota."""
        self._invokes = AdaptiveRate(invoke_per_s)
        self._polls = AdaptiveRate(invoke_per_s)
        # Polls are invokes too: they share the quota, but a refused session says nothing about the open ones.
        self._invokes_and_polls = TokenBucket(invoke_per_s)
        self._stops = AdaptiveRate(stop_per_s)
        self._shared = AdaptiveRate(calls_per_s) if calls_per_s is not None else None
        self._waiting: dict[CallKind, deque[asyncio.Future[None]]] = {call: deque() for call in CallKind}
        self._order = _AFTER_AN_INVOKE
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

    async def admit(self, call: CallKind) -> None:
        """Wait until a call of this kind may be sent."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting[call].append(turn)
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # The call was admitted and cancelled in the same turn.
                self.give_back(call)
            else:
                self._serve()
            raise

    def give_back(self, call: CallKind) -> None:
        """Give back the turn of a call that is not sent."""
        for rate in self._rates(call):
            rate.give_back()
        self._serve()

    @contextmanager
    def track(self, call: CallKind, tally: CallTally) -> Iterator[None]:
        """Report the outcome of the call in this block to its rate and to the step's tally."""
        sent_at = asyncio.get_running_loop().time()
        try:
            yield
        except OutcomeUnknown:
            # The call was neither granted nor refused.
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
        while (dues := self._dues(now)) and min(dues.values()) == 0:
            if self._admitted == _PER_TURN:
                # `_next_turn` continues.
                return
            if not self._admitted:
                loop.call_later(_PAUSE_S if self._has_backlog() else 0, self._next_turn)
            self._admitted += 1
            call = next(call for call in self._order if dues.get(call) == 0)
            for rate in self._rates(call):
                rate.take(now)
            if call in (CallKind.INVOKE, CallKind.POLL):
                self._order = _AFTER_AN_INVOKE if call is CallKind.INVOKE else _AFTER_A_POLL
            self._waiting[call].popleft().set_result(None)
        if dues:
            self._timer = loop.call_later(min(dues.values()), self._serve)

    def _dues(self, now: float) -> dict[CallKind, float]:
        """Return the seconds until the next waiting call of each kind may be sent."""
        dues = {}
        for call, waiting in self._waiting.items():
            # Skip cancelled waiters.
            while waiting and waiting[0].done():
                waiting.popleft()
            if waiting:
                dues[call] = max(rate.due(now) for rate in self._rates(call))
        return dues

    def _next_turn(self) -> None:
        self._admitted = 0
        self._serve()
