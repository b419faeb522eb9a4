"""Run a command as a scorer. It reads one rollout as JSON from stdin, and prints the reward in its last line."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

_STDERR_CHARS = 2_000


def run_command(
    command: Sequence[str], given: bytes, timeout_s: float, artifacts: Mapping[str, bytes] = MappingProxyType({})
) -> object:
    """Return what the command printed: a number, or a dict with a number under 'reward'.

    While it runs, the artifacts are files in the folder $ROLLOUT_ARTIFACTS.

    Raises:
        ValueError: the command failed, or printed neither. The message includes the end of its stderr.
        subprocess.TimeoutExpired: the command took longer than `timeout_s`.
        OSError: the command cannot be executed.
    """
    with TemporaryDirectory(prefix="rollout-artifacts-") as folder:
        for name, content in artifacts.items():
            Path(folder, name).write_bytes(content)
        environment = os.environ | {"ROLLOUT_ARTIFACTS": folder}
        done = subprocess.run(  # the command comes from the user's own settings
            [*command], input=given, capture_output=True, timeout=timeout_s, check=False, env=environment
        )
    end = done.stderr.decode(errors="replace").strip()[-_STDERR_CHARS:]
    if done.returncode:
        raise ValueError(f"the command exited with {done.returncode}: {end or 'it printed nothing to stderr'}")
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        last = repr(lines[-1][:100]) if lines else "nothing"
        raise ValueError(f"the command printed {last} as its last line, and not a number or a JSON object") from None
