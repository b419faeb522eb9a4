"""Run a step with agentcore-rl-toolkit, in its environment: the argument is the work, as JSON.

`kind: s3` iterates over `RolloutClient.run_batch_async`. `kind: http` makes sessions as its agent loop for verl does,
with that loop's rules: a rollout that failed after its agent has called the model is trained with the reward 0, one
whose agent has called no model is missing, and so is one whose reward is no finite number.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import uuid
from collections import Counter
from typing import Any

from agentcore_rl_toolkit import RolloutClient
from agentcore_rl_toolkit.aws_tools.agentcore_tools import close_shared_agentcore_clients
from agentcore_rl_toolkit.aws_tools.persistent_dict import NullPersister, PersistentDict
from agentcore_rl_toolkit.concurrency.rate_limiter import LocalRateLimiter
from agentcore_rl_toolkit.rollout_session.agentcore_http_session import AgentCoreHttpSession
from spent import call, ended, hand_over

TPS = 25


async def by_s3(work: dict[str, Any]) -> Counter[str]:
    rollouts = work["groups"] * work["group"]
    client = RolloutClient(work["arn"], "results", "faults", tps_limit=TPS, max_pool_connections=rollouts)
    groups = [f"t{number // work['group']}" for number in range(rollouts)]
    failed: Counter[str] = Counter()
    batch = client.run_batch_async(
        [{"task": group} for group in groups], max_concurrent_sessions=rollouts, timeout=work["limit_s"]
    )
    async for item in batch:
        if not item.success:
            failed[name_of(item.error)] += 1
        elif item.result["status_code"] != 200:
            failed["the agent's error"] += 1
        else:
            hand_over(
                groups[item.index], item.result["rewards"][0], tokens=item.result["rollout_data"][0]["token_ids"]
            )
    return failed


async def by_http(work: dict[str, Any]) -> Counter[str]:
    new_session = LocalRateLimiter(TPS)
    failed: Counter[str] = Counter()

    async def roll_out(group: str) -> None:
        sid = str(uuid.uuid4())
        state = PersistentDict({"session_id": sid}, persister=NullPersister())
        session = AgentCoreHttpSession(sid, state, agentcore_runtime_arn=work["arn"])
        error, reward = None, None
        try:
            async with session:
                await new_session.wait_async()
                async with asyncio.timeout(work["limit_s"]):
                    dump = await session.run({"task": group})
            error, reward = dump.exception, dump.reward
        except Exception as failure:  # as its agent loop does
            error = f"{type(failure).__name__}: {failure}"
        if error is not None:
            failed[name_of(error)] += 1
            reward = 0.0
        calls_the_model = sid in await asyncio.to_thread(call, work["engine"], "sessions")
        if calls_the_model and reward is not None and math.isfinite(reward):
            hand_over(group, reward, session=sid)

    await asyncio.gather(*(roll_out(f"t{number}") for number in range(work["groups"]) for _ in range(work["group"])))
    await close_shared_agentcore_clients()
    return failed


def name_of(error: str) -> str:
    """Return the class at the end of a traceback, or the message."""
    last = error.strip().splitlines()[-1]
    name, colon, _ = last.partition(":")
    return name.rpartition(".")[2] if colon else last


async def main(work: dict[str, Any]) -> None:
    os.environ["AWS_ENDPOINT_URL"] = work["url"]
    ended(await {"s3": by_s3, "http": by_http}[work["kind"]](work))


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
