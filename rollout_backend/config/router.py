"""The `router` section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollout_backend.config.section import Seconds, Section


class RouterConfig(Section):
    host: str = "127.0.0.1"
    """Address to listen on. With `serving.engine=vllm` no router runs, and the list of servers is served here."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on. 0: any free port."""
    policy: Literal["manual", "cache_aware", "round_robin", "random"] = "manual"
    """Routing policy. `manual` keeps each session on one server, and so in its prefix cache."""
    startup_timeout_s: Seconds = 60.0
    """Timeout from its start until it answers."""
