"""Calls of a runtime whose adapter does not end them, in virtual time."""

import asyncio

import pytest

from rollout_backend.config.runtimes import HttpConfig
from rollout_backend.core.ledger import Ledger
from rollout_backend.errors import OutcomeUnknown, RuntimeConflict, RuntimeUnavailable, Throttled
from rollout_backend.run.dispatch.call_queue import CallQueue
from rollout_backend.run.dispatch.dispatcher import Dispatcher, TimedCalls
from rollout_backend.run.dispatch.rate_limiter import TokenBucket
from tests.simulation.clock import in_virtual_time


class Hung:
    async def invoke(self, session_id, payload):
        await asyncio.Event().wait()

    async def stop(self, session_id):
        await asyncio.Event().wait()

    def adopt(self, session_id, payload):
        """Nothing to adopt."""


@in_virtual_time
async def test_a_silent_adapter_costs_an_attempt_and_no_step():
    loop = asyncio.get_running_loop()
    dispatcher = Dispatcher(TimedCalls(Hung(), 60.0, 30.0), CallQueue(100, 100), max_sessions=1)
    with pytest.raises(OutcomeUnknown, match="did not end the invoke within 70 s"):
        await dispatcher.submit("session", b"x" * 10 * 1024**2)
    assert loop.time() == pytest.approx(70)
    ledger = Ledger(0, {}, lambda: 0.0, loop.time)
    assert not await dispatcher.close("session", ledger)
    assert loop.time() < 400


class SilentAfterOutage(Hung):
    """Refuses stops for a minute, leaves two without an answer, and grants the next."""

    def __init__(self):
        self.silences = 0

    async def stop(self, session_id):
        if asyncio.get_running_loop().time() < 58:
            raise RuntimeUnavailable("503")
        if self.silences < 2:
            self.silences += 1
            await asyncio.Event().wait()


@in_virtual_time
async def test_silent_stops_after_an_outage_leave_no_session_open():
    loop = asyncio.get_running_loop()
    config = HttpConfig(url="http://agents:8080")
    calls = TimedCalls(SilentAfterOutage(), config.invoke_limit_s, config.stop_limit_s)
    dispatcher = Dispatcher(calls, CallQueue(100, 100), max_sessions=1)
    assert await dispatcher.close("session", Ledger(0, {}, lambda: 0.0, loop.time))


class Slow(Hung):
    """Grants one stop in five seconds, and refuses those of one session for another reason."""

    def __init__(self):
        self.stopped = set()
        self.quota = TokenBucket(0.2)

    async def stop(self, session_id):
        if session_id == "busy":
            raise RuntimeConflict("another call is in progress")
        if not self.quota.try_take(asyncio.get_running_loop().time()):
            raise Throttled("slow down")
        self.stopped.add(session_id)


@in_virtual_time
async def test_a_runtime_that_throttles_stops_closes_all_sessions_in_the_end():
    loop = asyncio.get_running_loop()
    runtime, names = Slow(), [f"s{number}" for number in range(200)]
    dispatcher = Dispatcher(TimedCalls(runtime, 60.0, 30.0), CallQueue(100, 100), max_sessions=1)
    ledger = Ledger(0, {}, lambda: 0.0, loop.time)
    closed = await asyncio.gather(*(dispatcher.close(name, ledger) for name in [*names, "busy"]))
    assert closed == [True] * 200 + [False]
    assert runtime.stopped == {*names}
    assert [*ledger.unclosed_sessions] == ["busy"]
