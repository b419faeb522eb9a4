"""Record how a run was started: its settings without secrets, versions, its agent, and how each start ended.

Invariant: no secret is recorded, so a run directory can be shared.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import platform
import posixpath
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from rollout_backend.base.dockerignore import FilePatterns
from rollout_backend.config import RolloutConfig
from rollout_backend.run.lease import LeaseHolder

RunState = Literal["running", "ended", "interrupted", "failed", "killed", "silent"]
# A running process writes to its run directory every few seconds.
RUNS_S = 60.0
StartedBy = Literal["run", "local", "demo", "verl", "train", "python"]
TRAINERS: frozenset[StartedBy] = frozenset({"verl", "train"})
"""The programs that number their steps by `batch_number`."""

_PACKAGES = (
    "rollout-backend",
    "renderers",
    "sglang",
    "sglang-router",
    "smg",
    "tinker",
    "torch",
    "transformers",
    "verl",
)


class RunStart(BaseModel, frozen=True):
    """One start of a run's manager, and how it ended. Times are in unix seconds."""

    by: StartedBy
    process: LeaseHolder
    versions: dict[str, str]
    """Versions of Python, of installed packages, and of SGLang as `engine`, if it runs in another environment."""
    commit: str | None = None
    """Git commit of the working directory, with `-dirty` if files were changed."""
    agent: dict[str, str] = {}
    """The agent: image, version and ARN of a runtime, or path, digest and git commit of an agent on this machine."""
    state: RunState = "running"
    last_step_ended: bool = False
    """Whether the rollouts of the last step have ended. verl's process is later killed without notice."""
    error: str = ""
    ended_at: float | None = None

    @classmethod
    def of(cls, config: RolloutConfig, by: StartedBy, agent: Mapping[str, str], engine: str | None) -> Self:
        """Describe a start of this process. `engine` is the version of an engine that something else runs."""
        return cls(
            by=by,
            process=LeaseHolder.this_process(),
            versions=versions(config) | ({"engine": engine} if engine else {}),
            commit=git_commit(Path.cwd()),
            agent=dict(agent),
        )

    def current_state(self, seen_at: float) -> RunState:
        """Return the state of a run whose process renewed `run.json` at `seen_at`.

        If nothing recorded its end, and its process is gone, it is `ended` after its last step, otherwise `killed`. A
        process on another machine cannot be checked: it is `silent`, or `ended`, if it has not renewed the file for a
        minute.
        """
        if self.state != "running":
            return self.state
        local = self.process.is_local
        gone = self.process.is_dead() if local else time.time() > seen_at + RUNS_S
        if not gone:
            return "running"
        if self.last_step_ended:
            return "ended"
        return "killed" if local else "silent"


class RunInfo(BaseModel, frozen=True):
    """The content of `run.json`."""

    schema_version: Literal[1] = 1
    run_id: str
    secrets: tuple[str, ...] = ()
    """Secrets (for example `relay.key`) that `config.yaml` lacks; set them again to resume the run."""
    starts: tuple[RunStart, ...]
    """The last start is the current one."""

    def with_last(self, **changes: object) -> RunInfo:
        """Return a copy whose last start has these values."""
        return self.model_copy(update={"starts": (*self.starts[:-1], self.starts[-1].model_copy(update=changes))})


def settings_yaml(config: RolloutConfig) -> str:
    """Return every setting as YAML that `load_config` reads, without secrets."""
    return yaml.safe_dump(_plain(config), sort_keys=False)


def all_settings(config: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, FieldInfo]]:
    """Yield every setting: its dotted name, its value and its field."""
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield from all_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value, field


def secret_settings(config: BaseModel) -> list[str]:
    """Return the names of the secrets that are set."""
    return [name for name, value, _ in all_settings(config) if isinstance(value, SecretStr)]


def versions(config: RolloutConfig) -> dict[str, str]:
    """Return the versions of Python, of installed packages, and of an engine that runs in another environment.

    If this package is imported from a checkout, its version is the commit.
    """
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    checkout = Path(__file__).parents[3]
    if (checkout / "pyproject.toml").is_file() and (commit := git_commit(checkout)):
        found["rollout-backend"] = commit
    if config.serving.kind not in ("external", "tinker"):
        engine = _engine_version(config)
        if engine is not None:
            found["engine"] = engine
    return found


def git_commit(folder: Path) -> str | None:
    """Return the commit that is checked out in a folder; None outside a repository."""
    return _git(folder, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")


def agent_of(file: Path) -> dict[str, str]:
    """Describe an agent on this machine: its path, a digest of its files, and the commit of its folder.

    The digest covers what the Dockerfile in the folder copies, and the Dockerfile; without one, the Python files and
    what they require. Files that git ignores are left out.
    """
    file = file.resolve()
    folder, digest = file.parent, hashlib.sha256()
    listed = _git(folder, "ls-files", "--cached", "--others", "--exclude-standard")
    names = listed.split("\n") if listed else [str(each.relative_to(folder)) for each in folder.rglob("*")]
    docker, ignore = folder / "Dockerfile", folder / ".dockerignore"
    copied = FilePatterns(_copied_by(docker.read_text(errors="replace")) if docker.is_file() else _WITHOUT_DOCKERFILE)
    own = ignore.read_text(encoding="utf-8-sig", errors="replace").splitlines() if ignore.is_file() else ()
    ignored = FilePatterns((*_NO_SOURCES, *own))
    for name in sorted({*names, file.name}):
        path, inside = folder / name, PurePosixPath(name)
        if path.is_file() and inside in copied and inside not in ignored:
            digest.update(f"{name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    commit = git_commit(folder)
    return {"path": str(file), "sha256": digest.hexdigest(), **({"commit": commit} if commit else {})}


_WITHOUT_DOCKERFILE = ("**/*.py", "requirements*.txt", "pyproject.toml", "uv.lock")
_NO_SOURCES = ("runs", "**/__pycache__", "**/.git", "**/.venv")


def _copied_by(dockerfile: str) -> tuple[str, ...]:
    """Return the patterns of the files that a Dockerfile copies from its folder, and its own name."""
    found = ["Dockerfile"]
    for line in dockerfile.replace("\\\n", " ").splitlines():
        command, *words = line.split() or [""]
        if command.upper() in ("COPY", "ADD") and not any(word.startswith("--from=") for word in words):
            names = re.sub(r'[\[\],"]', " ", " ".join(word for word in words if not word.startswith("--"))).split()
            # The folder itself stands for all files.
            found += ["**" if posixpath.normpath(name) in (".", "/") else name for name in names[:-1]]
    return tuple(found)


def _engine_version(config: RolloutConfig) -> str | None:
    from rollout_backend.model.serving.install import CPU_ENGINES, cache_dir, engine_python

    python = config.serving.python
    if python is None and config.serving.device == "cpu":
        python = engine_python(cache_dir(), config.serving.engine)
    if python is None:
        # The engine runs with this interpreter.
        return None
    path = [str(each) for each in python.parent.parent.glob("lib/python*/site-packages")]
    names = {config.serving.engine, CPU_ENGINES[config.serving.engine].distribution}
    found = (importlib.metadata.distributions(name=name, path=path) for name in sorted(names))
    return next((each.version for each in itertools.chain.from_iterable(found)), None)


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _plain(value: object) -> Any:
    """Return a value in YAML's types, without secrets."""
    if isinstance(value, BaseModel):
        fields = {name: getattr(value, name) for name in type(value).model_fields}
        return {name: _plain(each) for name, each in fields.items() if not isinstance(each, SecretStr)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path | str) else value
