"""The servers behind host names, such as the headless services of Kubernetes: one per address.

Invariant: a name that cannot be resolved keeps its last addresses. Its servers may be up all the same, and the fleet
notices those that are not.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn

from yarl import URL

log = logging.getLogger(__name__)


class ServiceAddresses:
    every_s = 5.0
    """Time between two look-ups in `follow`."""

    def __init__(self, urls: Sequence[str]) -> None:
        """`urls` name the services: their hosts stand for all addresses, and the rest is kept."""
        self._found: dict[str, list[str]] = {url: [] for url in urls}
        self._unresolved: set[str] = set()

    async def look_up(self) -> list[str]:
        """Return the URL of each server, in the order of the services and their addresses."""
        for url in self._found:
            try:
                self._found[url] = await _addresses(url)
                self._unresolved.discard(url)
            except OSError as error:
                if url not in self._unresolved:
                    log.warning("%s cannot be resolved (%s): its last addresses are kept", url, error)
                self._unresolved.add(url)
        return list(dict.fromkeys(address for found in self._found.values() for address in found))

    async def follow(self, serve_with: Callable[[Sequence[str]], Awaitable[None]]) -> NoReturn:
        """Look the names up every few seconds. Call `serve_with` with all servers when they have changed."""
        before = [address for found in self._found.values() for address in found]
        while True:
            await asyncio.sleep(self.every_s)
            now = await self.look_up()
            if now != before:
                await serve_with(now)
                before = now


async def _addresses(url: str) -> list[str]:
    """Return the URL with each address of its host. Raises OSError."""
    parsed = URL(url)
    found = await asyncio.get_running_loop().getaddrinfo(parsed.host, parsed.port, type=socket.SOCK_STREAM)
    hosts = sorted({str(address[0]) for *_, address in found})
    return [str(parsed.with_host(host)).rstrip("/") for host in hosts]
