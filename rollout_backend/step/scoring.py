"""Score the results of one step, in the background.

Invariants:

- A result with a reward counts only once the scorer's reward has replaced the agent's.
- A scorer that fails is called again with the same result, and no rollout is run again for it. A result that is not
  scored in time ends as infra_error, never with a reward of 0.
- A result holds no slot of the runtime while it is scored.
"""

import asyncio
import logging
from collections.abc import Callable

from tenacity import RetryCallState, wait_exponential_jitter

from agent_wrapper.contract import Rollout
from rollout_backend.errors import RolloutBackendError, StoreError
from rollout_backend.retry import at, log_retry, retry
from rollout_backend.scoring.rollout_scorer import RolloutScorer, scored, unscored
from rollout_backend.scoring.scorer import Score, ScoringError
from rollout_backend.step.rollout_task import RolloutTask, StepContext

log = logging.getLogger(__name__)

_BACK_OFF = wait_exponential_jitter(multiplier=1.0, max=30.0)


class StepScoring:
    """The results of one step that are being scored."""

    def __init__(self, context: StepContext, deliver: Callable[[RolloutTask, Rollout, bytes], None]) -> None:
        """`deliver` settles a rollout by a result and its encoded form."""
        self._context = context
        self._deliver = deliver
        self._unscored: dict[RolloutTask, Rollout] = {}
        self._last_error: dict[RolloutTask, ScoringError] = {}

    def start(self, scorer: RolloutScorer, rollout_task: RolloutTask, rollout: Rollout, data: bytes) -> None:
        """Score a result, which is `data` in its encoded form, in the background."""
        self._unscored[rollout_task] = rollout
        rollout_task.start_scoring(rollout, self._run(scorer, rollout_task, rollout, data))

    def reach_step_deadline(self) -> None:
        """Settle the rollouts whose results are not scored yet."""
        for rollout_task in [*self._unscored]:
            self._fail(rollout_task, "the step's time was up")

    async def _run(self, scorer: RolloutScorer, rollout_task: RolloutTask, rollout: Rollout, data: bytes) -> None:
        try:
            score = await self._score(scorer, rollout_task, rollout, data)
        except (ScoringError, StoreError) as error:
            self._last_error[rollout_task] = error if isinstance(error, ScoringError) else ScoringError(str(error))
            self._fail(rollout_task, f"{scorer.name} was retried until the limit (scoring.retry_s)")
        except RolloutBackendError as error:  # no retry helps
            self._context.abort(error)
        else:
            self._settle(rollout_task, scored(rollout, score))
        finally:
            self._unscored.pop(rollout_task, None)

    async def _score(self, scorer: RolloutScorer, rollout_task: RolloutTask, rollout: Rollout, data: bytes) -> Score:
        plan, task = self._context.plan, rollout_task.task
        if plan.manifest.resumed:
            recorded = await plan.retry(lambda: scorer.read(rollout, task))
            if recorded is not None:
                return recorded
        score = await self._compute(scorer, rollout_task, rollout, data)
        return await plan.retry(lambda: scorer.record(rollout, task, score))

    async def _compute(
        self, scorer: RolloutScorer, rollout_task: RolloutTask, rollout: Rollout, data: bytes
    ) -> Score:
        now = asyncio.get_running_loop().time()
        until = min(now + self._context.services.config.scoring.retry_s, self._context.plan.deadline)

        warn = log_retry(log, "rollout %s: scorer %s", rollout.rollout_id, scorer.name)

        def record(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            if isinstance(error, ScoringError):
                self._last_error[rollout_task] = error
            warn(state)

        return await retry(
            lambda: scorer.compute(rollout, data, rollout_task.task),
            ScoringError,
            _BACK_OFF,
            stop=at(until),
            before_sleep=record,
        )

    def _fail(self, rollout_task: RolloutTask, why: str) -> None:
        rollout = self._unscored.pop(rollout_task)
        last = self._last_error.get(rollout_task) or ScoringError("the scorer had not answered")
        rollout_task.stop_scoring()
        self._settle(rollout_task, unscored(rollout, last.reason, f"{why}: {last}"))

    def _settle(self, rollout_task: RolloutTask, rollout: Rollout) -> None:
        if rollout_task.entry.outcome is None:
            self._deliver(rollout_task, rollout, rollout.encode())
