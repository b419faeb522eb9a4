"""What one gateway process is told, as JSON on its standard input: secrets stand on no command line."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from rollout_backend.config import GatewayConfig, ModelConfig, Seconds
from rollout_backend.gateway.tokens import MIN_SECRET_CHARS


class GatewaySettings(BaseModel):
    """`secret` signs the session keys, `control_key` opens /control, `seal_secret` seals trajectories, if given.
    `journal` is the folder, made ready, that its sessions outlive it in; None: they end with it. Sessions of another
    `life` than this wait until they are `adopted`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(ge=0, le=65535)
    model: ModelConfig
    gateway: GatewayConfig = GatewayConfig()
    shard: int = Field(default=0, ge=0)
    """Its number among `gateway.processes`; the sessions of the others are refused."""
    engine_url: str
    model_call_s: Seconds = 300.0
    """Of one model call, with all attempts."""
    token_s: Seconds = 5400.0
    """Longest life of a key, and so how long a revoked session must be remembered."""
    engine_attempts: int = Field(default=10, ge=1)
    """Of one model call. With the waits between them they bridge about a minute without an engine."""
    keepalive_s: Seconds = 10.0
    """A stream that has nothing to say yet says so this often."""
    loads_s: Seconds = 2.0
    """How often the engines are asked for their load."""
    journal: Path | None = None
    life: str = ""
    adopted: tuple[str, ...] = ()
    secret: str = Field(min_length=MIN_SECRET_CHARS, repr=False)
    control_key: str = Field(min_length=MIN_SECRET_CHARS, repr=False)
    seal_secret: str | None = Field(default=None, min_length=MIN_SECRET_CHARS, repr=False)
