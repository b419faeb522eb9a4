"""Build the objects of one attempt, and of the verifier of one result: a Job, and the Secret with its input. Pure.

Invariants:

- Everything that an attempt creates is deleted with its Job, which owns it.
- A Job starts one pod. Kubernetes does not replace a failed pod, because a new attempt needs a new session.
- The payload, which contains the session's key, is only in the Secret.
- The pod of an attempt mounts its payload, the agent's files if its task has its own image, and nothing else.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

from agent_wrapper.contract import PAYLOAD_VARIABLE, Rollout, RolloutRequest
from rollout_backend.base.names import derived_name
from rollout_backend.config import KubernetesConfig
from rollout_backend.core.harbor import TaskContainer

RUN_LABEL = "rollout-backend/run"
SESSION_LABEL = "rollout-backend/session"
COMPONENT_LABEL = "app.kubernetes.io/component"
VERIFIER_COMPONENT = "verifier"
CONTAINER = "agent"
COPY_CONTAINER = "copy-agent"
# The size limit of a Secret.
MAX_PAYLOAD_BYTES = 1_048_576

AGENT_FOLDER = "/agent"
"""Path of the agent's files, in its own image and in every container of a task's image."""
VERIFIER_SPARE_S = 240.0
"""Time that a verifier's container needs besides its tests: it downloads the artifacts."""
PAYLOAD_FILE = "payload.json"

_FOLDER = "/var/run/rollout"
# This limit also applies to a label's value.
_MAX_NAME = 63
# Time from SIGTERM to SIGKILL. The wrapper publishes within 8 s of SIGTERM.
_STOP_S = 15
# A Job outlives the attempt's deadline by this time.
_SPARE_S = 60.0


def job_name(session_id: str) -> str:
    """Return the name of a session's Job and Secret."""
    return derived_name(session_id, "a-z0-9-", _MAX_NAME)


def label_value(text: str) -> str:
    """Return a valid label value for the id of a run or session."""
    return derived_name(text, "A-Za-z0-9._-", _MAX_NAME)


def _metadata(component: str, run_id: str, step: int, rollout_id: str, session_id: str) -> dict[str, Any]:
    return {
        "labels": {
            "app.kubernetes.io/managed-by": "rollout-backend",
            COMPONENT_LABEL: component,
            RUN_LABEL: label_value(run_id),
            SESSION_LABEL: label_value(session_id),
        },
        "annotations": {
            "rollout-backend/rollout": f"{run_id}, step {step}, {rollout_id}",
            # Autoscalers do not move pods with these annotations.
            "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
            "karpenter.sh/do-not-disrupt": "true",
        },
    }


def job_manifest(
    config: KubernetesConfig, session_id: str, request: RolloutRequest, container: TaskContainer | None = None
) -> dict[str, Any]:
    """Return the Job of an attempt. `container` is the task's; None if the attempt runs in the agent's image."""
    metadata = _metadata("agent", request.run_id, request.step, request.rollout_id, session_id)
    alive_s = config.start_timeout_s + request.remaining_s + (request.publish_grace_s or 0) + _SPARE_S
    environment = {PAYLOAD_VARIABLE: f"{_FOLDER}/{PAYLOAD_FILE}"}
    return _job(config, job_name(session_id), metadata, alive_s, config.command, environment, container)


def verifier_manifest(
    config: KubernetesConfig, session_id: str, rollout: Rollout, container: TaskContainer, timeout_s: float
) -> dict[str, Any]:
    """Return the Job that scores a result in the image of its task. `timeout_s` limits its tests."""
    metadata = _metadata(VERIFIER_COMPONENT, rollout.run_id, rollout.step, rollout.rollout_id, session_id)
    command = [f"{AGENT_FOLDER}/bin/python", "-I", "-m", "agent_wrapper.verifier", _FOLDER]
    alive_s = config.start_timeout_s + timeout_s + VERIFIER_SPARE_S
    return _job(config, job_name(session_id), metadata, alive_s, command, {}, container)


def _job(
    config: KubernetesConfig,
    name: str,
    metadata: dict[str, Any],
    alive_s: float,
    command: Sequence[str],
    environment: Mapping[str, str],
    task: TaskContainer | None,
) -> dict[str, Any]:
    values = {**(task.env if task is not None else {}), **config.environment, **environment}
    main: dict[str, Any] = {
        "name": CONTAINER,
        "image": config.image if task is None else task.image,
        "env": [{"name": key, "value": _literal(value)} for key, value in values.items()],
        "resources": {"requests": config.requests, "limits": config.limits},
        "volumeMounts": [{"name": "payload", "mountPath": _FOLDER, "readOnly": True}],
        "securityContext": _security_context(config),
    }
    if command:
        main["command"] = [*map(_literal, command)]
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        # Agents do not need the API server.
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _STOP_S,
        "containers": [main],
        "volumes": [{"name": "payload", "secret": {"secretName": name}}],
        "nodeSelector": config.node_selector,
        "tolerations": list(config.tolerations),
        "imagePullSecrets": [{"name": each} for each in config.image_pull_secrets],
    }
    if task is not None:
        _run_in_task_image(pod, main, config, task)
    if config.service_account is not None:
        pod["serviceAccountName"] = config.service_account
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, **metadata},
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": math.ceil(alive_s),
            "ttlSecondsAfterFinished": config.keep_finished_s,
            "template": {"metadata": metadata, "spec": pod},
        },
    }


def _literal(text: str) -> str:
    """Escape what Kubernetes would replace in variables and arguments: `$(NAME)` and `$$`."""
    return text.replace("$", "$$")


def _security_context(config: KubernetesConfig) -> dict[str, Any]:
    context: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    if config.pod_security == "restricted":
        context |= {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
        }
    return context


def _run_in_task_image(
    pod: dict[str, Any], main: dict[str, Any], config: KubernetesConfig, task: TaskContainer
) -> None:
    """Copy the agent's files into a pod that runs the task's container."""
    main["resources"] = {
        "requests": {**config.requests, **task.resources},
        "limits": {**config.limits, **task.resources},
    }
    main["volumeMounts"].append({"name": "agent", "mountPath": AGENT_FOLDER, "subPath": "files", "readOnly": True})
    if task.workdir is not None:
        main["workingDir"] = task.workdir
    copied = "/agent-copy"
    pod["initContainers"] = [
        {
            "name": COPY_CONTAINER,
            "image": config.image,
            # Into a new folder, because only root may set the times of the volume's own.
            "command": ["cp", "-a", f"{AGENT_FOLDER}/.", f"{copied}/files"],
            "resources": main["resources"],
            "securityContext": _security_context(config),
            "volumeMounts": [{"name": "agent", "mountPath": copied}],
        }
    ]
    pod["volumes"].append({"name": "agent", "emptyDir": {}})


def secret_manifest(job: Mapping[str, Any], files: Mapping[str, bytes], job_uid: str) -> dict[str, Any]:
    """Return the Secret with a Job's files. The Job owns it."""
    metadata = job["metadata"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": metadata["name"], "uid": job_uid}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": metadata["name"], "labels": metadata["labels"], "ownerReferences": [owner]},
        "immutable": True,
        "data": {name: base64.b64encode(content).decode() for name, content in files.items()},
    }
