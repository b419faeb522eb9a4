"""Bound the disk space of a run's local copies of results and artifacts.

Invariants:

- A copy may be missing, because S3 has every result. It must leave room for the gateway's journal, which is often on
  the same disk.
- The copies of whole steps are deleted, oldest first. The copies of the newest step are kept.
"""

import logging
import shutil
from pathlib import Path

from rollout_backend.core.earlier_batches import order_of

log = logging.getLogger(__name__)

FOLDERS = ("rollouts", "artifacts")
_RESERVE_SHARE, _RESERVE_BYTES = 0.1, 10 * 10**9
_DEFAULT_SHARE = 0.25


def reserve(total_bytes: int) -> int:
    """Return how much of a disk stays free of copies, for the journal, logs and checkpoints."""
    return min(int(total_bytes * _RESERVE_SHARE), _RESERVE_BYTES)


def budget(total_bytes: int, limit_gb: float | None) -> int:
    """Return the bytes that copies may use on a disk. By default, a quarter of it."""
    return int(total_bytes * _DEFAULT_SHARE) if limit_gb is None else int(limit_gb * 10**9)


class LocalCopies:
    """The copies in one run's directory. Its methods are called from one thread at a time."""

    def __init__(self, run_dir: Path, limit_gb: float | None = None) -> None:
        self._run_dir = run_dir
        self._limit_gb = limit_gb
        self._bytes: dict[int, int] | None = None
        """Bytes by step; None until the directory has been read."""

    def make_room(self, step: int, size: int) -> bool:
        """Delete older steps' copies until a copy of this size fits. Return False if it does not fit even then."""
        try:
            disk = shutil.disk_usage(self._run_dir)
        except OSError:
            # There is no directory yet, or its disk fails, which the write itself will report.
            return True
        if self._bytes is None:
            self._bytes = self._read_sizes()
        used, free = sum(self._bytes.values()) + size, disk.free - size
        most, least = budget(disk.total, self._limit_gb), reserve(disk.total)
        while used > most or free < least:
            oldest = min((step, *self._bytes), key=order_of)
            if oldest == step:
                return False
            freed = self._delete(oldest)
            used, free = used - freed, free + freed
        self._bytes[step] = self._bytes.get(step, 0) + size
        return True

    def _read_sizes(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for folder in FOLDERS:
            for path in (self._run_dir / folder).glob("*/*"):
                if path.parent.name.isdecimal():
                    step = int(path.parent.name)
                    found[step] = found.get(step, 0) + path.stat().st_size
        return found

    def _delete(self, step: int) -> int:
        assert self._bytes is not None
        for folder in FOLDERS:
            shutil.rmtree(self._run_dir / folder / f"{step:08d}", ignore_errors=True)
        freed = self._bytes.pop(step)
        log.info("deleted the local copies in %08d (%d MB); S3 has the results", step, freed // 10**6)
        return freed
