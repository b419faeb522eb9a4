"""Start a session's process: run its command, or fork it from an interpreter with preloaded libraries.

Both start one fresh process per session, and differ only in the time that a start takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

from agent_wrapper.shared.processes import wait_killed
from rollout_backend.errors import StartupError
from rollout_backend.model.serving.server_process import ServerProcess
from rollout_backend.workbench.local import prefork


class Spawner(Protocol):
    async def spawn(self, name: str, env: Mapping[str, str], log: Path) -> ServerProcess:
        """Start a process with `env` added to the common environment.

        Raises:
            StartupError: the program cannot be executed.
        """

    async def close(self) -> None: ...


class CommandSpawner:
    """Runs the command once per session, like a container runtime."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._command = list(command)
        self._env = dict(env)

    async def spawn(self, name: str, env: Mapping[str, str], log: Path) -> ServerProcess:
        process = ServerProcess(name, self._command, log, {**self._env, **env})
        await process.start()
        return process

    async def close(self) -> None:
        pass


class PreforkSpawner:
    """Forks each session from one `prefork` process, which starts on first use or with `warm`.

    It runs the command instead if it cannot fork: a library starts threads when imported, the interpreter does not
    start, or the `prefork` process died.
    """

    def __init__(self, python: str, script: Path, preload: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self._argv = [python, prefork.__file__]
        self._order = {"script": str(script), "preload": list(preload)}
        self._env = dict(env)
        self._log = log
        self._fallback = CommandSpawner([python, str(script)], env)
        self._process: asyncio.subprocess.Process | None = None
        self._forked: dict[str, asyncio.Future[_Forked]] = {}
        self._running: dict[int, _Forked] = {}
        self._count = 0
        self._warming: asyncio.Task[bool] | None = None
        self._reading: asyncio.Task[None] | None = None

    def warm(self) -> asyncio.Task[bool]:
        """Start importing the libraries. The task returns whether sessions can be forked."""
        if self._warming is None:
            self._warming = asyncio.create_task(self._start())
        return self._warming

    async def spawn(self, name: str, env: Mapping[str, str], log: Path) -> ServerProcess:
        if not await asyncio.shield(self.warm()) or self._reading is None or self._reading.done():
            return await self._fallback.spawn(name, env, log)
        process = _ForkedProcess(name, self._argv, log, env)
        process.adopt(await self._fork(env, log))
        return process

    async def close(self) -> None:
        """End the `prefork` process. Sessions that are still running end with it."""
        for task in (self._warming, self._reading):
            if task is not None:
                task.cancel()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await wait_killed(self._process, "the process that forks sessions")

    async def _start(self) -> bool:
        try:
            with self._log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *self._argv,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    env=self._env,
                    # Ctrl-C reaches only this process; the child ends when its stdin closes.
                    start_new_session=True,
                )
        except OSError:
            # The session then fails because the program is missing.
            return False
        self._send(self._order)
        assert self._process.stdout is not None
        answer = json.loads(await self._process.stdout.readline() or '{"ready": false, "why": "it ended"}')
        if not answer["ready"]:
            print(f"sessions start without preloaded libraries: {answer['why']}; see {self._log}", file=sys.stderr)
            return False
        self._reading = asyncio.create_task(self._read(self._process.stdout))
        return True

    async def _fork(self, env: Mapping[str, str], log: Path) -> _Forked:
        self._count += 1
        number = str(self._count)
        waiting: asyncio.Future[_Forked] = asyncio.get_running_loop().create_future()
        self._forked[number] = waiting
        self._send({"id": number, "env": dict(env), "log": str(log)})
        try:
            return await waiting
        except asyncio.CancelledError:
            if not waiting.cancelled() and waiting.exception() is None:
                # The process was forked just as the spawn was cancelled.
                _kill(waiting.result().pid)
            raise

    def _send(self, message: Mapping[str, object]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read(self, messages: asyncio.StreamReader) -> None:
        while line := await messages.readline():
            message = json.loads(line)
            if "id" in message:
                forked = self._running[message["pid"]] = _Forked(message["pid"])
                waiting = self._forked.pop(message["id"])
                if waiting.cancelled():
                    _kill(forked.pid)
                else:
                    waiting.set_result(forked)
            else:
                self._running.pop(message["pid"]).ended(message["code"])
        for waiting in self._forked.values():
            if not waiting.cancelled():
                waiting.set_exception(StartupError(f"the process that forks sessions has ended; see {self._log}"))
        for forked in self._running.values():
            forked.ended(-signal.SIGTERM)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class _Forked:
    """The part of `asyncio.subprocess.Process` that `ServerProcess` uses, for a grandchild process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    def ended(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode


class _ForkedProcess(ServerProcess):
    def adopt(self, forked: _Forked) -> None:
        self._process = cast("asyncio.subprocess.Process", forked)
