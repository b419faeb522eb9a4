"""Run one step from its plan to its report.

Invariants:

- nothing is dispatched before the step's manifest is in S3. A restarted step resumes from it (see `restart`);
- a rollout is declared timed out, and a container that fell silent or ended is lost, only after S3 has confirmed that
  there is no result (see `absence_check`); until then the rollout stays open, at most until the step's deadline;
- each settled rollout is reported to the run's circuit breaker, and nothing is dispatched once the breaker is open;
- however a step ends (target, deadline, abort, cancellation), every rollout is settled, every session is closed and
  every key is revoked before `run` returns, unless another manager has taken the run over and owns the sessions;
- the cost of an event does not depend on the size of the step: the step uses the ledger's counts, and never iterates
  over all rollouts before it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable

from agent_wrapper.contract import Outcome
from rollout_backend.base.logs import bind_log_fields
from rollout_backend.core.ledger import RUN_FAILED, TASK_BLOCKED, LedgerEntry, Phase
from rollout_backend.core.manifest import StepRequest
from rollout_backend.core.policy import GroupPolicy
from rollout_backend.errors import CircuitOpen, RunHeld
from rollout_backend.model.serving.supervisor import cancel_all, first_of
from rollout_backend.run.accounts.progress import StepTotals
from rollout_backend.run.accounts.step_report import GroupResult, StepResult
from rollout_backend.run.step.absence_check import AbsenceCheck
from rollout_backend.run.step.restart import resume
from rollout_backend.run.step.results import Group, StepResults
from rollout_backend.run.step.rollout_task import RolloutTask, StepContext
from rollout_backend.run.step.services import StepServices

log = logging.getLogger(__name__)


class Step:
    """One step of a run. `run` it once."""

    def __init__(
        self,
        request: StepRequest,
        services: StepServices,
        on_group: Callable[[GroupResult], None] = lambda group: None,
    ) -> None:
        """`on_group` is called once for each group, when all its rollouts are settled or the step is over."""
        self.step = request.step
        self.name = request.name
        self.adapter = request.adapter
        self.groups = {task.task_id: Group(task, services.config.group) for task in request.tasks}
        self.rollouts: dict[str, RolloutTask] = {}
        self.deadline_reached = False
        self._services = services
        self._on_group = on_group
        self._policy = GroupPolicy(services.config.group)
        self._context = StepContext(request, services, self.groups)
        self.early_end = self._context.early_end
        self.ledger = self._context.ledger
        self._plan = self._context.plan
        self._sessions = self._context.sessions
        self._changed = self._context.changed
        self.results = StepResults(self._context, self.rollouts, self.groups)
        self.latencies = self.results.latencies
        self.totals = StepTotals(self.results.records)
        self._absence_check = AbsenceCheck(self._context, self.results)
        self._complete: set[str] = set()
        self._reported_to_breaker = 0
        self._silence_checked_at = 0.0

    @property
    def deadline(self) -> float:
        """Return the latest time at which the step ends, in loop seconds."""
        return self._plan.deadline

    # --- from plan to report ------------------------------------------------------------------------------

    async def run(self) -> StepResult:
        """Collect until the policy is satisfied or the deadline passes.

        Raises:
            LedgerError: the ledger does not reconcile.
            StoreError: S3 refused the step's manifest until the step's deadline; nothing was dispatched.
            RunHeld: another manager has taken the run over.
            CircuitOpen: the run's breaker has opened, in this step or before it.
            The error passed to `early_end.abort`.
        """
        bind_log_fields(step=self.step)
        began = self._silence_checked_at = asyncio.get_running_loop().time()
        began_at = self._services.wall()
        config, buffer = self._services.config, self._services.buffer
        refused_before = buffer.refused
        self._plan.deadline = began + config.timeouts.collection_s
        buffer.attach(self.results)
        listing = asyncio.create_task(buffer.list_when_idle(self.results, config.collect))
        listing.add_done_callback(self.early_end.abort_on_failure)
        try:
            await first_of(self._collect(), self.early_end.requested.wait())
        except RunHeld as error:
            self.early_end.abort(error)
            raise
        except asyncio.CancelledError:
            self._settle_open("aborted", "the step was cancelled from outside")
            raise
        finally:
            closing = asyncio.get_running_loop().time()
            listing.cancel()
            self._absence_check.cancel()
            try:
                await self._wind_up()
            finally:
                buffer.detach(self.results)
                # The breaker must also learn that no rollout of a cancelled step runs any more.
                self._report_to_breaker()
        self._report_groups(self.groups.values())
        if self.early_end.error is not None:
            raise self.early_end.error
        self.ledger.reconcile(self.name)
        resume_count = self._plan.manifest.resume_count
        await self._services.blocklist.record_step(self.ledger, resume_count, self._context.request)
        ended = asyncio.get_running_loop().time()
        return await self.results.summarize(
            seconds=ended - began,
            began_at=began_at,
            closing_s=ended - closing,
            refused=buffer.refused - refused_before,
            deadline_reached=self.deadline_reached,
        )

    async def _begin(self) -> None:
        """Plan the rollouts, write the manifest, resume an earlier trainer's rollouts, and start the other ones."""
        await self._plan.retry(self._services.blocklist.read)
        groups, before = self.groups.values(), await self._plan.write_first()
        for planned in self._plan.manifest.tasks:
            group = self.groups[planned.task_id]
            for i, rollout_id in enumerate(planned.rollouts):
                self._add_rollout(group, rollout_id, is_replacement=i >= group.planned)
        await resume(before, self.results, self._context)
        # Losses of an earlier trainer must not open the breaker again.
        self._reported_to_breaker = len(self.ledger.settled)
        if self._plan.manifest.resumed:
            # The results of the earlier trainer may be enough.
            self._apply_policy(groups)
        for group in groups:
            why = self._services.blocklist.block_reason(group.task)
            for rollout in group.rollouts:
                # A result that is being scored counts.
                if why is not None and rollout.scoring is None:
                    rollout.settle(Outcome.INFRA_ERROR, TASK_BLOCKED, why)
                rollout.start()

    async def _collect(self) -> None:
        self._report_to_breaker()
        if self.early_end.error is None:
            await self._begin()
        while self.early_end.error is None:
            self._changed.clear()
            self._report_to_breaker()
            changed = [self.groups[task_id] for task_id in self.ledger.take_changed_groups()]
            if self.early_end.error is not None or self._apply_policy(changed):
                return
            self._report_groups(changed)
            now = asyncio.get_running_loop().time()
            if now >= self.deadline:
                await self._reach_deadline()
                return
            wake_at = min(self.deadline, self._end_late(now))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(wake_at - now, 0.001)):
                    await self._changed.wait()

    def _apply_policy(self, changed: Collection[Group]) -> bool:
        """Replace and cancel rollouts of these groups. Return True if no rollout of the step is open any more."""
        for group in changed:
            (self._complete.add if group.complete else self._complete.discard)(group.task_id)
        groups = self.groups.values() if self._policy.target_reached(len(self._complete)) else changed
        decision = self._policy.decide(groups)
        for task_id, count in decision.replace.items():
            for _ in range(count):
                rollout_id = self._plan.add_rollout(task_id)
                self._add_rollout(self.groups[task_id], rollout_id, is_replacement=True).start_once_recorded()
        for rollout_id, reason in decision.cancel.items():
            self.rollouts[rollout_id].settle(Outcome.CANCELLED, reason)
        return self.ledger.open == 0

    def _add_rollout(self, group: Group, rollout_id: str, is_replacement: bool) -> RolloutTask:
        entry = self.ledger.plan(rollout_id, group.task_id, is_replacement=is_replacement)
        rollout = RolloutTask(entry, group.task, self._context)
        self.rollouts[rollout_id] = rollout
        group.rollouts.append(rollout)
        return rollout

    # --- late rollouts ------------------------------------------------------------------------------------

    def _end_late(self, now: float) -> float:
        """Check the rollouts that are overdue, stragglers or silent. Return when to check again."""
        overdue, next_overdue = self.ledger.take_overdue(now)
        self._absence_check.start([self.rollouts[each.rollout_id] for each in overdue], RolloutTask.on_overdue)
        stragglers, next_straggler = self._context.stragglers.due(now, self.ledger.open)
        self._absence_check.start([self.rollouts[each] for each in stragglers], RolloutTask.settle_straggler)
        heartbeats = self._services.heartbeats
        if now >= self._silence_checked_at + heartbeats.poll_s:
            self._silence_checked_at = now
            lost = heartbeats.lost_sessions
            silent = [self.rollouts[name] for name, each in self.ledger.running.items() if each.session_id in lost]
            self._absence_check.start(silent, RolloutTask.on_container_lost)
        return min(next_overdue, next_straggler, self._silence_checked_at + heartbeats.poll_s)

    async def _reach_deadline(self) -> None:
        self.deadline_reached = True
        await self._absence_check.finish(self._open_rollouts(), RolloutTask.reach_step_deadline)
        while scoring := [task for each in self._open_rollouts() if (task := each.scoring) and not task.done()]:
            # Scoring ends at the deadline too.
            await asyncio.gather(*scoring, return_exceptions=True)
        for rollout in self._open_rollouts():
            rollout.reach_step_deadline(answered=False)

    # --- end of the step ----------------------------------------------------------------------------------

    async def _wind_up(self) -> None:
        """Settle the open rollouts, and wait until every session is closed and every task is over."""
        if self.early_end.error is not None:
            for rollout in self._open_rollouts():
                rollout.settle(Outcome.INFRA_ERROR, RUN_FAILED, str(self.early_end.error))
        if self.early_end.leave_open:
            await self._leave()
            return
        self._settle_open("step_over", "the step was over before this rollout was")
        running = self._running()
        await self._absence_check.wait()
        await self._sessions.revoke_all()
        # The error of a task has already ended the step.
        await asyncio.gather(*running, return_exceptions=True)
        await self._sessions.wait_closed()
        # A task that failed may have left its session open.
        for session_id in [*self.ledger.open_sessions]:
            self._sessions.close_later(session_id)
        await self._sessions.wait_closed()
        # Otherwise sessions may be open, and the next trainer needs the records.
        sessions = self._sessions
        if sessions.earlier_known and not self.early_end.leave_open and not self.ledger.unclosed_sessions:
            manifest = self._plan.manifest
            if not running or await self._plan.record_closed(manifest.attempts_before + manifest.attempts):
                await self._services.in_flight.delete(self.step)

    async def _leave(self) -> None:
        """Cancel this step's tasks without changing sessions, manifest or records."""
        while tasks := [task for task in (*self._running(), *self._sessions.closing) if not task.done()]:
            await cancel_all(tasks)

    def _running(self) -> list[asyncio.Task[None]]:
        tasks = (each for rollout in self.rollouts.values() for each in (rollout.running, rollout.scoring))
        return [task for task in tasks if task is not None]

    def _open_rollouts(self) -> list[RolloutTask]:
        return [self.rollouts[entry.rollout_id] for entry in self.ledger.open_entries()]

    def _settle_open(self, reason: str, message: str) -> None:
        for rollout in self._open_rollouts():
            rollout.settle(Outcome.CANCELLED, reason, message)

    def release(self) -> None:
        """Release the memory of a step that has ended and has been reported.

        Its parts refer to each other, so its results would otherwise stay in memory until a full garbage collection,
        which may be many steps later. The ledger counts a result that arrives after this as unknown.
        """
        for rollout in self.rollouts.values():
            # The traceback of a task's exception refers to the rollout.
            rollout.running = rollout.scoring = None
        self.rollouts.clear()
        self.groups.clear()
        self.ledger.entries.clear()
        self.ledger.settled.clear()

    # --- reports ------------------------------------------------------------------------------------------

    def running_records(self) -> list[str]:
        """Return the records of the step so far as JSON, with the deadline of each open rollout."""
        to_wall = self._services.wall() - asyncio.get_running_loop().time()

        def ends_at(entry: LedgerEntry) -> float:
            return to_wall + (self.deadline if entry.deadline is None else entry.deadline)

        return self.results.records.lines(ends_at)

    def _report_to_breaker(self) -> None:
        """Report settled rollouts to the circuit breaker, and abort the step if the breaker is open."""
        breaker, now = self._services.breaker, asyncio.get_running_loop().time()
        settled = self.ledger.settled
        for i in range(self._reported_to_breaker, len(settled)):
            breaker.record_settled(settled[i], now, self._services.log_of(settled[i]))
        self._reported_to_breaker = len(settled)
        breaker.evaluate(self.step, self.ledger.phases()[Phase.RUNNING])
        if breaker.opened is not None and self.early_end.error is None:
            self.early_end.abort(CircuitOpen(breaker.opened))

    def _report_groups(self, groups: Iterable[Group]) -> None:
        for group in groups:
            if not group.reported and not group.open:
                group.reported = True
                self._on_group(group.result(self.ledger))
