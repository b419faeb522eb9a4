"""Gateways as Ray actors: each a `GatewayProcess` on one of the cluster's machines, spread over them.

Agents reach a gateway at its machine's address, or at `gateway.public_url`; gateways reach the router at this
machine's. `model.path` must exist on each machine, for the tokenizer; a gateway's log and its journal are written on
its own, unless the run's folder is one that the machines share. A gateway that ends is started again on its machine.
An actor or a machine that ends, ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from rollout_backend.config import GatewayConfig, RolloutConfig
from rollout_backend.errors import StartupError
from rollout_backend.gateway.process import GatewayProcess, gateway_name
from rollout_backend.gateway.stats import GatewayStats
from rollout_backend.serving.ray_actor import RayActor, join_cluster


async def ray_shards(
    config: RolloutConfig,
    router_url: str,
    logs: Sequence[Path],
    secrets: tuple[str, str | None],
    journals: Sequence[Path | None],
    life: str,
) -> list[RayGateway]:
    """Joins the cluster, if this process has not done so, and makes one gateway for each log. `secrets`: that of the
    keys, and that of the seals."""
    import ray.util

    await join_cluster()
    if config.router.host in ("0.0.0.0", "::"):  # noqa: S104 - listened on; `router_url` is good on this machine only
        parts = urlsplit(router_url)
        router_url = parts._replace(netloc=f"{ray.util.get_node_ip_address()}:{parts.port}").geturl()
    secret, seal_secret = secrets
    return [
        RayGateway(
            config.gateway,
            i,
            partial(
                GatewayProcess,
                config,
                router_url,
                log.absolute(),
                secret,
                seal_secret=seal_secret,
                shard=i,
                journal=journal,
                life=life,
            ),
        )
        for i, (log, journal) in enumerate(zip(logs, journals, strict=True))
    ]


class RayGateway:
    """A shard on whichever machine of the cluster has a CPU free."""

    def __init__(self, config: GatewayConfig, shard: int, gateway: Callable[..., GatewayProcess]) -> None:
        """`gateway` makes it, on the machine with the `node_ip` that it is given."""
        self._config = config
        self._name = gateway_name(config, shard)
        self._actor = RayActor(self._name, _Host, (gateway,), spread=True)
        self.url = ""
        self.epoch = ""

    async def start(self) -> None:
        timeout_s = self._config.startup_timeout_s
        try:
            if not self.url:  # else it has its place
                await self._actor.place(timeout_s)
        except TimeoutError:
            raise StartupError(
                f"{self._name}: no machine of the Ray cluster had a CPU free within {timeout_s:g} s: lower "
                "gateway.processes, or raise gateway.startup_timeout_s if the cluster is still growing"
            ) from None
        self.url, self.epoch = await self._actor.ask("start")

    async def stop(self) -> None:
        await self._actor.stop()

    async def wait(self) -> str:
        try:
            ended: str = await self._actor.ask("wait")
        except StartupError as error:
            return str(error)
        return ended

    async def revoke(self, session_ids: Iterable[str]) -> None:
        await self._actor.ask("revoke", list(session_ids))

    async def adopt(self, session_ids: Iterable[str]) -> None:
        await self._actor.ask("adopt", list(session_ids))

    async def stats(self) -> GatewayStats:
        stats: GatewayStats = await self._actor.ask("stats")
        return stats


class _Host:
    """The actor: a `GatewayProcess` on the machine that Ray chose."""

    def __init__(self, gateway: Callable[..., GatewayProcess]) -> None:
        import ray.util

        self._gateway = gateway(node_ip=ray.util.get_node_ip_address())

    async def start(self) -> tuple[str, str]:
        await self._gateway.start()
        return self._gateway.url, self._gateway.epoch

    async def stop(self) -> None:
        await self._gateway.stop()

    async def wait(self) -> str:
        return await self._gateway.wait()

    async def tail(self) -> str:
        return await self._gateway.tail()

    async def revoke(self, session_ids: list[str]) -> None:
        await self._gateway.revoke(session_ids)

    async def adopt(self, session_ids: list[str]) -> None:
        await self._gateway.adopt(session_ids)

    async def stats(self) -> GatewayStats:
        return await self._gateway.stats()
