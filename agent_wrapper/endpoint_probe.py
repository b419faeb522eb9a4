"""Check before the agent runs that its container reaches the model's endpoint.

An agent that cannot reach it would retry its first model call for minutes, usually until its deadline.
"""

from __future__ import annotations

import asyncio
import logging

from agent_wrapper.contract import ModelEndpoint
from agent_wrapper.heartbeat import certificates

logger = logging.getLogger("agent_wrapper")

PROBE_S = 30.0  # a gateway that restarts answers within this time
_TIMEOUT_S = 10.0
_PAUSE_S, _MAX_PAUSE_S = 0.2, 4.0


async def probe_endpoint(endpoint: ModelEndpoint, budget_s: float = PROBE_S) -> str | None:
    """Request the endpoint's list of models until it answers. Return None, or what happened instead."""
    url = f"{endpoint.base_url}/models"
    verify = await asyncio.to_thread(certificates, url.startswith("https://"))
    import httpx  # late: the container should listen before it loads this

    loop = asyncio.get_running_loop()
    deadline, pause_s = loop.time() + budget_s, _PAUSE_S
    async with httpx.AsyncClient(verify=verify) as client:
        while True:
            timeout_s = min(_TIMEOUT_S, max(_PAUSE_S, deadline - loop.time()))
            try:
                headers = {"Authorization": f"Bearer {endpoint.api_key}"}
                response = await client.get(url, headers=headers, timeout=timeout_s)
            except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}".removesuffix(": ")
            else:
                if response.is_success:
                    return None
                problem = f"it answered {response.status_code}: {response.text[:200]}"
            if loop.time() + pause_s > deadline:
                return (
                    f"this container could not reach the model endpoint at {endpoint.base_url} within "
                    f"{round(budget_s, 1):g} s ({problem}). Set gateway.public_url to an address that leads to the "
                    "gateway from where agents run"
                )
            logger.warning(
                "%s is not reachable (%s); retrying for up to %.0f s", url, problem, deadline - loop.time()
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
