"""The janitor process: `python -m rollout_backend.run.janitor PID`, with the run's reports on stdin.

Invariants:

- It is small while it waits: before the run's death, it imports only the standard library.
- It ignores signals, but always ends: it sets an alarm before it starts its work.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from rollout_backend.base.logs import configure_logs, report_failure

# Limit for all calls, in addition to the grace time and the time that the stop rate requires.
_CLEANUP_S = 600
# Limit for a manager that is restarting the run and may fail.
_RESTART_S = 3600
_POLL_S = 2.0
# S3 timestamps have a resolution of 1 s.
_CLOCK_S = 2.0
_STOPPERS = 8
# A runtime's own limit for a stop may start again with each byte of an answer.
_STOP_S = 300.0
_DISK_S = 60.0
# These delays outlast a credentials refresh, a clock correction or throttling.
_RETRY_S = (15.0, 60.0, 180.0)
_CHUNK = 65536

log = logging.getLogger("janitor")


@dataclass
class RunState:
    """The state that the run has reported."""

    run: dict[str, Any] = field(default_factory=dict)
    """The run's first report: see `janitor_process`."""
    queues: dict[str, str] = field(default_factory=dict)
    """Queues created by the run, each with its dead-letter queue."""
    sessions: dict[str, None] = field(default_factory=dict)
    """Open sessions, oldest first."""
    done: bool = False
    _rest: bytes = b""

    def read(self, data: bytes) -> None:
        """Parse bytes from the pipe, in chunks of any size."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            match json.loads(line):
                case {"run": run}:
                    self.run = run
                case {"queue": url, "dead": dead}:
                    self.queues[url] = dead
                case {"opened": session}:
                    self.sessions[session] = None
                case {"closed": session}:
                    self.sessions.pop(session, None)
                case {"done": True}:
                    self.done = True


def main() -> None:
    # Ray kills a worker's children, so the janitor must not be a child process. The starter waits for this exit.
    if os.fork():
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    configure_logs(logging.INFO, text_format="%(asctime)s %(message)s", in_thread=True)
    logging.getLogger("botocore").setLevel(logging.WARNING)
    manager, state = int(sys.argv[1]), RunState()
    watch(manager, state)
    remover = (state.run.get("cleanup") or {}).get("remover")
    if state.done or not (state.queues or state.sessions or remover):
        return
    grace_s, per_s = float(state.run["grace_s"]), float(state.run["stop_per_s"])
    log.info(
        "run %s (process %d) is dead: %d queues and %d sessions are left; removing them in %g s unless it restarts",
        state.run["run_id"],
        manager,
        len(state.queues),
        len(state.sessions),
        grace_s,
    )
    signal.alarm(int(grace_s + _RESTART_S + _CLEANUP_S + len(state.sessions) / per_s))
    time.sleep(grace_s)
    clean_up(state)


def watch(manager: int, state: RunState) -> None:
    """Read until the run is done or dead. The run is dead when the pipe ends or, if a forked child holds the pipe
    open, when the process ends."""
    os.set_blocking(0, False)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    death = None
    # pidfd may not be supported, or the process may have ended, which the pipe shows.
    with contextlib.suppress(AttributeError, OSError):
        death = os.pidfd_open(manager)
        poll.register(death, select.POLLIN)
    while not state.done:
        ready = {fd for fd, _ in poll.poll()}
        ended = _drain(state)
        if ended or death in ready:
            return


def _drain(state: RunState) -> bool:
    """Read all available data. Return True at the end of the pipe."""
    while True:
        try:
            data = os.read(0, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            return True
        state.read(data)


def clean_up(state: RunState) -> None:
    """Delete the run's queues and stop its sessions, unless another manager holds the run."""
    run = state.run
    s3 = _s3_client(run["aws"])
    # The new manager takes over the sessions, unless its start fails.
    while (starting := _starting(s3, run)) is not None:
        log.info("run %s is being started again (%s): waiting for that start to end", run["run_id"], starting)
        time.sleep(_POLL_S)
    dead = (None, run["manager_id"], run["previous_manager_id"])
    if (now := _lease(s3, run)[0].get("manager_id")) not in dead:
        log.info("run %s was started again (%s): nothing to clean up", run["run_id"], now)
        return
    _delete_queues(run["aws"], state.queues)
    if state.sessions:
        sessions = list(state.sessions)
        # Without this record, a later start would wait for these agents.
        _record(run, "closed", sessions)
        _record(run, "stopped", stop_sessions(run["cleanup"], float(run["stop_per_s"]), sessions))
    if (remover := (run["cleanup"] or {}).get("remover")) is not None:

        def is_dead() -> bool:
            return _starting(s3, run) is None and _lease(s3, run)[0].get("manager_id") in dead

        _imported(remover)(run["cleanup"]["options"], run["run_id"], is_dead)


def _record(run: dict[str, Any], what: str, sessions: list[str]) -> None:
    """Append to the run's records of its sessions. A disk that does not answer delays the stops for `_DISK_S`."""
    text = "".join(f"\n{json.dumps({what: session})}" for session in sessions)
    writing = threading.Thread(target=_append, args=(*run["in_flight_logs"], text), daemon=True)
    writing.start()
    writing.join(_DISK_S)
    if writing.is_alive():
        log.warning("%s does not answer", run["in_flight_logs"][0])


def _append(folder: str, pattern: str, text: str) -> None:
    """Append to the records. See `rollout_backend.run.step.in_flight`."""
    for path in Path(folder).glob(pattern):
        try:
            with path.open("a") as file:
                file.write(text)
        except OSError as error:
            # Without the file, the next start assumes that every session is open.
            log.warning("%s cannot be written (%s) and is deleted", path, error)
            path.unlink(missing_ok=True)


def _s3_client(where: dict[str, str]) -> Any:
    import boto3
    from botocore.config import Config

    from rollout_backend.base.local_keys import client_keys

    config = Config(
        retries={"total_max_attempts": 6, "mode": "standard"},
        connect_timeout=10,
        read_timeout=30,
        s3={"addressing_style": "path"} if where["s3"] else {},
    )
    client: Any = boto3.client
    keys = client_keys(where["s3"])
    return client("s3", region_name=where["region"], endpoint_url=where["s3"], config=config, **keys)


def _delete_queues(where: dict[str, str], queues: dict[str, str]) -> None:
    import asyncio

    from rollout_backend.base import aws
    from rollout_backend.run.collect.queue import delete_queues

    async def delete() -> None:
        async with aws.client("sqs", region=where["region"], endpoint_url=where["sqs"], retries=5) as sqs:
            for url, dead_url in queues.items():
                await delete_queues(sqs, url, dead_url)

    asyncio.run(delete())


def _starting(s3: Any, run: dict[str, Any]) -> str | None:
    """Return the manager that is restarting the run and has renewed its lease, or None."""
    record, age_s = _lease(s3, run)
    starting = (record.get("starting") or {}).get("id")
    alive = age_s <= record.get("lease_s", 0.0) + _CLOCK_S
    return starting if starting != run["manager_id"] and alive else None


def _lease(s3: Any, run: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """Return the lease record (see `run_lease`) and its age by S3's clock."""
    try:
        reply = s3.get_object(Bucket=run["bucket"], Key=run["key"])
    except s3.exceptions.NoSuchKey:
        return {}, 0.0
    date = reply["ResponseMetadata"]["HTTPHeaders"].get("date")
    now = parsedate_to_datetime(date) if date else datetime.now(UTC)
    return json.loads(reply["Body"].read()), (now - reply["LastModified"]).total_seconds()


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def stop_sessions(
    cleanup: dict[str, Any], per_s: float, sessions: list[str], retry_s: Sequence[float] = _RETRY_S
) -> list[str]:
    """Stop sessions as the runtime's `CleanupSpec` says. Return those that have certainly ended.

    Failed stops are retried after the pauses `retry_s`, by a new stopper, which looks up its credentials again.
    """
    make = _imported(cleanup["stopper"])
    existed: dict[str, bool] = {}
    errors: dict[str, Exception] = {}

    def stop(stop_one: Callable[[str], bool], session: str) -> None:
        try:
            existed[session] = stop_one(session)
        except Exception as error:
            errors[session] = error

    def stop_in_time(stop_one: Callable[[str], bool], session: str) -> None:
        errors[session] = TimeoutError(f"no answer within {_STOP_S:g} s")
        stopping = threading.Thread(target=stop, args=(stop_one, session), daemon=True)
        stopping.start()
        stopping.join(_STOP_S)

    for pause_s in (0.0, *retry_s):
        left = [session for session in sessions if session not in existed]
        if not left:
            break
        time.sleep(pause_s)
        stop_one = make(cleanup["options"])
        with ThreadPoolExecutor(_STOPPERS) as pool:
            for session in left:
                pool.submit(stop_in_time, stop_one, session).add_done_callback(report_failure("a stop"))
                time.sleep(1 / per_s)
    for session in errors.keys() - existed.keys():
        log.warning("session %s could not be stopped and ends at its idle timeout: %s", session, errors[session])
    log.info("stopped %d of %d sessions", sum(existed.values()), len(sessions))
    return [session for session in sessions if session in existed]


if __name__ == "__main__":
    try:
        main()
    except Exception:
        log.exception("the janitor failed; remaining queues and sessions stay")
        sys.exit(1)
