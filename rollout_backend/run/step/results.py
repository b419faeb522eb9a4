"""Receive, score and group the results of one step, and report on the step.

Invariants:

- a result settles its rollout once; later results of the same rollout are counted and have no effect;
- with a scorer, a result with a reward settles its rollout only once the scorer's reward has replaced the agent's. It
  holds no slot of the runtime while it is scored;
- a failure marker of an attempt that an earlier trainer started does not settle its rollout: its gateway may have
  been unreachable during the restart, so the rollout has another attempt;
- if an attempt is left, nor does the failure marker of a container that the runtime stopped while its agent ran, or
  of one that did not reach a gateway which others have reached.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import Future

from agent_wrapper.contract import ContractError, Rollout
from rollout_backend.config import GroupConfig
from rollout_backend.core.ledger import Ledger
from rollout_backend.core.policy import GroupState
from rollout_backend.core.tasks import Task
from rollout_backend.model.gateway.stats import EngineUseMeter
from rollout_backend.run.accounts.records import StepRecords
from rollout_backend.run.accounts.rollout_spans import Delivery
from rollout_backend.run.accounts.step_report import GroupResult, StepResult, failures_of, make_report
from rollout_backend.run.scoring.rollout_scorer import RolloutScorer
from rollout_backend.run.step.rollout_task import RolloutTask, StepContext


class Group(GroupState):
    """The rollouts of one task. The ledger keeps the counts."""

    def __init__(self, task: Task, config: GroupConfig) -> None:
        size = task.rollouts or config.size
        super().__init__(
            task_id=task.task_id,
            needed=size if config.policy == "strict" else min(config.needed, size),
            enough=size if config.oversample else None,
            spare=config.oversample,
        )
        self.task = task
        # `planned` excludes replacements. The lists are in the order of planning and of arrival.
        self.planned = size + config.oversample
        self.rollouts: list[RolloutTask] = []
        self.arrived: list[Rollout] = []
        self.reported = False

    def result(self, ledger: Ledger) -> GroupResult:
        """Return the group's trainable results; if it is oversampled, only the first ones up to its size."""
        results = [rollout.result for rollout in self.rollouts if rollout.result is not None]
        trained = [rollout.rollout_id for rollout in self.arrived if rollout.trainable][: self.enough]
        return GroupResult(
            self.task,
            tuple(result for result in results if result.rollout_id in trained),
            usable=self.usable,
            planned=len(self.rollouts),
            failures=failures_of(ledger, [rollout.rollout_id for rollout in self.rollouts]),
        )


class StepResults:
    """The results of one step, in the order of their arrival. It is the buffer's `ResultSink`."""

    def __init__(
        self, context: StepContext, rollouts: Mapping[str, RolloutTask], groups: Mapping[str, Group]
    ) -> None:
        self.step = context.request.step
        self.rollouts = rollouts
        # Rollouts that an earlier trainer finished, and rollouts whose agents it started.
        self.resumed = 0
        self.adopted = 0
        self.received: list[Rollout] = []
        self.records = StepRecords(context.ledger, context.services.log_of, self.received)
        self.deliveries: dict[str, Delivery] = {}
        self._context = context
        self._groups = groups
        self._archiving: deque[Future[bool]] = deque()
        self._unarchived = 0
        self.engine_use = EngineUseMeter()
        self.restarts: Counter[str] = Counter()
        self.latencies: list[float] = []
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
        if not self.is_wanted(rollout.rollout_id, rollout.attempt if failure_marker else None):
            # The rollout was settled, or its attempt was abandoned, during the fetch.
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
            task.start_scoring(rollout, self._score(services.scorer, task, rollout, data))

    async def _score(self, scorer: RolloutScorer, task: RolloutTask, rollout: Rollout, data: bytes) -> None:
        plan, services = self._context.plan, self._context.services
        result = await scorer.score(
            rollout,
            data,
            task.task,
            deadline=plan.deadline,
            retry_s=services.config.scoring.retry_s,
            store_pause=services.pauses.store,
            may_be_recorded=plan.manifest.resumed,
        )
        if task.entry.outcome is None:
            self._settle(task, result, result.encode())

    def _settle(self, task: RolloutTask, rollout: Rollout, data: bytes) -> None:
        self._archiving.append(self._context.services.archive.write_rollout(rollout, data))
        while self._archiving and self._archiving[0].done():
            self._count_archived()
        self.received.append(rollout)
        self._groups[task.entry.task_id].arrived.append(rollout)
        task.settle_with(rollout)

    def on_invalid_result(self, rollout_id: str, error: ContractError) -> None:
        rollout = self.rollouts.get(rollout_id)
        # The step may have ended during the fetch.
        if rollout is not None:
            rollout.settle_as_invalid(str(error))

    # --- the report ---------------------------------------------------------------------------------------

    def _count_archived(self) -> None:
        written = self._archiving.popleft()
        self._unarchived += not written.done() or written.exception() is not None or not written.result()

    async def summarize(
        self, *, seconds: float, began_at: float, closing_s: float, refused: int, deadline_reached: bool
    ) -> StepResult:
        """Return the result of a finished step. `refused` counts the buffer's refused messages."""
        # If the disk does not respond, the local copies are lost.
        await self._context.services.archive.wait(*self._archiving)
        while self._archiving:
            self._count_archived()
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
            unarchived=self._unarchived,
            resumed=self.resumed,
            reattached=self.adopted,
            seconds=seconds,
            began_at=began_at,
            closing_s=closing_s,
            deadline_reached=deadline_reached,
            engine_use=self.engine_use.result(),
            restarts=self.restarts,
        )
        records = tuple(self.records.all())
        return StepResult(self.step, tuple(self.received), tuple(groups), failures_of(ledger), report, records)
