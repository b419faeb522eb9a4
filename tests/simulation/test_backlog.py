"""A backlog of announcements while S3 is slow: each result is fetched once, and the rest waits in the queue."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace

import pytest

from agent_wrapper.contract import Announcement, result_key
from rollout_backend.config import CollectConfig
from rollout_backend.run.collect.buffer import RolloutBuffer
from rollout_backend.run.collect.fetcher import ResultDecoder
from tests.simulation.clock import VirtualLoop
from tests.simulation.faults import Faults
from tests.simulation.s3 import BUCKET, SimStore
from tests.simulation.sqs import SimQueue
from tests.simulation.trainer import Trainer
from tests.simulation.world import World


class Sink:
    step = 0

    def __init__(self):
        self.arrived = []
        self.repeated = 0

    def is_wanted(self, rollout_id, attempt=None):
        return rollout_id not in self.arrived

    def record_duplicate(self, rollout_id):
        self.repeated += 1

    def on_result(self, rollout, data, announced_at, failure_marker=False, fetch_s=0.0):
        self.arrived.append(rollout.rollout_id)

    def session_id(self, rollout_id, attempt):
        return "s"

    def pending(self):
        return []


class SlowStore(SimStore):
    def __init__(self, world, trainer, seconds):
        super().__init__(world.bucket, trainer)
        self.seconds = seconds
        self.gets = []

    async def get(self, key):
        self.gets.append(key)
        await asyncio.sleep(self.seconds)
        return key.encode()


@pytest.fixture(autouse=True)
def _any_object_is_a_result(monkeypatch):
    async def decode(decoder, data, name):
        return SimpleNamespace(rollout_id=name.rollout_id, attempt=1, session_id="s")

    monkeypatch.setattr(ResultDecoder, "decode", decode)


@pytest.mark.parametrize("seconds", [2.0, 30.0])
def test_a_backlog_at_slow_s3_is_fetched_once_and_waits_in_the_queue(seconds):
    count, fetches = 400, 32

    async def play():
        world, trainer, sink = World(1, Faults()), Trainer(1), Sink()
        store, queue = SlowStore(world, trainer, seconds), SimQueue(world.queue, trainer)
        buffer = RolloutBuffer("simulated", store, queue, fetches)
        buffer.attach(sink)
        for i in range(count):
            world.queue.send(Announcement(bucket=BUCKET, key=result_key("", "simulated", 0, f"t{i}.0")).encode())
        receiving = asyncio.create_task(buffer.run(2))
        most = 0
        while len(sink.arrived) < count:
            await asyncio.sleep(seconds / 4)
            most = max(most, sum(message.receives > 0 for message in world.queue.messages))
            if len(sink.arrived) == count // 2:
                world.bucket.objects = dict.fromkeys(store.gets, b"")
                await buffer.sweep(sink)  # finds what is in hand
        await asyncio.sleep(10)
        receiving.cancel()
        return world, store, sink, most

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        world, store, sink, most = runner.run(play())
    assert len(store.gets) == len(sink.arrived) == count
    assert (world.queue.messages, world.queue.dead_letters, sink.repeated) == ([], [], 0)
    assert most <= 3 * fetches


def test_results_are_fetched_once_by_whoever_hears_of_them_first():
    """By an announcement, its repetition and a listing at the same time."""

    async def play():
        world, trainer, sink = World(1, Faults()), Trainer(1), Sink()
        store = SlowStore(world, trainer, 5.0)
        buffer = RolloutBuffer("simulated", store, None, 4)
        world.bucket.objects = {result_key("", "simulated", 0, f"t{i}.0"): b"" for i in range(8)}
        await asyncio.gather(*(buffer.sweep(sink) for _ in range(3)))
        return store, sink

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        store, sink = runner.run(play())
    assert sorted(store.gets) == sorted(set(store.gets))
    assert len(sink.arrived) == 8


def test_slow_results_do_not_postpone_the_next_listing():
    """Each result takes 20 s, and announcements arrive throughout."""

    async def play():
        world, trainer, sink = World(1, Faults()), Trainer(1), Sink()
        store, listed = SlowStore(world, trainer, 20.0), []
        buffer = RolloutBuffer("simulated", store, SimQueue(world.queue, trainer), 4)
        keys = store.keys

        def recorded_keys(prefix):
            listed.append(world.now())
            world.bucket.objects[result_key("", "simulated", 0, f"t{len(listed)}.0")] = b""
            return keys(prefix)

        store.keys = recorded_keys
        listing = asyncio.create_task(buffer.list_when_idle(sink, CollectConfig(list_after_idle_s=10)))
        while len(listed) < 5:
            await asyncio.sleep(1)
            buffer.last_announcement_at = world.now()
        listing.cancel()
        return [later - earlier for earlier, later in pairwise(listed)]

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(play()) == pytest.approx([30.0] * 4, abs=1.0)
