"""Stop the sessions of a killed run, from its janitor. See `CleanupSpec`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import boto3
from botocore.config import Config

from rollout_backend.local_keys import client_keys

_CONNECTIONS = 8


def session_stopper(options: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return a function that stops one session, and returns False if it did not exist."""
    make: Any = boto3.client  # its types list every service by name
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

    def stop(session_id: str) -> bool:
        try:
            agentcore.stop_runtime_session(
                agentRuntimeArn=options["arn"], qualifier=options["qualifier"], runtimeSessionId=session_id
            )
        except agentcore.exceptions.ResourceNotFoundException:
            return False
        return True

    return stop
