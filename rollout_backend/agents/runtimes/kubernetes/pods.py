"""Derive the state of a session from its pod's status, and follow the pods of one run with a single list and
watch.

Invariants:

- `pod_state` is pure.
- No change is lost: an interrupted watch resumes at the last version seen, and after `410 Gone` the pods are listed
  again. A pod that is missing from the list was deleted.
- Each end is reported once. Deletions by this process are not reported as ends.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollout_backend.agents.runtimes.kubernetes.api import ClusterError, KubernetesApi
from rollout_backend.agents.runtimes.kubernetes.manifests import (
    CONTAINER,
    COPY_CONTAINER,
    RUN_LABEL,
    SESSION_LABEL,
    label_value,
)
from rollout_backend.core.reasons import AGENT_ENDED
from rollout_backend.core.session_ends import SessionEnd

_PULL = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
_START = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff"})
# Reasons of a terminated container that never ran.
_NEVER_STARTED = frozenset({"StartError", "ContainerCannotRun"})
_EVICTED = frozenset({"Evicted", "NodeLost", "NodeShutdown", "Preempting", "Shutdown", "Terminated"})
log = logging.getLogger(__name__)

# Pauses after consecutive failures.
_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True)
class Problem:
    """Why a container does not start, or why it ended."""

    reason: str
    """Reason in the ledger."""
    message: str


@dataclass(frozen=True)
class PodState:
    """The state of one pod."""

    started: bool = False
    """The agent's container is running or has run."""
    ended: bool = False
    """The agent's container runs no more. Others may, such as a service mesh's."""
    finished: bool = False
    """No container is running any more. The pod's logs can be read until it is deleted."""
    problem: Problem | None = None
    """Why the pod cannot start, has ended, or is being deleted."""
    waits_for: str = "its Job has no pod yet"
    """Why it has not started, if it has not."""
    schedulable: bool = True
    exit_code: int | None = None
    message: str = ""
    """The termination message of the agent's container."""


def pod_state(pod: Mapping[str, Any]) -> PodState:
    """Return the state of a pod, given as the object that the API server sends."""
    status = pod.get("status", {})
    conditions = {each["type"]: each for each in status.get("conditions", ())}
    # A cluster may inject containers, and an injected init container may run next to the agent's, and be restarted.
    named = {each["name"]: each.get("state", {}) for each in status.get("containerStatuses", ())}
    state: Mapping[str, Any] = named.get(CONTAINER, {})
    terminated, waiting = state.get("terminated"), state.get("waiting") or {}
    ran = terminated is not None and terminated.get("reason") not in _NEVER_STARTED
    started, finished = "running" in state or ran, status.get("phase") in ("Succeeded", "Failed")
    scheduled = conditions.get("PodScheduled", {})
    failed = f"the pod failed: {status.get('reason')}: {status.get('message', '')}"
    return PodState(
        started=started,
        ended=finished or terminated is not None,
        finished=finished,
        problem=_eviction(pod, conditions)
        or (_exit(terminated) if terminated is not None else None)
        or (_failed_start(status.get("initContainerStatuses", ())) if not started else None)
        or _refused_start(waiting)
        or (Problem("container_lost", failed) if status.get("phase") == "Failed" else None),
        waits_for=_waits_for(scheduled, waiting),
        schedulable=scheduled.get("status") != "False",
        exit_code=terminated.get("exitCode") if terminated is not None else None,
        message=terminated.get("message", "") if terminated is not None else "",
    )


def _eviction(pod: Mapping[str, Any], conditions: Mapping[str, Any]) -> Problem | None:
    status, node = pod.get("status", {}), pod.get("spec", {}).get("nodeName", "no node")
    disruption = conditions.get("DisruptionTarget", {})
    if disruption.get("status") == "True":
        said = f"{disruption.get('reason', '')}: {disruption.get('message', '')}"
    elif status.get("reason") in _EVICTED:
        said = f"{status['reason']}: {status.get('message', '')}"
    elif pod["metadata"].get("deletionTimestamp"):
        said = "it is being deleted, and not by this run"
    else:
        return None
    return Problem("evicted", f"the pod {pod['metadata']['name']} was evicted from {node}: {said}")


def _exit(terminated: Mapping[str, Any]) -> Problem:
    reason, code = terminated.get("reason"), terminated.get("exitCode")
    if reason == "OOMKilled":
        return Problem("out_of_memory", "the container was killed because it used more memory than its limit")
    said = f": {terminated['message']}" if terminated.get("message") else ""
    if reason in _NEVER_STARTED:
        if "/agent/" in said:
            said += ": a task's image must be of Linux with the libc of the Python in runtime.image's folder /agent"
        return Problem("container_error", f"the container could not be started{said}")
    if code == 0:
        return Problem(AGENT_ENDED, f"the agent ended with exit code 0 and published no result{said}")
    return Problem("container_lost", f"the container ended with exit code {code} and published no result{said}")


def _refused_start(waiting: Mapping[str, Any]) -> Problem | None:
    reason = waiting.get("reason")
    said = f"{reason}: {waiting.get('message', '')}"
    if reason in _PULL:
        return Problem("image_pull_failed", f"the image cannot be pulled: {said}")
    if reason in _START:
        return Problem("container_error", f"the container cannot be started: {said}")
    return None


def _failed_start(initial: Iterable[Mapping[str, Any]]) -> Problem | None:
    """Return why an init container prevents the container from starting."""
    for status in initial:
        state = status.get("state", {})
        if found := _refused_start(state.get("waiting") or {}):
            return found
        ended = state.get("terminated") or {}
        if ended.get("exitCode"):
            said = f"{ended.get('reason', '')} {ended.get('message', '')}".strip()
            text = f"the init container {status['name']} failed with exit code {ended['exitCode']} ({said})"
            if status["name"] == COPY_CONTAINER:
                text += ": does runtime.image have a folder /agent, and cp?"
            return Problem("container_error", text)
    return None


def _waits_for(scheduled: Mapping[str, Any], waiting: Mapping[str, Any]) -> str:
    if scheduled.get("status") == "False":
        return f"its pod cannot be scheduled: {scheduled.get('message', '')}"
    if waiting:
        return f"its container waits: {waiting.get('reason')} {waiting.get('message', '')}".rstrip()
    return "its pod waits for a node"


@dataclass
class _Session:
    state: PodState = field(default_factory=PodState)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    reported: bool = False
    stopping: bool = False
    awaited: bool = False
    """Whether a caller waits for its end, so that the end is no loss."""
    gone: bool = False
    """Whether its pod was deleted."""


class PodWatch:
    """The pods of one run, by the label of their session. `run` keeps them up to date."""

    def __init__(self, api: KubernetesApi, run_id: str, describe: Callable[[str], str]) -> None:
        """`describe` returns the location of a session's log, for the messages about ends."""
        self._api = api
        self._selector = f"{RUN_LABEL}={label_value(run_id)}"
        self._describe = describe
        self._sessions: dict[str, _Session] = {}
        self._listeners: list[Callable[[SessionEnd], None]] = []
        self._failures = 0
        self._version = ""
        self.trouble: str | None = None
        """Why the pods cannot be watched at the moment."""

    # --- what callers ask ---------------------------------------------------------------------------------

    def listen(self, on_end: Callable[[SessionEnd], None]) -> None:
        """Report every end from now on, and also those seen before."""
        self._listeners.append(on_end)
        for session_id, session in self._sessions.items():
            if session.reported:
                on_end(self._end(session_id, session.state))

    def expect(self, session_id: str, *, awaited: bool = False) -> None:
        """Follow a session whose Job is about to be created. The end of an `awaited` session is not reported."""
        self._sessions.setdefault(label_value(session_id), _Session(awaited=awaited))

    async def wait(self, session_id: str, until: Callable[[PodState], bool], timeout_s: float) -> PodState:
        """Wait up to `timeout_s` until a session's pod is in such a state. Return its last state."""
        session = self._sessions.get(label_value(session_id))
        if session is None:
            return PodState()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not until(session.state):
                    session.changed.clear()
                    await session.changed.wait()
        return session.state

    async def stop(self, session_id: str, exit_s: float) -> bool:
        """Stop reporting this session. Wait once, up to `exit_s`, for its end. Return whether its pod finished."""
        session = self._sessions.get(label_value(session_id))
        if session is None:
            return False
        first, session.stopping = not session.stopping, True
        if first and session.state.started:
            await self.wait(session_id, lambda state: state.finished, exit_s)
        if session.gone or session.state == PodState():
            # The deletion of its pod will not be seen.
            self._sessions.pop(label_value(session_id), None)
        return session.state.finished

    # --- list and watch -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow the pods until cancelled."""
        listed = False
        while True:
            try:
                if not listed:
                    await self._list()
                    listed = True
                if not await self._follow():
                    # A proxy may end every watch immediately.
                    await asyncio.sleep(_PAUSES_S[0])
            except Exception as error:
                # No fault of the network or the server may end the task. With 410, the server no longer keeps this
                # version.
                if isinstance(error, ClusterError) and error.status == 410:
                    listed = False
                await self._pause(error)

    async def _list(self) -> None:
        answer = await self._api.call("GET", self._api.path("pods"), labelSelector=self._selector)
        found = {session_id: pod for pod in answer["items"] if (session_id := _session_of(pod)) is not None}
        for session_id in [name for name in self._sessions if name not in found]:
            if self._sessions[session_id].state != PodState():
                self._deleted(session_id)
        for session_id, pod in found.items():
            self._seen(session_id, pod)
        self._version = answer["metadata"]["resourceVersion"]
        self._failures, self.trouble = 0, None

    async def _follow(self) -> bool:
        """Follow the pods until the server ends the watch. Return whether any event arrived."""
        any_event = False
        watching = self._api.watch(
            self._api.path("pods"), labelSelector=self._selector, resourceVersion=self._version
        )
        async with watching as events:
            self._failures, self.trouble = 0, None
            async for event in events:
                any_event = True
                kind, item = event["type"], event["object"]
                self._version = item["metadata"]["resourceVersion"]
                if kind == "BOOKMARK" or (session_id := _session_of(item)) is None:
                    continue
                if kind == "DELETED":
                    self._deleted(session_id)
                else:
                    self._seen(session_id, item)
        return any_event

    async def _pause(self, error: BaseException) -> None:
        self.trouble = f"the pods cannot be watched: {str(error) or type(error).__name__}"
        if self._failures == len(_PAUSES_S):
            log.warning("%s; retrying", self.trouble)
        asked_s = error.retry_after_s if isinstance(error, ClusterError) else 0.0
        await asyncio.sleep(max(asked_s, _PAUSES_S[min(self._failures, len(_PAUSES_S) - 1)]))
        self._failures += 1

    # --- one session --------------------------------------------------------------------------------------

    def _seen(self, session_id: str, pod: Mapping[str, Any]) -> None:
        session = self._sessions.setdefault(session_id, _Session())
        session.state = pod_state(pod)
        session.changed.set()
        if session.state.started and session.state.problem is not None:
            self._report(session_id, session)

    def _deleted(self, session_id: str) -> None:
        session = self._sessions.get(session_id)
        if session is None:
            return
        session.gone = True
        if not session.awaited or session.stopping:
            del self._sessions[session_id]
        if not session.state.finished:
            gone = session.state.problem or Problem("evicted", "its pod was deleted, and not by this run")
            session.state = PodState(started=session.state.started, ended=True, finished=True, problem=gone)
            self._report(session_id, session)
        session.changed.set()

    def _report(self, session_id: str, session: _Session) -> None:
        if session.reported or session.stopping or session.awaited:
            return
        session.reported = True
        end = self._end(session_id, session.state)
        for on_end in self._listeners:
            on_end(end)

    def _end(self, session_id: str, state: PodState) -> SessionEnd:
        assert state.problem is not None
        text = f"session {session_id}: {state.problem.message}. Its log: {self._describe(session_id)}"
        return SessionEnd(session_id, state.problem.reason, text)


def _session_of(pod: Mapping[str, Any]) -> str | None:
    label: str | None = pod["metadata"].get("labels", {}).get(SESSION_LABEL)
    return label
