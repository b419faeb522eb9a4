"""Score the rollouts of a run, and store each score in S3.

Invariants:

- A rollout has one score per scorer and private part. It is written to S3 once, before it counts, so a restarted
  trainer trains the reward that its predecessor recorded, even if the scorer is not deterministic.
- A scorer that fails is retried with the same result; the rollout is not run again. A result that is not scored in
  time ends as infra_error, never with a reward of 0.
- The private part leaves this machine only as a digest, in the name of a key that agents cannot read.
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from tenacity import wait_exponential_jitter
from tenacity.wait import WaitBaseT

from agent_wrapper.contract import (
    ContractError,
    Failure,
    Outcome,
    Rollout,
    ScoredBy,
    artifacts_key,
    score_key,
    unpack_artifacts,
)
from agent_wrapper.contract.codec import unpacked_size
from rollout_backend.base.retry import at, log_retry, retry, retry_until
from rollout_backend.core.reasons import SCORER_FAILED
from rollout_backend.core.tasks import Task
from rollout_backend.errors import ResultMissing, StoreError, WriteConflict
from rollout_backend.run.collect.store import ObjectStore
from rollout_backend.run.scoring.scorer import ArtifactLost, Score, ScoringError, pack_request

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_BACK_OFF = wait_exponential_jitter(multiplier=1.0, max=30.0)
# Larger requests are built, and larger artifacts unpacked, in a thread.
_LARGE_BYTES = 64 * 1024


class RolloutScorer:
    """The scorer of one run."""

    def __init__(
        self,
        store: ObjectStore,
        run_id: str,
        call: Callable[[bytes], Awaitable[dict[str, Any]]],
        name: str,
        sha256: str,
        keep: Callable[[Rollout, bytes], object] = lambda rollout, data: None,
    ) -> None:
        """`call` sends a request to the scorer `name`: see `WorkerPool.call`. `sha256` is the scorer's digest. `keep`
        stores the artifacts of a rollout: see `RunArchive.write_artifacts`."""
        self.name = name
        self._store = store
        self._run_id = run_id
        self._call = call
        self._sha256 = sha256
        self._keep = keep

    def key(self, rollout: Rollout, task: Task) -> str:
        """Return the key of a rollout's score in S3."""
        text = json.dumps([self.name, self._sha256, task.private], sort_keys=True, default=dict)
        digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        return score_key(self._store.config.prefix, self._run_id, rollout.step, rollout.rollout_id, digest)

    async def score(
        self,
        rollout: Rollout,
        data: bytes,
        task: Task,
        *,
        deadline: float,
        retry_s: float,
        store_pause: WaitBaseT,
        may_be_recorded: bool,
    ) -> Rollout:
        """Return the rollout with the scorer's reward or, if scoring takes too long, without a reward.

        The scorer is retried for `retry_s`, S3 until `deadline`, in loop seconds; `data` is the encoded rollout. With
        `may_be_recorded`, an earlier trainer may have recorded the score.
        """
        reason, last = SCORER_FAILED, "the scorer had not answered"

        async def compute() -> Score:
            nonlocal reason, last
            try:
                return await self.compute(rollout, data, task)
            except ScoringError as error:
                reason, last = error.reason, str(error)
                raise

        async def ask_store(call: Callable[[], Awaitable[_T]]) -> _T:
            warn = log_retry(log, "rollout %s waits for S3", rollout.rollout_id)
            return await retry_until(deadline, call, StoreError, store_pause, before_sleep=warn)

        try:
            async with asyncio.timeout_at(deadline) as limit:
                score = await ask_store(lambda: self.read(rollout, task)) if may_be_recorded else None
                if score is None:
                    stop = at(asyncio.get_running_loop().time() + retry_s)
                    warn = log_retry(log, "rollout %s: scorer %s", rollout.rollout_id, self.name)
                    made = await retry(compute, ScoringError, _BACK_OFF, stop=stop, before_sleep=warn)
                    score = await ask_store(lambda: self.record(rollout, task, made))
            return scored(rollout, score)
        except TimeoutError:
            if not limit.expired():
                raise
            return unscored(rollout, reason, f"the step's time was up: {last}")
        except (ScoringError, StoreError) as error:
            message = f"{self.name} was retried until the limit (scoring.retry_s): {error}"
            return unscored(rollout, getattr(error, "reason", SCORER_FAILED), message)

    async def read(self, rollout: Rollout, task: Task) -> Score | None:
        """Return the score that an earlier trainer recorded, or None.

        Raises:
            StoreError: S3 did not answer.
        """
        try:
            return Score.parse(json.loads(await self._store.get(self.key(rollout, task))))
        except (ResultMissing, ValueError):
            # ContractError is a ValueError.
            return None

    async def compute(self, rollout: Rollout, data: bytes, task: Task) -> Score:
        """Call the scorer for a result; `data` is its encoded form.

        Raises:
            ScoringError: the scorer failed, or the artifacts are lost.
        """
        request: dict[str, Any] = {
            "task_id": task.task_id,
            "payload": dict(task.payload),
            "private": dict(task.private or {}),
            "result": data,
            "artifacts": await self._artifacts(rollout) if rollout.artifacts else {},
        }
        large = len(data) + sum(artifact.size for artifact in rollout.artifacts) > _LARGE_BYTES
        packed = await asyncio.to_thread(pack_request, request) if large else pack_request(request)
        answer = await self._call(packed)
        if "error" in answer:
            raise ScoringError(str(answer["error"]))
        return Score.parse(answer)

    async def _artifacts(self, rollout: Rollout) -> dict[str, bytes]:
        """Return the files that the agent published. Raises ArtifactLost."""
        place = self._store.config.prefix, self._run_id, rollout.step, rollout.rollout_id, rollout.attempt
        try:
            data = await self._store.get(artifacts_key(*place))
            if unpacked_size(data) <= _LARGE_BYTES:
                files = unpack_artifacts(data, rollout.artifacts)
            else:
                files = await asyncio.to_thread(unpack_artifacts, data, rollout.artifacts)
        except (StoreError, ContractError) as error:
            raise ArtifactLost(f"the rollout's artifacts cannot be read: {error}") from None
        self._keep(rollout, data)
        return files

    async def record(self, rollout: Rollout, task: Task, score: Score) -> Score:
        """Write a score, and return the one stored in S3, which may be an earlier trainer's.

        Raises:
            StoreError: S3 did not store it, or has something else under its key.
        """
        try:
            await self._store.put_if_match(self.key(rollout, task), score.model_dump_json().encode(), None)
        except WriteConflict:
            stored = await self.read(rollout, task)
            if stored is None:
                raise StoreError(f"the object {self.key(rollout, task)!r} is no score") from None
            return stored
        return score


def scored(rollout: Rollout, score: Score) -> Rollout:
    """Return the rollout with the scorer's reward, which replaces the agent's."""
    completed = {} if rollout.reward is not None else {"outcome": Outcome.COMPLETED, "failure": None}
    return rollout.model_copy(
        update={
            "reward": score.reward,
            "turn_rewards": score.turn_rewards,
            "extras": rollout.extras | score.extras,
            "score": ScoredBy(scorer=score.scorer, sha256=score.sha256, agent_reward=rollout.reward),
            **completed,
        }
    )


def unscored(rollout: Rollout, reason: str, message: str) -> Rollout:
    """Return a rollout whose scorer failed, as lost to the infrastructure and without a reward."""
    update = {
        "reward": None,
        "turn_rewards": (),
        "failure": Failure(reason=reason, message=message),
        "outcome": Outcome.INFRA_ERROR,
    }
    return rollout.model_copy(update=update)
