"""One engine: a server of the model, started, healthy, watched and stopped. Not restartable: make a new one.

`LocalEngine` runs on this machine. `ExternalEngine` is somebody else's: it is waited for and watched, never started
or stopped. `ray_fleet.RayEngine` is a LocalEngine on another machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import aiohttp

from rollout_backend.config import ModelConfig, ServingConfig
from rollout_backend.errors import StartupError
from rollout_backend.process import ServerProcess, free_port
from rollout_backend.serving.sglang import Command, engine_command

# SGLang looks only every 5 s whether it was told to end, and an engine that is stopped has nothing to finish.
_GRACE_S = 1.0

MakeCommand = Callable[[ModelConfig, ServingConfig, str, int, int], Command]
"""As `engine_command`: model, serving, host, port, first GPU. Another one starts another kind of server."""


class Engine(Protocol):
    @property
    def url(self) -> str:
        """Where it serves, without a slash at the end. Set once it has started."""
        ...

    async def start(self) -> None:
        """Returns once it is healthy; raises StartupError."""
        ...

    async def wait(self) -> str:
        """Returns once it has ended, with how, and the end of its log."""
        ...

    async def stop(self) -> None:
        """Ends it and all its processes, whatever state it is in."""
        ...

    async def tail(self) -> str:
        """The end of its log, for an error message."""
        ...


MakeEngine = Callable[[int], Engine]
"""Makes the engine of a number, from 0; called again for each restart."""


async def is_healthy(url: str, timeout_s: float = 5.0) -> bool:
    """Whether `/health` answers 200 in time."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as http,
            http.get(f"{url}/health") as response,
        ):
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


class LocalEngine:
    """A server process on this machine, on a free port of `host`."""

    def __init__(
        self,
        name: str,
        model: ModelConfig,
        serving: ServingConfig,
        log: Path,
        *,
        host: str = "127.0.0.1",
        first_gpu: int = 0,
        command: MakeCommand = engine_command,
    ) -> None:
        self._name = name
        self._model = model
        self._serving = serving
        self._log = log
        self._host = host
        self._first_gpu = first_gpu
        self._command = command
        self._process: ServerProcess | None = None
        self.url = ""

    async def start(self) -> None:
        if not (self._model.path / "config.json").is_file():  # SGLang needs 15 s and 60 lines to say so
            raise StartupError(
                f"{self._name}: {self._model.path} is no model folder, for it has no config.json: set model.path"
            )
        port = free_port(self._host)
        self.url = f"http://{self._host}:{port}"
        argv, env = self._command(self._model, self._serving, self._host, port, self._first_gpu)
        self._process = ServerProcess(self._name, argv, self._log, env)
        await self._process.start()
        await self._process.wait_healthy(lambda: is_healthy(self.url), self._serving.startup_timeout_s)

    async def wait(self) -> str:
        assert self._process is not None, "not started"
        code = await self._process.wait()
        return f"ended with code {code}. {self._process.tail()}"

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stop(_GRACE_S)

    async def tail(self) -> str:
        return self._process.tail() if self._process is not None else ""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None


class ExternalEngine:
    """A server that somebody else runs at `url`."""

    def __init__(self, name: str, url: str, startup_timeout_s: float) -> None:
        self._name = name
        self._timeout_s = startup_timeout_s
        self.url = url.rstrip("/")

    async def start(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not await is_healthy(self.url):
            if time.monotonic() > deadline:
                raise StartupError(
                    f"{self._name}: {self.url}/health did not answer 200 within {self._timeout_s:g} s: "
                    "start that server, or mend serving.urls"
                )
            await asyncio.sleep(0.5)

    async def wait(self) -> str:
        await asyncio.Event().wait()  # its process is not ours to see; the health probe tells
        raise AssertionError("unreachable")

    async def stop(self) -> None:
        pass

    async def tail(self) -> str:
        return ""
