"""Run one rollout on a deployed runtime, before any training.

Its model endpoint does not exist. A result of `model_unreachable` therefore proves that a session starts, the wrapper
accepts the contract, and the agents' role may write to the bucket.
"""

import asyncio
import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from agent_wrapper.contract import (
    REQUEST_FIELD,
    ModelEndpoint,
    Outcome,
    ResultTarget,
    Rollout,
    RolloutRequest,
    Sampling,
)
from rollout_backend import aws
from rollout_backend.config import AgentCoreConfig
from rollout_backend.deploy.target import Target
from rollout_backend.errors import InvokeRejected, NoCredentials, PreflightError, RuntimeCallError
from rollout_backend.runtimes.agentcore.runtime import AgentCoreRuntime

_NOWHERE = "http://127.0.0.1:9/v1"
_REMAINING_S = 2.0
_RESULT_S = 60.0
_START_S = 300.0  # the first session pulls the image, and the runtime may throttle
_POLL_S = 0.3


async def run_smoke_rollout(target: Target, payload: Mapping[str, Any]) -> str:
    """Run the rollout and stop its session. Return a description of what it proved.

    Raises:
        PreflightError: the rollout could not be started, or published no result.
    """
    settings = target.settings()["runtime"]
    config = AgentCoreConfig.model_validate({**settings, "read_timeout_s": 150.0})
    runtime = await AgentCoreRuntime.open(config)
    session_id = f"deploy-{uuid.uuid4()}-{uuid.uuid4().hex[:8]}"
    request = RolloutRequest(
        run_id="deploy",
        step=0,
        task_id="smoke",
        rollout_id=session_id[:60],
        attempt=1,
        session_id=session_id,
        endpoint=ModelEndpoint(base_url=_NOWHERE, api_key="none", name="none", trajectory_url=_NOWHERE),
        sampling=Sampling(),
        deadline=time.time() + _REMAINING_S,
        remaining_s=_REMAINING_S,
        publish_grace_s=_RESULT_S,
        result=ResultTarget(bucket=target.bucket, prefix=target.prefix, region=target.region),
    )
    body = json.dumps({**payload, REQUEST_FIELD: request.model_dump(mode="json")}).encode()
    try:
        await _invoke(runtime, session_id, body)
        if target.presigned:
            return "a session starts and accepts a rollout; each run signs the URLs of its results"
        rollout = await _read_result(target, request, runtime)
    finally:
        await runtime.stop(session_id)
        await runtime.aclose()
    reason = rollout.failure.reason if rollout.failure else ""
    if reason != "model_unreachable":
        raise PreflightError(f"the smoke rollout ended as {rollout.outcome}, {reason}, not as model_unreachable")
    return "a session starts, accepts a rollout, and writes its result"


async def _invoke(runtime: AgentCoreRuntime, session_id: str, body: bytes) -> None:
    """Start the rollout. Retry while the runtime is busy: the wrapper answers a repeated invoke from memory."""
    deadline = time.monotonic() + _START_S
    while True:
        try:
            await runtime.invoke(session_id, body)
            break
        except RuntimeCallError as error:
            is_final = isinstance(error, (InvokeRejected, NoCredentials)) and error.reason != "runtime_not_found"
            if is_final or time.monotonic() > deadline:
                raise PreflightError(
                    f"the smoke rollout was not accepted: {error}. The sessions' log: "
                    f"{runtime.log_location(session_id)}"
                ) from error
        await asyncio.sleep(2.0)


async def _read_result(target: Target, request: RolloutRequest, runtime: AgentCoreRuntime) -> Rollout:
    deadline = time.monotonic() + _RESULT_S
    async with aws.client("s3", region=target.region, endpoint_url=target.endpoint_url, retries=4) as s3:
        while time.monotonic() < deadline:
            for key in (request.key_for(Outcome.INFRA_ERROR), request.key):
                try:
                    answer = await s3.get_object(Bucket=target.bucket, Key=key)
                    return Rollout.decode(await answer["Body"].read())
                except ClientError as error:
                    if aws.code_of(error) != "NoSuchKey":
                        raise aws.preflight_error(error, f"bucket {target.bucket}", "storage.bucket") from error
                except BotoCoreError as error:
                    raise aws.preflight_error(error, f"bucket {target.bucket}", "storage.bucket") from error
            await asyncio.sleep(_POLL_S)
    raise PreflightError(
        f"the smoke rollout was accepted but wrote no result within {_RESULT_S:g} s: check that the agents' role may "
        f"write to the bucket. The session's log: {runtime.log_location(request.session_id)}"
    )
