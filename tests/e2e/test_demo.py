"""`rollout demo` as a user runs it: to its end, interrupted, and with a cloud that dies."""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from builders import processes_with, until
from rollout_backend.local.scripted import ScriptedEngine


def in_the_foreground() -> None:
    """Restore SIGINT. A background process of a shell ignores Ctrl-C, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Callable[[ScriptedEngine], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(engine: ScriptedEngine) -> subprocess.Popen[str]:
        settings = {
            "model.renderer": "chatml",
            "run_id": "demo",
            "output_dir": tmp_path,
        }
        overrides = [part for key, value in settings.items() for part in ("-o", f"{key}={value}")]
        argv = [sys.executable, "-m", "rollout_backend", "demo", "--limit", "2", "--endpoint", f"{engine.url}/v1"]
        argv += overrides
        process = subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "MARK": str(tmp_path)},
            preexec_fn=in_the_foreground,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with process:  # closes the pipe
            process.kill()


@pytest.fixture
def held_agents(held_back) -> Callable[[str], str]:
    """Answer the demo's probe of the endpoint, and hold the replies of its agents."""
    calls = itertools.count()
    return lambda prompt: held_back(prompt) if next(calls) else "7"


def busy(demo, engine: ScriptedEngine) -> subprocess.Popen[str]:
    """Start a demo; return its process once its agents call the model."""
    process = demo(engine)
    until(lambda: len(engine.requests) > 1 or process.poll() is not None)  # the first one probes the endpoint
    assert process.poll() is None, process.communicate()[0]
    return process


@pytest.mark.slow  # tests/e2e/test_run.py has a run of the same parts
def test_a_demo_prints_its_result_and_leaves_nothing_behind(demo, tmp_path):
    numbers = itertools.count()  # "What is 6 + 5?" is answered right once
    with ScriptedEngine(
        lambda prompt: "It is 7." if "6 + 5" not in prompt or next(numbers) else "It is 11."
    ) as engine:
        process = demo(engine)
        output = process.communicate(timeout=280)[0]
    assert process.returncode == 0, output
    for part in (
        "the first 2 of 64 tasks of",
        "--limit 64 takes all",
        "✓ 8 of 8 rollouts completed, 2 of 2 groups usable",
        "! groups without spread in their rewards: 1 of 2",
        "ledger   8 = 8 completed; it reconciles; 0 sessions open",
        "1 of 2 groups have a spread",
        str(tmp_path / "demo" / "report.html"),
    ):
        assert part in output
    summary = output[output.index("✓") :].splitlines()
    assert len(summary) <= 12
    assert processes_with(str(tmp_path)) == {}
    [start] = json.loads((tmp_path / "demo" / "run.json").read_text())["starts"]
    assert (start["by"], start["state"]) == ("demo", "ended")
    assert Path(start["agent"]["path"]).name == "agent.py"


@pytest.mark.slow
def test_a_demo_fails_with_the_reason_if_its_cloud_dies(demo, held_agents, tmp_path):
    with ScriptedEngine(held_agents) as engine:
        process = busy(demo, engine)
        commands = processes_with(str(tmp_path)).items()
        [emulator] = [pid for pid, command in commands if "local.agentcore_emulator" in command]
        os.kill(emulator, signal.SIGKILL)
        output = process.communicate(timeout=120)[0]
    assert process.returncode == 1, output
    text = " ".join(output.split())
    assert "the AgentCore emulator ended with code -9, so this run cannot continue" in text
    assert "Its log," in text
    assert "NOT reconcile" not in text
    until(lambda: processes_with(str(tmp_path)) == {})  # a guard process ends the sessions of a killed emulator


@pytest.mark.slow
def test_an_interrupted_demo_stops_everything_it_started(demo, held_agents, tmp_path):
    with ScriptedEngine(held_agents) as engine:
        process = busy(demo, engine)
        assert len(processes_with(str(tmp_path))) >= 6  # the emulator, its forker, sessions, moto, router, gateway
        os.kill(process.pid, signal.SIGINT)
        output = process.communicate(timeout=150)[0]
    assert process.returncode == 130, output
    assert "interrupted; everything that was started is stopped" in output.replace("\n", " ")
    assert processes_with(str(tmp_path)) == {}
