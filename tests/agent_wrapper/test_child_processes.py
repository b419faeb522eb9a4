"""Children of agents: their signals and exit codes, in each kind of container; orphans of PID 1."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_wrapper.contract import PAYLOAD_VARIABLE, Outcome
from wrapper_containers import AGENT, Container

BEDROCK_AGENT = Path(__file__).with_name("bedrock_agent.py")
CHILDREN = """
import multiprocessing, signal, subprocess, time
forked = multiprocessing.get_context("fork")
found = {}

def handlers(pipe):
    named = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    default = named == [signal.default_int_handler, signal.SIG_DFL]
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    pipe.send([default, signal.set_wakeup_fd(-1), [int(each) for each in blocked]])

ours, theirs = forked.Pipe()
child = forked.Process(target=handlers, args=[theirs])
child.start()
found["handlers"] = ours.recv()
child.join()
child = forked.Process(target=time.sleep, args=[600])
child.start()
child.terminate()
child.join(60)
found["terminated"] = child.exitcode
with forked.Pool(2) as pool:
    found["pool"] = pool.map(abs, [-1, -2])
found["command"] = subprocess.run(["sh", "-c", "exit 3"]).returncode
"""
FOUND = {
    "handlers": [True, -1, []],
    "terminated": -signal.SIGTERM,
    "pool": [1, 2],
    "command": 3,
}
ASYNC_COMMAND = """
process = await asyncio.create_subprocess_exec("sh", "-c", "exit 3")
found["async command"] = await process.wait()
"""


def run_one_shot(container: Any, folder: Path, body: str, prefix: tuple[str, ...] = (), kind: str = "sync") -> Any:
    """Run one payload in a container that exits, whose command begins with `prefix`."""
    block = container.request()
    payload = folder / "payload.json"
    payload.write_text(json.dumps({"_rollout": block, "body": body}))
    env = {**os.environ, **container.cloud.env, PAYLOAD_VARIABLE: str(payload)}
    command = [*prefix, sys.executable, str(AGENT), kind]
    done = subprocess.run(command, env=env, timeout=240, stderr=subprocess.PIPE)
    rollout = container.await_result(block)
    assert (done.returncode, rollout.outcome) == (0, Outcome.COMPLETED), (rollout.failure, done.stderr)
    return rollout.extras


def test_children_of_a_server_have_default_signals_and_exit_codes(container):
    """A sync agent forks from its own thread, an async one from that of its event loop."""
    rollout = container.play(CHILDREN + 'return {"reward": 1, **found}')
    assert (rollout.outcome, rollout.extras) == (Outcome.COMPLETED, FOUND)
    assert container.play("return 1").outcome == Outcome.COMPLETED


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_children_of_a_one_shot_container_whose_parent_ignores_sigchld(sync_container, tmp_path, kind):
    ignoring = ("sh", "-c", "trap '' CHLD; exec \"$@\"", "-")
    more = ASYNC_COMMAND if kind == "async" else ""
    found = run_one_shot(sync_container, tmp_path, CHILDREN + more + 'return {"reward": 1, **found}', ignoring, kind)
    assert found == FOUND | ({"async command": 3} if more else {})


def test_children_of_an_app_of_the_agentcore_sdk(start_container):
    container = start_container([sys.executable, str(BEDROCK_AGENT)], ROLLOUTS="1")
    rollout = container.await_result(invoked(container, {"do": "execute", "source": CHILDREN}))
    assert (rollout.outcome, rollout.extras) == (Outcome.COMPLETED, FOUND)


def invoked(container: Container, payload: dict[str, Any]) -> dict[str, Any]:
    block = container.request()
    answer = container.client.post("/invocations", json={"_rollout": block, **payload})
    assert answer.status_code == 200, answer.text
    return block


def test_a_container_without_standard_streams_runs_its_agent(sync_container, tmp_path):
    body = """
import subprocess
done = subprocess.run(["sh", "-c", "echo out; echo err >&2; cat"], check=True)
print("out", flush=True)
names = [os.readlink(f"/proc/self/fd/{n}") for n in range(3)]
return {"reward": 1, "streams": names}
"""
    closed = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "-")
    assert run_one_shot(sync_container, tmp_path, body, closed) == {"streams": [os.devnull] * 3}


NEST = """
import asyncio, sys, types

def run(main, *, debug=False):
    loop = asyncio.new_event_loop()
    return loop.run_until_complete(main)

asyncio.run = run
import runpy
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("agent", [AGENT, BEDROCK_AGENT], ids=["wrapper", "sdk"])
def test_an_agent_may_replace_asyncio_run_by_one_without_a_loop_factory(start_container, agent):
    """As nest_asyncio does. uvicorn's own function is replaced too, because Python 3.11 has no `loop_factory`."""
    source = "import uvicorn.server\n" + NEST + "\n"
    source = source.replace("import runpy", "uvicorn.server.asyncio_run = run\nimport runpy")
    arguments = ["sync"] if agent == AGENT else []
    container = start_container([sys.executable, "-c", source, str(agent), *arguments], ROLLOUTS="1")
    assert container.ping()["status"] == "Healthy"


# --- orphans ----------------------------------------------------------------------------------------------

REAP = """
import ctypes, multiprocessing, os, subprocess, sys, threading, time
from pathlib import Path

assert ctypes.CDLL(None).prctl(36, 1) == 0  # PR_SET_CHILD_SUBREAPER: orphans become children of this process
EXIT_3 = ["sh", "-c", "exit 3"]
before = subprocess.Popen(EXIT_3)
raw_before = os.posix_spawnp("sh", EXIT_3, os.environ)
from agent_wrapper.child_processes import OrphanReaper
reaper = OrphanReaper()

def forked():
    pid = os.fork()
    if not pid:
        os._exit(3)
    return pid

def in_ended_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]

def exit_3():
    sys.exit(3)

def process():
    started = multiprocessing.get_context("fork").Process(target=exit_3)
    started.start()
    return started

forget = threading.Event()
living = []
work = lambda: (living.append(os.posix_spawnp("sh", EXIT_3, os.environ)), forget.wait())
threading.Thread(target=work, daemon=True).start()
while not living:
    time.sleep(0.001)
objects = [before, subprocess.Popen(EXIT_3), in_ended_thread(lambda: subprocess.Popen(EXIT_3))]
processes = [process(), in_ended_thread(process)]
pids = [raw_before, *living, forked(), in_ended_thread(forked)]
orphans, (read_end, write_end) = [], os.pipe()
for _ in range(20):  # each ends after its parent, when the pipe is closed
    command = ["sh", "-c", f"cat <&{read_end} >/dev/null & echo $!"]
    printed = subprocess.run(command, stdout=subprocess.PIPE, check=True, pass_fds=[read_end])
    orphans.append(int(printed.stdout))
os.close(write_end)

def state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None

everything = [*orphans, *pids, *(each.pid for each in objects), processes[-1].pid]
deadline = time.monotonic() + 60
while {state(pid) for pid in everything} != {"Z"} and time.monotonic() < deadline:
    time.sleep(0.001)
assert {state(pid) for pid in everything} == {"Z"}
reaper.reap()
assert {state(pid) for pid in orphans} == {"Z"}, "an orphan is reaped at the second call"
reaper.reap()
forget.set()
reaper.reap()
reaper.reap()
assert {state(pid) for pid in orphans} == {None}
assert [each.wait() for each in objects] == [3, 3, 3]
for each in processes:
    each.join()
assert [each.exitcode for each in processes] == [3, 3]
assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [3] * len(pids)
"""


def test_orphans_are_reaped_and_no_child_that_the_process_waits_for():
    done = subprocess.run([sys.executable, "-c", REAP], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def can_unshare() -> bool:
    return not subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", "true"], stderr=subprocess.DEVNULL
    ).returncode


@pytest.mark.skipif(not can_unshare(), reason="a PID namespace needs more rights")
def test_a_container_whose_agent_is_pid_1_reaps_orphans(sync_container, tmp_path):
    body = """
import subprocess
assert os.getpid() == 1
orphan = int(subprocess.run(["sh", "-c", "sleep 0.1 >/dev/null & echo $!"], stdout=subprocess.PIPE).stdout)
deadline = time.monotonic() + 60
while os.path.exists(f"/proc/{orphan}") and time.monotonic() < deadline:
    time.sleep(0.05)
return {"reward": 1, "left": os.path.exists(f"/proc/{orphan}")}
"""
    unshare = ("unshare", "--pid", "--fork", "--mount-proc")
    assert run_one_shot(sync_container, tmp_path, body, unshare) == {"left": False}
