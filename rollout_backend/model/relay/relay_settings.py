"""Settings of the relay and the dialer. They need no yaml, because the relay's image installs few packages."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from rollout_backend.base.addresses import ListenAddress
from rollout_backend.model.relay.protocol import MIN_KEY_CHARS, new_id

REFUSED = 3
"""Exit code of a dialer that the relay refuses permanently."""
Seconds = Annotated[float, Field(gt=0)]
Key = Annotated[SecretStr, Field(min_length=MIN_KEY_CHARS)]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    key: Key
    """Secret shared by relay and dialer."""
    reconnect_s: Seconds = 30.0
    """Time without a connection between relay and dialer after which calls in flight end."""
    heartbeat_s: Seconds = 15.0
    """Interval of pings on a silent connection. It is closed if no pong arrives within half of the interval."""
    call_s: Seconds = 3600.0
    """Time limit of one call, including the time that a slow agent needs to read the answer."""


class RelaySettings(_Settings):
    host: ListenAddress = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    wait_s: Seconds = 30.0
    """Time that a call waits for a dialer before it is answered 503 with Retry-After."""
    max_calls: int = Field(default=4096, ge=1, le=65_536)
    """Maximum calls in flight; further calls wait. Each may hold two windows of 256 KiB, and one session's calls a
    quarter of the places."""
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    """Maximum size of a request body; larger ones are refused."""


class DialerSettings(_Settings):
    url: str
    """Root URL of the relay, ws:// or wss://."""
    gateways: dict[str, str]
    """URL of the gateway by shard; calls that name no shard belong to the empty string."""
    dialer_id: str = Field(default_factory=new_id)
    max_calls: int = Field(default=65_536, ge=1, le=65_536)
    """Maximum calls in flight."""
