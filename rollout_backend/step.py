"""One step, from its plan to its report: the conductor of dispatcher, buffer, policy and ledger.

What must always hold:

- each rollout has one task (`_live`), which holds its slot from submission until its session is closed;
- nothing is dispatched before the step's manifest stands in S3; a step that was begun before goes on from there: what
  is finished is taken, what still runs is waited for where it can be, and only the rest is run (see `take_up`);
- before a rollout is declared timed out, S3 is asked whether its result is there;
- each rollout that ends is told to the run's breaker, and nothing is dispatched once that is open;
- however a step ends (target, deadline, abort, cancellation), every rollout is settled, every session is closed and
  every key is revoked before `run` returns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_wrapper.contract import ContractError, Outcome, Rollout, Sampling
from rollout_backend.dispatch.dispatcher import Submission
from rollout_backend.dispatched import Note
from rollout_backend.errors import CircuitOpen, CredentialsExpired, ServingError, StoreError
from rollout_backend.gateway.tokens import SessionClaims
from rollout_backend.ledger import TASK_SET_ASIDE, Arrival, Entry, Ledger, Phase, PlannedRollout
from rollout_backend.manifest import Manifest, payload_digest
from rollout_backend.policy import GroupPolicy, GroupState, StragglerRule
from rollout_backend.report import MESSAGES_ONLY, GroupResult, StepResult, failures_of, make_report
from rollout_backend.step_services import StepServices
from rollout_backend.take_up import adoptable, can_check, read_finished
from rollout_backend.tasks import Task

log = logging.getLogger(__name__)

_LAST_LOOK_S = 15.0  # for the listing before a deadline is carried out


@dataclass
class _Group:
    task: Task
    size: int
    needed: int
    replacements: int = 0
    ids: list[str] = field(default_factory=list)


@dataclass
class _Adopted:
    """An attempt of an earlier take. `lost` once nothing can come of it any more."""

    note: Note
    lost: asyncio.Event = field(default_factory=asyncio.Event)


class Step:
    """Made once, `run` once. It is the buffer's `ResultSink`."""

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
        """`on_group` is told of each group once: when all of it is settled by itself, or the step is over.

        `weights` names what is served now. `same_weights` False: what an earlier take of this step has sampled was
        sampled by others, and is not used.
        """
        self.step = number
        self._weights = weights
        self._same_weights = same_weights
        self._on_group = on_group
        self._told: set[str] = set()
        self.ledger = Ledger(number)
        self._at = services
        self._sampling = sampling or services.config.sampling
        self._policy = GroupPolicy.from_config(services.config.group)
        self._stragglers = StragglerRule.from_config(services.config.group)
        self._groups = {task.task_id: self._new_group(task) for task in tasks}
        self._rollouts: dict[str, Rollout] = {}
        self._latencies: list[float] = []
        self._lags: list[float] = []
        self._changed = asyncio.Event()
        self._began: dict[str, float] = {}  # by rollout: loop seconds of its last attempt's dispatch
        self._took: dict[str, float] = {}  # by rollout: seconds from there until it was settled
        self._judged = 0  # of the ledger's settled entries: those that the breaker was told of
        self._ended: dict[str, asyncio.Event] = {}  # by rollout: set once it is settled
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._sessions: list[str] = []
        self._manifest: Manifest  # from `_begin` on
        self.resumed = 0  # rollouts that an earlier take of this step had finished
        self.adopted: dict[str, _Adopted] = {}  # by rollout: what goes on from an earlier take
        self._taken_up = False
        self._deadline = float("inf")  # loop seconds
        self._deadline_reached = False
        self._aborted: BaseException | None = None

    # --- the run of it ------------------------------------------------------------------------------------

    async def run(self) -> StepResult:
        """Collects until the policy is satisfied or the deadline passes.

        Raises:
            LedgerError: the books do not balance.
            CircuitOpen: the run's breaker has opened, in this step or before it.
            Whatever `abort` was given.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        refused_before = self._at.buffer.refused
        self._deadline = began + self._at.config.timeouts.collection_s
        self._at.buffer.attach(self)
        sweeping = asyncio.create_task(self._sweep_when_quiet())
        sweeping.add_done_callback(self._sweeping_ended)
        try:
            await self._begin()
            await self._collect()
        except asyncio.CancelledError:
            self._settle_open("aborted", "the step was cancelled from outside")
            raise
        finally:
            sweeping.cancel()
            try:
                await self._wind_up()
            finally:
                self._at.buffer.detach(self)
        self._judge()
        self._tell_groups()
        if self._aborted is not None:
            raise self._aborted
        self.ledger.reconcile()
        await self._note_lost_tasks()
        return self._result(loop.time() - began, self._at.buffer.refused - refused_before)

    async def _begin(self) -> None:
        """Plans the rollouts, writes the manifest, and starts what is not finished."""
        self._judge()
        if self._aborted is not None:
            return
        if self._at.set_aside is not None:
            await self._at.set_aside.read()
        config, now, wall = self._at.config, asyncio.get_running_loop().time(), self._at.wall()
        sizes = {task_id: group.size + config.group.extra for task_id, group in self._groups.items()}
        before = await self._at.read_manifest(self.step)
        self._manifest = Manifest.plan(
            config.run_id,
            self.step,
            [
                (group.task, sizes[task_id], group.task.sampling or self._sampling)
                for task_id, group in self._groups.items()
            ],
            attempts=config.runtime.max_attempts,
            now=wall,
            deadline=wall + self._deadline - now,
            weights=self._weights,
            sealed_by=self._at.sealed_by,
            gateway=self._at.gateway,
            before=before,
            same_weights=self._same_weights and can_check(before, self._at.sealed_by),
        )
        for planned in self._manifest.tasks:
            group = self._groups[planned.task_id]
            group.replacements = len(planned.rollouts) - sizes[planned.task_id]
            for i, rollout_id in enumerate(planned.rollouts):
                self._plan(group, rollout_id, replaces=i >= sizes[planned.task_id])
        await self._at.write_manifest(self._manifest)
        notes = self._at.dispatched.at_work(self.step) if self._at.dispatched is not None else []
        await self._take_up(adoptable(before, self._manifest, notes, wall), [note.session_id for note in notes])
        if self._manifest.resumed:
            await self._carry_out_policy()  # what is there may be enough
        self._leave_out_set_aside()
        for group in self._groups.values():
            for rollout_id in group.ids:
                self._start(rollout_id, group.task)

    async def _take_up(self, notes: Mapping[str, Note], noted: Iterable[str]) -> None:
        """Takes what earlier takes of this step have finished, goes on with those of `notes` that have not, and has
        the sessions of the rest closed; also those `noted` which this step has no use for, of other weights, say."""
        ledger, now, wall = self.ledger, asyncio.get_running_loop().time(), self._at.wall()
        for rollout_id, note in notes.items():  # first, so that what they have published counts
            self.adopted[rollout_id] = _Adopted(note)
            ledger.adopt(rollout_id, note.session_id, now + note.deadline - wall)
        if self._manifest.resumed:
            await read_finished(self._at.buffer, self)
        self.resumed = sum(entry.outcome is not None for entry in ledger.entries.values())
        self.adopted = {rid: each for rid, each in self.adopted.items() if ledger.entries[rid].phase is Phase.RUNNING}
        going_on = {each.note.session_id for each in self.adopted.values()}
        for rollout_id, each in self.adopted.items():
            self._began[rollout_id] = now + each.note.began - wall
            self._sessions.append(each.note.session_id)
        left_open = [
            session_id
            for rollout_id in ledger.entries  # a session that has finished its rollout stays open as well
            for session_id in self._manifest.earlier_sessions(rollout_id)
        ]
        unused = [session_id for session_id in dict.fromkeys((*left_open, *noted)) if session_id not in going_on]
        self._begin_closing(self._close_earlier(unused))
        self._taken_up = True
        for group in self._groups.values():
            for rollout_id in group.ids:
                if rollout_id in self.adopted:  # they have their sessions, and so the first of the slots
                    self._lives[rollout_id] = asyncio.create_task(self._live(rollout_id, group.task))
        await self._adopt(going_on)
        if self._manifest.resumed:
            log.info(
                "step %d is taken up again: of %d rollouts %d are finished and %d still run; the sessions of the "
                "others are closed",
                self.step,
                len(ledger.entries),
                self.resumed,
                len(self.adopted),
            )

    async def _close_earlier(self, session_ids: Collection[str]) -> None:
        """And notes it, so that a take after this one need not close them again."""
        if not session_ids:
            return
        await self._revoke(session_ids)
        await asyncio.gather(*(self._stop(session_id) for session_id in session_ids))
        if self._manifest.resumed and not self.adopted:  # else it is noted once the step is over
            await self._note_closed(self._manifest.attempts_before)

    async def _note_closed(self, attempts: int) -> None:
        self._manifest = self._manifest.with_closed(attempts)
        try:
            await self._at.write_manifest(self._manifest)
        except (StoreError, CredentialsExpired) as error:
            log.warning("%s; should the step be taken up again, it has some more calls to make", error)

    def _leave_out_set_aside(self) -> None:
        for group in self._groups.values():
            why = self._at.set_aside.why(payload_digest(group.task)) if self._at.set_aside is not None else None
            if why is not None:
                for rollout_id in group.ids:
                    self._end(self.ledger.entries[rollout_id], Outcome.INFRA_ERROR, TASK_SET_ASIDE, why)

    async def _note_lost_tasks(self) -> None:
        if self._at.set_aside is None:
            return
        by_digest: dict[str, list[str]] = {}
        for group in self._groups.values():
            by_digest.setdefault(payload_digest(group.task), []).extend(group.ids)
        await self._at.set_aside.step_over(self.ledger, self._manifest.takes, by_digest)

    def _judge(self) -> None:
        """Tells the breaker what has ended, and aborts the step if it is open."""
        breaker, now = self._at.breaker, asyncio.get_running_loop().time()
        for entry in self.ledger.settled[self._judged :]:
            breaker.settled(entry, now)
        self._judged = len(self.ledger.settled)
        breaker.judge(self.step, self.ledger.phases()[Phase.RUNNING])
        if breaker.opened is not None and self._aborted is None:
            self.abort(CircuitOpen(breaker.opened))

    def rewards(self) -> list[float]:
        return [rollout.reward for rollout in self._rollouts.values() if rollout.reward is not None]

    def abort(self, error: BaseException) -> None:
        """Ends the step now: what is open was lost to the infrastructure. `run` raises `error`."""
        self._aborted = error
        for entry in list(self.ledger.open_entries()):
            self._end(entry, Outcome.INFRA_ERROR, "run_failed", str(error))
        self._changed.set()

    async def _collect(self) -> None:
        loop = asyncio.get_running_loop()
        while self._aborted is None:
            self._changed.clear()
            self._judge()
            if self._aborted is not None or await self._carry_out_policy():
                return
            self._tell_groups()
            now = loop.time()
            if now >= self._deadline:
                await self._reach_deadline()
                return
            due = [
                entry for entry in self.ledger.open_entries() if entry.deadline is not None and entry.deadline <= now
            ]
            if due:
                await self._time_out(due)
                continue
            until = self._straggling_from()
            late = [rollout_id for rollout_id, at in until.items() if at <= now]
            if late:
                await self._cut_off(late)
                continue
            deadlines = [entry.deadline for entry in self.ledger.open_entries() if entry.deadline is not None]
            await self._wait_for_change(min([self._deadline, *deadlines, *until.values()]) - now)

    async def _wait_for_change(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(max(seconds, 0.001)):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _carry_out_policy(self) -> bool:
        decision = self._policy.decide([self._state(group) for group in self._groups.values()])
        for task_id, count in decision.replace:
            for _ in range(count):
                await self._replace(self._groups[task_id])
        for cancellation in decision.cancel:
            entry = self.ledger.entries[cancellation.rollout_id]
            self._end(entry, Outcome.CANCELLED, cancellation.reason)
        return decision.done

    async def _time_out(self, due: Sequence[Entry]) -> None:
        await self._last_look([entry.planned.rollout_id for entry in due])
        for entry in due:
            if self._goes_on(entry.planned.rollout_id):
                self._lose(entry.planned.rollout_id)
            elif entry.outcome is None:
                message = (
                    f"nothing was published within {self._at.config.timeouts.publish_grace_s:g} s of the agent's "
                    f"deadline; the log of session {entry.session_id} may tell why"
                )
                self._end(entry, Outcome.TIMED_OUT, "no_result", message)

    def _straggling_from(self) -> dict[str, float]:
        """Of each rollout that runs: loop seconds from when on it is a straggler. Empty while that is not known."""
        if self._stragglers is None:
            return {}
        entries = self.ledger.entries.values()
        took = [
            self._took[entry.planned.rollout_id]
            for entry in entries
            if entry.let_through and entry.planned.rollout_id in self._took
        ]
        allowed = self._stragglers.allowed_s(took, sum(entry.outcome is None for entry in entries))
        if allowed is None:
            return {}
        running = [entry.planned.rollout_id for entry in entries if entry.phase is Phase.RUNNING]
        return {rollout_id: self._began[rollout_id] + allowed for rollout_id in running}

    async def _cut_off(self, rollout_ids: list[str]) -> None:
        await self._last_look(rollout_ids)
        for rollout_id in rollout_ids:
            entry, group = self.ledger.entries[rollout_id], self._at.config.group
            if entry.outcome is None:
                ran = asyncio.get_running_loop().time() - self._began[rollout_id]
                message = (
                    f"it ran for {ran:.0f} s, more than {group.straggler_factor:g} times as long as 95 % of the "
                    "step's finished rollouts (settings: group.straggler_after, group.straggler_factor)"
                )
                self._end(entry, Outcome.TIMED_OUT, "straggler", message)

    async def _reach_deadline(self) -> None:
        self._deadline_reached = True
        await self._last_look([entry.planned.rollout_id for entry in self.ledger.open_entries()])
        for entry in list(self.ledger.open_entries()):
            if entry.phase is Phase.RUNNING:
                self._end(entry, Outcome.TIMED_OUT, "collection_deadline", "the step's time was up")
            else:
                self._end(entry, Outcome.CANCELLED, "not_started", "the step's time was up before its agent ran")

    async def _last_look(self, rollout_ids: list[str]) -> None:
        try:
            async with asyncio.timeout(_LAST_LOOK_S):
                if len(rollout_ids) > 50:  # a listing names 1,000 keys a call
                    await self._at.buffer.sweep(self)
                else:
                    await self._at.buffer.look(self, [(each, self._attempt_of(each)) for each in rollout_ids])
        except (StoreError, TimeoutError) as error:
            log.warning("S3 could not be asked a last time: %s", error or "no answer in time")

    async def _sweep_when_quiet(self) -> None:
        """Lists the prefix when nothing has been announced for a while, and at once where there is no queue."""
        loop = asyncio.get_running_loop()
        collect, buffer = self._at.config.collect, self._at.buffer
        swept_at = loop.time()
        while True:
            interval = collect.no_queue_sweep_s if buffer.queue_down else collect.quiet_s
            last = swept_at if buffer.queue_down else max(swept_at, buffer.heard_at)
            wait = last + interval - loop.time()
            if wait > 0:
                await asyncio.sleep(min(wait, collect.no_queue_sweep_s))  # the queue may go down meanwhile
                continue
            try:
                await buffer.sweep(self)
            except StoreError as error:
                log.warning("%s; it is listed again", error)
            swept_at = loop.time()

    def _sweeping_ended(self, sweeping: asyncio.Task[None]) -> None:
        """Its fault, expired credentials say, ends the step: nobody waits for it, and without this a step without a
        queue would hear of nothing until its deadline."""
        error = None if sweeping.cancelled() else sweeping.exception()
        if error is not None:
            self.abort(error)

    async def _wind_up(self) -> None:
        """Settles what is left, and waits until every session is closed and every task is over."""
        self._settle_open("step_over", "the step was over before this rollout was")
        lives = list(self._lives.values())
        await self._revoke(self._sessions)
        faults = await asyncio.gather(*lives, return_exceptions=True)
        while self._closing:
            await asyncio.gather(*self._closing)
        if lives:
            await self._note_closed(self._manifest.attempts_before + self._manifest.attempts)
        if self._taken_up and self._at.dispatched is not None:
            self._at.dispatched.over(self.step)
        for fault in faults:
            if isinstance(fault, Exception):
                raise fault

    async def _adopt(self, session_ids: Collection[str]) -> None:
        if not session_ids or self._at.adopt is None:
            return
        try:
            await self._at.adopt(session_ids)
        except ServingError as error:
            log.warning("sessions of an earlier take cannot go on, and end with their time: %s", error)

    async def _revoke(self, session_ids: Iterable[str]) -> None:
        try:
            await self._at.revoke(session_ids)
        except ServingError as error:
            log.warning("keys could not be revoked and end with their time: %s", error)

    def _settle_open(self, reason: str, message: str) -> None:
        for entry in list(self.ledger.open_entries()):
            self._end(entry, Outcome.CANCELLED, reason, message)

    # --- one rollout --------------------------------------------------------------------------------------

    def _plan(self, group: _Group, rollout_id: str, replaces: bool = False) -> None:
        group.ids.append(rollout_id)
        self.ledger.plan([PlannedRollout(rollout_id, group.task.task_id, replaces)])
        self._ended[rollout_id] = asyncio.Event()

    def _start(self, rollout_id: str, task: Task) -> None:
        if self.ledger.wants(rollout_id) and rollout_id not in self._lives:
            self._lives[rollout_id] = asyncio.create_task(self._live(rollout_id, task))

    async def _replace(self, group: _Group) -> None:
        rollout_id = self._manifest.next_rollout(group.task.task_id)
        self._manifest = self._manifest.with_rollout(group.task.task_id, rollout_id)
        await self._at.write_manifest(self._manifest)
        group.replacements += 1
        self._plan(group, rollout_id, replaces=True)
        self._start(rollout_id, group.task)

    async def _live(self, rollout_id: str, task: Task) -> None:
        """A rollout from its slot to its closed session."""
        ended = self._ended[rollout_id]
        async with self._at.dispatcher.slots:
            adopted = self.adopted.get(rollout_id)
            if adopted is not None:
                await _either(ended, adopted.lost)
                if not adopted.lost.is_set():
                    await self._close(adopted.note.session_id)
                    return
            running = await self._at.dispatcher.submit(
                rollout_id,
                self.ledger,
                prepare=lambda nth: self._prepare(rollout_id, task, self._manifest.attempts_before + nth),
                close=self._close,
            )
            if running:
                self._changed.set()  # its own deadline counts from now on
                session_id = self.ledger.entries[rollout_id].session_id
                assert session_id is not None
                self._note_running(rollout_id, session_id)
                await ended.wait()
                await self._close(session_id)
        self._changed.set()  # a submission that failed has settled the rollout

    def _prepare(self, rollout_id: str, task: Task, attempt: int) -> Submission:
        times, now = self._at.config.timeouts, asyncio.get_running_loop().time()
        session_id = self._manifest.session_id(rollout_id, attempt)
        self._sessions.append(session_id)
        self._began[rollout_id] = now
        claims = SessionClaims(
            run_id=self._at.config.run_id,
            step=self.step,
            rollout_id=rollout_id,
            attempt=attempt,
            session_id=session_id,
            sampling=task.sampling or self._sampling,
            expires_at=self._at.wall() + times.token_s,
        )
        deadline = min(now + times.agent_s, max(now, self._deadline - times.publish_grace_s))
        payload = self._at.payload(task, claims, deadline=self._at.wall() + deadline - now)
        return Submission(session_id, payload, deadline=deadline + times.publish_grace_s)

    async def _close(self, session_id: str) -> None:
        """Closes a session, and goes on with it even if the caller is cancelled."""
        await asyncio.shield(self._begin_closing(self._stop(session_id)))

    def _begin_closing(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """The step is not over before this is."""
        closing = asyncio.create_task(work)
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return closing

    async def _stop(self, session_id: str) -> None:
        if self._at.dispatched is not None:
            self._at.dispatched.closed(self.step, session_id)
        await self._at.closer.close(session_id, self.ledger)

    def _note_running(self, rollout_id: str, session_id: str) -> None:
        deadline, began = self.ledger.entries[rollout_id].deadline, self._began[rollout_id]
        if self._at.dispatched is None or deadline is None:
            return
        to_wall = self._at.wall() - asyncio.get_running_loop().time()
        note = Note(
            session_id=session_id,
            rollout_id=rollout_id,
            attempt=self._attempt_of(rollout_id),
            began=began + to_wall,
            deadline=deadline + to_wall,
        )
        self._at.dispatched.running(self.step, note)

    def _goes_on(self, rollout_id: str) -> bool:
        """Whether it still stands with the attempt of an earlier take."""
        adopted = self.adopted.get(rollout_id)
        return adopted is not None and not adopted.lost.is_set() and self.ledger.wants(rollout_id)

    def _lose(self, rollout_id: str) -> None:
        """What went on from an earlier take came to nothing, and the rollout is submitted as any other."""
        log.info("rollout %s: the attempt of an earlier take is lost; the next one is made", rollout_id)
        adopted = self.adopted[rollout_id]
        self.ledger.lose(rollout_id)
        adopted.lost.set()
        self._begin_closing(self._stop(adopted.note.session_id))
        self._changed.set()

    def _end(self, entry: Entry, outcome: Outcome, reason: str, message: str = "") -> None:
        """Settles a rollout from this side, whatever it is at."""
        rollout_id, starting = entry.planned.rollout_id, entry.phase in (Phase.PLANNED, Phase.DISPATCHING)
        if not self.ledger.settle(rollout_id, outcome, reason, message):
            return
        self._say_ended(rollout_id)
        if starting and rollout_id in self._lives:  # it may be waiting for a slot, or for a retry's turn
            self._lives[rollout_id].cancel()

    def _say_ended(self, rollout_id: str) -> None:
        if rollout_id in self._began:
            self._took[rollout_id] = asyncio.get_running_loop().time() - self._began[rollout_id]
        self._ended[rollout_id].set()
        self._changed.set()

    # --- the buffer's sink --------------------------------------------------------------------------------

    def wants(self, rollout_id: str, attempt: int | None = None) -> bool:
        return self.ledger.wants(rollout_id) and attempt in (None, self._attempt_of(rollout_id))

    def _attempt_of(self, rollout_id: str) -> int:
        """The number of the attempt that is under way; 0 if there is none."""
        entry, adopted = self.ledger.entries[rollout_id], self.adopted.get(rollout_id)
        if entry.session_id is None:
            return 0
        if adopted is not None and not entry.attempts:
            return adopted.note.attempt
        return self._manifest.attempts_before + entry.attempts

    def again(self, rollout_id: str) -> None:
        self.ledger.again(rollout_id)

    def arrive(self, rollout: Rollout, announced_at: float | None, notice: bool = False) -> None:
        if not self.wants(rollout.rollout_id):
            self.again(rollout.rollout_id)
            return
        if notice and self._goes_on(rollout.rollout_id):  # it may be that it had nobody to ask: it gets another try
            self._lose(rollout.rollout_id)
            self.again(rollout.rollout_id)
            return
        self._at.keep(rollout)
        self._rollouts[rollout.rollout_id] = rollout
        now = self._at.wall()
        if announced_at is not None:
            self._latencies.append(max(0.0, now - announced_at))
        if rollout.finished_at:
            self._lags.append(max(0.0, now - rollout.finished_at))
        failure = rollout.failure
        self.ledger.arrive(
            rollout.rollout_id,
            rollout.outcome,
            failure.reason if failure else MESSAGES_ONLY if rollout.messages_only else "",
            failure.message if failure else "",
            trainable=rollout.trainable,
        )
        self._say_ended(rollout.rollout_id)

    def reject(self, rollout_id: str, error: ContractError) -> None:
        if self.ledger.arrive(rollout_id, Outcome.INFRA_ERROR, "invalid_result", str(error)) is Arrival.FIRST:
            self._say_ended(rollout_id)

    # --- what it came to ----------------------------------------------------------------------------------

    def _new_group(self, task: Task) -> _Group:
        group = self._at.config.group
        size = task.rollouts or group.size
        return _Group(task, size, needed=size if group.policy == "strict" else min(group.needed, size))

    def _state(self, group: _Group) -> GroupState:
        entries = [self.ledger.entries[rollout_id] for rollout_id in group.ids]
        return GroupState(
            task_id=group.task.task_id,
            needed=group.needed,
            open=tuple(entry.planned.rollout_id for entry in entries if entry.outcome is None),
            trainable=sum(entry.trainable for entry in entries),
            lost=sum(entry.outcome is Outcome.INFRA_ERROR and entry.reason != TASK_SET_ASIDE for entry in entries),
            replacements=group.replacements,
            enough=group.size if self._at.config.group.extra else None,
            spare=self._at.config.group.extra,
            messages_only=sum(entry.reason == MESSAGES_ONLY for entry in entries),
        )

    def _tell_groups(self) -> None:
        for task_id, group in self._groups.items():
            if task_id not in self._told and not self._state(group).open:
                self._told.add(task_id)
                self._on_group(self._group_result(group))

    def _group_result(self, group: _Group) -> GroupResult:
        arrived = [self._rollouts[rollout_id] for rollout_id in group.ids if rollout_id in self._rollouts]
        trained = self._trained(group)
        return GroupResult(
            group.task,
            tuple(rollout for rollout in arrived if rollout.rollout_id in trained),
            usable=self._state(group).usable,
            planned=len(group.ids),
            failures=failures_of(self.ledger, group.ids),
            messages_only=tuple(rollout for rollout in arrived if rollout.messages_only and not rollout.failure),
        )

    def _trained(self, group: _Group) -> set[str]:
        """The trainable ones; of a group that was planned with some to spare the first that came, up to its size."""
        ids = set(group.ids)
        came = [rid for rid, rollout in self._rollouts.items() if rid in ids and rollout.trainable]
        return set(came[: group.size] if self._at.config.group.extra else came)

    def _result(self, seconds: float, refused: int) -> StepResult:
        groups = [self._group_result(group) for group in self._groups.values()]
        rollouts = tuple(self._rollouts.values())
        report = make_report(
            self._at.config.run_id,
            self.ledger,
            groups,
            rollouts,
            self._latencies,
            self._lags,
            refused=refused,
            resumed=self.resumed,
            reattached=len(self.adopted),
            seconds=seconds,
            deadline_reached=self._deadline_reached,
            took=self._took,
        )
        return StepResult(self.step, rollouts, tuple(groups), failures_of(self.ledger), report)


async def _either(*events: asyncio.Event) -> None:
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
