"""The `timeouts` section.

Where each timeout is enforced:

- `model_call_s`: `gateway.engine_client`
- `agent_s`: `agent_wrapper.app`
- `publish_grace_s`: `step.rollout_task`
- `collection_s`: `step.step`
- `session_key_s`: `core.session_key`
- `heartbeat_s`: `core.heartbeats`
"""

from __future__ import annotations

import itertools
from typing import Self

from pydantic import model_validator

from rollout_backend.config.section import Seconds, Section


class TimeoutConfig(Section):
    """Timeouts nest: model_call < agent, agent + publish_grace < collection < session_key; checked at start."""

    model_call_s: Seconds = 300.0
    """Timeout of one model call, including all its retries."""
    agent_s: Seconds = 1800.0
    """Timeout of an agent, from the arrival of its rollout at the container until it has returned."""
    publish_grace_s: Seconds = 120.0
    """Time after an agent's deadline until its rollout, if it has not arrived, ends as timed out. The wrapper uses up
    to 2 s of it to end the agent, 20 s to fetch the trajectory and 60 s to write the result. Each is also capped
    at a share of this time: 1/10, 1/4 and 1/2. The rest covers a container that starts near the step's end."""
    collection_s: Seconds = 3600.0
    """Timeout of a step. At this deadline it ends with the rollouts that have arrived."""
    session_key_s: Seconds = 5400.0
    """Lifetime of a session key, from the rollout's dispatch."""
    heartbeat_s: Seconds | None = 15.0
    """Interval of the heartbeats from the wrapper to the gateway. A container that misses three, while others arrive,
    is lost, and its rollout gets another attempt. Null: no heartbeats; a container that dies silently is noticed at
    its agent's deadline."""

    @model_validator(mode="after")
    def _ladder(self) -> Self:
        rungs = {
            "model_call_s": self.model_call_s,
            "agent_s": self.agent_s,
            "agent_s + publish_grace_s": self.session_s,
            "collection_s": self.collection_s,
            "session_key_s": self.session_key_s,
        }
        wrong = [
            f"{lower} ({rungs[lower]:g}) is not below {upper} ({rungs[upper]:g}): raise {upper} or lower {lower}"
            for lower, upper in itertools.pairwise(rungs)
            if not rungs[lower] < rungs[upper]
        ]
        if wrong:
            raise ValueError(f"timeouts must nest, and {'; '.join(wrong)}")
        return self

    @property
    def session_s(self) -> float:
        """Return the seconds that an agent and its result may take."""
        return self.agent_s + self.publish_grace_s
