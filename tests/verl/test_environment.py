"""The environment of verl's processes on the CPU."""

import platform
import subprocess
import sys

import pytest

from verl_cpu.environment import KEEP_FREED_MEMORY, environment

INTEL = sys.platform == "linux" and platform.machine() == "x86_64"


@pytest.mark.skipif(not INTEL, reason="its OpenMP is made for Linux on x86-64")
def test_torch_uses_the_openmp_that_supports_several_threads():
    code = "import torch; torch.ones(1 << 20).exp(); print(open('/proc/self/maps').read())"
    argv = [sys.executable, "-c", code]
    maps = subprocess.run(argv, env=environment(2), capture_output=True, text=True, check=True)
    assert "libiomp5.so" in maps.stdout


def test_user_settings_are_kept():
    own = environment(inherited={"LD_PRELOAD": "/lib/mine.so", "GLIBC_TUNABLES": "glibc.malloc.check=1"})
    assert own["LD_PRELOAD"].split(":")[-1] == "/lib/mine.so"
    assert own["GLIBC_TUNABLES"] == "glibc.malloc.check=1"
    assert environment(inherited=environment(inherited={})) == environment(inherited={})
    assert environment(inherited={})["GLIBC_TUNABLES"] == KEEP_FREED_MEMORY


AT_EXIT = """
import asyncio, atexit, threading
from rollout_backend.verl.manager import PoolForExit

loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()

async def use_pool():
    loop.set_default_executor(PoolForExit())

async def close():
    await loop.getaddrinfo("localhost", 80)  # in the pool
    try:
        await asyncio.to_thread(open, "/no/such/file")
    except FileNotFoundError:
        print("closed")

def run(work):
    return asyncio.run_coroutine_threadsafe(work, loop).result(60)

run(use_pool())
atexit.register(lambda: run(close()))
"""


def test_the_manager_can_be_closed_at_the_end_of_its_process():
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, check=True)
    assert done.stdout == "closed\n", done.stderr
