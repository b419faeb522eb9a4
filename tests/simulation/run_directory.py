"""The run directory on a disk that may be full, and that is lost with its machine."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from rollout_backend.base.disk import Disk
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
                if not all(each.is_logged for each in (manifest, *manifest.replaced)):
                    return False
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
        super().__init__(_Lines(run_directory, trainer, audit))
        self.awaits_result: Callable[[str], bool] = lambda rollout_id: False  # see `Ledger.awaits_result`
        self._run_directory = run_directory
        self._audit = audit

    async def record_execution(self, step: int, nonce: str, first: int, last: int) -> None:
        await super().record_execution(step, nonce, first, last)
        if step not in self._audit.unlogged:
            logged = self._run_directory.logged
            logged[step, nonce] = max(last, logged.get((step, nonce), 0))

    async def record_closed(self, step: int, session_id: str) -> None:
        await super().record_closed(step, session_id)
        self._audit.closes(session_id, self.awaits_result)


class _Disk(Disk):
    """A disk that may be full or not answer for up to an hour, in virtual time and without a thread."""

    def __init__(self, env: Environment) -> None:
        super().__init__(Path("run"))
        self._env = env
        self._own = env.own_random(f"disk {env.number('disk')}")
        self._fails_until, self._is_full = 0.0, False

    def enqueue(self, call: Callable[..., Any], *args: Any, **more: Any) -> Future[Any]:
        done: Future[Any] = Future()

        def make() -> None:
            self.hangs = False
            try:
                done.set_result(call(*args, **more))
            except BaseException as error:
                done.set_exception(error)

        now = self._env.now()
        if now >= self._fails_until and self._own.random() < self._env.faults.disk_fails:
            self._fails_until, self._is_full = now + 3600 * self._own.random(), self._own.random() < 0.5
        if now >= self._fails_until:
            make()
        elif self._is_full:
            done.set_exception(OSError(errno.ENOSPC, "No space left on device"))
        else:
            asyncio.get_running_loop().call_at(self._fails_until, make)
        return done


class _Lines:
    """The run directory, which a killed trainer cannot write."""

    def __init__(self, run_directory: RunDirectory, trainer: Trainer, audit: SessionAudit) -> None:
        self._run_directory = run_directory
        self._trainer = trainer
        self._audit = audit
        self._disk = _Disk(audit.env)

    async def append(self, step: int, lines: str) -> None:
        unlogged, is_known = self._audit.unlogged, step in self._audit.unlogged
        # The trainer may be killed while it waits.
        if self._audit.env.faults.disk_fails:
            unlogged.add(step)
        await self._disk.call(self._append, step, lines)
        if not is_known:
            unlogged.discard(step)

    def _append(self, step: int, lines: str) -> None:
        self._trainer.require_alive()
        self._run_directory.append(step, lines)

    async def read(self, step: int) -> list[str]:
        return self._run_directory.read(step)

    async def delete(self, step: int) -> None:
        await self._disk.call(self._delete, step)

    def _delete(self, step: int) -> None:
        self._trainer.require_alive()
        self._run_directory.delete(step)
