"""Gateways as Ray actors (`gateway.kind=ray`): each is a `GatewayProcess`, spread over the cluster's machines.

Agents reach a gateway at its machine's address, or at `gateway.public_url`; gateways reach the router at this
machine's address. `model.path` must exist on each machine, for the tokenizer. A gateway's log and journal are written
on its own machine, unless the machines share the run's folder. A gateway that ends is restarted on its machine. The
loss of an actor or of a machine ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rollout_backend.config import GatewayConfig, RolloutConfig
from rollout_backend.core.session_ends import HeartbeatReport
from rollout_backend.errors import StartupError
from rollout_backend.gateway.stats import GatewayStats
from rollout_backend.serving.gateway_process import GatewayProcess, gateway_name
from rollout_backend.serving.ray_actor import RayActor, join_cluster


async def ray_shards(
    config: RolloutConfig,
    router_url: str,
    logs: Sequence[Path],
    secrets: tuple[str, str | None],
    journals: Sequence[Path | None],
    trainer_incarnation: str,
) -> list[RayGateway]:
    """Join the Ray cluster, unless this process has, and make one gateway per log.

    `secrets`: the secret of the session keys, and the secret of the seals.
    """
    import ray.util

    await join_cluster()
    if config.router.host in ("0.0.0.0", "::"):  # noqa: S104 - `router_url` is then a loopback address
        parts = urlsplit(router_url)
        router_url = parts._replace(netloc=f"{ray.util.get_node_ip_address()}:{parts.port}").geturl()
    secret, seal_secret = secrets

    def make(shard: int) -> Callable[[str], GatewayProcess]:
        log, journal = logs[shard].absolute(), journals[shard]
        return lambda node_ip: GatewayProcess(
            config,
            router_url,
            log,
            secret,
            seal_secret=seal_secret,
            shard=shard,
            node_ip=node_ip,
            journal=journal,
            trainer_incarnation=trainer_incarnation,
        )

    return [RayGateway(config.gateway, shard, make(shard)) for shard in range(len(logs))]


class RayGateway(RayActor):
    """A gateway on a machine of the cluster with a free CPU."""

    def __init__(self, config: GatewayConfig, shard: int, make: Callable[[str], GatewayProcess]) -> None:
        super().__init__(gateway_name(config, shard), make)
        self._config = config
        self.url = ""
        self.journal_id = ""

    async def start(self) -> None:
        timeout_s = self._config.startup_timeout_s
        try:
            if not self.url:  # a restart stays in the same actor
                await self.place(timeout_s)
        except TimeoutError:
            raise StartupError(
                f"{self._name}: no machine of the Ray cluster had a CPU free within {timeout_s:g} s: lower "
                "gateway.processes, or raise gateway.startup_timeout_s if the cluster is still growing"
            ) from None
        await self.call("start")
        self.url, self.journal_id = await self.read("url"), await self.read("journal_id")

    async def revoke(self, session_ids: Iterable[str]) -> None:
        await self.call("revoke", list(session_ids))

    async def adopt(self, session_ids: Iterable[str]) -> None:
        await self.call("adopt", list(session_ids))

    async def heartbeats(self) -> HeartbeatReport:
        heard: HeartbeatReport = await self.call("heartbeats")
        return heard

    async def pause(self) -> None:
        await self.call("pause")

    async def resume(self) -> None:
        await self.call("resume")

    async def set_adapters(self, versions: Mapping[str, int]) -> None:
        await self.call("set_adapters", dict(versions))

    async def stats(self) -> GatewayStats:
        stats: GatewayStats = await self.call("stats")
        return stats
