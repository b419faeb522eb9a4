"""Agents that run as HTTP servers on this machine."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from anyio.from_thread import start_blocking_portal

from rollout_backend.local.cloud import LocalStorage
from rollout_backend.serving.server_process import ServerProcess, free_port


@contextmanager
def serve_agent(script: Path, storage: LocalStorage, folder: Path) -> Iterator[str]:
    """Start an agent's file as a server, which logs to the folder, and return its URL."""
    port = free_port()
    process = ServerProcess(
        f"the agent {script}",
        [sys.executable, str(script)],
        folder / "agent.log",
        {
            **os.environ,
            **storage.environ,
            "AWS_ENDPOINT_URL": storage.endpoint_url,
            "HOST": "127.0.0.1",
            "PORT": str(port),
        },
    )

    async def answers() -> bool:
        try:
            async with httpx.AsyncClient(timeout=60) as http:
                return (await http.get(f"http://127.0.0.1:{port}/ping")).status_code == 200
        except httpx.TransportError:
            return False

    with start_blocking_portal() as portal:
        portal.call(process.start)
        portal.call(process.wait_healthy, answers, 240.0)
        yield f"http://127.0.0.1:{port}"
        portal.call(process.stop)
