"""All gateways of a run: several processes, each with its own sessions, asked as if they were one.

What must always hold:

- A session belongs to one shard, which its id alone decides: its URL leads there, and the others refuse its key
  (421). So a trajectory is never in two places.
- One secret signs all keys, and a key names the journal that its session was begun in. A shard that ends is started
  again at the same address and goes on with its journal; where that is lost it refuses those keys, for it would hand
  out the rest of a trajectory as the whole of it.
- A shard that was restarted `serving.max_restarts` times and is gone again ends the run; so does one that has no
  journal to go on with.
- Nothing that was started outlives `stop`, also where `start` fails.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_fixed

from agent_wrapper.contract import ModelEndpoint
from rollout_backend.config import RolloutConfig
from rollout_backend.errors import ServingError, StartupError
from rollout_backend.gateway.errors import ApiError
from rollout_backend.gateway.process import GatewayProcess, model_endpoint, public_url
from rollout_backend.gateway.stats import GatewayStats
from rollout_backend.gateway.tokens import SessionClaims
from rollout_backend.serving.fleet import EventKind, ServingEvent

_TELL_S = 60.0  # for a shard that is just being started again


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

    @property
    def epoch(self) -> str: ...

    async def start(self) -> None:
        """Also once it has ended."""
        ...

    async def stop(self) -> None: ...

    async def wait(self) -> str: ...

    async def revoke(self, session_ids: Iterable[str]) -> None: ...

    async def adopt(self, session_ids: Iterable[str]) -> None: ...

    async def stats(self) -> GatewayStats: ...


@dataclass
class _Slot:
    name: str
    shard: Shard
    restarts: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # for good


class GatewayFleet:
    """`gateway.processes` gateways between agents and the router at `router_url`. Logs go to `log_dir`."""

    def __init__(
        self,
        config: RolloutConfig,
        router_url: str,
        log_dir: Path,
        secret: str | None = None,
        seal_secret: str | None = None,
        journals: Path | None = None,
        on_event: Callable[[ServingEvent], None] = lambda event: None,
    ) -> None:
        """`secret` signs the keys; by default one of this life's own. Without `seal_secret` trajectories carry no
        seal. `journals` is the folder that sessions outlive their gateways in; None: they end with them. `on_event`
        is told what happens to them while `wait` is waited for."""
        self._config = config
        self._router_url = router_url
        self._log_dir = log_dir
        self._secret = secret or secrets.token_urlsafe(48)
        self._seal_secret = seal_secret
        self._journals = journals
        self._life = secrets.token_hex(8)
        self._on_event = on_event
        self._slots: list[_Slot] = []

    @property
    def _shards(self) -> list[Shard]:
        return [slot.shard for slot in self._slots]

    @property
    def urls(self) -> tuple[str, ...]:
        """Where this side reaches each shard."""
        return tuple(shard.url for shard in self._shards)

    @property
    def identity(self) -> str:
        """The same if and only if an agent's session can go on: addresses and journals are. Empty if none can."""
        if self._journals is None:
            return ""
        parts = [f"{self._public_url(i)} {shard.epoch}" for i, shard in enumerate(self._shards)]
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()

    async def start(self) -> None:
        """Starts all of them at once and waits until they are healthy.

        Raises:
            StartupError: one of them did not come up, and why. Those that had started are stopped.
        """
        self._slots = [_Slot(*made) for made in zip(self._names, await self._make(), strict=True)]
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
        """Starts those again that end. Returns once one of them is gone for good, with which and how, and the end of
        its log."""
        mending = [asyncio.create_task(self._mend(slot)) for slot in self._slots]
        try:
            done, _ = await asyncio.wait(mending, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in mending:
                task.cancel()
            await asyncio.gather(*mending, return_exceptions=True)

    async def _mend(self, slot: _Slot) -> str:
        most = self._config.serving.max_restarts if self._journals is not None else 0
        while True:
            why = await slot.shard.wait()
            self._report(slot, "died", why)
            restarted = False
            while not restarted:
                if slot.restarts >= most:
                    slot.gone.set()
                    self._report(slot, "gave_up", why)
                    return why if not most else f"after {most} restarts (serving.max_restarts) {why}"
                slot.restarts += 1
                try:
                    await slot.shard.start()
                    restarted = True
                except StartupError as error:
                    why = str(error)
                    self._report(slot, "died", why)
            self._report(slot, "restarted")

    @property
    def _names(self) -> list[str]:
        count = self._config.gateway.processes
        return ["gateway"] if count == 1 else [f"gateway-{i}" for i in range(count)]

    def _report(self, slot: _Slot, kind: EventKind, detail: str = "") -> None:
        self._on_event(ServingEvent(time.time(), slot.name, kind, detail))

    def endpoint(self, claims: SessionClaims) -> ModelEndpoint:
        """The session's way to the model: the URL of its shard, and the key that opens it."""
        shard = shard_of(claims.session_id, len(self._slots))
        claims = claims.model_copy(update={"epoch": self._shards[shard].epoch, "life": self._life})
        return model_endpoint(self._public_url(shard), self._config.model.served_name, self._secret, claims)

    def _public_url(self, shard: int) -> str:
        return public_url(self._config.gateway, shard, self._shards[shard].url)

    async def revoke(self, session_ids: Iterable[str]) -> None:
        """Closes these sessions: their calls are aborted, and their keys open nothing any more.

        Raises:
            ServingError: a shard does not answer, and is not back soon. The sessions of the others are closed.
        """
        await self._tell(session_ids, lambda shard, ids: shard.revoke(ids))

    async def adopt(self, session_ids: Iterable[str]) -> None:
        """Lets these sessions go on, which were begun in an earlier life of the trainer; the others wait.

        Raises:
            ServingError: a shard does not answer, and is not back soon. The sessions of the others go on.
        """
        await self._tell(session_ids, lambda shard, ids: shard.adopt(ids))

    async def _tell(self, session_ids: Iterable[str], tell: Callable[[Shard, list[str]], Awaitable[None]]) -> None:
        if not self._slots:
            raise ServingError("the gateway is not running")
        dealt: dict[int, list[str]] = {}
        for session_id in session_ids:
            dealt.setdefault(shard_of(session_id, len(self._slots)), []).append(session_id)
        telling = (_persist(self._slots[shard], ids, tell) for shard, ids in dealt.items())
        _raise_first(await asyncio.gather(*telling, return_exceptions=True))

    async def stats(self) -> GatewayStats:
        """Of all shards together, each since its last start. Raises ServingError if one does not answer."""
        return GatewayStats.total(await asyncio.gather(*(shard.stats() for shard in self._shards)))

    async def _make(self) -> list[Shard]:
        config = self._config
        numbers = range(config.gateway.processes)
        logs = [self._log_dir / f"{name}.log" for name in self._names]
        # Another number of processes deals the sessions otherwise, and so has other journals.
        journals = [
            self._journals.absolute() / f"{i}-of-{len(numbers)}" if self._journals is not None else None
            for i in numbers
        ]
        if config.gateway.kind == "ray":
            from rollout_backend.gateway.ray_shards import ray_shards  # ray is slow to import

            both = self._secret, self._seal_secret
            return [*await ray_shards(config, self._router_url, logs, both, journals, self._life)]
        return [
            GatewayProcess(
                config,
                self._router_url,
                logs[i],
                self._secret,
                seal_secret=self._seal_secret,
                shard=i,
                journal=journals[i],
                life=self._life,
            )
            for i in numbers
        ]


async def _persist(slot: _Slot, session_ids: list[str], tell: Callable[[Shard, list[str]], Awaitable[None]]) -> None:
    """Tells a shard, also one that is just being started again."""
    async for attempt in AsyncRetrying(
        retry=retry_if_exception(lambda error: isinstance(error, ServingError) and not slot.gone.is_set()),
        stop=stop_after_delay(_TELL_S),
        wait=wait_fixed(0.5),
        reraise=True,
    ):
        with attempt:
            await tell(slot.shard, session_ids)


def _raise_first(results: Iterable[BaseException | None]) -> None:
    for error in results:
        if error is not None:
            raise error
