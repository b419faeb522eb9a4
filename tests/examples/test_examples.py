"""The files that each example ships with its agent."""

import json

import pytest

from rollout_backend.config import load_config
from rollout_backend.core.tasks import read_tasks

NAMES = ["arithmetic", "tool_agent"]
SEEDED = {"arithmetic": (64, 0), "tool_agent": ("chain_sum", 64, 0)}


@pytest.mark.parametrize("name", NAMES)
def test_the_settings_are_valid(examples, name):
    settings = load_config(examples / name / "config.yaml", env={})
    assert settings.runtime.kind == "agentcore"
    assert settings.storage.bucket == "my-rollouts"


@pytest.mark.parametrize("name", NAMES)
def test_the_tasks_match_their_seed(examples, load, name):
    module = load(f"{name}/make_tasks.py")
    made = module.make_tasks(*SEEDED[name], **getattr(module, "SETTINGS", {}))
    lines = (examples / name / "tasks.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == json.loads(json.dumps(made))
    tasks = read_tasks(examples / name / "tasks.jsonl")
    assert len({task.task_id for task in tasks}) == 64


@pytest.mark.parametrize("name", NAMES)
def test_the_image_meets_the_runtimes_requirements(examples, name):
    lines = (examples / name / "Dockerfile").read_text().splitlines()
    assert "FROM python:3.11-slim" in lines
    assert "EXPOSE 8080" in lines
    assert lines.index("USER 1000") < lines.index('CMD ["python", "agent.py"]')
