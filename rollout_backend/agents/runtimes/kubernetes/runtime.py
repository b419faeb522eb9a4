"""Run each attempt as a Job: create it, wait until its container has started, delete it.

Invariants:

- The session id names the Job, so a repeated create finds the Job of the same attempt.
- `invoke` returns once the container has started, because the agent's time begins then. `watch_sessions` reports what
  happens to the container later.
- A finished pod is not deleted, so that its log can be read for `runtime.keep_finished_s`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Self

import aiohttp
from pydantic_core import from_json

from agent_wrapper.contract import REQUEST_FIELD, ContractError, Rollout, RolloutRequest
from rollout_backend.agents.runtimes.base import CleanupSpec, VerifierEnd, VerifierRuntime, error_of_status
from rollout_backend.agents.runtimes.kubernetes.api import ClusterError, KubernetesApi
from rollout_backend.agents.runtimes.kubernetes.manifests import (
    COMPONENT_LABEL,
    MAX_PAYLOAD_BYTES,
    PAYLOAD_FILE,
    RUN_LABEL,
    SESSION_LABEL,
    VERIFIER_COMPONENT,
    VERIFIER_SPARE_S,
    job_manifest,
    job_name,
    label_value,
    secret_manifest,
    verifier_manifest,
)
from rollout_backend.agents.runtimes.kubernetes.pods import PodState, PodWatch, pod_state
from rollout_backend.base.check_result import CheckResult
from rollout_backend.config import KubernetesConfig
from rollout_backend.core.harbor import CONTAINER_FIELD, TaskContainer
from rollout_backend.core.session_ends import SessionEnd
from rollout_backend.errors import (
    ContainerStartTimeout,
    InvokeRejected,
    NoCredentials,
    OutcomeUnknown,
    PreflightError,
    QuotaExceeded,
    RuntimeCallError,
    RuntimeConflict,
    RuntimeUnavailable,
)

RULES = (
    ("batch", "jobs", "create"),
    ("batch", "jobs", "get"),
    ("batch", "jobs", "delete"),
    ("", "secrets", "create"),
    ("", "pods", "list"),
    ("", "pods", "watch"),
    ("", "events", "list"),
)
"""API group, resource and verb of each call to objects of the namespace."""

_NO_ANSWER = (aiohttp.ClientError, TimeoutError, OSError, ValueError)
# Time for the Job controller to create a pod, unless something refuses it.
_POD_S = 10.0
_ACCEPTED = b'{"status": "accepted"}'


class KubernetesRuntime(VerifierRuntime):
    """Runs sessions in a namespace of a cluster."""

    exit_s = 2.0
    """Time for a container to exit once its result has arrived."""
    verifier_spare_s = VERIFIER_SPARE_S
    """Time for a verifier's container to exit after the timeout of its tests."""

    def __init__(self, config: KubernetesConfig, api: KubernetesApi) -> None:
        self._config = config
        self._api = api
        # By run id.
        self._watches: dict[str, tuple[PodWatch, asyncio.Task[None]]] = {}
        self._version = ""

    @classmethod
    async def open(cls, config: KubernetesConfig, on_status: Callable[[str], object] = lambda text: None) -> Self:
        return cls(config, await KubernetesApi.open(config))

    # --- checks -------------------------------------------------------------------------------------------

    async def check(self, session_s: float = 0.0) -> Sequence[CheckResult]:
        """Check that these credentials may make each call, and that the named objects exist."""
        server = self._api.cluster.url
        try:
            self._version = str((await self._api.call("GET", "/version")).get("gitVersion", ""))
            found = [CheckResult("ok", "runtime.kubeconfig", f"{server} runs Kubernetes {self._version}")]
            found += [await self._check_rule(*rule) for rule in RULES]
            found.append(await self._check_namespace())
            if (account := self._config.service_account) is not None:
                setting, what = "runtime.service_account", f"service account {account!r}"
                missing = f"the namespace {self._config.namespace!r} has no {what}"
                path = self._api.path("serviceaccounts", account)
                found.append(await self._check_exists(setting, path, f"the {what}", missing))
        except ClusterError as error:
            raise PreflightError(f"the API server {server} refuses calls: {error}") from error
        except NoCredentials as error:
            raise PreflightError(f"there are no credentials for {server}: {error}") from error
        except _NO_ANSWER as error:
            raise PreflightError(
                f"the API server {server} does not answer ({_text(error)}): check runtime.kubeconfig, "
                "runtime.context and the network"
            ) from error
        return found

    async def _check_rule(self, group: str, resource: str, verb: str) -> CheckResult:
        what, namespace = f"{verb} {resource}", self._config.namespace
        name = f"runtime-{verb}-{resource}"
        if await self._is_allowed(group, resource, verb):
            return CheckResult("ok", "runtime", f"these credentials may {what}", name)
        text = (
            f"these credentials may not {what} in the namespace {namespace!r}: add to their Role "
            f"{_rule_text(group, resource, verb)}, as in infra/kubernetes.yaml"
        )
        return CheckResult("problem", "runtime", text, name)

    async def _check_namespace(self) -> CheckResult:
        name, setting = self._config.namespace, "runtime.namespace"
        missing = (
            f"{self._api.cluster.url} has no namespace {name!r}: apply infra/kubernetes.yaml (`rollout infra` writes "
            "it), or correct it"
        )
        return await self._check_exists(setting, f"/api/v1/namespaces/{name}", f"the namespace {name!r}", missing)

    async def _check_exists(self, setting: str, path: str, what: str, missing: str) -> CheckResult:
        try:
            await self._api.call("GET", path)
        except ClusterError as error:
            match error.status:
                case 404:
                    return CheckResult("problem", setting, missing)
                case 403:
                    return CheckResult("unchecked", setting, f"these credentials may not see {what}")
            raise
        return CheckResult("ok", setting, f"{what} exists")

    async def _is_allowed(self, group: str, resource: str, verb: str) -> bool:
        asked = {"namespace": self._config.namespace, "group": group, "resource": resource, "verb": verb}
        answer = await self._api.call(
            "POST",
            "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
            {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": asked},
            },
        )
        return bool(answer["status"]["allowed"])

    def limits(self) -> KubernetesConfig:
        return self._config

    def describe(self) -> dict[str, str]:
        found = {"image": self._config.image, "namespace": self._config.namespace, "kubernetes": self._version}
        return {name: value for name, value in found.items() if value}

    def log_location(self, session_id: str | None) -> str:
        of = f"kubectl logs --namespace {self._config.namespace}"
        if session_id is None:
            return f"{of} job/SESSION"
        return f"{of} job/{job_name(session_id)} (for {self._config.keep_finished_s} s after its end)"

    def cleanup_spec(self) -> CleanupSpec:
        kept = {"kind", "image", "namespace", "kubeconfig", "context", "connect_timeout_s", "read_timeout_s"}
        return CleanupSpec(
            "rollout_backend.agents.runtimes.kubernetes.runtime.session_stopper",
            self._config.model_dump(mode="json", include=kept),
        )

    # --- sessions -----------------------------------------------------------------------------------------

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        request, container = _read_request(payload)
        job = job_manifest(self._config, session_id, request, container)
        await self._start(session_id, request.run_id, job, {PAYLOAD_FILE: payload})
        return _ACCEPTED

    async def run_verifier(
        self,
        session_id: str,
        rollout: Rollout,
        container: TaskContainer,
        files: Mapping[str, bytes],
        timeout_s: float,
    ) -> VerifierEnd:
        """Run a verifier as a Job, which remains until it is stopped."""
        job = verifier_manifest(self._config, session_id, rollout, container, timeout_s)
        self._watch(rollout.run_id).expect(session_id, awaited=True)
        await self._start(session_id, rollout.run_id, job, files)
        watch, limit_s = self._watch(rollout.run_id), timeout_s + self.verifier_spare_s
        state = await watch.wait(session_id, lambda state: state.ended, limit_s)
        if not state.ended:
            raise RuntimeCallError(f"the verifier's container has not ended within {limit_s:g} s; {watch.trouble}")
        problem, message = state.problem, state.message
        if state.exit_code != 0 and problem is not None and (problem.reason != "container_lost" or not message):
            message = problem.message
        return VerifierEnd(state.exit_code == 0, message)

    async def stop_verifiers(self, run_id: str) -> int:
        """Stop the verifiers. Finds their Jobs by the labels of pods, because these credentials may not list Jobs."""
        labels = f"{RUN_LABEL}={label_value(run_id)},{COMPONENT_LABEL}={VERIFIER_COMPONENT}"
        stopped = 0
        try:
            found = await self._api.call("GET", self._api.path("pods"), labelSelector=labels)
            for pod in found["items"]:
                if not pod_state(pod).finished:
                    stopped += await delete_job(self._api, pod["metadata"]["labels"][SESSION_LABEL])
        except ClusterError as error:
            raise _to_call_error(error, "find and delete Jobs of verifiers") from error
        except _NO_ANSWER as error:
            raise RuntimeUnavailable(f"the API server did not answer: {_text(error)}") from error
        return stopped

    async def _start(self, session_id: str, run_id: str, job: dict[str, Any], files: Mapping[str, bytes]) -> None:
        """Create a Job with its Secret, and return once its container has started."""
        watch = self._watch(run_id)
        watch.expect(session_id)
        uid = await self._create_job(session_id, job)
        await self._create_secret(job, files, uid)
        state = await watch.wait(session_id, _is_decided, min(_POD_S, self._config.start_timeout_s))
        if state == PodState():
            await self._raise_refused_pod(session_id)
        if not _is_decided(state):
            state = await watch.wait(session_id, _is_decided, max(0.0, self._config.start_timeout_s - _POD_S))
        self._raise_not_started(state, watch.trouble)

    async def _create_job(self, session_id: str, manifest: dict[str, Any]) -> str:
        """Create the session's Job if it does not exist, and return its uid."""
        try:
            job = await self._create("jobs", manifest)
            if job is None:
                # An earlier call created the Job, but its response was lost.
                job = await self._api.call("GET", self._api.path("jobs", job_name(session_id)))
        except ClusterError as error:
            if error.status == 404 and error.reason == "NotFound" and "namespaces" not in error.message:
                raise RuntimeConflict(f"the session's Job is being deleted: {error}") from error
            raise _to_call_error(error, "create a Job") from error
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise RuntimeUnavailable(f"the API server cannot be reached: {error}", never_opened=True) from error
        except _NO_ANSWER as error:
            # The step invokes the same session again, which finds the Job if it exists.
            raise RuntimeUnavailable(f"the create of a Job was cut off: {_text(error)}", refused=True) from error
        return str(job["metadata"]["uid"])

    async def _create_secret(self, job: Mapping[str, Any], files: Mapping[str, bytes], uid: str) -> None:
        refused: RuntimeCallError
        try:
            await self._create("secrets", secret_manifest(job, files, uid))
        except ClusterError as error:
            refused = _to_call_error(error, "create a Secret")
            # The Job exists.
            refused.never_opened = False
            raise refused from error
        except NoCredentials as error:
            error.never_opened = False
            raise
        except _NO_ANSWER as error:
            raise RuntimeUnavailable(f"the create of a Secret was cut off: {_text(error)}", refused=True) from error

    async def _create(self, resource: str, manifest: dict[str, Any]) -> dict[str, Any] | None:
        """Return the new object; None if an object with this name exists."""
        try:
            return await self._api.call("POST", self._api.path(resource), manifest, fieldValidation="Strict")
        except ClusterError as error:
            if error.reason == "AlreadyExists":
                return None
            raise

    async def _raise_refused_pod(self, session_id: str) -> None:
        """Raise an error that says why the Job has no pod, if an event of the Job tells."""
        try:
            name = job_name(session_id)
            selector = f"involvedObject.kind=Job,involvedObject.name={name},reason=FailedCreate"
            found = await self._api.call("GET", self._api.path("events"), fieldSelector=selector)
        except (ClusterError, NoCredentials, *_NO_ANSWER):
            return
        messages = [str(event.get("message", "")) for event in found["items"]]
        if not messages:
            return
        if "exceeded quota" not in messages[-1]:
            raise ContainerStartTimeout(f"the cluster creates no pod for the Job: {messages[-1]}", "invoke_rejected")
        refused = QuotaExceeded(messages[-1])
        # The Job exists, and still tries to create a pod.
        refused.never_opened = False
        raise refused

    def _raise_not_started(self, state: PodState, trouble: str | None) -> None:
        if state.started:
            return
        if state.problem is not None:
            raise ContainerStartTimeout(state.problem.message, state.problem.reason)
        reason = "container_start_timeout" if state.schedulable else "unschedulable"
        text = f"the container did not start within {self._config.start_timeout_s:g} s (runtime.start_timeout_s): "
        raise ContainerStartTimeout(text + state.waits_for + (f"; {trouble}" if trouble else ""), reason)

    async def stop(self, session_id: str) -> None:
        for watch, _ in self._watches.values():
            if await watch.stop(session_id, self.exit_s):
                return
        try:
            await delete_job(self._api, session_id)
        except ClusterError as error:
            raise _to_call_error(error, "delete a Job") from error
        except _NO_ANSWER as error:
            raise OutcomeUnknown(f"the stop was not answered: {_text(error)}") from error

    async def watch_sessions(self, run_id: str, on_end: Callable[[SessionEnd], None]) -> None:
        self._watch(run_id).listen(on_end)
        await self._watches[run_id][1]

    def _watch(self, run_id: str) -> PodWatch:
        if run_id not in self._watches:
            watch = PodWatch(self._api, run_id, self.log_location)
            self._watches[run_id] = watch, asyncio.create_task(watch.run())
        return self._watches[run_id][0]

    async def aclose(self) -> None:
        tasks = [task for _, task in self._watches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._api.aclose()


async def delete_job(api: KubernetesApi, session_id: str) -> bool:
    """Delete a session's Job and all that it owns. Return False if it does not exist. Raises like `api.call`."""
    options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
    try:
        await api.call("DELETE", api.path("jobs", job_name(session_id)), options)
    except ClusterError as error:
        if error.status != 404:
            raise
        return False
    return True


def _read_request(payload: bytes) -> tuple[RolloutRequest, TaskContainer | None]:
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise InvokeRejected(
            f"the payload has {len(payload):,} bytes, and a Secret holds at most {MAX_PAYLOAD_BYTES:,}: put the "
            "task's large fields where the agent can fetch them, and name them in the task"
        )
    try:
        fields = from_json(payload)
        container = fields.get(CONTAINER_FIELD)
        request = RolloutRequest.parse(fields[REQUEST_FIELD], f"{REQUEST_FIELD}.")
        return request, TaskContainer.parse(container, f"{CONTAINER_FIELD}.") if container is not None else None
    except (ValueError, LookupError, TypeError, AttributeError, ContractError) as error:
        raise InvokeRejected(f"the payload requests no rollout: {error}") from error


def _is_decided(state: PodState) -> bool:
    return state.started or state.problem is not None


def _rule_text(group: str, resource: str, verb: str) -> str:
    return f'{{apiGroups: ["{group}"], resources: ["{resource}"], verbs: ["{verb}"]}}'


def _to_call_error(error: ClusterError, action: str) -> RuntimeCallError:
    found = _classify(error, action)
    found.retry_after_s = error.retry_after_s
    return found


def _classify(error: ClusterError, action: str) -> RuntimeCallError:
    text = f"Kubernetes refused to {action}: {error}"
    match error.status:
        case 403 if "exceeded quota" in error.message:
            return QuotaExceeded(text)
        case 403 if " cannot " in error.message:
            # RBAC refused it. Admission controllers word their refusals differently.
            verb, _, kind = action.partition(" a ")
            resource = f"{kind.lower()}s"
            rule = _rule_text("batch" if resource == "jobs" else "", resource, verb)
            return InvokeRejected(f"{text}. Add to the Role of the run's account: {rule}", reason="access_denied")
        case 403:
            return InvokeRejected(text)
        case 401:
            return NoCredentials(text)
        case status if status == 408 or status >= 500:
            # A repeated create finds the object that this one created.
            return RuntimeUnavailable(text, refused=True)
        case status:
            return error_of_status(status, text)


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__


def session_stopper(options: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return a function that deletes the Job of one session and returns False if it did not exist. See
    `CleanupSpec`."""
    config = KubernetesConfig.model_validate(options)

    async def delete(session_id: str) -> bool:
        async with aclosing(await KubernetesApi.open(config)) as api:
            return await delete_job(api, session_id)

    return lambda session_id: asyncio.run(delete(session_id))
