"""`rollout demo`, interrupted and with a cloud that dies. `test_package.py` runs one to its end."""

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
from rollout_backend.workbench.local.scripted import ScriptedEngine


def in_the_foreground() -> None:
    """Restore SIGINT. A background process of a shell ignores Ctrl-C, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Callable[[ScriptedEngine], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(engine: ScriptedEngine) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "rollout_backend", "demo", "--limit", "2", "--endpoint", f"{engine.url}/v1"]
        argv += ["-o", "model.renderer=chatml", "-o", "run_id=demo", "-o", f"output_dir={tmp_path}"]
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
def held_agents(held) -> Callable[[str], str]:
    """Answer the demo's probe of the endpoint, and hold the replies of its agents."""
    calls = itertools.count()
    return lambda prompt: held(prompt) if next(calls) else "7"


def busy(demo, engine: ScriptedEngine) -> subprocess.Popen[str]:
    """Start a demo; return its process once its agents call the model."""
    process = demo(engine)
    until(lambda: len(engine.requests) > 1 or process.poll() is not None)  # the first one probes the endpoint
    assert process.poll() is None, process.communicate()[0]
    return process


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
    assert "the first 2 of 64 tasks of" in output
    assert "--limit 64 takes all" in output
    assert "interrupted; everything that was started is stopped" in output.replace("\n", " ")
    assert processes_with(str(tmp_path)) == {}
    [start] = json.loads((tmp_path / "demo" / "run.json").read_text())["starts"]
    assert (start["by"], Path(start["agent"]["path"]).name) == ("demo", "agent.py")
