"""mini-swe-agent by its command line, on a small git repository: a scripted fix, and a run with a real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_backend.local.scripted import ToolCall

TASK = "The function `double` in double.py returns the wrong number. Fix it."
OPENAI = "openai", "OPENAI_BASE_URL", "OPENAI_API_KEY"
ANTHROPIC = "anthropic", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"


pytestmark = pytest.mark.slow


@pytest.fixture
def repository(tmp_path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "double.py").write_text("def double(n):\n    return n + n + 1\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "start"]):
        subprocess.run([*git, *arguments], cwd=folder, check=True)
    return folder


@pytest.fixture(params=[OPENAI, ANTHROPIC], ids=["openai", "anthropic"])
def mini(request, repository, tmp_path):
    """Run the agent in the repository against a gateway; return its own record of the run."""
    provider, base_variable, key_variable = request.param

    def run(gateway, *more: str, **sampling) -> dict:
        notes = tmp_path / "notes.json"
        env = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "PYTHONPATH": str(Path(__file__).parent),
            base_variable: f"{gateway.url}/v1",
            key_variable: gateway.key(**sampling),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise it is downloaded
            "MSWEA_CONFIGURED": "true",  # otherwise it asks for a key
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
        }
        options = ["--yolo", "--exit-immediately", "--cost-limit", "0", "--output", str(notes)]
        argv = ["mini", "-m", f"{provider}/scripted", "-t", TASK, *options, "-c", "mini.yaml", *more]
        done = subprocess.run(
            argv, cwd=repository, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        assert notes.is_file(), done.stdout[-3000:] + done.stderr[-3000:]
        return json.loads(notes.read_text())

    return run


def test_a_scripted_fix_of_a_repository_is_one_row(play, byte_model, mini, repository, bundle):
    script = [
        f"I look first.\n{ToolCall('bash', {'command': 'cat double.py && git log --oneline'})}",
        ToolCall("bash", {"command": "sed -i 's/ + 1//' double.py"}),
        ToolCall("bash", {"command": "python -c 'import double; print(double.double(4))'"}),
        ToolCall("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),
    ]
    gateway = play(script, model=byte_model.model_copy(update={"context_length": 32_768}))
    notes = mini(gateway)
    assert notes["info"]["exit_status"] == "Submitted"
    assert (repository / "double.py").read_text() == "def double(n):\n    return n + n\n"
    (segment,) = gateway.trajectory().segments
    assert len(segment.turns) == len(script)
    text = bundle.decode(segment.token_ids)
    assert '"output": "8\\n"' in text
    assert [bundle.decode(segment.token_ids[turn.start : turn.end]) for turn in segment.turns] == [
        f"{reply}<|im_end|>" for reply in script
    ]


@pytest.mark.engine
def test_a_run_with_a_weak_model_is_recorded_as_sampled(gateway, recorded, mini, repository):
    """The agent drops a reply without a usable call from its history, so what follows is another row."""
    notes = mini(gateway, "-c", "agent.step_limit=3", "--environment-class", "confined.Confined", max_tokens=48)
    assert notes["info"]["exit_status"] in ("RepeatedFormatError", "LimitsExceeded", "Submitted")
    kept = [
        message["role"] == "assistant"
        for message in notes["messages"]
        if message["role"] == "assistant" or message.get("extra", {}).get("interrupt_type") == "FormatError"
    ]
    segments = recorded().segments
    assert sum(len(segment.turns) for segment in segments) == notes["info"]["model_stats"]["api_calls"] == len(kept)
    assert len(segments) == 1 + kept[:-1].count(False)
    assert "first_call" not in {segment.split_reason for segment in segments[1:]}
