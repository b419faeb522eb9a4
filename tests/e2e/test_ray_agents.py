"""Agents on a Ray cluster: a step survives the loss of the machine that runs them."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest

from agent_wrapper.contract import Outcome
from builders import eventually
from ray_cluster import REMOVABLE, ray_machines
from rollout_backend.config import load_config
from rollout_backend.core.tasks import Task
from rollout_backend.local.cloud import LocalStorage
from rollout_backend.local.scripted import BYTE_MODEL, ScriptedEngine, ScriptedSums
from rollout_backend.manager import RolloutManager

pytestmark = [pytest.mark.slow, pytest.mark.release, pytest.mark.timeout(900)]

AGENT = """
import os, time
from pathlib import Path
from openai import OpenAI
from agent_wrapper import RolloutApp

app = RolloutApp()

@app.entrypoint
def agent(context):
    client = OpenAI(**context.openai_kwargs())
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    client.chat.completions.create(model=context.model, messages=messages)
    seen = Path(context.payload["seen"])
    (seen / f"{context.rollout_id}.{os.getpid()}").touch()
    while not (seen / "go").exists():
        time.sleep(0.1)
    return 1.0
"""


async def test_a_step_survives_the_loss_of_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    seen = tmp_path / "seen"
    seen.mkdir()
    (tmp_path / "agent.py").write_text(AGENT)
    machine = {"num_cpus": 1, "resources": {"agents": 4}}
    async with LocalStorage(run_dir=tmp_path / "logs", bucket="rollouts") as storage:
        for name, value in storage.environ.items():
            monkeypatch.setenv(name, value)
        with ray_machines({"num_cpus": 1}, [machine]) as machines, ScriptedEngine(ScriptedSums()) as engine:
            runtime = {"kind": "ray", "address": ray.get_runtime_context().gcs_address, "app": "agent:app"}
            runtime |= {"working_dir": str(tmp_path), "num_cpus": 0, "resources": {"agents": 1}}
            base = {
                "model": {"path": str(BYTE_MODEL), "renderer": "chatml", "context_length": 32_768},
                "serving": {"kind": "external", "urls": [engine.url]},
                "storage": {"bucket": "rollouts"},
                "group": {"size": 2},
                "runtime": {**runtime, "environment": storage.environ},
                "output_dir": str(tmp_path),
            }
            config = load_config(base=base, env={}, top=storage.settings())
            async with RolloutManager(config) as manager:
                tasks = [Task(f"t{i}", {"seen": str(seen)}) for i in range(2)]
                collecting = asyncio.create_task(manager.collect(tasks))
                await eventually(lambda: len([*seen.iterdir()]) == 4, 300)
                await machines.lose(REMOVABLE[0])
                for file in seen.iterdir():  # a real machine takes its processes with it
                    with contextlib.suppress(ProcessLookupError):  # it may have ended with its actor
                        os.kill(int(file.name.rpartition(".")[2]), signal.SIGKILL)
                machines.add(REMOVABLE[1], **machine)
                (seen / "go").touch()
                result = await collecting
            rollouts = [rollout for group in result.groups for rollout in group.rollouts]
            assert {rollout.outcome for rollout in rollouts} == {Outcome.COMPLETED}
            assert [rollout.attempt for rollout in rollouts] == [2] * 4
