"""The Kubernetes runtime over the emulator, with containers that are objects in this process."""

import asyncio
import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent_wrapper.contract import PAYLOAD_VARIABLE, REQUEST_FIELD
from protocol_requests import make_request
from rollout_backend.agents.runtimes.kubernetes.runtime import KubernetesRuntime
from rollout_backend.config import KubernetesConfig
from rollout_backend.core.session_ends import SessionEnd
from tests.emulators.kubernetes_emulator import KubernetesEmulator
from tests.emulators.kubernetes_images import termination_file

IMAGE = "registry.example.com/agent:1"


class Container:
    """The process of a pod, which runs until `exit` or `stop`."""

    def __init__(self, env: Mapping[str, str], log: Path) -> None:
        self.env = env
        self._log = log
        self.pid = None
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    def payload(self) -> bytes:
        return Path(self.env[PAYLOAD_VARIABLE]).read_bytes()

    def exit(self, code: int, message: str = "") -> None:
        """End with a termination message."""
        if message:
            termination_file(self._log).write_text(message)
        self.returncode = code
        self._ended.set()

    async def wait(self) -> None:
        await self._ended.wait()

    async def stop(self, grace_s: float) -> None:
        if self.returncode is None:
            self.exit(-15)


class Containers:
    """A spawner of stand-ins."""

    def __init__(self, exit_code: int | None = None) -> None:
        """With `exit_code`, they end at once."""
        self.started: list[Container] = []
        self._exit_code = exit_code

    async def spawn(self, name: str, env: Mapping[str, str], log: Path) -> Any:
        self.started.append(Container(env, log))
        if self._exit_code is not None:
            self.started[-1].exit(self._exit_code)
        return self.started[-1]

    async def close(self) -> None: ...


@dataclasses.dataclass
class Bench:
    cluster: KubernetesEmulator
    runtime: KubernetesRuntime
    containers: Containers
    config: KubernetesConfig
    ends: list[SessionEnd] = dataclasses.field(default_factory=list)
    ended: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def on_end(self, end: SessionEnd) -> None:
        self.ends.append(end)
        self.ended.set()

    async def end(self) -> SessionEnd:
        """Wait for the next end, and return it."""
        async with asyncio.timeout(120):
            await self.ended.wait()
        self.ended.clear()
        return self.ends[-1]


def request_block(session_id: str) -> dict[str, Any]:
    """Return the request of an attempt, as plain values."""
    times = {"deadline": time.time() + 600, "remaining_s": 60, "publish_grace_s": 30}
    return make_request(run_id="run", session_id=session_id, **times).model_dump(mode="json")


def payload(session_id: str, **more: Any) -> bytes:
    """Return the payload of an attempt."""
    return json.dumps({REQUEST_FIELD: request_block(session_id), **more}).encode()
