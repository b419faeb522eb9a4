"""With the agent's role, a container can write under other rollouts' keys. Such results never count."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from agent_wrapper.contract import Outcome, ResultName, failure_marker_key
from agent_wrapper.contract.codec import unpacked_size
from collect_bench import Run, Sink
from rollout_backend.errors import StoreError
from rollout_backend.model.rendering.segments import Completion, SegmentRecorder
from rollout_backend.run.collect.buffer import MAX_KEYS, RolloutBuffer
from rollout_backend.run.collect.fetcher import _LARGE_BYTES, ResultDecoder
from rollout_backend.run.collect.store import ResultStore
from rollouts import make_rollout

FORGED: dict[str, Callable[..., bytes]] = {
    "sampled": lambda make: make(session_id="made-up").encode(),
    "scored error": lambda make: make(outcome=Outcome.AGENT_ERROR, reward=0.0, session_id="made-up").encode(),
    "no session": lambda make: make(session_id="").encode(),
    "another rollout's session": lambda make: make(session_id="session-task-b.0").encode(),
}


def forged(run: Run, made: dict[str, Callable[..., bytes]]) -> dict[str, bytes]:
    """Return an object for each of these, by the rollout that it is forged for."""
    ids = [f"task-a.{i}" for i in range(len(made))]
    return {each: make(functools.partial(run.rollout, each)) for each, make in zip(ids, made.values(), strict=True)}


async def test_a_result_of_another_session_is_rejected_with_evidence(open_run):
    run = await open_run(queue=False)
    results = forged(run, FORGED)
    sink = Sink(*results)
    keys = [await run.put(run.key(rollout_id), body) for rollout_id, body in results.items()]
    assert await run.buffer.sweep(sink)
    assert sink.arrived == []
    assert {rollout_id: error.field for rollout_id, error in sink.rejected.items()} == dict.fromkeys(
        results, "session_id"
    )
    records = {record["what"]: record["reason"].partition(":")[0] for record in await run.quarantined()}
    assert records == dict.fromkeys(keys, "session_id")


FORGED_MARKERS: dict[str, Callable[..., bytes]] = {
    "of another session": lambda make: make(outcome=Outcome.INFRA_ERROR, session_id="made-up").encode(),
    "no loss": lambda make: make().encode(),
    "broken": lambda make: b"broken",
    "too large": lambda make: b"x" * 5000,
}


async def test_a_forged_failure_marker_is_quarantined_once_and_does_not_end_the_rollout(open_run):
    sink = Sink(*(f"task-a.{i}" for i in range(len(FORGED_MARKERS))))
    run = await open_run(sink, storage={"max_result_bytes": 4096})
    markers = forged(run, FORGED_MARKERS)
    keys = [
        await run.put(failure_marker_key("", run.run_id, 0, rollout_id, 1), body)
        for rollout_id, body in markers.items()
    ]
    for _ in range(2):
        for key in keys:
            await run.announce(key)
        await run.until_held(0)
    await run.buffer.sweep(sink)
    assert (sink.arrived, sink.rejected) == ([], {})
    assert sorted(record["what"] for record in await run.quarantined()) == sorted(keys)
    await run.store_(*(run.rollout(rollout_id) for rollout_id in markers))
    await run.buffer.sweep(sink)
    assert sink.ids == sorted(markers)


class Keys(ResultStore):
    """A bucket whose listing has extra keys, and whose reads can fail."""

    flood = 0
    listed = 0
    broken: str | None = None

    async def keys(self, prefix: str) -> Any:
        self.listed += 1
        for i in range(self.flood):
            yield f"{prefix}a{i}"
        async for key in super().keys(prefix):
            yield key

    async def get(self, key: str) -> bytes:
        if self.broken is not None and key.endswith(self.broken):
            raise StoreError("S3 does not answer")
        return await super().get(key)


async def test_a_flooded_prefix_does_not_hide_results(open_run, caplog):
    sink = Sink("task-a.0", "task-a.1", "task-a.2")
    run = await open_run(receive=False)
    store = Keys(run.store.config, run.store._s3, run.store._stack)
    buffer = RolloutBuffer(run.run_id, store, None, 4)
    await run.store_(run.rollout("task-a.0"))
    lost = run.rollout("task-a.1", outcome=Outcome.INFRA_ERROR)
    await run.put(failure_marker_key("", run.run_id, 0, "task-a.1", 1), lost.encode())
    store.flood = MAX_KEYS + 1
    buffer.attach(sink)
    assert await buffer.sweep(sink)
    assert sink.ids == ["task-a.0", "task-a.1"]
    assert await buffer.sweep(sink)
    assert store.listed == 1, "a listing that is too long is not repeated"
    assert caplog.text.count(f"more than {MAX_KEYS} objects are stored under runs/") == 1
    store.broken = "task-a.2"
    assert not await buffer.sweep(sink), "a failed read is not an absent result"
    store.broken, store.flood = None, MAX_KEYS - 10
    buffer.detach(sink)
    buffer.attach(sink)
    await run.store_(run.rollout("task-a.2"))
    assert await buffer.sweep(sink)
    assert (sink.ids, store.listed) == (["task-a.0", "task-a.1", "task-a.2"], 2)


@pytest.mark.parametrize(
    ("segments", "text", "thread"),
    [(2, "", "MainThread"), (40, "", "decode_0"), (2, "y" * _LARGE_BYTES, "decode_0")],
    ids=["small", "expands", "large"],
)
async def test_large_results_and_those_that_expand_are_decoded_off_the_event_loop(segments, text, thread):
    recorder = SegmentRecorder()
    for turn in range(segments):  # whose prompts begin with the same tokens, which are stored once
        recorder.add([*range(1000), 2000 + turn], Completion((7,), (-0.5,)))
    rollout = make_rollout(segments=recorder.segments(), extras={"x": text})
    threads = []
    decoder = ResultDecoder("run", 2**26, verify=lambda _: threads.append(threading.current_thread().name))
    data = rollout.encode()
    assert (unpacked_size(data) < _LARGE_BYTES) == (text == "")
    assert (await decoder.decode(data, ResultName(0, rollout.rollout_id, None))).encode() == data
    assert threads == [thread]
