"""Serve agentlightning's proxy, in its environment: PORT, the engine's URL and the number of rollouts.

As its verl daemon does, one process has the store and another one the proxy. The first line of the output is a list
of the rollouts' paths.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys

from agentlightning import InMemoryLightningStore, LightningStoreServer, LLMProxy


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def main(port: int, engine: str, rollouts: int) -> None:
    store = LightningStoreServer(InMemoryLightningStore(thread_safe=True), host="127.0.0.1", port=free_port())
    await store.start()
    model = {"model_name": "m", "litellm_params": {"model": "hosted_vllm/m", "api_base": f"{engine}/vllm/v1"}}
    proxy = LLMProxy(port=port, host="127.0.0.1", model_list=[model], store=store)
    await proxy.start()
    paths = []
    for number in range(rollouts):
        rollout = await store.start_rollout(input={"question": f"{number}"}, mode="train")
        paths.append(f"/rollout/{rollout.rollout_id}/attempt/{rollout.attempt.attempt_id}")
    print(json.dumps(paths), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
