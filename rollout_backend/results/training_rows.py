"""The rows of a step: which rollouts were trained, and a digest of what they hold. Pure.

A row is a segment of a rollout that was trained: its tokens, response mask, logprobs and weight versions, with the
rollout's reward and the rewards of its turns.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

from agent_wrapper.contract import Rollout
from rollout_backend.core.seal import digest_of
from rollout_backend.results.records import RolloutRecord
from rollout_backend.results.step_report import StepReport


def trained_records(report: StepReport, records: Iterable[RolloutRecord]) -> list[RolloutRecord]:
    """Return the rollouts that a step gave to the trainer, in its order: the trainable ones of the usable groups.

    Of an oversampled group these are the first that arrived, up to its size.

    Raises:
        ValueError: the report and the records are not of the same step.
    """
    by_task: dict[str, list[RolloutRecord]] = defaultdict(list)
    for record in records:
        by_task[record.task_id].append(record)
    found: list[RolloutRecord] = []
    for group in report.groups:
        if not group.usable:
            continue
        of_task = by_task[group.task_id]
        arrived = sorted((each for each in of_task if each.trainable), key=lambda each: each.result_at or 0.0)
        chosen = {record.rollout_id for record in arrived[: len(group.rewards)]}
        trained = [record for record in of_task if record.rollout_id in chosen]
        if [record.reward for record in trained] != list(group.rewards):
            raise ValueError(f"the report names other rewards of task {group.task_id!r} than the records")
        found += trained
    return found


def rollout_digest(rollout: Rollout) -> str:
    """Return the SHA-256 of a rollout's rows."""
    of_turns = f" {rollout.turn_rewards!r}" if rollout.turn_rewards else ""
    return _sha256(f"{digest_of(rollout.segments)} {rollout.reward!r}{of_turns}")


def step_digest(rollouts: Sequence[Rollout]) -> str:
    """Return the SHA-256 of the rows of a step."""
    return _sha256("\n".join(f"{rollout.rollout_id} {rollout_digest(rollout)}" for rollout in rollouts))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
