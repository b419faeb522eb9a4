"""The janitor: `python -m rollout_backend.janitor PID`, with the run's lines on stdin. See the package.

What must always hold: it is light while it waits (nothing but the standard library is imported before the run is
dead), nothing but its own end ends it, and it never outlives its errand: an alarm is set before it begins.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ERRAND_S = 600  # for all of it, beside the grace and what the rate of stops asks for
_STOPPERS = 8
_CHUNK = 65536

log = logging.getLogger("janitor")


@dataclass
class Books:
    """What the run has told so far."""

    run: dict[str, Any] = field(default_factory=dict)  # its first line: see `owner`
    queues: dict[str, str] = field(default_factory=dict)  # each queue made for the run, and its dead-letter queue
    sessions: dict[str, None] = field(default_factory=dict)  # the open ones, oldest first
    done: bool = False
    _rest: bytes = b""

    def read(self, data: bytes) -> None:
        """Takes what came through the pipe, in pieces of any size."""
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
    if os.fork():  # whoever started us waits for this; then we are nobody's child, and Ray ends a worker's children
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("botocore").setLevel(logging.WARNING)
    owner, books = int(sys.argv[1]), Books()
    watch(owner, books)
    if books.done or not (books.queues or books.sessions):
        return
    grace_s, per_s = float(books.run["grace_s"]), float(books.run["stop_per_s"])
    log.info(
        "run %s (process %d) is dead: %d queues and %d sessions are left; put in order in %g s, unless it is started "
        "again",
        books.run["run_id"],
        owner,
        len(books.queues),
        len(books.sessions),
        grace_s,
    )
    signal.alarm(int(grace_s + _ERRAND_S + len(books.sessions) / per_s))
    time.sleep(grace_s)
    put_in_order(books)


def watch(owner: int, books: Books) -> None:
    """Reads until the run is done or dead. Its death shows as the pipe's end; where a child that it forked holds the
    pipe open, as its own."""
    os.set_blocking(0, False)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    death = _pidfd(owner)
    if death is not None:
        poll.register(death, select.POLLIN)
    while not books.done:
        ready = {fd for fd, _ in poll.poll()}
        ended = _drain(books)
        if ended or death in ready:
            return


def _drain(books: Books) -> bool:
    """Reads all that is there. True at the pipe's end."""
    while True:
        try:
            data = os.read(0, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            return True
        books.read(data)


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not on this system; or it is gone, which the pipe tells
        return None


def put_in_order(books: Books) -> None:
    run, aws = books.run, _clients(books.run)
    if (now := _owner(aws("s3", run["aws"]), run)) not in (None, run["owner"]):
        log.info("run %s was started again (%s): nothing is to be done", run["run_id"], now)
        return
    for url, dead in books.queues.items():
        _delete_queue(aws("sqs", run["aws"]), url, dead)
    if books.sessions:
        folder, pattern = run["notes"]
        for notes in Path(folder).glob(pattern):  # or who starts the run again later would wait for these agents
            notes.unlink(missing_ok=True)
        _stop_sessions(aws("bedrock-agentcore", run["runtime"]), run, list(books.sessions))


def _clients(run: dict[str, Any]) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(
        retries={"total_max_attempts": 6, "mode": "standard"},
        connect_timeout=10,
        read_timeout=30,
        max_pool_connections=_STOPPERS,
    )

    client: Any = boto3.client  # its types list every service by name

    def make(service: str, where: dict[str, str]) -> Any:
        own = config.merge(Config(s3={"addressing_style": "path"})) if where["endpoint_url"] else config
        return client(service, region_name=where["region"], endpoint_url=where["endpoint_url"], config=own)

    return make


def _owner(s3: Any, run: dict[str, Any]) -> str | None:
    """Who owns the run now; None if nobody has written it down."""
    try:
        found = json.loads(s3.get_object(Bucket=run["bucket"], Key=run["key"])["Body"].read())
    except s3.exceptions.NoSuchKey:
        return None
    return str(found["owner"])


def _delete_queue(sqs: Any, url: str, dead: str) -> None:
    for queue in (url, dead):
        try:
            if queue == dead and (held := _messages(sqs, dead)):
                log.info("%d messages that nobody could use stay in %s", held, dead)
                continue
            sqs.delete_queue(QueueUrl=queue)
            log.info("deleted %s", queue)
        except sqs.exceptions.QueueDoesNotExist:
            log.info("%s is gone already", queue)
        except sqs.exceptions.ClientError as error:
            log.warning("%s could not be deleted: %s", queue, error)


def _messages(sqs: Any, url: str) -> int:
    names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
    found = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=names)["Attributes"]
    return sum(int(found[name]) for name in names)


def _stop_sessions(agentcore: Any, run: dict[str, Any], sessions: list[str]) -> None:
    runtime = run["runtime"]

    def stop(session: str) -> bool:
        try:
            agentcore.stop_runtime_session(
                agentRuntimeArn=runtime["arn"], qualifier=runtime["qualifier"], runtimeSessionId=session
            )
        except agentcore.exceptions.ResourceNotFoundException:
            return False  # it had ended
        except agentcore.exceptions.ClientError as error:
            log.warning("session %s would not stop, and ends at its idle timeout: %s", session, error)
            return False
        return True

    with ThreadPoolExecutor(_STOPPERS) as pool:
        stops = []
        for session in sessions:
            stops.append(pool.submit(stop, session))
            time.sleep(1 / float(run["stop_per_s"]))
    log.info("stopped %d of %d sessions", sum(one.result() for one in stops), len(sessions))


if __name__ == "__main__":
    try:
        main()
    except Exception:
        log.exception("the janitor failed; what it did not do is left as it was")
        sys.exit(1)
