"""Collect rollouts with agentlightning's store, in its environment: the argument is the work, as JSON.

The trainer's process serves the store and asks it as its verl daemon does: for all finished rollouts every 5 s, and
then for the spans of each. The agents are another process, which uses the store's client: they take a rollout, work,
and then add a span with the result and the status. There is no runtime, S3 or queue in between.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from typing import Any

from agentlightning import InMemoryLightningStore, LightningStoreClient, LightningStoreServer
from agentlightning_span import make_span
from spent import Step

POLL_S = 5.0  # of the verl daemon


async def trainer(work: dict[str, Any]) -> None:
    store = LightningStoreServer(InMemoryLightningStore(thread_safe=True), host="127.0.0.1", port=work["port"])
    await store.start()
    agents = subprocess.Popen(
        [sys.executable, __file__, json.dumps({**work, "agents": True})], stdout=subprocess.PIPE, text=True
    )
    os.sched_setaffinity(agents.pid, {work["agents_core"]})
    await collect(store, work["warm_up"], 1e5, None)
    step = Step(work["core"])
    await collect(store, work["rollouts"], work["rate"], step)
    step.print()
    output, _ = await asyncio.to_thread(agents.communicate)
    print(output.splitlines()[-1], flush=True)
    await store.stop()


async def collect(store: LightningStoreServer, rollouts: int, rate: float, step: Step | None) -> None:
    waiting: set[str] = set()

    async def enqueue() -> None:
        began = time.monotonic()
        for number in range(rollouts):
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
            waiting.add((await store.enqueue_rollout(input={"question": f"{number}"}, mode="train")).rollout_id)

    enqueuing = asyncio.create_task(enqueue())
    had: set[str] = set()
    while len(had) < rollouts:
        for rollout in await store.wait_for_rollouts(rollout_ids=list(waiting), timeout=0):
            if rollout.rollout_id not in had:
                spans = await store.query_spans(rollout.rollout_id, attempt_id="latest")
                assert len(spans) == 1
                had.add(rollout.rollout_id)
                if step is not None:
                    step.receive(rollout.rollout_id)
        if len(had) < rollouts:
            await asyncio.sleep(POLL_S if step is not None else 0.2)
    await enqueuing


async def agents(work: dict[str, Any]) -> None:
    """Run all agents. Print when each rollout was finished."""
    store = LightningStoreClient(f"http://127.0.0.1:{work['port']}")
    published: dict[str, float] = {}
    draw, running, left = random.Random(0), set(), work["warm_up"] + work["rollouts"]
    while left:
        taken = await store.dequeue_many_rollouts(limit=64)
        left -= len(taken)
        for rollout in taken:
            seconds = work["agent_s"] * (1 + work["spread"] * (2 * draw.random() - 1))
            running.add(asyncio.create_task(agent(store, rollout, seconds, work["bytes"], published)))
        if not taken:
            await asyncio.sleep(0.02)
    await asyncio.gather(*running)
    await store.close()
    print(json.dumps({"published": published}), flush=True)


async def agent(store: Any, rollout: Any, seconds: float, size: int, published: dict[str, float]) -> None:
    await asyncio.sleep(seconds)
    rollout_id, attempt_id = rollout.rollout_id, rollout.attempt.attempt_id
    report = {"reward": 1.0, "messages": "x" * size}
    await store.add_span(make_span(rollout_id, attempt_id, 1, "result", report))
    await store.update_attempt(rollout_id, attempt_id, status="succeeded")
    published[rollout_id] = time.monotonic()


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    asyncio.run(agents(asked) if asked.get("agents") else trainer(asked))
