"""Commands for the resources of runs in the cloud: `rollout deploy` creates an agent's runtime, `down` removes what
`deploy` and runs have created, and `infra` writes the files that describe the infrastructure."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rollout_backend.cli.common import (
    Overrides,
    Stack,
    console,
    echo,
)
from rollout_backend.config import AgentCoreConfig, is_placeholder, load_config
from rollout_backend.errors import ConfigError

if TYPE_CHECKING:
    from rollout_backend.workbench.deploy.deployment import Deployment
    from rollout_backend.workbench.deploy.target import Target

LOCAL_CLOUD = Path(".rollout") / "local-cloud"
"""Folder of the local cloud that `--local` starts and `rollout down` removes."""
CONFIG = Path("rollout.yaml")
_TASKS = "tasks.jsonl"


async def deploy(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="AGENT_DIR", help="The agent's folder, with agent.py and, optionally, requirements.txt."
        ),
    ] = None,
    stack: Stack = None,
    local: Annotated[
        bool, typer.Option("--local", help="Deploy to S3, SQS and AgentCore on this machine, until `rollout down`.")
    ] = False,
    build: Annotated[
        Literal["code", "codebuild", "docker", "podman"],
        typer.Option(
            help="Upload the code, or build and push an image, in AWS CodeBuild or locally. Images need --stack."
        ),
    ] = "code",
    build_role: Annotated[
        str | None,
        typer.Option(metavar="ARN", help="Role for CodeBuild, with --build codebuild. Default: the stack's."),
    ] = None,
    subnets: Annotated[
        list[str] | None,
        typer.Option(
            "--subnet", help="Private subnet for the agents. Default: the stack's network, or the public one."
        ),
    ] = None,
    security_groups: Annotated[
        list[str] | None, typer.Option("--security-group", help="Security group for the agents, with --subnet.")
    ] = None,
    adopt: Annotated[
        str | None,
        typer.Option(
            metavar="ARN",
            help="Show what prevents invokes of an existing runtime. With --yes, fix only that.",
        ),
    ] = None,
    tasks: Annotated[
        Path | None, typer.Option(help=f"Task file; the check uses its first task. Default: {_TASKS} in its folder.")
    ] = None,
    config: Annotated[Path, typer.Option(help="Config file to write.")] = CONFIG,
    yes: Annotated[bool, typer.Option("--yes", help="Carry out the plan. Without it, nothing changes.")] = False,
    override: Overrides = None,
) -> int:
    """Check an agent on this machine, upload it, create or update its runtime, and write the config of its runs.

    The check starts the agent, runs one rollout on a scripted model, and stops it. Then the command prints its plan
    and its AWS calls, and with --yes carries them out. --local needs no account and no --yes. --override changes the
    written config.
    """
    from rollout_backend.base.child_process import find_uv
    from rollout_backend.cli.doctor import print_finding
    from rollout_backend.workbench.deploy.contract_check import check_contract
    from rollout_backend.workbench.deploy.deployment import Deployment, runtime_name, runtime_settings
    from rollout_backend.workbench.deploy.image import check_builder
    from rollout_backend.workbench.deploy.target import Target, read_stack
    from rollout_backend.workbench.local import background

    if adopt is not None:
        if folder is not None or stack is not None or local:
            raise ConfigError("--adopt takes a runtime as it is: omit AGENT_DIR, --stack and --local")
        return await _adopt(adopt, yes)
    if folder is None:
        raise ConfigError("name the agent's folder AGENT_DIR, or a runtime with --adopt")
    if local == (stack is not None):
        raise ConfigError("name the account's --stack, or deploy to this machine with --local")
    if local and build != "code":
        raise ConfigError(
            f"--build {build}: --local runs the agent's code as processes of this machine, and no image: "
            "omit it here, and give it with --stack"
        )
    if local and (subnets or security_groups):
        raise ConfigError(
            "--subnet, --security-group: --local runs the agent in this machine's network: omit them here, and "
            "give them with --stack"
        )
    if build_role is not None and build != "codebuild":
        raise ConfigError("--build-role belongs to --build codebuild")
    if bool(subnets) != bool(security_groups):
        raise ConfigError("--subnet and --security-group belong together: set both, or neither")
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}: name the agent's, which has agent.py")
    payload, overrides = _first_payload(tasks or folder / _TASKS), override or []
    replaced: dict[str, Any] = {}
    runtime = runtime_settings(folder, overrides)
    if build == "code":
        find_uv()
    else:
        check_builder(build)
    # `rollout down` cannot stop a cloud that no config names.
    with contextlib.ExitStack() as undo:
        if stack is not None:
            target = await read_stack(stack)
            if target.agent_protocol != "rollout":
                raise ConfigError(
                    f"stack {stack} is for agents of {target.agent_protocol} (its parameter AgentProtocol), and "
                    "rollout deploy for agents in RolloutApp: deploy your image by the stack's parameter ImageUri"
                )
            if build == "codebuild":
                target = replace(target, build_role=build_role or target.build_role)
                if target.build_role is None:
                    raise ConfigError(
                        f"stack {stack} has no output BuildRoleArn: deploy infra/template.yaml again, or set "
                        "--build-role"
                    )
        else:
            echo("starting S3, SQS, AgentCore and a scripted model on this machine; `rollout down` stops them")
            place = LOCAL_CLOUD.absolute()
            ran_before = background.read_background_cloud(place) is not None
            cloud = background.start_background_cloud(place)
            if not ran_before:
                undo.callback(background.stop_background_cloud, cloud)
            target = Target(
                region=cloud.region,
                bucket=cloud.bucket,
                runtime_name=runtime_name(folder),
                role=cloud.role,
                endpoint_url=cloud.endpoint_url,
                runtime_endpoint_url=cloud.runtime_endpoint_url,
                session_logs=cloud.session_logs,
            )
            replaced = {**cloud.model_settings(), "gateway": {}, "relay": {}}
        echo(f"checking {folder} against the container's contract")
        findings = await check_contract(folder, payload)
        for finding in findings:
            print_finding(finding)
        if any(finding.level == "problem" for finding in findings):
            return 2
        target = replace(target, qualifier=runtime.qualifier)
        network = tuple(subnets or ()), tuple(security_groups or ())
        deployment = Deployment(folder, target, build, stack is None, *network, runtime)
        _print_plan(deployment, config)
        if stack is not None and not yes:
            echo("nothing was changed; --yes carries out this plan")
            return 0
        deployed = await deployment.deploy(payload, echo)
        _write_config(deployment, deployed.settings(), config, replaced, overrides)
        undo.pop_all()
    return 0


async def _adopt(arn: str, yes: bool) -> int:
    from rollout_backend.workbench.deploy.adoption import adopt

    try:
        AgentCoreConfig(arn=arn)
    except ValueError:
        raise ConfigError(f"--adopt {arn} is no ARN of an AgentCore runtime") from None
    await adopt(arn, echo, carry_out=yes)
    return 0


def _first_payload(file: Path) -> Mapping[str, Any]:
    from rollout_backend.core.tasks import read_tasks

    if not file.is_file():
        raise ConfigError(
            f"there is no task file {file}, on whose first task the agent is checked: name one with --tasks"
        )
    return read_tasks(file)[0].payload


def _print_plan(deployment: Deployment, config: Path) -> None:
    console.print("[bold]plan[/]")
    for step in (*deployment.plan(), f"write {config}"):
        echo(f"  {step}")
    console.print(f"[bold]{'calls of services on this machine' if deployment.native else 'AWS calls'}[/]")
    for call in deployment.calls():
        echo(f"  {call.name}: {call.why} ({', '.join(call.actions)})")


def _write_config(
    deployment: Deployment,
    settings: Mapping[str, Any],
    config: Path,
    replaced: Mapping[str, Any],
    overrides: Sequence[str],
) -> None:
    import yaml

    from rollout_backend.workbench.deploy.deployment import config_text, write_config

    text = config_text(settings, deployment.folder, replaced, overrides)
    if not write_config(config, text):
        echo(f"{config} is your own file and was not changed. Put this into it:")
        echo(text)
        return
    echo(f"wrote {config}")
    if not deployment.native:
        url = yaml.safe_load(text).get("gateway", {}).get("public_url")
        missing = "model.path and gateway.public_url" if url is None or is_placeholder(url) else "model.path"
        echo(f"set {missing} in {config}")
    name, tasks = shlex.quote(str(config)), shlex.quote(str(deployment.folder / _TASKS))
    echo(f"next: rollout doctor {name}, then rollout run {name} --tasks {tasks}, and at the end rollout down {name}")


async def down(
    config: Annotated[Path | None, typer.Argument(help="Config file written by `rollout deploy`.")] = None,
    stack: Stack = None,
    delete_results: Annotated[
        bool, typer.Option("--delete-results", help="Also delete the results of all runs in the bucket.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it, nothing changes.")] = False,
) -> int:
    """Remove the runtime, the uploaded code and the queues of runs, and list what stays and why.

    Stop your runs first. Without --yes, only list. A runtime is deleted only if its tag names this backend, and a
    queue or a training session only if its run is in the bucket. Also stops the local cloud of
    `rollout deploy --local`.
    """
    from rollout_backend.workbench.deploy.target import read_stack
    from rollout_backend.workbench.deploy.teardown import Teardown
    from rollout_backend.workbench.local import background

    if (config is None) == (stack is None):
        raise ConfigError("name the config that `rollout deploy` has written, or --stack")
    target = await read_stack(stack) if stack is not None else _read_config(config)
    place = Path(target.session_logs).parent if target.session_logs is not None else LOCAL_CLOUD
    if target.session_logs is not None and background.has_ended(place):
        echo(f"{'delete' if yes else 'would delete'}: {place}, of a local cloud that has ended")
        if yes:
            background.remove_folder(place)
        return 0
    cloud = background.read_background_cloud(place)
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
        background.stop_background_cloud(cloud)
        background.remove_folder(place)
    left = [] if cloud is not None else (await teardown.find()).ours
    for resource in left:
        echo(f"left: {resource} appeared meanwhile; run the command again")
    echo("nothing else that this backend made is left" if not left else f"{len(left)} are left")
    return 1 if left else 0


def _read_config(config: Path | None) -> Target:
    from rollout_backend.workbench.deploy.target import Target

    settings = load_config(config)
    runtime, trained = settings.runtime, settings.training_service
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
        session_logs=None if runtime.session_logs is None else str(runtime.session_logs),
        trains_in_sessions=trained is not None and trained.kind == "sagemaker",
        sessions_url=None if trained is None else trained.base_url,
    )


def infra(
    folder: Annotated[Path, typer.Argument(help="Folder to write to.")] = Path("infra"),
) -> None:
    """Write the CloudFormation templates, Kubernetes manifests and Grafana dashboard of this version into a folder.

    The documentation names them by their paths in a checkout, such as `infra/template.yaml`. Files that you have
    changed are not replaced.
    """
    from rollout_backend.workbench.deploy import INFRA

    files = {
        folder / path.name: path.read_text() for path in sorted(INFRA.iterdir()) if path.suffix in (".yaml", ".json")
    }
    if changed := [str(path) for path, text in files.items() if path.exists() and path.read_text() != text]:
        raise ConfigError(f"{', '.join(changed)} differs from this version's: move it, or name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text)
            echo(f"wrote {path}")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from None
