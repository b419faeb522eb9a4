"""Collect rollouts with agentcore-rl-toolkit, in its environment: the argument is the work, as JSON.

`kind: s3` awaits all futures of its `RolloutClient` together, the faster of its two ways. `kind: http` uses its
`AgentCoreHttpClient` with the limits of its own training script.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from typing import Any

from agentcore_rl_toolkit import AgentCoreHttpClient, RolloutClient
from agentcore_rl_toolkit.concurrency.rate_limiter import LocalRateLimiter
from spent import Step, call


async def by_s3(work: dict[str, Any], rollouts: int, step: Step | None) -> None:
    client = RolloutClient(work["arn"], "results", "benchmark", tps_limit=work["rate"])

    async def roll_out(number: int) -> None:
        future = await client.invoke_async({"question": f"{number}"}, input_id=f"task-{number}")
        result = await future.result_async()
        assert result["rewards"] == [1.0]
        if step is not None:
            step.receive(f"task-{number}")

    await asyncio.gather(*map(roll_out, range(rollouts)))


async def by_http(work: dict[str, Any], rollouts: int, step: Step | None) -> None:
    every_request = LocalRateLimiter(max(100, work["rate"]))
    new_session = LocalRateLimiter(work["rate"])
    async with AgentCoreHttpClient(
        work["arn"], max_pool_connections=512, request_rate_limiter=every_request
    ) as client:

        async def roll_out(number: int) -> None:
            await new_session.wait_async()
            session_id, name = str(uuid.uuid4()), f"task-{number}"
            handle = await client.invoke(
                {"question": f"{number}"}, session_id=session_id, invocation_id=name, background=True
            )
            result = await handle.result()
            assert result["rewards"] == [1.0]
            if step is not None:
                step.receive(name)
            await client.stop_session(session_id)
            if step is not None:
                step.close_one()

        await asyncio.gather(*map(roll_out, range(rollouts)))


async def main(work: dict[str, Any]) -> None:
    os.environ["AWS_ENDPOINT_URL"] = work["url"]
    collect = {"s3": by_s3, "http": by_http}[work["kind"]]
    await collect(work, work["warm_up"], None)
    call(work["url"], "reset")
    step = Step(work["core"])
    await collect(work, work["rollouts"], step)
    step.print()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
