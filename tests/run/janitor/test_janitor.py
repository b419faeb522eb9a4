"""Runs that die without a word, and what is left: real processes, real SQS and S3, the sessions of the emulator."""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import AsyncMock, Mock, call

import boto3
import pytest
from anyio.from_thread import start_blocking_portal
from botocore.exceptions import NoCredentialsError

from agent_servers import ARN, BARE_AGENT, serve_emulator
from builders import processes_with, until
from builders import session_id as sid
from rollout_backend.agents.runtimes.agentcore.runtime import AgentCoreRuntime
from rollout_backend.config import StorageConfig, load_config
from rollout_backend.errors import OutcomeUnknown, QuotaExceeded
from rollout_backend.run.collect.queue import queue_name
from rollout_backend.run.collect.store import ResultStore
from rollout_backend.run.janitor import __main__ as janitor
from rollout_backend.run.janitor.__main__ import RunState, _s3_client, clean_up, stop_sessions
from rollout_backend.run.janitor.janitor_process import Janitor, WatchedRuntime
from rollout_backend.run.lease import LeaseHolder, RunLease
from rollout_backend.run.step.in_flight import InFlightAttempt, InFlightLog, StepFiles
from rollout_backend.workbench.local.cloud import LocalStorage
from rollout_backend.workbench.local.session_pool import EmulatorLimits

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

# A run, reduced to what the janitor has to do with: it takes orders on stdin and answers each with a line.
OWNER = """
import asyncio, json, os, sys, time
from pathlib import Path
from rollout_backend.run.collect.queue import AnnouncementQueue, queue_name
from rollout_backend.run.collect.store import ResultStore
from rollout_backend.config import load_config
from rollout_backend.run.janitor.janitor_process import Janitor
from rollout_backend.run.lease import LeaseHolder, RunLease
from rollout_backend.agents.runtimes.base import open_runtime

async def main():
    config = load_config(base=json.loads(sys.argv[1]), env={})
    store = await ResultStore.open(config.storage, config.aws)
    runtime = await open_runtime(config.runtime)
    me = LeaseHolder.this_process().model_copy(update=json.loads(sys.argv[2]))
    lease = RunLease(store, config.run_id, me, config.janitor.lease_s)
    await lease.begin()
    janitor = await Janitor.start(config, lease, runtime, config.run_dir / "janitor.log")
    watched = janitor.watch(runtime)
    queue = await AnnouncementQueue.open(config.queue, config.aws, queue_name(config.storage, config.run_id))
    janitor.queue_made(queue)
    print("starting", flush=True)
    if sys.stdin.readline().strip() == "fail":
        await queue.aclose(delete=await lease.may_delete_queue())
        await janitor.aclose(done=await lease.may_delete_queue())
        await lease.release()
        return
    await lease.claim()
    print("started", flush=True)
    while order := (await asyncio.to_thread(sys.stdin.readline)).split():
        match order:
            case ["open", name]:
                await watched.invoke(name, b"{}")
            case ["close", name]:
                await watched.stop(name)
            case ["fork"]:
                if not os.fork():
                    time.sleep(600)
            case ["end"]:
                await queue.aclose(delete=await lease.may_delete_queue())
                await janitor.aclose()
                await lease.release()
                await runtime.aclose()
                await store.aclose()
                return
        print("done", flush=True)

asyncio.run(main())
"""


def janitors_of(pid: int) -> list[int]:
    """The processes of the janitor of the run in process `pid`."""
    command = f"-m rollout_backend.run.janitor {pid} "
    return [found for found, line in processes_with(command).items() if line.endswith(command)]


class Manager:
    def __init__(self, settings: dict[str, Any], env: dict[str, str], started: bool = True, **who: object) -> None:
        """`started` False: it stays at its start. `who`: fields of its holder, as of another machine."""
        argv = [sys.executable, "-c", OWNER, json.dumps(settings), json.dumps(who)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(argv, text=True, env=env, **pipes)
        try:
            self.hears("starting")
        except AssertionError:
            self.process.communicate()  # closes its pipes
            raise
        if started:
            self.says("go")
            self.hears("started")

    @property
    def pid(self) -> int:
        return self.process.pid

    def do(self, *order: str) -> None:
        self.says(" ".join(order))
        if order != ("end",):
            self.hears("done")

    def says(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def hears(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        assert select.select([self.process.stdout], [], [], 120)[0], "the manager says nothing"
        heard = self.process.stdout.readline().strip()
        assert heard == word, heard or self.process.stderr.read()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self.do("end")
        assert self.process.wait(120) == 0


class Cloud:
    """What AWS itself would say is there."""

    def __init__(self, storage: LocalStorage, snapshot: Callable[[], Any], settings: dict[str, Any]) -> None:
        where = {"endpoint_url": storage.endpoint_url, "region_name": storage.region}
        keys = {"aws_access_key_id": "local", "aws_secret_access_key": "local"}
        self.sqs = boto3.client("sqs", **where, **keys)
        self.s3 = boto3.client("s3", **where, **keys)
        self.settings = settings
        self.storage = StorageConfig.model_validate(settings["storage"])
        self._snapshot = snapshot  # of the runtime's sessions

    @property
    def queues(self) -> set[str]:
        name = queue_name(self.storage, self.settings["run_id"])
        urls = self.sqs.list_queues(QueueNamePrefix=name).get("QueueUrls", [])
        return {url.rpartition(name)[2] for url in urls}

    @property
    def sessions(self) -> set[str]:
        return {session["id"] for session in self._snapshot()["sessions"]}

    def note(self) -> InFlightLog:
        """The run's notes, with one of an agent at work."""
        notes = InFlightLog(StepFiles(Path(self.settings["output_dir"]) / self.settings["run_id"] / "steps"))
        attempt = InFlightAttempt(session_id=sid("a"), rollout_id="r", attempt=1, began=0.0, deadline=1.0)
        asyncio.run(notes.record_running(0, attempt))
        return notes

    @property
    def log(self) -> str:
        return (Path(self.settings["output_dir"]) / self.settings["run_id"] / "janitor.log").read_text()


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The URL of a runtime, and a function that returns its sessions."""
    limits = EmulatorLimits(grace_s=60.0)
    serving = serve_emulator(tmp_path_factory.mktemp("runtime"), command=BARE_AGENT, limits=limits)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(serving) as (emulator, url):
        yield url, lambda: portal.call(emulator.pool.snapshot)


@pytest.fixture
def cloud(runtime: tuple[str, Any], local_aws: LocalStorage, run_id: str, tmp_path: Path) -> Cloud:
    url, snapshot = runtime
    settings = {
        "run_id": run_id,
        "model": {"path": "/models/none"},
        "storage": {"bucket": local_aws.bucket},
        "aws": {"region": local_aws.region, "endpoint_url": local_aws.endpoint_url},
        "runtime": {"kind": "agentcore", "arn": ARN, "endpoint_url": url},
        "janitor": {"grace_s": 0.5},
        "output_dir": str(tmp_path),
    }
    return Cloud(local_aws, snapshot, settings)


@pytest.fixture
def start(cloud: Cloud, local_aws: LocalStorage) -> Iterator[Callable[..., Manager]]:
    started: list[Manager] = []

    def start(who: dict[str, object] = {}, begun: bool = True, **sections: object) -> Manager:  # noqa: B006  # never changed
        made = Manager({**cloud.settings, **sections}, {**os.environ, **local_aws.environ}, begun, **who)
        started.append(made)
        return made

    yield start
    for manager in started:
        with manager.process:  # closes its pipes
            manager.process.kill()
    for manager in started:
        until(lambda manager=manager: not janitors_of(manager.pid), what="the janitor has ended")


def test_a_killed_run_leaves_no_queue_and_no_session(start, cloud):
    manager = start()
    assert cloud.queues == {"", "-dlq"}
    for name in ("a", "b", "c"):
        manager.do("open", sid(name))
    manager.do("close", sid("b"))
    assert cloud.sessions == {sid("a"), sid("c")}
    [janitor] = janitors_of(manager.pid)
    notes = cloud.note()
    manager.kill()
    until(lambda: not cloud.queues, what="the queues are gone")
    until(lambda: not cloud.sessions, what="the sessions are stopped")
    until(lambda: not janitors_of(manager.pid), what="the janitor is gone")
    assert asyncio.run(notes.running_attempts(0)) == []  # a restarted run need not wait for them
    assert asyncio.run(notes.open_sessions(0, "nonce")).session_ids == []  # nor stop them
    assert f"(process {manager.pid}) is dead: 1 queues and 2 sessions are left" in cloud.log
    assert "stopped 2 of 2 sessions" in cloud.log
    assert janitor != manager.pid


def remove_slowly(options: dict[str, Any], run_id: str, is_dead: Callable[[], bool]) -> None:
    options["dead"].append(is_dead())
    options["restart"]()
    options["dead"].append(is_dead())


@pytest.mark.parametrize("dated", [True, False], ids=["dated", "undated"])  # not every store sends a date
@pytest.mark.parametrize("record", [{"manager_id": "new"}, {"manager_id": "old", "starting": {"id": "new"}}])
def test_what_is_removed_slowly_stays_once_the_run_is_started_again(local_aws, run_id, record, dated, monkeypatch):
    def undated(where: dict[str, str]) -> Any:
        made = _s3_client(where)
        made.meta.events.register(
            "after-call", lambda parsed, **_: parsed["ResponseMetadata"]["HTTPHeaders"].pop("date")
        )
        return made

    if not dated:
        monkeypatch.setattr("rollout_backend.run.janitor.__main__._s3_client", undated)
    where = {"region": local_aws.region, "s3": local_aws.endpoint_url, "sqs": local_aws.endpoint_url}
    place = {"Bucket": local_aws.bucket, "Key": f"{run_id}/lease"}
    dead: list[bool] = []

    def write(**lease: object) -> None:
        _s3_client(where).put_object(**place, Body=json.dumps({"lease_s": 60, **lease}))

    options = {"dead": dead, "restart": lambda: write(**record)}
    cleanup = {"remover": f"{__name__}.{remove_slowly.__name__}", "options": options}
    run = {"run_id": run_id, "manager_id": "old", "previous_manager_id": None, "cleanup": cleanup, "aws": where}
    write(manager_id="old")
    clean_up(RunState({**run, "bucket": place["Bucket"], "key": place["Key"]}))
    assert dead == [True, False]


def test_a_restarted_run_keeps_its_queue_and_sessions_and_its_end_takes_its_janitor_with_it(start, cloud):
    first = start()
    first.do("open", sid("e"))
    notes = cloud.note()
    [janitor] = janitors_of(first.pid)
    os.kill(janitor, signal.SIGSTOP)  # its grace is shorter than a start
    first.kill()
    second = start(janitor={"grace_s": 600})
    os.kill(janitor, signal.SIGCONT)
    until(lambda: not janitors_of(first.pid), what="the first janitor is gone")
    assert asyncio.run(notes.running_attempts(0))
    assert "was started again" in (log := cloud.log)
    assert cloud.queues == {"", "-dlq"}
    assert cloud.sessions == {sid("e")}
    second.do("close", sid("e"))
    assert janitors_of(second.pid)
    second.end()
    assert not janitors_of(second.pid)
    assert not cloud.queues
    assert cloud.log == log, "it had nothing to do"


@pytest.mark.slow
def test_a_start_that_fails_after_a_kill_leaves_the_dead_runs_janitor_its_work(start, cloud):
    first = start()
    first.do("open", sid("i"))
    [janitor] = janitors_of(first.pid)
    os.kill(janitor, signal.SIGSTOP)
    first.kill()
    second = start(begun=False)
    os.kill(janitor, signal.SIGCONT)
    until(lambda: "is being started again" in cloud.log, what="the janitor waits for the start")
    assert cloud.sessions == {sid("i")}  # the second manager may resume this session
    assert cloud.queues == {"", "-dlq"}
    second.says("fail")
    assert second.process.wait(120) == 0
    until(lambda: not cloud.queues and not cloud.sessions, what="all is gone")
    until(lambda: "stopped 1 of 1 sessions" in cloud.log, what="the first one's janitor has done its work")


@pytest.mark.slow
def test_a_manager_that_is_killed_while_it_starts_leaves_no_queue(start, cloud):
    start(begun=False).kill()
    until(lambda: not cloud.queues, what="the queues are gone")


@pytest.mark.slow
def test_neither_signals_nor_an_inherited_pipe_prevent_the_cleanup(start, cloud):
    manager = start()
    [janitor] = janitors_of(manager.pid)
    assert os.getsid(janitor) not in (os.getsid(manager.pid), os.getsid(0))
    assert int(Path(f"/proc/{janitor}/stat").read_text().rpartition(")")[2].split()[1]) != manager.pid
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(janitor, number)
    manager.do("fork")
    [child] = map(int, Path(f"/proc/{manager.pid}/task/{manager.pid}/children").read_text().split())
    try:
        manager.do("open", sid("g"))
        assert janitors_of(manager.pid) == [janitor]
        manager.kill()
        until(lambda: not cloud.queues and not cloud.sessions, what="all is gone")
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.slow
def test_a_missing_bucket_leaves_everything_unchanged(start, cloud):
    bucket = f"bucket-of-{cloud.settings['run_id']}"
    cloud.s3.create_bucket(Bucket=bucket)
    cloud.storage = StorageConfig(bucket=bucket)
    manager = start(storage={"bucket": bucket})
    cloud.s3.delete_object(Bucket=bucket, Key=f"runs/{cloud.settings['run_id']}/lease")
    cloud.s3.delete_bucket(Bucket=bucket)
    manager.kill()
    until(lambda: not janitors_of(manager.pid), what="the janitor is gone")
    assert "NoSuchBucket" in cloud.log
    assert cloud.queues == {"", "-dlq"}


@pytest.mark.slow
def test_without_a_janitor_everything_is_left(start, cloud):
    manager = start(janitor={"enabled": False})
    assert not janitors_of(manager.pid)
    manager.kill()
    assert cloud.queues == {"", "-dlq"}


async def test_a_run_continues_without_its_janitor(cloud, caplog, tmp_path):
    config = load_config(base=cloud.settings, env={})
    store = await ResultStore.open(config.storage, config.aws)
    runtime = await AgentCoreRuntime.open(config.runtime)
    lease = RunLease(store, config.run_id, LeaseHolder.this_process(), 60.0)
    janitor = await Janitor.start(config, lease, runtime, tmp_path / "janitor.log")
    [pid] = janitors_of(os.getpid())
    os.kill(pid, signal.SIGKILL)

    def noticed() -> bool:  # a process that is killed is out of sight before its end of the pipe is closed
        janitor.session_opened(sid("a"))
        return "cannot be reached" in caplog.text

    until(noticed, what="the run has noticed that it is gone")
    janitor.session_opened(sid("b"))
    assert caplog.text.count("cannot be reached") == 1
    await janitor.aclose()
    await runtime.aclose()
    await store.aclose()


async def test_a_janitor_without_cpu_time_learns_of_every_session_later(tmp_path):
    books = tmp_path / "books"
    argv = ["sh", "-c", f"exec cat > {books}"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        os.set_blocking(process.stdin.fileno(), False)
        janitor = Janitor(process)
        os.kill(process.pid, signal.SIGSTOP)
        for i in range(2000):
            janitor.session_opened(sid(str(i)))
        os.kill(process.pid, signal.SIGCONT)
        await janitor.aclose()
    state = RunState()
    state.read(books.read_bytes())
    assert (len(state.sessions), state.done) == (2000, True)


@pytest.mark.parametrize("error", [QuotaExceeded("too many"), OutcomeUnknown("cut")])
async def test_only_a_session_that_never_opened_is_closed_in_the_janitors_books(error):
    janitor, runtime = Mock(), Mock(invoke=AsyncMock(side_effect=error))
    with pytest.raises(type(error)):
        await WatchedRuntime(runtime, janitor).invoke("x", b"{}")
    closed = [call.session_closed("x")] if error.never_opened else []
    assert janitor.mock_calls == [call.session_opened("x"), *closed]


def test_the_books_are_read_in_pieces_of_any_size():
    lines = [{"run": {"run_id": "r"}}, {"queue": "q", "dead": "d"}, {"opened": "a"}, {"opened": "b"}, {"closed": "a"}]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines) + b'{"opened": "cut o'
    whole, pieces = RunState(), RunState()
    whole.read(data)
    for i in range(len(data)):
        pieces.read(data[i : i + 1])
    assert whole == pieces
    assert (whole.run["run_id"], whole.queues, list(whole.sessions)) == ("r", {"q": "d"}, ["b"])
    assert not whole.done
    whole.read(b'"}\n{"done": true}\n')
    assert whole.done


def test_it_loads_no_heavy_module_while_it_waits():
    program = (
        "import rollout_backend.run.janitor.__main__, sys; print([m for m in sys.modules if m.startswith(HEAVY)])"
    )
    heavy = "('boto', 'aio', 'pydantic', 'asyncio', 'numpy', 'ray')"
    argv = [sys.executable, "-c", program.replace("HEAVY", heavy)]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip() == "[]"


class Unsteady:
    """Stops a session at the second try, and only by a stopper that was made since."""

    made = 0
    tries: ClassVar[list[str]] = []


def unsteady_stopper(options: dict[str, Any]) -> Callable[[str], bool]:
    Unsteady.made += 1
    nth = Unsteady.made

    def stop(session: str) -> bool:
        Unsteady.tries.append(session)
        if session == "never" or (session == "later" and nth == 1):
            raise NoCredentialsError
        return session != "gone"

    return stop


def test_a_stop_that_fails_is_repeated_by_a_new_stopper(monkeypatch):
    monkeypatch.setattr(Unsteady, "made", 0)
    cleanup = {"stopper": f"{__name__}.unsteady_stopper", "options": {}}
    ended = stop_sessions(cleanup, 1000, ["at once", "later", "gone", "never"], retry_s=(0.0, 0.0))
    assert ended == ["at once", "later", "gone"]
    assert Counter(Unsteady.tries) == {"at once": 1, "later": 2, "gone": 1, "never": 3}


def endless_stopper(options: dict[str, Any]) -> Callable[[str], bool]:
    """Return a function whose calls for the first sessions never end, as if their answers trickled."""
    return lambda session: int(session) > 8 or threading.Event().wait()


def test_stops_that_never_end_hold_up_no_others(monkeypatch):
    monkeypatch.setattr(janitor, "_STOP_S", 0.5)
    cleanup = {"stopper": f"{__name__}.endless_stopper", "options": {}}
    ended = stop_sessions(cleanup, 1000, [str(number) for number in range(1, 13)], retry_s=())
    assert ended == ["9", "10", "11", "12"]
