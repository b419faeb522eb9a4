"""The services of a run that a step uses, and the request that its agents receive."""

import json
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

from tenacity import wait_exponential_jitter
from tenacity.wait import WaitBaseT

from agent_wrapper.contract import (
    REQUEST_FIELD,
    ModelEndpoint,
    ResultTarget,
    ResultUrls,
    Rollout,
    RolloutRequest,
)
from rollout_backend.collect.buffer import RolloutBuffer
from rollout_backend.collect.manifest_store import ManifestStore
from rollout_backend.collect.store import ObjectStore
from rollout_backend.config import RolloutConfig, RuntimeConfig
from rollout_backend.core.ledger import LedgerEntry
from rollout_backend.core.manifest import Manifest
from rollout_backend.core.session_ends import Heartbeats, SessionEnds
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.core.tasks import Task
from rollout_backend.dispatch.call_queue import CallQueue
from rollout_backend.dispatch.dispatcher import Dispatcher
from rollout_backend.dispatch.session_closer import SessionCloser
from rollout_backend.runtimes.base import SessionCalls
from rollout_backend.scoring.rollout_scorer import RolloutScorer
from rollout_backend.step.circuit_breaker import CircuitBreaker
from rollout_backend.step.in_flight import InFlightLog, NoLines
from rollout_backend.step.task_blocklist import Blocklist, NoBlocklist, TaskBlocklist

_STORE_WAIT = wait_exponential_jitter(multiplier=0.5, max=10)
# 5, 15, 45, 135 s: the default of five attempts outlasts an outage of three minutes.
_ATTEMPT_WAIT = wait_exponential_jitter(multiplier=5, exp_base=3, max=300, jitter=1.0)
# Short, for the queue paces the calls: it only keeps one rollout that conflicts from taking every turn.
_REFUSAL_WAIT = wait_exponential_jitter(multiplier=0.5, max=5, jitter=0.5)


async def _no_adoption(session_ids: Collection[str]) -> None: ...


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
    archive: Callable[[Rollout, bytes], Future[bool]]  # see `RunArchive.write_rollout`
    read_manifest: Callable[[int], Awaitable[Manifest | None]]
    write_manifest: Callable[[Manifest], Awaitable[None]]
    read_manifests_from: Callable[[int], Awaitable[list[Manifest]]]
    wall: Callable[[], float] = time.time  # unix seconds
    store_wait: WaitBaseT = _STORE_WAIT  # between retries of a request to S3
    attempt_wait: WaitBaseT = _ATTEMPT_WAIT  # between attempts of a rollout
    refusal_wait: WaitBaseT = _REFUSAL_WAIT  # between retries of a refused invoke
    sealed_by: tuple[str, ...] = ()
    """Fingerprints of the secrets behind the seals that the buffer accepts, that of new seals first. Empty: it checks
    none."""
    hold: Callable[[Mapping[str, Any]], AbstractContextManager[object]] = nullcontext  # see `AgentRuntime.hold`
    wait_ready: Callable[[Mapping[str, Any], str], Awaitable[None]] | None = None  # see `AgentRuntime.wait_ready`
    presign: Callable[[SessionClaims], Awaitable[ResultUrls]] | None = None  # how agents write without credentials
    log_of: Callable[[LedgerEntry], str] = lambda entry: ""  # where a person finds the log of a rollout's session
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    blocklist: Blocklist = field(default_factory=NoBlocklist)
    gateway: str = ""  # names addresses and journals of the gateways; empty: no session outlives this trainer
    in_flight: InFlightLog = field(default_factory=lambda: InFlightLog(NoLines()))
    heartbeats: Heartbeats = field(default_factory=lambda: Heartbeats(math.inf))  # none are sent
    session_ends: SessionEnds = field(default_factory=SessionEnds)  # as the runtime reports them
    adopt: Callable[[Collection[str]], Awaitable[None]] = _no_adoption  # serves sessions of earlier trainers
    on_adopted: Callable[[bytes], object] | None = None  # gets the payload with which a session would be invoked
    scorer: RolloutScorer | None = None  # computes the rewards; None: the agents' own count

    @classmethod
    def assemble(
        cls,
        config: RolloutConfig,
        runtime: SessionCalls,
        store: ObjectStore,
        *,
        buffer: RolloutBuffer,
        limits: RuntimeConfig | None = None,
        calls: CallQueue | None = None,
        fencing_token: int = 0,
        owner: str = "",
        **services: Any,
    ) -> Self:
        """Make the services that every run has over a runtime and a bucket. `services` are the other fields.

        `limits` are those of the runtime, where they differ from the configured ones. `calls` admits its calls, if
        others than the step's pass through it. `fencing_token` and `owner` name the manager in the manifests that it
        writes.
        """
        limits, after = limits or config.runtime, config.group.block_task_after
        calls = calls or CallQueue.from_config(limits)
        calls.yield_to(buffer.has_backlog)
        manifests = ManifestStore(store, config.run_id, fencing_token, owner)
        return cls(
            config=config,
            dispatcher=Dispatcher(runtime, calls, max_sessions=limits.max_sessions),
            closer=SessionCloser(runtime, calls),
            buffer=buffer,
            read_manifest=manifests.read,
            write_manifest=manifests.write,
            read_manifests_from=manifests.read_from,
            blocklist=TaskBlocklist(store, config.run_id, after) if after is not None else NoBlocklist(),
            **services,
        )

    def payload(self, task: Task, claims: SessionClaims, remaining_s: float, urls: ResultUrls | None = None) -> bytes:
        """Return the payload of this session's invoke. The agent must return within `remaining_s`, and writes its
        result by `urls` or with its own credentials."""
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
            deadline=self.wall() + remaining_s,
            remaining_s=remaining_s,
            publish_grace_s=config.timeouts.publish_grace_s,
            heartbeat_s=config.timeouts.heartbeat_s,
            result=ResultTarget(
                bucket=config.storage.bucket,
                prefix=config.storage.prefix,
                queue_url=self.queue_url,
                region=config.aws.region,
                urls=urls,
            ),
        )
        return json.dumps({**task.payload, REQUEST_FIELD: request.model_dump(mode="json")}).encode()
