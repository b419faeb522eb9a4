"""The invariants that every history is checked for. The first one that fails is a `Violation`."""

from __future__ import annotations

import json
from collections import Counter

from agent_wrapper.contract import Announcement, ContractError, Outcome, Rollout, parse_result_key, result_key
from rollout_backend.base.disk import DISK_S
from rollout_backend.config import RolloutConfig
from rollout_backend.core.ledger import MODEL_UNREACHABLE, STORE_UNAVAILABLE, LedgerEntry
from rollout_backend.core.manifest import payload_digest
from rollout_backend.run.accounts.step_report import StepResult
from rollout_backend.run.collect.buffer import IDLE_INTERVALS
from rollout_backend.run.collect.queue import Message
from rollout_backend.run.step.step import Step
from tests.simulation.gateway import HEARTBEAT_S
from tests.simulation.s3 import BUCKET
from tests.simulation.trainer import Trainer
from tests.simulation.world import World

_REFUSALS = ("throttled", "quota_exceeded", "runtime_conflict", "no_credentials", "wrong_clock")
_SILENCE_S = 5 * HEARTBEAT_S  # three missed heartbeats, a late one, and the time between polls
_START_S = 240.0  # for so long at least, a start waits for S3
_CLOSING_S = 240.0  # limit for closing a step's sessions after its deadline, including all retries
_LAST_WRITES_S = 120.0  # limit of a step's last manifest, and of its records of lost tasks, where S3 is silent
_ASKED_S = 5.0  # in which S3 is asked after the source of an agent's protocol has answered
_REVOKING_S = 180.0  # limit of the last revocations, where a gateway is silent
_RECORDS_S = 2 * DISK_S  # limit of the last writes to a disk that does not answer


class Violation(AssertionError):
    """An invariant that this history violates."""


def _hold(truth: bool, violation: str) -> None:
    if not truth:
        raise Violation(violation)


class Checks:
    """The checks of one history."""

    def __init__(self, world: World, config: RolloutConfig, *, scored: bool = False) -> None:
        """`scored`: a scorer of the training side computes the rewards."""
        self._world = world
        self._bucket = world.bucket
        self._audit = world.audit
        self._config = config
        self._scored = scored
        self.unclosed: set[str] = set()  # sessions that reports name as not closed
        self._planned_at: dict[Step, float] = {}  # two managers may run one step at the same time
        self._seen: Violation | None = None  # raised at the step's end: exceptions of its tasks are not awaited

    @property
    def longest_step_s(self) -> float:
        """Return how long a step may take."""
        faults, limit = self._world.faults, self._config.timeouts.collection_s + _CLOSING_S
        if faults.silent_s3 or self._bucket.silent_outages:
            limit += _LAST_WRITES_S
        if faults.disk_fails:
            limit += _RECORDS_S
        return limit + (_REVOKING_S if faults.silent_gateway or faults.gateway_away else 0.0)

    def key(self, step: int, rollout_id: str) -> str:
        return result_key("", self._config.run_id, step, rollout_id)

    def finished(self, step: int) -> set[str]:
        """Return the keys of the readable results in S3 that the present weights have sampled in a step."""
        prefix = self.key(step, "")
        keys = [key for key in self._bucket.objects if key.startswith(prefix) and "~" not in key]
        return {key for key in keys if self._intact(key) and self._is_current(self._bucket.result(key))}

    def _intact(self, key: str) -> bool:
        try:
            return self._is_its_own(self._bucket.result(key))
        except ContractError:
            return False

    def _is_its_own(self, rollout: Rollout) -> bool:
        """Return whether one of this rollout's own sessions wrote it."""
        claims = self._world.gateway.keys.get(rollout.session_id)
        return claims is not None and claims.rollout_id == rollout.rollout_id

    def _is_current(self, rollout: Rollout) -> bool:
        """Return whether the weights that are served now have sampled all of it."""
        return self._audit.weights[rollout.session_id] <= {self._world.gateway.weights}

    def planned(self, step: Step) -> None:
        """Record when the step planned its rollouts: older results are found by listing, not by announcement."""
        self._planned_at[step] = self._world.now()

    # --- at any time --------------------------------------------------------------------------------------

    def deleted(self, message: Message, step: Step) -> None:
        try:
            named = Announcement.decode(message.body)
        except ContractError:
            return
        for item in named:
            try:
                name = parse_result_key("", self._config.run_id, item.key)
            except ContractError:
                continue
            if name.attempt is not None and item.key in self._bucket.objects and not self._intact(item.key):
                continue  # an invalid failure marker changes nothing
            written_at = self._bucket.written_at.get(item.key, -1.0)
            of_step = item.bucket == BUCKET and name.step == step.step
            is_wanted = of_step and step.results.is_wanted(name.rollout_id, name.attempt)
            if is_wanted and written_at > self._planned_at[step] and self._seen is None:
                self._seen = Violation(f"the announcement of {name.rollout_id} is deleted before its result is in")

    def arrived(self, step: Step, *, sweeping: bool) -> None:
        """Check, when a result arrives, that its step was listed within the guaranteed interval. `sweeping`: the
        results of the last listing are still being read, which delays the next one."""
        tried = self._bucket.list_tried.get(self.key(step.step, ""), 0.0)
        ago = self._world.now() - max(self._planned_at[step], tried)
        most = IDLE_INTERVALS * self._config.collect.list_after_idle_s + 1.0
        if ago > most and not sweeping and self._seen is None:
            self._seen = Violation(f"a step was last listed {ago:.0f} s ago, more than {most:.0f} s")

    def settled_here(self, step: Step, rollout_id: str, outcome: Outcome, reason: str) -> None:
        """Check a rollout that the training side settles without a result."""
        key = self.key(step.step, rollout_id)
        if reason == STORE_UNAVAILABLE:
            _hold(step.deadline_reached, f"{rollout_id} is abandoned because of S3 before the step's deadline")
        elif outcome is Outcome.TIMED_OUT and key in self.finished(step.step):
            asked = max(
                self._bucket.absent_at.get(key, float("-inf")),
                self._bucket.listed_at.get(self.key(step.step, ""), float("-inf")),
            )
            ago = self._world.now() - asked
            most = 1.0 + 15 * self._world.faults.slow_gets
            _hold(ago < most, f"{rollout_id} is declared timed out: its result is in S3, asked {ago:.1f} s ago")
        if reason in ("no_result", "straggler", "collection_deadline"):
            self._asked(step, rollout_id)
        if reason == "no_result":
            self._noticed(step.ledger.entries[rollout_id].session_id)
        if reason == "straggler":
            self._lags_behind(step, rollout_id)
        if outcome is Outcome.INFRA_ERROR and reason in _REFUSALS:
            left = step.deadline - self._config.timeouts.publish_grace_s - self._world.now()
            _hold(left <= 0, f"{rollout_id} is lost as {reason} with {left:.0f} s left")

    def lost_by_agent(self, trainer: Trainer, entry: LedgerEntry) -> None:
        """Check a rollout that ends because its agent did not reach a gateway."""
        if entry.reason == MODEL_UNREACHABLE and trainer.number in self._world.gateway.heard_by:
            left = self._config.runtime.max_attempts - entry.attempts
            _hold(left <= 0, f"{entry.rollout_id} is lost as {entry.reason} with {left} attempts left")

    def _asked(self, step: Step, rollout_id: str) -> None:
        """Check that the source of an agent's protocol was asked before its rollout ends without a result."""
        ago = self._world.sources.unasked_for_s(step.ledger.entries[rollout_id].session_id or "")
        _hold(ago < _ASKED_S, f"{rollout_id} ends without a result, which is at its source, asked {ago:.1f} s ago")

    def _noticed(self, session_id: str | None) -> None:
        """Check that no dead container is awaited until its deadline if its silence was detectable."""
        died_at = self._audit.died.get(session_id or "")
        faults = self._world.faults
        if died_at is None or faults.cut_off or faults.silent_gateway or faults.gateway_away:
            return  # no other session may be heard
        if faults.s3 or faults.silent_s3 or self._bucket.outages:
            return  # S3 may be unavailable
        silent_s = self._world.now() - max(died_at, self._world.gateway.started_at)
        _hold(silent_s < _SILENCE_S, f"{session_id} was silent for {silent_s:.0f} s without being detected")

    def _lags_behind(self, step: Step, rollout_id: str) -> None:
        """Check a straggler by the world's own times of session starts and results."""
        started, written_at = self._audit.session_started, self._bucket.written_at
        new = [key for key in self.finished(step.step) if written_at[key] > self._planned_at[step]]
        took = [written_at[key] - started[self._bucket.result(key).session_id] for key in new]
        session_id = step.ledger.entries[rollout_id].session_id or ""
        if session_id not in started and self._config.runtime.invokes_last:
            return  # it counts as started although the runtime has not received its invoke
        ran = self._world.now() - started[session_id]
        _hold(bool(took), f"{rollout_id} is a straggler, and nothing is finished")
        least = self._config.group.straggler_factor * min(took)
        _hold(ran >= least, f"{rollout_id} is cut off after {ran:.1f} s, and the quickest earns it {least:.1f} s")

    # --- blocked tasks ------------------------------------------------------------------------------------

    def blocked(self) -> set[str]:
        """Return the payload digests of the tasks that are on the blocklist in S3."""
        after, found = self._config.group.block_task_after, set()
        for key, body in self._bucket.objects.items():
            if "/task-blocklist/" in key and after is not None and len(json.loads(body)["losses"]) >= after:
                found.add(key.rpartition("/")[2].removesuffix(".json"))
        return found

    def left_out(self, step: Step, digests: set[str], began: float) -> None:
        """Check that no task was dispatched that was on the blocklist before the step began."""
        invoked = {key for at, key in self._audit.started if at >= began}
        for group in step.groups.values():
            keys = {self.key(step.step, rollout_id) for rollout_id in (each.rollout_id for each in group.rollouts)}
            if payload_digest(group.task) in digests:
                _hold(not keys & invoked, f"task {group.task.task_id} is on the blocklist, and dispatched")

    # --- the breaker --------------------------------------------------------------------------------------

    def step_stopped(self, step: Step) -> None:
        """Check that a step which the circuit breaker ended leaves nothing open."""
        _hold(not list(step.ledger.open_entries()), "a rollout of a stopped step has no class")
        self.unclosed |= step.ledger.unclosed_sessions.keys()
        used = {session.id for session in self._world.sessions.values() if session.request.step == step.step}
        _hold(used <= self.unclosed, f"sessions are open after the step was stopped: {used - self.unclosed}")

    def _check_breaker(self, step: Step) -> None:
        """Check that the run has stopped after `circuit_breaker.max_failures` consecutive failures for one reason."""
        limit, streaks = self._config.circuit_breaker.max_failures, Counter[str]()
        if limit is None or self._config.circuit_breaker.min_span_s:
            return
        for entry in step.ledger.settled[
            step.results.resumed :
        ]:  # losses of an earlier start do not open the breaker again
            if entry.by_result and entry.outcome is not Outcome.INFRA_ERROR:
                streaks.clear()
            elif entry.outcome is Outcome.INFRA_ERROR and entry.reason != "task_blocked":
                streaks[entry.reason] += entry.reason not in ("throttled", "quota_exceeded")
        for reason, count in streaks.items():
            _hold(count < limit, f"the last {count} rollouts end as {reason}, and the run continues")

    # --- two managers -------------------------------------------------------------------------------------

    def refused(self, holder: str, another: bool) -> None:
        """Check a manager that was refused the run or lost it. `another`: another manager may hold the run."""
        _hold(another, f"{holder} is refused, and no other manager is alive")
        _hold(self._world.holder.id != holder, f"{holder} holds the run and stops")

    def gave_up_start(self, began: float) -> None:
        """Check a start that ended because S3 did not answer."""
        _hold(self._world.now() - began >= _START_S, "S3 ends a start within minutes")

    def gave_up(self, began: float) -> None:
        """Check a step that ended because S3 did not answer."""
        seconds = self._world.now() - began
        # Sums of times are rounded.
        least = self._config.timeouts.collection_s - 1e-6
        _hold(seconds >= least, f"S3 ends a step after {seconds:g} s, before its deadline")

    # --- when a step is over ------------------------------------------------------------------------------

    def step_ended(
        self, step: Step, result: StepResult, trainer: Trainer, finished_before: set[str], began: float
    ) -> None:
        report, world = result.report, self._world
        self._check_breaker(step)
        for group in result.groups if self._config.group.oversample else ():
            _hold(len(group.rollouts) <= self._config.group.size, f"{group.task.task_id} is trained beyond its size")
        if self._seen is not None:
            raise self._seen
        _hold(sum(report.outcomes.values()) == report.planned, "a planned rollout has no class")
        _hold(report.sessions_open == 0, "the ledger has sessions open after the step")
        self.unclosed |= report.unclosed_sessions.keys()
        _hold(not self.unclosed, f"sessions are abandoned although their stops would succeed: {self.unclosed}")
        seconds = world.now() - began
        limit = self.longest_step_s
        _hold(seconds <= limit, f"the step took {seconds:.0f} s, more than {limit:.0f} s")
        self._check_results(step, result)
        repeated = [key for at, key in self._audit.started if at >= began and key in finished_before]
        _hold(not repeated, f"finished rollouts were run again: {repeated}")
        missed = finished_before - {self.key(step.step, rollout.rollout_id) for rollout in result.rollouts}
        if self._scored:  # a group may have enough before they are scored
            entries = step.ledger.entries.items()
            missed -= {self.key(step.step, each) for each, entry in entries if entry.outcome is Outcome.CANCELLED}
        _hold(not missed, f"finished rollouts were left out: {missed}")
        if world.holder.id != trainer.id:
            return  # another manager has taken over the run and the step's sessions
        used = {session.id for session in world.sessions.values() if session.request.step == step.step}
        _hold(used <= self.unclosed, f"sessions are open after the step: {used - self.unclosed}")

    def _check_results(self, step: Step, result: StepResult) -> None:
        ids = Counter(rollout.rollout_id for rollout in result.rollouts)
        _hold(all(count == 1 for count in ids.values()), f"rollouts were counted more than once: {ids}")
        for entry in step.ledger.entries.values():
            key = self.key(step.step, entry.rollout_id)
            refused = entry.reason == "invalid_result"
            _hold(not refused or key in self._bucket.objects, f"{key} is invalid, but there is no such result")
        for rollout in result.rollouts:
            self._check_reward_reported(rollout)
            _hold(self._is_its_own(rollout), f"{rollout.rollout_id} is taken from {rollout.session_id!r}")
            settled = step.ledger.entries[rollout.rollout_id].outcome
            _hold(
                settled is rollout.outcome,
                f"{rollout.rollout_id} arrived as {rollout.outcome} and is settled as {settled}",
            )
        trained = [rollout for group in result.groups for rollout in group.rollouts]
        ids = Counter(rollout.rollout_id for rollout in trained)
        _hold(all(count == 1 for count in ids.values()), f"rollouts are trained more than once: {ids}")
        for rollout in trained:
            truth = self._truth(step, rollout)
            _hold(truth is not None, f"{rollout.rollout_id} is trained, and no agent ever finished it")
            assert truth is not None
            _hold(truth.reward is not None, f"{rollout.rollout_id} ended as {truth.outcome} and is trained")
            weights = self._audit.weights[rollout.session_id]
            _hold(self._is_current(rollout), f"{rollout.rollout_id} was sampled from {weights} and is trained")
            content = self._as_published(rollout, truth) if self._scored else rollout
            _hold(truth.encode() == content.encode(), f"{rollout.rollout_id} is trained with other content")

    def _check_reward_reported(self, rollout: Rollout) -> None:
        """Check that a rollout of the job runtime ends without a reward only after waiting for it in vain."""
        if rollout.failure is None or rollout.failure.reason != "no_reward":
            return
        name, session_id, sources = rollout.rollout_id, rollout.session_id, self._world.sources
        _hold(session_id not in sources.rewards_read, f"{name} ends without the reward that its agent reported")
        waited = self._bucket.written_at[self.key(rollout.step, name)] - sources.completed_at[session_id]
        least = self._config.timeouts.publish_grace_s
        is_last = session_id in sources.last_looks
        _hold(is_last or waited >= least, f"{name} ends without a reward {waited:.1f} s after its completion")

    def _truth(self, step: Step, rollout: Rollout) -> Rollout | None:
        """Return what the rollout's agent published, or left at its source."""
        if self._config.runtime.agent_protocol == "rollout":
            return self._world.agents.results.get(self.key(step.step, rollout.rollout_id))
        left = self._world.sources.results.get(rollout.session_id)
        # A restarted trainer has other ids for its tasks.
        own = {name: getattr(rollout, name) for name in ("task_id", "started_at", "finished_at", "model")}
        return left and left.model_copy(update=own)

    def _as_published(self, rollout: Rollout, truth: Rollout) -> Rollout:
        """Check that a rollout is trained with the reward that the scorer returned and S3 holds, and undo that."""
        name = rollout.rollout_id
        _hold(rollout.reward in self._world.scorer.returned[name], f"{name} is trained without the scorer's reward")
        prefix = f"/scores/{rollout.step:08d}/{name}~"
        [recorded] = [json.loads(body) for key, body in self._bucket.objects.items() if prefix in key] or [{}]
        _hold(rollout.reward == recorded.get("reward"), f"{name} is trained with a reward that S3 does not hold")
        return rollout.model_copy(update={"reward": truth.reward, "score": None})

    def run_ended(self) -> None:
        violation = self._world.evidence.violation()
        if violation is not None:
            raise Violation(violation)
        still_open = {session.id for session in self._world.sessions.values()}
        _hold(still_open <= self.unclosed, f"sessions are open after the run: {still_open - self.unclosed}")
