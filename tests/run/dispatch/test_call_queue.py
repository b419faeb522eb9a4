"""When the queue admits which calls, in virtual time."""

import asyncio

import pytest

from rollout_backend.core.ledger import CallTally
from rollout_backend.errors import (
    InvokeRejected,
    OutcomeUnknown,
    QuotaExceeded,
    RunHeld,
    RuntimeCallError,
    RuntimeUnavailable,
    Throttled,
)
from rollout_backend.run.dispatch.call_queue import CallKind, CallQueue, Slot
from tests.simulation.clock import in_virtual_time


def now() -> float:
    return asyncio.get_running_loop().time()


class Lease:
    """A lease that is not confirmed yet."""

    lost: RunHeld | None = None
    is_confirmed = is_silent = False


async def admitted(queue: CallQueue, call: CallKind, count: int, into: list | None = None) -> list[float]:
    """Let calls wait for the queue. Return when each was admitted; `into` gets their kinds in this order."""

    async def one():
        await queue.admit(call)
        if into is not None:
            into.append(call)
        return round(now(), 3)

    return await asyncio.gather(*(one() for _ in range(count)))


def refuse(queue: CallQueue, call: CallKind = CallKind.INVOKE, error: Exception | None = None) -> None:
    with pytest.raises(type(error or Throttled("429"))), queue.track(call, CallTally()):
        raise error or Throttled("429")


@in_virtual_time
async def test_calls_wait_for_their_rate_in_order():
    assert await admitted(CallQueue(invoke_per_s=2, stop_per_s=100), CallKind.INVOKE, 5) == [0, 0, 0.5, 1, 1.5]


@in_virtual_time
async def test_a_waiter_that_is_admitted_and_cancelled_at_once_gives_its_place_back():
    queue = CallQueue(invoke_per_s=1, stop_per_s=1)
    await queue.admit(CallKind.INVOKE)
    waiting = asyncio.create_task(queue.admit(CallKind.INVOKE))
    await asyncio.sleep(0)
    # In the same turn as the queue's own timer, and after it: the loop's clock is not that fine.
    asyncio.get_running_loop().call_later(1.0 + 5e-10, waiting.cancel)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await queue.admit(CallKind.INVOKE)
    assert now() == pytest.approx(1.0)


@in_virtual_time
async def test_a_decrease_affects_calls_that_wait_already():
    queue = CallQueue(invoke_per_s=10, stop_per_s=10)
    await admitted(queue, CallKind.INVOKE, 10)
    waiting = asyncio.create_task(admitted(queue, CallKind.INVOKE, 2))
    await asyncio.sleep(0)
    refuse(queue)
    assert await waiting == [0.2, 0.4]


@in_virtual_time
async def test_an_increase_affects_calls_that_wait_already():
    queue = CallQueue(invoke_per_s=8, stop_per_s=8)
    for _ in range(4):
        refuse(queue)
        await asyncio.sleep(0.01)
    waiting = asyncio.create_task(queue.admit(CallKind.INVOKE))  # due in about a second
    await asyncio.sleep(0)
    for _ in range(200):
        with queue.track(CallKind.INVOKE, CallTally()):
            pass
    await waiting
    assert now() < 0.5


@in_virtual_time
async def test_stops_of_finished_rollouts_precede_those_of_killed_trainers():
    queue, order = CallQueue(invoke_per_s=10, stop_per_s=1), []
    await queue.admit(CallKind.STOP)
    earlier = asyncio.create_task(admitted(queue, CallKind.STOP_EARLIER, 3, order))
    await asyncio.sleep(0.1)
    await admitted(queue, CallKind.STOP, 2, order)
    await earlier
    assert order == [CallKind.STOP, CallKind.STOP, *[CallKind.STOP_EARLIER] * 3]


@in_virtual_time
async def test_stops_do_not_delay_invokes_if_each_kind_has_its_own_quota():
    queue = CallQueue(invoke_per_s=10, stop_per_s=1)
    stops = asyncio.create_task(admitted(queue, CallKind.STOP_EARLIER, 50))
    await asyncio.sleep(0.1)
    assert await admitted(queue, CallKind.INVOKE, 10) == [0.1] * 10
    stops.cancel()


@in_virtual_time
async def test_both_kinds_together_keep_a_shared_quota_and_stops_come_first():
    queue, order = CallQueue(invoke_per_s=100, stop_per_s=100, calls_per_s=4), []
    await admitted(queue, CallKind.INVOKE, 4)
    kinds = (CallKind.STOP_EARLIER, CallKind.INVOKE, CallKind.STOP)
    times = await asyncio.gather(*(admitted(queue, call, 4, order) for call in kinds))
    assert order == [*[CallKind.STOP] * 4, *[CallKind.INVOKE] * 4, *[CallKind.STOP_EARLIER] * 4]
    assert sorted(at for of_kind in times for at in of_kind) == [0.25 * n for n in range(1, 13)]


@in_virtual_time
async def test_calls_that_waited_for_the_lease_keep_their_place():
    """For example while S3 did not answer: finished work still comes first, and then what has a higher priority."""
    queue, order = CallQueue(invoke_per_s=100, stop_per_s=100), []
    queue.lease = lease = Lease()

    async def call(kind: CallKind, priority: int = 0) -> None:
        await queue.admit(kind, priority)
        order.append((kind, priority))

    kinds = (CallKind.STOP_EARLIER, CallKind.START, CallKind.POLL, CallKind.STOP, CallKind.LAST_POLL)
    calls = [asyncio.create_task(call(kind)) for kind in kinds]
    calls.append(asyncio.create_task(call(CallKind.START, 7)))
    await asyncio.sleep(10)
    assert order == []
    lease.is_confirmed = True
    await asyncio.gather(*calls)
    assert order == [
        (CallKind.LAST_POLL, 0),
        (CallKind.STOP, 0),
        (CallKind.POLL, 0),
        (CallKind.START, 7),
        (CallKind.START, 0),
        (CallKind.STOP_EARLIER, 0),
    ]


@in_virtual_time
async def test_a_lost_run_refuses_all_calls_and_a_silent_s3_refuses_stops():
    queue = CallQueue(invoke_per_s=100, stop_per_s=100)
    queue.lease = lease = Lease()
    invoke, stop = (asyncio.create_task(queue.admit(kind)) for kind in (CallKind.INVOKE, CallKind.STOP))
    await asyncio.sleep(1)
    lease.is_silent = True
    with pytest.raises(RuntimeCallError, match="S3 does not answer"):
        await stop
    assert not invoke.done()
    lease.lost = RunHeld("taken")
    with pytest.raises(RunHeld):
        await invoke


@in_virtual_time
async def test_polls_and_new_sessions_take_turns_and_what_finishes_a_rollout_comes_first():
    queue, order = CallQueue(invoke_per_s=100, stop_per_s=100, calls_per_s=1), []
    await queue.admit(CallKind.INVOKE)
    kinds = (CallKind.INVOKE, CallKind.POLL, CallKind.VERIFY, CallKind.STOP, CallKind.LAST_POLL)
    await asyncio.gather(*(admitted(queue, call, 2, order) for call in kinds))
    first = [CallKind.LAST_POLL, CallKind.STOP, CallKind.VERIFY]
    turns = [CallKind.POLL, CallKind.INVOKE]
    assert order == [*(call for call in first for _ in range(2)), *turns, *turns]


async def start(queue, name, priority, order, hold):
    with Slot(queue, priority) as slot:
        await slot.admit_invoke()
        order.append(name)
        await hold.wait()


@in_virtual_time
async def test_the_rollout_of_the_highest_priority_gets_the_next_slot_and_call():
    queue, order = CallQueue(invoke_per_s=100, stop_per_s=1), []
    queue.free_slots, holds = 1, {name: asyncio.Event() for name in ("first", "low", "other", "high")}
    priorities = {"first": 0, "low": 0, "other": 0, "high": 7}
    rollouts = [asyncio.create_task(start(queue, name, priorities[name], order, holds[name])) for name in holds]
    for name in ("first", "high", "low", "other"):
        await asyncio.sleep(1)
        assert order[-1] == name, "none waits for a call alone, and equals start in order"
        holds[name].set()
    await asyncio.gather(*rollouts)
    assert queue.free_slots == 1


@in_virtual_time
async def test_a_start_without_a_slot_delays_neither_retries_nor_stops():
    queue, order = CallQueue(invoke_per_s=100, stop_per_s=100, calls_per_s=1), []
    queue.free_slots = 1
    with Slot(queue, 0) as slot:
        await slot.admit_invoke()
        waiting = asyncio.create_task(start(queue, "another", 9, order, asyncio.Event()))
        await asyncio.sleep(0)
        await asyncio.gather(slot.admit_invoke(), queue.admit(CallKind.STOP))
        assert (order, now()) == ([], 2)
    await asyncio.sleep(2)
    assert order == ["another"]
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert queue.free_slots == 1


@in_virtual_time
async def test_a_start_that_is_admitted_and_cancelled_at_once_gives_its_slot_back():
    queue = CallQueue(invoke_per_s=1, stop_per_s=1)
    queue.free_slots = 1
    waiting = asyncio.create_task(start(queue, "one", 0, [], asyncio.Event()))
    await asyncio.sleep(0)
    assert queue.free_slots == 0
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert queue.free_slots == 1


@in_virtual_time
async def test_stops_precede_starts_of_every_priority():
    queue, order = CallQueue(invoke_per_s=100, stop_per_s=100, calls_per_s=1), []
    await queue.admit(CallKind.INVOKE)
    starting = asyncio.create_task(start(queue, "high", 99, order, asyncio.Event()))
    await asyncio.sleep(0.5)
    await admitted(queue, CallKind.STOP, 2, order)
    assert order == [CallKind.STOP] * 2
    starting.cancel()


@pytest.mark.parametrize("call", [CallKind.POLL, CallKind.LAST_POLL, CallKind.STOP])
@in_virtual_time
async def test_refused_sessions_slow_down_no_call_that_finishes_rollouts(call):
    queue = CallQueue(invoke_per_s=10, stop_per_s=10)
    sessions = asyncio.create_task(admitted(queue, CallKind.INVOKE, 1000))
    for _ in range(8):
        refuse(queue, error=QuotaExceeded("402"))
        await asyncio.sleep(0.01)
    assert max(await admitted(queue, call, 20)) < 5
    sessions.cancel()


@in_virtual_time
async def test_a_refused_poll_slows_down_polls_alone():
    queue = CallQueue(invoke_per_s=10, stop_per_s=10)
    for _ in range(8):
        refuse(queue, CallKind.POLL)
        await asyncio.sleep(0.01)
    assert queue.invoke_per_s == 10
    assert queue.polls_per_s < 2


@in_virtual_time
async def test_a_turn_that_is_given_back_is_the_next_callers():
    queue = CallQueue(invoke_per_s=1, stop_per_s=1)
    await queue.admit(CallKind.POLL)
    waiting = asyncio.create_task(queue.admit(CallKind.INVOKE))
    await asyncio.sleep(0)
    queue.give_back(CallKind.POLL)
    await waiting
    assert now() == 0


@pytest.mark.parametrize(
    ("error", "lowered"),
    [
        (Throttled("429"), True),
        (QuotaExceeded("402"), True),
        (RuntimeUnavailable("503"), True),
        (InvokeRejected("424", reason="container_error"), False),
        (OutcomeUnknown("cut"), False),
    ],
)
@in_virtual_time
async def test_which_answers_lower_the_rate(error, lowered):
    queue = CallQueue(invoke_per_s=2, stop_per_s=2)
    await admitted(queue, CallKind.INVOKE, 2)
    refuse(queue, error=error)
    await queue.admit(CallKind.INVOKE)
    assert now() == pytest.approx(1.0 if lowered else 0.5)


@in_virtual_time
async def test_a_refused_invoke_does_not_slow_stops_down():
    """It may have met the quota of new sessions, which only stops relieve."""
    queue = CallQueue(invoke_per_s=100, stop_per_s=100, calls_per_s=4)
    for _ in range(8):
        refuse(queue, error=QuotaExceeded("402"))
        await asyncio.sleep(0.01)
    assert max(await admitted(queue, CallKind.STOP, 8)) == pytest.approx(1.0, abs=0.1)


@in_virtual_time
async def test_calls_go_on_slowly_while_results_wait_and_at_the_full_rate_after_that():
    waiting = [True]
    queue = CallQueue(invoke_per_s=10_000, stop_per_s=100)
    queue.yield_to(lambda: waiting[0])
    calls = asyncio.create_task(admitted(queue, CallKind.INVOKE, 300))
    await asyncio.sleep(1)
    waiting.clear()
    waiting.append(False)
    times = await calls
    assert sum(at <= 1 for at in times) == pytest.approx(100, abs=4)
    assert max(times) < 1.1


def test_the_tally_reports_the_rate_granted_between_the_first_refusal_and_the_last():
    tally = CallTally()
    for at in range(5):
        tally.granted(at)
    assert (tally.refusals, tally.granted_per_s) == (0, None)
    for at in (10.0, 20.0):
        tally.refused(at)
        for n in range(40):
            tally.granted(at + n / 10)
    assert (tally.refusals, tally.seconds, tally.granted_per_s) == (2, 10.0, 4.0)
