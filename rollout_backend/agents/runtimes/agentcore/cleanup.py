"""Stop the sessions of a killed run, and delete the runtimes of images that only this run has used. The run's janitor
calls this: see `CleanupSpec`."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from functools import cache
from threading import Lock
from typing import Any

import boto3
from botocore.config import Config

from rollout_backend.agents.runtimes.agentcore.control import control_client, delete_runtime, id_of, pauses
from rollout_backend.agents.runtimes.agentcore.images import (
    MADE_BY,
    MAKERS,
    TagReader,
    has_image,
    is_leased,
    lease_of,
    may_have,
    runtimes_of_images,
)
from rollout_backend.agents.runtimes.agentcore.provision import TAG
from rollout_backend.base import aws
from rollout_backend.base.local_keys import client_keys

log = logging.getLogger(__name__)

_CONNECTIONS = 8
# A deletion that AgentCore has accepted is repeated after this time.
_DELETE_S = 60.0


def session_stopper(options: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return a function that stops one session and returns False if the session did not exist."""
    # The lock lets all sessions share one listing of the runtimes.
    listing = Lock()
    # The types of boto3 have one overload per service name.
    make: Any = boto3.client
    agentcore = make(
        "bedrock-agentcore",
        region_name=options["region"],
        endpoint_url=options["endpoint_url"],
        **client_keys(options["endpoint_url"]),
        config=Config(
            retries={"total_max_attempts": 6, "mode": "standard"},
            connect_timeout=10,
            read_timeout=30,
            max_pool_connections=_CONNECTIONS,
        ),
    )
    of_images = cache(lambda: asyncio.run(_find_runtimes(options["region"], options["endpoint_url"])))

    def stop(session_id: str) -> bool:
        arns = [options["arn"]]
        if has_image(session_id):
            with listing:
                arns = [arn for name, arn in of_images().items() if may_have(name, session_id)]
        return sum(stop_in(arn, session_id) for arn in arns) > 0

    def stop_in(arn: str, session_id: str) -> bool:
        try:
            agentcore.stop_runtime_session(
                agentRuntimeArn=arn, qualifier=options["qualifier"], runtimeSessionId=session_id
            )
        except agentcore.exceptions.ResourceNotFoundException:
            return False
        return True

    return stop


async def _find_runtimes(region: str, endpoint_url: str | None) -> dict[str, str]:
    async with control_client(region, endpoint_url) as client:
        return await runtimes_of_images(client)


def remove_unused(options: Mapping[str, Any], run_id: str, is_dead: Callable[[], bool]) -> None:
    """Delete the runtimes of images that a killed run has left, unless another run leases them, while `is_dead`."""
    try:
        asyncio.run(_remove_unused(options["region"], options["endpoint_url"], lease_of(run_id), is_dead))
    except aws.CALL_ERRORS as error:
        log.warning("runtimes of images may be left: %s", aws.reason(error))


async def _remove_unused(region: str, endpoint_url: str | None, own: str, is_dead: Callable[[], bool]) -> None:
    at_once = asyncio.Semaphore(MAKERS)

    async def remove(arn: str) -> bool:
        async with at_once:
            try:
                tags = await reader.read(arn)
                if tags.get(TAG) != MADE_BY or own not in tags or not is_dead():
                    return False
                await client.untag_resource(resourceArn=arn, tagKeys=[own])
                if any(is_leased(tags, key, time.time()) for key in tags.keys() - {own}):
                    return False
                return await _delete_once_possible(client, arn, is_dead)
            except aws.CALL_ERRORS as error:
                log.warning("runtime %s may be left: %s", arn, aws.reason(error))
                return False

    async with control_client(region, endpoint_url) as client:
        reader = TagReader(client)
        removed = await asyncio.gather(*map(remove, (await runtimes_of_images(client)).values()))
    log.info("deleted %d runtimes of images, which only the run of %s has used", sum(removed), own)


async def _delete_once_possible(client: Any, arn: str, is_dead: Callable[[], bool]) -> bool:
    """Delete a runtime that may be in transition, or have sessions that are still being stopped."""
    why = ""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(2 * _DELETE_S):
            for pause in pauses():
                if not is_dead():
                    return False
                if not (why := await delete_runtime(client, id_of(arn), _DELETE_S)):
                    return True
                await asyncio.sleep(pause)
    log.warning("runtime %s could not be deleted, and stays: %s", arn, why)
    return False
