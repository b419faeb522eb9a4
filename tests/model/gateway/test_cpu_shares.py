"""How sessions share the CPU time of a gateway. The time that passes is virtual, and so is what work costs."""

import asyncio
import gc
import sys
import threading
from concurrent.futures import wait
from itertools import count

import pytest

from builders import Clock
from rollout_backend.base.garbage_collection import exempt_loaded_objects
from rollout_backend.model.gateway import cpu_shares
from rollout_backend.model.gateway.cpu_shares import CpuShare, CpuShares, Worker, charge_to, charged_task

SESSIONS = 64


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def shares(clock):
    """Sleeping passes time."""

    async def sleep(seconds: float) -> None:
        clock.now += seconds

    made = CpuShares(lambda: SESSIONS, clock, sleep)
    yield made
    made.close()


def costs(monkeypatch, seconds: float) -> None:
    """Let each step take this many seconds of a thread's time."""
    numbers = count()
    monkeypatch.setattr(cpu_shares.time, "thread_time", lambda: seconds * next(numbers))


@pytest.mark.parametrize("unit_s", [0.02, 0.2])
async def test_a_session_uses_half_of_an_equal_part_in_the_long_run(shares, clock, monkeypatch, unit_s):
    costs(monkeypatch, unit_s)
    hostile, began, units = CpuShare(shares), clock.now, 200
    for _ in range(units):
        await hostile.run(lambda: None)
    used_s = units * unit_s
    assert used_s - 1 <= (clock.now - began) * 0.5 / SESSIONS <= used_s


async def test_a_session_of_a_few_seconds_is_never_delayed_and_one_never_waits_for_long(shares, clock, monkeypatch):
    costs(monkeypatch, 0.004)
    benign, began = CpuShare(shares), clock.now
    for _ in range(120):
        await benign.run(lambda: None)
    assert clock.now == began
    costs(monkeypatch, 100.0)
    await benign.run(lambda: None)
    await benign.run(lambda: None)
    assert clock.now == began + 30


async def test_a_session_among_few_has_a_larger_share_and_each_has_some(clock):
    assert [CpuShares(lambda n=n: n, clock).rate for n in (0, 1, 8, 100, 10_000)] == [0.5, 0.5, 0.0625, 0.005, 0.005]


async def test_many_small_requests_and_steps_on_the_event_loop_are_charged(shares, clock, monkeypatch):
    costs(monkeypatch, 0.05)
    share, began = CpuShare(shares), clock.now

    async def work() -> None:
        await charged_task(nothing())

    async def nothing() -> None:
        pass

    for _ in range(100):
        await share.enter(is_call=True)
        await charge_to(share, work())
    # A call has three steps, of which one is its task's.
    assert clock.now - began > 100 * 3 * 0.05 / shares.rate * 0.9
    costs(monkeypatch, 0.0)
    small, began = CpuShare(shares), clock.now
    for _ in range(100_000):
        await small.enter(is_call=True)
    assert clock.now - began > (100_000 * 0.00005 - 0.5) / shares.rate * 0.9


async def test_requests_that_are_not_counted_wait_for_a_limited_time(shares, clock):
    share, began = CpuShare(shares), clock.now
    for _ in range(500):
        await share.pace(0.2)
    assert clock.now == began
    for _ in range(100):
        await share.pace(0.2)
    assert clock.now == pytest.approx(began + 100 * 0.2, rel=0.1)


async def test_brief_work_counts_more_while_the_event_loop_is_busy(shares, clock, monkeypatch):
    async def requests_before_a_wait(busy: float) -> int:
        monkeypatch.setattr(cpu_shares.time, "thread_time", lambda: busy * clock.now)
        share, requests = CpuShare(shares), 0
        while True:
            clock.now += 0.0005
            before = clock.now
            await share.enter(is_call=True)
            if clock.now > before:
                return requests
            requests += 1

    assert await requests_before_a_wait(busy=0.6) > 9000 > 3000 > await requests_before_a_wait(busy=0.9)


@pytest.mark.parametrize("sessions", [2, 32, 64])
async def test_sessions_that_share_a_busy_event_loop_equally_never_wait(clock, monkeypatch, sessions):
    async def sleep(seconds: float) -> None:
        pytest.fail("a session waits")

    monkeypatch.setattr(cpu_shares.time, "thread_time", lambda: clock.now)
    shares = CpuShares(lambda: sessions, clock, sleep)
    each = [CpuShare(shares) for _ in range(sessions)]
    for number in range(100_000):
        clock.now += 0.0005
        await each[number % sessions].enter(is_call=True)
    shares.close()


async def test_an_error_and_a_cancellation_pass_through_charged_work(shares):
    share, cancelled = CpuShare(shares), []

    async def fails() -> None:
        raise KeyError

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(KeyError):
        await charge_to(share, fails())
    task = asyncio.create_task(charge_to(share, waits()))
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled == [True]


async def test_the_session_with_the_least_use_goes_first_and_a_session_waits_for_itself(clock):
    """A hostile session queues ten units of work, and each benign session waits for the one that runs only."""
    shares, done, going, go = CpuShares(lambda: SESSIONS, clock), [], threading.Event(), threading.Event()
    hostile, heavy, benign = (CpuShare(shares) for _ in range(3))
    hostile.charge(0.4)
    heavy.charge(0.3)

    def first() -> None:
        going.set()
        go.wait()

    running = asyncio.create_task(hostile.run(first))
    await asyncio.to_thread(going.wait)
    waiting = [asyncio.create_task(hostile.run(done.append, f"hostile {i}")) for i in range(10)]
    waiting.append(asyncio.create_task(heavy.run(done.append, "heavy")))
    waiting.append(asyncio.create_task(benign.run(done.append, "benign")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(running, *waiting)
    assert done == ["benign", "heavy", *(f"hostile {i}" for i in range(10))]
    shares.close()


async def test_work_that_has_not_begun_is_not_done_for_a_caller_that_left(clock):
    shares, done, going, go = CpuShares(clock=clock), [], threading.Event(), threading.Event()
    one, other = CpuShare(shares), CpuShare(shares)

    def first() -> None:
        going.set()
        go.wait()

    running = asyncio.create_task(one.run(first))
    await asyncio.to_thread(going.wait)
    left = [asyncio.create_task(each.run(done.append, "left")) for each in (one, other)]
    await asyncio.sleep(0)
    for each in left:
        each.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    go.set()
    await running
    await other.run(done.append, "other")
    await one.run(done.append, "one")
    assert done == ["other", "one"]
    shares.close()


def test_asking_whether_a_thread_is_busy_costs_the_same_however_many_units_wait():
    def calls_while_asking(waiting: int) -> int:
        worker, go, called = Worker("test"), threading.Event(), []
        jobs = [worker.submit(0.0, lambda: go.wait(60)) for _ in range(waiting)]
        sys.setprofile(lambda *event: called.append(event))
        try:
            busy = worker.is_busy
        finally:
            sys.setprofile(None)
        go.set()
        wait(jobs, 60)
        worker.close()
        assert busy
        return len(called)

    assert calls_while_asking(1000) == calls_while_asking(1)


def test_a_thread_is_free_once_its_units_have_ended_failed_or_been_cancelled():
    worker, go = Worker("test"), threading.Event()
    running = worker.submit(0.0, lambda: go.wait(60))
    failing, cancelled = worker.submit(0.0, lambda: 1 / 0), worker.submit(0.0, lambda: None)
    # A callback runs in the thread, before it does anything else.
    busy_after: list[bool] = []
    failing.add_done_callback(lambda _: busy_after.append(worker.is_busy))
    assert cancelled.cancel()
    assert worker.is_busy
    go.set()
    assert running.result(60)
    assert isinstance(failing.exception(60), ZeroDivisionError)
    last = worker.submit(0.0, lambda: None)
    last.result(60)
    assert (busy_after, worker.is_busy) == ([True], False)
    worker.close()


async def test_a_session_does_not_pay_for_collections_of_other_sessions_objects(shares, monkeypatch):
    now = threading.local()
    monkeypatch.setattr(cpu_shares.time, "thread_time", lambda: getattr(now, "s", 0.0))

    def passes(phase: str = "start", *_) -> None:
        now.s = getattr(now, "s", 0.0) + (phase == "start")

    callbacks, thresholds = [*gc.callbacks], gc.get_threshold()
    try:
        exempt_loaded_objects()
        gc.callbacks.append(passes)
        share = CpuShare(shares)

        async def collects() -> None:
            gc.collect()

        await charge_to(share, collects())
        await share.run(gc.collect)
        assert share.used_s == 0
        await share.run(passes)
        assert share.used_s > 0
    finally:
        gc.callbacks[:] = callbacks
        gc.set_threshold(*thresholds)


def test_a_session_that_owes_may_not_overtake_other_connections(monkeypatch):
    monkeypatch.setattr(cpu_shares, "_REQUEST_S", 5.0)
    share = CpuShare(CpuShares(lambda: 1, lambda: 0.0))
    assert [share.may_connect() for _ in range(2)] == [True, False]
