"""`rollout serve`: a checkpoint behind the gateway of its training."""

import asyncio
import shutil
from pathlib import Path

import anthropic
import openai
import pytest
import yaml

from builders import eventually, user
from rollout_backend.cli.serve import serve_model, serving_config
from rollout_backend.errors import ConfigError
from rollout_backend.workbench.local.scripted import BYTE_MODEL, ScriptedEngine

QUESTION = [user("Say something.")]


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """The settings of a training, whose storage and runtime are of no use here."""
    model = {"path": "/models/x", "name": "Qwen/Qwen3-0.6B", "renderer": "chatml", "context_length": 4096}
    tree = {
        "model": model,
        "storage": {"bucket": "my-bucket"},
        "runtime": {
            "kind": "agentcore",
            "arn": "arn:aws:bedrock-agentcore:us-east-1:123456789012:runtime/a-0123456789",
        },
        "serving": {"kind": "external", "urls": ["http://127.0.0.1:9"]},
        "sampling": {"temperature": 0.5, "max_tokens": 64},
        "output_dir": str(tmp_path / "runs"),
    }
    (tmp_path / "rollout.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "rollout.yaml"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BYTE_MODEL, tmp_path / "step_100"))


async def _printed(serving: asyncio.Task[int], lines: list[str]) -> None:
    await eventually(lambda: serving.done() or any("API_KEY" in line for line in lines))
    if serving.done():
        serving.result()


async def test_a_deployed_agent_gets_the_model_of_its_training_and_nothing_is_kept(training, checkpoint):
    with ScriptedEngine([f"answer {i}" for i in range(9)]) as engine:
        external = ["serving.kind=external", f"serving.urls=[{engine.url}]"]
        config = serving_config(checkpoint, training, external)
        assert (config.model.served_name, config.model.path) == ("Qwen/Qwen3-0.6B", checkpoint)
        lines: list[str] = []
        keys = []
        for first in (0, 4):  # the second time, as after a restart
            lines.clear()
            serving = asyncio.create_task(serve_model(config, 1.0, lines.append))
            await _printed(serving, lines)
            values = dict(line.strip().split("=", 1) for line in lines if "=" in line)
            keys.append(values["OPENAI_API_KEY"])
            url = values["OPENAI_BASE_URL"]
            for i, key in enumerate([keys[0], keys[-1], keys[0]]):
                async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
                    reply = await client.chat.completions.create(model="Qwen/Qwen3-0.6B", messages=QUESTION)
                assert reply.choices[0].message.content == f"answer {first + i}"
            async with anthropic.AsyncAnthropic(base_url=url, api_key=keys[0], max_retries=0) as client:
                message = await client.messages.create(model="Qwen/Qwen3-0.6B", messages=QUESTION, max_tokens=9)
            assert message.content[0].text == f"answer {first + 3}"
            serving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await serving
    assert list((config.run_dir / "gateway").rglob("sessions/*")) == []


def test_the_trainers_servers_are_not_those_of_the_checkpoint(training, checkpoint):
    config = serving_config(checkpoint, training, [])
    assert (config.serving.kind, config.serving.urls) == ("process", ())
    assert (config.sampling.temperature, config.model.context_length) == (0.5, 4096)


def test_the_trainings_relay_is_used_only_if_it_is_named(training, checkpoint):
    tree = yaml.safe_load(training.read_text()) | {"relay": {"url": "ws://relay", "key": "k" * 32}}
    training.write_text(yaml.safe_dump(tree))
    assert serving_config(checkpoint, training, []).relay is None
    own = serving_config(checkpoint, training, ["relay.url=ws://own"]).relay
    assert own is not None
    assert own.url == "ws://own"


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json: .*verl\.model_merger"):
        serving_config(tmp_path, None, [])


def test_the_trainings_address_is_used_only_if_it_is_named(training, checkpoint):
    gateway = {"public_url": "https://training.example.com", "port": 8443}
    training.write_text(yaml.safe_dump(yaml.safe_load(training.read_text()) | {"gateway": gateway}))
    served = serving_config(checkpoint, training, []).gateway
    assert (served.public_url, served.port) == (None, 0)
    own = ["gateway.public_url=https://own.example.com", "gateway.port=8000"]
    assert serving_config(checkpoint, training, own).gateway.public_url == "https://own.example.com"
