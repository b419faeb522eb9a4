"""Measure what one event costs a step: a result arrives while all rollouts run.

    python benchmarks/step_turn.py

The runtime accepts every invoke, and the benchmark hands results to the step. The CPU time, a median over 200
results, covers all that a result causes on the event loop: the step's turn and the stop of the session.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from agent_wrapper.contract import ModelEndpoint, Outcome, Rollout
from rollout_backend.config import RolloutConfig
from rollout_backend.core.tasks import Task
from rollout_backend.dispatch.call_queue import CallQueue
from rollout_backend.dispatch.dispatcher import Dispatcher
from rollout_backend.dispatch.session_closer import SessionCloser
from rollout_backend.step.services import StepServices
from rollout_backend.step.step import Step

SIZES = (256, 4096, 16384)
EVENTS = 200
GROUP = 8
_TURNS = 20  # of the event loop, after which a result has no more consequences


class _Runtime:
    async def check(self) -> None: ...

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        return b'{"status": "accepted"}'

    async def stop(self, session_id: str) -> None: ...

    async def aclose(self) -> None: ...


class _Buffer:
    refused = 0
    max_fetches = 16
    queue_down = False
    heard_at = last_announcement_at = float("inf")

    def attach(self, sink: Any) -> None: ...

    def detach(self, sink: Any) -> None: ...

    async def list_when_idle(self, sink: Any, config: Any) -> None:
        await asyncio.Event().wait()

    async def sweep(self, sink: Any) -> bool:
        return True

    async def fetch_by_key(self, sink: Any, rollout_id: str, attempt: int) -> bool:
        return True

    async def list_results(self, sink: Any) -> set[str]:
        return set()


def written(rollout: Rollout, data: bytes) -> Future[bool]:
    """Pretend to have written a result to the run's folder."""
    done: Future[bool] = Future()
    done.set_result(True)
    return done


def make_step(rollouts: int) -> Step:
    config = RolloutConfig.parse(
        {
            "run_id": "benchmark",
            "model": {"path": Path("model")},
            "storage": {"bucket": "bucket"},
            "runtime": {"kind": "http", "url": "http://agents", "max_sessions": rollouts},
            "group": {"size": GROUP, "straggler_after": 0.9},
        }
    )
    runtime, calls = _Runtime(), CallQueue(invoke_per_s=1e6, stop_per_s=1e6)

    async def nothing(*_: Any) -> None: ...

    services = StepServices(
        config=config,
        dispatcher=Dispatcher(runtime, calls, max_sessions=rollouts, max_attempts=1),
        closer=SessionCloser(runtime, calls),
        buffer=_Buffer(),  # type: ignore[arg-type]
        queue_url=None,
        endpoint=lambda claims: ModelEndpoint(base_url="http://g", api_key="k", name="m", trajectory_url="http://g"),
        revoke=nothing,
        archive=written,
        read_manifest=nothing,
        write_manifest=nothing,
    )
    return Step(0, [Task(f"t{i}", {"q": i}) for i in range(rollouts // GROUP)], services, None)


def result_of(step: Step, rollout_id: str) -> Rollout:
    return Rollout(
        run_id="benchmark",
        step=0,
        task_id=rollout_id.partition(".")[0],
        rollout_id=rollout_id,
        attempt=1,
        session_id=step.results.session_id(rollout_id, 1),
        outcome=Outcome.COMPLETED,
        reward=1.0,
        segments=[
            {
                "token_ids": [0, 1],
                "response_mask": [0, 1],
                "logprobs": [None, -1.0],
                "turns": [{"start": 1, "end": 2, "finish_reason": "stop", "weight_versions": []}],
            }
        ],
    )


async def measure(rollouts: int) -> float:
    """Return the median seconds of one result in a step with this many rollouts."""
    step = make_step(rollouts)
    running = asyncio.create_task(step.run())
    while step.ledger.phases()["running"] < rollouts:  # type: ignore[index]  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    took = []
    for rollout_id in list(step.ledger.entries)[:EVENTS]:
        result = result_of(step, rollout_id)
        began = time.process_time()
        step.results.on_result(result, b"", None)
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        took.append(time.process_time() - began)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return statistics.median(took)


def main() -> None:
    logging.disable(logging.WARNING)
    for rollouts in SIZES:
        print(f"{rollouts:6d} rollouts: {1000 * asyncio.run(measure(rollouts)):.3f} ms per result", flush=True)


if __name__ == "__main__":
    main()
