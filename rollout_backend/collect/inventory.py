"""What S3 holds of a step, whatever the queue may have said."""

from __future__ import annotations

from agent_wrapper.contract import ContractError, ResultName, parse_result_key, step_prefix
from rollout_backend.collect.store import ResultStore


async def inventory(store: ResultStore, run_id: str, step: int) -> dict[str, ResultName]:
    """The step's results and notices, by key; results come first. Keys that are neither are passed over.

    Raises StoreError if S3 does not answer.
    """
    prefix = store.config.prefix
    found = {}
    async for key in store.keys(step_prefix(prefix, run_id, step)):
        try:
            found[key] = parse_result_key(prefix, run_id, key)
        except ContractError:
            continue  # somebody else's file in our folder: nothing of ours is named so
    return dict(sorted(found.items(), key=lambda item: item[1].attempt is not None))
