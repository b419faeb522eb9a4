"""Folders of measurements, removed after the last one instead of after each.

For five minutes ext4 gives no new file the inode of a deleted one, and searches the disk for another instead. After
thousands of deleted files that costs up to 1 ms of CPU for each new one, which the next measurement would pay.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OF_ALL = "BENCHMARK_FOLDER"  # the environment variable with the folder of a measurement that others follow


@contextmanager
def kept_folder() -> Iterator[Path]:
    """Yield an empty folder. The block removes it with those of the blocks and programs inside it, when it ends."""
    if outer := os.environ.get(_OF_ALL):
        yield Path(tempfile.mkdtemp(dir=outer))
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ[_OF_ALL] = folder
        try:
            yield Path(folder)
        finally:
            del os.environ[_OF_ALL]
