"""A long run holds no more at its end than at its beginning."""

import asyncio
import gc
import logging
import os
from collections import Counter
from collections.abc import Iterator

import pytest

from agent_wrapper.contract import ContractError, RolloutRequest
from rollout_backend.core.tasks import Task
from rollout_backend.errors import RuntimeUnavailable
from step_bench import Agents, only

STEPS = 25


def held() -> Counter[str]:
    """Count the objects of this project's classes, and the tasks and open files of this process."""
    kinds = (type(each) for each in gc.get_objects())
    ours = (kind for kind in kinds if str(kind.__module__).startswith(("rollout_backend.", "agent_wrapper.")))
    found = Counter(kind.__qualname__ for kind in ours)
    return found + Counter(tasks=len(asyncio.all_tasks()), files=len(os.listdir("/proc/self/fd")))


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """A result may be large, and a full collection may come only many steps later."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
async def test_many_steps_leave_no_more_than_a_few(open_bench, tmp_path, caplog):
    settings = ("group.size=4", "group.oversample=1", "group.straggler_after=0.9", f"output_dir={tmp_path}")
    bench = await open_bench(*settings, "collect.list_after_idle_s=0.05", "queue.wait_s=0")
    manager = bench.manager()
    # One rollout is lost, one is found only by listing, one has a second attempt, the others complete.
    bench.agents.behave = only("a.0", Agents.lose, only("a.1", Agents.write_unannounced))

    async def fail_once(request: RolloutRequest) -> None:
        if request.rollout_id == "a.2" and request.attempt == 1:
            raise RuntimeUnavailable("503")

    bench.agents.before = fail_once

    async def run(first: int, last: int) -> Counter[str]:
        for number in range(first, last):
            assert (await manager.collect([Task("a", {})], step=number)).report.balanced
            bench.forget()
            bench.kept.clear()
        return held()

    before = await run(0, 5)  # until connections and caches are filled
    caplog.set_level(logging.DEBUG, logger="rollout_backend")
    caplog.clear()
    after = await run(5, STEPS)
    lines = [
        record
        for record in caplog.records
        if record.name.startswith("rollout_backend") and record.levelno < logging.WARNING
    ]
    caplog.clear()
    grown = {kind: more for kind, more in (after - before).items() if more >= STEPS - 5}
    assert grown == {}, "each step leaves an object"
    assert len(lines) <= STEPS, "a step logs at most one line besides its faults"
    buffer, dispatcher = bench.services.buffer, bench.services.dispatcher
    assert buffer._sinks == {}
    assert dispatcher.calls.free_slots == bench.config.runtime.max_sessions
    assert not bench.agents.sessions


async def test_a_result_that_is_announced_again_after_its_step_changes_nothing(open_bench):
    bench = await open_bench()
    sinks = bench.services.buffer._sinks
    late = []

    async def complete(agents, request):
        late[:] = sinks.values()  # as a message that is being handled while the step ends
        await agents.complete(request)

    bench.agents.behave = complete
    await bench.manager().collect([Task("a", {})])
    assert not late[0].is_wanted("a.0")
    late[0].on_result(bench.kept[0], b"", None)
    late[0].on_invalid_result("a.0", ContractError("result", "it is cut"))
