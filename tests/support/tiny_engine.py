"""Runs with a real engine of a tiny random model, on the CPU."""

import asyncio
import os
import re
import subprocess
from pathlib import Path

import aiohttp

from builders import processes_with
from rollout_backend.config import EngineName
from rollout_backend.manager import RolloutManager
from rollout_backend.results.step_report import StepResult

_MAKE = (
    "import sys; from pathlib import Path; from rollout_backend.local.tiny_model import make_tiny_model\n"
    "for seed, folder in enumerate(sys.argv[1:]): make_tiny_model(Path(folder), seed, heads=2)"
)

_RUNNING: dict[EngineName, tuple[str, str]] = {
    "sglang": ("/v1/loads", r'"num_running_reqs":\s*(\d+)'),
    "vllm": ("/metrics", r"vllm:num_requests_running\{.*\} (\S+)"),
}


def make_models(python: Path, repository: Path, *folders: Path) -> None:
    """Make a model in each folder, with other weights; `python` is an engine's interpreter."""
    env = {**os.environ, "PYTHONPATH": str(repository)}
    subprocess.run([str(python), "-c", _MAKE, *map(str, folders)], env=env, check=True)


def engine_url(manager: RolloutManager) -> str:
    return next(server.url for server in manager.servers() if server.name == "engine-0")


def server_process(url: str) -> int:
    """Return the pid of the SGLang server at this URL. It leads its own process group."""
    port = f" {url.rpartition(':')[2]} "
    return next(pid for pid, command in processes_with("sglang.launch_server").items() if port in command)


async def requests_run(manager: RolloutManager, engine: EngineName = "sglang", number: int = 4) -> None:
    """Return once at least this number of requests run on the engine."""
    path, pattern = _RUNNING[engine]
    async with aiohttp.ClientSession() as http:
        while True:
            async with http.get(engine_url(manager) + path) as reply:
                found = re.search(pattern, await reply.text())
            if found is not None and float(found[1]) >= number:
                return
            await asyncio.sleep(0.1)


def versions_of(step: StepResult) -> set[tuple[str, ...]]:
    """Return the weight versions of each first turn, in the order of its tokens."""
    return {
        tuple(span.version for span in segment.turns[0].weight_versions)
        for rollout in step.rollouts
        for segment in rollout.segments
    }
