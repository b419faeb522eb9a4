"""Call the scorer in processes that start on demand and are killed when they hang.

Invariants:

- At most `scoring.processes` rollouts are scored at once; for async functions, times `scoring.concurrency`.
- No call takes longer than `scoring.timeout_s`.
- A process that fails without answering is killed, with its children. The next call uses a new process.
- All processes have the same scorer: if its file has changed since the run began, it is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgpack

from agent_wrapper.shared.processes import MARK, boot_clock, end_marked, kill_group, new_mark, wait_killed
from rollout_backend.base.child_process import open_log
from rollout_backend.base.logs import report_failure
from rollout_backend.config import ScoringConfig
from rollout_backend.errors import ConfigError
from rollout_backend.run.scoring.scorer import ScoringError
from rollout_backend.run.scoring.worker import HEADER

# Time to import the scorer's module.
_START_S = 120.0
# Time from the end of a process's output to its exit.
_END_S = 5.0
# In addition to `timeout_s`, which async functions enforce first.
_KILL_AFTER_S = 5.0


class WorkerPool:
    """The processes of one run's scorer. `start` sets `name` and `sha256`."""

    name: str
    sha256: str

    def __init__(self, config: ScoringConfig, log: Path, kill_after_s: float = _KILL_AFTER_S) -> None:
        """`log` is the file for the scorer's output."""
        self._config = config
        self._log = log
        self._kill_after_s = kill_after_s
        self._workers: list[_Worker] = []
        self._calls_per_worker = 1
        self._slots = asyncio.Semaphore(config.processes)

    async def start(self) -> None:
        """Start a first process, which imports the scorer.

        Raises:
            ConfigError: it cannot be imported, or is not a scorer.
        """
        try:
            hello = await self._add_worker().hello()
        except ScoringError as error:
            raise ConfigError(f"scoring: {error}") from None
        self.name, self.sha256 = hello["scorer"], hello["sha256"]
        if hello["is_async"]:
            self._calls_per_worker = self._config.concurrency
            self._slots = asyncio.Semaphore(self._config.processes * self._calls_per_worker)

    async def call(self, request: bytes) -> dict[str, Any]:
        """Return the scorer's answer to one request.

        Raises:
            ScoringError: the process did not answer in time, or ended.
        """
        async with self._slots:
            free = (worker for worker in self._workers if worker.calls < self._calls_per_worker)
            worker = next(free, None) or self._add_worker()
            worker.calls += 1
            try:
                hello = await worker.hello()
                if (hello["scorer"], hello["sha256"]) != (self.name, self.sha256):
                    raise ScoringError(
                        "the scorer's file has changed since the run began: restart the run to use the new one"
                    )
                return await worker.ask(request, self._config.timeout_s + self._kill_after_s)
            except BaseException as error:
                if not isinstance(error, asyncio.CancelledError) or self._calls_per_worker == 1:
                    with contextlib.suppress(ValueError):
                        # Another call may have removed it.
                        self._workers.remove(worker)
                    await worker.end()
                if isinstance(error, TimeoutError):
                    limit = f"scoring.timeout_s={self._config.timeout_s:g}"
                    raise ScoringError(f"the scorer took longer than {limit}") from None
                raise
            finally:
                worker.calls -= 1

    async def close(self) -> None:
        """Kill all processes."""
        await asyncio.gather(*(worker.end() for worker in self._workers))

    def _add_worker(self) -> _Worker:
        self._workers.append(_Worker(self._config, self._log))
        return self._workers[-1]


class _Worker:
    """One process. It starts when the object is created; `hello` waits for it."""

    def __init__(self, config: ScoringConfig, log: Path) -> None:
        # The number of calls assigned to this process.
        self.calls = 0
        self._ended = False
        self._config = config
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._mark, self._began_at = new_mark(), boot_clock()
        # A killed process leaves its temporary files, such as a rollout's artifacts.
        self._temporary = TemporaryDirectory(prefix="rollout-scorer-", ignore_cleanup_errors=True)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count(1)
        self._starting = asyncio.create_task(self._start())
        # `hello` raises the task's exception.
        self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._reading: asyncio.Task[None] | None = None

    async def hello(self) -> dict[str, Any]:
        """Return the scorer's name and digest once it is imported. Raises ScoringError."""
        return await asyncio.shield(self._starting)

    async def ask(self, request: bytes, timeout_s: float) -> dict[str, Any]:
        """Return the answer to a request. Raises TimeoutError or ScoringError."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            if self._reading is None or self._reading.done():
                raise ScoringError(await self._how_it_ended())
            self._send(number, request)
            async with asyncio.timeout(timeout_s):
                fields: dict[str, Any] = await answer
                return fields
        except asyncio.CancelledError:
            # An empty frame cancels an async function.
            self._send(number, b"")
            raise
        finally:
            del self._answers[number]

    async def end(self) -> None:
        """Kill the process and its children, and delete their temporary files."""
        if self._ended:
            return
        self._ended = True
        for task in (self._starting, self._reading):
            if task is not None and not task.done():
                task.cancel()
        if self._process is not None:
            kill_group(self._process.pid)
            await wait_killed(self._process, "a scorer's process")
            await asyncio.to_thread(end_marked, self._mark, self._began_at)
        await asyncio.to_thread(self._temporary.cleanup)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ScoringError("the scorer's process was killed, since another call hung in it"))

    async def _start(self) -> dict[str, Any]:
        with await open_log(self._log) as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "rollout_backend.run.scoring.worker",
                json.dumps(self._config.model_dump(mode="json")),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, "TMPDIR": self._temporary.name, MARK: self._mark},
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(_START_S):
                _, hello = await self._receive()
        except TimeoutError:
            raise ScoringError(f"the scorer's module was not imported within {_START_S:g} s") from None
        except asyncio.IncompleteReadError:
            raise ScoringError(await self._how_it_ended()) from None
        if "error" in hello:
            raise ScoringError(hello["error"])
        self._reading = asyncio.create_task(self._receive_all())
        self._reading.add_done_callback(report_failure("reading a scorer's answers"))
        return hello

    async def _receive_all(self) -> None:
        try:
            while True:
                number, fields = await self._receive()
                if number in self._answers and not self._answers[number].done():
                    self._answers[number].set_result(fields)
        except Exception as error:
            is_end = isinstance(error, asyncio.IncompleteReadError)
            why = await self._how_it_ended() if is_end else f"the scorer's process wrote no answer: {error!r}"
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(ScoringError(why))

    def _send(self, number: int, body: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            # `_receive_all` detects that the process has ended.
            self._process.stdin.write(HEADER.pack(number, len(body)) + body)

    async def _receive(self) -> tuple[int, dict[str, Any]]:
        """Read one frame. Raises IncompleteReadError."""
        assert self._process is not None
        assert self._process.stdout is not None
        number, length = HEADER.unpack(await self._process.stdout.readexactly(HEADER.size))
        fields: dict[str, Any] = msgpack.unpackb(await self._process.stdout.readexactly(length))
        return number, fields

    async def _how_it_ended(self) -> str:
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            # The process has closed its output, and may keep running.
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        code = self._process.returncode
        how = "closed its output and runs on" if code is None else f"ended with {code}"
        return f"the scorer's process {how}; its output is in logs/scorer.log"
