"""All gateways of a run: several processes, each with its own sessions, asked as if they were one.

What must always hold:

- A session belongs to one shard, which its id alone decides: its URL leads there, and the others refuse its key
  (421). So a trajectory is never in two places.
- One secret signs all keys. One shard that ends, ends the run: it takes along what its sessions sampled, and a shard
  started anew would hand out the rest of a trajectory as the whole of it. For that reason the secret is this life's
  own: a session of an earlier one cannot go on here. The secret that seals trajectories is the run's, and stays.
- Nothing that was started outlives `stop`, also where `start` fails.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from agent_wrapper.contract import ModelEndpoint
from rollout_backend.config import RolloutConfig
from rollout_backend.errors import ServingError
from rollout_backend.gateway.errors import ApiError
from rollout_backend.gateway.process import GatewayProcess, model_endpoint, public_url
from rollout_backend.gateway.stats import GatewayStats
from rollout_backend.gateway.tokens import SessionClaims


def shard_of(session_id: str, shards: int) -> int:
    """The number of the shard that a session belongs to, from 0."""
    digest = hashlib.blake2b(session_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % shards


def refuse_foreign(session_id: str, shard: int, shards: int) -> None:
    """Raises ApiError (421) at a shard that the session does not belong to; it names the right one."""
    own = shard_of(session_id, shards)
    if own != shard:
        raise ApiError(
            421,
            f"this is gateway {shard} of {shards}, and the session belongs to gateway {own} of {shards}: use the "
            "base_url of this rollout's request as it is",
            code="wrong_shard",
        )


class Shard(Protocol):
    """One of the gateways: a `GatewayProcess`, here or on another machine."""

    @property
    def url(self) -> str: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def wait(self) -> str: ...

    async def revoke(self, session_ids: Iterable[str]) -> None: ...

    async def stats(self) -> GatewayStats: ...


class GatewayFleet:
    """`gateway.processes` gateways between agents and the router at `router_url`. Logs go to `log_dir`.

    Without `seal_secret` trajectories carry no seal.
    """

    def __init__(
        self,
        config: RolloutConfig,
        router_url: str,
        log_dir: Path,
        secret: str | None = None,
        seal_secret: str | None = None,
    ) -> None:
        self._config = config
        self._router_url = router_url
        self._log_dir = log_dir
        self._secret = secret or secrets.token_urlsafe(48)
        self._seal_secret = seal_secret
        self._shards: list[Shard] = []

    @property
    def urls(self) -> tuple[str, ...]:
        """Where this side reaches each shard."""
        return tuple(shard.url for shard in self._shards)

    async def start(self) -> None:
        """Starts all of them at once and waits until they are healthy.

        Raises:
            StartupError: one of them did not come up, and why. Those that had started are stopped.
        """
        self._shards = await self._make()
        starting = [asyncio.create_task(shard.start()) for shard in self._shards]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await self.stop()
            raise

    async def stop(self) -> None:
        """Ends all of them. Does nothing if they never ran."""
        results = await asyncio.gather(*(shard.stop() for shard in self._shards), return_exceptions=True)
        _raise_first(results)

    async def wait(self) -> str:
        """Returns once one of them has ended, with which and how, and the end of its log."""
        waiting = [asyncio.create_task(shard.wait()) for shard in self._shards]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in waiting:
                task.cancel()

    def endpoint(self, claims: SessionClaims) -> ModelEndpoint:
        """The session's way to the model: the URL of its shard, and the key that opens it."""
        shard = shard_of(claims.session_id, len(self._shards))
        url = public_url(self._config.gateway, shard, self._shards[shard].url)
        return model_endpoint(url, self._config.model.served_name, self._secret, claims)

    async def revoke(self, session_ids: Iterable[str]) -> None:
        """Closes these sessions: their calls are aborted, and their keys open nothing any more.

        Raises:
            ServingError: a shard does not answer. The sessions of the others are closed.
        """
        if not self._shards:
            raise ServingError("the gateway is not running")
        dealt: dict[int, list[str]] = {}
        for session_id in session_ids:
            dealt.setdefault(shard_of(session_id, len(self._shards)), []).append(session_id)
        revoking = (self._shards[shard].revoke(ids) for shard, ids in dealt.items())
        _raise_first(await asyncio.gather(*revoking, return_exceptions=True))

    async def stats(self) -> GatewayStats:
        """Of all shards together. Raises ServingError if one does not answer."""
        return GatewayStats.total(await asyncio.gather(*(shard.stats() for shard in self._shards)))

    async def _make(self) -> list[Shard]:
        config = self._config
        numbers = range(config.gateway.processes)
        logs = [self._log_dir / ("gateway.log" if len(numbers) == 1 else f"gateway-{i}.log") for i in numbers]
        if config.gateway.kind == "ray":
            from rollout_backend.gateway.ray_shards import ray_shards  # ray is slow to import

            return [*await ray_shards(config, self._router_url, logs, self._secret, self._seal_secret)]
        return [
            GatewayProcess(config, self._router_url, logs[i], self._secret, seal_secret=self._seal_secret, shard=i)
            for i in numbers
        ]


def _raise_first(results: Iterable[BaseException | None]) -> None:
    for error in results:
        if error is not None:
            raise error
