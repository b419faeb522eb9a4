"""The scorer of a run: it may fail, and returns another reward with each call, as a judge that samples does.

It needs the artifacts that the agent has published, and records each call without them.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import msgpack

from agent_wrapper.contract import Rollout
from rollout_backend.run.scoring.scorer import ScoringError
from tests.simulation.agents import artifacts_of
from tests.simulation.environment import Environment

_CALL_S = 60.0  # limit of a call, as `scoring.timeout_s`
NAME, SHA256 = "judge", "0" * 64


class SimScorer:
    """The scorer's processes, for all trainers of a run."""

    def __init__(self, env: Environment) -> None:
        self.returned: defaultdict[str, list[float]] = defaultdict(list)  # rewards, by rollout
        self._env = env

    async def call(self, request: bytes) -> dict[str, Any]:
        """Score one rollout, as `WorkerPool.call`."""
        fields = msgpack.unpackb(request)
        rollout = Rollout.decode(fields["result"])
        if fields["artifacts"] != artifacts_of(rollout):
            self._env.evidence.scored_without.append(rollout.rollout_id)
        await self._env.passes(5)
        if self._env.is_silent("scorer"):
            await asyncio.sleep(_CALL_S)
            raise ScoringError("no answer in time")
        if self._env.chance("scorer_fails"):
            raise ScoringError("a simulated failure")
        reward = 0.5 + self._env.random.random()
        self.returned[rollout.rollout_id].append(reward)
        return {"scorer": NAME, "sha256": SHA256, "reward": reward}
