"""What a relay and a dialer are told. Without yaml: the relay's image needs little."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from rollout_backend.relay.handshake import MIN_KEY_CHARS, new_id

Seconds = Annotated[float, Field(gt=0)]
Key = Annotated[SecretStr, Field(min_length=MIN_KEY_CHARS)]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    key: Key
    """Known to the relay and the dialer alone."""
    reconnect_s: Seconds = 30.0
    """After so long without a connection between the two, calls in flight end."""
    heartbeat_s: Seconds = 15.0
    """A connection that is silent is asked this often whether it is alive, and given up half as long after."""
    call_s: Seconds = 3600.0
    """The longest that one call may take, an agent that reads slowly included."""


class RelaySettings(_Settings):
    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    wait_s: Seconds = 30.0
    """How long a call waits for a dialer before it is answered 503 with Retry-After."""
    max_calls: int = Field(default=1024, ge=1, le=65_536)
    """In flight; one more is answered 429 with Retry-After. Each may hold twice the window of 256 KiB."""
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    """Of one call's request; a larger one is refused."""


class DialerSettings(_Settings):
    url: str
    """ws:// or wss://, the relay's root."""
    gateways: dict[str, str]
    """The gateway's URL by shard; the shard of calls that name none is the empty text."""
    dialer_id: str = Field(default_factory=new_id)
    max_calls: int = Field(default=65_536, ge=1, le=65_536)
    """In flight, whatever the relay sends."""
