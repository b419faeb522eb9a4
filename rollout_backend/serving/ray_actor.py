"""Run a server in a Ray actor: place it where the cluster has room, call it, and end it with all its processes.

This package must be installed where Ray's workers run. `ray` is imported when the first actor is placed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from rollout_backend.errors import ServingError, StartupError

_STOP_S = 15.0


async def join_cluster() -> None:
    """Join the cluster of RAY_ADDRESS, else one that runs on this machine, else a new one. Idempotent."""
    import ray

    if not ray.is_initialized():
        await asyncio.to_thread(ray.init, log_to_driver=False, include_dashboard=False)


class RayActor:
    """A server on the machine that Ray chose. The server has the coroutine methods `wait`, `stop` and `log_tail`."""

    def __init__(
        self, name: str, make: Callable[[str], Any], *, cpus: float = 1.0, gpus: float = 0.0, strategy: Any = "SPREAD"
    ) -> None:
        """`make` makes the server, on its machine, from the machine's address. `name` is for messages.

        `strategy` is Ray's scheduling strategy; by default Ray prefers a machine without such an actor.
        """
        self._name = name
        self._make = make
        self._options = {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": strategy, "max_restarts": 0}
        self._placed = False
        self.handle: Any = None

    async def place(self, timeout_s: float) -> None:
        """Create the actor; return once it runs on some machine.

        Raises:
            TimeoutError: no machine had room for it in time.
            StartupError: it died before it ran.
        """
        import ray

        self.handle = ray.remote(_Host).options(**self._options).remote(self._make)
        async with asyncio.timeout(timeout_s):
            await self._result(self.handle.__ray_ready__.remote())
        self._placed = True

    async def call(self, method: str, *arguments: Any) -> Any:
        """Return what a method of the server returns. Raise the `ServingError` that it raises.

        Raises:
            StartupError: the method raised anything else, or the actor has died.
        """
        return await self._result(self.handle.call.remote(method, *arguments))

    async def read(self, attribute: str) -> Any:
        """Return an attribute of the server. Raise StartupError if the actor has died."""
        return await self._result(self.handle.read.remote(attribute))

    async def wait(self) -> str:
        """Return how the server ended, once it has; the actor's death is an end too."""
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
            if self._placed:  # else there is no process to answer
                async with asyncio.timeout(_STOP_S):
                    await self.call("stop")
        except (ServingError, TimeoutError):
            pass  # its machine is gone, or it hangs: Ray kills what is left of it with the actor
        finally:
            ray.kill(self.handle)

    async def log_tail(self) -> str:
        """Return the end of the server's log, or why it cannot be read."""
        try:
            async with asyncio.timeout(_STOP_S):
                text: str = await self.call("log_tail")
                return text
        except (ServingError, TimeoutError) as error:
            return str(error)

    async def _result(self, reference: Awaitable[Any]) -> Any:
        import ray.exceptions

        try:
            return await reference
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ServingError):
                raise type(error.cause)(str(error.cause)) from None
            raise StartupError(str(error.cause)) from None
        except ray.exceptions.RayError as error:  # also if Ray has killed it, since memory was low
            raise StartupError(f"{self._name}: its Ray actor died: {error}") from None


class _Host:
    """The actor's side."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        import ray.util

        self._server = make(ray.util.get_node_ip_address())

    async def call(self, method: str, *arguments: Any) -> Any:
        return await getattr(self._server, method)(*arguments)

    async def read(self, attribute: str) -> Any:
        return getattr(self._server, attribute)
