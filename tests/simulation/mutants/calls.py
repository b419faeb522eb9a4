"""Variants that admit calls in another order, above their rates, or wait for them without a limit."""

from __future__ import annotations

from unittest.mock import patch

from rollout_backend.run.dispatch.call_queue import CallKind, CallQueue
from rollout_backend.run.dispatch.dispatcher import TimedCalls
from rollout_backend.run.dispatch.rate_limiter import AdaptiveRate, TokenBucket
from tests.simulation.mutants.registry import Patch, all_of, mutant

_admit = CallQueue.admit


@mutant
def rates_ignored() -> Patch:
    """A call is always due."""
    return all_of(*(patch.object(rate, "due", lambda self, now: 0.0) for rate in (TokenBucket, AdaptiveRate)))


@mutant
def shared_quota_ignored() -> Patch:
    """Invokes and stops each have a quota, although the account counts them in one."""
    begin = CallQueue.__init__
    return patch.object(CallQueue, "__init__", lambda self, invokes, stops, _=None: begin(self, invokes, stops))


@mutant
def starts_before_stops() -> Patch:
    """New sessions precede stops of finished ones."""

    async def broken(self: CallQueue, call: CallKind, priority: int = 0) -> None:
        await _admit(self, CallKind.STOP_EARLIER if call is CallKind.STOP else call, priority)

    return patch.object(CallQueue, "admit", broken)


@mutant
def priorities_ignored() -> Patch:
    """Rollouts start in the order in which they were planned."""

    async def broken(self: CallQueue, call: CallKind, priority: int = 0) -> None:
        await _admit(self, call)

    return patch.object(CallQueue, "admit", broken)


@mutant
def stops_limited_like_invokes() -> Patch:
    """A stop without an answer is awaited for as long as an invoke, although it could be repeated."""
    begin = TimedCalls.__init__
    return patch.object(
        TimedCalls, "__init__", lambda self, runtime, invoke_s, _: begin(self, runtime, invoke_s, invoke_s)
    )


@mutant
def calls_without_limit() -> Patch:
    """An invoke or a stop ends only when the runtime answers."""
    begin = TimedCalls.__init__
    return patch.object(TimedCalls, "__init__", lambda self, runtime, *limits_s: begin(self, runtime, 1e9, 1e9))
