"""Hold the rollouts of one task, and make the group's result."""

from agent_wrapper.contract import Rollout
from rollout_backend.config import GroupConfig
from rollout_backend.core.ledger import Ledger
from rollout_backend.core.policy import GroupState
from rollout_backend.core.tasks import Task
from rollout_backend.results.step_report import GroupResult, failures_of
from rollout_backend.step.rollout_task import RolloutTask


class Group:
    """The rollouts of one task. The ledger keeps `state` current."""

    def __init__(self, task: Task, config: GroupConfig) -> None:
        self.task = task
        self.size = task.rollouts or config.size
        self.state = GroupState(
            task_id=task.task_id,
            needed=self.size if config.policy == "strict" else min(config.needed, self.size),
            enough=self.size if config.oversample else None,
            spare=config.oversample,
        )
        self.rollouts: list[RolloutTask] = []  # in the order in which they were planned
        self.arrived: list[Rollout] = []  # in the order of their arrival
        self.reported = False

    @property
    def planned(self) -> int:
        """Return how many rollouts are planned at first."""
        return self.size + self.state.spare

    def result(self, ledger: Ledger) -> GroupResult:
        """Return what has arrived of the group."""
        results = [rollout.result for rollout in self.rollouts if rollout.result is not None]
        trained = self._trained()
        return GroupResult(
            self.task,
            tuple(result for result in results if result.rollout_id in trained),
            usable=self.state.usable,
            planned=len(self.rollouts),
            failures=failures_of(ledger, [rollout.rollout_id for rollout in self.rollouts]),
        )

    def _trained(self) -> set[str]:
        """Return the trainable rollouts; in an oversampled group the first that arrived, up to its size."""
        came = [rollout.rollout_id for rollout in self.arrived if rollout.trainable]
        return set(came[: self.state.enough])
