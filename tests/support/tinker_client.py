"""A client of the emulated training service: the SDK `tinker`, unchanged."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import tinker

from tests.emulators.tinker_emulator import TinkerEmulator


@contextlib.asynccontextmanager
async def connected(service: TinkerEmulator, key: str = "") -> AsyncIterator[tinker.ServiceClient]:
    """Open a client's session at the emulator, and close it."""
    client = tinker.ServiceClient(base_url=service.url, api_key=key or service.key)
    # The first use of a client blocks until its session is open.
    await asyncio.to_thread(lambda: client.holder)
    try:
        yield client
    finally:
        await client.close("success")
