"""Whole steps on Kubernetes: manager, router, gateway, S3, SQS and real agents as pods of the emulator."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent_wrapper.contract import Outcome
from rollout_backend.config import load_config
from rollout_backend.core.tasks import Task
from rollout_backend.manager import RolloutManager
from rollout_backend.model.serving.server_process import free_port
from rollout_backend.run.accounts.step_report import StepResult
from rollout_backend.workbench.local.cloud import LocalStorage
from rollout_backend.workbench.local.scripted import ScriptedEngine
from rollout_backend.workbench.local.spawner import PreforkSpawner
from tests.e2e.conftest import BASE
from tests.emulators.kubernetes_emulator import ApiFault, KubernetesEmulator

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
AGENT = ROOT / "examples" / "arithmetic" / "agent.py"
IMAGE = "registry.example.com/arithmetic:1"
TASKS = [Task(f"t{i}", {"question": f"What is {i} + 4?", "answer": str(i + 4)}) for i in range(4)]
PLANNED = 8


def answer(prompt: str) -> str:
    return f"The answer is {len(prompt) % 10}."


@pytest.fixture
async def cluster(
    storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[KubernetesEmulator, dict[str, Any]]]:
    """A cluster, and the settings of runs on it."""
    for name, value in storage.environ.items():
        monkeypatch.setenv(name, value)
    own = {name: value for name, value in os.environ.items() if not name.startswith("ROLLOUT__")}
    env = {**own, **storage.environ, "AWS_ENDPOINT_URL": storage.endpoint_url, "PYTHONPATH": str(ROOT)}
    spawner = PreforkSpawner(sys.executable, AGENT, [], env, tmp_path / "prefork.log")
    with ScriptedEngine(answer) as engine:
        async with KubernetesEmulator({IMAGE: spawner}, tmp_path / "cluster") as emulator:
            port = free_port()
            assert await spawner.warm()
            settings = {
                **BASE,
                "output_dir": str(tmp_path / "runs"),
                "serving": {"kind": "external", "urls": [engine.url]},
                "gateway": {"port": port, "public_url": f"http://127.0.0.1:{port}"},
                "aws": {"region": storage.region, "endpoint_url": storage.endpoint_url},
                "storage": {"bucket": storage.bucket},
                "runtime": {
                    "kind": "kubernetes",
                    "image": IMAGE,
                    "kubeconfig": str(emulator.kubeconfig),
                    "start_timeout_s": 120,
                    "invoke_per_s": 100,
                },
            }
            yield emulator, settings


def run(settings: dict[str, Any], run_id: str, **runtime: Any) -> RolloutManager:
    settings = {**settings, "run_id": run_id, "runtime": {**settings["runtime"], **runtime}}
    return RolloutManager(load_config(base=settings, env={}))


def rewards(result: StepResult) -> dict[str, float | None]:
    return {rollout.rollout_id: rollout.reward for rollout in result.rollouts}


async def test_no_rollout_is_lost_to_a_cluster_full_of_faults(cluster):
    emulator, settings = cluster
    emulator.fates.extend(
        [
            "is killed for memory",
            "is evicted",
            "exits with 1",
            "cannot pull its image",
            "cannot be started",
            "cannot be scheduled",
            "publishes and is killed for memory",
            "is scheduled late",
        ]
    )
    emulator.faults += [
        ApiFault("throttle", "POST", "*/jobs", times=3),
        ApiFault("lose answer", "POST", "*/jobs", times=2),
        ApiFault("quota", "POST", "*/jobs"),
        ApiFault("error", "POST", "*/secrets"),
        ApiFault("lose answer", "POST", "*/secrets"),
        ApiFault("unavailable", "DELETE", times=2),
    ]

    async def disturb() -> None:
        while True:
            await asyncio.sleep(0.5)
            emulator.rotate_token()
            emulator.cut_watches()
            emulator.forget_versions()

    async with run(settings, "chaos", start_timeout_s=30) as manager:
        disturbing = asyncio.create_task(disturb())
        result = await manager.collect(TASKS)
        disturbing.cancel()
    assert result.report.outcomes[Outcome.COMPLETED] == PLANNED, result.failures
    assert result.report.balanced
    assert result.report.attempts >= PLANNED + 5  # an evicted agent may publish its result before its end
    assert not emulator.fates
    assert [fault for fault in emulator.faults if fault.hits < fault.times] == []
    assert emulator.running_pods() == []
    async with run(settings, "calm-again") as manager:
        assert rewards(await manager.collect(TASKS)) == rewards(result)
