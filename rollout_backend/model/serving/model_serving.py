"""Serve a run's model to its agents: engines, router, gateways, and the dialer to a relay.

Invariants:

- each part starts after the parts to which it forwards, and stops before them;
- no part outlives `stop`, even if `start` failed or was cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from agent_wrapper.shared.threads import in_thread
from rollout_backend.base.disk import call_disk
from rollout_backend.config import RelayConfig, RolloutConfig
from rollout_backend.core.adapter import NamedAdapter
from rollout_backend.errors import ConfigError, ServingError, StartupError, WeightUpdateFailed
from rollout_backend.model.relay.protocol import new_id
from rollout_backend.model.relay.relay_settings import REFUSED, DialerSettings
from rollout_backend.model.serving.adapters import AdapterStore, AdapterUpdate
from rollout_backend.model.serving.engine_fleet import EngineFleet
from rollout_backend.model.serving.gateway_fleet import GatewayFleet
from rollout_backend.model.serving.gateway_process import public_gateway_config
from rollout_backend.model.serving.run_secret import key_secret
from rollout_backend.model.serving.server_process import ServerProcess
from rollout_backend.model.serving.supervisor import OnEvent, RestartLimits, Supervisor
from rollout_backend.model.serving.weights import WeightStore, WeightUpdate

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class RunPhase(StrEnum):
    """The phases of a run, in order. A run that cannot start skips to the last phase.

    `CHECK` checks this machine, the bucket, the runtime and the queue. `ENGINES` starts the engines and their router.
    """

    CHECK = "check"
    ENGINES = "engines"
    GATEWAY = "gateway"
    ROLLOUTS = "rollouts"
    STOP = "stop"


class ModelServing:
    """The servers that answer one run's model calls.

    `start` sets `gateways`, and also `dialer` if the run has a relay.
    """

    gateways: GatewayFleet

    def __init__(self, config: RolloutConfig, log_dir: Path, on_event: OnEvent = lambda event: None) -> None:
        """Prepare the engines; nothing starts yet.

        Raises:
            ConfigError: `serving.kind` names no engine factory, or one whose engines take no adapters, or the weights
                or adapters that this run served last are missing.
        """
        self._weights, self._adapters = WeightStore(config), AdapterStore(config)
        self._updating = asyncio.Lock()
        self.engines = EngineFleet(
            config, log_dir, on_event, newest=self._weights.current, adapters=self._adapters.loaded
        )
        if config.serving.lora_rank is not None and not self.engines.takes_weights:
            raise ConfigError(f"serving.lora_rank: engines of serving.kind={config.serving.kind} take no adapters")
        self.dialer: DialerProcess | None = None
        self._config = config
        self._log_dir = log_dir
        self._on_event = on_event
        self._stack = AsyncExitStack()

    async def start(
        self,
        secret: str,
        on_phase: Callable[[RunPhase], object] = lambda phase: None,
        on_status: Callable[[str], object] = lambda text: None,
    ) -> None:
        """Start everything; `stop` ends it. Keys and seals are derived from `secret`, the run's secret.

        Raises:
            StartupError: a part did not start, with the end of its log.
        """
        config = self._config
        on_phase(RunPhase.ENGINES)
        self._stack.push_async_callback(self.engines.stop)
        await self.engines.start()
        on_phase(RunPhase.GATEWAY)
        self.gateways = GatewayFleet(
            public_gateway_config(config),
            self.engines.router_url,
            self._log_dir,
            key_secret(secret, config.run_id),
            seal_secret=secret,
            journals=config.run_dir / "gateway",
            on_event=self._on_event,
        )
        self._stack.push_async_callback(self.gateways.stop)
        await self.gateways.start()
        if self._adapters.loaded:
            await self.gateways.set_adapters(self._adapters.versions)
        if config.relay is not None:
            on_status(f"dialling out to the relay at {config.relay.url}")
            limits = RestartLimits(config.serving.max_restarts, config.serving.restart_window_s)
            log_file = self._log_dir / "relay.log"
            self.dialer = DialerProcess(config.relay, self.gateways.urls, log_file, limits, self._on_event)
            self._stack.push_async_callback(self.dialer.stop)
            await self.dialer.start()

    async def stop(self) -> None:
        """Stop everything that has started, in reverse order."""
        await self._stack.aclose()

    def failures(self) -> list[Coroutine[Any, Any, None]]:
        """Return a coroutine for each part, which raises ServingError once the part is permanently lost."""
        dialer = [self.dialer.run()] if self.dialer is not None else []
        return [self.engines.failed(), self.gateways.failed(), *dialer]

    async def pause(self) -> None:
        """Hold all model calls. Return once no call is at an engine and every engine is idle.

        Raises:
            ServingError: a gateway does not answer. The engines are paused nevertheless.
        """
        try:
            await self.gateways.pause()
        finally:
            await self.engines.pause()

    async def resume(self) -> None:
        """Let model calls reach the engines again. Raises ServingError if a gateway does not answer."""
        await self.engines.resume()
        await self.gateways.resume()

    @property
    def weight_version(self) -> int:
        """The version of the newest weights."""
        return self._weights.current.version if self._weights.current is not None else 0

    @property
    def weights_name(self) -> str:
        """The name of the newest weights, by which a step tells whether earlier results have the same ones."""
        service = self._config.training_service
        if self._config.serving.kind == "tinker" and service is not None and self._weights.current is None:
            return service.sampler or service.base_model
        return str(self.weight_version or "")

    async def update_weights(self, source: Path | str | Mapping[str, torch.Tensor]) -> WeightUpdate:
        """Serve new weights: see `RolloutManager.update_weights`."""
        serving = self._config.serving
        if not self.engines.takes_weights:
            raise ConfigError(
                f"update_weights needs serving.kind=process, ray or tinker, and it is {serving.kind}: update the "
                "weights where those engines are started"
            )
        if serving.engine != "sglang":
            raise ConfigError(
                f"update_weights needs serving.engine=sglang, and it is {serving.engine}, which reloads some models "
                "incompletely"
            )
        if serving.lora_rank is not None:
            raise ConfigError(
                "update_weights is not supported with serving.lora_rank: the adapters belong to the weights of "
                "model.path. Train the adapters, or remove serving.lora_rank"
            )
        async with self._updating:
            weights = await in_thread(lambda: self._weights.prepare(source), "weights")
            began = time.monotonic()
            try:
                failed = await self.engines.routing.update_weights(weights, lambda: self._weights.commit(weights))
            finally:
                paused_s = time.monotonic() - began
                with contextlib.suppress(TimeoutError):
                    await call_disk(self._weights.prune)
        if self._weights.current != weights:
            reasons = "; ".join(f"{engine}: {why}" for engine, why in failed.items())
            raise WeightUpdateFailed(
                f"no engine loaded version {weights.version} of the weights, so all restart with version "
                f"{self.weight_version}. {reasons}"
            )
        for engine, why in failed.items():
            log.warning(
                "%s did not load version %d of the weights and is restarted: %s", engine, weights.version, why
            )
        log.info("the engines serve version %d of the weights, after a pause of %.1f s", weights.version, paused_s)
        return WeightUpdate(weights.version, failed, paused_s)

    @property
    def adapters(self) -> dict[str, int]:
        """The newest version of each loaded adapter."""
        return self._adapters.versions

    def named_adapter(self, name: str) -> NamedAdapter | None:
        """Return the adapter that a step names; None without a name.

        Raises:
            ConfigError: this side starts the engines, and the adapter is not loaded.
        """
        if not name:
            return None
        if self._config.serving.kind != "external" and name not in self._adapters.loaded:
            loaded = ", ".join(sorted(self._adapters.loaded)) or "none"
            raise ConfigError(f"no adapter {name!r} is loaded, only: {loaded}. Call load_adapter first")
        return NamedAdapter(name, self.adapters.get(name))

    async def load_adapter(self, name: str, folder: Path) -> AdapterUpdate:
        """Serve a new version of an adapter: see `RolloutManager.load_adapter`."""
        if self._config.serving.lora_rank is None:
            raise ConfigError("the engines take no adapters: set serving.lora_rank to the largest rank")
        async with self._updating:
            adapter = await in_thread(lambda: self._adapters.prepare(name, folder), "adapter")

            failed = await self.engines.routing.load_adapter(
                adapter,
                lambda: self._adapters.commit(adapter),
                lambda: self.gateways.set_adapters(self.adapters),
            )
        if self._adapters.loaded.get(name) != adapter:
            reasons = "; ".join(f"{engine}: {why}" for engine, why in failed.items())
            raise ServingError(f"no engine loaded the adapter {adapter.engine_name}, so nothing changed. {reasons}")
        for engine, why in failed.items():
            log.warning("%s did not load the adapter %s and is restarted: %s", engine, adapter.engine_name, why)
        log.info("the engines serve version %d of the adapter %s", adapter.version, name)
        return AdapterUpdate(name, adapter.version, failed)

    async def unload_adapter(self, name: str, check_unused: Callable[[], None]) -> None:
        """Remove an adapter. `check_unused` raises ConfigError if a step samples with it."""
        async with self._updating:
            self.named_adapter(name)
            check_unused()
            await self._adapters.remove(name)
            await self.gateways.set_adapters(self.adapters)
            await self.engines.routing.unload_adapter(name)


class DialerProcess(Supervisor):
    """Keeps the dialer running, which carries the relay's calls to the gateways at `urls`.

    It is a separate process, so that relayed traffic does not delay the manager's event loop. A dialer that the relay
    refuses is not started again.
    """

    def __init__(
        self, config: RelayConfig, urls: Sequence[str], log: Path, limits: RestartLimits, on_event: OnEvent
    ) -> None:
        super().__init__("dialer", limits, on_event)
        self._config = config
        self._urls = urls
        self._log = log
        self._process: ServerProcess | None = None

    async def start_server(self) -> None:
        """Start the dialer; return once the relay reports that it is connected.

        Raises:
            StartupError: the relay refuses it or cannot be reached; the message includes the end of its log.
        """
        # The relay ends the calls of a killed dialer when it sees a new id; agents retry them.
        dialer_id = new_id()
        settings = {
            "key": self._config.key.get_secret_value(),
            "url": self._config.url,
            "gateways": {str(shard): url for shard, url in enumerate(self._urls)},
            "dialer_id": dialer_id,
            "reconnect_s": self._config.reconnect_s,
            "heartbeat_s": self._config.heartbeat_s,
        }
        DialerSettings.model_validate(settings)
        argv = [sys.executable, "-m", "rollout_backend.model.relay.dialer"]
        stdin = json.dumps(settings).encode()
        self._process = ServerProcess("the relay's dialer", argv, self._log, stdin=stdin)
        health = f"{self._config.own_url}/health"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5), trust_env=True) as http:

            async def connected() -> bool:
                try:
                    async with http.get(health) as response:
                        return response.status == 200 and (await response.json())["dialer"] == dialer_id
                except (aiohttp.ClientError, TimeoutError, ValueError, KeyError):
                    return False

            try:
                await self._process.start()
                await self._process.wait_healthy(connected, self._config.startup_timeout_s, "relay.startup_timeout_s")
            except BaseException:
                await self.stop()
                raise

    async def wait_ended(self) -> str:
        """Wait until the dialer has ended, and return how."""
        assert self._process is not None, "not started"
        return f"the relay's dialer {await self._process.wait_ended()}"

    async def release(self) -> None:
        """Stop the dialer. Raise StartupError if the relay refused it, as it would refuse the next one."""
        await self.stop()
        if self._process is not None and self._process.returncode == REFUSED:
            self.report("gave_up", self.last_words)
            raise StartupError(self.last_words)

    async def stop(self) -> None:
        """Stop the dialer. Does nothing if it never ran."""
        if self._process is not None:
            await self._process.stop()
