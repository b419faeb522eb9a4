"""Check everything that a run needs before it starts or spends anything, and list every finding.

Invariants:

- Every check runs, even if others fail.
- An object that is written here is removed, if that is allowed; a queue that is created here is deleted; nothing else
  changes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

from rollout_backend.agents.runtimes.base import AgentRuntime, open_runtime, runtime_class
from rollout_backend.base.check_result import CheckResult, Level, raise_problems
from rollout_backend.base.disk import call_disk
from rollout_backend.config import AgentCoreConfig, RolloutConfig, RuntimeConfig
from rollout_backend.config.gateway import AUTO
from rollout_backend.core.harbor import describe_ignored, fit_to_runtime
from rollout_backend.core.tasks import Task
from rollout_backend.errors import ConfigError, PreflightError, RolloutBackendError
from rollout_backend.model.serving.engine_fleet import engine_factory
from rollout_backend.run.checks.capacity import check_engines, check_gateways
from rollout_backend.run.checks.machine import check_machine
from rollout_backend.run.collect.presign import Presigner
from rollout_backend.run.collect.queue import check_queue
from rollout_backend.run.collect.store import ResultStore
from rollout_backend.run.dispatch.ramp import check_ramp, startable_rollouts

# Reading a model's files takes minutes on a slow disk.
_MACHINE_S = 600.0


class Preflight:
    """Runs the checks of one run. The stack passed to `run` closes what they open, which the run then uses."""

    def __init__(self, config: RolloutConfig, rollouts: int | None = None) -> None:
        """`rollouts` is the size of a batch, whose ramp is checked."""
        self.findings: list[CheckResult] = []
        self.store: ResultStore
        self.runtime: AgentRuntime | None = None
        """The runtime, if it exists and needs no change. Otherwise the run creates or updates it."""
        self._config = config
        self._rollouts = rollouts

    async def run(
        self, stack: AsyncExitStack, *, machine: bool = True, engines: bool = True, queue: bool = True
    ) -> None:
        """Run all checks. Without `engines`, leave out those of the engines, which start later. Without `queue`,
        the queue is checked only if something else is wrong: the run opens it."""
        config = self._config
        connections = config.collect.max_fetches + 4
        self.store = await ResultStore.open(config.storage, config.aws, connections=connections)
        stack.push_async_callback(self.store.aclose)
        checks: list[Awaitable[list[CheckResult]]] = [self._check_bucket(), self._check_runtime(stack, engines)]
        if machine:
            checks.append(self._check_machine(engines))
        if engines:
            checks.append(self._check_engines())
        # Wait for every check, so that none outlives what `stack` closes.
        for found in await asyncio.gather(*checks, return_exceptions=True):
            if isinstance(found, BaseException):
                raise found
            self.findings += found
        if config.uses_queue and (queue or any(finding.level == "problem" for finding in self.findings)):
            try:
                self.findings.append(await check_queue(config.queue, config.aws))
            except RolloutBackendError as error:
                self.findings.append(CheckResult.of_error("queue.url", error))

    async def _check_machine(self, engines: bool) -> list[CheckResult]:
        try:
            return await call_disk(lambda: check_machine(self._config, engines=engines), _MACHINE_S)
        except TimeoutError:
            where = f"output_dir ({self._config.output_dir}) and model.path ({self._config.model.path})"
            message = f"the checks of this machine took longer than {_MACHINE_S:g} s: look at the disks of {where}"
            return [CheckResult("problem", "output_dir", message)]

    async def _check_engines(self) -> list[CheckResult]:
        try:
            return [*await engine_factory(self._config, self._config.run_dir).check()]
        except RolloutBackendError as error:
            return [CheckResult.of_error("serving.kind", error)]

    async def _check_bucket(self) -> list[CheckResult]:
        storage = self._config.storage

        short = ""

        async def check() -> str:
            nonlocal short
            removed = await self.store.check()
            if self._config.runtime.agent_protocol != "rollout":
                removed &= await self._check_results()
            if storage.presigned:
                async with contextlib.aclosing(Presigner(storage, self._config.aws)) as presigner:
                    short = await presigner.check(self._config.timeouts.session_s)
            stays = "" if removed else f"; an object of 2 bytes stays under {storage.prefix}runs/preflight/"
            return f"bucket {storage.bucket}: can be listed, written once and read{stays}"

        found = [await _finding("storage.bucket", check)]
        return [*found, CheckResult("warning", "storage.presigned", short)] if short else found

    async def _check_results(self) -> bool:
        """Check that this side can write results, as it does for agents of another protocol."""
        try:
            return await self.store.check(writes_results=True)
        except PreflightError as error:
            place = f"{self._config.storage.prefix}runs/*/steps/*"
            raise PreflightError(
                f"runtime.agent_protocol={self._config.runtime.agent_protocol}: the trainer writes the results, and "
                f"needs s3:PutObject on {place}. Deploy the stack with AgentProtocol="
                f"{self._config.runtime.agent_protocol}: {error}"
            ) from error

    async def _check_runtime(self, stack: AsyncExitStack, engines: bool) -> list[CheckResult]:
        config, session_s = self._config.run_runtime, self._config.timeouts.session_s
        implementation = runtime_class(config)
        limits: RuntimeConfig = config

        lines: Sequence[CheckResult] = ()
        # This applies to a runtime that is created from an image before the run.
        in_public_network = isinstance(config, AgentCoreConfig) and bool(
            config.image and not config.subnets and not config.endpoint_url
        )

        async def check() -> str:
            nonlocal limits, lines, in_public_network
            changes = await implementation.preview(config)
            if changes is not None:
                return changes
            runtime = await open_runtime(config)
            stack.push_async_callback(runtime.aclose)
            lines = await runtime.check(session_s) or ()
            in_public_network = runtime.is_in_public_network
            self.runtime, limits = runtime, runtime.limits()
            return "runtime: there, and ready"

        found = await _finding("runtime", check)
        results = [*(lines or [found]), self._check_ramp(limits)]
        results += check_gateways(self._config, limits.max_sessions, self._rollouts)
        serving = self._config.serving
        servers = len(serving.urls) if serving.kind == "external" else serving.servers
        counted = engines and serving.kind != "tinker" and not serving.follow_dns
        if counted and self._rollouts is not None and isinstance(servers, int):
            results += check_engines(self._config, limits.max_sessions, self._rollouts, servers)
        if in_public_network and self._config.gateway.public_url == AUTO and self._config.relay is None:
            text = (
                "auto is this machine's private address, and the runtime's agents are in the public network: deploy "
                "them into this network (rollout deploy --subnet, --security-group), use a relay, or set a public "
                "address"
            )
            results.append(CheckResult("problem", "gateway.public_url", text, "gateway-network"))
        return results

    def _check_ramp(self, limits: RuntimeConfig) -> CheckResult:
        setting = "runtime.invoke_per_s"
        if self._rollouts is None:
            count = startable_rollouts(self._config, limits)
            text = f"at {limits.invoke_per_s:g} sessions per second, {count:,} rollouts can start within "
            few = count < 10 * self._config.group.size
            return CheckResult("warning" if few else "ok", setting, f"{text}timeouts.collection_s")
        try:
            text, all_finish = check_ramp(self._config, limits, self._rollouts)
        except ConfigError as error:
            return CheckResult("problem", setting, str(error))
        return CheckResult("ok" if all_finish else "warning", setting, text)


async def check_tasks(
    config: RolloutConfig, tasks: Sequence[Task], *, leave_out: bool, resumed: bool = False
) -> tuple[Sequence[Task], list[CheckResult]]:
    """Return the tasks that the runtime can start, and what was found. A task that it cannot start is a problem, or
    only a warning: with `leave_out` if there are others, and with `resumed`, which returns all tasks."""
    payloads = {task.task_id: task.payload for task in fit_to_runtime(tasks, config.runtime)}
    refused, found = await runtime_class(config.runtime).check_tasks(config.run_runtime, payloads)
    ignored = describe_ignored(tasks, config.runtime)
    found = [*found, *([CheckResult("warning", "runtime.kind", ignored, "task-resources")] if ignored else [])]
    level: Level = "warning" if resumed or (leave_out and len(refused) < len(payloads)) else "problem"
    lines = [
        CheckResult(level, "runtime.task_image", f"task {name!r} cannot run: {why}", f"task:{name}")
        for name, why in refused.items()
    ]
    return [task for task in tasks if resumed or task.task_id not in refused], [*found, *lines]


async def _finding(setting: str, check: Callable[[], Awaitable[str]]) -> CheckResult:
    try:
        return CheckResult("ok", setting, await check())
    except RolloutBackendError as error:
        return CheckResult.of_error(setting, error)


async def check_run(
    config: RolloutConfig, rollouts: int | None = None, *, machine: bool = True, engines: bool = True
) -> Sequence[CheckResult]:
    """Run all checks, close what they opened, and return the findings. Without `machine`, check only the external
    services and the ramp of a batch.

    Raises:
        PreflightError: something is missing or refuses access; says what to do.
    """
    preflight = Preflight(config, rollouts)
    async with AsyncExitStack() as stack:
        await preflight.run(stack, machine=machine, engines=engines)
    raise_problems(preflight.findings)
    return preflight.findings
