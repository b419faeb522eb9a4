"""A long run holds no more at its end than at its beginning: what a step has held goes with it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import weakref
from collections import Counter

from agent_wrapper.contract import Outcome, Rollout
from rollout_backend.core.ledger import Ledger, LedgerEntry
from rollout_backend.step.step import Step

STEPS = 25


def held() -> dict[str, int]:
    """What there is of everything that steps make, in this process."""
    gc.collect()
    kinds = Counter(type(each) for each in gc.get_objects())
    found = {kind.__name__: kinds[kind] for kind in (Step, Ledger, LedgerEntry, Rollout, asyncio.Event)}
    return {
        **found,
        "tasks": len(asyncio.all_tasks()),
        "files": len(os.listdir("/proc/self/fd")),
    }


async def test_many_steps_leave_no_more_than_a_few(open_bench, caplog):
    settings = ("group.size=4", "group.oversample=1", "group.straggler_after=0.9")
    bench = await open_bench(*settings, "collect.list_after_idle_s=0.2", "queue.wait_s=0")

    async def behave(agents, request):
        """Each class that ends by itself, and one that is found by listing only."""
        match request.rollout_id.partition(".")[2]:
            case "0":
                await agents.fail(request, Outcome.INFRA_ERROR)
            case "1":
                await agents.put(request, agents.result(request).encode())
            case _:
                await agents.complete(request)

    bench.agents.behave = behave
    steps: list[weakref.ref[Step]] = []

    async def one(number):
        step = bench.step("a", number=number)
        steps.append(weakref.ref(step))
        result = await step.run()
        assert result.report.balanced
        bench.agents.requests.clear()
        bench.agents.stopped.clear()
        bench.revoked.clear()
        bench.kept.clear()

    for number in range(5):  # connections and caches come up
        await one(number)
    before = held()
    caplog.set_level(logging.DEBUG, logger="rollout_backend")
    caplog.clear()
    for number in range(5, STEPS):
        await one(number)
    lines = [record for record in caplog.records if record.name.startswith("rollout_backend")]
    caplog.clear()
    after = held()
    assert [ref() for ref in steps] == [None] * STEPS
    spare = {"Event": 10, "tasks": 10, "files": 10}  # other tests of this process may have left things, so: no more
    more = {kind: after[kind] - count for kind, count in before.items() if after[kind] > count + spare.get(kind, 0)}
    assert more == {}, "more is held after many steps than after five"
    assert len(lines) <= STEPS, "a step in which nothing is amiss has next to nothing to say"
    buffer, dispatcher = bench.services.buffer, bench.services.dispatcher
    assert buffer._sinks == {}
    assert dispatcher.slots._value == bench.config.runtime.max_sessions
    assert not bench.agents.sessions
