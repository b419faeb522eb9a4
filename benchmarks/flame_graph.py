"""Sample where a process spends its CPU time, with py-spy."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path


def record(pid: int, flame: Path) -> None:
    """Sample a process's stacks until it ends: an SVG, or lines of text for a file that ends in .txt."""
    kind = "raw" if flame.suffix == ".txt" else "flamegraph"
    command = f"py-spy record --pid {pid} --output {flame} --format {kind} --rate 200 --gil"
    program, *arguments = command.split()
    subprocess.Popen([Path(sys.executable).with_name(program), *arguments], stdout=subprocess.DEVNULL)
    time.sleep(1)  # until it has begun
