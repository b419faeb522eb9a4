"""Check the external services that a run needs, before it starts or spends anything."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack

from rollout_backend.collect.presign import Presigner
from rollout_backend.collect.queue import check_queue
from rollout_backend.collect.store import ResultStore
from rollout_backend.config import RolloutConfig
from rollout_backend.dispatch.ramp import check_ramp
from rollout_backend.runtimes.registry import open_runtime, runtime_class


async def check(
    config: RolloutConfig, on_status: Callable[[str], object] = lambda text: None, rollouts: int | None = None
) -> None:
    """Try a run's operations on bucket, runtime and queue without starting it, and report each passed check.

    The first check leaves a small object in the bucket; a queue created here is deleted. With `rollouts`, the size
    of a batch, its ramp is checked as well.

    Raises:
        ConfigError: a batch of that size cannot finish in time.
        PreflightError: what is missing or refuses us, and what to do.
    """
    if config.model.path.is_dir():  # the model may be on other machines only
        on_status(f"model: {config.model.context_tokens:,} tokens of context (model.context_length)")
    async with AsyncExitStack() as stack:
        store = await ResultStore.open(config.storage, config.aws)
        stack.push_async_callback(store.aclose)
        await check_storage(config, store)
        on_status(f"bucket {config.storage.bucket}: there, and can be listed, written and read")
        implementation = runtime_class(config.runtime)
        changes = await implementation.preview(config.runtime)
        if changes is not None:
            on_status(changes)
            limits = implementation.default_limits(config.runtime)
        else:
            runtime = await open_runtime(config.runtime)
            stack.push_async_callback(runtime.aclose)
            await runtime.check(config.timeouts.session_s)
            on_status("runtime: there, and ready")
            limits = runtime.limits()
        if config.uses_queue:
            await check_queue(config.queue, config.aws)
            on_status("queue: there" if config.queue.url is not None else "queue: can be made for the run")
        if rollouts is not None:
            on_status(check_ramp(config, limits, rollouts))


async def check_storage(config: RolloutConfig, store: ResultStore) -> None:
    """Try the trainer's calls to S3, and with `storage.presigned` an agent's.

    Raises:
        PreflightError: the bucket does not exist, or a call is refused.
    """
    await store.check()
    if config.storage.presigned:
        await Presigner(config.storage, config.aws).check()
