"""Read Harbor tasks (folders with task.toml, instruction.md, environment/ and tests/) as rows of a task file.

Invariants:

- tests/ is only in the private part, and solution/ is never read.
- An unsupported field of task.toml that decides how the task must run is refused by name: here, or by
  `fit_to_runtime` if the runtime does not support it.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import logging
import os
import posixpath
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from agent_wrapper.contract import ContractObject
from agent_wrapper.shared.workspace import pack_folder
from rollout_backend.base.formats import count
from rollout_backend.config import AgentCoreConfig, RuntimeConfig, TaskImageConfig
from rollout_backend.core.task import Task
from rollout_backend.errors import ConfigError, TaskFileError

CONTAINER_FIELD = "_container"
"""Field of a payload with the container, for a runtime that starts it."""


class TaskContainer(ContractObject):
    """The settings of a task's container."""

    image: str
    workdir: str | None = None
    """Defaults to the image's own."""
    env: dict[str, str] = Field(default={})
    resources: dict[str, str] = Field(default={})
    """Kubernetes quantities, reserved and enforced."""


def container_key(payload: Mapping[str, Any]) -> str:
    """Return a short digest of the container that a payload names; empty if it names none."""
    container = payload.get(CONTAINER_FIELD)
    if container is None:
        return ""
    text = json.dumps(container, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


log = logging.getLogger(__name__)

PREFIX = "harbor:"
"""Prefix of the name of a folder of Harbor tasks, in place of a task file."""
SUPPORTED_PREFIX = "harbor-supported:"
"""Like `PREFIX`, but leaves out tasks that cannot run."""
VERIFIER = "rollout_backend.run.scoring.harbor:verify"
"""Value of `scoring.function` that runs a task's tests."""
# AgentCore gives each session this memory and these CPUs.
_AGENTCORE_MIB, _AGENTCORE_CPUS = 8192, 2
# Limits a task's archives, because each rollout's invoke carries the environment.
_MAX_BYTES = 8 * 1024 * 1024
_IMAGE = re.compile(r"[A-Za-z0-9][\w.:-]*(/[a-z0-9][a-z0-9._-]*)*(:[\w][\w.-]{0,127})?(@sha256:[a-f0-9]{64})?")
_MEGABYTES = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
# Editors on Windows start a file with a byte order mark.
_UTF8 = "utf-8-sig"
_NOT_IN_WORKSPACE = frozenset({"Dockerfile", ".dockerignore", "docker-compose.yaml", "docker-compose.yml"})
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_DOCKER_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^}$]*))?\})")
_WORD = re.compile(r"""(?:"[^"]*"|'[^']*'|[^\s"'])+""")
_HEREDOC = re.compile(r"\s\d*<<-?[\"']?([A-Za-z_]\w*)")
_NOT_SUPPORTED = {
    "steps": "it has several steps",
    "environment.gpus": "it needs GPUs",
    "environment.tpu": "it needs TPUs",
    "environment.mcp_servers": "it needs MCP servers beside the agent",
    "environment.healthcheck": "it needs services beside the agent",
    "environment.skills_dir": "it gives the agent skills",
    "agent.user": "it needs another user for the agent",
    "verifier.user": "it needs another user for the verifier",
    "verifier.environment": "it needs an image of its own for the verifier",
    "verifier.collect": "it collects more than the agent's workspace",
}


def read_harbor_tasks(
    folder: Path, only_supported: bool = False, runtime: RuntimeConfig | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the tasks of a folder, or of a single task's folder, as rows of a task file with their locations.

    With `only_supported`, tasks that cannot run are left out with a warning.

    Raises:
        TaskFileError: there are no tasks, or some cannot run (on `runtime`, if given); names each.
    """
    found = (
        [folder] if (folder / "task.toml").is_file() else sorted(each.parent for each in folder.glob("*/task.toml"))
    )
    if not found:
        raise TaskFileError(f"{folder} has no Harbor task: a folder with task.toml, instruction.md and tests/test.sh")
    rows, refused = [], []
    for each in found:
        try:
            row = _row(each)
            task = Task(**row)
            if runtime is not None:
                _fit(task, runtime)
        except (OSError, ValueError, ConfigError, TaskFileError) as error:
            refused.append(f"the Harbor task {each}: {error}")
        else:
            rows.append((f"task {each.name}", row))
    if refused and only_supported and rows:
        log.warning("%d of %d tasks are left out:\n%s", len(refused), len(found), "\n".join(refused))
    elif refused:
        others = f"\nTo run the other {len(rows)}, name the folder as {SUPPORTED_PREFIX}{folder}" if rows else ""
        raise TaskFileError("\n".join(refused) + others)
    yield from rows


def fit_to_runtime(tasks: Iterable[Task], runtime: RuntimeConfig) -> tuple[Task, ...]:
    """Return the tasks adapted to this runtime: each Harbor task in its own image, if the runtime supports it.

    Raises:
        ConfigError: the runtime cannot run some tasks; names each and says what to do.
    """
    fitting, refused = [], []
    for task in tasks:
        try:
            fitting.append(_fit(task, runtime) if "harbor" in (task.private or {}) else task)
        except ConfigError as error:
            refused.append(str(error))
    if refused:
        raise ConfigError("\n".join(refused))
    return tuple(fitting)


def describe_ignored(tasks: Iterable[Task], runtime: RuntimeConfig) -> str:
    """Return the resources that Harbor tasks request and this runtime does not provide, with the numbers of tasks;
    empty if there are none."""
    if isinstance(runtime, TaskImageConfig):
        return ""
    provided = {"cpus": 0, "memory_mb": 0, "storage_mb": 0}
    if isinstance(runtime, AgentCoreConfig):
        # The instance type determines the resources.
        if runtime.capacity_provider is not None:
            return ""
        provided |= {"cpus": _AGENTCORE_CPUS, "memory_mb": sys.maxsize if runtime.image else _AGENTCORE_MIB}
    wanted = [(task.private or {}).get("harbor", {}).get("container", {}) for task in tasks]
    found = {name: sum(each.get(name, 0) > most for each in wanted) for name, most in provided.items()}
    fields = [f"environment.{name} of {count(number, 'task')}" for name, number in found.items() if number]
    return f"runtime.kind={runtime.kind} does not provide {' and '.join(fields)}" if fields else ""


def _fit(task: Task, runtime: RuntimeConfig) -> Task:
    assert task.private is not None
    harbor = task.private["harbor"]
    wanted = harbor.get("container", {})
    if isinstance(runtime, AgentCoreConfig) and runtime.image is not None:
        container = _agentcore_container(task.task_id, wanted, runtime)
        return task if container is None else _in_container(task, container, wanted.get("workdir") or ".")
    if not isinstance(runtime, TaskImageConfig):
        for name, field in (("docker_image", "image"), ("env", "env")):
            if wanted.get(field):
                raise ConfigError(
                    f"environment.{name} in task.toml of the Harbor task {task.task_id!r} needs a container of the "
                    f"task, and runtime.kind={runtime.kind} has none: set runtime.kind=kubernetes, or agentcore with "
                    "runtime.image, or remove it"
                )
        return task
    tests = len(harbor["tests"]) * 3 // 4
    if tests > runtime.max_tests_bytes:
        raise ConfigError(
            f"tests/ of the Harbor task {task.task_id!r} has {tests:,} bytes compressed, and runtime.kind="
            f"{runtime.kind} carries at most {runtime.max_tests_bytes:,}: make it smaller, or let tests/test.sh "
            "download the rest"
        )
    if not runtime.command:
        raise ConfigError(
            f"the Harbor task {task.task_id!r} runs in its own image, which does not name your agent: set "
            "runtime.command to the agent's command, and runtime.image to an image with the agent in /agent "
            "(docs/harbor.md)"
        )
    container = TaskContainer(
        image=wanted.get("image") or _image(task.task_id, runtime.task_image),
        workdir=wanted.get("workdir"),
        env=resolve_variables(wanted.get("env", {})),
        resources=_resources(wanted),
    )
    return _in_container(task, container, ".")


def _in_container(task: Task, container: TaskContainer, workdir: str) -> Task:
    payload = {**task.payload, "environment": workdir, CONTAINER_FIELD: container.model_dump(mode="json")}
    return dataclasses.replace(task, payload=payload)


def _agentcore_container(task_id: str, wanted: Mapping[str, Any], runtime: AgentCoreConfig) -> TaskContainer | None:
    """Return a task's container; None if the task runs in the agent's image."""
    image, memory_mb = wanted.get("image"), wanted.get("memory_mb") or 0
    if runtime.task_image is not None and not (image and runtime.can_pull(image)):
        image = _image(task_id, runtime.task_image)
    if image is None and not wanted.get("env"):
        if memory_mb > (runtime.min_memory_mib or _AGENTCORE_MIB):
            raise ConfigError(
                f"environment.memory_mb={memory_mb} in task.toml of the Harbor task {task_id!r}, which runs in the "
                f"agent's image, is more than a session has: set runtime.min_memory_mib={memory_mb}"
            )
        return None
    if image is None or not runtime.can_pull(image):
        raise ConfigError(
            f"the Harbor task {task_id!r} needs an image in ECR, and names {image or 'none'}: AgentCore pulls from "
            "ECR only. Add your agent to the task's image, push it there, and set runtime.task_image (docs/harbor.md)"
        )
    resources = {"memory": f"{memory_mb}Mi"} if memory_mb > _AGENTCORE_MIB else {}
    return TaskContainer(image=image, env=resolve_variables(wanted.get("env", {})), resources=resources)


def _image(task_id: str, template: str | None) -> str:
    if template is None:
        raise ConfigError(
            f"the Harbor task {task_id!r} names no image: build its environment/, push the image, and set "
            "environment.docker_image in its task.toml, or set runtime.task_image to a template for all tasks, such "
            "as registry.example.com/tasks/{task}:1"
        )
    image = template.replace("{task}", task_id.lower())
    if not _IMAGE.fullmatch(image):
        raise ConfigError(
            f"runtime.task_image gives {image!r} for the Harbor task {task_id!r}, which is no name of an image: "
            "rename the task's folder, or set environment.docker_image in its task.toml"
        )
    return image


def _resources(wanted: Mapping[str, Any]) -> dict[str, str]:
    """Return the resources in task.toml as Kubernetes quantities."""
    found = {}
    if (cpus := wanted.get("cpus")) is not None:
        found["cpu"] = f"{round(cpus * 1000)}m"
    for name, field in (("memory", "memory_mb"), ("ephemeral-storage", "storage_mb")):
        if (megabytes := wanted.get(field)) is not None:
            found[name] = f"{megabytes}Mi"
    return found


def resolve_variables(values: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with `${NAME}` and `${NAME:-DEFAULT}` replaced from this process's environment.

    Raises:
        ValueError: a variable is not set and has no default; names it.
    """

    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match[1], match[2])
        if found is None:
            raise ValueError(f"task.toml needs ${match[1]}, which is not set in the trainer's environment")
        return found

    return {name: _VARIABLE.sub(value, text) for name, text in values.items()}


def _row(folder: Path) -> dict[str, Any]:
    """Raises OSError or ValueError."""
    config = tomllib.loads((folder / "task.toml").read_text(_UTF8))
    _refuse_unsupported(config)
    environment, verifier = _table(config, "environment"), _table(config, "verifier")
    if not (folder / "tests" / "test.sh").is_file():
        raise ValueError("there is no tests/test.sh")
    files = pack_folder(folder / "environment", skip=_NOT_IN_WORKSPACE, mtime=0)
    tests = pack_folder(folder / "tests", mtime=0)
    if len(files) + len(tests) > _MAX_BYTES:
        raise ValueError(
            f"environment/ and tests/ have {len(files) + len(tests)} bytes compressed, more than {_MAX_BYTES}"
        )
    timeout_s = _seconds(verifier.get("timeout_sec", 600.0), "verifier.timeout_sec")
    agent_s = _table(config, "agent").get("timeout_sec")
    variables = _variables(verifier, "verifier")
    # A missing variable must fail here, before anything starts.
    resolve_variables(variables | _variables(environment, "environment"))
    workdir = environment.get("workdir") or _workdir(folder / "environment" / "Dockerfile")
    if not (isinstance(workdir, str) and workdir.startswith("/")):
        raise ValueError(f"environment.workdir is {workdir!r}, not an absolute path")
    private = {
        "tests": base64.b64encode(tests).decode(),
        "timeout_s": timeout_s,
        "env": variables,
        "workdir": workdir,
        "container": _container(environment),
    }
    if agent_s is not None:
        private["agent_timeout_s"] = _seconds(agent_s, "agent.timeout_sec")
    payload = {
        "instruction": (folder / "instruction.md").read_text(_UTF8),
        "environment": base64.b64encode(files).decode(),
    }
    return {"task_id": folder.name, "payload": payload, "private": {"harbor": private}}


def _container(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of task.toml about the task's container."""
    cpus, image = environment.get("cpus"), environment.get("docker_image")
    if cpus is not None and not (isinstance(cpus, int | float) and 0 < cpus <= 1024):
        raise ValueError(f"environment.cpus is {cpus!r}, not a number of CPUs")
    if image is not None and not (isinstance(image, str) and _IMAGE.fullmatch(image)):
        raise ValueError(f"environment.docker_image is {image!r}, which is no name of an image")
    found = {
        "image": image,
        "workdir": environment.get("workdir"),
        "env": _variables(environment, "environment"),
        "cpus": cpus,
        "memory_mb": _megabytes(environment, "memory"),
        "storage_mb": _megabytes(environment, "storage"),
    }
    return {name: value for name, value in found.items() if value}


def _megabytes(environment: Mapping[str, Any], name: str) -> int | None:
    """Return memory_mb or storage_mb, or the older memory or storage, a string such as 2G."""
    value = environment.get(f"{name}_mb")
    if value is not None:
        if not (isinstance(value, int) and value > 0):
            raise ValueError(f"environment.{name}_mb is {value!r}, not a number of megabytes")
        return value
    text = environment.get(name)
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT])(?:i?B?)", str(text), re.IGNORECASE)
    if match is None:
        raise ValueError(f"environment.{name} is {text!r}, not a size such as 2G")
    return max(1, round(float(match[1]) * _MEGABYTES[match[2].upper()]))


def _seconds(value: object, name: str) -> float:
    if not (isinstance(value, int | float) and 0 < value < 86_400):
        raise ValueError(f"{name} is {value!r}, not a number of seconds")
    return float(value)


def _variables(table: Mapping[str, Any], name: str) -> dict[str, str]:
    found = table.get("env", {})
    if not (isinstance(found, dict) and all(isinstance(each, str) for each in found.values())):
        raise ValueError(f"{name}.env must be a table of strings")
    return found


def _refuse_unsupported(config: dict[str, Any]) -> None:
    for name, why in _NOT_SUPPORTED.items():
        table, _, key = name.rpartition(".")
        if (_table(config, table) if table else config).get(key):
            raise ValueError(f"{name} in task.toml is not supported: {why}")
    environment = _table(config, "environment")
    if environment.get("os", "linux") != "linux":
        raise ValueError("environment.os in task.toml is not supported: it needs Windows")
    modes = [_table(config, name).get("network_mode", "public") for name in ("environment", "agent", "verifier")]
    if environment.get("allow_internet") is False or any(mode != "public" for mode in modes):
        raise ValueError(
            "allow_internet or network_mode in task.toml is not supported: the agent's network is that of its runtime"
        )


def _table(config: dict[str, Any], name: str) -> dict[str, Any]:
    table = config.get(name, {})
    if not isinstance(table, dict):
        # The caller reports a ValueError.
        raise ValueError(f"{name} in task.toml is not a table")  # noqa: TRY004
    return table


def _workdir(dockerfile: Path) -> str:
    """Return the folder in which the task's image would run the agent: the last WORKDIR of the last stage, or /app.

    Raises:
        ValueError: the folder depends on the base image or on a build argument.
    """
    # Arguments before the first FROM are shared by all stages.
    stage = shared = _Stage()
    stages: dict[str, _Stage] = {}
    for word, rest in _instructions(dockerfile.read_text(_UTF8) if dockerfile.is_file() else ""):
        if word == "FROM":
            base, *name = [each for each in rest.split() if not each.startswith("--")] or [""]
            before = stages.get(base.lower(), _Stage())
            stage = _Stage(before.workdir, {**before.env})
            stages[name[-1].lower() if len(name) == 2 else str(len(stages))] = stage
        elif word == "ARG":
            stage.args |= {
                name: shared.args.get(name) if value is None else value for name, value in stage.pairs(rest)
            }
        elif word == "ENV":
            key, _, value = rest.partition(" ")
            stage.env |= dict(stage.pairs(rest) if "=" in key else [(key, stage.expand(value.strip()))])
        elif word == "WORKDIR":
            path = stage.expand(rest)
            if path is None or not (stage.workdir or path).startswith("/"):
                raise ValueError(
                    f"WORKDIR {rest} in environment/Dockerfile depends on the base image or on how it is built: set "
                    "environment.workdir in task.toml"
                )
            stage.workdir = posixpath.normpath(posixpath.join(stage.workdir or "/", path))
    return stage.workdir or "/app"


@dataclasses.dataclass
class _Stage:
    """Variables and WORKDIR of a Dockerfile's stage, up to the current instruction. None is an unknown value."""

    workdir: str | None = None
    env: dict[str, str | None] = dataclasses.field(default_factory=dict)
    args: dict[str, str | None] = dataclasses.field(default_factory=dict)

    def pairs(self, rest: str) -> list[tuple[str, str | None]]:
        """Return the variables that an ENV or ARG instruction sets."""
        found = [each.partition("=") for each in _WORD.findall(rest)]
        return [(key, self.expand(value) if equals else None) for key, equals, value in found]

    def expand(self, text: str) -> str | None:
        """Return the string without quotes and with its variables replaced; None if that is not possible."""
        known = {**self.args, **self.env}

        def value(match: re.Match[str]) -> str:
            found = known.get(match[1] or match[2])
            return "$" if found is None else found or match[3] or ""

        quoted = re.fullmatch(r"""(["'])(.*)\1""", text)
        plain = quoted[2] if quoted else text
        if not (quoted and quoted[1] == "'"):
            plain = _DOCKER_VARIABLE.sub(value, plain)
        return None if re.search(r"""["'\\$]""", plain) else plain


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield the instructions of a Dockerfile, each on one line, without comments and here-documents."""
    lines = iter([line for line in text.splitlines() if not line.lstrip().startswith("#")])
    for line in lines:
        while line.rstrip().endswith("\\"):
            line = line.rstrip()[:-1] + next(lines, "")
        word, *rest = line.split(maxsplit=1)[:2] or [""]
        for end in _HEREDOC.findall(line):
            while next(lines, end).strip() != end:
                pass
        if rest:
            yield word.upper(), rest[0].strip()
