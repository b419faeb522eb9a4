"""The agents: deterministic ones, each in the wrapper of its container.

An agent outlives the trainer that started it. While the trainer's gateway is down, it retries for a while. The
wrapper publishes its result: a PUT to S3 that may fail, then an announcement that may be lost or repeated. If the run
has a scorer, half of the agents publish an artifact before, with a separate PUT.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from agent_wrapper.contract import (
    Announcement,
    Artifact,
    Failure,
    Outcome,
    Rollout,
    RolloutRequest,
    Segment,
    Turn,
    VersionSpan,
    pack_artifacts,
)
from agent_wrapper.model_endpoint import PROBE_S
from agent_wrapper.outcome import without_artifacts
from rollout_backend.core.ledger import MODEL_UNREACHABLE
from tests.simulation.agent_sources import AgentSources, Toolkit
from tests.simulation.environment import Environment
from tests.simulation.gateway import Gateway
from tests.simulation.s3 import BUCKET, MAX_RESULT_BYTES, Bucket
from tests.simulation.session import Session
from tests.simulation.session_audit import SessionAudit
from tests.simulation.sqs import Queue

_MODEL_CALL_S = 20.0  # limit of a model call, as `timeouts.model_call_s`
_PUT_S = 10.0  # limit of a try to write a result


class Agents:
    """Runs the agent of each session."""

    def __init__(
        self,
        env: Environment,
        bucket: Bucket,
        queue: Queue,
        gateway: Gateway,
        audit: SessionAudit,
        sources: AgentSources,
        sessions: dict[str, Session],
    ) -> None:
        self.results: dict[str, Rollout] = {}  # by key: the real result, with every call
        self.publish_artifacts = False
        self._env = env
        self._bucket = bucket
        self._queue = queue
        self._gateway = gateway
        self._audit = audit
        self._sources = sources
        self._sessions = sessions

    async def run(self, request: RolloutRequest) -> None:
        """Run the container of a session. Its process stays until it is stopped or idle for long."""
        if self._env.chance("dies"):
            await self._env.passes(20)
            self.die(request)
            return
        hangs = self._env.chance("hangs")
        try:
            rollout = await self.play(request)
            if hangs:
                await asyncio.Event().wait()
            if self._sources.protocol != "rollout":
                await self._leave(request, rollout)
        except asyncio.CancelledError:  # the container is stopped
            if request.session_id in self._audit.died:
                return
            if self._sources.protocol != "rollout":
                return
            rollout = self.make_result(request, Outcome.INFRA_ERROR, "terminated")
            await asyncio.sleep(0.2)
        await self._publish(request, rollout)

    def die(self, request: RolloutRequest) -> None:
        """End a session silently. Its agent's task must end, too."""
        self._env.note(f"session dies: {request.rollout_id} attempt {request.attempt}")
        session = self._sessions.pop(request.session_id, None)
        if session is not None and session.heard_by is not None:
            self._audit.died[request.session_id] = self._env.now()

    async def play(self, request: RolloutRequest) -> Rollout:
        """Make the agent's model calls, and return its result."""
        env = self._env
        left_s = request.deadline - env.wall()
        try:
            async with asyncio.timeout(max(left_s, 0.0)):
                if env.faults.gateway_away and not await self._gateway.answers(PROBE_S):
                    return self.make_result(request, Outcome.INFRA_ERROR, MODEL_UNREACHABLE)
                for call in calls_of(request):
                    await env.passes(8)
                    if env.is_silent("model"):
                        await asyncio.sleep(_MODEL_CALL_S)
                        return self.make_result(request, Outcome.INFRA_ERROR, "model_unavailable")
                    patience_s = 40 * env.random.random()
                    if env.chance("model_fails") or not await self._gateway.is_reached(request, patience_s):
                        return self.make_result(request, Outcome.INFRA_ERROR, "model_unavailable")
                    self._gateway.journal.calls.setdefault(request.session_id, []).append(call)
                    self._audit.samples(request)
                if env.chance("agent_error"):
                    return self.make_result(request, Outcome.AGENT_ERROR, "agent_exception")
                if self._sources.protocol != "rollout":  # whose trainer seals the session
                    return self.make_result(request, Outcome.COMPLETED, calls=calls_of(request))
                if not await self._gateway.is_reached(request, left_s, to_seal=True):
                    return self.make_result(request, Outcome.INFRA_ERROR, "trajectory_unavailable")
        except TimeoutError:
            return self.make_result(request, Outcome.TIMED_OUT, "agent_deadline")
        sealed = self._gateway.journal.calls[request.session_id]
        return self.make_result(request, Outcome.COMPLETED, calls=sealed)

    def make_result(
        self, request: RolloutRequest, outcome: Outcome, reason: str = "", calls: Sequence[int] = ()
    ) -> Rollout:
        """Return the result of a session whose trajectory has these calls."""
        completed = outcome is Outcome.COMPLETED
        # Agents are deterministic: the samples follow from the rollout id, and are the same in each attempt.
        own = Random(request.rollout_id)
        return Rollout(
            run_id=request.run_id,
            step=request.step,
            task_id=request.task_id,
            rollout_id=request.rollout_id,
            attempt=request.attempt,
            session_id=request.session_id,
            outcome=outcome,
            reward=float(own.random() < 0.5) if completed else None,
            failure=None if completed else Failure(reason=reason, message="a simulated failure"),
            segments=segments_of(request, calls) if completed else (),
            started_at=self._env.wall(),
            finished_at=self._env.wall(),
        )

    async def _leave(self, request: RolloutRequest, rollout: Rollout) -> None:
        """Leave a result at the source of the agent's protocol. The container waits for its stop."""
        if self._sources.protocol == "sagemaker-job-runtime":
            self._sources.answer(request.session_id, failed=not await self._complete(request, rollout))
        elif self._sources.protocol == "agentcore-runtime-app":
            self._sources.keep(rollout)
        else:
            key = Toolkit().result_key(request)
            await self._put(lambda: self._sources.write(key, rollout))
        await asyncio.Event().wait()

    async def _complete(self, request: RolloutRequest, rollout: Rollout) -> bool:
        """Report that the rollout is complete, then its reward. Return False if the agent or a report failed."""
        if rollout.failure is not None:
            await self._report(request, lambda: None, status="failed")
            return False
        sources, session_id = self._sources, request.session_id

        def completed() -> None:
            sources.completed_at[session_id] = self._env.now()

        return await self._report(request, completed, status="ready") and await self._report(
            request, lambda: sources.leave(rollout), rewards=[rollout.reward]
        )

    async def _report(self, request: RolloutRequest, on_heard: Callable[[], None], **fields: Any) -> bool:
        """Report to the gateway, again without an answer. Return whether it was heard."""
        heard = False
        for _ in range(4):
            await self._env.passes(0.3)
            if self._env.is_silent("model"):
                await asyncio.sleep(_MODEL_CALL_S)
                continue
            patience_s = 40 * self._env.random.random()
            if self._env.chance("put_fails") or not await self._gateway.is_reached(request, patience_s, to_seal=True):
                continue
            self._gateway.report(request.session_id, **fields)
            if not heard:
                on_heard()
            heard = True
            if not self._env.chance("put_cut"):
                break
        return heard

    # --- publishing ---------------------------------------------------------------------------------------

    async def _publish(self, request: RolloutRequest, rollout: Rollout) -> None:
        rollout = await self._publish_artifacts(request, rollout)
        key = request.key_for(rollout.outcome)
        if self._env.chance("forged"):
            self._forge(request)
        body = rollout.encode()
        if rollout.outcome is Outcome.COMPLETED:  # all calls, not only those that the gateway returned
            whole = rollout.model_copy(update={"segments": segments_of(request, calls_of(request))})
            if whole.encode() != body:
                self._env.evidence.in_part.append(request.rollout_id)
            rollout = whole
        if self._env.chance("malformed"):
            body = body[: len(body) // 2]
        elif Random(f"{request.session_id} bomb").random() < self._env.faults.bomb:  # changes no other draw of a seed
            body = rollout.model_copy(update={"extras": {"zeros": "0" * MAX_RESULT_BYTES}}).encode()
        await self._put(lambda: self._write(request, key, body, rollout))
        if key not in self._bucket.objects:
            self._env.note(f"lost: the result of {request.rollout_id} could not be written")
        elif request.result.queue_url is not None:
            await self._announce(key)

    async def _publish_artifacts(self, request: RolloutRequest, rollout: Rollout) -> Rollout:
        files = artifacts_of(rollout)
        if not files or not self.publish_artifacts:
            return rollout
        own = Random(f"{request.session_id} artifacts")  # so that it changes no other draw of a seed
        for _ in range(4):
            await asyncio.sleep(own.random() * 0.3)
            if own.random() < self._env.faults.artifact_fails:
                continue
            self._bucket.put_new(request.artifacts_key, pack_artifacts(files))
            if own.random() >= self._env.faults.put_cut:
                break
        if request.artifacts_key not in self._bucket.objects:
            self._env.note(f"lost: the artifacts of {request.rollout_id} attempt {request.attempt}")
            return without_artifacts(rollout, "a simulated failure")
        listed = tuple(Artifact.of(name, content) for name, content in files.items())
        return rollout.model_copy(update={"artifacts": listed})

    async def _put(self, write: Callable[[], None]) -> None:
        for _ in range(4):
            await self._env.passes(0.3)
            if self._env.is_silent("agent_put"):
                await asyncio.sleep(_PUT_S)
                continue
            if self._env.chance("put_fails"):
                continue
            write()
            if not self._env.chance("put_cut"):
                break

    def _write(self, request: RolloutRequest, key: str, body: bytes, rollout: Rollout) -> None:
        if request.session_id in self._sessions and rollout.outcome is Outcome.INFRA_ERROR:
            self._sessions[request.session_id].noticed = True
        if self._bucket.put_new(key, body):
            self._bucket.written_at[key] = self._env.now()
            self.results[key] = rollout
            self._env.note(f"written: {key.rpartition('/')[2]} {rollout.outcome}")

    async def _announce(self, key: str) -> None:
        message = Announcement(bucket=BUCKET, key=key).encode()
        await self._env.passes(0.2)
        if not self._env.chance("announce_lost"):
            self._queue.send(message)
        if self._env.chance("announce_twice"):
            await self._env.passes(30)
            self._queue.send(message)
        if self._env.chance("junk"):
            self._queue.send(self._env.random.choice(_junk(key)))

    def _forge(self, hostile: RolloutRequest) -> None:
        """Write an object for another rollout of the step, which a container can do with the agent's role."""
        env = self._env
        others = [session.request for session in self._sessions.values() if session.request.step == hostile.step]
        others = [request for request in others if request.rollout_id != hostile.rollout_id]
        if not others:
            return
        victim = env.random.choice(others)
        outcome = env.random.choice([Outcome.COMPLETED, Outcome.TIMED_OUT, Outcome.INFRA_ERROR, Outcome.INFRA_ERROR])
        session_id = env.random.choice([hostile.session_id, "rollout-made-up", ""])
        rollout = self.make_result(victim, outcome, "forged", calls=calls_of(victim))
        key = victim.key_for(outcome)
        if self._bucket.put_new(key, rollout.model_copy(update={"session_id": session_id}).encode()):
            env.note(f"forged: {key.rpartition('/')[2]} {outcome}")
        if victim.result.queue_url is not None:
            self._queue.send(Announcement(bucket=BUCKET, key=key).encode())


def artifacts_of(rollout: Rollout) -> dict[str, bytes]:
    """Return the files that the agent of this result publishes. Each attempt has others."""
    if rollout.reward is None or Random(f"{rollout.rollout_id} artifacts").random() < 0.5:
        return {}
    return {"patch.diff": f"{rollout.rollout_id} attempt {rollout.attempt}".encode()}


def calls_of(request: RolloutRequest) -> range:
    """Return the model calls of the rollout's agent."""
    return range(Random(request.rollout_id).randint(1, 6))


def segments_of(request: RolloutRequest, calls: Sequence[int]) -> tuple[Segment, ...]:
    """Return one conversation: each call has one given and three sampled tokens."""
    ids = [token for call in calls for token in [Random(f"{request.rollout_id} {call}").randrange(1000)] * 4]
    spans = [VersionSpan(version="0", start=at, end=at + 3) for at in range(1, len(ids), 4)]
    turns = [Turn(start=s.start, end=s.end, finish_reason="stop", weight_versions=(s,)) for s in spans]
    segment = Segment.parse(
        {
            "token_ids": ids,
            "response_mask": [0, 1, 1, 1] * len(calls),
            "logprobs": [None, -0.5, -0.25, -0.125] * len(calls),
            "turns": turns,
        }
    )
    return (segment,)


def _junk(key: str) -> list[str]:
    """Return messages that name nothing of this step, for the result under this key."""
    return [
        "{",
        Announcement(bucket="somebody-elses", key=key).encode(),
        Announcement(bucket=BUCKET, key=key + ".never").encode(),
        Announcement(bucket=BUCKET, key=key.replace("/steps/0", "/steps/9")).encode(),
        Announcement(bucket=BUCKET, key=key.partition("~")[0] + "~77").encode(),
    ]
