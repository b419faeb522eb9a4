"""Run engines and gateways as Ray actors (`serving.kind=ray`, `gateway.kind=ray`).

An engine runs on as many machines and GPUs as its settings name. It reserves its machines as one placement group,
with an actor on each machine. An actor holds its GPUs while it lives, so Ray assigns them to no other actor, and its
process sees only these GPUs. Gateways are spread over the cluster's machines. Agents reach a gateway at its machine's
address, or at `gateway.public_url`; gateways reach the router at this machine's address.

This package must be installed where Ray's workers run, and `model.path` and `serving.python` must exist there. A
server writes its log, and a gateway its journal, on its own machine, unless the machines share the folder. `ray` is
imported when it is needed.

Invariants:

- A server that spans machines starts and ends as a unit: if it loses a machine or process, the others are stopped,
  and the fleet restarts the server where the cluster has room.
- While the cluster has no room, the engine reports it, and waits at most `serving.resources_timeout_s`.
- A gateway that ends is restarted on its machine. The loss of its actor or machine ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from agent_wrapper.shared.threads import in_thread
from rollout_backend.base.addresses import host_port, is_everywhere
from rollout_backend.base.formats import count
from rollout_backend.config import GatewayConfig, ModelConfig, RolloutConfig, ServingConfig
from rollout_backend.core.session_ends import HeartbeatReport
from rollout_backend.errors import ServingError, StartupError
from rollout_backend.model.gateway.stats import GatewayStats
from rollout_backend.model.serving.engine import REPORT_WAIT_AFTER_S, EngineFactory
from rollout_backend.model.serving.gateway_process import GatewayProcess, gateway_name
from rollout_backend.model.serving.local_engine import LocalEngine, MakeCommand, sglang_command
from rollout_backend.model.serving.server_process import ServerKilled
from rollout_backend.model.serving.supervisor import first_of

_STOP_S = 15.0
_POLL_S = 0.5
# A gateway process limits each control call to 30 s.
_ASK_S = 60.0
# Time for Ray to start a process on a reserved machine.
_ACTOR_S = 120.0
# Limit of a call of the cluster's head.
_HEAD_S = 120.0
_T = TypeVar("_T")


async def join_cluster() -> None:
    """Join the cluster of RAY_ADDRESS, or else one on this machine, or else start one. Idempotent."""
    import ray

    if not ray.is_initialized():
        await _ask(lambda: ray.init(log_to_driver=False, include_dashboard=False))


async def _ask(call: Callable[[], _T], limit_s: float = _HEAD_S) -> _T:
    """Make a call to the cluster's head in its own thread, because a head that hangs would stop the event loop, or
    hold the threads that resolve host names. Raises StartupError if it does not answer."""
    try:
        async with asyncio.timeout(limit_s):
            return await in_thread(call, "ray")
    except TimeoutError:
        raise StartupError(f"the head of the Ray cluster did not answer within {limit_s:g} s") from None


async def _tell(call: Callable[[], object]) -> None:
    """Make a call whose answer changes nothing, and wait only briefly: Ray frees what a run holds when it ends."""
    with contextlib.suppress(StartupError):
        await _ask(call, _STOP_S)


class RayActor:
    """A server on the machine that Ray chose. The server has the coroutine methods `wait` and `stop`."""

    def __init__(
        self, name: str, make: Callable[[str], Any], *, cpus: float = 1.0, gpus: float = 0.0, strategy: Any = "SPREAD"
    ) -> None:
        """`make` creates the server on its machine, given the machine's address. `name` is for messages.

        `strategy` is Ray's scheduling strategy; the default prefers a machine without such an actor.
        """
        self._name = name
        self._make = make
        self._options = {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": strategy, "max_restarts": 0}
        self._placed = False
        self.handle: Any = None

    async def place(self, timeout_s: float) -> None:
        """Create the actor, and return once it runs on some machine.

        Raises:
            TimeoutError: no machine had room for it in time.
            StartupError: the actor could not be created.
            ServerKilled: the actor was killed before it ran.
        """
        import ray

        self._placed = False
        host = ray.remote(_Host).options(**self._options)
        async with asyncio.timeout(timeout_s):
            self.handle = await _ask(lambda: host.remote(self._make))
            await self._result(self.handle.__ray_ready__.remote())
        self._placed = True

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the server and return its result.

        Raises:
            ServingError: the method raised it.
            StartupError: the method raised anything else.
            ServerKilled: the actor has died.
        """
        return await self._result(self.handle.call.remote(method, *arguments))

    async def read(self, attribute: str) -> Any:
        """Return an attribute of the server. Raise StartupError if the actor has died."""
        return await self._result(self.handle.read.remote(attribute))

    async def wait(self) -> str:
        """Wait until the server has ended or its actor has died, and return how it ended."""
        try:
            ended: str = await self.call("wait")
        except StartupError as error:
            return str(error)
        return ended

    async def stop(self) -> None:
        """End the server and the actor, in any state."""
        import ray

        if self.handle is None:
            return
        try:
            # An actor that was not placed has no process that could answer.
            if self._placed:
                async with asyncio.timeout(_STOP_S):
                    await self.call("stop")
        except (ServingError, TimeoutError):
            # The machine is gone or the server hangs. Ray kills its remains with the actor.
            pass
        finally:
            await _tell(lambda: ray.kill(self.handle))

    async def log_tail(self) -> str:
        """Return the end of an engine's log, or why it cannot be read."""
        try:
            async with asyncio.timeout(_STOP_S):
                text: str = await self.call("log_tail")
                return text
        except (ServingError, TimeoutError) as error:
            return str(error)

    async def _result(self, reference: Awaitable[Any]) -> Any:
        import ray.exceptions as failures

        try:
            return await reference
        except failures.RayTaskError as error:
            if isinstance(error.cause, ServingError):
                raise type(error.cause)(str(error.cause)) from None
            raise StartupError(str(error.cause)) from None
        except failures.RayError as error:
            # Ray also raises this if it killed the actor because memory was low.
            recurs = isinstance(error, failures.RuntimeEnvSetupError | failures.ActorUnschedulableError) or (
                isinstance(error, failures.RayActorError) and error.actor_init_failed
            )
            died = StartupError if recurs else ServerKilled
            raise died(f"{self._name}: its Ray actor died: {error}") from None


class _Host:
    """The server side of the actor."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        import ray.util

        self._server = make(ray.util.get_node_ip_address())

    async def call(self, method: str, *arguments: Any) -> Any:
        return await getattr(self._server, method)(*arguments)

    async def read(self, attribute: str) -> Any:
        return getattr(self._server, attribute)


@dataclass(frozen=True)
class Placement:
    """The resources of one server in a Ray cluster: a placement group with one bundle per node."""

    bundles: tuple[Mapping[str, float], ...]
    strategy: Literal["STRICT_PACK", "STRICT_SPREAD"]

    @classmethod
    def of(cls, serving: ServingConfig) -> Placement:
        """Return the placement of a server with these settings."""
        nodes = serving.nodes_per_server
        processes = max(1, serving.gpus_per_server // nodes)
        if serving.device == "cpu":
            bundle = {"CPU": float(processes * serving.threads)}
        else:
            bundle = {"CPU": 1.0, "GPU": float(processes)}
        return cls((bundle,) * nodes, "STRICT_PACK" if nodes == 1 else "STRICT_SPREAD")

    def __str__(self) -> str:
        each = count(int(self.bundles[0][self._unit]), self._unit)
        nodes = len(self.bundles)
        return f"{each} on one machine" if nodes == 1 else f"{each} on each of {nodes} machines"

    @property
    def _unit(self) -> str:
        return "GPU" if "GPU" in self.bundles[0] else "CPU"

    def describe(self, machines: Sequence[Mapping[str, float]]) -> str:
        """Return the free GPUs of machines, or their free CPUs if the server needs no GPU."""
        each = " + ".join(f"{machine.get(self._unit, 0):g}" for machine in machines)
        return f"{each or 0} {self._unit}s on {count(len(machines), 'machine')}"

    def servers_on(self, machines: Iterable[Mapping[str, float]]) -> int:
        """Return how many servers machines with these free resources can hold at once."""
        bundle, nodes = self.bundles[0], len(self.bundles)
        slots = [int(min(machine.get(name, 0) // need for name, need in bundle.items())) for machine in machines]
        servers = sum(slots) // nodes
        # The nodes of a server are on different machines, so a machine holds at most one node of each server.
        while servers and sum(min(slot, servers) for slot in slots) < servers * nodes:
            servers -= 1
        return servers


class RayEngineFactory(EngineFactory):
    """Makes the engines of `serving.kind=ray`."""

    takes_weights = True

    def __init__(self, config: RolloutConfig, log_dir: Path, command: MakeCommand = sglang_command) -> None:
        servers = config.serving.servers
        self.count = 0 if servers == "auto" else servers
        self._config = config
        self._log_dir = log_dir.absolute()
        self._command = command

    async def open(self) -> None:
        """Join the Ray cluster, unless this process already has, and count the engines of `serving.servers=auto`."""
        await join_cluster()
        if self._config.serving.servers == "auto":
            placement = Placement.of(self._config.serving)
            machines = await _ask(_free_resources)
            self.count = placement.servers_on(machines)
            if not self.count:
                raise StartupError(
                    f"serving.servers=auto: the Ray cluster has no room for a server, which needs {placement}; "
                    f"free are {placement.describe(machines)}"
                )

    def make(self, number: int) -> RayEngine:
        name = f"engine-{number}"
        config = self._config
        return RayEngine(name, config.model, config.serving, self._log_dir / f"{name}.log", self._command)


class RayEngine:
    """A server on `serving.nodes_per_server` machines of the cluster. Node 0 has its URL."""

    def __init__(
        self, name: str, model: ModelConfig, serving: ServingConfig, log: Path, command: MakeCommand = sglang_command
    ) -> None:
        self._name = name
        self._model = model
        self._serving = serving
        self._log = log
        self._command = command
        self._placement = Placement.of(serving)
        self._group: Any = None
        self._nodes: list[RayActor] = []
        self.url = ""

    async def reserve(self) -> AsyncIterator[str]:
        """Reserve the machines. Yield, once, what the engine waits for.

        Raises:
            StartupError: the machines did not become free within `serving.resources_timeout_s`.
        """
        from ray.util.placement_group import placement_group

        began, reported = time.monotonic(), False
        bundles = [dict(bundle) for bundle in self._placement.bundles]
        self._group = await _ask(lambda: placement_group(bundles, strategy=self._placement.strategy))
        while not await _ask(lambda: self._group.wait(_POLL_S)):
            waited = time.monotonic() - began
            if waited > self._serving.resources_timeout_s:
                raise StartupError(
                    f"{self._name}: the Ray cluster did not have {self._placement} free within "
                    f"{self._serving.resources_timeout_s:g} s (serving.resources_timeout_s); free are "
                    f"{await self._free()}: add machines, or lower serving.servers or "
                    "the parallel sizes"
                )
            if not reported and waited > REPORT_WAIT_AFTER_S:
                reported = True
                yield f"waits for {self._placement}; free are {await self._free()}"

    async def _free(self) -> str:
        return self._placement.describe(await _ask(_free_resources))

    async def start(self) -> None:
        self._nodes = [self._node(rank) for rank in range(len(self._placement.bundles))]
        try:
            await asyncio.gather(*(node.place(_ACTOR_S) for node in self._nodes))
        except TimeoutError:
            raise StartupError(
                f"{self._name}: Ray did not start a process on its machine within {_ACTOR_S:g} s"
            ) from None
        first = self._nodes[0]
        rendezvous = await first.call("rendezvous") if len(self._nodes) > 1 else ""
        await asyncio.gather(*(node.call("start", rendezvous) for node in self._nodes))
        self.url = await first.read("url")

    async def wait(self) -> str:
        """Wait until a node has ended, and return how it ended."""
        return await first_of(*(node.wait() for node in self._nodes))

    async def stop(self) -> None:
        """Stop the server on all its machines, and free them."""
        from ray.util.placement_group import remove_placement_group

        try:
            await asyncio.gather(*(node.stop() for node in self._nodes))
        finally:
            if self._group is not None:
                await _tell(lambda: remove_placement_group(self._group))
                self._group = None

    async def log_tail(self) -> str:
        return await self._nodes[0].log_tail() if self._nodes else ""

    def _node(self, rank: int) -> RayActor:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._placement.bundles[rank]
        several = len(self._placement.bundles) > 1
        name = f"{self._name}, node {rank}" if several else self._name
        log = self._log.with_suffix(f".node-{rank}.log") if several else self._log
        # Only these variables are sent to the actor.
        model, serving, command = self._model, self._serving, self._command
        return RayActor(
            name,
            lambda host: LocalEngine(name, model, serving, log, host=host, rank=rank, command=command),
            cpus=bundle["CPU"],
            gpus=bundle.get("GPU", 0.0),
            strategy=PlacementGroupSchedulingStrategy(self._group, rank),
        )


def _free_resources() -> list[Mapping[str, float]]:
    """Return the free resources of each machine of the cluster."""
    # The public function adds up all machines.
    from ray._private.state import available_resources_per_node

    return [*available_resources_per_node().values()]


async def router_url_in_cluster(config: RolloutConfig, router_url: str) -> str:
    """Join the Ray cluster, unless this process has. Return the URL at which its machines reach the router."""
    import ray.util

    await join_cluster()
    if not is_everywhere(config.router.host):
        return router_url
    parts = urlsplit(router_url)
    return parts._replace(netloc=host_port(ray.util.get_node_ip_address(), parts.port or 80)).geturl()


class RayGateway(RayActor):
    """A gateway on a machine of the cluster with a free CPU."""

    def __init__(self, config: GatewayConfig, shard: int, make: Callable[..., GatewayProcess]) -> None:
        super().__init__(gateway_name(config, shard), lambda node_ip: make(node_ip=node_ip))
        self._config = config
        self.url = ""
        self.journal_id = ""

    async def start(self) -> None:
        timeout_s = self._config.startup_timeout_s
        try:
            # A restart stays in the same actor, unless the gateway was killed before it was up.
            if not self.url:
                await self.stop()
                await self.place(timeout_s)
        except TimeoutError:
            raise StartupError(
                f"{self._name}: no machine of the Ray cluster had a CPU free within {timeout_s:g} s: lower "
                "gateway.processes, or raise gateway.startup_timeout_s if the cluster is still growing"
            ) from None
        # The server limits the opening of its journal and its start by `timeout_s` each.
        await self._ask("start", limit_s=2 * timeout_s + _ASK_S)
        self.url, self.journal_id = await self.read("url"), await self.read("journal_id")

    async def _healthy(self) -> bool:
        """Return whether the gateway and its actor answer a probe."""
        try:
            return bool(await self.call("_healthy"))
        except ServingError:
            return False

    async def revoke(self, session_ids: Iterable[str]) -> None:
        await self._ask("revoke", list(session_ids))

    async def adopt(self, session_ids: Iterable[str]) -> None:
        await self._ask("adopt", list(session_ids))

    async def heartbeats(self) -> HeartbeatReport:
        heard: HeartbeatReport = await self._ask("heartbeats")
        return heard

    async def reports(self) -> dict[str, Any]:
        reports: dict[str, Any] = await self._ask("reports")
        return reports

    async def report_of(self, session_id: str) -> dict[str, Any] | None:
        report: dict[str, Any] | None = await self._ask("report_of", session_id)
        return report

    async def pause(self) -> None:
        await self._ask("pause")

    async def resume(self) -> None:
        await self._ask("resume")

    async def set_adapters(self, versions: Mapping[str, int]) -> None:
        await self._ask("set_adapters", dict(versions))

    async def stats(self) -> GatewayStats:
        stats: GatewayStats = await self._ask("stats")
        return stats

    async def _ask(self, method: str, *arguments: Any, limit_s: float = _ASK_S) -> Any:
        """Call a method. Raises StartupError also if the actor's machine does not answer."""
        try:
            async with asyncio.timeout(limit_s):
                return await self.call(method, *arguments)
        except TimeoutError:
            raise StartupError(f"{self._name}: its Ray actor did not answer within {limit_s:g} s") from None
