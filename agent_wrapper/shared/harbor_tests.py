"""Run the tests of a Harbor task, and read the reward that they write.

Invariants:

- The tests and their children end with the call, and with this process.
- The reward is what the tests wrote to their reward file. Without that file there is no reward.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from agent_wrapper.shared.child_output import ChildOutput, wait
from agent_wrapper.shared.json_values import decode_text
from agent_wrapper.shared.processes import MARK, boot_clock, end_marked, kill_group, new_mark

_MAX_REWARD_BYTES = 1024 * 1024
_SHOWN_CHARS = 2_000
_KEPT_BYTES = 4 * _SHOWN_CHARS
# Interval of memory measurements.
_POLL_S = 0.25
_RUN = 'exec 3<&0 </dev/null; { read -r _ <&3; kill -KILL 0; } >/dev/null 2>&1 & exec "$0" 3<&-'
"""Run a program until it ends, or until the writer of stdin ends, which kills the process group."""


class TestsFailed(Exception):
    """The tests wrote no reward, or exceeded a limit. The message contains the end of their output."""

    # pytest collects classes with this name prefix.
    __test__ = False


def run_tests(
    script: Path,
    *,
    cwd: Path,
    environ: Mapping[str, str],
    output: Path,
    timeout_s: float,
    memory_bytes: int | None = None,
) -> str:
    """Run a task's tests/test.sh. Return how it ended, with the end of its output.

    The first 16 MiB of the output are in the file `output`, since the agent's code may write any amount.

    Raises:
        TestsFailed: the tests exceeded the time or memory limit.
        OSError: they cannot be started.
    """
    script.chmod(0o700)
    mark, began_at = new_mark(), boot_clock()
    with output.open("wb") as file, closing(ChildOutput(_KEPT_BYTES, file.write)) as printed:
        with subprocess.Popen(
            [shutil.which("bash") or "sh", "-c", _RUN, str(script)],
            stdin=subprocess.PIPE,
            stdout=printed.write_end,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env={**environ, MARK: mark},
            start_new_session=True,
        ) as process:
            try:
                ended = f"tests/test.sh exited with {_wait(process, printed, timeout_s, memory_bytes)}"
            except TestsFailed as error:
                raise TestsFailed(f"{error}: {_end(printed)}") from None
            finally:
                kill_group(process.pid)
                end_marked(mark, began_at)
        return f"{ended}: {_end(printed)}"


def read_reward(folder: Path, ended: str) -> dict[str, Any]:
    """Return the content of reward.json, or else of reward.txt, in the folder /logs/verifier.

    `ended` is what `run_tests` returned.

    Raises:
        TestsFailed: the file contains no number.
    """
    for file in (folder / "reward.json", folder / "reward.txt"):
        if not file.is_file():
            continue
        try:
            with file.open("rb") as opened:
                text = decode_text(opened.read(_MAX_REWARD_BYTES))
            fields = json.loads(text) if file.suffix == ".json" else float(text)
        except (ValueError, RecursionError):
            raise TestsFailed(f"the tests wrote no number to {file.name} ({ended})") from None
        if not isinstance(fields, dict):
            return {"reward": fields}
        if "reward" not in fields and len(fields) == 1:
            return {"reward": next(iter(fields.values()))}
        return fields
    raise TestsFailed(f"the tests wrote no /logs/verifier/reward.json or reward.txt ({ended})")


def _end(printed: ChildOutput) -> str:
    return printed.text().strip()[-_SHOWN_CHARS:] or "it printed nothing"


def _wait(process: subprocess.Popen[bytes], output: ChildOutput, timeout_s: float, memory_bytes: int | None) -> int:
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        with suppress(subprocess.TimeoutExpired):
            return wait(process, [output], min(left_s, _POLL_S))
        if memory_bytes is not None and _resident_bytes(process.pid) > memory_bytes:
            raise TestsFailed(f"the tests used more than {memory_bytes} bytes of memory")
    raise TestsFailed(f"the tests took longer than verifier.timeout_sec={timeout_s:g}")


def _resident_bytes(group: int) -> int:
    """Return the resident memory of a process group; 0 on other systems than Linux."""
    pages = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                pages += int(fields[21])
    return pages * os.sysconf("SC_PAGE_SIZE")
