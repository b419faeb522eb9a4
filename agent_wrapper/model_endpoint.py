"""Check that the container reaches the model's endpoint, and send heartbeats there.

Before the agent runs, `probe_endpoint` checks the connection: an agent without one would retry its first model call
for minutes, usually until its deadline. While it runs, heartbeats let the backend detect a silently dead container
within a minute. A heartbeat is an empty POST with the session key. The first one is the check, so a short rollout
needs no other. A later one that fails never fails a rollout: it is retried soon, and the backend tolerates several
missing heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from functools import cache
from typing import TYPE_CHECKING

from agent_wrapper.contract import ModelEndpoint
from agent_wrapper.shared.own_answers import GATEWAY, is_page, own_answer
from agent_wrapper.shared.redaction import without_secrets
from agent_wrapper.shared.threads import in_thread

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger("agent_wrapper")

# A restarting gateway usually answers within this time; otherwise the trainer makes another attempt.
PROBE_S = 30.0
_TIMEOUT_S = 10.0
_PAUSE_S, _MAX_PAUSE_S = 0.2, 4.0
# Bytes to read of a response, and characters to show of an error response.
_READ = 16_384
_SHOWN = 200


class SessionClosed(Exception):
    """The gateway has closed the session permanently."""


async def probe_endpoint(endpoint: ModelEndpoint, budget_s: float = PROBE_S, *, beat: bool = False) -> str | None:
    """Request the endpoint's list of models until it answers; with `beat`, send the first heartbeat instead.

    Return None on success, else what happened. Raises SessionClosed.
    """
    beat_url = endpoint.heartbeat_url if beat else None
    url = beat_url or f"{endpoint.base_url}/models"
    # Loads httpx before the agent starts: openai 3 fails while another thread imports it.
    verify = await in_thread(lambda: certificates(url.startswith("https://")), "load")
    import httpx

    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    method = "GET" if beat_url is None else "POST"
    loop = asyncio.get_running_loop()
    deadline, pause_s, problem = loop.time() + budget_s, _PAUSE_S, ""
    async with httpx.AsyncClient(headers=headers, verify=verify, follow_redirects=True) as client:
        while True:
            timeout_s = min(_TIMEOUT_S, max(_PAUSE_S, deadline - loop.time()))
            try:
                response, body = await _ask(client, method, url, timeout_s)
                if response.is_success and not is_page(body):
                    return None
                if response.status_code == 410 and beat_url is not None and own_answer(body, GATEWAY):
                    raise SessionClosed
                problem = f"it answered {response.status_code}: {body.decode(errors='replace')[:_SHOWN]}"
            except TimeoutError:
                # If neither holds, the deadline cut a retry short.
                if timeout_s == _TIMEOUT_S or not problem:
                    problem = "timed out"
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                problem = _describe(error)
            if loop.time() + pause_s > deadline:
                return (
                    f"this container could not reach the model endpoint at {without_secrets(endpoint.base_url)} "
                    f"within {round(budget_s, 1):g} s ({problem}). Set gateway.public_url to an address that leads "
                    "to the gateway from where agents run"
                )
            left_s = deadline - loop.time()
            logger.warning(
                "%s is not reachable (%s); retrying for up to %.0f s", without_secrets(url), problem, left_s
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)


async def _ask(client: httpx.AsyncClient, method: str, url: str, limit_s: float) -> tuple[httpx.Response, bytes]:
    """Return a response and the beginning of its body. Raises TimeoutError, however slowly the rest arrives."""
    async with asyncio.timeout(limit_s), client.stream(method, url, timeout=None) as response:
        # What answers may be no gateway: read no more than its longest error.
        return response, await anext(response.aiter_bytes(_READ), b"")


def _describe(error: Exception) -> str:
    """Return the network's error: httpx's own message is "All connection attempts failed" for every reason."""
    cause: BaseException = error
    while before := cause.__cause__ or cause.__context__:
        cause = before
    return f"{type(cause).__name__}: {cause}".removesuffix(": ")


async def send_heartbeats(url: str, api_key: str, every_s: float) -> None:
    """Send heartbeats after the first one. Return once the gateway answers that the session is permanently closed."""
    await asyncio.sleep(every_s)
    verify = await in_thread(lambda: certificates(url.startswith("https://")), "load")
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(headers=headers, verify=verify) as client:
        while True:
            arrived = False
            try:
                response, body = await _ask(client, "POST", url, min(_TIMEOUT_S, every_s))
            except Exception as error:
                # The resolver's thread fails, too, if the agent has used up all threads.
                logger.debug("a heartbeat did not arrive: %r", error)
            else:
                if response.status_code == 410 and own_answer(body, GATEWAY):
                    return
                arrived = response.is_success and not is_page(body)
            await asyncio.sleep(every_s if arrived else every_s / 3)


@cache
def certificates(https: bool) -> ssl.SSLContext | bool:
    """Return httpx's `verify` argument. Cached, and called in a thread: importing httpx and reading certificates take
    0.1 s each."""
    import httpcore  # noqa: F401  (httpx imports it with the first client)
    import httpx

    return httpx.create_ssl_context() if https else False
