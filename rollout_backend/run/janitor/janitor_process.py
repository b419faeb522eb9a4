"""Start a run's janitor, and report queues and sessions to it.

Invariant: the run never waits for its janitor, and continues if it is gone.
"""

import asyncio
import dataclasses
import json
import logging
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Self

from rollout_backend.agents.runtimes.base import AgentRuntime, SessionCalls
from rollout_backend.base.child_process import open_log
from rollout_backend.config import RolloutConfig
from rollout_backend.errors import RuntimeCallError
from rollout_backend.run.collect.queue import AnnouncementQueue
from rollout_backend.run.lease import RunLease
from rollout_backend.run.step.in_flight import SUFFIX

log = logging.getLogger(__name__)

_START_S = 30.0
_END_S = 10.0


class Janitor:
    """A run's janitor, created by `start`. Without a process, reports are dropped and nothing is cleaned up."""

    def __init__(self, process: subprocess.Popen[bytes] | None) -> None:
        self._process = process
        self._reachable = process is not None
        self._unsent = bytearray()

    @classmethod
    async def start(cls, config: RolloutConfig, lease: RunLease, runtime: AgentRuntime, log_file: Path) -> Self:
        """Start the janitor, if it is enabled and has queues or sessions to clean up."""
        makes_queue = config.uses_queue and config.queue.url is None
        if not config.janitor.enabled or not (makes_queue or runtime.cleanup_spec() is not None):
            return cls(None)
        janitor = cls(await asyncio.to_thread(_spawn, log_file, await open_log(log_file)))
        janitor._report({"run": _run(config, lease, runtime)})
        return janitor

    def watch(self, runtime: AgentRuntime) -> SessionCalls:
        """Wrap the runtime's calls so that they are reported, if the janitor can stop sessions."""
        return runtime if runtime.cleanup_spec() is None else WatchedRuntime(runtime, self)

    def queue_made(self, queue: AnnouncementQueue) -> None:
        if queue.dead_url is not None:
            self._report({"queue": queue.url, "dead": queue.dead_url})

    def session_opened(self, session_id: str) -> None:
        self._report({"opened": session_id})

    def session_closed(self, session_id: str) -> None:
        self._report({"closed": session_id})

    async def aclose(self, *, done: bool = True) -> None:
        """Stop the janitor or, if `done` is False, let it clean up as after a death."""
        if self._process is None:
            return
        if done:
            self._report({"done": True})
        stdin = self._process.stdin
        assert stdin is not None
        while self._unsent and self._reachable:
            _, ready, _ = await asyncio.to_thread(select.select, (), (stdin,), (), _END_S)
            if not ready:
                break
            self._send()
        process, self._process = self._process, None
        if not done:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
            return
        assert process.stdout is not None
        stdin.close()
        ended, _, _ = await asyncio.to_thread(select.select, [process.stdout], [], [], _END_S)
        if not ended:
            log.warning("the run's janitor has not ended yet")
        process.stdout.close()

    def _report(self, line: dict[str, Any]) -> None:
        if self._process is not None and self._reachable:
            self._unsent += json.dumps(line).encode() + b"\n"
            self._send()

    def _send(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            del self._unsent[: os.write(self._process.stdin.fileno(), self._unsent)]
        except BlockingIOError:
            # The pipe is full: the janitor had no CPU time, or is suspended.
            pass
        except OSError as error:
            self._reachable = False
            log.warning("the run's janitor cannot be reached (%s): queues and sessions stay if it is killed", error)


class WatchedRuntime:
    """A runtime that reports its open sessions to the janitor."""

    def __init__(self, runtime: SessionCalls, janitor: Janitor) -> None:
        self._runtime = runtime
        self._janitor = janitor

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

    def adopt(self, session_id: str, payload: Callable[[], bytes]) -> None:
        self._janitor.session_opened(session_id)
        self._runtime.adopt(session_id, payload)


def _spawn(log_file: Path, opened: BinaryIO) -> subprocess.Popen[bytes] | None:
    argv = [sys.executable, "-m", "rollout_backend.run.janitor", str(os.getpid())]
    with opened as output:
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, start_new_session=True
            )
        except OSError as error:
            log.warning("the run's janitor cannot be started (%s): queues and sessions stay if it is killed", error)
            return None
    try:
        # This child exits after it has forked the janitor.
        if process.wait(_START_S) != 0:
            log.warning("the run's janitor did not start; see %s", log_file)
    except subprocess.TimeoutExpired:
        log.warning("the run's janitor is slow to start; see %s", log_file)
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    return process


def _run(config: RolloutConfig, lease: RunLease, runtime: AgentRuntime) -> dict[str, Any]:
    """Return the first report, with everything that the janitor needs to know about the run."""
    cleanup = runtime.cleanup_spec()
    return {
        "run_id": config.run_id,
        "manager_id": lease.me.id,
        "previous_manager_id": lease.previous_manager_id,
        "bucket": config.storage.bucket,
        "key": lease.key,
        "aws": {
            "region": config.aws.region,
            "s3": config.aws.endpoint_of("s3"),
            "sqs": config.aws.endpoint_of("sqs"),
        },
        "grace_s": config.janitor.grace_s,
        "stop_per_s": config.runtime.stop_per_s,
        "cleanup": None if cleanup is None else dataclasses.asdict(cleanup),
        "in_flight_logs": [str(config.run_dir.absolute() / "steps"), f"*{SUFFIX}"],
    }
