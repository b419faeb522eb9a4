"""Rollouts of one step whose attempts a test makes itself. S3 accepts each manifest, and no result arrives."""

from typing import Any, cast
from unittest.mock import create_autospec

from tenacity import wait_none

from agent_wrapper.contract import Sampling
from builders import run_config
from rollout_backend.collect.manifest_store import ManifestStore
from rollout_backend.core.policy import Stragglers
from rollout_backend.core.tasks import Task
from rollout_backend.dispatch.call_queue import CallQueue
from rollout_backend.dispatch.dispatcher import Dispatcher
from rollout_backend.runtimes.base import SessionCalls
from rollout_backend.step.plan import StepPlan
from rollout_backend.step.rollout_task import RolloutTask, StepContext
from rollout_backend.step.services import Pauses, StepServices, UrlSigner
from rollout_backend.step.sessions import StepSessions
from rollouts import make_ledger
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
    unused, task = cast(Any, None), Task("a", {})
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
        presigner=presigner,
        pauses=Pauses(attempt=wait_none(), refusal=wait_none()),
    )
    plan, ledger = StepPlan(0, step_services), make_ledger()
    plan.deadline = until + config.timeouts.publish_grace_s
    await plan.write_first([(task, count, Sampling())], weights="", same_weights=False, allow_subset=False)

    def abort(error: BaseException) -> None:
        raise AssertionError("the step was aborted") from error

    context = StepContext(
        step=0,
        services=step_services,
        sampling=Sampling(),
        ledger=ledger,
        plan=plan,
        sessions=StepSessions(0, step_services, ledger, abort),
        stragglers=Stragglers(None, lambda rollout_id, began: False),
        abort=abort,
    )
    ids = plan.manifest.tasks[0].rollouts
    return [RolloutTask(ledger.plan(rollout_id, "a"), task, context) for rollout_id in ids]
