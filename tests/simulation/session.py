"""A session of the simulated runtime, and the agent's task in it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from agent_wrapper.contract import RolloutRequest


@dataclass
class Session:
    id: str
    task: asyncio.Task[None]
    request: RolloutRequest
    stopping: bool = False
    accepted: bool = False  # and the trainer has received the response
    noticed: bool = False  # it has written its failure marker
    beats_at: float = 0.0  # when its next heartbeat is due
    heard_by: int | None = None  # the number of the trainer that received a heartbeat
