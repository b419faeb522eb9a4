"""Define the settings of one gateway process. It reads them from standard input, because they contain secrets."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from agent_wrapper.contract.codec import MAX_OBJECT_BYTES
from rollout_backend.config import EngineName, GatewayConfig, LeftOut, ModelConfig, RouterKind, Seconds
from rollout_backend.core.session_key import MIN_SECRET_CHARS


class GatewaySettings(BaseModel):
    """The settings of one gateway process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(ge=0, le=65535)
    model: ModelConfig
    gateway: GatewayConfig = GatewayConfig()
    shard: int = Field(default=0, ge=0)
    """The process's number, below `gateway.processes`. Sessions of other shards are refused."""
    engine_name: EngineName = "sglang"
    engine_url: str
    """The router's URL, or an engine's."""
    router: RouterKind = "sglang-router"
    """The kind of router at `engine_url`."""
    model_call_s: Seconds = 300.0
    """Time limit of one model call, including all attempts."""
    max_result_bytes: int = Field(default=MAX_OBJECT_BYTES, ge=1024)
    """The trainer refuses larger results, so the gateway returns no larger trajectory."""
    body_s: Seconds = 120.0
    """Time limit of reading one request's body."""
    session_key_s: Seconds = 5400.0
    """Longest validity of a key, and so how long a revoked session is remembered."""
    engine_attempts: int = Field(default=10, ge=1)
    """Attempts of one model call. With their back-off they bridge about a minute without an engine."""
    keepalive_s: Seconds = 10.0
    """Interval of keepalives in a stream without new tokens."""
    load_poll_s: Seconds = 2.0
    """Interval of polling the engines' load."""
    journal: Path | None = None
    """Folder of the session journal, made by `journal.prepare`. None: sessions end with the process."""
    trainer_incarnation: str = ""
    """Sessions of another incarnation wait until they are adopted."""
    adopted: tuple[str, ...] = ()
    paused: bool = False
    """Whether model calls are held until /control/resume."""
    leave_out: tuple[LeftOut, ...] = ()
    """Calls that are answered and not trained."""
    adapters: dict[str, int] = {}
    """The version of each LoRA adapter that the engines serve, until /control/adapters."""
    otlp_endpoint: str | None = None
    """The OpenTelemetry collector that gets a span for each model call."""
    secret: str = Field(min_length=MIN_SECRET_CHARS, repr=False)
    """Signs session keys."""
    previous_secret: str | None = Field(default=None, min_length=MIN_SECRET_CHARS, repr=False)
    """The secret that `secret` replaced, whose session keys are still accepted."""
    control_key: str = Field(min_length=MIN_SECRET_CHARS, repr=False)
    """Authorises requests to /control."""
    seal_secret: str | None = Field(default=None, min_length=MIN_SECRET_CHARS, repr=False)
    """Seals trajectories, if given."""
