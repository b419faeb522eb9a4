"""Define the interface of an agent runtime, and open the implementation that a `runtime` section names.

Invariants:

- Implementations never retry `invoke` and `stop`: the step's rate limiter must see every call, and only the step
  decides whether to try again in a new session.
- Every error of `invoke` and `stop` is a `RuntimeCallError`, whose class says what the caller may do about it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

from agent_wrapper.contract import Rollout
from rollout_backend.base.aws import Permission
from rollout_backend.base.check_result import CheckResult
from rollout_backend.config import RuntimeConfig, TaskImageConfig
from rollout_backend.config.section import import_path
from rollout_backend.core.harbor import TaskContainer
from rollout_backend.core.session_ends import SessionEnd
from rollout_backend.errors import (
    InvokeRejected,
    QuotaExceeded,
    RuntimeCallError,
    RuntimeConflict,
    RuntimeUnavailable,
    Throttled,
)


class SessionCalls(Protocol):
    """The calls that every attempt makes."""

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        """Start the agent in a new session and return the container's answer.

        Raises:
            RuntimeCallError: the subclass says what the caller may do about it.
        """
        ...

    async def stop(self, session_id: str) -> bool | None:
        """End a session. Return False if the runtime does not know it, which does not prove that it has ended.

        Raises:
            RuntimeCallError: the subclass says what the caller may do about it.
        """
        ...

    def adopt(self, session_id: str, payload: Callable[[], bytes]) -> None:
        """Continue a session that an earlier trainer invoked. `payload` returns that of its invoke. No call is
        sent."""
        ...


@runtime_checkable
class ResultSource(Protocol):
    """Calls whose agents leave their results somewhere else than under the rollout's key in S3."""

    async def find_result(self, session_id: str, *, ended: bool) -> bool:
        """Ask once more for the result of an open session, and write its rollout to S3 if there is one.

        `ended` says that the session's container has ended. Returns whether the answer is known.
        """
        ...


@dataclass(frozen=True)
class CleanupSpec:
    """Functions with which a janitor cleans up after a killed run, in another process and without an event loop."""

    stopper: str
    """Import path of a function that takes `options` and returns a function `stop(session_id) -> bool`, which returns
    False if the session did not exist and raises if it could not be stopped. Several threads call it."""
    options: Mapping[str, Any]
    """JSON values."""
    remover: str | None = None
    """Import path of a function that removes everything else that the run left behind. It takes `options`, the run's
    id, and a function that returns False once the run was restarted."""


class AgentRuntime(ABC):
    """An open runtime. `open` creates it; `aclose` releases its connections."""

    @classmethod
    @abstractmethod
    async def open(cls, config: Any, on_status: Callable[[str], object] = lambda text: None) -> Self:
        """Open the runtime that these settings describe. Create or update it first if they say so.

        `config` is an instance of the `RuntimeConfig` subclass whose `implementation` names this class. `on_status`
        receives a line about each slow action.

        Raises:
            PreflightError: the runtime could not be created or updated.
        """

    @classmethod
    async def preview(cls, config: Any) -> str | None:
        """Describe what `open` would create or change, without doing it. None if it would change nothing.

        Raises:
            PreflightError: `open` would fail, as far as can be determined.
        """
        return None

    @classmethod
    def permissions(cls, config: Any) -> Sequence[Permission]:
        """Return the AWS permissions that the runtime needs in a run with these settings."""
        return ()

    @classmethod
    async def check_quotas(cls, limits: Any, aws_endpoint_url: str | None) -> Sequence[CheckResult]:
        """Compare a run's limits with the account's quotas. `aws_endpoint_url` is that of AWS's other services."""
        return ()

    @classmethod
    async def check_tasks(
        cls, config: Any, payloads: Mapping[str, Mapping[str, Any]]
    ) -> tuple[Mapping[str, str], Sequence[CheckResult]]:
        """Return the reasons why tasks cannot start, by task id, and the results of checks on the other tasks.

        `payloads` has the payload of each task. Nothing is created.
        """
        return {}, ()

    @abstractmethod
    async def check(self, session_s: float = 0.0) -> Sequence[CheckResult] | None:
        """Check that calls can work and that sessions may last this many seconds. Return one result for each check,
        or None if there is nothing to report.

        Raises:
            PreflightError: no further check is possible.
        """

    @property
    def is_in_public_network(self) -> bool:
        """True if agents are known to run where they cannot reach private addresses. Call `check` first."""
        return False

    @abstractmethod
    def limits(self) -> RuntimeConfig:
        """Return the settings with each unset limit filled in from what `check` found."""

    def describe(self) -> dict[str, str]:
        """Return what is known about the running agent, such as its image and version, for the run directory."""
        return {}

    def hold(self, payload: Mapping[str, Any]) -> AbstractContextManager[object]:
        """Keep what this task's containers start from, such as an image, while its rollout waits or runs."""
        return nullcontext()

    async def wait_ready(self, payload: Mapping[str, Any], run_id: str) -> None:  # noqa: B027
        """Wait until an invoke with this task's payload can start a container. Called before a rollout takes a slot,
        so that it does not delay other tasks."""

    @abstractmethod
    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        """Implement `SessionCalls.invoke`."""

    @abstractmethod
    async def stop(self, session_id: str) -> bool | None:
        """Implement `SessionCalls.stop`."""

    def adopt(self, session_id: str, payload: Callable[[], bytes]) -> None:  # noqa: B027
        """Implement `SessionCalls.adopt`. By default, nothing is done for a session that runs already."""

    async def watch_sessions(self, run_id: str, on_end: Callable[[SessionEnd], None]) -> None:
        """Report each session of the run whose container ended without a stop, until cancelled.

        Each report costs one lookup in S3, where the session's result may be. The default reports nothing; the step
        then detects a container that ended silently by its missing heartbeats.
        """
        await asyncio.Event().wait()

    @abstractmethod
    def log_location(self, session_id: str | None) -> str:
        """Describe where to find the logs of a session's container. None stands for a rollout without a session."""

    def cleanup_spec(self) -> CleanupSpec | None:
        """Return how the janitor stops the sessions of a killed run, or None if it cannot."""
        return None

    @abstractmethod
    async def aclose(self) -> None: ...


@dataclass(frozen=True)
class VerifierEnd:
    """The end of a verifier."""

    succeeded: bool
    """Whether its container exited with code 0."""
    message: str
    """What the verifier reported, or why it reported nothing."""


class VerifierRuntime(AgentRuntime):
    """A runtime that can run the verifier of a Harbor task in the task's image."""

    @abstractmethod
    def limits(self) -> TaskImageConfig: ...

    @abstractmethod
    async def run_verifier(
        self,
        session_id: str,
        rollout: Rollout,
        container: TaskContainer,
        files: Mapping[str, bytes],
        timeout_s: float,
    ) -> VerifierEnd:
        """Run `python -m agent_wrapper.verifier FOLDER` from /agent to its end, with `files` in FOLDER. `timeout_s`
        limits its tests. The verifier runs in a separate session, which the caller stops.

        Raises:
            RuntimeCallError: the container did not start, or did not end in time.
        """

    @abstractmethod
    async def stop_verifiers(self, run_id: str) -> int:
        """Stop the verifiers that an earlier trainer of this run left running, and return their number.

        Raises:
            RuntimeCallError: some may still be running.
        """


def error_of_status(status: int, text: str) -> RuntimeCallError:
    """Return the error for a call that a runtime's service refused with this HTTP status."""
    match status:
        case 401 | 403:
            return InvokeRejected(text, reason="access_denied")
        case 402:
            return QuotaExceeded(text)
        case 404:
            return InvokeRejected(text, reason="runtime_not_found")
        case 409:
            return RuntimeConflict(text)
        case 429:
            return Throttled(text)
        case _ if status == 408 or status >= 500:
            # With 408 the request did not arrive completely, and with 503 an overloaded server refused it.
            return RuntimeUnavailable(text, refused=status in (408, 503))
    return InvokeRejected(text)


def runtime_class(config: RuntimeConfig) -> type[AgentRuntime]:
    """Import the class named by the settings' `implementation`."""
    found = import_path(config.implementation)
    assert isinstance(found, type)
    assert issubclass(found, AgentRuntime), f"{config.implementation} must be an AgentRuntime"
    return found


async def open_runtime(config: RuntimeConfig, on_status: Callable[[str], object] = lambda text: None) -> AgentRuntime:
    """Open the runtime of these settings. See `AgentRuntime.open`."""
    return await runtime_class(config).open(config, on_status)
