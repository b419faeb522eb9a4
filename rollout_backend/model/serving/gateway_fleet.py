"""Run all gateways of a run: several processes, each with its own sessions, addressed as one.

Invariants:

- A session's id determines its shard: its URL leads there, and the other shards refuse its key (421). A trajectory is
  therefore never in two places.
- One secret signs all keys, and a key names the journal in which its session began. A shard that ends is restarted at
  the same address and resumes from its journal. If the journal is lost, the shard refuses those keys, because it
  would return the rest of a trajectory as the whole.
- A shard that hangs is restarted like one that ends: it is probed like an engine.
- The run ends if a shard is lost after `serving.max_restarts` restarts within `serving.restart_window_s`.
- No process started by the fleet outlives `stop`, even if `start` fails.
"""

import asyncio
import functools
import hashlib
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

from tenacity import wait_fixed

from agent_wrapper.contract import ModelEndpoint
from rollout_backend.base.addresses import is_loopback
from rollout_backend.base.retry import retry_until
from rollout_backend.config import RolloutConfig
from rollout_backend.core.session_ends import HeartbeatReport
from rollout_backend.core.session_key import SessionClaims, shard_of
from rollout_backend.errors import RolloutBackendError, ServingError
from rollout_backend.model.gateway.stats import GatewayStats
from rollout_backend.model.serving.gateway_process import GatewayProcess, public_url
from rollout_backend.model.serving.ray_servers import RayGateway, router_url_in_cluster
from rollout_backend.model.serving.run_secret import model_endpoint
from rollout_backend.model.serving.supervisor import (
    OnEvent,
    Probing,
    RestartLimits,
    Supervisor,
    SupervisorGroup,
    cancel_all,
)

# Three probes of 20 s find a hung shard. Its restart may take another minute.
_INSTRUCT_S = 150.0


Shard = GatewayProcess | RayGateway
_T = TypeVar("_T")


class _GatewaySupervisor(Supervisor):
    def __init__(self, name: str, shard: Shard, limits: RestartLimits, on_event: OnEvent, probing: Probing) -> None:
        super().__init__(name, limits, on_event, probing)
        self.shard = shard
        self._probe_timeout_s = probing.timeout_s

    async def start_server(self) -> None:
        await self.shard.start()

    async def wait_ended(self) -> str:
        return await self.shard.wait()

    async def is_responding(self) -> bool:
        try:
            async with asyncio.timeout(self._probe_timeout_s):
                return await self.shard._healthy()
        except TimeoutError:
            return False


class GatewayFleet:
    """`gateway.processes` gateways between agents and the router at `router_url`. Logs go to `log_dir`."""

    def __init__(
        self,
        config: RolloutConfig,
        router_url: str,
        log_dir: Path,
        secret: str | None = None,
        seal_secret: str | None = None,
        *,
        journals: Path,
        on_event: OnEvent = lambda event: None,
        probing: Probing | None = None,
    ) -> None:
        """Initialize.

        `secret` signs the keys; the default is random. Without `seal_secret`, trajectories carry no seal. `journals`
        is the folder of the journals that let sessions outlive their gateways.
        """
        self._config = config
        self._router_url = router_url
        self._log_dir = log_dir
        self._secret = secret or secrets.token_urlsafe(48)
        self._seal_secret = seal_secret
        self._journals = journals
        self._trainer_incarnation = secrets.token_hex(8)
        self._on_event = on_event
        self._probing = probing or Probing()
        self._gateways: list[_GatewaySupervisor] = []
        self._supervisors = SupervisorGroup()

    @property
    def _shards(self) -> list[Shard]:
        return [gateway.shard for gateway in self._gateways]

    @property
    def urls(self) -> tuple[str, ...]:
        """URL of each shard for the training side."""
        return tuple(shard.url for shard in self._shards)

    @property
    def public_urls(self) -> tuple[str, ...]:
        """URL of each shard for agents."""
        return tuple(self._public_url(i) for i in range(len(self._gateways)))

    @property
    def identity(self) -> str:
        """A digest of the gateways' addresses and journals. Sessions can resume while it stays the same."""
        parts = [f"{url} {shard.journal_id}" for url, shard in zip(self.public_urls, self._shards, strict=True)]
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()

    async def start(self) -> None:
        """Start all gateways concurrently, wait until they are healthy, then restart each one that ends.

        Raises:
            StartupError: a gateway failed to start. The others are stopped.
        """
        serving = self._config.serving
        limits = RestartLimits(serving.max_restarts, serving.restart_window_s)
        self._gateways = [
            _GatewaySupervisor(name, shard, limits, self._on_event, self._probing)
            for name, shard in zip(self._names, await self._make(), strict=True)
        ]
        starting = [asyncio.create_task(gateway.start()) for gateway in self._gateways]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            await cancel_all(starting)
            await self.stop()
            raise
        for gateway in self._gateways:
            self._supervisors.add(gateway)

    async def stop(self) -> None:
        """Stop all gateways. Does nothing if they never ran."""
        await self._supervisors.stop()
        results = await asyncio.gather(*(shard.stop() for shard in self._shards), return_exceptions=True)
        _raise_first(results)

    async def failed(self) -> NoReturn:
        """Wait until a gateway is lost after its last restart.

        Raises:
            StartupError: names the gateway and the reason, with the end of its log.
        """
        await self._supervisors.failed()

    @property
    def _names(self) -> list[str]:
        count = self._config.gateway.processes
        return ["gateway"] if count == 1 else [f"gateway-{i}" for i in range(count)]

    def endpoint(self, claims: SessionClaims) -> ModelEndpoint:
        """Return a session's model endpoint: the URL of its shard, and its key."""
        shard = shard_of(claims.session_id, len(self._gateways))
        claims = claims.model_copy(
            update={"journal_id": self._shards[shard].journal_id, "trainer_incarnation": self._trainer_incarnation}
        )
        return model_endpoint(
            self._public_url(shard),
            self._config.model.served_name,
            self._secret,
            claims,
            key_in_path=self._config.gateway.key_in_path,
        )

    def trajectory_url(self, session_id: str) -> str:
        """Return the URL at which the training side fetches a session's trajectory."""
        return f"{self.urls[shard_of(session_id, len(self._gateways))]}/v1/rollout/trajectory"

    def _public_url(self, shard: int) -> str:
        return public_url(self._config.gateway, shard, self._shards[shard].url)

    async def revoke(self, session_ids: Iterable[str]) -> None:
        """Close these sessions: abort their calls and refuse their keys.

        Raises:
            ServingError: a shard did not answer within 150 s. The sessions of the other shards are closed.
        """
        await self._instruct_owners(session_ids, lambda shard, ids: shard.revoke(ids))

    async def adopt(self, session_ids: Iterable[str]) -> None:
        """Resume these sessions, which began before the trainer restarted. Other earlier sessions continue to wait.

        Raises:
            ServingError: a shard did not answer within 150 s. The sessions of the other shards resume.
        """
        await self._instruct_owners(session_ids, lambda shard, ids: shard.adopt(ids))

    async def _instruct_owners(
        self, session_ids: Iterable[str], send: Callable[[Shard, list[str]], Awaitable[None]]
    ) -> None:
        by_shard: dict[int, list[str]] = {}
        for session_id in session_ids:
            by_shard.setdefault(shard_of(session_id, len(self._gateways)), []).append(session_id)

        async def instruct(number: int, ids: list[str]) -> None:
            await _instruct(self._gateways[number], lambda shard: send(shard, ids))

        sends = (instruct(number, ids) for number, ids in by_shard.items())
        _raise_first(await asyncio.gather(*sends, return_exceptions=True))

    async def heartbeats(self) -> list[HeartbeatReport | None]:
        """Return each shard's heartbeats since the last call; None for a shard that does not answer."""
        return await _answers(shard.heartbeats() for shard in self._shards)

    async def reports(self) -> dict[str, Any]:
        """Return what agents of SageMaker's job runtime reported, by session and without the rewards. A shard that
        does not answer is left out."""
        answers = await _answers(shard.reports() for shard in self._shards)
        return {name: report for answer in answers for name, report in (answer or {}).items()}

    async def report_of(self, session_id: str) -> dict[str, Any] | None:
        """Return what the session's agent has reported, or None. Raises ServingError if its shard does not answer."""
        return await self._shards[shard_of(session_id, len(self._gateways))].report_of(session_id)

    @property
    def same_machine(self) -> bool:
        """True if agents must run on this machine, because their model endpoint is a loopback address."""
        return self._config.relay is None and all(
            is_loopback(urlsplit(url).hostname or "") for url in self.public_urls
        )

    async def pause(self) -> None:
        """Hold all model calls, even in a shard that restarts. Return once no call is at an engine.

        Raises:
            ServingError: a shard did not answer within 150 s.
        """
        await self._instruct_all(lambda shard: shard.pause())

    async def resume(self) -> None:
        """Undo `pause`. Raises ServingError as `pause` does."""
        await self._instruct_all(lambda shard: shard.resume())

    async def set_adapters(self, versions: Mapping[str, int]) -> None:
        """Set the version of each LoRA adapter that model calls name, even in a shard that restarts.

        Raises:
            ServingError: a shard did not answer within 150 s.
        """
        await self._instruct_all(lambda shard: shard.set_adapters(versions))

    async def _instruct_all(self, send: Callable[[Shard], Awaitable[None]]) -> None:
        sends = (_instruct(gateway, send) for gateway in self._gateways)
        _raise_first(await asyncio.gather(*sends, return_exceptions=True))

    async def stats(self) -> GatewayStats:
        """Return the sum over all shards, each since its last start. Raises ServingError if one does not answer."""
        return GatewayStats.total(await asyncio.gather(*(shard.stats() for shard in self._shards)))

    async def _make(self) -> list[Shard]:
        config, count = self._config, self._config.gateway.processes
        log_dir, router_url = self._log_dir, self._router_url
        on_ray = config.gateway.kind == "ray"
        if on_ray:
            log_dir, router_url = log_dir.absolute(), await router_url_in_cluster(config, router_url)
        makes = [
            functools.partial(
                GatewayProcess,
                config,
                router_url,
                log_dir / f"{name}.log",
                self._secret,
                seal_secret=self._seal_secret,
                shard=i,
                # With another number of processes, sessions map to other shards, so the journals are separate.
                journal=self._journals.absolute() / f"{i}-of-{count}",
                trainer_incarnation=self._trainer_incarnation,
            )
            for i, name in enumerate(self._names)
        ]
        if on_ray:
            return [RayGateway(config.gateway, i, make) for i, make in enumerate(makes)]
        return [make() for make in makes]


async def _instruct(gateway: _GatewaySupervisor, send: Callable[[Shard], Awaitable[None]]) -> None:
    """Send an instruction to a shard, and retry while it restarts."""

    async def attempt() -> ServingError | None:
        try:
            await send(gateway.shard)
        except ServingError as error:
            if gateway.gave_up:
                return error
            raise
        return None

    until = asyncio.get_running_loop().time() + _INSTRUCT_S
    if (error := await retry_until(until, attempt, ServingError, wait_fixed(0.5))) is not None:
        raise error


async def _answers(asked: Iterable[Awaitable[_T]]) -> list[_T | None]:
    """Return the answer of each shard; None for a shard that does not answer."""
    answers = await asyncio.gather(*asked, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, RolloutBackendError):
            raise answer
    return [None if isinstance(answer, BaseException) else answer for answer in answers]


def _raise_first(results: Iterable[BaseException | None]) -> None:
    for error in results:
        if error is not None:
            raise error
