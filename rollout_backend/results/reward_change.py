"""Compare rewards that a scorer computed with those of the stored rollouts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict

from rollout_backend.results.comparison import REWARD, Difference, compare
from rollout_backend.results.records import RolloutRecord


class RescoredRollout(BaseModel):
    """A completed rollout with its stored reward and the new one."""

    model_config = ConfigDict(frozen=True)

    step: int
    rollout_id: str
    task_id: str
    old: float | None
    new: float | None  # None: it has no new reward, see `error`. Never 0 instead
    error: str = ""


def with_rewards(
    records: Iterable[RolloutRecord], rescored: Iterable[RescoredRollout]
) -> tuple[list[RolloutRecord], list[RolloutRecord]]:
    """Return the records of the rollouts that have both rewards, and the same records with the new rewards."""
    rewards = {(each.step, each.rollout_id): each.new for each in rescored if each.new is not None}
    old = [record for record in records if (record.step, record.rollout_id) in rewards and record.result is not None]
    return old, [_with_reward(record, rewards[record.step, record.rollout_id]) for record in old]


def reward_change(old: Sequence[RolloutRecord], new: Sequence[RolloutRecord]) -> Difference | None:
    """Return how the mean reward changes, paired by task; None if there is no rollout."""
    return next((each for each in compare(old, new) if each.name == REWARD), None)


def _with_reward(record: RolloutRecord, reward: float | None) -> RolloutRecord:
    assert record.result is not None
    return record.model_copy(update={"result": record.result.model_copy(update={"reward": reward})})
