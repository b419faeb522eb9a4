"""Send heartbeats to the gateway, so that the backend detects a silently dead container within a minute.

A heartbeat is an empty POST with the session key. A failed heartbeat never fails a rollout: it is retried soon, and
the backend tolerates several missing heartbeats.
"""

import asyncio
import logging
import ssl
from functools import cache

logger = logging.getLogger("agent_wrapper")

_TIMEOUT_S = 10.0


async def send_heartbeats(url: str, api_key: str, every_s: float) -> None:
    """Send heartbeats. Return once the gateway answers that the session is permanently closed."""
    verify = await asyncio.to_thread(certificates, url.startswith("https://"))
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(timeout=min(_TIMEOUT_S, every_s), verify=verify) as client:
        while True:
            arrived = False
            try:
                response = await client.post(url, headers=headers)
            except httpx.HTTPError as error:
                logger.debug("a heartbeat did not arrive: %r", error)
            else:
                if response.status_code == 410:
                    return
                arrived = response.is_success
            await asyncio.sleep(every_s if arrived else every_s / 3)


@cache
def certificates(https: bool) -> ssl.SSLContext | bool:
    """Return httpx's `verify` argument. Cached, and called in a thread: importing httpx and reading certificates take
    0.1 s each."""
    import httpx

    return httpx.create_ssl_context() if https else False
