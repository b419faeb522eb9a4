"""The queue of calls in virtual time: who is admitted when."""

import asyncio

import pytest

from rollout_backend.config import HttpConfig
from rollout_backend.core.ledger import CallTally
from rollout_backend.dispatch.call_queue import CallKind, CallQueue
from rollout_backend.errors import InvokeRejected, OutcomeUnknown, QuotaExceeded, RuntimeUnavailable, Throttled
from rollout_backend.simulation.clock import VirtualLoop


def play(work):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def now() -> float:
    return asyncio.get_running_loop().time()


async def admitted(queue: CallQueue, call: CallKind, count: int, into: list) -> None:
    async def one():
        await queue.admit(call)
        into.append((call, round(now(), 3)))

    await asyncio.gather(*(one() for _ in range(count)))


async def refuse(queue: CallQueue, call: CallKind = CallKind.INVOKE, error: Exception | None = None) -> None:
    with pytest.raises(type(error or Throttled("429"))), queue.track(call, CallTally()):
        raise error or Throttled("429")


def test_calls_wait_for_their_rate_in_order():
    async def work():
        queue, order = CallQueue(invoke_per_s=2, stop_per_s=100), []
        await admitted(queue, CallKind.INVOKE, 5, order)
        return [at for _, at in order]

    assert play(work()) == [0, 0, 0.5, 1, 1.5]


def test_cancelled_waiters_give_their_places_back():
    async def work():
        queue = CallQueue(invoke_per_s=1, stop_per_s=1)
        await queue.admit(CallKind.INVOKE)
        waiting = [asyncio.create_task(queue.admit(CallKind.INVOKE)) for _ in range(100)]
        await asyncio.sleep(0.5)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await queue.admit(CallKind.INVOKE)
        return now()

    assert play(work()) == pytest.approx(1.0)


def test_a_waiter_that_is_admitted_and_cancelled_at_once_gives_its_place_back():
    async def work():
        queue = CallQueue(invoke_per_s=1, stop_per_s=1)
        await queue.admit(CallKind.INVOKE)
        waiting = asyncio.create_task(queue.admit(CallKind.INVOKE))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(1.0, waiting.cancel)  # right after the queue's own timer
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await queue.admit(CallKind.INVOKE)
        return now()

    assert play(work()) == pytest.approx(1.0)


def test_a_decrease_reaches_those_that_wait_already():
    async def work():
        queue, order = CallQueue(invoke_per_s=10, stop_per_s=10), []
        await admitted(queue, CallKind.INVOKE, 10, [])
        waiting = asyncio.create_task(admitted(queue, CallKind.INVOKE, 2, order))
        await asyncio.sleep(0)
        await refuse(queue)
        await waiting
        return [at for _, at in order]

    assert play(work()) == [0.2, 0.4]


def test_an_increase_reaches_those_that_wait_already():
    async def work():
        queue = CallQueue(invoke_per_s=8, stop_per_s=8)
        for _ in range(4):
            await refuse(queue)
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(queue.admit(CallKind.INVOKE))  # due in about a second
        await asyncio.sleep(0)
        for _ in range(200):
            with queue.track(CallKind.INVOKE, CallTally()):
                pass
        await waiting
        return now()

    assert play(work()) < 0.5


def test_stops_of_finished_rollouts_go_before_those_of_earlier_takes():
    async def work():
        queue, order = CallQueue(invoke_per_s=10, stop_per_s=1), []
        await queue.admit(CallKind.STOP)
        earlier = asyncio.create_task(admitted(queue, CallKind.STOP_EARLIER, 3, order))
        await asyncio.sleep(0.1)
        await admitted(queue, CallKind.STOP, 2, order)
        await earlier
        return [call for call, _ in order]

    assert play(work()) == [CallKind.STOP, CallKind.STOP, *[CallKind.STOP_EARLIER] * 3]


def test_stops_do_not_delay_invokes_where_each_kind_has_its_own_quota():
    async def work():
        queue, order = CallQueue(invoke_per_s=10, stop_per_s=1), []
        stops = asyncio.create_task(admitted(queue, CallKind.STOP_EARLIER, 50, []))
        await asyncio.sleep(0.1)
        await admitted(queue, CallKind.INVOKE, 10, order)
        stops.cancel()
        return [at for _, at in order]

    assert play(work()) == [0.1] * 10


def test_in_a_shared_quota_both_kinds_together_keep_to_it_and_stops_go_first():
    async def work():
        queue, order = CallQueue(invoke_per_s=100, stop_per_s=100, calls_per_s=4), []
        await admitted(queue, CallKind.INVOKE, 4, [])
        kinds = (CallKind.STOP_EARLIER, CallKind.INVOKE, CallKind.STOP)
        await asyncio.gather(*(admitted(queue, call, 4, order) for call in kinds))
        return order

    order = play(work())
    assert [call for call, _ in order] == [*[CallKind.STOP] * 4, *[CallKind.INVOKE] * 4, *[CallKind.STOP_EARLIER] * 4]
    assert [at for _, at in order] == [0.25 * n for n in range(1, 13)]


@pytest.mark.parametrize(
    ("call", "error", "lowered"),
    [
        (CallKind.INVOKE, Throttled("429"), True),
        (CallKind.INVOKE, QuotaExceeded("402"), True),
        (CallKind.INVOKE, RuntimeUnavailable("503"), True),
        (CallKind.INVOKE, InvokeRejected("424", reason="container_error"), False),
        (CallKind.INVOKE, OutcomeUnknown("cut"), False),
    ],
)
def test_which_answers_lower_the_rate(call, error, lowered):
    async def work():
        queue = CallQueue(invoke_per_s=2, stop_per_s=2)
        await admitted(queue, call, 2, [])
        await refuse(queue, call, error)
        await queue.admit(call)
        return now()

    assert play(work()) == pytest.approx(1.0 if lowered else 0.5)


def test_a_refused_invoke_does_not_slow_stops_down():
    """It may have met the quota of new sessions, which only stops relieve."""

    async def work():
        queue, order = CallQueue(invoke_per_s=100, stop_per_s=100, calls_per_s=4), []
        for _ in range(8):
            await refuse(queue, error=QuotaExceeded("402"))
            await asyncio.sleep(0.01)
        await admitted(queue, CallKind.STOP, 8, order)
        return order[-1][1]

    assert play(work()) == pytest.approx(1.0, abs=0.1)


def test_the_settings_name_its_rates():
    async def work():
        config = HttpConfig(url="http://agents", invoke_per_s=5, stop_per_s=7, calls_per_s=1)
        queue, order = CallQueue.from_config(config), []
        await admitted(queue, CallKind.INVOKE, 3, order)
        return order[-1][1]

    assert play(work()) == 2


def test_the_tally_tells_what_was_granted_between_the_first_refusal_and_the_last():
    tally = CallTally()
    for at in range(5):
        tally.granted(at)
    assert (tally.refusals, tally.granted_per_s) == (0, None)
    for at in (10.0, 20.0):
        tally.refused(at)
        for n in range(40):
            tally.granted(at + n / 10)
    assert (tally.refusals, tally.seconds, tally.granted_per_s) == (2, 10.0, 4.0)
