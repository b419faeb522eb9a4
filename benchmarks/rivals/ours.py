"""Collect rollouts with `RolloutManager`. Settings are the defaults, except for the runtime's limits and timeouts."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from harness import Receive, Work, ended, hand_over, main, measure

from agent_wrapper.contract import Outcome
from rollout_backend.config import RolloutConfig
from rollout_backend.core.tasks import Task
from rollout_backend.manager import RolloutManager
from rollout_backend.run.accounts.step_report import GroupResult
from rollout_backend.workbench.local.scripted import BYTE_MODEL


def settings(work: Work, runtime: dict[str, Any], **sections: Any) -> RolloutConfig:
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


async def collect(work: Work) -> None:
    rates = {"invoke_per_s": work["rate"], "stop_per_s": work["rate"]}
    config = settings(work, {**rates, "max_sessions": max(work["warm_up"], work["rollouts"])})
    async with RolloutManager(config) as manager:

        async def step(prefix: str, rollouts: int, receive: Receive) -> None:
            def on_group(group: GroupResult) -> None:
                for rollout in group.rollouts:
                    receive(rollout.rollout_id)

            tasks = [Task(f"{prefix}-{i}", {"question": f"What is {i} + {i}?"}) for i in range(rollouts)]
            result = await manager.collect(tasks, on_group=on_group)
            if result.report.outcomes[Outcome.COMPLETED] != rollouts:
                sys.exit(f"not every rollout was completed: {result.report.outcomes}")

        await measure(work, step)


async def step_with_faults(work: Work) -> None:
    tasks = [Task(f"t{number}", {"question": f"{number}"}) for number in range(work["groups"])]
    # One hundredth of the defaults at least, and an agent's limit as the rivals'.
    timeouts = {
        "model_call_s": 10, "agent_s": work["limit_s"], "publish_grace_s": 5,
        "collection_s": 3 * work["limit_s"], "session_key_s": 4 * work["limit_s"], "heartbeat_s": 1,
    }  # fmt: skip
    group = {"size": work["group"], "policy": "replace"}
    config = settings(work, {}, group=group, timeouts=timeouts, collect={"list_after_idle_s": 2})
    async with RolloutManager(config) as manager:
        result = await manager.collect(tasks, step=0)
    for group in result.groups:
        for rollout in group.rollouts if group.usable else ():
            hand_over(group.task.task_id, rollout.reward, list(rollout.segments[0].token_ids))
    ended(Counter({name: count for name, count in result.report.reasons.items() if count}))


if __name__ == "__main__":
    main(collect, step_with_faults)
