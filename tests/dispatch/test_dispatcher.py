"""Calls of a runtime whose adapter does not end them, in virtual time."""

import asyncio

import pytest

from rollout_backend.core.ledger import Ledger
from rollout_backend.dispatch.call_queue import CallQueue
from rollout_backend.dispatch.dispatcher import Dispatcher, TimedCalls
from rollout_backend.errors import OutcomeUnknown
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
    dispatcher = Dispatcher(TimedCalls(Hung(), 60.0), CallQueue(100, 100), max_sessions=1)
    with pytest.raises(OutcomeUnknown, match="did not end the invoke within 70 s"):
        await dispatcher.submit("session", b"x" * 10 * 1024**2)
    assert loop.time() == pytest.approx(70)
    ledger = Ledger(0, {}, lambda: 0.0, loop.time)
    assert not await dispatcher.close("session", ledger)
    assert loop.time() < 700
