"""Relays in separate processes."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from rollout_backend.model.serving.server_process import ServerProcess, free_port

KEY = "a-key-that-both-sides-know-" * 2


@dataclass
class RelayServer:
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def health(self) -> dict[str, Any]:
        async with aiohttp.ClientSession() as http, http.get(f"{self.url}/health") as response:
            return dict(await response.json())

    async def healthy(self) -> bool:
        try:
            return (await self.health())["status"] == "ok"
        except aiohttp.ClientError:
            return False

    async def has_calls(self, number: int) -> bool:
        return bool((await self.health())["calls"] == number)

    async def waits(self, number: int) -> bool:
        return bool((await self.health())["waiting"] == number)

    async def dialled(self, dialer_id: str | None = None) -> bool:
        said = (await self.health())["dialer"]
        return said is not None and dialer_id in (None, said)


@dataclass
class RelayProcess(RelayServer):
    process: ServerProcess

    async def start(self) -> None:
        await self.process.start()
        await self.process.wait_healthy(self.healthy, 120.0)


def relay_process(log: Path, *options: object, port: int = 0) -> RelayProcess:
    port = port or free_port()
    argv = [sys.executable, "-m", "rollout_backend.model.relay", "--port", str(port), *map(str, options)]
    return RelayProcess(port, ServerProcess("the relay", argv, log, {**os.environ, "ROLLOUT__RELAY__KEY": KEY}))
