"""One step, from its plan to its report: the conductor of dispatcher, buffer, policy and ledger.

What must always hold:

- each rollout has one task (`_live`), which holds its slot from submission until its session is closed;
- before a rollout is declared timed out, S3 is asked whether its result is there;
- however a step ends (target, deadline, abort, cancellation), every rollout is settled, every session is closed and
  every key is revoked before `run` returns.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from agent_wrapper.contract import (
    REQUEST_FIELD,
    ContractError,
    ModelEndpoint,
    Outcome,
    ResultTarget,
    Rollout,
    RolloutRequest,
    Sampling,
)
from rollout_backend.collect.buffer import RolloutBuffer
from rollout_backend.config import RolloutConfig
from rollout_backend.dispatch.closer import SessionCloser
from rollout_backend.dispatch.dispatcher import Dispatcher, Submission
from rollout_backend.errors import ServingError, StoreError
from rollout_backend.gateway.tokens import SessionClaims
from rollout_backend.ledger import Arrival, Entry, Ledger, Phase, PlannedRollout
from rollout_backend.policy import GroupPolicy, GroupState
from rollout_backend.report import GroupResult, StepResult, failures_of, make_report
from rollout_backend.tasks import Task

log = logging.getLogger(__name__)

_LAST_LOOK_S = 15.0  # for the listing before a deadline is carried out


@dataclass(frozen=True)
class StepServices:
    """What a step needs of its run."""

    config: RolloutConfig
    dispatcher: Dispatcher
    closer: SessionCloser
    buffer: RolloutBuffer
    queue_url: str | None
    endpoint: Callable[[SessionClaims], ModelEndpoint]
    revoke: Callable[[Iterable[str]], Awaitable[None]]
    keep: Callable[[Rollout], None]  # every result that arrives, before it is counted


@dataclass
class _Group:
    task: Task
    needed: int
    planned: int = 0
    replacements: int = 0
    ids: list[str] = field(default_factory=list)


class Step:
    """Made once, `run` once. It is the buffer's `ResultSink`."""

    def __init__(
        self,
        number: int,
        tasks: Sequence[Task],
        services: StepServices,
        sampling: Sampling | None,
        on_group: Callable[[GroupResult], None] = lambda group: None,
    ) -> None:
        """`on_group` is told of each group once: when all of it is settled by itself, or the step is over."""
        self.step = number
        self._on_group = on_group
        self._told: set[str] = set()
        self.ledger = Ledger(number)
        self._at = services
        self._sampling = sampling or services.config.sampling
        self._policy = GroupPolicy.from_config(services.config.group)
        self._groups = {task.task_id: self._new_group(task) for task in tasks}
        self._rollouts: dict[str, Rollout] = {}
        self._latencies: list[float] = []
        self._lags: list[float] = []
        self._changed = asyncio.Event()
        self._ended: dict[str, asyncio.Event] = {}  # by rollout: set once it is settled
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._sessions: list[str] = []
        self._deadline = float("inf")  # loop seconds
        self._deadline_reached = False
        self._aborted: BaseException | None = None

    # --- the run of it ------------------------------------------------------------------------------------

    async def run(self) -> StepResult:
        """Collects until the policy is satisfied or the deadline passes.

        Raises:
            LedgerError: the books do not balance.
            Whatever `abort` was given.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        refused_before = self._at.buffer.refused
        self._deadline = began + self._at.config.timeouts.collection_s
        self._at.buffer.attach(self)
        sweeping = asyncio.create_task(self._sweep_when_quiet())
        try:
            for group in self._groups.values():
                self._plan(group, group.task.rollouts or self._at.config.group.size)
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
        self._tell_groups()
        if self._aborted is not None:
            raise self._aborted
        self.ledger.reconcile()
        return self._result(loop.time() - began, self._at.buffer.refused - refused_before)

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
            if self._carry_out_policy():
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
            deadlines = [entry.deadline for entry in self.ledger.open_entries() if entry.deadline is not None]
            await self._wait_for_change(min([self._deadline, *deadlines]) - now)

    async def _wait_for_change(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(max(seconds, 0.001)):
                await self._changed.wait()
        except TimeoutError:
            return

    def _carry_out_policy(self) -> bool:
        decision = self._policy.decide([self._state(group) for group in self._groups.values()])
        for task_id, count in decision.replace:
            group = self._groups[task_id]
            group.replacements += count
            self._plan(group, count, replaces=True)
        for cancellation in decision.cancel:
            entry = self.ledger.entries[cancellation.rollout_id]
            self._end(entry, Outcome.CANCELLED, cancellation.reason)
        return decision.done

    async def _time_out(self, due: Sequence[Entry]) -> None:
        await self._last_look([entry.planned.rollout_id for entry in due])
        for entry in due:
            if entry.outcome is None:
                message = (
                    f"nothing was published within {self._at.config.timeouts.publish_grace_s:g} s of the agent's "
                    f"deadline; the log of session {entry.session_id} may tell why"
                )
                self._end(entry, Outcome.TIMED_OUT, "no_result", message)

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
                    await self._at.buffer.look(self, rollout_ids)
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

    async def _wind_up(self) -> None:
        """Settles what is left, and waits until every session is closed and every task is over."""
        self._settle_open("step_over", "the step was over before this rollout was")
        lives = list(self._lives.values())
        try:
            await self._at.revoke(self._sessions)
        except ServingError as error:
            log.warning("the step's keys could not be revoked and end with their time: %s", error)
        faults = await asyncio.gather(*lives, return_exceptions=True)
        while self._closing:
            await asyncio.gather(*self._closing)
        for fault in faults:
            if isinstance(fault, Exception):
                raise fault

    def _settle_open(self, reason: str, message: str) -> None:
        for entry in list(self.ledger.open_entries()):
            self._end(entry, Outcome.CANCELLED, reason, message)

    # --- one rollout --------------------------------------------------------------------------------------

    def _plan(self, group: _Group, count: int, replaces: bool = False) -> None:
        for _ in range(count):
            rollout_id = f"{group.task.task_id}.{group.planned}"
            group.planned += 1
            group.ids.append(rollout_id)
            self.ledger.plan([PlannedRollout(rollout_id, group.task.task_id, replaces)])
            self._ended[rollout_id] = asyncio.Event()
            self._lives[rollout_id] = asyncio.create_task(self._live(rollout_id, group.task))

    async def _live(self, rollout_id: str, task: Task) -> None:
        """A rollout from its slot to its closed session."""
        ended = self._ended[rollout_id]
        async with self._at.dispatcher.slots:
            running = await self._at.dispatcher.submit(
                rollout_id,
                self.ledger,
                prepare=lambda session_id, attempt: self._prepare(rollout_id, task, session_id, attempt),
                close=self._close,
            )
            if running:
                self._changed.set()  # its own deadline counts from now on
                await ended.wait()
                session_id = self.ledger.entries[rollout_id].session_id
                assert session_id is not None
                await self._close(session_id)
        self._changed.set()  # a submission that failed has settled the rollout

    def _prepare(self, rollout_id: str, task: Task, session_id: str, attempt: int) -> Submission:
        config, now, wall = self._at.config, asyncio.get_running_loop().time(), time.time()
        self._sessions.append(session_id)
        grace = config.timeouts.publish_grace_s
        agent_deadline = min(now + config.timeouts.agent_s, max(now, self._deadline - grace))
        sampling = task.sampling or self._sampling
        claims = SessionClaims(
            run_id=config.run_id,
            step=self.step,
            rollout_id=rollout_id,
            attempt=attempt,
            session_id=session_id,
            sampling=sampling,
            expires_at=wall + config.timeouts.token_s,
        )
        request = RolloutRequest(
            run_id=config.run_id,
            step=self.step,
            task_id=task.task_id,
            rollout_id=rollout_id,
            attempt=attempt,
            session_id=session_id,
            endpoint=self._at.endpoint(claims),
            sampling=sampling,
            deadline=wall + agent_deadline - now,
            result=ResultTarget(
                bucket=config.storage.bucket,
                prefix=config.storage.prefix,
                queue_url=self._at.queue_url,
                region=config.aws.region,
            ),
        )
        payload = {**task.payload, REQUEST_FIELD: request.model_dump(mode="json")}
        return Submission(session_id, json.dumps(payload).encode(), deadline=agent_deadline + grace)

    async def _close(self, session_id: str) -> None:
        """Closes a session, and goes on with it even if the caller is cancelled."""
        closing = asyncio.create_task(self._at.closer.close(session_id, self.ledger))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await asyncio.shield(closing)

    def _end(self, entry: Entry, outcome: Outcome, reason: str, message: str = "") -> None:
        """Settles a rollout from this side, whatever it is at."""
        rollout_id, starting = entry.planned.rollout_id, entry.phase in (Phase.PLANNED, Phase.DISPATCHING)
        if not self.ledger.settle(rollout_id, outcome, reason, message):
            return
        self._ended[rollout_id].set()
        self._changed.set()
        if starting:  # it may be waiting for a slot, or for a retry's turn
            self._lives[rollout_id].cancel()

    # --- the buffer's sink --------------------------------------------------------------------------------

    def wants(self, rollout_id: str) -> bool:
        return self.ledger.wants(rollout_id)

    def again(self, rollout_id: str) -> None:
        self.ledger.again(rollout_id)

    def arrive(self, rollout: Rollout, announced_at: float | None) -> None:
        if not self.wants(rollout.rollout_id):
            self.again(rollout.rollout_id)
            return
        self._at.keep(rollout)
        self._rollouts[rollout.rollout_id] = rollout
        now = time.time()
        if announced_at is not None:
            self._latencies.append(max(0.0, now - announced_at))
        self._lags.append(max(0.0, now - rollout.finished_at))
        failure = rollout.failure
        self.ledger.arrive(
            rollout.rollout_id,
            rollout.outcome,
            failure.reason if failure else "",
            failure.message if failure else "",
            trainable=rollout.trainable,
        )
        self._ended[rollout.rollout_id].set()
        self._changed.set()

    def reject(self, rollout_id: str, error: ContractError) -> None:
        if self.ledger.arrive(rollout_id, Outcome.INFRA_ERROR, "invalid_result", str(error)) is Arrival.FIRST:
            self._ended[rollout_id].set()
            self._changed.set()

    # --- what it came to ----------------------------------------------------------------------------------

    def _new_group(self, task: Task) -> _Group:
        group = self._at.config.group
        size = task.rollouts or group.size
        return _Group(task, needed=size if group.policy == "strict" else min(group.needed, size))

    def _state(self, group: _Group) -> GroupState:
        entries = [self.ledger.entries[rollout_id] for rollout_id in group.ids]
        return GroupState(
            task_id=group.task.task_id,
            needed=group.needed,
            open=tuple(entry.planned.rollout_id for entry in entries if entry.outcome is None),
            trainable=sum(entry.trainable for entry in entries),
            lost=sum(entry.outcome is Outcome.INFRA_ERROR for entry in entries),
            replacements=group.replacements,
        )

    def _tell_groups(self) -> None:
        for task_id, group in self._groups.items():
            if task_id not in self._told and not self._state(group).open:
                self._told.add(task_id)
                self._on_group(self._group_result(group))

    def _group_result(self, group: _Group) -> GroupResult:
        arrived = (self._rollouts.get(rollout_id) for rollout_id in group.ids)
        trainable = tuple(rollout for rollout in arrived if rollout is not None and rollout.trainable)
        return GroupResult(group.task, trainable, usable=self._state(group).usable)

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
            seconds=seconds,
            deadline_reached=self._deadline_reached,
        )
        return StepResult(self.step, rollouts, tuple(groups), failures_of(self.ledger), report)
