"""A trainer that is killed and started again, in virtual time."""

import asyncio
import random

import pytest

from agent_wrapper.contract import Outcome
from rollout_backend.core.ledger import Phase
from rollout_backend.errors import LedgerError
from rollouts import make_ledger
from tests.simulation.agents import calls_of
from tests.simulation.faults import Faults
from tests.simulation.gateway import Journal
from tests.simulation.world import World


@pytest.fixture(autouse=True)
def _fixed_jitter():
    random.seed(0)


@pytest.mark.parametrize("other_machine", [False, True])
def test_a_restart_stops_what_may_be_open_and_dispatches_meanwhile(play, make_run, make_config, other_machine):
    """The trainer is killed after it invoked 30 of 256 rollouts, and the restart cannot resume any in flight."""

    async def work():
        world = World(1, Faults())
        config = make_config(timeouts={"collection_s": 3600, "session_key_s": 5400})
        first = make_run(config, world)
        await first.killed_at(first.step(32), 5.0)
        invoked = len(world.audit.asked_for)
        world.gateway.journal = Journal("journal-2")
        if other_machine:
            world.run_directory.lose()
            world.audit.log_lost = True
        second = make_run(config, world, number=2)
        world.audit.started.clear()
        began, stopped = world.now(), len(world.audit.stopped)
        step = second.step(32)
        waits = []
        close = second.services.dispatcher.close

        async def timed(session_id, ledger, call):
            since = world.now()
            closed = await close(session_id, ledger, call)
            if session_id in step._sessions.known:  # one of this take
                waits.append(world.now() - since)
            return closed

        second.services.dispatcher.close = timed
        result = await step.run()
        first_minute = sum(at - began < 60 for at, _ in world.audit.started)
        stops_of_earlier = len(world.audit.stopped) - stopped - result.report.sessions_opened
        return result.report, invoked, stops_of_earlier, first_minute, max(waits)

    report, invoked, stops, first_minute, longest = play(work())
    assert report.outcomes[Outcome.COMPLETED] == report.planned == 256
    assert report.unclosed_sessions == {}
    assert stops <= (256 if other_machine else invoked)
    assert first_minute == 256 - report.resumed  # all at the configured rate: no stop delays an invoke
    assert longest < 10


@pytest.mark.parametrize("straggler_after", [None, 0.5])
def test_a_result_that_comes_while_a_step_begins_again_stays_settled(
    play, make_run, make_config, monkeypatch, straggler_after
):
    """It was published while no trainer was there, and is announced before the manifest is written."""

    async def work():
        world = World(1, Faults())

        async def agent(request):
            slow = request.rollout_id.endswith(".0.0") or request.rollout_id == "t0-1.0"
            await asyncio.sleep(200 if slow else 12)
            calls = world.gateway.journal.calls[request.session_id] = list(calls_of(request))
            return world.agents.make_result(request, Outcome.COMPLETED, calls=calls)

        monkeypatch.setattr(world.agents, "play", agent)
        config = make_config(group={"size": 4, "straggler_after": straggler_after, "straggler_factor": 1.0})
        first = make_run(config, world)
        await first.killed_at(first.step(2), 6.0)
        await asyncio.sleep(20)
        second = make_run(config, world, number=2)
        put, get, gets = second.store.put, second.store.get, []

        async def slow_put(key, body, *args, **more):
            await asyncio.sleep(5)
            return await put(key, body, *args, **more)

        async def counted_get(key, *args, **more):
            gets.append(key)
            return await get(key, *args, **more)

        second.store.put, second.store.get = slow_put, counted_get
        step = second.step(2)
        running = asyncio.create_task(step.run())
        await asyncio.sleep(20)
        revived = [e for e in step.ledger.entries.values() if e.outcome is not None and e.phase is not Phase.SETTLED]
        result = await running
        return result.report, revived, sum("/steps/" in key for key in gets)

    report, revived, gets = play(work())
    assert revived == []
    assert (report.resumed, report.reattached) == (7, 1)
    assert sum(report.outcomes.values()) == report.planned == 8
    assert gets <= 3 * 8


def test_books_in_which_a_settled_rollout_runs_do_not_balance():
    ledger = make_ledger(0)
    ledger.plan("a.0", "a")
    ledger.entries["a.0"].settle(Outcome.CANCELLED, "target_reached")
    ledger.entries["a.0"].adopt("session", 1, 0.0, 1.0)
    assert not ledger.entries["a.0"].adopted
    ledger.reconcile()
    ledger.entries["a.0"].phase = Phase.RUNNING
    with pytest.raises(LedgerError, match="1 settled rollouts left the phase settled"):
        ledger.reconcile()
