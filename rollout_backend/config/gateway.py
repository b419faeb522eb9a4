"""The `gateway` and `relay` sections."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator

from rollout_backend.base.addresses import ListenAddress, is_loopback
from rollout_backend.config.section import HttpUrl, Seconds, Section, check_address, matching

if TYPE_CHECKING:
    from rollout_backend.config.rollout import RolloutConfig

AUTO = "auto"
"""The value of `public_url` with which the run finds the address."""


_SESSIONS_EACH = 1024


def _processes(value: object) -> object:
    """Return 0 for `auto`, which `GatewayConfig.sized` replaces."""
    if value in (0, "0"):
        raise ValueError("must be at least 1, or auto")
    return 0 if value == AUTO else value


class GatewayConfig(Section):
    kind: Literal["process", "ray"] = "process"
    """`process`: on this machine. `ray`: one actor per gateway process, spread over the cluster's machines."""
    processes: Annotated[int, BeforeValidator(_processes), Field(ge=0, le=1024)] = 1
    """Number of gateway processes. Each session belongs to one of them, which holds what the session sampled. `auto`:
    one for 1,024 of `runtime.max_sessions`, at most one per core but one, and one with a `public_url` that names no
    process."""
    host: ListenAddress = "127.0.0.1"
    """Address to listen on. With `ray`, a loopback address means the address of the machine that runs the gateway."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the first process; the others use the ports that follow. 0: any free ports."""
    public_url: str | None = None
    """URL under which agents reach the gateway, if it is not the gateway's own address (a load balancer, a tunnel).
    `{host}` in it is the address of the machine on which the gateway runs, as in `http://{host}:8000`. With several
    processes it contains `{shard}`, the number of a process from 0, or `{port}`. `auto`: the relay's, or else
    `http://{host}:{port}`, for agents in the same network; the gateway then listens there."""
    key_in_path: bool = False
    """Put the session key into the `base_url` of agents, as /k/KEY/v1, for agents that hard-code an API key. Proxies
    between agents and gateway may log URLs: see [gateway.md](gateway.md#agents-that-hard-code-an-api-key)."""
    tls_certificate: Path | None = None
    """PEM file of the certificate chain, to serve HTTPS. Default: plain HTTP."""
    tls_key: Path | None = None
    """PEM file of the certificate's key, without a passphrase."""
    agent_sampling_overrides: frozenset[Literal["temperature", "top_p", "top_k", "seed"]] = frozenset()
    """Sampling settings that an agent may override. All others come from the trainer."""
    session_tokens: int | None = Field(default=1_000_000, ge=1)
    """Maximum tokens that one session may sample over all its calls, to stop a runaway session. The reply that
    reaches it is cut, and the next call is answered 400. Concurrent calls each get the budget that was left when they
    began. Null: no limit."""
    forced_tools: Literal["constrain", "as_auto"] = "constrain"
    """What happens to calls that force a tool call (`tool_choice` required, any, or a tool). `constrain`: see
    `constrained_decoding`. `as_auto`: the model decides, so that the reply can be trained, and may answer without a
    call; for agents whose framework forces a tool in every call."""
    constrained_decoding: Literal["allow", "refuse"] = "allow"
    """What happens to calls with a `tool_choice` or `response_format` that forces a format. `allow`: the engine
    constrains the reply; its tokens are not sampled from the model's own distribution and are not trained. `refuse`:
    the call is answered 400."""
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    """Maximum size of a model call's request body. Without images it is also at most 1 MiB and 32 bytes per token of
    the model's context; a larger one is answered 400, as a conversation that exceeds the context."""
    max_images: int = Field(default=16, ge=0)
    """Maximum images in a model call's request, including its history, if the model accepts images. 0: none."""
    max_image_pixels: int = Field(default=16 * 1024 * 1024, ge=1)
    """Maximum width times height of an image. A larger one is refused before it is decompressed."""
    session_image_bytes: int = Field(default=32 * 1024 * 1024, ge=1024)
    """Maximum bytes of all images in one session's calls, each counted once. They are part of the session's result,
    so `storage.max_result_bytes` must have room for them."""
    max_concurrent_calls: int = Field(default=1024, ge=1)
    """Maximum model calls in flight in one process. Further ones wait in turn, for up to `timeouts.model_call_s`."""
    max_session_calls: int = Field(default=64, ge=1)
    """Maximum choices in flight of one session, at most half of `max_concurrent_calls`; further calls wait. A call of
    several choices starts if the session has no other in flight."""
    max_queued_per_engine: int = Field(default=512, ge=1)
    """Maximum average number of requests waiting in an engine's queue; above it, calls wait in the gateways. Applies
    if engines report their load."""
    startup_timeout_s: Seconds = 60.0
    """Timeout from its start until it answers."""
    secret: SecretStr | None = Field(default=None, min_length=32)
    """Seals what was sampled, so that a container cannot alter it, and signs the run's session keys. Set it in the
    environment, as ROLLOUT__GATEWAY__SECRET. Default: generated for the run and stored in OUTPUT_DIR/.secrets. A
    run that resumes on another machine needs the same secret; otherwise its unfinished step starts again."""
    previous_secret: SecretStr | None = Field(default=None, min_length=32)
    """The secret that `secret` replaces. Its seals and session keys stay valid, and nothing is signed with it. Remove
    it once all steps that began with it have ended."""
    require_seal: bool = True
    """Require the gateway's seal on every trainable result. False: trust the agents' containers."""

    @model_validator(mode="after")
    def _shards(self) -> Self:
        url = "" if self.public_url in (None, AUTO) else str(self.public_url)
        if self.public_url == AUTO and self.tls_certificate is not None:
            raise ValueError("public_url=auto is an address, for which no certificate is valid: set it to the name")
        if url and self.processes > 1 and "{shard}" not in url and "{port}" not in url:
            raise ValueError(
                f"public_url must distinguish {self.processes} processes: put {{shard}} or {{port}} into it, such as "
                "https://gateway-{shard}.example.com, or set processes=1"
            )
        if url and not re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", url):
            raise ValueError(f"public_url={url!r} is not a URL such as https://gateway.example.com")
        if url:
            check_address(re.sub(r"\{\w+\}", "1", url))
        if url.rstrip("/").endswith("/v1"):
            raise ValueError(f"public_url must not end in /v1, which agents' URLs append: {url}")
        if "{port}" in url and not self.port:
            raise ValueError(
                "public_url contains {port}, so port must be set: a port that changes has no public address"
            )
        if self.port and self.port + self.processes - 1 > 65535:
            raise ValueError(f"port={self.port} leaves no room for {self.processes} processes: lower it")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together: set both, or neither")
        return self

    def sized(self, sessions: int, cores: int) -> Self:
        """Return the section with a number of processes for this many sessions in place of `auto`."""
        if self.processes:
            return self
        wanted = min(math.ceil(sessions / _SESSIONS_EACH), cores - 1 if self.kind == "process" else 1024)
        url = "" if self.public_url in (None, AUTO) else str(self.public_url)
        fits = not url or "{shard}" in url or "{port}" in url
        if self.port:
            wanted = min(wanted, 65536 - self.port)
        return self.model_copy(update={"processes": max(1, wanted) if fits else 1})

    def without_formats_and_images(self) -> Self:
        """Return the section for an engine that has neither, except where the settings ask for them."""
        refused = {"constrained_decoding": "refuse", "max_images": 0}
        unset = refused.keys() - self.model_fields_set
        return self.model_copy(update={name: refused[name] for name in unset})

    def check_run(self, run: RolloutConfig) -> None:
        if self.kind != "ray":
            return
        if is_loopback(run.router.host):
            raise ValueError(
                "gateway.kind=ray puts gateways on other machines, which must reach the router: "
                "set router.host to 0.0.0.0, or to an address that this machine has among them"
            )
        if run.serving.engine == "vllm" and run.serving.kind == "process":
            raise ValueError(
                "gateway.kind=ray puts gateways on other machines, which must reach each vLLM server: with "
                "serving.kind=process they listen on 127.0.0.1 only, so use gateway.kind=process or "
                "serving.kind=external"
            )


class RelayConfig(Section):
    """For agents that cannot reach the training side: a relay near them, to which the training side connects.
    Default: none. See [relay.md](relay.md)."""

    url: Annotated[
        str,
        matching(r"wss?://[^/?#]+(/[^?#]*)?", "a URL of the form wss://HOST or ws://HOST:PORT/PATH"),
        AfterValidator(check_address),
    ]
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

    def check_run(self, run: RolloutConfig) -> None:
        if run.gateway.public_url not in (None, AUTO) or run.gateway.tls_certificate:
            raise ValueError(
                "with relay, agents reach the relay and not the gateway: leave out gateway.public_url and "
                "gateway.tls_certificate, and set relay.public_url where it differs from relay.url"
            )

    @property
    def agents_url(self) -> str:
        """Return the URL under which agents reach the relay."""
        return (self.public_url or self.own_url).rstrip("/")

    @property
    def own_url(self) -> str:
        """Return the URL under which the training side reaches the relay by plain HTTP calls."""
        return re.sub("^ws", "http", self.url).rstrip("/")
