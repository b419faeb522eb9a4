"""Collect rollouts with `RolloutManager`: the argument is the work, as JSON.

Its settings are the defaults, except for the runtime's rates and number of sessions.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from flame_graph import record
from spent import Step, call

from agent_wrapper.contract import Outcome
from rollout_backend.config import RolloutConfig
from rollout_backend.core.tasks import Task
from rollout_backend.local.scripted import BYTE_MODEL
from rollout_backend.manager import RolloutManager
from rollout_backend.results.step_report import GroupResult


def settings(work: dict[str, Any], runtime: dict[str, Any], **sections: Any) -> RolloutConfig:
    """Return the settings for the emulated AWS of the work."""
    return RolloutConfig.parse(
        {
            "run_id": "benchmark",
            "model": {"path": BYTE_MODEL, "name": "scripted", "renderer": "chatml", "context_length": 65536},
            "serving": {"kind": "external", "urls": [work.get("engine", work["url"])]},
            "runtime": {"kind": "agentcore", "arn": work["arn"], "endpoint_url": work["url"], **runtime},
            "aws": {"region": "us-east-1", "endpoint_url": work["url"]},
            "storage": {"bucket": "results"},
            "gateway": {"secret": work["secret"]},
            "output_dir": Path(work["folder"]) / "runs",
            **sections,
        }
    )


def tasks_of(count: int) -> list[Task]:
    return [Task(f"task-{i}", {"question": f"What is {i} + {i}?", "answer": str(2 * i)}) for i in range(count)]


async def main(work: dict[str, Any]) -> None:
    rates = {"invoke_per_s": work["rate"], "stop_per_s": work["rate"]}
    config = settings(work, {**rates, "max_sessions": max(work["warm_up"], work["rollouts"])})
    async with RolloutManager(config) as manager:
        await manager.collect(tasks_of(work["warm_up"]))
        call(work["url"], "reset")
        if work["flame"] is not None:
            record(os.getpid(), Path(work["flame"]))
        step = Step(work["core"])

        def on_group(group: GroupResult) -> None:
            for rollout in group.rollouts:
                step.receive(rollout.rollout_id)

        result = await manager.collect(tasks_of(work["rollouts"]), on_group=on_group)
        step.close_one()
        step.print(calls=call(work["url"], "log")["calls"])  # before those that end the run
    if result.report.outcomes[Outcome.COMPLETED] != work["rollouts"]:
        sys.exit(f"not every rollout was completed: {result.report.outcomes}")


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
