"""Run agents on the machines of a Ray cluster: one actor per session, which runs the agent's command as the runtime
`process` does on a single machine.

Invariants:

- A session outlives this process, because its actor is detached. The run's next trainer or its janitor stops it.
- A session does not outlive its actor.
- A session that ends without a stop is reported immediately, even if its machine is lost.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from tenacity import wait_fixed

from agent_wrapper.shared.threads import in_thread
from rollout_backend.agents.runtimes.base import CleanupSpec
from rollout_backend.agents.runtimes.process.control import KILL_S, pipe_of, send_stop
from rollout_backend.agents.runtimes.process.runtime import CommandRuntime, ProcessRuntime
from rollout_backend.agents.runtimes.process.session import ProcessSession
from rollout_backend.base.check_result import CheckResult
from rollout_backend.base.logs import report_failure
from rollout_backend.base.retry import retry
from rollout_backend.config import RayConfig
from rollout_backend.core.session_ends import SessionEnd
from rollout_backend.errors import (
    OutcomeUnknown,
    PreflightError,
    RuntimeUnavailable,
)

# The time limit for scheduling the check.
_CHECK_S = 30.0
# Ray gives up a call to its head after 60 s, and a connection later.
_ASK_S = 120.0
_T = TypeVar("_T")


class _SessionActor:
    """One session, on the machine that runs it. Its methods run concurrently."""

    def __init__(self, config: RayConfig, folder: Path, session_id: str, payload: bytes) -> None:
        self._config, self._folder, self._id, self._payload = config, folder, session_id, payload
        self._session: ProcessSession | None = None

    async def start(self) -> BaseException | None:
        """Start the agent. Return the RuntimeCallError if it did not start; Ray would raise an error as its own."""
        argv = self._config.argv
        self._session = ProcessSession(
            self._config, self._folder, self._id, argv, self._payload, ends_with_starter=True
        )
        await asyncio.wait({self._session.started})
        return self._session.started.exception()

    async def wait(self) -> tuple[bool, str, str]:
        """Wait for the session's end. Return whether it was stopped, the reason, and a description."""
        session = self._session
        if session is None:
            return False, "container_lost", "it has not started"
        await asyncio.wait({session.task})
        stopped = session.end is not None and session.end["why"] == "stopped"
        return stopped, session.reason(), f"{session.describe_end()}. Log: {session.log}"

    async def stop(self) -> None:
        """End the session, and return once its processes have ended."""
        if self._session is not None:
            await asyncio.wait({self._session.started})
            send_stop(pipe_of(self._folder, self._id))
            await asyncio.wait({self._session.task})


def _check_on_a_node(config: RayConfig, folder: Path) -> str | None:
    try:
        asyncio.run(ProcessRuntime(config, folder).check())
    except PreflightError as error:
        return str(error)
    return None


def _check_labels(wanted: Mapping[str, str]) -> None:
    """Check that some machine has each label. Operators of Ray's selectors, such as `!in(a,b)`, are left to Ray."""
    machines = [node["Labels"] for node in ray.nodes() if node["Alive"]]
    for name, value in wanted.items():
        if "(" not in value and "!" not in value and all(labels.get(name) != value for labels in machines):
            raise PreflightError(
                f"runtime.node_labels: no machine of the Ray cluster has the label {name}={value}: correct it, or "
                "start one with `ray start --labels`"
            )


def _connect(address: str) -> None:
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, logging_level="warning")


async def _ask(call: Callable[[], _T]) -> _T:
    """Make a call to the cluster's head in its own thread, because a head that hangs would hold those that resolve
    host names. Raises TimeoutError if there is no answer in time."""
    async with asyncio.timeout(_ASK_S):
        return await in_thread(call, "ray")


async def _ask_again(call: Callable[[], _T]) -> _T:
    """Make a call like `_ask`, and repeat it until the head answers: a fault of the head must not end the run."""
    return await retry(lambda: _ask(call), (RayError, TimeoutError), wait_fixed(1))


class RayRuntime(CommandRuntime):
    """The sessions of one run."""

    _config: RayConfig

    def __init__(self, config: RayConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self._namespace = f"rollouts-{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"
        self._actors: dict[str, Any] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}

    @classmethod
    async def open(cls, config: RayConfig, on_status: Callable[[str], object] = lambda text: None) -> Self:
        try:
            await _ask(lambda: _connect(config.address))
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            why = str(error) or f"it is silent for {_ASK_S:g} s"
            raise PreflightError(
                f"runtime.address: no Ray cluster answers at {config.address} ({why}): start Ray, or correct it"
            ) from None
        return cls(config, (config.session_logs or Path("sessions")).absolute())

    async def check(self, session_s: float = 0.0) -> Sequence[CheckResult] | None:
        config, total = self._config, await _ask(ray.cluster_resources)
        for name, amount in {"CPU": config.num_cpus, **config.resources}.items():
            if total.get(name, 0) < amount:
                raise PreflightError(
                    f"runtime.{'num_cpus' if name == 'CPU' else 'resources'}: a session needs {amount:g} of {name}, "
                    f"and the Ray cluster has {total.get(name, 0):g}: start machines with it"
                )
        await _ask(lambda: _check_labels(config.node_labels))
        check = ray.remote(_check_on_a_node).options(**self._placement())
        ref = await _ask(lambda: check.remote(config, self._folder))
        limit_s = min(_CHECK_S, config.start_timeout_s)
        try:
            async with asyncio.timeout(limit_s):
                problem = await ref
        except TimeoutError:
            # Sessions of an earlier trainer, or other jobs, may occupy the whole cluster.
            ray.cancel(ref, force=True)
            text = f"not checked: no machine of the Ray cluster had a free place within {limit_s:g} s"
            return [CheckResult("warning", "runtime", text)]
        except RayError as error:
            raise PreflightError(
                f"runtime: no machine of the Ray cluster could be checked ({_first_line(error)}): this package must "
                "be installed there, as here"
            ) from None
        if problem is not None:
            raise PreflightError(f"{problem} (on a machine of the Ray cluster)")
        return None

    def _placement(self) -> dict[str, Any]:
        """Return the Ray options that select a session's machine."""
        config = self._config
        options: dict[str, Any] = {"num_cpus": config.num_cpus, "resources": dict(config.resources)}
        if config.node_labels:
            options["label_selector"] = dict(config.node_labels)
        if config.runtime_env:
            options["runtime_env"] = dict(config.runtime_env)
        return options

    def log_location(self, session_id: str | None) -> str:
        return f"on the session's machine of the Ray cluster: {super().log_location(session_id)}"

    def cleanup_spec(self) -> CleanupSpec:
        options = {"address": self._config.address, "namespace": self._namespace, "grace_s": self._config.grace_s}
        return CleanupSpec("rollout_backend.agents.runtimes.ray.session_stopper", options)

    # --- sessions -----------------------------------------------------------------------------------------

    def _start(self, session_id: str, payload: bytes) -> asyncio.Future[None]:
        start = asyncio.create_task(self._start_session(session_id, payload))
        # Mark the exception as retrieved.
        start.add_done_callback(lambda done: done.cancelled() or done.exception())
        return start

    async def _start_session(self, session_id: str, payload: bytes) -> None:
        try:
            await self._start_actor(session_id, payload)
        except BaseException:
            self._kill(session_id)
            del self._starts[session_id]
            raise
        self._watches[session_id] = watch = asyncio.create_task(self._watch(session_id))
        watch.add_done_callback(report_failure(f"the watch of session {session_id}"))

    async def _start_actor(self, session_id: str, payload: bytes) -> None:
        config = self._config
        actor_class = ray.remote(_SessionActor).options(
            name=session_id,
            namespace=self._namespace,
            lifetime="detached",
            max_restarts=0,
            max_concurrency=16,
            **self._placement(),
        )
        placed = False
        try:
            async with asyncio.timeout(config.start_timeout_s):
                actor = await _ask(lambda: actor_class.remote(config, self._folder, session_id, payload))
                self._actors[session_id] = actor
                await actor.__ray_ready__.remote()
                placed = True
                failed = await actor.start.remote()
        except TimeoutError:
            if session_id not in self._actors:
                raise OutcomeUnknown(
                    "the head of the Ray cluster did not answer, and may start the session"
                ) from None
            raise RuntimeUnavailable(
                f"the Ray cluster has not started the session within {config.start_timeout_s:g} s "
                f"(runtime.start_timeout_s): {'its agent starts slowly' if placed else 'its machines are full'}",
                refused=not placed,
            ) from None
        except (RayError, ValueError, ConnectionError) as error:
            raise OutcomeUnknown(f"the session's Ray actor was lost as it started: {_first_line(error)}") from None
        if failed is not None:
            raise failed

    async def _watch(self, session_id: str) -> None:
        stopped, reason, message = await _end_of(self._actors[session_id])
        del self._watches[session_id]
        self._kill(session_id)
        text = f"session {session_id} ended without a result: {message}"
        self._finish(session_id, None if stopped else SessionEnd(session_id, reason, text))

    def _kill(self, session_id: str) -> None:
        actor = self._actors.pop(session_id, None)
        if actor is not None:
            ray.kill(actor)

    async def stop(self, session_id: str) -> None:
        limit_s = self._config.grace_s + KILL_S
        try:
            if session_id not in self._starts:
                # The session is unknown, or an earlier trainer started it.
                stop_other = session_stopper(self.cleanup_spec().options)
                await in_thread(lambda: stop_other(session_id), "ray")
                return
            await asyncio.wait({self._starts[session_id]})
            async with asyncio.timeout(limit_s):
                if (actor := self._actors.get(session_id)) is not None:
                    with contextlib.suppress(RayActorError):
                        await actor.stop.remote()
                if (watch := self._watches.get(session_id)) is not None:
                    await asyncio.wait({watch})
        except (RayError, TimeoutError) as error:
            raise OutcomeUnknown(f"session {session_id} has not ended: {_first_line(error)}") from None

    async def watch_sessions(self, run_id: str, on_end: Callable[[SessionEnd], None]) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._find_earlier(group, on_end))
            while True:
                on_end(await self._ends.get())

    async def _find_earlier(self, group: asyncio.TaskGroup, on_end: Callable[[SessionEnd], None]) -> None:
        """Watch the sessions that an earlier trainer started."""
        for named in await _ask_again(lambda: ray.util.list_named_actors(True)):
            if named["namespace"] == self._namespace and named["name"] not in self._starts:
                group.create_task(self._watch_earlier(named["name"], on_end))

    async def _watch_earlier(self, session_id: str, on_end: Callable[[SessionEnd], None]) -> None:
        """Report the end of a session that an earlier trainer started."""
        with contextlib.suppress(ValueError):
            actor = await _ask_again(lambda: ray.get_actor(session_id, self._namespace))
            stopped, reason, message = await _end_of(actor)
            if not stopped:
                text = f"session {session_id}, of an earlier trainer, ended without a result: {message}"
                on_end(SessionEnd(session_id, reason, text))
            ray.kill(actor)

    async def aclose(self) -> None:
        """Leave sessions running; each step has stopped its own."""
        tasks = [*self._starts.values(), *self._watches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _end_of(actor: Any) -> tuple[bool, str, str]:
    while True:
        try:
            stopped, reason, message = await actor.wait.remote()
        except ActorUnavailableError:
            # The actor will answer again, or is lost.
            await asyncio.sleep(1)
        except RayError as error:
            return False, "container_lost", f"its machine or its Ray actor was lost: {_first_line(error)}"
        else:
            return stopped, reason, message


def session_stopper(options: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return a function that stops one session and returns False if it did not exist. See `CleanupSpec`."""
    _connect(str(options["address"]))
    limit_s = float(options["grace_s"]) + KILL_S

    def stop(session_id: str) -> bool:
        try:
            actor = ray.get_actor(session_id, namespace=options["namespace"])
            ray.get(actor.stop.remote(), timeout=limit_s)
        except ActorUnavailableError as error:
            raise TimeoutError(f"it cannot be reached: {_first_line(error)}") from None
        except (ValueError, RayActorError):
            return False
        except GetTimeoutError:
            raise TimeoutError(f"it has not ended within {limit_s:g} s") from None
        ray.kill(actor)
        return True

    return stop


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
