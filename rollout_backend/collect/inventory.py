"""What S3 holds of a step, whatever the queue may have said."""

from __future__ import annotations

from agent_wrapper.contract import ContractError, parse_result_key, step_prefix
from rollout_backend.collect.store import ResultStore


async def inventory(store: ResultStore, run_id: str, step: int) -> dict[str, str]:
    """The key of each result of the step, by rollout id. Keys that are no results are passed over.

    Raises StoreError if S3 does not answer.
    """
    prefix = store.config.prefix
    found = {}
    async for key in store.keys(step_prefix(prefix, run_id, step)):
        try:
            _, rollout_id = parse_result_key(prefix, run_id, key)
        except ContractError:
            continue  # somebody else's file in our folder: nothing of ours is named so
        found[rollout_id] = key
    return found
