"""A supervisor over a server that the test controls."""

import asyncio

import pytest

from rollout_backend.errors import StartupError
from rollout_backend.model.serving.server_process import ServerKilled
from rollout_backend.model.serving.supervisor import (
    Probing,
    RestartBudget,
    RestartLimits,
    Supervisor,
    SupervisorGroup,
)
from tests.simulation.clock import in_virtual_time

QUICK = Probing(interval_s=0.001, timeout_s=0.001, failures=2)


class Server(Supervisor):
    """Starts as `starts` says: None starts it, a text is why it does not start, or an error. `calls` records its
    life."""

    def __init__(self, *starts, max_restarts=1, probing=None):
        self.calls = []
        self.events = []
        self.ended = asyncio.Queue()
        self.alive = True
        self._starts = iter(starts)
        super().__init__("server", RestartLimits(max_restarts, 3600.0), self.events.append, probing)

    @property
    def kinds(self):
        return [event.kind for event in self.events]

    async def start_server(self):
        self.calls.append("start")
        if why := next(self._starts, None):
            raise StartupError(why) if isinstance(why, str) else why

    async def wait_ended(self):
        return await self.ended.get()

    async def is_responding(self):
        return self.alive

    async def log_tail(self):
        return "its last line"

    async def release(self):
        self.calls.append("release")


async def test_lost_server_is_released_and_restarted_until_the_budget_is_exhausted():
    server = Server()
    for why in ("ended with code 1", "ended with code 2"):
        server.ended.put_nowait(why)
    with pytest.raises(StartupError, match=r"server is gone after 1 restarts within 3600 s.*ended with code 2"):
        await server.run()
    assert server.calls == ["start", "release", "start", "release"]
    assert server.kinds == ["started", "died", "restarted", "died", "gave_up"]
    assert (server.restarts, server.serving, server.gave_up) == (1, False, True)


async def test_failed_first_start_counts_as_a_loss():
    server = Server("no room", OSError("no room"))
    with pytest.raises(StartupError, match="no room"):
        await server.run()
    assert server.kinds == ["died", "died", "gave_up"]
    assert server.tried.is_set()


@in_virtual_time
async def test_a_restart_that_fails_is_repeated_once_its_cause_may_be_over():
    server = Server(None, "no memory", "no memory", max_restarts=3)
    running = asyncio.create_task(server.run())
    server.ended.put_nowait("killed")
    await asyncio.sleep(29)
    assert server.kinds == ["started", "died", "died", "died"]
    await asyncio.sleep(2)
    assert server.kinds[-1] == "restarted"
    running.cancel()


async def test_a_server_that_is_killed_before_it_is_up_is_restarted_within_its_budget():
    server = Server(ServerKilled("killed"))
    await server.start()
    assert (server.calls, server.kinds) == (["start", "release", "start"], ["died", "restarted"])
    assert (server.restarts, server.serving) == (1, True)
    with pytest.raises(StartupError, match="killed again"):
        await Server(ServerKilled("killed"), ServerKilled("killed again")).start()


@in_virtual_time
async def test_each_restart_counts_for_the_length_of_the_window():
    budget = RestartBudget(RestartLimits(2, 60.0))
    budget.spend()
    await asyncio.sleep(10)
    budget.spend()
    assert budget.wait_s() == 50
    await asyncio.sleep(50)
    assert budget.wait_s() == 0


async def test_server_that_does_not_answer_probes_is_lost():
    server = Server(max_restarts=0, probing=QUICK)
    server.alive = False
    with pytest.raises(StartupError, match=r"did not answer any more\. its last line"):
        await server.run()


async def test_first_failure_ends_the_group():
    group, server, other = SupervisorGroup(), Server(max_restarts=0), Server()
    group.add(other)
    group.add(server)
    await group.run_until(other.tried.wait())
    await group.run_until(server.tried.wait())
    server.ended.put_nowait("ended with code 1")
    with pytest.raises(StartupError, match="ended with code 1"):
        await group.failed()
    assert other.serving
    await group.stop()


async def test_bug_during_the_first_starts_is_raised():
    group, server = SupervisorGroup(), Server()
    server.start_server = lambda: 1 / 0
    group.add(server)
    with pytest.raises(ZeroDivisionError):
        await group.run_until(asyncio.Event().wait())
    await group.stop()
