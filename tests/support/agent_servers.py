"""Agents that run as HTTP servers on this machine."""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
from anyio.from_thread import start_blocking_portal

from builders import eventually
from rollout_backend.model.serving.server_process import ServerProcess, free_port
from rollout_backend.workbench.local.cloud import LocalStorage

ARN = "arn:aws:bedrock-agentcore:us-east-1:000000000000:runtime/local-0123456789"
IMAGE = "000000000000.dkr.ecr.us-east-1.amazonaws.com/local/agent:latest"
BARE_AGENT = (sys.executable, str(Path(__file__).with_name("bare_agent.py")))


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


@asynccontextmanager
async def serve_emulator(
    folder: Path, *clock: Any, command: Sequence[str] = (), **settings: Any
) -> AsyncIterator[tuple[Any, str]]:
    """Serve an AgentCore emulator in this loop, which logs to the folder; yield it and its URL.

    With a command, it has a runtime of this agent, which is `ARN` with the image `IMAGE` unless the settings differ.
    """
    import uvicorn

    from rollout_backend.workbench.local.agentcore_emulator import AgentCoreEmulator, EmulatorSettings

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    own = {"arn": ARN, "command": command, "images": {IMAGE: command} if command else {}}
    fields = {**own, "cwd": folder, "env": {}, "log_dir": folder, "port": port, **settings}
    emulator = AgentCoreEmulator(EmulatorSettings.model_validate(fields), *clock)
    # Clients of tests may repeat nothing, so the server must not close a connection that one is about to use.
    options = {"log_level": "error", "lifespan": "on", "timeout_keep_alive": 3600}
    server = uvicorn.Server(uvicorn.Config(emulator.app(), **options))
    serving = asyncio.create_task(server.serve([listener]))
    await eventually(lambda: server.started)
    try:
        yield emulator, f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving
