"""The settings of relay and dialer. They need no yaml: the relay's image installs few packages."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from rollout_backend.relay.handshake import MIN_KEY_CHARS, new_id

Seconds = Annotated[float, Field(gt=0)]
Key = Annotated[SecretStr, Field(min_length=MIN_KEY_CHARS)]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    key: Key
    """Shared by relay and dialer."""
    reconnect_s: Seconds = 30.0
    """Without a connection between relay and dialer for this long, calls in flight end."""
    heartbeat_s: Seconds = 15.0
    """Interval of pings on a silent connection, which is closed after half that time without an answer."""
    call_s: Seconds = 3600.0
    """Time limit of one call, including the time that a slow agent takes to read."""


class RelaySettings(_Settings):
    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    wait_s: Seconds = 30.0
    """How long a call waits for a dialer before it is answered 503 with Retry-After."""
    max_calls: int = Field(default=1024, ge=1, le=65_536)
    """Limit of calls in flight; another call gets 429 with Retry-After. Each may hold two windows of 256 KiB."""
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    """Size limit of a request body; a larger one is refused."""


class DialerSettings(_Settings):
    url: str
    """The relay's root, ws:// or wss://."""
    gateways: dict[str, str]
    """URL of the gateway by shard; the empty string is the shard of calls that name none."""
    dialer_id: str = Field(default_factory=new_id)
    max_calls: int = Field(default=65_536, ge=1, le=65_536)
    """Limit of calls in flight."""
