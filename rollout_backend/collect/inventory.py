"""List a step's results in S3, independently of announcements."""

from collections.abc import Callable

from agent_wrapper.contract import ContractError, ResultName, parse_result_key, step_prefix
from rollout_backend.collect.store import ObjectStore

MAX_KEYS = 50_000  # per step, in 50 calls to S3. Agents may write under the prefix, so a hostile one can flood it


async def inventory(
    store: ObjectStore, run_id: str, step: int, is_wanted: Callable[[str, int | None], bool]
) -> dict[str, ResultName] | None:
    """Return the step's wanted results and failure markers by key, results first; None if there are too many keys.

    Other keys are skipped.

    Raises:
        StoreError: S3 did not answer.
    """
    prefix = store.config.prefix
    found, listed = {}, 0
    async for key in store.keys(step_prefix(prefix, run_id, step)):
        listed += 1
        if listed > MAX_KEYS:
            return None
        try:
            name = parse_result_key(prefix, run_id, key)
        except ContractError:
            continue  # neither a result nor a failure marker
        if is_wanted(name.rollout_id, name.attempt):
            found[key] = name
    return dict(sorted(found.items(), key=lambda item: item[1].attempt is not None))
