"""Tasks that are lost to the infrastructure again and again, remembered in S3 with what happened to them.

RUN/set-aside/DIGEST.json holds each loss in a row of one task. What must always hold: a loss counts only in a step in
which something else was let through, for else it is not the task's; one rollout that is let through ends the row; and
once set aside a task stays so for this run, its record with it. To have it run again delete the record, and begin the
run again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from rollout_backend.collect.store import ResultStore
from rollout_backend.errors import StoreError
from rollout_backend.ledger import Ledger
from rollout_backend.report import StepFailure, failures_of

log = logging.getLogger(__name__)


class Loss(BaseModel):
    """One step, or one take of it, in which every rollout of the task was lost."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    take: int
    failures: tuple[StepFailure, ...]


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    digest: str
    task_id: str
    losses: tuple[Loss, ...]


class SetAside:
    """One for a run. Read once, then kept: nobody else writes there while the run lasts."""

    def __init__(self, store: ResultStore, run_id: str, after: int) -> None:
        """`after`: losses in a row."""
        self._store = store
        self._prefix = f"{store.config.prefix}runs/{run_id}/set-aside/"
        self._after = after
        self._records: dict[str, Record] | None = None
        self._reading = asyncio.Lock()

    async def read(self) -> None:
        """Takes up what an earlier life of the run has written. Raises StoreError."""
        async with self._reading:
            if self._records is None:
                keys = [key async for key in self._store.keys(self._prefix)]
                found = await asyncio.gather(*(self._record(key) for key in keys))
                self._records = {record.digest: record for record in found if record is not None}

    async def _record(self, key: str) -> Record | None:
        try:
            return Record.model_validate_json(await self._store.get(key))
        except ValidationError as error:  # the worst that follows is that the task is tried again
            log.warning("%s is no record of a task and is passed over: %s", key, error)
            return None

    def why(self, digest: str) -> str | None:
        """Why the task is not to be dispatched; None if it is. Once `read`."""
        record = (self._records or {}).get(digest)
        if record is None or len(record.losses) < self._after:
            return None
        last = record.losses[-1].failures[-1]
        return (
            f"lost to the infrastructure {len(record.losses)} times in a row, last in step {record.losses[-1].step}: "
            f"{last.reason}: {last.message}; the record is s3://{self._store.config.bucket}/{self._key(digest)}"
        )

    async def step_over(self, ledger: Ledger, take: int, by_digest: Mapping[str, Sequence[str]]) -> None:
        """Once all is settled: notes which tasks were lost, and which not. `by_digest`: each task's rollouts."""
        assert self._records is not None, "read first"
        entries = {digest: [ledger.entries[each] for each in ids] for digest, ids in by_digest.items()}
        through = {digest for digest, found in entries.items() if any(each.let_through for each in found)}
        if not through:
            return
        for digest, found in entries.items():
            before = self._records[digest].losses if digest in self._records else ()
            if digest in through:
                if 0 < len(before) < self._after:
                    await self._write(self._records[digest].model_copy(update={"losses": ()}))
                continue
            lost = [each.planned.rollout_id for each in found if each.lost]
            if lost and all(each.lost or each.reason == "group_doomed" for each in found):
                loss = Loss(step=ledger.step, take=take, failures=failures_of(ledger, lost))
                task_id = found[0].planned.task_id
                await self._write(Record(digest=digest, task_id=task_id, losses=(*before, loss)))
                if (why := self.why(digest)) is not None:
                    log.warning("task %s is set aside: %s", task_id, why)

    async def _write(self, record: Record) -> None:
        assert self._records is not None
        self._records[record.digest] = record
        try:
            await self._store.put(self._key(record.digest), record.model_dump_json(indent=1).encode())
        except StoreError as error:
            log.warning("%s; should the run be started again, it does not know of this loss", error)

    def _key(self, digest: str) -> str:
        return f"{self._prefix}{digest}.json"
