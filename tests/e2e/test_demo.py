"""`rollout demo` as a user runs it: to its end, interrupted, and with a cloud that dies."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from builders import until
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
            preexec_fn=in_the_foreground,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with process:  # closes the pipe
            process.kill()


def descendants(pid: int) -> set[int]:
    """Return all descendants of `pid`."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):  # the process has ended
            continue
    found, todo = set(), [pid]
    while todo:
        parent = todo.pop()
        children = {child for child, its_parent in parents.items() if its_parent == parent} - found
        found |= children
        todo += children
    return found


def command_of(pid: int) -> bytes:
    """Return the words of a process's command; nothing once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def running(pids: set[int]) -> set[int]:
    return {pid for pid in pids if command_of(pid)}


@pytest.fixture
def held_agents(held_back) -> Callable[[str], str]:
    """Answer the demo's probe of the endpoint, and hold the replies of its agents."""
    calls = itertools.count()
    return lambda prompt: held_back(prompt) if next(calls) else "7"


def busy(demo, engine: ScriptedEngine) -> tuple[subprocess.Popen[str], set[int]]:
    """Start a demo; return its process and its descendants once its agents call the model."""
    process = demo(engine)
    until(lambda: len(engine.requests) > 1 or process.poll() is not None)  # the first one probes the endpoint
    assert process.poll() is None, process.communicate()[0]
    return process, descendants(process.pid)


@pytest.mark.slow  # tests/e2e/test_run.py has a run of the same parts
def test_a_demo_prints_its_result_and_leaves_nothing_behind(demo, tmp_path):
    numbers = itertools.count()  # "What is 6 + 5?" is answered right once
    with ScriptedEngine(
        lambda prompt: "It is 7." if "6 + 5" not in prompt or next(numbers) else "It is 11."
    ) as engine:
        process = demo(engine)
        below: set[int] = set()
        while process.poll() is None:
            below |= descendants(process.pid)
            time.sleep(0.25)
        output = process.communicate()[0]
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
    assert below
    assert not running(below)
    [start] = json.loads((tmp_path / "demo" / "run.json").read_text())["starts"]
    assert (start["by"], start["state"]) == ("demo", "ended")
    assert Path(start["agent"]["path"]).name == "agent.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("rollout_backend.local.moto_server", "moto (local S3 and SQS)"),
        ("rollout_backend.local.agentcore_emulator", "the AgentCore emulator"),
    ],
)
def test_a_demo_fails_with_the_reason_if_its_cloud_dies(demo, held_agents, module, name):
    with ScriptedEngine(held_agents) as engine:
        process, below = busy(demo, engine)
        mark = f"-m\0{module}\0".encode()
        [part] = [pid for pid in below if mark in command_of(pid) + b"\0"]
        os.kill(part, signal.SIGKILL)
        output = process.communicate(timeout=120)[0]
    assert process.returncode == 1, output
    text = " ".join(output.split())
    assert f"{name} ended with code -9, so this run cannot continue" in text
    assert "Its log," in text
    assert "NOT reconcile" not in text
    until(lambda: not running(below))  # a guard process ends the sessions of a killed emulator


@pytest.mark.slow
def test_an_interrupted_demo_stops_everything_it_started(demo, held_agents):
    with ScriptedEngine(held_agents) as engine:
        process, below = busy(demo, engine)
        os.kill(process.pid, signal.SIGINT)
        output = process.communicate(timeout=150)[0]
    assert process.returncode == 130, output
    assert "interrupted; everything that was started is stopped" in output.replace("\n", " ")
    assert len(below) >= 6  # moto, the emulator, its forker, sessions, router, gateway
    assert not running(below)
