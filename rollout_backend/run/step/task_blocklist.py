"""Stop dispatching a task after consecutive infrastructure failures. Records are kept in S3.

RUN/task-blocklist/DIGEST.json holds the consecutive losses of one task. Invariants:

- a loss counts only in a step that delivered a result of another task; otherwise the task is not the cause;
- a delivered rollout resets the count of its task;
- a blocked task stays blocked for the run. To unblock it, delete its record and restart the run.
"""

import asyncio
import contextlib
import logging
from collections.abc import Collection
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from agent_wrapper.contract import ContractError, blocklist_prefix
from rollout_backend.core.ledger import Ledger, LedgerEntry
from rollout_backend.core.manifest import StepRequest, payload_digest
from rollout_backend.core.tasks import Task
from rollout_backend.errors import StoreError
from rollout_backend.run.accounts.step_report import StepFailure, failures_of
from rollout_backend.run.collect.store import ObjectStore

log = logging.getLogger(__name__)

# Concurrent writes, and the time limit for all records of a finished step.
_WRITES = 16
_WRITES_S = 60.0


class TaskLoss(BaseModel):
    """One execution of a step in which every rollout of the task was lost."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    name: str
    """The step's number as the trainer counts it."""
    resume_count: int
    failures: tuple[StepFailure, ...]


class BlocklistRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    digest: str
    task_id: str
    losses: tuple[TaskLoss, ...]


class TaskBlocklist:
    """The blocklist of a run. It is read once: the run's manager is the only writer."""

    def __init__(self, store: ObjectStore, run_id: str, after: int | None) -> None:
        """`after` is the number of consecutive losses that blocks a task. None: no task is blocked or recorded."""
        self._store = store
        self._prefix = blocklist_prefix(store.config.prefix, run_id)
        self._after = after
        self._records: dict[str, BlocklistRecord] | None = None
        self._reading = asyncio.Lock()

    async def read(self) -> None:
        """Read the records of the run's earlier trainers. Raises StoreError."""
        async with self._reading:
            if self._records is None and self._after is not None:
                keys = [key async for key in self._store.keys(self._prefix)]
                found = await asyncio.gather(*(self._record(key) for key in keys))
                self._records = {record.digest: record for record in found if record is not None}

    async def _record(self, key: str) -> BlocklistRecord | None:
        try:
            return BlocklistRecord.model_validate_json(await self._store.get(key))
        # At worst, the task is tried again.
        except (ContractError, ValidationError) as error:
            log.warning("%s is not a valid blocklist record and is ignored: %s", key, error)
            return None

    def block_reason(self, task: Task) -> str | None:
        """Return why the task must not be dispatched; None if it may be. Call `read` first."""
        return self._reason(payload_digest(task))

    def _reason(self, digest: str) -> str | None:
        record = (self._records or {}).get(digest)
        if record is None or self._after is None or len(record.losses) < self._after:
            return None
        last = record.losses[-1].failures[-1]
        return (
            f"lost to the infrastructure {len(record.losses)} times in a row, last in step {record.losses[-1].name}: "
            f"{last.reason}: {last.message}; the record is s3://{self._store.config.bucket}/{self._key(digest)}"
        )

    async def record_step(self, ledger: Ledger, resume_count: int, request: StepRequest) -> None:
        """Record which tasks were lost in a settled step. If S3 is too slow, a record is kept in memory only."""
        if self._after is None:
            return
        assert self._records is not None, "read first"
        digests = {task.task_id: payload_digest(task) for task in request.tasks}
        entries: dict[str, list[LedgerEntry]] = {}
        for entry in ledger.entries.values():
            entries.setdefault(digests[entry.task_id], []).append(entry)
        through = {digest for digest, found in entries.items() if any(each.delivered for each in found)}
        if not through:
            return
        changed: list[BlocklistRecord] = []
        for digest, found in entries.items():
            before = self._records[digest].losses if digest in self._records else ()
            if digest in through:
                if 0 < len(before) < self._after:
                    changed.append(self._records[digest].model_copy(update={"losses": ()}))
                continue
            lost = [each.rollout_id for each in found if each.lost]
            if lost and all(each.lost or each.reason == "group_doomed" for each in found):
                failures, task_id = failures_of(ledger, lost), found[0].task_id
                loss = TaskLoss(step=ledger.step, name=request.name, resume_count=resume_count, failures=failures)
                changed.append(BlocklistRecord(digest=digest, task_id=task_id, losses=(*before, loss)))
        self._records |= {record.digest: record for record in changed}
        for record in changed:
            if (why := self._reason(record.digest)) is not None:
                log.warning("task %s is blocked: %s", record.task_id, why)
        await self._write(changed)

    async def _write(self, records: Collection[BlocklistRecord]) -> None:
        slots, left, why = asyncio.Semaphore(_WRITES), len(records), f"S3 did not take them within {_WRITES_S:g} s"

        async def write(record: BlocklistRecord) -> None:
            nonlocal left, why
            async with slots:
                try:
                    await self._store.put(self._key(record.digest), record.model_dump_json(indent=1).encode())
                    left -= 1
                except StoreError as error:
                    why = str(error)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WRITES_S):
                await asyncio.gather(*map(write, records))
        if left:
            log.warning("%s; a restarted trainer will not know of the losses of %d tasks", why, left)

    def _key(self, digest: str) -> str:
        return f"{self._prefix}{digest}.json"
