"""`rollout demo`: the whole path on a laptop."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from rollout_backend.cli.common import Json, Overrides, Quiet, Verbose, console, run_output
from rollout_backend.cli.local_model import load_local_config, local_model
from rollout_backend.cli.run import collect_step
from rollout_backend.config import load_config
from rollout_backend.errors import ConfigError

EXAMPLE = Path(__file__).parents[1] / "local" / "demo"
"""`examples/arithmetic`, which the installed package includes."""
_TAKEN = 16


async def demo(
    agent: Annotated[
        Path | None,
        typer.Option(help="Python file that starts the agent's app. Default: an agent that adds numbers."),
    ] = None,
    tasks: Annotated[
        Path | None, typer.Option(help="JSONL or parquet with `payload` and optional `task_id`. Default: 64 sums.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Use only the first N tasks.")] = _TAKEN,
    scripted: Annotated[
        bool, typer.Option("--scripted", help="Answer from a script instead of a model; installs nothing.")
    ] = False,
    engine: Annotated[Literal["sglang", "vllm"], typer.Option(help="Engine to start.")] = "sglang",
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Use this running SGLang or vLLM server.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Settings in YAML. Bucket and runtime are those of the local cloud.")
    ] = None,
    servers: Annotated[int, typer.Option(min=1, help="Number of engine servers to start.")] = 1,
    override: Overrides = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> int:
    """Run an agent on this machine: a real engine on the CPU, local S3, SQS and AgentCore.

    The first time, this installs the engine and a small model, which takes about two minutes; with --scripted or
    --endpoint it does not. Exit codes as for `rollout run`.
    """
    from rollout_backend.checks.machine import check_agent
    from rollout_backend.core.check_result import raise_problems
    from rollout_backend.core.tasks import read_tasks
    from rollout_backend.local.cloud import LocalCloud
    from rollout_backend.results.run_info import agent_of

    output, overrides = run_output(quiet, verbose, as_json), override or []
    if scripted and endpoint is not None:
        raise ConfigError("--scripted answers without a server: leave out --scripted or --endpoint")
    if agent is not None:
        raise_problems([await asyncio.to_thread(check_agent, agent)])
    agent, tasks = agent or EXAMPLE / "agent.py", tasks or EXAMPLE / "tasks.jsonl"
    found = read_tasks(tasks)
    wanted = found[:limit]
    async with local_model(scripted, endpoint, servers, output.status, engine) as model:
        base = {
            "group": {"size": 4},
            "sampling": {"temperature": 1.0, "max_tokens": 64},
            "timeouts": {
                "model_call_s": 120,
                "agent_s": 240,
                "publish_grace_s": 60,
                "collection_s": 600,
                "session_key_s": 900,
            },
            **model,
        }
        early = load_local_config(config, overrides, base)  # show errors before the cloud starts
        taken = f"all {len(found)}" if len(wanted) == len(found) else f"the first {len(wanted)} of {len(found)}"
        output.status(f"{taken} tasks of {tasks}, {early.group.size} rollouts of each")
        if len(wanted) < len(found):
            output.status(f"--limit {len(found)} takes all")
        async with LocalCloud(agent, run_dir=early.run_dir / "logs", bucket=early.storage.bucket) as cloud:
            os.environ.update(cloud.environ)
            settings = load_config(config, overrides, base=base, top={"run_id": early.run_id, **cloud.settings()})
            code = await collect_step(
                settings, wanted, output, cloud.wait_lost, started_by="demo", agent=agent_of(agent)
            )
            sessions = (await cloud.sessions())["sessions"]
            if sessions or output.style == "verbose":
                console.print(f"the runtime itself counts {len(sessions)} open sessions")
            return 1 if sessions else code
