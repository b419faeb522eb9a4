"""Define what the agent's function receives.

The fields are the same in training, where they come from the backend's request, and in deployment, where they come
from the environment. The function does not need to know which of the two it runs in.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from agent_wrapper.contract import (
    MAX_ARTIFACT_BYTES,
    MAX_ARTIFACTS,
    Artifact,
    ContractError,
    RolloutRequest,
    Sampling,
    pack_artifacts,
)
from agent_wrapper.contract.keys import traceparent
from agent_wrapper.one_shot import payload_file
from agent_wrapper.shared.processes import home_variables


class ArtifactError(ValueError):
    """An artifact that cannot be published. The message says why, and names the limit."""


class Artifacts:
    """Files that an agent publishes with its result, for a scorer on the training side.

        context.artifacts.add("patch.diff", patch)
        context.artifacts.add("log.txt", Path("/tmp/log.txt"))

    An artifact is copied when it is added, so later changes to the file have no effect. Thread-safe. A deployed agent
    publishes none.
    """

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def add(self, name: str, content: bytes | str | Path) -> None:
        """Publish a file under this name when the agent returns. `content` is its bytes, its text, or its path.

        Raises:
            ArtifactError: the name is invalid or taken, or there are too many artifacts or bytes.
            OSError: the file cannot be read.
        """
        content = content.encode() if isinstance(content, str) else content
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        if size > MAX_ARTIFACT_BYTES:
            raise ArtifactError(f"{name!r} has {size} bytes, more than the {MAX_ARTIFACT_BYTES} of all artifacts")
        data = content.read_bytes() if isinstance(content, Path) else bytes(content)
        try:
            Artifact.of(name, data)
        except ContractError:
            raise ArtifactError(
                f"{name!r} cannot be an artifact's name: use up to 128 letters, digits, '.', '_' and '-', and begin "
                "with a letter, a digit or '_'"
            ) from None
        with self._lock:
            if name in self._files:
                raise ArtifactError(f"an artifact {name!r} was added before")
            if len(self._files) == MAX_ARTIFACTS:
                raise ArtifactError(f"a rollout has {MAX_ARTIFACTS} artifacts at most")
            total = sum(map(len, self._files.values())) + len(data)
            if total > MAX_ARTIFACT_BYTES:
                raise ArtifactError(f"with {name!r} the artifacts have {total} bytes, more than {MAX_ARTIFACT_BYTES}")
            self._files[name] = data

    def __bool__(self) -> bool:
        return bool(self._files)

    def pack(self) -> tuple[bytes, tuple[Artifact, ...]]:
        """Return the object that holds all artifacts, and their entries in the result. A thread that the agent has
        left may add more later, which are not published."""
        with self._lock:
            files = dict(self._files)
        return pack_artifacts(files), tuple(Artifact.of(name, data) for name, data in files.items())


_DEPLOYED_CALL_TIMEOUT_S = 600.0
_BASE_URLS = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "ANTHROPIC_BASE_URL")
_API_KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "CODEX_API_KEY")
_MODELS = (
    "ROLLOUT_MODEL",
    "OPENAI_MODEL",
    "ANTHROPIC_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)
# Retries are at most 8 s apart, so this many bridge five minutes without a gateway.
MAX_RETRIES = 40


CURRENT: ContextVar[RolloutContext | None] = ContextVar("rollout_context")
"""The rollout that the running code belongs to. None outside a rollout; unset where that is not known."""
RUNNING: list[RolloutContext] = []
"""The rollouts of this process that set CURRENT."""


def rollout_of_this_code() -> RolloutContext | None:
    """Return the rollout that this code runs in. In a thread without context, this is the only one of the process.

    Raises:
        RuntimeError: several rollouts are running, and this thread has no context.
    """
    try:
        return CURRENT.get()
    except LookupError:
        pass
    if len(running := [*RUNNING]) > 1:
        raise RuntimeError(
            f"{len(running)} rollouts run in this process, and nothing says to which one this code belongs: start "
            "the thread with contextvars.copy_context().run"
        )
    return running[0] if running else None


def own_home(folder: Path, keep_home: bool) -> dict[str, str]:
    """Return `home_variables`; empty with `keep_home` and in a container that runs a single rollout, which use the
    home of this process."""
    return {} if keep_home or payload_file() is not None else home_variables(folder)


class _Folder:
    """A folder of one rollout, created on first use and removed with this object."""

    @cached_property
    def path(self) -> Path:
        path = tempfile.mkdtemp(prefix="rollout-")
        weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)
        return Path(path)


@dataclass(frozen=True)
class RolloutContext:
    """One rollout, as seen by its agent."""

    payload: dict[str, Any]
    """The task: the invoke's payload without the backend's block."""
    base_url: str = field(repr=False)
    """OpenAI-compatible, ends in /v1, may contain the key; "" if none is configured."""
    api_key: str = field(repr=False)
    """Key for the model. In training, it opens only this rollout's session."""
    model: str
    sampling: Sampling = field(default_factory=Sampling)
    """The trainer's settings; the gateway applies them."""
    rollout_id: str | None = None
    traceparent: str | None = None
    """W3C Trace Context of this rollout, for agents that create OpenTelemetry spans."""
    artifacts: Artifacts = field(default_factory=Artifacts, repr=False)
    """Files to publish with the result."""
    # Monotonic seconds: the container's clock may be set while the agent runs.
    _ends_at: float = field(default=math.inf, repr=False)
    _folder: _Folder = field(default_factory=_Folder, repr=False, compare=False)

    @property
    def training(self) -> bool:
        """True in a training run, False in deployment."""
        return self.rollout_id is not None

    @property
    def deadline(self) -> float:
        """Unix seconds by the present time of this container's clock; the agent must have returned by then. Infinite
        in deployment. If the clock is set, the value changes with it."""
        return time.time() + self._ends_at - time.monotonic()

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline, never negative; infinite in deployment."""
        return max(0.0, self._ends_at - time.monotonic())

    def openai_kwargs(self) -> dict[str, Any]:
        """Return arguments for `openai.OpenAI` and `openai.AsyncOpenAI`: base_url, api_key, timeout, max_retries.

        The timeout of a call is the deadline, because a call that the client gives up and repeats is sampled twice.
        Retries outlast a restart of an engine, of the gateway and of the whole training side; a janitor waits as long
        before it stops the session. Arguments that the environment leaves unset are left out.
        """
        timeout = max(1.0, self.remaining_s) if self.training else _DEPLOYED_CALL_TIMEOUT_S
        endpoint = {"base_url": self.base_url, "api_key": self.api_key}
        return {k: v for k, v in endpoint.items() if v} | {"timeout": timeout, "max_retries": MAX_RETRIES}

    def environ(self, *, keep_home: bool = False) -> dict[str, str]:
        """Return environment variables with the model's endpoint, for a program that reads them.

        They are OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and ROLLOUT_MODEL, the other
        names that Claude Code, Codex, LiteLLM and Qwen Code read, and TRACEPARENT for programs that create
        OpenTelemetry spans. Unknown values are left out.

        HOME, XDG_CONFIG_HOME and similar variables, and TMPDIR name folders that are removed after the rollout,
        because programs write the endpoint and the key into their settings. With `keep_home`, or in a container that
        runs one rollout, they are left unchanged.
        """
        values = {_BASE_URLS: self.base_url, _API_KEYS: self.api_key, _MODELS: self.model}
        found = {name: value for names, value in values.items() for name in names if value}
        if self.traceparent:
            found["TRACEPARENT"] = self.traceparent
        return found | own_home(self._folder.path, keep_home)

    @classmethod
    def from_request(cls, request: RolloutRequest, payload: dict[str, Any]) -> RolloutContext:
        """Create the context of a request that has just arrived."""
        return cls(
            payload=payload,
            base_url=request.endpoint.base_url,
            api_key=request.endpoint.api_key,
            model=request.endpoint.name,
            sampling=request.sampling,
            rollout_id=request.rollout_id,
            traceparent=traceparent(request.run_id, request.step, request.rollout_id),
            _ends_at=time.monotonic() + request.remaining_s,
        )

    @classmethod
    def current(cls) -> RolloutContext:
        """Return the context of the rollout that this code runs in, for an agent in a `BedrockAgentCoreApp`. In
        deployment, it has no payload, and the endpoint from the environment.

        Raises:
            RuntimeError: this is a thread without context, and several rollouts are running.
        """
        return rollout_of_this_code() or cls.from_environment({})

    @classmethod
    def from_environment(cls, payload: dict[str, Any], env: Mapping[str, str] | None = None) -> RolloutContext:
        """Create the context of a deployed agent from OPENAI_BASE_URL, OPENAI_API_KEY and ROLLOUT_MODEL, "" if
        unset."""
        env = os.environ if env is None else env
        return cls(
            payload=payload,
            base_url=env.get("OPENAI_BASE_URL", ""),
            api_key=env.get("OPENAI_API_KEY", ""),
            model=env.get("ROLLOUT_MODEL", ""),
        )
