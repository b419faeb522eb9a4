"""Run one step from its plan to its report.

Invariants:

- nothing is dispatched before the step's manifest is in S3. A restarted step resumes from it (see `restart`);
- a rollout is declared timed out, and a silent container lost, only after S3 has confirmed that there is no result
  (see `absence_check`); until then the rollout stays open, at most until the step's deadline;
- each settled rollout is reported to the run's circuit breaker, and nothing is dispatched once the breaker is open;
- however a step ends (target, deadline, abort, cancellation), every rollout is settled, every session is closed and
  every key is revoked before `run` returns; unless another manager has taken the run over, which owns them now;
- one event costs the same in a step of any size: the step asks the ledger's counts, and never goes through all
  rollouts before it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any

from agent_wrapper.contract import ContractError, Outcome, Rollout, Sampling
from rollout_backend.core.ledger import TASK_BLOCKED, Ledger, Phase, PlannedRollout
from rollout_backend.core.manifest import payload_digest
from rollout_backend.core.policy import GroupPolicy, StragglerRule, Stragglers
from rollout_backend.core.report import GroupResult, StepResult, failures_of, make_report
from rollout_backend.core.tasks import Task
from rollout_backend.errors import CircuitOpen, CloudLost, RunHeld, StoreError
from rollout_backend.step.absence_check import AbsenceCheck
from rollout_backend.step.group import Group
from rollout_backend.step.plan import StepPlan
from rollout_backend.step.restart import can_check, resume
from rollout_backend.step.rollout_task import RolloutTask, StepContext
from rollout_backend.step.services import StepServices
from rollout_backend.step.sessions import StepSessions

log = logging.getLogger(__name__)

_ABSENCE_CHECK_S = 15.0  # for the listing before a deadline is carried out


class Step:
    """One step of a run. `run` it once. It is the buffer's `ResultSink`."""

    def __init__(
        self,
        number: int,
        tasks: Sequence[Task],
        services: StepServices,
        sampling: Sampling | None,
        on_group: Callable[[GroupResult], None] = lambda group: None,
        *,
        weights: str = "",
        same_weights: bool = True,
    ) -> None:
        """`on_group` is called with each group once: when all of it is settled, or the step is over.

        `weights` names the weights that are served now. If `same_weights` is False, results of an earlier trainer
        were sampled from others and are not used.
        """
        self.step = number
        self.ledger = Ledger(number)
        self.rollouts: dict[str, RolloutTask] = {}
        self.groups = {task.task_id: Group(task, services.config.group) for task in tasks}
        self.resumed = 0  # rollouts that an earlier trainer had finished
        self.deadline_reached = False
        self._services = services
        self._weights = weights
        self._same_weights = same_weights
        self._on_group = on_group
        self._policy = GroupPolicy.from_config(services.config.group)
        self._plan = StepPlan(number, services)
        self._sessions = StepSessions(number, services, self.ledger)
        stragglers = Stragglers(StragglerRule.from_config(services.config.group), self._is_running)
        self._context = StepContext(
            step=number,
            services=services,
            sampling=sampling or services.config.sampling,
            ledger=self.ledger,
            plan=self._plan,
            sessions=self._sessions,
            stragglers=stragglers,
            abort=self.abort,
        )
        self._changed = self._context.changed
        self._absence_check = AbsenceCheck(services.buffer, self)
        self._asking: set[asyncio.Task[None]] = set()
        self._complete: set[str] = set()  # groups
        self._results: list[Rollout] = []  # in the order of their arrival
        self._unarchived = 0
        self._latencies: list[float] = []
        self._lags: list[float] = []
        self._reported_to_breaker = 0  # of the ledger's settled rollouts
        self._silence_checked_at = 0.0
        self._adopted = 0
        self._aborted: BaseException | None = None
        self._stopped = asyncio.Event()  # set with `_aborted`

    @property
    def deadline(self) -> float:
        """Return the loop's time at which the step ends at the latest."""
        return self._plan.deadline

    # --- from plan to report ------------------------------------------------------------------------------

    async def run(self) -> StepResult:
        """Collect until the policy is satisfied or the deadline passes.

        Raises:
            LedgerError: the books do not balance.
            StoreError: S3 refused the step's manifest until the step's deadline; nothing was dispatched.
            RunHeld: another manager has taken the run over.
            CircuitOpen: the run's breaker has opened, in this step or before it.
            The error passed to `abort`.
        """
        began = self._silence_checked_at = asyncio.get_running_loop().time()
        config, buffer = self._services.config, self._services.buffer
        refused_before = buffer.refused
        self._plan.deadline = began + config.timeouts.collection_s
        buffer.attach(self)
        listing = asyncio.create_task(buffer.list_when_idle(self, config.collect))
        listing.add_done_callback(self._abort_on_failure)
        try:
            await self._unless_stopped(self._begin())
            await self._collect()
        except RunHeld as error:
            self.abort(error)
            raise
        except asyncio.CancelledError:
            self._settle_open("aborted", "the step was cancelled from outside")
            raise
        finally:
            for helper in (listing, *self._asking):
                helper.cancel()
            try:
                await self._wind_up()
            finally:
                buffer.detach(self)
        self._report_to_breaker()
        self._report_groups(self.groups.values())
        if self._aborted is not None:
            raise self._aborted
        self.ledger.reconcile()
        await self._record_lost_tasks()
        return self._result(asyncio.get_running_loop().time() - began, buffer.refused - refused_before)

    async def _begin(self) -> None:
        """Plan the rollouts, write the manifest, reuse what an earlier trainer left, and start the rest."""
        self._report_to_breaker()
        if self._aborted is not None:
            return
        await self._plan.retry(self._services.blocklist.read)
        groups, sampling = self.groups.values(), self._context.sampling
        before = await self._plan.write_first(
            [(group.task, group.planned, group.task.sampling or sampling) for group in groups],
            weights=self._weights,
            can_resume=lambda before: self._same_weights and can_check(before, self._services.sealed_by),
        )
        for planned in self._plan.manifest.tasks:
            group = self.groups[planned.task_id]
            for i, rollout_id in enumerate(planned.rollouts):
                self._add_rollout(group, rollout_id, replaces=i >= group.planned)
        resumed = await resume(before, self.rollouts, self, self._context)
        self.resumed, self._adopted = resumed.finished, len(resumed.adopted)
        if self._plan.manifest.resumed:
            self._apply_policy(groups)  # the results of the earlier trainer may be enough
        for group in groups:
            why = self._services.blocklist.block_reason(payload_digest(group.task))
            for rollout in group.rollouts:
                if why is not None:
                    rollout.settle(Outcome.INFRA_ERROR, TASK_BLOCKED, why)
                rollout.start()

    async def _collect(self) -> None:
        while self._aborted is None:
            self._changed.clear()
            self._report_to_breaker()
            changed = [self.groups[state.task_id] for state in self.ledger.take_changed_groups()]
            if self._aborted is not None or self._apply_policy(changed):
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
            (self._complete.add if group.state.complete else self._complete.discard)(group.task.task_id)
        groups = self.groups.values() if self._policy.target_reached(len(self._complete)) else changed
        decision = self._policy.decide([group.state for group in groups])
        for task_id, count in decision.replace:
            for _ in range(count):
                rollout_id = self._plan.add_rollout(task_id)
                self._add_rollout(self.groups[task_id], rollout_id, replaces=True).start_once_recorded()
        for cancellation in decision.cancel:
            self.rollouts[cancellation.rollout_id].settle(Outcome.CANCELLED, cancellation.reason)
        return self.ledger.open == 0

    def _add_rollout(self, group: Group, rollout_id: str, replaces: bool) -> RolloutTask:
        self.ledger.groups[group.task.task_id] = group.state
        self.ledger.plan([PlannedRollout(rollout_id, group.task.task_id, replaces)])
        rollout = RolloutTask(self.ledger.entries[rollout_id], group.task, self._context)
        self.rollouts[rollout_id] = rollout
        group.rollouts.append(rollout)
        return rollout

    def rewards(self) -> list[float]:
        """Return the rewards that have arrived."""
        return [rollout.reward for rollout in self._results if rollout.reward is not None]

    # --- rollouts that are late ---------------------------------------------------------------------------

    def _end_late(self, now: float) -> float:
        """End the rollouts that are overdue, stragglers or silent. Return when the next one may be."""
        overdue, self._context.overdue = self._context.overdue, []
        self._confirm_absent(RolloutTask.time_out, overdue)
        stragglers, next_at = self._context.stragglers.due(now, self.ledger.open)
        self._confirm_absent(RolloutTask.cut_off, [self.rollouts[each] for each in stragglers])
        heartbeats = self._services.heartbeats
        if now >= self._silence_checked_at + heartbeats.poll_s:
            self._silence_checked_at = now
            self._confirm_absent(RolloutTask.lose_container, self._silent(heartbeats.lost_sessions))
        return min(next_at, self._silence_checked_at + heartbeats.poll_s)

    def _silent(self, session_ids: Collection[str]) -> list[RolloutTask]:
        """Return the running rollouts of these sessions."""
        if not session_ids:
            return []
        entries = self.ledger.open_entries()
        silent = [each for each in entries if each.phase is Phase.RUNNING and each.session_id in session_ids]
        return [self.rollouts[entry.planned.rollout_id] for entry in silent]

    def _is_running(self, rollout_id: str, began: float) -> bool:
        rollout = self.rollouts[rollout_id]
        return rollout.entry.phase is Phase.RUNNING and rollout.began == began

    def _confirm_absent(self, settle: Callable[[RolloutTask], None], rollouts: Iterable[RolloutTask]) -> None:
        """Call `settle` with each rollout once S3 has confirmed that it has no result of it."""
        fresh = self._absence_check.begin(rollouts)
        if fresh:
            asking = asyncio.create_task(self._until_answered(fresh, settle))
            self._asking.add(asking)
            asking.add_done_callback(self._asking.discard)
            asking.add_done_callback(self._abort_on_failure)

    async def _until_answered(self, rollouts: set[RolloutTask], settle: Callable[[RolloutTask], None]) -> None:
        with contextlib.suppress(StoreError):  # at the step's deadline, which settles them
            await self._plan.retry(lambda: self._absence_check.ask(rollouts, settle))
        self._changed.set()

    async def _reach_deadline(self) -> None:
        self.deadline_reached = True
        for asking in self._asking:
            asking.cancel()
        unanswered = {self.rollouts[entry.planned.rollout_id] for entry in self.ledger.open_entries()}
        try:
            async with asyncio.timeout(_ABSENCE_CHECK_S):
                await self._absence_check.ask(unanswered, RolloutTask.reach_step_deadline)
        except (StoreError, TimeoutError) as error:
            log.warning("step %d is out of time, and S3 fails: %s", self.step, error or "no answer in time")
        for rollout in self._open_rollouts():
            rollout.reach_step_deadline(answered=rollout not in unanswered)

    # --- its end ------------------------------------------------------------------------------------------

    def abort(self, error: BaseException) -> None:
        """End the step now: open rollouts were lost to the infrastructure. `run` raises `error`."""
        self._aborted = error
        self._sessions.leave_open = isinstance(error, (RunHeld, CloudLost))  # another manager's, or gone
        self._stopped.set()
        for rollout in self._open_rollouts():
            rollout.settle(Outcome.INFRA_ERROR, "run_failed", str(error))
        self._changed.set()

    def _abort_on_failure(self, helper: asyncio.Task[None]) -> None:
        """End the step with the error of a background task, which is not awaited. Otherwise a step without a queue
        would notice expired credentials, for example, only at its deadline."""
        error = None if helper.cancelled() else helper.exception()
        if error is not None:
            self.abort(error)

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` to its end; cancel it if the step is aborted."""
        working, stopped = asyncio.create_task(work), asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            for task in (working, stopped):
                task.cancel()
            await asyncio.gather(working, stopped, return_exceptions=True)

    async def _wind_up(self) -> None:
        """Settle what is left, and wait until every session is closed and every task is over."""
        if self._sessions.leave_open:
            await self._leave()
            return
        self._settle_open("step_over", "the step was over before this rollout was")
        running = self._running()
        await asyncio.gather(*self._asking, return_exceptions=True)
        await self._sessions.revoke_all()
        faults = await asyncio.gather(*running, return_exceptions=True)
        await self._sessions.wait_closed()
        if running:
            manifest = self._plan.manifest
            await self._plan.record_closed(manifest.attempts_before + manifest.attempts)
        if self._sessions.earlier_known:
            self._services.in_flight.delete(self.step)
        for fault in faults:
            if isinstance(fault, Exception):
                raise fault

    async def _leave(self) -> None:
        """Cancel this step's tasks without changing sessions, manifest or records."""
        while tasks := [task for task in (*self._running(), *self._sessions.closing) if not task.done()]:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _running(self) -> list[asyncio.Task[None]]:
        return [rollout.running for rollout in self.rollouts.values() if rollout.running is not None]

    def _open_rollouts(self) -> list[RolloutTask]:
        return [self.rollouts[entry.planned.rollout_id] for entry in self.ledger.open_entries()]

    def _settle_open(self, reason: str, message: str) -> None:
        for rollout in self._open_rollouts():
            rollout.settle(Outcome.CANCELLED, reason, message)

    # --- the buffer's sink --------------------------------------------------------------------------------

    def is_wanted(self, rollout_id: str, attempt: int | None = None) -> bool:
        return self.ledger.is_open(rollout_id) and attempt in (None, self.rollouts[rollout_id].attempt)

    def session_id(self, rollout_id: str, attempt: int) -> str:
        return self._plan.manifest.session_id(rollout_id, attempt)

    def pending(self) -> list[tuple[str, int]]:
        return [(rollout.rollout_id, rollout.attempt) for rollout in self._open_rollouts()]

    def record_duplicate(self, rollout_id: str) -> None:
        self.ledger.record_duplicate(rollout_id)

    def on_result(self, rollout: Rollout, announced_at: float | None, failure_marker: bool = False) -> None:
        if not self.is_wanted(rollout.rollout_id):
            self.record_duplicate(rollout.rollout_id)
            return
        task = self.rollouts[rollout.rollout_id]
        if failure_marker and task.adopted is not None:  # its gateway may have been unreachable: retry
            task.abandon_adopted()
            self.record_duplicate(rollout.rollout_id)
            return
        self._unarchived += not self._services.archive(rollout)
        self._results.append(rollout)
        self.groups[task.entry.planned.task_id].arrived.append(rollout)
        now = self._services.wall()
        if announced_at is not None:
            self._latencies.append(max(0.0, now - announced_at))
        if rollout.finished_at:
            self._lags.append(max(0.0, now - rollout.finished_at))
        task.settle_with(rollout)

    def on_invalid_result(self, rollout_id: str, error: ContractError) -> None:
        self.rollouts[rollout_id].settle_as_invalid(str(error))

    # --- what it reports ----------------------------------------------------------------------------------

    def _report_to_breaker(self) -> None:
        """Report what has ended to the circuit breaker, and abort the step if the breaker is open."""
        breaker, now = self._services.breaker, asyncio.get_running_loop().time()
        settled = self.ledger.settled
        for i in range(max(self._reported_to_breaker, self.resumed), len(settled)):
            breaker.record_settled(settled[i], now)
        self._reported_to_breaker = len(settled)
        breaker.evaluate(self.step, self.ledger.phases()[Phase.RUNNING])
        if breaker.opened is not None and self._aborted is None:
            self.abort(CircuitOpen(breaker.opened))

    def _report_groups(self, groups: Iterable[Group]) -> None:
        for group in groups:
            if not group.reported and not group.state.open:
                group.reported = True
                self._on_group(group.result(self.ledger))

    async def _record_lost_tasks(self) -> None:
        by_digest: dict[str, list[str]] = {}
        for group in self.groups.values():
            by_digest.setdefault(payload_digest(group.task), []).extend(each.rollout_id for each in group.rollouts)
        await self._services.blocklist.record_step(self.ledger, self._plan.manifest.resume_count, by_digest)

    def _result(self, seconds: float, refused: int) -> StepResult:
        groups = [group.result(self.ledger) for group in self.groups.values()]
        results = tuple(self._results)
        report = make_report(
            self._services.config.run_id,
            self.ledger,
            groups,
            results,
            self._latencies,
            self._lags,
            refused=refused,
            unarchived=self._unarchived,
            resumed=self.resumed,
            reattached=self._adopted,
            seconds=seconds,
            deadline_reached=self.deadline_reached,
            took={each.rollout_id: each.took for each in self.rollouts.values() if each.took is not None},
        )
        return StepResult(self.step, results, tuple(groups), failures_of(self.ledger), report)
