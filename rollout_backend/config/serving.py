"""The `serving` section.

To add a kind of engine, write a subclass of `EngineFactory` in a module of `rollout_backend/serving/`, and add its
import path to `ENGINE_KINDS`. A kind that is not in `ENGINE_KINDS` is the import path of such a subclass in any
package, such as `my_package.my_engine.MyEngineFactory`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from rollout_backend.config.section import Seconds, Section, import_kind, kind_choices

ENGINE_KINDS: Mapping[str, str] = {
    "process": "rollout_backend.serving.local_engine.LocalEngineFactory",
    "ray": "rollout_backend.serving.ray_engine.RayEngineFactory",
    "external": "rollout_backend.serving.external_engine.ExternalEngineFactory",
}
"""Import path of the `EngineFactory` of each kind. It is imported when a run starts, because Ray is slow to
import."""


class ServingConfig(Section):
    kind: str = Field(
        default="process",
        json_schema_extra={"anyOf": [{"enum": [*ENGINE_KINDS]}, {"type": "string", "format": "import path"}]},
    )
    """`process`: SGLang servers on this machine. `ray`: one actor per server, placed on the cluster's GPUs.
    `external`: servers at `urls` that somebody else operates. Any other value is the import path of an
    `EngineFactory` subclass in your own package."""
    servers: int = Field(default=1, ge=1)
    """Number of servers, for `process` and `ray`."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Device of the servers."""
    python: Path | None = None
    """Python interpreter of the environment that has SGLang. Default: for `cpu` the one that `rollout engine install`
    created, else the interpreter of this process."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type of weights and computation."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs per server."""
    threads: int = Field(default=1, ge=1)
    """Threads per server, on the CPU."""
    max_running_requests: int = Field(default=64, ge=1)
    """Concurrent requests per server; further requests wait in the server."""
    max_total_tokens: int | None = Field(default=None, ge=1024)
    """Tokens in a server's cache. Default: 32,768 on the CPU, what fits on a GPU."""
    extra_args: tuple[str, ...] = ()
    """Arguments appended to SGLang's command line."""
    urls: tuple[str, ...] = ()
    """URLs of the servers, for `external`."""
    startup_timeout_s: Seconds = 300.0
    """Timeout from a server's start until it answers."""
    max_restarts: int = Field(default=3, ge=0)
    """Maximum restarts of one engine, router or gateway within `restart_window_s`. An engine that exceeds it stays
    down until the window allows another restart, while the other engines serve. The run stops, with the end of a log,
    once no engine is left, or when the router or a gateway exceeds it."""
    restart_window_s: Seconds = 3600.0
    """How long a restart counts towards `max_restarts`."""

    @field_validator("kind")
    @classmethod
    def _is_known(cls, kind: str) -> str:
        if kind not in ENGINE_KINDS:
            import_kind(kind, kind_choices(ENGINE_KINDS, "an EngineFactory subclass"))
        return kind

    @model_validator(mode="after")
    def _kinds(self) -> Self:
        if (self.kind == "external") != bool(self.urls):
            raise ValueError("urls belong to kind=external, and only to it")
        if self.kind == "ray" and self.device == "cpu":
            raise ValueError("kind=ray places servers on GPUs; on the CPU use kind=process")
        return self
