"""Run steps with `RolloutManager`: the argument is the work, as JSON. Print each trainable rollout of a step."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from collect_by_us import settings
from spent import ended, hand_over

from rollout_backend.core.tasks import Task
from rollout_backend.manager import RolloutManager


async def main(work: dict[str, Any]) -> None:
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
            hand_over(group.task.task_id, rollout.reward, tokens=list(rollout.segments[0].token_ids))
    ended({name: count for name, count in result.report.reasons.items() if count})


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
