"""Record unusable objects and messages of a run in S3, each with the reason."""

import logging

from agent_wrapper.contract import ContractError
from rollout_backend.collect.store import ObjectStore
from rollout_backend.errors import StoreError

log = logging.getLogger(__name__)


class Quarantine:
    """The quarantine of one run."""

    def __init__(self, store: ObjectStore, run_id: str) -> None:
        self._store = store
        self._run_id = run_id

    async def record(self, what: str, error: ContractError, evidence: bytes) -> bool:
        """Record an object or message. Return False if S3 did not store the record: retry later."""
        try:
            await self._store.quarantine(self._run_id, what, str(error), evidence)
        except StoreError as failure:
            log.warning("%s; it is retried", failure)
            return False
        return True
