"""`rollout demo`: the whole path on a laptop."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rollout_backend.cli.common import Limit, Overrides, TaskFile, console, exit_codes, read_limited, run_async
from rollout_backend.cli.run import collect_step
from rollout_backend.config import load_config

EXAMPLE = Path("examples/arithmetic")


def demo(
    agent: Annotated[Path, typer.Option(help="The Python file that starts the agent's app.")] = EXAMPLE / "agent.py",
    tasks: TaskFile = EXAMPLE / "tasks.jsonl",
    limit: Limit = 16,
    config: Annotated[Path | None, typer.Option(help="Settings; bucket and runtime are the local cloud's.")] = None,
    servers: Annotated[int, typer.Option(min=1, help="SGLang servers.")] = 1,
    override: Overrides = None,
) -> None:
    """Run an agent on this machine: real SGLang on the CPU, real router, local S3, SQS and AgentCore.

    Exit codes as for `rollout run`.
    """
    with exit_codes():
        run_async(_demo(agent, tasks, limit, config, servers, override or []))


async def _demo(
    agent: Path, tasks: Path, limit: int | None, config: Path | None, servers: int, overrides: Sequence[str]
) -> int:
    from rollout_backend.local.cloud import LocalCloud
    from rollout_backend.serving.install import cache_dir, install_cpu_engine, prepare_model

    wanted = read_limited(tasks, limit)
    install_cpu_engine(cache_dir(), echo=console.print)
    model = prepare_model(cache_dir(), echo=console.print)
    base = {
        "model": {"path": str(model), "renderer": "chatml", "context_length": 2048},
        "serving": {"device": "cpu", "servers": servers, "threads": max(1, ((os.cpu_count() or 2) - 1) // servers)},
        "group": {"size": 4},
        "sampling": {"temperature": 1.0, "max_tokens": 64},
        "timeouts": {
            "model_call_s": 120,
            "agent_s": 240,
            "publish_grace_s": 60,
            "collection_s": 600,
            "session_key_s": 900,
        },
    }
    placeholder = {"storage": {"bucket": "rollouts"}, "runtime": {"kind": "http", "url": "http://127.0.0.1"}}
    early = load_config(config, overrides, base=base, top=placeholder)  # what is wrong shows before the cloud starts
    async with LocalCloud(agent, run_dir=early.run_dir / "logs", bucket=early.storage.bucket) as cloud:
        os.environ.update(cloud.environ)
        settings = load_config(config, overrides, base=base, top={"run_id": early.run_id, **cloud.settings()})
        code = await collect_step(settings, wanted, cloud.wait_lost)
        sessions = (await cloud.sessions())["sessions"]
        console.print(f"the runtime itself counts {len(sessions)} open sessions")
        return 1 if sessions else code
