"""What must hold in every history, whatever goes wrong in it. The first thing that does not is a `Violation`."""

from __future__ import annotations

import json
from collections import Counter

from agent_wrapper.contract import Announcement, ContractError, Outcome, Rollout, parse_result_key, result_key
from rollout_backend.collect.queue import Message
from rollout_backend.config import RolloutConfig
from rollout_backend.manifest import payload_digest
from rollout_backend.report import StepResult
from rollout_backend.sim.world import BUCKET, Trainer, World
from rollout_backend.step import Step

_CLOSING_S = 240.0  # for a step's sessions to be closed after its deadline, with every retry there is


class Violation(AssertionError):
    """A promise that this history breaks."""


def _hold(truth: bool, promise: str) -> None:
    if not truth:
        raise Violation(promise)


class Checks:
    def __init__(self, world: World, config: RolloutConfig) -> None:
        self._world = world
        self._config = config
        self.unclosed: set[str] = set()  # sessions that reports have named
        self._planned_at = 0.0
        self._seen: Violation | None = None  # in a task whose failure nobody looks at

    def key(self, step: int, rollout_id: str) -> str:
        return result_key("", self._config.run_id, step, rollout_id)

    def finished(self, step: int) -> set[str]:
        """The keys of the step's results that stand in S3 and can be read."""
        prefix = self.key(step, "")
        return {key for key in self._world.objects if key.startswith(prefix) and "~" not in key and self._intact(key)}

    def _intact(self, key: str) -> bool:
        try:
            Rollout.decode(self._world.objects[key])
        except ContractError:
            return False
        return True

    def planned(self) -> None:
        """The step has its rollouts; what stood in S3 before is listed, and not heard of."""
        self._planned_at = self._world.now()

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
            written_at = self._world.written_at.get(item.key, -1.0)
            of_now = item.bucket == BUCKET and name.step == step.step and written_at > self._planned_at
            if of_now and step.wants(name.rollout_id, name.attempt) and self._seen is None:
                self._seen = Violation(f"the announcement of {name.rollout_id} is deleted before its result is in")

    def settled_here(self, step: Step, rollout_id: str, outcome: Outcome, reason: str) -> None:
        """The training side ends a rollout by itself, for want of a result."""
        key = self.key(step.step, rollout_id)
        if outcome is Outcome.TIMED_OUT and not self._world.faults.s3 and key in self.finished(step.step):
            age = self._world.now() - self._world.written_at[key]
            _hold(age < 1.0, f"{rollout_id} is declared timed out while its result stands in S3 for {age:.1f} s")
        if reason == "straggler":
            self._lags_behind(step, rollout_id)

    def _lags_behind(self, step: Step, rollout_id: str) -> None:
        """By the world's own books: of when sessions began, and results were written."""
        began = {key: at for at, key in self._world.invoked}  # the last attempt
        took = [
            self._world.written_at[key] - began[key]
            for key in self.finished(step.step)
            if self._world.written_at[key] > max(began[key], self._planned_at)
        ]
        ran = self._world.now() - began[self.key(step.step, rollout_id)]
        _hold(bool(took), f"{rollout_id} is a straggler, and nothing is finished")
        least = self._config.group.straggler_factor * min(took)
        _hold(
            ran + 1e-6 >= least, f"{rollout_id} is cut off after {ran:.1f} s, and the quickest earns it {least:.1f} s"
        )

    # --- tasks that are set aside -------------------------------------------------------------------------

    def set_aside(self) -> set[str]:
        """The payloads' digests that S3 names as set aside."""
        after, found = self._config.group.set_aside_after, set()
        for key, body in self._world.objects.items():
            if "/set-aside/" in key and after is not None and len(json.loads(body)["losses"]) >= after:
                found.add(key.rpartition("/")[2].removesuffix(".json"))
        return found

    def left_out(self, step: Step, digests: set[str], began: float) -> None:
        """What was set aside before the step began was not dispatched in it."""
        invoked = {key for at, key in self._world.invoked if at >= began}
        for group in step._groups.values():
            keys = {self.key(step.step, rollout_id) for rollout_id in group.ids}
            if payload_digest(group.task) in digests:
                _hold(not keys & invoked, f"task {group.task.task_id} is set aside, and dispatched")

    # --- the breaker --------------------------------------------------------------------------------------

    def step_stopped(self, step: Step) -> None:
        """A step that the breaker has ended leaves nothing behind either."""
        _hold(not list(step.ledger.open_entries()), "a rollout of a stopped step has no class")
        self.unclosed |= step.ledger.unclosed_sessions.keys()
        used = {session.id for session in self._world.sessions.values() if session.request.step == step.step}
        _hold(used <= self.unclosed, f"sessions are open after the step was stopped: {used - self.unclosed}")

    def _not_for_nothing(self, step: Step) -> None:
        """No run goes on once the last rollouts, so many, were all lost for one reason."""
        limit, streaks = self._config.breakers.consecutive, Counter[str]()
        if limit is None or self._config.breakers.over_s:
            return
        for entry in step.ledger.settled:
            if entry.by_result and entry.outcome is not Outcome.INFRA_ERROR:
                streaks.clear()
            elif entry.outcome is Outcome.INFRA_ERROR and entry.reason != "task_set_aside":
                streaks[entry.reason] += entry.reason not in ("throttled", "quota_exceeded")
        for reason, count in streaks.items():
            _hold(count < limit, f"the last {count} rollouts end as {reason}, and the run goes on")

    # --- when a step is over ------------------------------------------------------------------------------

    def step_ended(
        self, step: Step, result: StepResult, trainer: Trainer, finished_before: set[str], began: float
    ) -> None:
        report, world = result.report, self._world
        self._not_for_nothing(step)
        for group in result.groups if self._config.group.extra else ():
            _hold(len(group.rollouts) <= self._config.group.size, f"{group.task.task_id} is trained beyond its size")
        if self._seen is not None:
            raise self._seen
        _hold(sum(report.outcomes.values()) == report.planned, "a planned rollout has no class")
        _hold(report.sessions_open == 0, "the ledger has sessions open after the step")
        self.unclosed |= report.unclosed_sessions.keys()
        seconds = world.now() - began
        limit = self._config.timeouts.collection_s + _CLOSING_S
        _hold(seconds <= limit, f"the step took {seconds:.0f} s, more than {limit:.0f} s")
        self._only_what_agents_ended_with(step, result)
        again = [key for at, key in world.invoked if at >= began and key in finished_before]
        _hold(not again, f"finished rollouts were run again: {again}")
        missed = finished_before - {self.key(step.step, rollout.rollout_id) for rollout in result.rollouts}
        _hold(not missed, f"finished rollouts were left out: {missed}")
        used = {session.id for session in world.sessions.values() if session.request.step == step.step}
        _hold(used <= self.unclosed, f"sessions are open after the step: {used - self.unclosed}")

    def _only_what_agents_ended_with(self, step: Step, result: StepResult) -> None:
        ids = Counter(rollout.rollout_id for rollout in result.rollouts)
        _hold(all(count == 1 for count in ids.values()), f"rollouts were counted more than once: {ids}")
        for rollout in result.rollouts:
            booked = step.ledger.entries[rollout.rollout_id].outcome
            _hold(
                booked is rollout.outcome, f"{rollout.rollout_id} came as {rollout.outcome} and is booked as {booked}"
            )
        trained = [rollout for group in result.groups for rollout in group.rollouts]
        ids = Counter(rollout.rollout_id for rollout in trained)
        _hold(all(count == 1 for count in ids.values()), f"rollouts are trained more than once: {ids}")
        for rollout in trained:
            truth = self._world.truth.get(self.key(step.step, rollout.rollout_id))
            _hold(truth is not None, f"{rollout.rollout_id} is trained, and no agent ever finished it")
            assert truth is not None
            _hold(truth.reward is not None, f"{rollout.rollout_id} ended as {truth.outcome} and is trained")
            _hold(
                truth.encode() == rollout.encode(), f"{rollout.rollout_id} is trained as something else than it was"
            )

    def run_ended(self) -> None:
        _hold(not self._world.in_part, f"the rest is handed out as the whole: {self._world.in_part}")
        _hold(not self._world.wasted, f"run again while an agent was at work: {self._world.wasted}")
        _hold(not self._world.used_twice, f"sessions were started anew after their end: {self._world.used_twice}")
        still_open = {session.id for session in self._world.sessions.values()}
        _hold(still_open <= self.unclosed, f"sessions are open after the run: {still_open - self.unclosed}")
