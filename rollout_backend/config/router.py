"""The `router` section."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rollout_backend.config.section import Seconds, Section

RouterKind = Literal["sglang-router", "smg"]


class RouterConfig(Section):
    kind: RouterKind = "sglang-router"
    """The router program. `smg` is the successor of sglang-router and needs the extra `smg`."""
    host: str = "127.0.0.1"
    """Address to listen on. With `serving.engine=vllm` no router runs, and the list of servers is served here."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on. 0: any free port."""
    policy: Literal["manual", "cache_aware", "round_robin", "random"] = "manual"
    """Routing policy. `manual` keeps each session, or each group, on one server, and so in its prefix cache."""
    affinity: Literal["session", "group"] = "session"
    """What `manual`, and the gateways with `serving.engine=vllm`, keep on one server: each session, or all sessions
    of a group, which share a prompt."""
    startup_timeout_s: Seconds = 60.0
    """Timeout from its start until it answers."""

    @model_validator(mode="after")
    def _policy_has_affinity(self) -> Self:
        if self.affinity != "session" and self.policy != "manual":
            raise ValueError(
                f"affinity={self.affinity} has no effect with policy={self.policy}, which knows no sessions: use "
                "policy=manual, or remove affinity"
            )
        return self
