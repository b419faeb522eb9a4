"""Collect rollouts with agentcore-rl-toolkit, in its environment.

Its `RolloutClient` polls S3 for results. Its `AgentCoreHttpClient` and the sessions of its agent loop for verl poll
the runtime. By that loop's rules, a rollout that failed after its agent has called the model is trained with the
reward 0, one whose agent has called no model is missing, and so is one whose reward is no finite number.
"""

import asyncio
import math
import uuid
from collections import Counter

from agentcore_rl_toolkit import AgentCoreHttpClient, RolloutClient
from agentcore_rl_toolkit.aws_tools.agentcore_tools import close_shared_agentcore_clients
from agentcore_rl_toolkit.aws_tools.persistent_dict import NullPersister, PersistentDict
from agentcore_rl_toolkit.concurrency.rate_limiter import LocalRateLimiter
from agentcore_rl_toolkit.rollout_session.agentcore_http_session import AgentCoreHttpSession
from harness import Receive, Work, call, ended, hand_over, main, measure

TPS = 25


async def collect_by_s3(work: Work) -> None:
    async def step(prefix: str, rollouts: int, receive: Receive) -> None:
        """Await all futures together, the faster of its two ways."""
        client = RolloutClient(work["arn"], "results", "benchmark", tps_limit=work["rate"])

        async def roll_out(name: str) -> None:
            result = await (await client.invoke_async({"question": name}, input_id=name)).result_async()
            assert result["rewards"] == [1.0]
            receive(name)

        await asyncio.gather(*(roll_out(f"{prefix}-{number}") for number in range(rollouts)))

    await measure(work, step)


async def collect_by_http(work: Work) -> None:
    async def step(prefix: str, rollouts: int, receive: Receive) -> None:
        """Use the limits of its own training script."""
        every_request, new_session = LocalRateLimiter(max(100, work["rate"])), LocalRateLimiter(work["rate"])
        limits = {"max_pool_connections": 512, "request_rate_limiter": every_request}
        async with AgentCoreHttpClient(work["arn"], **limits) as client:

            async def roll_out(name: str) -> None:
                await new_session.wait_async()
                whose = {"session_id": str(uuid.uuid4()), "invocation_id": name}
                handle = await client.invoke({"question": name}, **whose, background=True)
                assert (await handle.result())["rewards"] == [1.0]
                receive(name)
                await client.stop_session(whose["session_id"])

            await asyncio.gather(*(roll_out(f"{prefix}-{number}") for number in range(rollouts)))

    await measure(work, step)


async def step_by_s3(work: Work) -> None:
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
            tokens = item.result["rollout_data"][0]["token_ids"]
            hand_over(groups[item.index], item.result["rewards"][0], tokens)
    ended(failed)


async def step_by_http(work: Work) -> None:
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
        tokens = (await asyncio.to_thread(call, work["engine"], "sessions")).get(sid)
        if tokens is not None and reward is not None and math.isfinite(reward):
            hand_over(group, reward, tokens)

    await asyncio.gather(*(roll_out(f"t{number}") for number in range(work["groups"]) for _ in range(work["group"])))
    await close_shared_agentcore_clients()
    ended(failed)


def name_of(error: str) -> str:
    """Return the class at the end of a traceback, or the message."""
    last = error.strip().splitlines()[-1]
    name, colon, _ = last.partition(":")
    return name.rpartition(".")[2] if colon else last


if __name__ == "__main__":
    main(collect_by_s3, collect_by_http, step_by_s3, step_by_http)
