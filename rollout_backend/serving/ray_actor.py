"""One Ray actor of ours: placed where the cluster has room, asked, and ended with all that it started.

This package must be installed where Ray's workers run. `ray` is imported when the first actor is wanted.
"""

from __future__ import annotations

import asyncio
from typing import Any

from rollout_backend.errors import ServingError, StartupError

_STOP_S = 15.0


async def join_cluster() -> None:
    """Joins the cluster of RAY_ADDRESS, else one that runs on this machine, else a new one. Once is enough."""
    import ray

    if not ray.is_initialized():
        await asyncio.to_thread(ray.init, log_to_driver=False, include_dashboard=False)


class RayActor:
    """Hosts a `host(*arguments)`, whose methods are coroutines, `stop` and `tail` among them.

    `name` is for messages. `spread`: rather on a machine that has none yet than close together.
    """

    def __init__(
        self, name: str, host: type, arguments: tuple[Any, ...], *, num_gpus: int = 0, spread: bool = False
    ) -> None:
        self._name = name
        self._host = host
        self._arguments = arguments
        self._num_gpus = num_gpus
        self._strategy = "SPREAD" if spread else "DEFAULT"
        self._placed = False
        self.handle: Any = None

    async def place(self, timeout_s: float) -> None:
        """Returns once it runs on some machine.

        Raises:
            TimeoutError: no machine had room for it in time.
            StartupError: it died on the way.
        """
        import ray

        options = {
            "num_cpus": 1,
            "num_gpus": self._num_gpus,
            "max_restarts": 0,
            "scheduling_strategy": self._strategy,
        }
        self.handle = ray.remote(self._host).options(**options).remote(*self._arguments)
        async with asyncio.timeout(timeout_s):
            await self.ask("__ray_ready__")
        self._placed = True

    async def ask(self, method: str, *arguments: Any) -> Any:
        """What the method returns there. A `ServingError` that it raises is raised here.

        Raises:
            StartupError: for anything else that it raised, or if the actor has died.
        """
        import ray.exceptions

        try:
            return await getattr(self.handle, method).remote(*arguments)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ServingError):
                raise type(error.cause)(str(error.cause)) from None
            raise StartupError(str(error.cause)) from None
        except ray.exceptions.RayActorError as error:
            raise StartupError(f"{self._name}: its Ray actor died: {error}") from None

    async def stop(self) -> None:
        """Ends it, whatever state it is in."""
        import ray

        if self.handle is None:
            return
        try:
            if self._placed:  # else nobody is there to answer
                async with asyncio.timeout(_STOP_S):
                    await self.ask("stop")
        except (ServingError, TimeoutError):
            pass  # its machine is gone, or it hangs: what is left of it is killed with the actor
        finally:
            ray.kill(self.handle)

    async def tail(self) -> str:
        try:
            async with asyncio.timeout(_STOP_S):
                text: str = await self.ask("tail")
                return text
        except (ServingError, TimeoutError) as error:
            return str(error)
