"""The nodes of the Kubernetes emulator: they run each pod as a process, and report it as a kubelet does.

Invariants:

- A pod's process ends before the pod is deleted.
- A container starts only once the Secrets that it mounts exist, and its init containers have succeeded.
- A Job that runs beyond its deadline loses its pod, and one that has finished is deleted after its time to live.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
import os
import re
import signal
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from rollout_backend.model.serving.server_process import ServerProcess
from rollout_backend.workbench.local.spawner import Spawner
from tests.emulators.kubernetes_images import FolderImage, termination_file

Fate = Literal[
    "runs",
    "is killed for memory",
    "publishes and is killed for memory",
    "is evicted",
    "exits with 1",
    "cannot pull its image",
    "cannot be started",
    "cannot be scheduled",
    "is scheduled late",
    "exceeds the quota",
]
_LATE_S = 0.5
_DEATHS: Mapping[Fate, int] = {"is killed for memory": 137, "exits with 1": 1}
_GRACE_S = 5.0
_MESSAGE_BYTES = 4096


class Objects(Protocol):
    """The part of the API server that nodes use."""

    def record(self, kind: str, pod: dict[str, Any]) -> None: ...

    def record_event(self, job: str, message: str) -> None: ...

    def find(self, resource: str, name: str) -> dict[str, Any] | None: ...

    def delete_job(self, name: str) -> None: ...

    async def wait_changed(self) -> None: ...


class Nodes:
    """The Job controller and the kubelets. A pod without a fate in `fates` runs."""

    def __init__(self, objects: Objects, images: Mapping[str, Spawner], folder: Path) -> None:
        self.fates: deque[Fate] = deque()
        self.room = asyncio.Event()  # set: the quota allows the pods that exceeded it
        self._objects = objects
        self._images = images
        self._folder = folder
        self._pods: dict[str, asyncio.Task[None]] = {}  # by job
        self._controllers: set[asyncio.Task[None]] = set()

    def start_job(self, job: Mapping[str, Any], *, mesh: bool) -> None:
        """Create the job's pod in the background. A service mesh, if there is one, injects containers into it."""
        fate: Fate = self.fates.popleft() if self.fates else "runs"
        name = job["metadata"]["name"]
        pod = _Pod(self._objects, self._images, self._folder, self.room, job, mesh)
        self._pods[name] = asyncio.create_task(pod.run(fate))
        controller = asyncio.create_task(self._control(job, pod))
        self._controllers.add(controller)
        controller.add_done_callback(self._controllers.discard)

    async def _control(self, job: Mapping[str, Any], pod: _Pod) -> None:
        """End a job at its deadline, and delete it after its end."""
        name, spec = job["metadata"]["name"], job["spec"]
        try:
            async with asyncio.timeout(spec.get("activeDeadlineSeconds", math.inf)):
                await pod.finished.wait()
            failed = pod.exit_code != 0
            reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
        except TimeoutError:
            failed, reason, message = True, "DeadlineExceeded", "Job was active longer than specified deadline"
            self.stop_job(name)
        condition = {"type": "Complete", "status": "True"}
        if failed:
            condition = {"type": "Failed", "status": "True", "reason": reason, "message": message}
        found = self._objects.find("jobs", name)
        if found is None or found["metadata"]["uid"] != job["metadata"]["uid"]:
            return
        found["status"] = {"conditions": [condition]}
        if (kept_s := spec.get("ttlSecondsAfterFinished")) is not None:
            await asyncio.sleep(kept_s)
            found = self._objects.find("jobs", name)
            if found is not None and found["metadata"]["uid"] == job["metadata"]["uid"]:
                self._objects.delete_job(name)

    def stop_job(self, name: str) -> None:
        """Delete the pod of a job in the background."""
        if not self._pods[name].cancelling():  # a second cancellation would leave its process
            self._pods[name].cancel()

    async def delete(self, name: str) -> None:
        """Delete the pod of a job, and return once it is gone."""
        self.stop_job(name)
        await asyncio.gather(self._pods[name], return_exceptions=True)

    async def close(self) -> None:
        """End every process."""
        for controller in self._controllers:
            controller.cancel()
        for name in self._pods:
            self.stop_job(name)
        await asyncio.gather(*self._pods.values(), return_exceptions=True)
        for spawner in self._images.values():
            await spawner.close()


def _expand(text: str, env: Mapping[str, str]) -> str:
    """Replace what a kubelet replaces in variables and arguments."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda found: env.get(found[1], found[0]) if found[1] else "$", text)


class _Pod:
    """The pod of one job. Its task ends when the pod is deleted, which a cancellation does."""

    def __init__(
        self,
        objects: Objects,
        images: Mapping[str, Spawner],
        folder: Path,
        room: asyncio.Event,
        job: Mapping[str, Any],
        mesh: bool,
    ) -> None:
        template = job["spec"]["template"]
        self._job = job["metadata"]["name"]
        self._objects = objects
        self._images = images
        self._folder = folder
        self._room = room
        self._mesh = mesh
        self._process: ServerProcess | None = None
        self._volumes: dict[str, Path] = {}
        self.exit_code: int | None = None
        self.finished = asyncio.Event()
        self._pod: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{self._job}-abcde",
                "labels": {**template["metadata"]["labels"], "job-name": self._job},
            },
            "spec": template["spec"],
            "status": {"phase": "Pending"},
        }

    async def run(self, fate: Fate) -> None:
        created = False
        try:
            if fate == "exceeds the quota":
                message = f'Error creating: pods "{self._job}-" is forbidden: exceeded quota: rollouts'
                self._objects.record_event(self._job, message)
                await self._room.wait()
            self._objects.record("ADDED", self._pod)
            created = True
            await self._live(fate)
            await asyncio.Event().wait()  # it is kept, with its log
        finally:
            if created:
                await self._delete()

    async def _live(self, fate: Fate) -> None:
        if fate == "cannot be scheduled":
            said = "0/3 nodes are available: 3 Insufficient memory."
            self._condition("PodScheduled", "False", "Unschedulable", said)
            return
        if fate == "is scheduled late":
            await asyncio.sleep(_LATE_S)
        self._pod["spec"]["nodeName"] = "node-1"
        self._condition("PodScheduled", "True")
        await self._mount()
        for container in self._pod["spec"].get("initContainers", ()):
            if not await self._init(container):
                return
        image = self._pod["spec"]["containers"][0]["image"]
        if fate == "cannot pull its image" or image not in self._images:
            for reason in ("ErrImagePull", "ImagePullBackOff"):
                self._state({"waiting": {"reason": reason, "message": f"{image}: manifest unknown"}})
            return
        if fate == "cannot be started":
            message = 'exec: "agent": executable file not found in $PATH'
            self._end({"exitCode": 128, "reason": "StartError", "message": message})
            return
        code = _DEATHS.get(fate)
        if code is None:  # otherwise it dies before it has done anything
            await self._start()
        self._state({"running": {"startedAt": "2026-01-01T00:00:00Z"}}, phase="Running")
        if fate == "is evicted":
            self._condition("DisruptionTarget", "True", "EvictionByEvictionAPI", "the node is drained")
            raise asyncio.CancelledError
        if self._process is not None:
            await self._process.wait()
            code = 137 if fate == "publishes and is killed for memory" else self._process.returncode
        ended = {"exitCode": code, "reason": {0: "Completed", 137: "OOMKilled"}.get(code or 0, "Error")}
        self._end(ended | self._message())

    async def _mount(self) -> None:
        """Make the volumes, once their Secrets exist."""
        for volume in self._pod["spec"]["volumes"]:
            folder = self._volumes[volume["name"]] = self._folder / "volumes" / self._job / volume["name"]
            folder.mkdir(parents=True, exist_ok=True)
            if (source := volume.get("secret")) is None:
                continue
            while (secret := self._objects.find("secrets", source["secretName"])) is None:
                self._state({"waiting": {"reason": "ContainerCreating"}})
                await self._objects.wait_changed()
            for name, data in secret["data"].items():
                (folder / name).write_bytes(base64.b64decode(data))

    async def _init(self, container: Mapping[str, Any]) -> bool:
        """Run an init container. Return whether it has succeeded."""
        name = container["name"]
        if container["image"] not in self._images:
            waiting = {"reason": "ErrImagePull", "message": f"{container['image']}: manifest unknown"}
            self._pod["status"]["initContainerStatuses"] = [{"name": name, "state": {"waiting": waiting}}]
            self._state({"waiting": {"reason": "PodInitializing"}})
            return False
        self._state({"waiting": {"reason": "PodInitializing"}})
        process = await self._spawn(container, f"{self._job}.{name}")
        try:
            await process.wait()
        finally:
            await process.stop(0.0)
        code = process.returncode
        state = {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed"}}
        self._pod["status"]["initContainerStatuses"] = [{"name": name, "state": state}]
        if code:
            self._state({"waiting": {"reason": "PodInitializing"}}, "Failed")
            self.exit_code = code
            self.finished.set()
        return not code

    async def _start(self) -> None:
        self._process = await self._spawn(self._pod["spec"]["containers"][0], self._job)

    async def _spawn(self, container: Mapping[str, Any], name: str) -> ServerProcess:
        mounts = {m["mountPath"]: self._volumes[m["name"]] / m.get("subPath", "") for m in container["volumeMounts"]}
        env: dict[str, str] = {}
        for each in container.get("env", ()):
            env[each["name"]] = _expand(each["value"], env)
        container = {**container, "command": [_expand(each, env) for each in container.get("command", ())]}
        image, log = self._images[container["image"]], self._folder / f"{name}.log"
        if isinstance(image, FolderImage):
            return await image.start(container, env, mounts, log)
        for inside, folder in mounts.items():
            env = {key: value.replace(inside, str(folder)) for key, value in env.items()}
        return await image.spawn(f"pod {name}", env, log)

    def _message(self) -> dict[str, str]:
        """Return what the container wrote for its end, as the kubelet reads it."""
        file = termination_file(self._folder / f"{self._job}.log")
        text = file.read_bytes()[:_MESSAGE_BYTES].decode(errors="replace") if file.exists() else ""
        return {"message": text} if text else {}

    async def _delete(self) -> None:
        self._pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        self._objects.record("MODIFIED", self._pod)
        if self._process is not None:
            if self._process.pid is not None:  # a process that was just forked leads no group yet
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._process.pid, signal.SIGTERM)
            await self._process.stop(_GRACE_S)
        self._objects.record("DELETED", self._pod)

    def _condition(self, kind: str, status: str, reason: str = "", message: str = "") -> None:
        conditions = self._pod["status"].setdefault("conditions", [])
        conditions.append({"type": kind, "status": status, "reason": reason, "message": message})
        self._objects.record("MODIFIED", self._pod)

    def _state(self, state: Mapping[str, Any], phase: str = "Pending") -> None:
        statuses = [{"name": "agent", "state": state}]
        if self._mesh and phase != "Pending":  # its proxies run until the pod is deleted, and one is being restarted
            phase = "Running"
            statuses.insert(0, {"name": "a-proxy", "state": {"running": {}}})
            restarted = {"name": "proxy", "state": {"terminated": {"exitCode": 1, "reason": "Error"}}}
            self._pod["status"]["initContainerStatuses"] = [restarted]
        self._pod["status"] |= {"phase": phase, "containerStatuses": statuses}
        self._objects.record("MODIFIED", self._pod)

    def _end(self, terminated: Mapping[str, Any]) -> None:
        self.exit_code = terminated["exitCode"]
        if not self._mesh:
            self.finished.set()
        self._state({"terminated": terminated}, "Failed" if terminated["exitCode"] else "Succeeded")
