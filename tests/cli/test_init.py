"""`rollout init`: what each template makes, and that it works as it is."""

import json
import sys
from pathlib import Path
from typing import get_args

import pytest

from builders import load_module, refused
from rollout_backend.cli.laptop import Template
from rollout_backend.config import load_config
from rollout_backend.core.tasks import read_tasks

NAMES = get_args(Template)
FILES = {"Dockerfile", "agent.py", "config.yaml", "requirements.txt", "tasks.jsonl", "test_agent.py"}


@pytest.fixture
def made(rollout, tmp_path):
    """Make an agent and return its folder."""

    def make(template: str) -> Path:
        code, output = rollout("init", tmp_path / "my agent", "--template", template)
        assert code == 0, output
        assert "Next: cd '" in output
        return tmp_path / "my agent"

    return make


@pytest.mark.filterwarnings("ignore:Support for class-based `config`:DeprecationWarning")  # of bedrock-agentcore
@pytest.mark.parametrize("template", NAMES)
def test_the_agents_own_test_passes(made, run_agent, template, monkeypatch):
    folder = made(template)
    assert {path.name for path in folder.iterdir()} >= FILES
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "agent", raising=False)
    tests = [value for name, value in vars(load_module(folder / "test_agent.py")).items() if name.startswith("test_")]
    monkeypatch.delitem(sys.modules, "agent")
    assert (folder / "scorer.py").is_file() == (template == "bedrock-agentcore")
    assert len(tests) == 2
    for test in tests:
        test(run_agent)


YOURS = {
    "model.path": "/models/Qwen3-0.6B",
    "storage.bucket": "my-rollouts",
    "runtime.arn": "arn:aws:bedrock-agentcore:us-east-1:123456789012:runtime/my_agent-0123456789",
    "gateway.public_url": "https://gateway.example.com",
}


def test_tasks_are_valid_and_settings_once_they_are_filled_in(rollout, made):
    folder = made("openai")
    assert len(read_tasks(folder / "tasks.jsonl")) == 16
    for command in (("doctor",), ("run", "--tasks", folder / "tasks.jsonl")):
        code, output = rollout(*command, folder / "config.yaml")
        assert code == 2
        assert output == (
            "error: fill in your values in the settings, in place of each <yours ...>: "
            "model.path: the model's folder on this machine, such as /models/Qwen3-0.6B "
            "storage.bucket: as rollout deploy prints it "
            "runtime.arn: as rollout deploy prints it "
            "gateway.public_url: the address at which agents reach this machine, such as https://gateway.example.com"
        )
    code, output = rollout("doctor", folder / "config.yaml", "--json")
    assert [each["setting"] for each in json.loads(output)] == list(YOURS)
    filled = [f"{key}={value}" for key, value in YOURS.items()]
    assert load_config(folder / "config.yaml", filled, env={}).runtime.kind == "agentcore"


def test_a_folder_with_files_is_refused_and_an_empty_one_is_used(rollout, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    refused(rollout("init", tmp_path), f"{tmp_path} is not empty: name a new or an empty folder")
    refused(rollout("init", tmp_path / "notes.txt"), "notes.txt is not a folder")
    for command in ("init", "infra"):
        refused(rollout(command, tmp_path / "notes.txt" / "x"), "notes.txt/x cannot be written")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    assert rollout("init", tmp_path / "empty")[0] == 0
    assert rollout("init", tmp_path / "other", "--template", "cobol")[0] == 2
