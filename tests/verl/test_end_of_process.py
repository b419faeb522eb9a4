"""The end of a process in which verl runs a step."""

import subprocess
import sys

import pytest

AT_EXIT = """
import sys
from pathlib import Path
from unittest.mock import MagicMock

from rollout_backend.run.accounts.archive import RunArchive
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


@pytest.mark.slow  # a process that loads verl
def test_a_step_in_flight_at_the_end_of_the_process_is_recorded(tmp_path):
    argv = [sys.executable, "-c", AT_EXIT, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["00000001.rollouts.jsonl"], done.stderr
