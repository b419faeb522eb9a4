"""Run the tests of a Harbor task on its agent's workspace: the value of `scoring.function` for such tasks.

Invariants:

- The tests run in a new folder, in a separate process group, within the task's time and memory limits, and without
  this process's environment. They end with the call and with this process.
"""

import base64
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agent_wrapper.shared.harbor_tests import TestsFailed, read_reward, run_tests
from agent_wrapper.shared.workspace import WORKSPACE, unpack_folder
from rollout_backend.core.harbor import resolve_variables
from rollout_backend.run.scoring.scorer import ScoreInput, ScoringError


def verify(given: ScoreInput) -> dict[str, Any]:
    """Return the reward that the task's tests wrote, and the other values of reward.json.

    Raises:
        ScoringError: the tests wrote none, or exceeded verifier.timeout_sec or environment.memory_mb.
    """
    task = given.private.get("harbor")
    if task is None:
        raise ScoringError(f"task {given.task_id!r} is no Harbor task: start the run with --tasks harbor:FOLDER")
    if WORKSPACE not in given.artifacts:
        raise ScoringError(
            f"the agent has published no artifact {WORKSPACE!r}: run it with --workspace '{{payload.environment}}', "
            "or add the artifact"
        )
    with TemporaryDirectory(prefix="rollout-verifier-", ignore_cleanup_errors=True) as path:
        root = Path(path).resolve()
        folders = {"/tests": root / "tests", "/logs/verifier": root / "logs" / "verifier"}
        for each in (*folders.values(), *(root / name for name in ("workspace", "home", "tmp"))):
            each.mkdir(parents=True)
        if workdir := task["workdir"].rstrip("/"):
            folders[workdir] = root / "workspace"
        try:
            unpack_folder(given.artifacts[WORKSPACE], root / "workspace")
            unpack_folder(base64.b64decode(task["tests"]), root / "tests")
            variables = resolve_variables(task["env"])
        except ValueError as error:
            raise ScoringError(str(error)) from None
        _map_paths(root / "tests", {name: str(folder) for name, folder in folders.items()})
        environ = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "HOME": str(root / "home"),
            "TMPDIR": str(root / "tmp"),
            "LANG": "C.UTF-8",
            **variables,
        }
        memory_mb = task.get("container", {}).get("memory_mb")
        try:
            ended = run_tests(
                root / "tests" / "test.sh",
                cwd=root / "workspace",
                environ=environ,
                output=root / "output",
                timeout_s=task["timeout_s"],
                memory_bytes=memory_mb and memory_mb * 1024**2,
            )
            return read_reward(root / "logs" / "verifier", ended)
        except TestsFailed as error:
            raise ScoringError(str(error)) from None


def _map_paths(tests: Path, paths: Mapping[str, str]) -> None:
    """Replace the absolute paths of Harbor's container in the tests, because they do not exist on this machine."""
    names = "|".join(map(re.escape, sorted(paths, key=len, reverse=True)))
    absolute = re.compile(rf"(?<![\w.$}}/-])({names})(?![\w-])")
    for file in tests.rglob("*"):
        if file.is_file() and not file.is_symlink():
            with suppress(UnicodeDecodeError):
                text = file.read_text()
                if (mapped := absolute.sub(lambda match: paths[match[1]], text)) != text:
                    file.write_text(mapped)
