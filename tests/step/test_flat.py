"""A long run holds no more at its end than at its beginning."""

import asyncio
import gc
import logging
import os
import weakref
from collections import Counter

from agent_wrapper.contract import Rollout
from rollout_backend.core.ledger import Ledger, LedgerEntry
from rollout_backend.step.step import Step
from step_bench import Agents, only

STEPS = 25


def held() -> dict[str, int]:
    """Count the objects, tasks and open files of this process."""
    gc.collect()
    kinds = Counter(type(each) for each in gc.get_objects())
    found = {kind.__name__: kinds[kind] for kind in (Step, Ledger, LedgerEntry, Rollout, asyncio.Event)}
    return {**found, "tasks": len(asyncio.all_tasks()), "files": len(os.listdir("/proc/self/fd"))}


async def test_many_steps_leave_no_more_than_a_few(open_bench, caplog):
    settings = ("group.size=4", "group.oversample=1", "group.straggler_after=0.9")
    bench = await open_bench(*settings, "collect.list_after_idle_s=0.05", "queue.wait_s=0")
    steps: list[weakref.ref[Step]] = []

    # One rollout is lost, one is found only by listing, the others complete.
    behave = only("a.0", Agents.lose, only("a.1", Agents.write_unannounced))

    async def run(first: int, last: int) -> dict[str, int]:
        for number in range(first, last):
            step = bench.step("a", number=number, behave=behave)
            steps.append(weakref.ref(step))
            assert (await step.run()).report.balanced
            bench.forget()
            bench.kept.clear()
            del step, bench.ledger
        return held()

    before = await run(0, 5)  # until connections and caches are filled
    caplog.set_level(logging.DEBUG, logger="rollout_backend")
    caplog.clear()
    after = await run(5, STEPS)
    lines = [record for record in caplog.records if record.name.startswith("rollout_backend")]
    caplog.clear()
    assert [ref() for ref in steps] == [None] * STEPS
    spare = {"Event": 10, "tasks": 10, "files": 10}  # other tests of this process may have left some
    spare |= {"LedgerEntry": 1, "Ledger": 1}  # the circuit breaker holds the last loss, if no result arrived after it
    more = {kind: after[kind] - count for kind, count in before.items() if after[kind] > count + spare.get(kind, 0)}
    assert more == {}, "more is held after many steps than after five"
    assert len(lines) <= STEPS, "a step without faults logs at most one line"
    buffer, dispatcher = bench.services.buffer, bench.services.dispatcher
    assert buffer._sinks == {}
    assert dispatcher.slots._value == bench.config.runtime.max_sessions
    assert not bench.agents.sessions
