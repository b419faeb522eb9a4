"""Real engines on the CPU on Ray's test cluster of three machines, with router and gateway, and a machine that dies.

The model is random and tiny, so only the tokens' path is real, not what they say.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from agent_wrapper.contract import Outcome
from builders import eventually
from ray_cluster import REMOVABLE, machine, ray_machines
from rollout_backend.config import load_config
from rollout_backend.core.report import StepResult
from rollout_backend.core.tasks import read_tasks
from rollout_backend.local.cloud import LocalCloud
from rollout_backend.manager import RolloutManager
from rollout_backend.serving.install import find_engine, find_model
from rollout_backend.serving.supervisor import ServingEvent

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

MAKE_MODEL = """
import sys
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(
    vocab_size=49152, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=2048, eos_token_id=2, pad_token_id=2, bos_token_id=1,
)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
"""


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with a real tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    subprocess.run([find_engine(), "-c", MAKE_MODEL, folder], check=True, capture_output=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(find_model() / name, folder)
    return folder


def settings(model: Path, output: Path, **serving) -> dict[str, object]:
    return {
        "model": {"path": str(model), "renderer": "chatml"},
        "serving": {"kind": "ray", "device": "cpu", "dtype": "float32", "startup_timeout_s": 300, **serving},
        "router": {"host": "0.0.0.0"},
        "gateway": {"kind": "ray", "processes": 1},
        "sampling": {"temperature": 1.0, "max_tokens": 64},
        "group": {"size": 4, "policy": "strict"},
        "timeouts": {
            "model_call_s": 300, "agent_s": 400, "publish_grace_s": 60, "collection_s": 600, "session_key_s": 700,
        },
        "output_dir": str(output),
    }  # fmt: skip


async def test_a_killed_machine_loses_no_rollout(repository, tiny_model, tmp_path, monkeypatch):
    example, events = repository / "examples" / "arithmetic", list[ServingEvent]()
    tasks = read_tasks(example / "tasks.jsonl")[:16]
    # Room for two engines and a gateway: wherever Ray puts them, an engine is alone on a machine that can be lost.
    with ray_machines({"num_cpus": 1}, [{"num_cpus": 1}] * 2) as machines:
        async with LocalCloud(example / "agent.py", run_dir=tmp_path / "logs") as cloud:
            for name, value in cloud.environ.items():
                monkeypatch.setenv(name, value)
            base = settings(tiny_model, tmp_path, servers=2, min_servers=2)
            config = load_config(base=base, env={}, top=cloud.settings())
            async with RolloutManager(config, on_serving=events.append) as manager:
                undisturbed = await _seconds(asyncio.create_task(manager.collect(tasks)), 4 * len(tasks))
                collecting = asyncio.create_task(manager.collect(tasks))
                taking = asyncio.create_task(_seconds(collecting, 4 * len(tasks)))
                await _some_are_done(manager, len(tasks))
                lost = next(each for each in manager.servers() if machine(each.url) in REMOVABLE)
                await machines.lose(machine(lost.url))
                await eventually(lambda: _kinds(events, lost.name)[-2:] == ["died", "waiting"], 120)
                machines.add(REMOVABLE[2], num_cpus=1)
                disturbed = await taking
                await eventually(lambda: _kinds(events, lost.name)[-1] == "restarted", 240)
            assert (await cloud.sessions())["sessions"] == []
    print(f"{4 * len(tasks)} rollouts in {undisturbed:.1f} s, and in {disturbed:.1f} s with a machine killed")


async def _seconds(collecting: asyncio.Task[StepResult], rollouts: int) -> float:
    """Return how long a step takes. Check that it loses no rollout, and that its engines have reported their load."""
    began = time.monotonic()
    result = await collecting
    assert result.report.balanced
    assert result.report.outcomes[Outcome.COMPLETED] == rollouts, result.failures
    use = result.report.engine_use
    assert use is not None
    assert use.engines in (1, 2)
    assert use.running > 0
    assert use.kv_used is not None
    return time.monotonic() - began


def _kinds(events: list[ServingEvent], server: str) -> list[str]:
    return [event.kind for event in events if event.server == server]


async def _some_are_done(manager: RolloutManager, number: int) -> None:
    async def reached() -> bool:
        return sum((await manager.progress()).outcomes.values()) >= number

    await eventually(reached, 300)
