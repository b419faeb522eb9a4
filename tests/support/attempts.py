"""Rollouts of one step whose attempts a test makes itself. S3 accepts each manifest, and no result arrives."""

from typing import Any, cast
from unittest.mock import create_autospec

from tenacity import wait_none

from agent_wrapper.contract import Sampling
from builders import run_config
from rollout_backend.collect.manifest_store import ManifestStore
from rollout_backend.core.manifest import StepRequest
from rollout_backend.core.policy import GroupState
from rollout_backend.core.tasks import Task
from rollout_backend.dispatch.call_queue import CallQueue
from rollout_backend.dispatch.dispatcher import Dispatcher
from rollout_backend.runtimes.base import SessionCalls
from rollout_backend.step.in_flight import InFlightLog
from rollout_backend.step.rollout_task import RolloutTask, StepContext
from rollout_backend.step.services import Pauses, StepServices, UrlSigner
from step_bench import Agents, Gateways


async def make_rollouts(
    runtime: SessionCalls,
    calls: CallQueue,
    count: int,
    *,
    max_attempts: int = 3,
    until: float = 1e9,
    presigner: UrlSigner | None = None,
) -> list[RolloutTask]:
    """Plan rollouts of the task `a`. A refused invoke is repeated at once, until the loop's time is `until`."""
    config = run_config(runtime={"kind": "http", "url": "http://127.0.0.1:9", "max_attempts": max_attempts})
    unused, task = cast(Any, None), Task("a", {}, rollouts=count)
    manifests = create_autospec(ManifestStore, instance=True)
    manifests.read.return_value = None
    step_services = StepServices(
        config=config,
        runtime=Agents(unused, unused),
        dispatcher=Dispatcher(runtime, calls, max_sessions=count, stop_retry_s=0.0, stop_wait=wait_none()),
        gateways=Gateways(),
        buffer=unused,
        manifests=manifests,
        blocklist=unused,
        archive=unused,
        breaker=unused,
        in_flight=create_autospec(InFlightLog, instance=True),
        presigner=presigner,
        pauses=Pauses(attempt=wait_none(), refusal=wait_none()),
    )

    def abort(error: BaseException) -> None:
        raise AssertionError("the step was aborted") from error

    request = StepRequest(0, (task,), Sampling())
    context = StepContext(request, step_services, {"a": GroupState("a", needed=count)}, abort)
    context.plan.deadline = until + config.timeouts.publish_grace_s
    await context.plan.write_first()
    ids = context.plan.manifest.tasks[0].rollouts
    return [RolloutTask(context.ledger.plan(rollout_id, "a"), task, context) for rollout_id in ids]
