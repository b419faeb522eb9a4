"""Delete the Jobs of a killed run from its janitor. See `CleanupSpec`."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
from tenacity import RetryCallState, stop_after_attempt, wait_exponential_jitter

from rollout_backend.config import KubernetesConfig
from rollout_backend.errors import NoCredentials
from rollout_backend.retry import retry
from rollout_backend.runtimes.kubernetes.api import ApiError, KubernetesApi
from rollout_backend.runtimes.kubernetes.runtime import delete_job

_TRIES = 6
_BACK_OFF = wait_exponential_jitter(max=10)


def session_stopper(options: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return a function that deletes the Job of one session and returns False if it did not exist."""
    config = KubernetesConfig.model_validate(options)

    async def delete(session_id: str) -> bool:
        api = await KubernetesApi.open(config)
        try:
            return await retry(
                lambda: delete_job(api, session_id), _is_transient, _wait, stop=stop_after_attempt(_TRIES)
            )
        finally:
            await api.aclose()

    return lambda session_id: asyncio.run(delete(session_id))


def _wait(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome is not None else None
    return max(_BACK_OFF(state), error.retry_after_s if isinstance(error, ApiError) else 0.0)


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, ApiError):
        return error.status in (401, 409, 429) or error.status >= 500
    return isinstance(error, (NoCredentials, aiohttp.ClientError, OSError))
