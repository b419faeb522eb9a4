"""All checks of `rollout doctor`, in the order in which their lines are printed."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

from rollout_backend.agents.runtimes.base import AgentRuntime, runtime_class
from rollout_backend.base import aws
from rollout_backend.base.check_result import CheckResult
from rollout_backend.base.formats import dollars
from rollout_backend.config import RolloutConfig
from rollout_backend.run.accounts.archive import RunArchive
from rollout_backend.run.accounts.cost import Prices
from rollout_backend.run.accounts.findings import Level, forced_formats
from rollout_backend.run.checks.account import (
    check_clock_and_region,
    check_permissions,
    find_identity,
    needed_permissions,
    region_of_queue,
)
from rollout_backend.run.checks.machine import check_engine_version, check_open_files, check_packages
from rollout_backend.run.checks.model import check_capture, check_tools
from rollout_backend.run.checks.preflight import Preflight
from rollout_backend.run.checks.public_address import check_public_address
from rollout_backend.run.collect.store import ResultStore


async def examine(
    config: RolloutConfig, rollouts: int | None = None, *, machine: bool = True, engine: bool = False
) -> list[CheckResult]:
    """Run every check. `rollouts` is the size of a batch. Without `machine`, leave out what only the machine of the
    run can answer; with `engine`, make one model call, and start the engines for it."""
    found, platform = await _examine_account(config, rollouts, machine=machine)
    found += [_describe_timeouts(config), estimate_cost(config.priced_for(platform), rollouts)]
    if machine:
        found += await check_public_address(config)
        found += await asyncio.to_thread(check_tools, config)
        found += await asyncio.to_thread(check_forced_formats, config)
        found += [check_packages(), *await check_engine_version(config), check_open_files(config)]
        if engine:
            found += await check_capture(config)
        else:
            text = (
                "no model call was made: --engine makes one through router and gateway, and starts the engines for it"
            )
            found.append(CheckResult("unchecked", "serving", text, "engine-capture"))
    return found


async def _examine_account(
    config: RolloutConfig, rollouts: int | None, *, machine: bool
) -> tuple[list[CheckResult], str | None]:
    """Run the checks of every run, and judge permissions by IAM and by the calls that those checks made. Return the
    platform of the runtime as well, if it is known."""
    preflight = Preflight(config, rollouts)
    found: list[CheckResult] = []
    async with AsyncExitStack() as stack:
        identity, line = await find_identity(config)
        found += [line, *await check_clock_and_region(config)]
        with aws.logged_calls() as calls:
            await preflight.run(stack, machine=machine)
            kept = await _describe_keeping(preflight.store)
            quotas = await check_quotas(config, preflight.runtime)
            platform = None if preflight.runtime is None else preflight.runtime.describe().get("platform")
        if identity is not None:
            wanted = [
                *needed_permissions(config, identity),
                *runtime_class(config.runtime).permissions(config.runtime),
            ]
            found += await check_permissions(config, identity, wanted, calls)
    return [*found, *preflight.findings, *quotas, kept, *_check_queue_region(config)], platform


async def check_quotas(config: RolloutConfig, runtime: AgentRuntime | None) -> Sequence[CheckResult]:
    """Compare the limits of a run with the account's quotas. `runtime` is None if it could not be opened."""
    kind = runtime_class(config.runtime)
    limits = runtime.limits() if runtime is not None else config.runtime
    return await kind.check_quotas(limits, config.aws.endpoint_url)


async def _describe_keeping(store: ResultStore) -> CheckResult:
    name = "bucket-keeping"
    try:
        return CheckResult("ok", "storage.bucket", f"bucket {store.config.bucket}: {await store.keeping()}", name)
    except aws.CALL_ERRORS as error:
        why = "these credentials may not ask" if aws.is_denied(error) else aws.reason(error)
        text = f"bucket {store.config.bucket}: versioning and lifecycle are not known ({why})"
        return CheckResult("unchecked", "storage.bucket", text, name)


def _check_queue_region(config: RolloutConfig) -> list[CheckResult]:
    region = region_of_queue(config.queue.url or "")
    if region in (None, config.aws.region) or not config.uses_queue:
        return []
    text = f"the queue is in {region}, and aws.region is {config.aws.region}: bucket and queue must be in one region"
    return [CheckResult("problem", "queue.url", text, "queue-region")]


def _describe_timeouts(config: RolloutConfig) -> CheckResult:
    """Describe the timeouts. The settings refuse a wrong order."""
    times = config.timeouts
    rungs = {
        "model call": times.model_call_s,
        "agent": times.agent_s,
        "agent and result": times.session_s,
        "step": times.collection_s,
        "session key": times.session_key_s,
    }
    return CheckResult("ok", "timeouts", " < ".join(f"{name} {seconds:g} s" for name, seconds in rungs.items()))


def estimate_cost(config: RolloutConfig, rollouts: int | None) -> CheckResult:
    """Estimate the maximum cost of a step."""
    prices = Prices.of(config)
    if prices is None:
        text = "no estimate: set prices.session_vcpus and prices.session_gb, or prices.gpu_hour"
        return CheckResult("unchecked", "prices", text, "cost")
    batch, times = rollouts or config.group.size, config.timeouts
    most = prices.at_most(batch, times.agent_s, times.collection_s)
    text = (
        f"a step of {batch:,} rollouts costs at most {dollars(most.total)} ({most.parts}), if every agent takes all "
        f"of timeouts.agent_s without waiting for the model (estimate, without {prices.left_out})"
    )
    return CheckResult("ok", "prices", text, "cost")


def check_forced_formats(config: RolloutConfig) -> list[CheckResult]:
    """Report forced formats in the newest step of the run, or else of another run in `output_dir`.

    Only calls show that a framework forces a tool. Without a sampled token, or with `as_auto`, return nothing.
    """
    steps = "steps/*.rollouts.jsonl"
    found = [*config.run_dir.glob(steps)] or [*config.output_dir.glob(f"*/{steps}")]
    if not found or config.gateway.forced_tools == "as_auto":
        return []
    newest, name = max(found, key=lambda path: path.stat().st_mtime), "forced-formats"
    archive = RunArchive(newest.parents[1])
    try:
        summary = archive.read_summary(archive.steps()[-1])
    except (OSError, ValueError) as error:
        return [CheckResult("unchecked", "gateway.forced_tools", f"{newest} cannot be read: {error}", name)]
    text = f"in the last step of run {archive.run_dir.name}"
    if not summary.sampled_tokens:
        return []
    for finding in forced_formats(summary.sampled_tokens, summary.trained_tokens):
        if finding.level is not Level.NOTE:
            return [CheckResult("warning", "gateway.forced_tools", f"{text}, {finding.text}: {finding.advice}", name)]
    return [CheckResult("ok", "gateway.forced_tools", f"{text}, replies could be trained", name)]
