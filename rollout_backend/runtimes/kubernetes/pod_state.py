"""Derive the state of a session from its pod's status. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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
_NEVER_STARTED = frozenset({"StartError", "ContainerCannotRun"})  # reasons of a terminated container that never ran
_EVICTED = frozenset({"Evicted", "NodeLost", "NodeShutdown", "Preempting", "Shutdown", "Terminated"})


@dataclass(frozen=True)
class Problem:
    """Why a container does not start, or why it ended."""

    reason: str  # reason in the ledger
    message: str


@dataclass(frozen=True)
class PodState:
    """The state of one pod."""

    started: bool = False
    """The container is running or has run."""
    finished: bool = False
    """No container is running any more. The pod's logs can be read until it is deleted."""
    problem: Problem | None = None
    """Why the pod cannot start, has ended, or is being deleted."""
    waits_for: str = "its Job has no pod yet"
    """Why it has not started, if it has not."""
    schedulable: bool = True
    exit_code: int | None = None
    message: str = ""
    """The container's termination message."""


def pod_state(pod: Mapping[str, Any]) -> PodState:
    """Return the state of a pod, given as the object that the API server sends."""
    status = pod.get("status", {})
    conditions = {each["type"]: each for each in status.get("conditions", ())}
    container: Mapping[str, Any] = next(iter(status.get("containerStatuses", ())), {})
    state = container.get("state", {})
    terminated, waiting = state.get("terminated"), state.get("waiting") or {}
    initial = [each.get("state", {}) for each in status.get("initContainerStatuses", ())]
    ran = terminated is not None and terminated.get("reason") not in _NEVER_STARTED
    scheduled = conditions.get("PodScheduled", {})
    return PodState(
        started="running" in state or ran,
        finished=status.get("phase") in ("Succeeded", "Failed"),
        problem=_eviction(pod, conditions)
        or (_exit(terminated) if terminated is not None else None)
        or _failed_start(initial)
        or _refused_start(waiting)
        or _failure(status),
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
        return Problem("container_error", f"the container could not be started{said}{_advice(said)}")
    return Problem("container_lost", f"the container ended with exit code {code} and published no result{said}")


def _advice(said: str) -> str:
    if "/agent/" not in said:
        return ""
    return ": a task's image must be of Linux with the libc of the Python in runtime.image's folder /agent"


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
    for state in initial:
        if found := _refused_start(state.get("waiting") or {}):
            return found
        ended = state.get("terminated") or {}
        if ended.get("exitCode"):
            said = f"{ended.get('reason', '')} {ended.get('message', '')}".strip()
            text = f"copying the agent's files failed with exit code {ended['exitCode']} ({said})"
            return Problem("container_error", f"{text}: does runtime.image have a folder /agent, and cp?")
    return None


def _failure(status: Mapping[str, Any]) -> Problem | None:
    if status.get("phase") != "Failed":
        return None
    return Problem("container_lost", f"the pod failed: {status.get('reason')}: {status.get('message', '')}")


def _waits_for(scheduled: Mapping[str, Any], waiting: Mapping[str, Any]) -> str:
    if scheduled.get("status") == "False":
        return f"its pod cannot be scheduled: {scheduled.get('message', '')}"
    if waiting:
        return f"its container waits: {waiting.get('reason')} {waiting.get('message', '')}".rstrip()
    return "its pod waits for a node"
