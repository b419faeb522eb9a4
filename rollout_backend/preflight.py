"""Whether a run could start: what outside this process it needs, looked at before anything is started or spent."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack

from rollout_backend.collect.queue import AnnouncementQueue
from rollout_backend.collect.store import ResultStore
from rollout_backend.config import AgentCoreConfig, RolloutConfig
from rollout_backend.dispatch.runtime import AgentRuntime


async def check(config: RolloutConfig, tell: Callable[[str], object] = lambda text: None) -> None:
    """Looks at bucket, runtime and queue; makes nothing. `tell` is told what is in order.

    Raises:
        PreflightError: what is missing or refuses us, and what to do.
    """
    async with AsyncExitStack() as stack:
        store = await ResultStore.open(config.storage, config.aws)
        stack.push_async_callback(store.aclose)
        await store.check()
        tell(f"bucket {config.storage.bucket}: there, and can be listed")
        if isinstance(config.runtime, AgentCoreConfig) and config.runtime.image is not None:
            from rollout_backend.dispatch.control import look_at_runtime

            tell(await look_at_runtime(config.runtime))
        else:
            runtime = await open_runtime(config)
            stack.push_async_callback(runtime.aclose)
            await runtime.check()
            tell("runtime: there, and ready")
        if config.queue.enabled and config.queue.url is not None:
            queue = await AnnouncementQueue.open(config.queue, config.aws, config.run_id)
            stack.push_async_callback(queue.aclose)
            tell("queue: there")


async def open_runtime(config: RolloutConfig, tell: Callable[[str], object] = lambda text: None) -> AgentRuntime:
    """The runtime of the settings; where they name an image, it is made or updated first, and `tell` is told.

    Raises:
        PreflightError: it could not be made.
    """
    if isinstance(config.runtime, AgentCoreConfig):
        from rollout_backend.dispatch.agentcore import AgentCoreRuntime
        from rollout_backend.dispatch.control import make_runtime

        return await AgentCoreRuntime.open(
            config.runtime, config.runtime.arn or await make_runtime(config.runtime, tell)
        )
    from rollout_backend.dispatch.http import HttpRuntime

    return await HttpRuntime.open(config.runtime)
