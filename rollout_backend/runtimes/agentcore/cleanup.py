"""Stop the sessions of a killed run from its janitor. See `CleanupSpec`."""

import asyncio
from collections.abc import Callable, Mapping
from functools import cache
from threading import Lock
from typing import Any

import boto3
from botocore.config import Config

from rollout_backend.local_keys import client_keys
from rollout_backend.runtimes.agentcore.images import has_image, image_runtimes, may_have

_CONNECTIONS = 8


def session_stopper(options: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return a function that stops one session and returns False if the session did not exist."""
    listing = Lock()  # list the runtimes once for all sessions
    make: Any = boto3.client  # the types of boto3 have one overload per service name
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
    of_images = cache(lambda: asyncio.run(image_runtimes(options["region"], options["endpoint_url"])))

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
