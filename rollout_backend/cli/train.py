"""`rollout train`: train on a training service."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer

from rollout_backend.cli.common import (
    SERVICE_SAMPLES,
    Overrides,
    Quiet,
    ScorerOption,
    Stack,
    TaskFile,
    Verbose,
    load_settings,
    read_limited,
    run_output,
    with_scorer,
)
from rollout_backend.errors import ConfigError, RolloutBackendError

if TYPE_CHECKING:
    from agent_wrapper.contract import Rollout
    from rollout_backend.run.accounts.step_report import StepResult
    from rollout_backend.training.service import TrainingData


async def train(
    config: Annotated[Path | None, typer.Argument(help="Settings in YAML.")] = None,
    tasks: TaskFile = None,
    held_out: Annotated[
        Path | None, typer.Option("--held-out", help="Tasks to evaluate on, in the form of --tasks.")
    ] = None,
    stack: Stack = None,
    scorer: ScorerOption = None,
    override: Overrides = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Train a LoRA adapter on a training service, whose weights also answer the agents' model calls.

    The section `training_service` names the service and the steps. No engine and no GPU is needed: the settings of
    `serving` are not used. The key of Tinker's API is TINKER_API_KEY in the environment.

    To resume a training that was killed or interrupted, run the same command with the same run_id.

    Exit codes: 0, all steps are trained; 1, the training failed, and can be resumed; 2, the input is invalid, and
    nothing was started; 130, interrupted.
    """
    from rollout_backend.base.check_result import raise_problems
    from rollout_backend.core.tasks import check_private
    from rollout_backend.manager import RolloutManager
    from rollout_backend.run.checks.preflight import check_tasks
    from rollout_backend.run.collect.store import ResultStore
    from rollout_backend.training.checks import check_service
    from rollout_backend.training.loggers import open_loggers
    from rollout_backend.training.loop import TrainingLoop
    from rollout_backend.training.sampling_server import SamplingServer, service_of
    from rollout_backend.views.page.report import try_to_write_report

    output = run_output(quiet, verbose, False)
    if tasks is None or (config is None and stack is None):
        raise ConfigError("name the settings or --stack, and --tasks")
    settings = await load_settings(config, [*with_scorer(override, scorer), SERVICE_SAMPLES], stack)
    wanted = read_limited(tasks, None, settings.runtime)
    evaluated = read_limited(held_out, None, settings.runtime) if held_out is not None else ()
    for some in (wanted, evaluated):
        check_private(some, settings.scoring.enabled)
        raise_problems((await check_tasks(settings, some, leave_out=False))[1] if some else ())
    section = TrainingLoop.check(settings, wanted, evaluated)

    def mean_reward(rollouts: Iterable[Rollout]) -> tuple[str, dict[str, float]]:
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        return (f"reward {fmean(rewards):.3f}", {"reward": fmean(rewards)}) if rewards else ("no reward", {})

    rollouts = section.tasks_per_step * settings.group.size

    def describe(metrics: Mapping[str, float]) -> str:
        return "".join(f", {name} {value:.4g}" for name, value in sorted(metrics.items()))

    def on_trained(number: int, result: StepResult, data: TrainingData, metrics: dict[str, float]) -> None:
        rewarded, values = mean_reward(rollout for group in result.groups for rollout in group.rollouts)
        output.status(
            f"step {number} of {section.steps}: {rewarded}, {data.rollouts} rollouts and "
            f"{len(data.groups)} of {len(result.groups)} groups trained{describe(metrics)}"
        )
        trained = {"rollouts": data.rollouts, "groups": len(data.groups), "tokens": data.trained_tokens}
        log_values(number, values | {f"trained/{name}": count for name, count in trained.items()} | metrics)

    def on_evaluated(number: int, result: StepResult) -> None:
        rewarded, values = mean_reward(result.rollouts)
        output.status(f"evaluation after step {number}: {rewarded}, {len(result.rollouts)} rollouts")
        log_values(number, {f"evaluation/{name}": value for name, value in values.items()})

    if section.kind == "tinker":
        raise_problems(await check_service(settings, trains=True))
    async with (
        open_loggers(settings) as log_values,
        service_of(settings) as service,
        SamplingServer(service, str(settings.model.path), settings.timeouts.model_call_s) as server,
    ):
        serving = settings.serving.model_copy(update={"kind": "external", "urls": (server.url,)})
        manager = RolloutManager(
            settings.model_copy(update={"serving": serving}),
            on_status=output.status,
            on_phase=output.phase,
            on_serving=output.serving,
            rollouts=rollouts,
            started_by="train",
        )
        output.begin(settings, tasks=section.tasks_per_step, rollouts=rollouts, agent=None)
        store = await ResultStore.open(settings.storage, settings.aws)
        try:
            async with output.watch(manager.progress), manager:
                output.started(manager.config)
                loop = TrainingLoop(
                    settings,
                    manager,
                    server.serve,
                    service,
                    store,
                    wanted,
                    evaluated,
                    on_trained=on_trained,
                    on_evaluated=on_evaluated,
                )
                record = await loop.run()
                if any((usage := await service.usage()).values()):
                    output.status(f"after the last step{describe(usage)}")
                manager.archive.write_last_step_end()
        except (asyncio.CancelledError, RolloutBackendError):
            output.status(f"resume it with the same command and run_id={settings.run_id}")
            raise
        finally:
            await store.aclose()
            report = try_to_write_report(settings.run_dir)
    output.status(f"trained {record.trained} steps: weights {record.sampler}, with optimizer {record.state}")
    if report is not None:
        output.status(f"report: {report}")
    return 0
