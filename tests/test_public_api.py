"""Tests of what `import rollout_backend` and `import agent_wrapper` export."""

import ast
import asyncio
import signal
import subprocess
import sys
import threading
import tomllib
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import agent_wrapper
import rollout_backend
from builders import run_config
from rollout_backend import RolloutManager, Task
from rollout_backend.run.services import RunServices

ROOT = Path(__file__).parents[1]
PUBLIC = {
    # a run
    "RolloutManager", "Progress", "RolloutConfig", "load_config", "Task", "read_tasks",
    # its results
    "AdapterUpdate", "WeightUpdate", "StepResult", "StepReport", "GroupResult", "Rollout", "Outcome", "Segment",
    "Turn", "Sampling",
    # what it raises
    "RolloutBackendError", "ConfigError", "TaskFileError", "PreflightError", "ServingError", "StartupError",
    "RunHeld", "CloudLost", "StoreError", "CredentialsExpired", "CircuitOpen", "ManifestError", "LedgerError",
    "WeightsMismatch", "WeightUpdateFailed",
}  # fmt: skip
HEAVY = {"aioboto3", "aiohttp", "boto3", "botocore", "numpy", "pydantic", "pyarrow", "ray", "torch", "transformers"}


def modules_after(code: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after running `code`."""
    script = f"import sys; {code}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(run.stdout.split())


def test_the_public_names_are_a_closed_list() -> None:
    assert set(rollout_backend.__all__) == PUBLIC
    assert len(rollout_backend.__all__) == len(PUBLIC)
    errors = {"AgentFailure", "CommandError", "CommandNotStarted", "EntrypointError"}
    names = errors | {"RolloutApp", "RolloutContext", "run_command"}
    assert set(agent_wrapper.__all__) == names


def test_every_public_name_resolves_and_is_documented() -> None:
    for package in (rollout_backend, agent_wrapper):
        for name in package.__all__:
            assert getattr(package, name).__name__ == name
            doc = getattr(package, name).__doc__
            assert doc, f"{package.__name__}.{name} has no docstring"
            assert not doc.startswith(f"{name}("), f"{package.__name__}.{name} has only a dataclass's own docstring"
            assert name in dir(package)


def test_type_checkers_see_every_public_name() -> None:
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package in ("agent_wrapper", "rollout_backend"):
        assert "py.typed" in shipped[package]
        assert (ROOT / package / "py.typed").is_file()
    tree = ast.parse(Path(rollout_backend.__file__).read_text())
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(rollout_backend.__all__) <= imported


def test_importing_the_package_loads_no_heavy_module() -> None:
    assert modules_after("import rollout_backend") & HEAVY == set()


def test_a_trainers_process_loads_only_what_it_needs() -> None:
    """Gateways render, in processes of their own; `renderers` imports `openai`, which takes half a second."""
    modules = modules_after("import rollout_backend.manager, rollout_backend.model.serving.ray_servers")
    assert modules & {"openai", "ray", "renderers", "torch", "transformers"} == set()


def test_an_interrupted_start_stops_what_it_started(monkeypatch) -> None:
    async def start(run: RunServices, stack: AsyncExitStack, rollouts: int | None) -> None:
        stack.callback(stopped.append, "a server")
        asyncio.get_running_loop().call_soon(signal.pthread_kill, threading.main_thread().ident, signal.SIGINT)
        await asyncio.Event().wait()

    stopped: list[str] = []
    monkeypatch.setattr(RunServices, "start", start)
    with pytest.raises(KeyboardInterrupt), RolloutManager.blocking(run_config()):
        pass
    assert stopped


async def test_a_manager_that_was_not_entered_says_so_at_once() -> None:
    with pytest.raises(RuntimeError, match="enter the manager first: async with"):
        await RolloutManager(run_config()).collect([Task("a", {})])
    with pytest.raises(RuntimeError, match=r"enter the manager first: with RolloutManager\.blocking"):
        RolloutManager.blocking(run_config()).collect([Task("a", {})])
