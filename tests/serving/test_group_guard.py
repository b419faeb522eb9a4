import os
import select
import signal
import subprocess
import sys

import pytest

from rollout_backend.serving import group_guard

ENGINE = """
import subprocess, time
print("child", subprocess.Popen(["sleep", "1000"]).pid, flush=True)
time.sleep(1000)
"""

OWNER = """
import asyncio, sys
from pathlib import Path
from rollout_backend.config import ModelConfig, ServingConfig
from rollout_backend.serving.engine import LocalEngine

async def main():
    folder = Path(sys.argv[1])
    command = lambda *_: ([sys.executable, "-c", sys.argv[2]], {})
    engine = LocalEngine("engine", ModelConfig(path=folder), ServingConfig(), folder / "log", command=command)
    starting = asyncio.create_task(engine.start())
    while "child" not in (engine._process.log.read_text() if engine.pid else ""):
        await asyncio.sleep(0.02)
    print(engine.pid, flush=True)
    await starting

asyncio.run(main())
"""


@pytest.mark.parametrize("killed", ["the engine", "its owner"])
def test_an_engine_that_dies_while_it_starts_leaves_nothing_behind(killed, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    owner = subprocess.Popen([sys.executable, "-c", OWNER, tmp_path, ENGINE], stdout=subprocess.PIPE, text=True)
    with owner:
        pid = int(owner.stdout.readline())
        child = os.pidfd_open(int((tmp_path / "log").read_text().split()[1]))
        os.kill(pid if killed == "the engine" else owner.pid, signal.SIGKILL)
        assert select.select([child], [], [], 20)[0], "the engine's own process is still there"
        os.close(child)
        owner.kill()


def test_one_that_has_ended_already():
    ended = subprocess.Popen(["true"], start_new_session=True)
    ended.wait()
    subprocess.run([sys.executable, "-I", "-S", group_guard.__file__, str(ended.pid)], check=True, timeout=20)
