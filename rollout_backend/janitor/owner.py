"""A run's side of its janitor: starts it, and tells it what there is to put in order should the run die.

What must always hold: the run never waits for its janitor, and goes on without it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from rollout_backend.collect.queue import AnnouncementQueue
from rollout_backend.collect.store import ResultStore
from rollout_backend.config import AgentCoreConfig, RolloutConfig
from rollout_backend.dispatch.agentcore import AgentCoreRuntime
from rollout_backend.dispatch.runtime import AgentRuntime
from rollout_backend.dispatched import SUFFIX
from rollout_backend.errors import RuntimeCallError, StoreError

log = logging.getLogger(__name__)

_START_S = 30.0
_END_S = 10.0


class Janitor:
    """Made with `start`. Without a process it hears nothing, and nothing is put in order."""

    def __init__(self, process: subprocess.Popen[bytes] | None) -> None:
        self._process = process
        self._heard = process is not None
        self._watches = False

    @classmethod
    async def start(cls, config: RolloutConfig, store: ResultStore, runtime: AgentRuntime, log_file: Path) -> Self:
        """Takes the run over, and starts its janitor where the settings leave it something to do."""
        owner = f"{os.uname().nodename}-{os.getpid()}-{uuid4().hex[:8]}"
        makes_queue = config.uses_queue and config.queue.url is None
        try:  # even a run without a janitor tells an earlier one's that it is there
            key = await store.own(config.run_id, owner)
        except StoreError as error:
            log.warning("%s: without this a run that is killed leaves its queue and its sessions behind", error)
            return cls(None)
        if not config.janitor.enabled or not (makes_queue or isinstance(runtime, AgentCoreRuntime)):
            return cls(None)
        janitor = cls(await asyncio.to_thread(_spawn, log_file))
        janitor._tell({"run": _run(config, owner, key, runtime)})
        return janitor

    def watch(self, runtime: AgentRuntime) -> AgentRuntime:
        """The same runtime, with its sessions told of, where it has any."""
        self._watches = isinstance(runtime, AgentCoreRuntime)
        return WatchedRuntime(runtime, self) if self._watches else runtime

    def queue_made(self, queue: AnnouncementQueue) -> None:
        if queue.dead_url is not None:
            self._tell({"queue": queue.url, "dead": queue.dead_url})

    def session_opened(self, session_id: str) -> None:
        self._tell({"opened": session_id})

    def session_adopted(self, session_id: str) -> None:
        """One of an earlier trainer's, which goes on under this one."""
        if self._watches:
            self.session_opened(session_id)

    def session_closed(self, session_id: str) -> None:
        self._tell({"closed": session_id})

    async def aclose(self) -> None:
        """The run is over and all is in order: the janitor ends at once."""
        if self._process is None:
            return
        self._tell({"done": True})
        process, self._process = self._process, None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        ended, _, _ = await asyncio.to_thread(select.select, [process.stdout], [], [], _END_S)  # it writes nothing
        if not ended:
            log.warning("the run's janitor has not ended yet")
        process.stdout.close()

    def _tell(self, line: dict[str, Any]) -> None:
        if self._process is None or not self._heard:
            return
        assert self._process.stdin is not None
        try:  # a line is written whole or not at all: it is shorter than what a pipe takes at once
            os.write(self._process.stdin.fileno(), json.dumps(line).encode() + b"\n")
        except OSError as error:  # it was killed, or stands still
            self._heard = False
            log.warning("the run's janitor does not hear us (%s): a run that is killed leaves much behind", error)


class WatchedRuntime:
    """A runtime whose open sessions the janitor knows."""

    def __init__(self, runtime: AgentRuntime, janitor: Janitor) -> None:
        self._runtime = runtime
        self._janitor = janitor

    async def check(self) -> None:
        await self._runtime.check()

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        self._janitor.session_opened(session_id)
        try:
            return await self._runtime.invoke(session_id, payload)
        except RuntimeCallError as error:
            if error.never_opened:
                self._janitor.session_closed(session_id)
            raise

    async def stop(self, session_id: str) -> None:
        await self._runtime.stop(session_id)
        self._janitor.session_closed(session_id)

    async def aclose(self) -> None:
        await self._runtime.aclose()


def _spawn(log_file: Path) -> subprocess.Popen[bytes] | None:
    log_file.parent.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "rollout_backend.janitor", str(os.getpid())]
    with log_file.open("ab") as output:
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, start_new_session=True
            )
        except OSError as error:
            log.warning("the run's janitor cannot be started (%s): a run that is killed leaves much behind", error)
            return None
    try:
        if process.wait(_START_S) != 0:  # the janitor itself is a child of this one, and goes on
            log.warning("the run's janitor did not start; see %s", log_file)
    except subprocess.TimeoutExpired:
        log.warning("the run's janitor is slow to start; see %s", log_file)
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    return process


def _run(config: RolloutConfig, owner: str, key: str, runtime: AgentRuntime) -> dict[str, Any]:
    """What the janitor must know of the run from the start."""
    told: dict[str, Any] = {
        "run_id": config.run_id,
        "owner": owner,
        "bucket": config.storage.bucket,
        "key": key,
        "aws": {"region": config.aws.region, "endpoint_url": config.aws.endpoint_url},
        "grace_s": config.janitor.grace_s,
        "stop_per_s": config.runtime.stop_per_s,
        "runtime": None,
        "notes": [str(config.run_dir.absolute() / "steps"), f"*{SUFFIX}"],
    }
    if isinstance(runtime, AgentCoreRuntime) and isinstance(config.runtime, AgentCoreConfig):
        told["runtime"] = {
            "arn": runtime.arn,
            "qualifier": config.runtime.qualifier,
            "region": config.runtime.region,
            "endpoint_url": config.runtime.endpoint_url,
        }
    return told
