"""Work in the background that must not end, in virtual time."""

import asyncio
import logging

from rollout_backend.base.logs import report_failure
from rollout_backend.base.retry import repeat
from tests.simulation.clock import in_virtual_time


@in_virtual_time
async def test_work_that_must_not_end_is_repeated_and_its_failures_are_logged(caplog):
    calls = []

    async def work():
        calls.append(asyncio.get_running_loop().time())
        if len(calls) == 1:
            raise KeyError("a defect")
        await asyncio.Event().wait()

    task = asyncio.create_task(repeat(work, "watching"))
    await asyncio.sleep(60)
    assert calls == [0.0, 5.0]
    assert "watching failed; it is repeated" in caplog.text
    assert "KeyError: 'a defect'" in caplog.text
    task.cancel()


@in_virtual_time
async def test_the_failure_of_a_task_that_nobody_awaits_is_logged(caplog):
    async def fail():
        raise KeyError("a defect")

    kept = [asyncio.create_task(fail()), asyncio.create_task(asyncio.sleep(9)), asyncio.create_task(asyncio.sleep(0))]
    for task in kept:
        task.add_done_callback(report_failure("the work"))
    kept[1].cancel()
    await asyncio.sleep(1)
    [record] = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.ERROR, "the work has failed")
