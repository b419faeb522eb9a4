"""What the agent's function is given.

The same fields in training and in deployment: in training they come from the backend's request, in deployment
from the environment, so the function need not know which of the two it is in.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from agent_wrapper.artifacts import Artifacts
from agent_wrapper.contract import RolloutRequest, Sampling
from agent_wrapper.contract.trace import traceparent
from agent_wrapper.one_shot import payload_file
from agent_wrapper.shared.processes import home_variables

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
MAX_RETRIES = 40  # of 8 s at most: five minutes without a gateway


CURRENT: ContextVar[RolloutContext | None] = ContextVar("rollout_context")
"""The rollout to which the running code belongs: None outside a rollout, unset where that is not known."""
RUNNING: list[RolloutContext] = []
"""The rollouts of this process that set CURRENT."""


def rollout_of_this_code() -> RolloutContext | None:
    """Return the rollout that this code runs in; in a thread without context, the only one of this process.

    Raises:
        RuntimeError: several rollouts run, and this thread has no context.
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
    """Return `home_variables`, or nothing if the home of this process is used: with `keep_home`, and in a container
    that runs one rollout."""
    return {} if keep_home or payload_file() is not None else home_variables(folder)


class _Folder:
    """A folder of one rollout, which is made on first use and removed with this object."""

    @cached_property
    def path(self) -> Path:
        path = tempfile.mkdtemp(prefix="rollout-")
        weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)
        return Path(path)


@dataclass(frozen=True)
class RolloutContext:
    """One rollout, as its agent sees it."""

    payload: dict[str, Any]  # the task: the invoke's payload without the backend's own block
    base_url: str = field(repr=False)  # OpenAI-shaped, ends in /v1, may contain the key; "": none is configured
    api_key: str = field(repr=False)  # in training it opens this rollout's session only
    model: str
    sampling: Sampling = field(default_factory=Sampling)  # the trainer's; the gateway applies it by itself
    deadline: float = math.inf  # unix seconds, by this container's clock, by which the agent must have returned
    rollout_id: str | None = None
    traceparent: str | None = None  # W3C Trace Context of this rollout, for an agent that makes OpenTelemetry spans
    artifacts: Artifacts = field(default_factory=Artifacts, repr=False)  # files to publish beside the result
    _ends_at: float | None = field(default=None, repr=False)  # the deadline by the monotonic clock
    _folder: _Folder = field(default_factory=_Folder, repr=False, compare=False)

    @property
    def training(self) -> bool:
        """Whether this is a rollout of a training run. False in deployment."""
        return self.rollout_id is not None

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline, never below 0; infinite in deployment."""
        left = self.deadline - time.time() if self._ends_at is None else self._ends_at - time.monotonic()
        return max(0.0, left)

    def openai_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `openai.OpenAI` and `openai.AsyncOpenAI`: base_url, api_key, timeout, max_retries.

        A call may last until the deadline, because a call that the client gives up and repeats is sampled twice.
        Retries outlast a restart of an engine, of the gateway, and of the whole training side: so long a janitor
        waits for it, and then stops the session. What the environment leaves unset is left out.
        """
        timeout = max(1.0, self.remaining_s) if self.training else _DEPLOYED_CALL_TIMEOUT_S
        endpoint = {"base_url": self.base_url, "api_key": self.api_key}
        return {k: v for k, v in endpoint.items() if v} | {"timeout": timeout, "max_retries": MAX_RETRIES}

    def environ(self, *, keep_home: bool = False) -> dict[str, str]:
        """Return the model's endpoint as environment variables, for a program that reads them.

        They are OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and ROLLOUT_MODEL, the other
        names that Claude Code, Codex, LiteLLM and Qwen Code read, and TRACEPARENT for a program that makes
        OpenTelemetry spans. Unknown values are left out.

        HOME, XDG_CONFIG_HOME and its like, and TMPDIR name folders of this rollout, which are removed after it:
        programs write the endpoint and the key into their settings. With `keep_home`, or in a container that runs
        one rollout, they are left unchanged.
        """
        values = {_BASE_URLS: self.base_url, _API_KEYS: self.api_key, _MODELS: self.model}
        found = {name: value for names, value in values.items() for name in names if value}
        if self.traceparent:
            found["TRACEPARENT"] = self.traceparent
        return found | own_home(self._folder.path, keep_home)

    @classmethod
    def from_request(cls, request: RolloutRequest, payload: dict[str, Any]) -> RolloutContext:
        """Make the context of a request that has just arrived."""
        now = time.time()
        remaining_s = request.deadline - now if request.remaining_s is None else request.remaining_s
        return cls(
            payload=payload,
            base_url=request.endpoint.base_url,
            api_key=request.endpoint.api_key,
            model=request.endpoint.name,
            sampling=request.sampling,
            deadline=now + remaining_s,
            rollout_id=request.rollout_id,
            traceparent=traceparent(request.run_id, request.step, request.rollout_id),
            _ends_at=time.monotonic() + remaining_s,
        )

    @classmethod
    def current(cls) -> RolloutContext:
        """Return the context of the rollout that this code runs in, for an agent in a `BedrockAgentCoreApp`. In
        deployment it has no payload, and the endpoint of the environment.

        Raises:
            RuntimeError: this is a thread without context, and several rollouts run.
        """
        return rollout_of_this_code() or cls.from_environment({})

    @classmethod
    def from_environment(cls, payload: dict[str, Any], env: Mapping[str, str] | None = None) -> RolloutContext:
        """Make the context of a deployed agent from OPENAI_BASE_URL, OPENAI_API_KEY and ROLLOUT_MODEL, "" if
        unset."""
        env = os.environ if env is None else env
        return cls(
            payload=payload,
            base_url=env.get("OPENAI_BASE_URL", ""),
            api_key=env.get("OPENAI_API_KEY", ""),
            model=env.get("ROLLOUT_MODEL", ""),
        )
