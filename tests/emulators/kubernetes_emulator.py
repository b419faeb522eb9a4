"""An emulator of a Kubernetes API server with one namespace, whose pods are processes on this machine.

It answers the calls that `rollout_backend.agents.runtimes.kubernetes` makes, and is as unkind as a cluster: it cuts
watches, forgets versions, refuses calls, loses answers after it has acted, lets tokens expire, and kills, evicts or
never starts containers. `kubernetes_nodes` runs the pods.

It does not schedule by resources or keep anything after its end, and only a `FolderImage` isolates containers.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import fnmatch
import json
import re
import ssl
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self
from uuid import uuid4

import yaml
from aiohttp import web

from rollout_backend.workbench.local.spawner import Spawner
from tests.emulators.kubernetes_nodes import Fate, Nodes

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
_SECRET_BYTES = 1_048_576
_RETRY_AFTER_S = 2
_GROUPS = {"jobs": "batch"}

FaultKind = Literal["throttle", "unauthorized", "unavailable", "error", "quota", "lose answer", "cut", "hang"]


@dataclass
class ApiFault:
    """How the next calls of one kind fail. `path` is a pattern such as `*/jobs`."""

    kind: FaultKind
    method: str = "*"
    path: str = "*"
    times: int = 1
    hits: int = 0

    def applies_to(self, request: web.Request) -> bool:
        fits = self.method in ("*", request.method) and fnmatch.fnmatchcase(request.path, self.path)
        return fits and self.hits < self.times


class Refusal(Exception):
    """An answer with an error's status."""

    def __init__(self, status: int, reason: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.headers = headers

    def body(self) -> dict[str, Any]:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
        return status | {"code": self.status, "reason": self.reason, "message": str(self)}


def write_kubeconfig(path: Path, cluster: Mapping[str, str], user: Mapping[str, Any]) -> Path:
    """Write a kubeconfig with one context, and return its path."""
    tree = {
        "current-context": "emulator",
        "contexts": [{"name": "emulator", "context": {"cluster": "emulator", "user": "trainer"}}],
        "clusters": [{"name": "emulator", "cluster": {**cluster}}],
        "users": [{"name": "trainer", "user": {**user}}],
    }
    path.write_text(yaml.safe_dump(tree))
    return path


class KubernetesEmulator:
    """An async context manager. `kubeconfig` is the file with its address and its token.

    `images` maps the name of each image to what starts its containers. `fates` are those of the next pods, in
    the order in which they are created.
    """

    def __init__(
        self,
        images: Mapping[str, Spawner],
        folder: Path,
        *,
        namespace: str = "rollouts",
        tls: ssl.SSLContext | None = None,
        authority: Path | None = None,
    ) -> None:
        """With `tls` it serves HTTPS, and the kubeconfig names the file of the `authority`."""
        self.namespace = namespace
        self.kubeconfig = folder / "kubeconfig"
        self.token_file = folder / "token"
        self.faults: list[ApiFault] = []
        self.denied: set[tuple[str, str]] = set()  # resource and verb
        self.calls: list[tuple[str, str]] = []  # method and path
        self.created: list[dict[str, Any]] = []  # what was posted
        self.service_accounts = {"default"}
        self.mesh = False
        self.watch_s = 60.0  # at most; then a watch ends with a bookmark
        self.trickles = 0  # the number of next watches that something else answers, with blanks and no end
        self._tls = tls
        self._authority = authority
        self._objects: dict[tuple[str, str], dict[str, Any]] = {}  # by resource and name
        self._events: list[dict[str, Any]] = []
        self._version = 0
        self._oldest = 0  # versions before it are not kept
        self._history: deque[tuple[int, str, dict[str, Any]]] = deque()  # of pods
        self._changed = asyncio.Event()
        self._cut = asyncio.Event()
        self._tokens: list[str] = []
        self._runner: web.AppRunner | None = None
        self._nodes = Nodes(self, images, folder)
        self.url = ""

    @property
    def fates(self) -> deque[Fate]:
        return self._nodes.fates

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=2**24, middlewares=[self._guard])
        place = f"namespaces/{self.namespace}"
        app.router.add_get("/version", self._version_of_server)
        app.router.add_get("/api/v1/namespaces/{name}", self._namespace)
        app.router.add_get(f"/api/v1/{place}/serviceaccounts/{{name}}", self._service_account)
        app.router.add_post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", self._review)
        app.router.add_post(f"/apis/batch/v1/{place}/{{resource:jobs}}", self._create)
        app.router.add_post(f"/api/v1/{place}/{{resource:secrets}}", self._create)
        app.router.add_get(f"/apis/batch/v1/{place}/{{resource:jobs}}/{{name}}", self._get)
        app.router.add_delete(f"/apis/batch/v1/{place}/{{resource:jobs}}/{{name}}", self._delete_job)
        app.router.add_get(f"/api/v1/{place}/{{resource:pods}}", self._pods)
        app.router.add_get(f"/api/v1/{place}/{{resource:events}}", self._list_events)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self._tls).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"{'https' if self._tls else 'http'}://{host}:{port}"
        self.token_file.parent.mkdir(parents=True, exist_ok=True)
        self.rotate_token()
        authority = {"certificate-authority": str(self._authority)} if self._authority is not None else {}
        write_kubeconfig(self.kubeconfig, {"server": self.url, **authority}, {"tokenFile": str(self.token_file)})
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._runner is not None
        self.cut_watches()
        await self._nodes.close()
        await self._runner.cleanup()

    # --- what happens to a cluster ------------------------------------------------------------------------

    def rotate_token(self) -> None:
        """Write another token, and refuse the one before."""
        self._tokens = [f"token-{uuid4()}"]
        self.token_file.write_text(self._tokens[0])

    def cut_watches(self) -> None:
        """Break the connection of every watch."""
        cut, self._cut = self._cut, asyncio.Event()
        cut.set()

    def forget_versions(self) -> None:
        """Refuse to watch from any version before this one, with 410 Gone."""
        self._version += 1
        self._oldest = self._version
        self._history.clear()

    def raise_quota(self) -> None:
        """Allow the pods that exceeded the quota."""
        self._nodes.room.set()

    async def delete_pod(self, job: str) -> None:
        """Delete the pod of a job, as a person does."""
        await self._nodes.delete(job)

    def names(self, resource: str) -> list[str]:
        """Return the names of the objects that exist."""
        return sorted(name for kind, name in self._objects if kind == resource)

    def running_pods(self) -> list[str]:
        """Return the pods whose container runs or may start."""
        pods = [(name, pod) for (kind, name), pod in self._objects.items() if kind == "pods"]
        return [name for name, pod in pods if pod["status"]["phase"] not in ("Succeeded", "Failed")]

    def find(self, resource: str, name: str) -> dict[str, Any] | None:
        return self._objects.get((resource, name))

    # --- for the nodes ------------------------------------------------------------------------------------

    async def wait_changed(self) -> None:
        """Wait until any object has changed."""
        await self._changed.wait()

    def record(self, kind: str, pod: dict[str, Any]) -> None:
        """Store a pod, and send its change to the watches."""
        self._version += 1
        pod["metadata"]["resourceVersion"] = str(self._version)
        key = ("pods", pod["metadata"]["name"])
        if kind == "DELETED":
            self._objects.pop(key, None)
        else:
            self._objects[key] = pod
        self._history.append((self._version, kind, copy.deepcopy(pod)))
        self._notify()

    def record_event(self, job: str, message: str) -> None:
        """Write why a job has no pod."""
        self._events.append({"reason": "FailedCreate", "message": message, "involvedObject": {"name": job}})

    def delete_job(self, name: str) -> None:
        """Delete a job with its pod and all that it owns."""
        uid = self._objects.pop(("jobs", name))["metadata"]["uid"]
        self._nodes.stop_job(name)
        for key, owned in list(self._objects.items()):
            owners = owned["metadata"].get("ownerReferences", ())
            if key[0] == "secrets" and any(owner["uid"] == uid for owner in owners):
                del self._objects[key]

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # --- HTTP ---------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.calls.append((request.method, request.path))
        try:
            if request.headers.get("Authorization") not in [f"Bearer {token}" for token in self._tokens]:
                raise Refusal(401, "Unauthorized", "Unauthorized")
            self._authorize(request)
            fault = next((each for each in self.faults if each.applies_to(request)), None)
            if fault is None:
                answer: web.StreamResponse = await handler(request)
                return answer
            fault.hits += 1
            return await self._fail(fault.kind, request, handler)
        except Refusal as refusal:
            return web.json_response(refusal.body(), status=refusal.status, headers=refusal.headers)

    async def _fail(self, kind: FaultKind, request: web.Request, handler: Any) -> web.StreamResponse:
        match kind:
            case "throttle":
                message = "the server has received too many requests and has asked us to try again later"
                raise Refusal(429, "TooManyRequests", message, {"Retry-After": str(_RETRY_AFTER_S)})
            case "unauthorized":
                raise Refusal(401, "Unauthorized", "the token has expired")
            case "unavailable":
                raise Refusal(503, "ServiceUnavailable", "the server is currently unable to handle the request")
            case "error":
                raise Refusal(500, "InternalError", "etcdserver: request timed out")
            case "quota":
                raise Refusal(403, "Forbidden", 'jobs.batch "x" is forbidden: exceeded quota: rollouts, used: 8')
            case "lose answer":
                with contextlib.suppress(Refusal):
                    await handler(request)
            case "hang":
                await asyncio.Event().wait()
            case "cut":
                pass
        _abort(request)
        return web.Response(status=500)

    def _authorize(self, request: web.Request) -> None:
        resource = request.match_info.get("resource")
        verbs = {"POST": "create", "GET": "get" if "name" in request.match_info else "list", "DELETE": "delete"}
        verb = "watch" if request.query.get("watch") == "true" else verbs[request.method]
        if resource is not None and (resource, verb) in self.denied:
            group = _GROUPS.get(resource, "")
            full = f"{resource}.{group}" if group else resource
            raise Refusal(
                403,
                "Forbidden",
                f'{full} is forbidden: User "system:serviceaccount:{self.namespace}:trainer" cannot {verb} resource '
                f'"{resource}" in API group "{group}" in the namespace "{self.namespace}"',
            )

    async def _version_of_server(self, request: web.Request) -> web.Response:
        return web.json_response({"major": "1", "minor": "37", "gitVersion": "v1.37.0"})

    async def _namespace(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name != self.namespace:
            raise Refusal(404, "NotFound", f'namespaces "{name}" not found')
        return web.json_response({"kind": "Namespace", "metadata": {"name": name}})

    async def _service_account(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.service_accounts:
            raise Refusal(404, "NotFound", f'serviceaccounts "{name}" not found')
        return web.json_response({"kind": "ServiceAccount", "metadata": {"name": name}})

    async def _review(self, request: web.Request) -> web.Response:
        review = await request.json()
        asked = review["spec"]["resourceAttributes"]
        right_group = asked["group"] == _GROUPS.get(asked["resource"], "")
        allowed = right_group and (asked["resource"], asked["verb"]) not in self.denied
        return web.json_response(review | {"status": {"allowed": allowed}}, status=201)

    async def _create(self, request: web.Request) -> web.Response:
        resource, manifest = request.match_info["resource"], await request.json()
        self.created.append(copy.deepcopy(manifest))
        metadata = manifest["metadata"]
        _check(manifest)
        name = metadata["name"]
        if (resource, name) in self._objects:
            raise Refusal(409, "AlreadyExists", f'{resource} "{name}" already exists')
        self._version += 1
        metadata |= {"uid": str(uuid4()), "namespace": self.namespace, "resourceVersion": str(self._version)}
        self._objects[resource, name] = manifest
        self._notify()
        if resource == "jobs":
            self._nodes.start_job(manifest, mesh=self.mesh)
        return web.json_response(manifest, status=201)

    async def _get(self, request: web.Request) -> web.Response:
        resource, name = request.match_info["resource"], request.match_info["name"]
        found = self.find(resource, name)
        if found is None:
            raise Refusal(404, "NotFound", f'{resource}.batch "{name}" not found')
        return web.json_response(found)

    async def _delete_job(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        options = await request.json() if request.can_read_body else {}
        if self.find("jobs", name) is None:
            raise Refusal(404, "NotFound", f'jobs.batch "{name}" not found')
        if options.get("propagationPolicy") in ("Background", "Foreground"):
            self.delete_job(name)
        else:  # its pods become orphans
            del self._objects["jobs", name]
        return web.json_response({"kind": "Status", "status": "Success"})

    async def _list_events(self, request: web.Request) -> web.Response:
        wanted = dict(part.split("=") for part in request.query.get("fieldSelector", "").split(",") if part)
        name = wanted.get("involvedObject.name")
        items = [event for event in self._events if event["involvedObject"]["name"] == name]
        return web.json_response({"kind": "EventList", "items": items})

    async def _pods(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("watch") == "true":
            return await self._watch(request)
        items = [pod for (kind, _), pod in self._objects.items() if kind == "pods" and _selected(pod, request)]
        return web.json_response(
            {"kind": "PodList", "metadata": {"resourceVersion": str(self._version)}, "items": items}
        )

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        answer, cut = web.StreamResponse(), self._cut
        await answer.prepare(request)
        if self.trickles:
            self.trickles -= 1
            while not cut.is_set():
                await answer.write(b" ")
                await asyncio.sleep(0.01)
        seen, loop = int(request.query["resourceVersion"]), asyncio.get_running_loop()
        ends = loop.time() + min(self.watch_s, float(request.query["timeoutSeconds"]))
        while not cut.is_set():
            if seen < self._oldest:
                gone = Refusal(410, "Expired", f"too old resource version: {seen} ({self._oldest})")
                await _send(answer, "ERROR", gone.body())
                return answer
            changed, version = self._changed, self._version
            for each, kind, pod in list(self._history):
                if each > seen and _selected(pod, request):
                    await _send(answer, kind, pod)
            seen = max(seen, version)
            if loop.time() >= ends:
                await _send(answer, "BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(seen)}})
                return answer
            changes = [asyncio.ensure_future(each.wait()) for each in (changed, cut)]
            try:
                await asyncio.wait(changes, timeout=ends - loop.time(), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for change in changes:
                    change.cancel()
        _abort(request)
        return answer


async def _send(answer: web.StreamResponse, kind: str, item: Mapping[str, Any]) -> None:
    line = json.dumps({"type": kind, "object": item}).encode() + b"\n"
    half = len(line) // 2
    await answer.write(line[:half])  # events come in pieces of any size
    await answer.write(line[half:])


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def _selected(pod: Mapping[str, Any], request: web.Request) -> bool:
    selector = request.query.get("labelSelector", "")
    wanted = dict(part.split("=") for part in selector.split(",") if part)
    return bool(wanted.items() <= pod["metadata"].get("labels", {}).items())


def _check(manifest: Mapping[str, Any]) -> None:
    """Refuse what the API server's validation refuses."""
    kind, metadata = manifest["kind"], manifest["metadata"]
    problems = []
    if not _NAME.fullmatch(metadata["name"]):
        problems.append(f"metadata.name: Invalid value: {metadata['name']!r}")
    problems += [
        f"metadata.labels: Invalid value: {value!r}"
        for value in metadata.get("labels", {}).values()
        if not _LABEL.fullmatch(value)
    ]
    if kind == "Job" and manifest["spec"]["template"]["spec"].get("restartPolicy") not in ("Never", "OnFailure"):
        problems.append("spec.template.spec.restartPolicy: Required value")
    if kind == "Secret" and sum(len(each) * 3 // 4 for each in manifest["data"].values()) > _SECRET_BYTES:
        problems.append(f"data: Too long: may not be more than {_SECRET_BYTES} bytes")
    if problems:
        raise Refusal(422, "Invalid", f'{kind} "{metadata["name"]}" is invalid: {"; ".join(problems)}')
