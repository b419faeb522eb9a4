"""Score the results of Harbor tasks in containers of a runtime, each in a separate container of its task's image.

A verifier receives the tests when it starts, so they are never in a bucket that agents may read. It reads the
artifacts through a presigned URL, because they may be large. On Kubernetes, it is a Job with the tests in its Secret,
and its reward is the termination message of its container. This needs no permissions in the cluster beyond those for
attempts.

Invariants:

- The containers of agent and verifier share nothing but the artifacts.
- A verifier without a reward is a failure of the scorer, which is retried, never a reward of 0.
- A verifier that may be running is stopped by the run, its janitor, or the run's next trainer.
- Starts and stops are admitted by the queue of all calls. `scoring.processes` limits how many verifiers run at once;
  they hold no slot of an agent, because agents that wait for slots would delay every score.
"""

import asyncio
import base64
import json
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tenacity import wait_exponential_jitter

from agent_wrapper.contract import Rollout
from agent_wrapper.contract.messages import ORDER, TESTS, VerifierOrder
from agent_wrapper.shared.workspace import WORKSPACE
from rollout_backend.agents.runtimes.base import VerifierEnd, VerifierRuntime
from rollout_backend.base.retry import log_retry, retry, retry_until
from rollout_backend.config import ScoringConfig
from rollout_backend.core.harbor import CONTAINER_FIELD, VERIFIER, TaskContainer, resolve_variables
from rollout_backend.core.ledger import CallTally
from rollout_backend.errors import RunHeld, RuntimeCallError
from rollout_backend.run.collect.presign import Presigner
from rollout_backend.run.dispatch.call_queue import CallKind, CallQueue
from rollout_backend.run.scoring.scorer import ScoreInput, ScoringError, load_scorer

log = logging.getLogger(__name__)

_BACK_OFF = wait_exponential_jitter(max=10)
# Time for stopping a verifier. After that, its deadline ends it.
_STOP_S = 60.0
# URLs are valid for this long in addition to the time to start.
_URL_S = 3600.0


class VerifierJobs:
    """The verifiers of one run. `call` replaces `WorkerPool.call`."""

    def __init__(
        self,
        runtime: VerifierRuntime,
        presigner: Presigner,
        config: ScoringConfig,
        *,
        admission: CallQueue,
        on_open: Callable[[str], object],
        on_closed: Callable[[str], object],
    ) -> None:
        """`admission` is the queue of the runtime's calls. `on_open` and `on_closed` are called with each verifier's
        session, before it starts and after it is stopped."""
        self._runtime = runtime
        self._presigner = presigner
        self._timeout_s = config.timeout_s
        self._admission = admission
        self._slots = asyncio.Semaphore(config.processes)
        self._on_open = on_open
        self._on_closed = on_closed
        self._stopping: set[asyncio.Task[None]] = set()
        self._scorer = load_scorer(VERIFIER)

    async def aclose(self) -> None:
        """Wait until the verifiers of cancelled calls have been stopped."""
        await asyncio.gather(*self._stopping, return_exceptions=True)

    async def stop_earlier(self, run_id: str) -> None:
        """Before this trainer's first verifier, stop those that an earlier trainer of the run left running."""
        try:
            stopped = await self._runtime.stop_verifiers(run_id)
        except RuntimeCallError as error:
            log.warning("verifiers of the run's earlier trainer may run until their deadlines: %s", error)
        else:
            if stopped:
                log.info("stopped %d verifiers of the run's earlier trainer", stopped)

    @property
    def name(self) -> str:
        return self._scorer.name

    @property
    def sha256(self) -> str:
        return self._scorer.sha256

    async def call(self, request: bytes) -> dict[str, Any]:
        """Return the score of a rollout, or an error."""
        given = ScoreInput.unpack(request)
        try:
            async with self._slots:
                reward = await self._verify_unless_refused(given)
            return replace(self._scorer, function=lambda given: reward).score(given).model_dump()
        except (ScoringError, RuntimeCallError, ValueError) as error:
            return {"error": str(error)}

    async def _verify_unless_refused(self, given: ScoreInput) -> dict[str, Any]:
        """Retry a refused start until the step's deadline cancels it."""
        return await retry(
            lambda: self._verify(given),
            lambda error: isinstance(error, RuntimeCallError) and error.refused,
            _BACK_OFF,
            before_sleep=log_retry(log, "verifier of task %s", given.task_id, level=logging.INFO),
        )

    async def _verify(self, given: ScoreInput) -> dict[str, Any]:
        task, container = given.private.get("harbor"), given.payload.get(CONTAINER_FIELD)
        if task is None or container is None:
            raise ScoringError(f"task {given.task_id!r} is no Harbor task: start the run with --tasks harbor:FOLDER")
        if WORKSPACE not in given.artifacts:
            raise ScoringError(
                f"the agent has published no artifact {WORKSPACE!r}: add --workspace '{{payload.environment}}' to "
                "runtime.command"
            )
        rollout, timeout_s = given.rollout, min(float(task["timeout_s"]), self._timeout_s)
        order = VerifierOrder(
            artifacts_url=await self._presigner.artifacts_url(
                rollout, _URL_S + self._runtime.limits().start_timeout_s
            ),
            artifacts=rollout.artifacts,
            timeout_s=timeout_s,
            env=resolve_variables(task["env"]),
        )
        files = {ORDER: order.model_dump_json().encode(), TESTS: base64.b64decode(task["tests"])}
        return await self._run(rollout, TaskContainer.parse(container, ""), files, timeout_s)

    async def _run(
        self, rollout: Rollout, container: TaskContainer, files: Mapping[str, bytes], timeout_s: float
    ) -> dict[str, Any]:
        session_id = f"verifier-{uuid.uuid4().hex}"
        self._on_open(session_id)
        opened = True
        try:
            await self._admission.admit(CallKind.VERIFY)
            with self._admission.track(CallKind.VERIFY, CallTally()):
                end = await self._runtime.run_verifier(session_id, rollout, container, files, timeout_s)
        except RuntimeCallError as error:
            opened = not error.never_opened
            raise
        finally:
            if opened:
                stopping = asyncio.create_task(self._stop(session_id))
                self._stopping.add(stopping)
                stopping.add_done_callback(self._stopping.discard)
                await asyncio.shield(stopping)
            else:
                self._on_closed(session_id)
        return _read_reward(end, self._runtime.log_location(session_id))

    async def _stop(self, session_id: str) -> None:
        async def stop() -> None:
            await self._admission.admit(CallKind.STOP)
            with self._admission.track(CallKind.STOP, CallTally()):
                await self._runtime.stop(session_id)

        until = asyncio.get_running_loop().time() + _STOP_S
        try:
            await retry_until(until, stop, RuntimeCallError, _BACK_OFF)
        except (RuntimeCallError, RunHeld) as error:
            # The verifier's reward is still valid.
            log.warning("the verifier %s could not be stopped, and ends at its deadline: %s", session_id, error)
        else:
            self._on_closed(session_id)


def _read_reward(end: VerifierEnd, log_location: str) -> dict[str, Any]:
    """Return what the verifier reported. Raises ScoringError."""
    if end.succeeded:
        try:
            reported = json.loads(end.message)
        except (ValueError, RecursionError):
            raise ScoringError(
                f"the verifier reported {end.message[:100]!r}, and no reward. Its log: {log_location}"
            ) from None
        if isinstance(reported, dict):
            return reported
    why = end.message or "its container is gone"
    raise ScoringError(f"the verifier has no reward: {why}. Its log: {log_location}")
