"""The `relay` section."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, SecretStr

from rollout_backend.config.section import HttpUrl, Seconds, Section, matching


class RelayConfig(Section):
    """For agents that cannot reach the training side: a relay near them, to which the training side connects.
    Default: none. See [relay.md](relay.md)."""

    url: Annotated[str, matching(r"wss?://[^/?#]+(/[^?#]*)?", "a URL of the form wss://HOST or ws://HOST:PORT/PATH")]
    """URL of the relay: `wss://relay.example.com`. `ws://` has no TLS: eavesdroppers read session keys and
    prompts."""
    public_url: HttpUrl | None = None
    """URL under which agents reach the relay, if it differs from `url` (an address inside their cluster)."""
    key: SecretStr = Field(min_length=32)
    """Shared by the training side and the relay only. Set it in the environment, as ROLLOUT__RELAY__KEY."""
    reconnect_s: Seconds = 30.0
    """Calls in flight end after this time without a connection to the relay."""
    heartbeat_s: Seconds = 15.0
    """Interval of pings on a silent connection. One that stays silent for half of it after a ping is closed."""
    startup_timeout_s: Seconds = 60.0
    """Timeout until the relay is reached."""

    @property
    def agents_url(self) -> str:
        """Return the URL under which agents reach the relay."""
        return (self.public_url or self.own_url).rstrip("/")

    @property
    def own_url(self) -> str:
        """Return the URL under which the training side reaches the relay by plain HTTP calls."""
        return re.sub("^ws", "http", self.url).rstrip("/")
