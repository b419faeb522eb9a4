"""The dialer as a process of its own, for the manager: its event loop never waits for bytes that pass through."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from rollout_backend.config import RelayConfig, RolloutConfig
from rollout_backend.process import ServerProcess
from rollout_backend.relay.handshake import new_id
from rollout_backend.relay.settings import DialerSettings

_ASK_TIMEOUT = aiohttp.ClientTimeout(total=5)


def behind_relay(config: RolloutConfig) -> RolloutConfig:
    """The settings as the gateways see them: with a relay, that is where agents reach them."""
    if config.relay is None:
        return config
    public_url = f"{config.relay.agents_url}/s/{{shard}}"
    return config.model_copy(update={"gateway": config.gateway.model_copy(update={"public_url": public_url})})


class DialerProcess:
    """Carries the relay's calls to the gateways at `urls`, by their number. Not restartable."""

    def __init__(self, config: RelayConfig, urls: Sequence[str], log: Path) -> None:
        self._config = config
        self._id = new_id()
        settings = {
            "key": config.key.get_secret_value(),
            "url": config.url,
            "gateways": {str(shard): url for shard, url in enumerate(urls)},
            "dialer_id": self._id,
            "reconnect_s": config.reconnect_s,
            "heartbeat_s": config.heartbeat_s,
        }
        DialerSettings.model_validate(settings)
        self._process = ServerProcess(
            "the relay's dialer",
            [sys.executable, "-m", "rollout_backend.relay.dialer"],
            log,
            stdin=json.dumps(settings).encode(),
        )

    async def start(self) -> None:
        """Starts it and waits until the relay says that this very dialer is connected.

        Raises:
            StartupError: the relay refuses it or cannot be reached; the message carries the end of its log.
        """
        health = f"{self._config.own_url}/health"
        async with aiohttp.ClientSession(timeout=_ASK_TIMEOUT, trust_env=True) as http:

            async def connected() -> bool:
                try:
                    async with http.get(health) as response:
                        return response.status == 200 and (await response.json())["dialer"] == self._id
                except (aiohttp.ClientError, TimeoutError, ValueError, KeyError):
                    return False

            try:
                await self._process.start()
                await self._process.wait_healthy(connected, self._config.startup_timeout_s)
            except BaseException:
                await self.stop()
                raise

    async def stop(self) -> None:
        """Ends it. Does nothing if it never ran."""
        await self._process.stop()

    async def wait(self) -> str:
        """Returns once it has ended, with how, and the end of its log."""
        code = await self._process.wait()
        return f"the relay's dialer ended with code {code}. {self._process.tail()}"
