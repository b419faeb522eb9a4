"""Define the settings of one gateway process, which reads them from standard input because they contain secrets."""

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
    """Index of this process, below `gateway.processes`. It refuses sessions of other shards."""
    engine_name: EngineName = "sglang"
    engine_url: str
    """URL of the router or of an engine."""
    router: RouterKind = "sglang-router"
    """The kind of router at `engine_url`."""
    model_call_s: Seconds = 300.0
    """Time limit of one model call, including all attempts."""
    max_result_bytes: int = Field(default=MAX_OBJECT_BYTES, ge=1024)
    """Largest result that the trainer accepts; the gateway returns no larger trajectory."""
    body_s: Seconds = 120.0
    """Time limit for reading one request's body."""
    session_key_s: Seconds = 5400.0
    """Longest validity of a session key, and so the time for which a revoked session is remembered."""
    engine_attempts: int = Field(default=10, ge=1)
    """Attempts of one model call. With their back-off, they bridge about a minute without an engine."""
    keepalive_s: Seconds = 10.0
    """Interval of keepalives in a stream that has no new tokens."""
    load_poll_s: Seconds = 2.0
    """Interval of polling the engines' load."""
    journal: Path | None = None
    """Folder of the session journal, created by `journal.prepare`. None: sessions end with the process."""
    trainer_incarnation: str = ""
    """Sessions of another incarnation wait until the trainer adopts them."""
    adopted: tuple[str, ...] = ()
    paused: bool = False
    """Whether model calls are held until /control/resume."""
    leave_out: tuple[LeftOut, ...] = ()
    """Which calls are answered but not trained."""
    adapters: dict[str, int] = {}
    """Version of each LoRA adapter that the engines serve, until a request to /control/adapters changes it."""
    otlp_endpoint: str | None = None
    """OpenTelemetry collector that receives a span for each model call."""
    secret: str = Field(min_length=MIN_SECRET_CHARS, repr=False)
    """Signs session keys."""
    previous_secret: str | None = Field(default=None, min_length=MIN_SECRET_CHARS, repr=False)
    """The secret that `secret` replaced, whose session keys are still accepted."""
    control_key: str = Field(min_length=MIN_SECRET_CHARS, repr=False)
    """Authorises requests to /control."""
    seal_secret: str | None = Field(default=None, min_length=MIN_SECRET_CHARS, repr=False)
    """Seals trajectories; None leaves them unsealed."""
