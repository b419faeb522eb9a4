"""The run directory on a disk that may be full, and that is lost with its machine."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from rollout_backend.core.manifest import Manifest
from rollout_backend.run.accounts.archive import RunArchive
from rollout_backend.run.step.in_flight import InFlightLog
from tests.simulation.environment import Environment
from tests.simulation.s3 import Bucket
from tests.simulation.session_audit import SessionAudit
from tests.simulation.trainer import Trainer


class RunDirectory:
    """The in-flight logs of all trainers."""

    def __init__(self) -> None:
        self.logged: dict[
            tuple[int, str], int
        ] = {}  # by step and nonce: the last attempt whose sessions are all logged
        self._lines: dict[int, list[str]] = {}  # by step

    def append(self, step: int, lines: str) -> None:
        self._lines.setdefault(step, []).extend(lines.split("\n"))

    def read(self, step: int) -> list[str]:
        return self._lines.get(step, [])

    def delete(self, step: int) -> None:
        self._lines.pop(step, None)
        self.logged = {key: last for key, last in self.logged.items() if key[0] != step}

    def lose(self) -> None:
        """Delete all logs."""
        self._lines.clear()
        self.logged.clear()

    def is_complete(self, bucket: Bucket) -> bool:
        """Return False if a manifest names attempts that its trainer could not log before it was killed."""
        for key, body in bucket.objects.items():
            if "/manifests/" in key and not key.endswith("/lineage.json"):
                manifest = Manifest.parse(json.loads(body))
                known = max(self.logged.get((manifest.step, manifest.nonce), 0), manifest.attempts_closed)
                if known < manifest.attempts_before + manifest.attempts:
                    return False
        return True


class _Inline(Executor):
    """Runs each call at once, so that a simulation has no threads. An error is raised to the caller."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


class SimArchive(RunArchive):
    """A run directory on a disk that may be full."""

    def __init__(self, env: Environment) -> None:
        def write(path: Path, data: bytes) -> None:
            if env.chance("disk_full"):
                raise OSError(errno.ENOSPC, "No space left on device")

        super().__init__(Path("run"), write)
        self.submit = _Inline().submit  # type: ignore[assignment]


class SimInFlightLog(InFlightLog):
    """The production log, for one trainer. The audit observes which sessions the trainer closes."""

    def __init__(self, run_directory: RunDirectory, audit: SessionAudit, trainer: Trainer) -> None:
        super().__init__(_Disk(run_directory, trainer))
        self.awaits_result: Callable[[str], bool] = lambda rollout_id: False  # see `Ledger.awaits_result`
        self._run_directory = run_directory
        self._audit = audit

    async def record_execution(self, step: int, nonce: str, first: int, last: int) -> None:
        await super().record_execution(step, nonce, first, last)
        logged = self._run_directory.logged
        logged[step, nonce] = max(last, logged.get((step, nonce), 0))

    async def record_closed(self, step: int, session_id: str) -> None:
        await super().record_closed(step, session_id)
        self._audit.closes(session_id, self.awaits_result)


class _Disk:
    """The run directory, which a killed trainer cannot write."""

    def __init__(self, run_directory: RunDirectory, trainer: Trainer) -> None:
        self._run_directory = run_directory
        self._trainer = trainer

    async def append(self, step: int, lines: str) -> None:
        self._trainer.require_alive()
        self._run_directory.append(step, lines)

    async def read(self, step: int) -> list[str]:
        return self._run_directory.read(step)

    async def delete(self, step: int) -> None:
        self._trainer.require_alive()
        self._run_directory.delete(step)
