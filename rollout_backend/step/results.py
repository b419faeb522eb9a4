"""Receive the results of one step, and report what came of it.

Invariants:

- a result settles its rollout once; a later result of the same rollout is counted, and changes nothing;
- with a scorer, a result that can be scored settles its rollout once it is: see `scoring`;
- a failure marker of an attempt that an earlier trainer started does not settle its rollout: its gateway may have
  been unreachable during the restart, so the rollout has another attempt;
- nor does that of a container that the runtime stopped while its agent ran, if an attempt is left.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future

from agent_wrapper.contract import ContractError, Rollout
from rollout_backend.gateway.stats import EngineUseMeter
from rollout_backend.results.records import RolloutRecord, records_of
from rollout_backend.results.rollout_spans import Delivery
from rollout_backend.results.step_report import StepResult, failures_of, make_report
from rollout_backend.step.group import Group
from rollout_backend.step.rollout_task import RolloutTask, StepContext
from rollout_backend.step.scoring import StepScoring


class StepResults:
    """The results of one step, in the order of their arrival. It is the buffer's `ResultSink`."""

    def __init__(
        self, context: StepContext, rollouts: Mapping[str, RolloutTask], groups: Mapping[str, Group]
    ) -> None:
        self.step = context.step
        self.rollouts = rollouts
        self.resumed = 0  # rollouts that an earlier trainer had finished
        self.adopted = 0  # rollouts whose agents an earlier trainer had started
        self.received: list[Rollout] = []
        self.deliveries: dict[str, Delivery] = {}  # of those received
        self._context = context
        self._groups = groups
        self.scoring = StepScoring(context, self._settle)
        self._archiving: deque[Future[bool]] = deque()  # of results whose files may not be written yet
        self._unarchived = 0  # results that could not be written
        self.engine_use = EngineUseMeter()  # while the step runs
        self.latencies: list[float] = []  # seconds since the announcements of those that were announced
        self._lags: list[float] = []

    # --- the buffer's sink --------------------------------------------------------------------------------

    def is_wanted(self, rollout_id: str, attempt: int | None = None) -> bool:
        awaited = self._context.ledger.awaits_result(rollout_id)
        return awaited and attempt in (None, self.rollouts[rollout_id].entry.attempt)

    def session_id(self, rollout_id: str, attempt: int) -> str:
        return self._context.plan.manifest.session_id(rollout_id, attempt)

    def pending(self) -> list[tuple[str, int]]:
        entries = self._context.ledger.open_entries()
        return [(entry.rollout_id, entry.attempt) for entry in entries if entry.awaits_result]

    def record_duplicate(self, rollout_id: str) -> None:
        self._context.ledger.count_extra(rollout_id)

    def on_result(
        self,
        rollout: Rollout,
        data: bytes,
        announced_at: float | None,
        failure_marker: bool = False,
        fetch_s: float = 0.0,
    ) -> None:
        if not self.is_wanted(rollout.rollout_id):
            self.record_duplicate(rollout.rollout_id)
            return
        task = self.rollouts[rollout.rollout_id]
        if failure_marker and task.retry_lost(rollout.failure):
            self.record_duplicate(rollout.rollout_id)
            return
        services = self._context.services
        self.deliveries[rollout.rollout_id] = Delivery(announced_at, fetch_s)
        now = services.wall()
        if announced_at is not None:
            self.latencies.append(max(0.0, now - announced_at))
        if rollout.finished_at:
            self._lags.append(max(0.0, now - rollout.finished_at))
        if services.scorer is None or not rollout.can_be_scored:
            self._settle(task, rollout, data)
        else:
            self.scoring.start(services.scorer, task, rollout, data)

    def _settle(self, task: RolloutTask, rollout: Rollout, data: bytes) -> None:
        self._archiving.append(self._context.services.archive.write_rollout(rollout, data))
        while self._archiving and self._archiving[0].done():
            self._count_archived()
        self.received.append(rollout)
        self._groups[task.entry.planned.task_id].arrived.append(rollout)
        task.settle_with(rollout)

    def on_invalid_result(self, rollout_id: str, error: ContractError) -> None:
        self.rollouts[rollout_id].settle_as_invalid(str(error))

    # --- the report ---------------------------------------------------------------------------------------

    def records(self) -> list[RolloutRecord]:
        """Return one record for each planned rollout."""
        return records_of(self._context.ledger, self._context.services.log_of, self.received)

    def _count_archived(self) -> None:
        written = self._archiving.popleft()
        self._unarchived += written.exception() is not None or not written.result()

    async def _finish_archiving(self) -> int:
        """Wait until the results are in the run's folder, and return how many could not be written."""
        await asyncio.gather(*map(asyncio.wrap_future, self._archiving), return_exceptions=True)
        while self._archiving:
            self._count_archived()
        return self._unarchived

    async def summarize(self, *, seconds: float, refused: int, deadline_reached: bool) -> StepResult:
        """Return the result of a step that is over. `refused` counts the buffer's refused messages."""
        unarchived = await self._finish_archiving()
        ledger = self._context.ledger
        groups = [group.result(ledger) for group in self._groups.values()]
        report = make_report(
            self._context.services.config.run_id,
            ledger,
            groups,
            self.received,
            self.latencies,
            self._lags,
            refused=refused,
            unarchived=unarchived,
            resumed=self.resumed,
            reattached=self.adopted,
            seconds=seconds,
            deadline_reached=deadline_reached,
            engine_use=self.engine_use.result(),
        )
        records = tuple(self.records())
        return StepResult(self.step, tuple(self.received), tuple(groups), failures_of(ledger), report, records)
