"""Runs with real engines on the CPU in float32, most of them of a tiny random model."""

import asyncio
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from agent_wrapper.contract import Segment
from builders import processes_with
from rollout_backend.config import EngineName, RolloutConfig, load_config
from rollout_backend.manager import RolloutManager
from rollout_backend.run.accounts.step_report import StepResult
from rollout_backend.workbench.local.cloud import LocalCloud

_MAKE = (
    "import sys; from pathlib import Path; from rollout_backend.workbench.local.tiny_model import make_tiny_model\n"
    "for seed, folder in enumerate(sys.argv[1:]): make_tiny_model(Path(folder), seed, {})"
)

_RUNNING: dict[EngineName, tuple[str, str]] = {
    "sglang": ("/v1/loads", r'"num_running_reqs":\s*(\d+)'),
    "vllm": ("/metrics", r"vllm:num_requests_running\{.*\} (\S+)"),
}


def cpu_config(cloud: LocalCloud, model: Path, output: Path, *overrides: str, **serving: Any) -> RolloutConfig:
    """Return the settings of a run in this cloud whose engines run on the CPU."""
    timeouts = {"model_call_s": 200, "agent_s": 240, "publish_grace_s": 60, "collection_s": 400, "session_key_s": 500}
    base = {
        "model": {"path": str(model), "renderer": "chatml"},
        "serving": {"device": "cpu", "dtype": "float32", **serving},
        "sampling": {"temperature": 1.0, "max_tokens": 400},
        "group": {"size": 4, "policy": "strict"},
        "timeouts": timeouts,
        "output_dir": str(output),
    }
    return load_config(base=base, overrides=overrides, env={}, top=cloud.settings())


def make_models(python: Path, repository: Path, *folders: Path, options: str = "heads=2") -> None:
    """Make a model in each folder, with other weights; `python` is an engine's interpreter."""
    env = {**os.environ, "PYTHONPATH": str(repository)}
    subprocess.run([str(python), "-c", _MAKE.format(options), *map(str, folders)], env=env, check=True)


def engine_url(manager: RolloutManager) -> str:
    return next(server.url for server in manager.servers() if server.name == "engine-0")


def server_process(url: str) -> int:
    """Return the pid of the SGLang server at this URL. It leads its own process group."""
    port = f" {url.rpartition(':')[2]} "
    return next(pid for pid, command in processes_with("sglang.launch_server").items() if port in command)


async def requests_run(manager: RolloutManager, engine: EngineName = "sglang") -> None:
    """Return once at least four requests run on the engine."""
    path, pattern = _RUNNING[engine]
    async with aiohttp.ClientSession() as http:
        while True:
            async with http.get(engine_url(manager) + path) as reply:
                found = re.search(pattern, await reply.text())
            if found is not None and float(found[1]) >= 4:
                return
            await asyncio.sleep(0.1)


def versions_of(step: StepResult) -> set[tuple[str, ...]]:
    """Return the weight versions of each first turn, in the order of its tokens."""
    return {
        tuple(span.version for span in segment.turns[0].weight_versions)
        for rollout in step.rollouts
        for segment in rollout.segments
    }


def check_versions(segments: Sequence[Segment], passes: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """Check that each sampled token has the logprob of its version's forward pass.

    `passes` has the logprobs of all segments for each version. The others' differ, so that the check can tell them
    apart.
    """
    of_others: dict[str, list[float]] = {version: [] for version in passes if len(passes) > 1}
    for number, segment in enumerate(segments):
        for span in (span for turn in segment.turns for span in turn.weight_versions):
            for at in range(span.start, span.end):
                for version, logprobs in passes.items():
                    difference = abs(segment.logprobs[at] - logprobs[number][at])
                    if version == span.version:
                        assert difference < 1e-3
                    else:
                        of_others[version].append(difference)
    for differences in of_others.values():
        assert sum(differences) / len(differences) > 0.05
