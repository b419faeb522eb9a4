"""Fetch a session's trajectory from the gateway once the agent has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from agent_wrapper.contract import ContractError, ModelEndpoint, Trajectory
from agent_wrapper.contract.codec import MAX_OBJECT_BYTES
from agent_wrapper.contract.messages import RESULT_LIMIT_HEADER
from agent_wrapper.shared.own_answers import GATEWAY, is_page, own_answer

if TYPE_CHECKING:
    import httpx

_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 30.0
# One try may take as long, and longer with a large trajectory. The read timeout starts again with each byte.
_TRY_S = 60.0
_SLOWEST_BYTES_PER_S = 1024**2


class TrajectoryUnavailable(Exception):
    """The gateway did not return a trajectory. The message says why."""


class TrajectoryTooLarge(TrajectoryUnavailable):
    """The trajectory is larger than a result may be. A retry does not help."""


async def fetch_trajectory(
    endpoint: ModelEndpoint, budget_s: float, on_limit: Callable[[int], object] = bool
) -> Trajectory:
    """Seal the session and return what it sampled. Retry until `budget_s` is used up. `on_limit` is called with how
    many bytes the result may have.

    Raises:
        TrajectoryTooLarge: the trajectory is larger than a result may be.
        TrajectoryUnavailable: the gateway refused, could not be reached in time, or sent something else.
    """
    # Import here, because the container should listen before it loads what it needs at the end.
    import httpx
    import tenacity

    def passing(error: BaseException) -> bool:
        if isinstance(error, httpx.HTTPStatusError):
            status = error.response.status_code
            return status in (408, 429) or status >= 500 or own_answer(error.response.content, GATEWAY) is None
        return isinstance(error, (httpx.TransportError, TimeoutError))

    timeout = httpx.Timeout(min(_READ_TIMEOUT_S, budget_s), connect=min(_CONNECT_TIMEOUT_S, budget_s))
    retrying = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(passing),
        stop=tenacity.stop_before_delay(budget_s),
        wait=tenacity.wait_exponential_jitter(multiplier=0.2, max=4.0, jitter=0.2),
        reraise=True,
    )
    # Without TLS there is nothing to verify, and reading the certificates would take 0.1 s.
    verify = not endpoint.trajectory_url.startswith("http://")
    try:
        async with asyncio.timeout(budget_s), httpx.AsyncClient(timeout=timeout, verify=verify) as client:
            async for attempt in retrying:
                with attempt:
                    response = await _post(client, endpoint)
                    response.raise_for_status()
                    if is_page(response.content):
                        raise httpx.RemoteProtocolError("a proxy in front of the gateway answered with a page")
        on_limit(int(response.headers.get(RESULT_LIMIT_HEADER, MAX_OBJECT_BYTES)))
        return Trajectory.decode(response.content)
    except httpx.HTTPStatusError as error:
        if "trajectory_too_large" in error.response.text:
            raise TrajectoryTooLarge(error.response.json()["error"]["message"]) from error
        answer = f"{error.response.status_code}: {error.response.text[:200]}"
        raise TrajectoryUnavailable(f"the gateway answered the request for the trajectory with {answer}") from error
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
        raise TrajectoryUnavailable(
            f"the gateway could not be asked for the trajectory at {endpoint.trajectory_url}: {error!r}"
        ) from error
    except ContractError as error:
        raise TrajectoryUnavailable(f"the gateway's trajectory cannot be read: {error}") from error


async def _post(client: httpx.AsyncClient, endpoint: ModelEndpoint) -> httpx.Response:
    """Return the whole response. Raises TimeoutError if it arrives too slowly."""
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    async with (
        asyncio.timeout(_TRY_S) as limit,
        client.stream("POST", endpoint.trajectory_url, headers=headers) as got,
    ):
        length = got.headers.get("Content-Length") or got.headers.get(RESULT_LIMIT_HEADER) or 0
        limit.reschedule(asyncio.get_running_loop().time() + _TRY_S + int(length) / _SLOWEST_BYTES_PER_S)
        await got.aread()
    return got
