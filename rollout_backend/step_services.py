"""What a step needs of its run, and what its agents are told."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field

from agent_wrapper.contract import (
    REQUEST_FIELD,
    ModelEndpoint,
    ResultTarget,
    ResultUrls,
    Rollout,
    RolloutRequest,
)
from rollout_backend.breaker import Breaker
from rollout_backend.collect.buffer import RolloutBuffer
from rollout_backend.collect.set_aside import SetAside
from rollout_backend.config import RolloutConfig
from rollout_backend.dispatch.closer import SessionCloser
from rollout_backend.dispatch.dispatcher import Dispatcher
from rollout_backend.dispatched import Dispatched
from rollout_backend.gateway.tokens import SessionClaims
from rollout_backend.manifest import Manifest
from rollout_backend.tasks import Task


@dataclass(frozen=True)
class StepServices:
    """What a step needs of its run."""

    config: RolloutConfig
    dispatcher: Dispatcher
    closer: SessionCloser
    buffer: RolloutBuffer
    queue_url: str | None
    endpoint: Callable[[SessionClaims], ModelEndpoint]
    revoke: Callable[[Iterable[str]], Awaitable[None]]
    keep: Callable[[Rollout], None]  # every result that arrives, before it is counted
    read_manifest: Callable[[int], Awaitable[Manifest | None]]
    write_manifest: Callable[[Manifest], Awaitable[None]]
    wall: Callable[[], float] = time.time  # unix seconds
    sealed_by: str = ""  # fingerprint of the secret behind the seals that the buffer checks; empty: it checks none
    presign: Callable[[SessionClaims], ResultUrls] | None = None  # how agents write without credentials
    breaker: Breaker = field(default_factory=Breaker)
    set_aside: SetAside | None = None  # None: every task is always tried again
    gateway: str = ""  # names addresses and journals of the gateways; empty: no session outlives this trainer
    dispatched: Dispatched | None = None  # notes of the agents at work; None: none are kept
    adopt: Callable[[Collection[str]], Awaitable[None]] | None = None  # lets sessions of earlier trainers go on

    def payload(self, task: Task, claims: SessionClaims, deadline: float) -> bytes:
        """What the agent of this session is invoked with. It has until `deadline` (unix seconds)."""
        config = self.config
        request = RolloutRequest(
            run_id=claims.run_id,
            step=claims.step,
            task_id=task.task_id,
            rollout_id=claims.rollout_id,
            attempt=claims.attempt,
            session_id=claims.session_id,
            endpoint=self.endpoint(claims),
            sampling=claims.sampling,
            deadline=deadline,
            result=ResultTarget(
                bucket=config.storage.bucket,
                prefix=config.storage.prefix,
                queue_url=self.queue_url,
                region=config.aws.region,
                urls=self.presign(claims) if self.presign is not None else None,
            ),
        )
        return json.dumps({**task.payload, REQUEST_FIELD: request.model_dump(mode="json")}).encode()
