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
import sys
from pathlib import Path
from unittest.mock import MagicMock

from rollout_backend.results.archive import RunArchive
from rollout_backend.verl import manager

folder = Path(sys.argv[1])
archive = RunArchive(folder)
others = "verl_api settings_of _pad_token_id try_to_write_report BlockingRolloutManager"
for name in others.split():
    setattr(manager, name, MagicMock())

def end_step(*_):
    archive.write_records(1, [MagicMock(model_dump_json=lambda: "{}")])
    archive.close()
    print(*(file.name for file in folder.rglob("*.jsonl")))

settings = manager.settings_of.return_value
settings.model.folder, settings.gateway.max_images = folder, 0
manager.BlockingRolloutManager.return_value.close = end_step
manager.CloudAgentLoopManager(MagicMock(), MagicMock())
"""


def test_a_step_in_flight_at_the_end_of_the_process_is_recorded(tmp_path):
    argv = [sys.executable, "-c", AT_EXIT, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["00000001.rollouts.jsonl"], done.stderr
