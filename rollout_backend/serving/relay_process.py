"""Run the dialer in a separate process, so that relayed bytes never delay the manager's event loop."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import aiohttp

from rollout_backend.config import RelayConfig, RolloutConfig
from rollout_backend.config.gateway import AUTO
from rollout_backend.errors import ServingError
from rollout_backend.relay.handshake import new_id
from rollout_backend.relay.relay_settings import DialerSettings
from rollout_backend.serving.gateway_process import is_loopback
from rollout_backend.serving.server_process import ServerProcess

_ASK_TIMEOUT = aiohttp.ClientTimeout(total=5)


def public_gateway_config(config: RolloutConfig) -> RolloutConfig:
    """Return the settings for the gateways: with a relay, their public URL is the relay's, and `auto` is resolved."""
    gateway = config.gateway
    if config.relay is not None:
        changes = {"public_url": f"{config.relay.agents_url}/s/{{shard}}"}
    elif gateway.public_url == AUTO or "://{host}" in (gateway.public_url or ""):
        changes = {"public_url": "http://{host}:{port}"} if gateway.public_url == AUTO else {}
        if gateway.kind == "process" and is_loopback(gateway.host):
            changes["host"] = "0.0.0.0"  # noqa: S104
    else:
        return config
    return config.model_copy(update={"gateway": gateway.model_copy(update=changes)})


class DialerProcess:
    """The dialer, which carries the relay's calls to the gateways at `urls`. Not restartable."""

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
        """Start the dialer; return once the relay reports that it is connected.

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
        """End the dialer. Do nothing if it never ran."""
        await self._process.stop()

    async def failed(self) -> NoReturn:
        """Wait until the dialer has ended.

        Raises:
            ServingError: how it ended, with the end of its log.
        """
        raise ServingError(f"the relay's dialer {await self._process.wait_ended()}")
