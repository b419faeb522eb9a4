"""Variants that lose, repeat or forge results: of the buffer, the fetcher, the ledger and the archive."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch
from weakref import WeakKeyDictionary

from agent_wrapper.contract import ContractError, Outcome, ResultName, Rollout
from agent_wrapper.outcome import AgentResult
from rollout_backend.agents.protocols.sagemaker_job_runtime import SageMakerJobRuntime
from rollout_backend.agents.protocols.translator import PollingTranslator, Reports, ReportTranslator, Translator
from rollout_backend.core.ledger import Ledger, LedgerEntry, Phase
from rollout_backend.core.tasks import Task
from rollout_backend.run.accounts.archive import RunArchive
from rollout_backend.run.accounts.step_report import GroupResult
from rollout_backend.run.collect import buffer as buffer_module
from rollout_backend.run.collect import fetcher as fetcher_module
from rollout_backend.run.collect.buffer import RolloutBuffer
from rollout_backend.run.collect.fetcher import FetchStatus, KeyLocks, ResultDecoder, ResultFetcher
from rollout_backend.run.collect.queue import Message
from rollout_backend.run.scoring import rollout_scorer as rollout_scorer_module
from rollout_backend.run.scoring.rollout_scorer import RolloutScorer
from rollout_backend.run.scoring.scorer import ArtifactLost, Score
from rollout_backend.run.step.results import Group, StepResults
from rollout_backend.run.step.rollout_task import RolloutTask
from tests.simulation import agents as agents_module
from tests.simulation.mutants.registry import Patch, all_of, mutant


@mutant
def delete_before_store() -> Patch:
    """A message is deleted as soon as it is received."""
    handle = RolloutBuffer.handle

    async def broken(self: RolloutBuffer, queue: Any, messages: list[Message]) -> None:
        with contextlib.suppress(OSError):
            await queue.delete(messages)
        await handle(self, queue, messages)

    return patch.object(RolloutBuffer, "handle", broken)


@mutant
def dedupe_by_message_id() -> Patch:
    """Results are deduplicated by message, so a result that is announced twice counts twice."""
    deliver = LedgerEntry.deliver

    def broken(self: LedgerEntry, *result: Any, **more: Any) -> bool:
        self.outcome = None  # as if nothing had arrived
        return deliver(self, *result, **more)

    seen: WeakKeyDictionary[RolloutTask, int] = WeakKeyDictionary()  # how often each result was announced again
    group_result = Group.result

    def result(self: Group, ledger: Ledger) -> GroupResult:
        made = group_result(self, ledger)
        times = {task.rollout_id: 1 + seen.get(task, 0) for task in self.rollouts}
        twice = [rollout for rollout in made.rollouts for _ in range(times[rollout.rollout_id])]
        return replace(made, rollouts=tuple(twice))

    def record_duplicate(self: StepResults, rollout_id: str) -> None:
        task = self.rollouts.get(rollout_id)
        if task is not None and task.result is not None:
            seen[task] = seen.get(task, 0) + 1

    return all_of(
        patch.object(LedgerEntry, "deliver", broken),
        patch.object(Group, "result", result),
        patch.object(StepResults, "record_duplicate", record_duplicate),
    )


@mutant
def no_sweep() -> Patch:
    """Results that were not announced are never found."""

    async def never_list(*_: Any) -> None:
        await asyncio.Event().wait()

    async def find_nothing(*_: Any) -> bool:
        return True

    return all_of(
        patch.object(RolloutBuffer, "list_when_idle", never_list),
        patch.object(RolloutBuffer, "fetch_by_key", find_nothing),
    )


@mutant
def listed_only_when_idle() -> Patch:
    """Announcements postpone the listing without a limit."""
    return patch.object(buffer_module, "IDLE_INTERVALS", 10**6)


@mutant
def results_fetched_concurrently() -> Patch:
    """A listing fetches a result while an announcement's fetch is in flight."""
    return patch.object(KeyLocks, "of", lambda *_: asyncio.Lock())


@mutant
def unknown_is_absent() -> Patch:
    """A result counts as absent although S3 did not answer."""
    fetch_by_key = RolloutBuffer.fetch_by_key

    async def broken(self: RolloutBuffer, sink: Any, rollout_id: str, attempt: int) -> bool:
        await fetch_by_key(self, sink, rollout_id, attempt)
        return True

    return patch.object(RolloutBuffer, "fetch_by_key", broken)


@mutant
def sources_not_asked() -> Patch:
    """A rollout of another protocol ends although its agent's own source was not asked once more."""

    async def broken(self: Translator[Any], session_id: str, *, ended: bool) -> bool:
        return True

    return all_of(*(patch.object(kind, "find_result", broken) for kind in (Translator, PollingTranslator)))


@mutant
def silent_sources_are_empty() -> Patch:
    """A source without an answer counts as one without a result."""
    find_result, find_polled = Translator.find_result, PollingTranslator.find_result

    async def broken(self: Translator[Any], session_id: str, *, ended: bool) -> bool:
        await find_result(self, session_id, ended=ended)
        return True

    async def broken_poll(self: PollingTranslator, session_id: str, *, ended: bool) -> bool:
        await find_polled(self, session_id, ended=ended)
        return True

    return all_of(
        patch.object(Translator, "find_result", broken), patch.object(PollingTranslator, "find_result", broken_poll)
    )


@mutant
def reported_rewards_lost() -> Patch:
    """The reward that an agent of the job runtime reports after its completion is lost."""
    read_result = SageMakerJobRuntime.read_result

    def broken(self: SageMakerJobRuntime, data: bytes, max_bytes: int) -> AgentResult:
        return read_result(self, json.dumps({**json.loads(data), "rewards": None}).encode(), max_bytes)

    return patch.object(SageMakerJobRuntime, "read_result", broken)


class _Hasty:
    """Reports of which each completion counts as one with rewards."""

    def __init__(self, reports: Reports) -> None:
        self._reports = reports
        self.report_of = reports.report_of

    async def reports(self) -> dict[str, dict[str, Any]]:
        return {name: {**report, "has_rewards": True} for name, report in (await self._reports.reports()).items()}


@mutant
def rewards_not_awaited() -> Patch:
    """A rollout of the job runtime is written when it is complete, before its agent has reported the reward."""
    init: Any = ReportTranslator.__init__

    def broken(self: ReportTranslator, *calls: Any, **options: Any) -> None:
        *calls_and_store, reports, on_end = calls
        init(self, *calls_and_store, _Hasty(reports), on_end, **options)

    return patch.object(ReportTranslator, "__init__", broken)


@mutant
def defects_escape() -> Patch:
    """An exception about one object ends the receivers or the step."""

    async def broken(what: str, work: Any, failed: Any) -> Any:
        return await work()

    return patch.object(buffer_module, "log_defects", broken)


@mutant
def reward_zero_on_failure() -> Patch:
    """A lost rollout is trained with a reward of 0."""
    result = Group.result

    def broken(self: Group, ledger: Ledger) -> GroupResult:
        made = result(self, ledger)
        lost = [each.rollout_id for each in self.rollouts if each.entry.outcome is Outcome.INFRA_ERROR]
        worthless = [_made_up(step=ledger.step, rollout_id=rollout_id, reward=0.0) for rollout_id in lost]
        return replace(made, rollouts=(*made.rollouts, *worthless))

    return patch.object(Group, "result", broken)


@mutant
def unscored_is_zero() -> Patch:
    """A rollout whose scorer failed is trained with a reward of 0."""

    def broken(rollout: Rollout, reason: str, message: str) -> Rollout:
        return rollout.model_copy(update={"reward": 0.0})

    return patch.object(rollout_scorer_module, "unscored", broken)


@mutant
def agent_scores_itself() -> Patch:
    """A rollout whose scorer failed is trained with the agent's own reward."""
    return patch.object(rollout_scorer_module, "unscored", lambda rollout, reason, message: rollout)


@mutant
def scores_not_recorded() -> Patch:
    """A score counts although S3 does not hold it, so a restarted trainer may train another one."""

    async def broken(self: RolloutScorer, rollout: Rollout, task: Task, score: Score) -> Score:
        return score

    return patch.object(RolloutScorer, "record", broken)


@mutant
def artifacts_optional() -> Patch:
    """A rollout whose artifacts cannot be read is scored without them."""
    compute = RolloutScorer.compute

    async def broken(self: RolloutScorer, rollout: Rollout, data: bytes, task: Task) -> Score:
        try:
            return await compute(self, rollout, data, task)
        except ArtifactLost:
            return await compute(self, rollout.model_copy(update={"artifacts": ()}), data, task)

    return patch.object(RolloutScorer, "compute", broken)


@mutant
def lost_artifacts_unnoticed() -> Patch:
    """An agent whose artifacts could not be written publishes its result as if it had none."""
    return patch.object(agents_module, "without_artifacts", lambda rollout, message: rollout)


@mutant
def results_unchecked() -> Patch:
    """Any object under a rollout's key counts as its result."""
    decode = ResultDecoder.decode

    async def broken(self: ResultDecoder, data: bytes, name: ResultName) -> Rollout:
        try:
            return await decode(self, data, name)
        except ContractError:
            return _made_up(step=name.step, rollout_id=name.rollout_id, reward=1.0, attempt=1, session_id="?")

    return all_of(
        patch.object(ResultDecoder, "decode", broken),
        patch.object(fetcher_module, "check_session", lambda *_: None),
    )


@mutant
def results_expand_without_limit() -> Patch:
    """A small object may expand to any size."""
    init = ResultDecoder.__init__

    def broken(self: ResultDecoder, run_id: str, max_bytes: int, *more: Any) -> None:
        init(self, run_id, 2**40, *more)

    return patch.object(ResultDecoder, "__init__", broken)


@mutant
def sessions_unchecked() -> Patch:
    """A result counts even if another session wrote it."""
    return patch.object(fetcher_module, "check_session", lambda *_: None)


@mutant
def forged_failure_markers_end_rollouts() -> Patch:
    """An invalid failure marker ends its rollout, although the result may still arrive."""
    reject = ResultFetcher.reject

    async def broken(self: ResultFetcher, sink: Any, name: ResultName, *more: Any) -> FetchStatus:
        return await reject(self, sink, ResultName(name.step, name.rollout_id, attempt=None), *more)

    return patch.object(ResultFetcher, "reject", broken)


@mutant
def invalid_results_never_settled() -> Patch:
    """An invalid result is neither rejected nor settled, so each listing fetches it again."""

    async def broken(self: ResultFetcher, *_: Any) -> FetchStatus:
        return FetchStatus.UNKNOWN

    return patch.object(ResultFetcher, "reject", broken)


@mutant
def late_results_accepted() -> Patch:
    """A rollout that was already settled still counts when its result arrives."""
    deliver = LedgerEntry.deliver

    def broken(self: LedgerEntry, *result: Any, **more: Any) -> bool:
        if not self.by_result:
            self.outcome = None
        return deliver(self, *result, **more)

    awaits_result = property(lambda self: not self.by_result and self.phase is not Phase.SCORING)
    return all_of(
        patch.object(LedgerEntry, "deliver", broken), patch.object(LedgerEntry, "awaits_result", awaits_result)
    )


@mutant
def full_disk_ends_the_run() -> Patch:
    """A failed write to the run directory ends the receivers."""

    def broken(self: RunArchive, path: Path, data: bytes) -> bool:
        self.write(path, data)
        return True

    return patch.object(RunArchive, "try_to_write", broken)


def _made_up(**fields: Any) -> Rollout:
    """Return a completed rollout that no agent has produced."""
    made: Any = Rollout.model_construct
    return cast(Rollout, made(run_id="simulated", task_id="t", outcome=Outcome.COMPLETED, **fields))
