"""`rollout down`: remove what `rollout deploy` and runs have made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout_backend.cli.common import Stack, echo, exit_codes, run_async
from rollout_backend.cli.deploy import LOCAL_CLOUD
from rollout_backend.config import AgentCoreConfig, load_config
from rollout_backend.errors import ConfigError

if TYPE_CHECKING:
    from rollout_backend.deploy.target import Target


def down(
    config: Annotated[Path | None, typer.Argument(help="Config file written by `rollout deploy`.")] = None,
    stack: Stack = None,
    delete_results: Annotated[
        bool, typer.Option("--delete-results", help="Also delete the results of all runs in the bucket.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it, nothing changes.")] = False,
) -> None:
    """Remove the runtime, the uploaded code and the queues of runs, and list what stays and why.

    Stop your runs first. Without --yes, only list. A runtime is deleted only if its tag names this backend, and a
    queue only if its run is in the bucket. Also stops the local cloud of `rollout deploy --local`.
    """
    with exit_codes():
        if (config is None) == (stack is None):
            raise ConfigError("name the config that `rollout deploy` has written, or --stack")
        run_async(_down(config, stack, delete_results, yes))


async def _down(config: Path | None, stack: str | None, delete_results: bool, yes: bool) -> int:
    from rollout_backend.deploy.target import read_stack
    from rollout_backend.deploy.teardown import Teardown
    from rollout_backend.local.background import read_background_cloud, stop_background_cloud

    target = await read_stack(stack) if stack is not None else _read_config(config)
    cloud = read_background_cloud(LOCAL_CLOUD.absolute())
    if cloud is not None and cloud.endpoint_url != target.endpoint_url:
        cloud = None
    teardown = Teardown(target, delete_results=delete_results or cloud is not None)
    found = await teardown.find()
    for resource in found.ours:
        echo(f"{'delete' if yes else 'would delete'}: {resource}")
    if cloud is not None:
        echo(f"{'stop' if yes else 'would stop'}: the local cloud, and delete {cloud.folder}")
    for line in found.stays:
        echo(f"stays: {line}")
    if config is not None:
        echo(f"stays: {config}, which may hold settings of yours")
        if (runs := load_config(config).output_dir).is_dir():
            echo(f"stays: {runs}, the records and reports of runs on this machine")
    if not yes:
        echo("nothing was changed; --yes deletes")
        return 0
    await teardown.remove(found.ours, echo)
    if cloud is not None:
        stop_background_cloud(cloud)
    left = [] if cloud is not None else (await teardown.find()).ours
    for resource in left:
        echo(f"left: {resource} appeared meanwhile; run the command again")
    echo("nothing else that this backend made is left" if not left else f"{len(left)} are left")
    return 1 if left else 0


def _read_config(config: Path | None) -> Target:
    from rollout_backend.deploy.target import Target

    settings = load_config(config)
    runtime = settings.runtime
    if not isinstance(runtime, AgentCoreConfig) or runtime.arn is None:
        raise ConfigError(f"{config} names no runtime.arn of AgentCore, so `rollout deploy` has not written it")
    return Target(
        region=settings.aws.region,
        bucket=settings.storage.bucket,
        runtime_name=runtime.arn.rpartition("/")[2].rpartition("-")[0],
        arn=runtime.arn,
        prefix=settings.storage.prefix,
        queue_url=settings.queue.url,
        endpoint_url=settings.aws.endpoint_url,
        runtime_endpoint_url=runtime.endpoint_url,
    )
