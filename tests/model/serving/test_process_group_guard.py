"""A server's processes end with it, and it ends with its owner, even without the kernel's parent-death signal."""

import os
import select
import signal
import subprocess
import sys

import pytest

from rollout_backend.model.serving import process_group_guard

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it waits for processes as Linux alone lets it")

# A server with a child process; `stubborn` ignores SIGTERM, `obedient` does not.
SERVER = """
import signal, subprocess, sys, time
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen(["sleep", "1000"]).pid, flush=True)
time.sleep(1000)
"""

OWNER = """
import asyncio, sys
from pathlib import Path
from rollout_backend.model.serving.server_process import ServerProcess

async def main():
    log = Path(sys.argv[1])
    server = ServerProcess("the server", [sys.executable, "-c", *sys.argv[2:]], log)
    await server.start()
    while not log.read_text():
        await asyncio.sleep(0.02)
    print(server.pid, log.read_text(), flush=True)
    await server.wait()
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.mark.parametrize(("killed", "manner"), [("server", "obedient"), ("owner", "obedient"), ("owner", "stubborn")])
def test_no_process_is_left(killed, manner, tmp_path):
    command = [sys.executable, "-c", OWNER, tmp_path / "log", SERVER, manner]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        watched = [os.pidfd_open(pid) for pid in pids]
        os.kill(pids[0] if killed == "server" else owner.pid, signal.SIGKILL)
        try:
            for process in watched:
                assert select.select([process], [], [], 120)[0], "a process is left"
        finally:
            owner.kill()
            for process in watched:
                os.close(process)


def test_a_server_that_has_already_ended():
    ended = subprocess.Popen(["true"], start_new_session=True)
    ended.wait()
    command = [sys.executable, "-I", "-S", process_group_guard.__file__, str(ended.pid), str(os.getpid())]
    subprocess.run(command, check=True, timeout=120)
