"""Define the services of a run that a step uses, and build the requests to its agents."""

import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

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
from rollout_backend.config import RolloutConfig
from rollout_backend.core.ledger import LedgerEntry
from rollout_backend.core.session_ends import Heartbeats, SessionEnds
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.core.tasks import Task
from rollout_backend.run.collect.buffer import RolloutBuffer
from rollout_backend.run.collect.manifest_store import ManifestStore
from rollout_backend.run.dispatch.dispatcher import Dispatcher
from rollout_backend.run.scoring.rollout_scorer import RolloutScorer
from rollout_backend.run.step.circuit_breaker import CircuitBreaker, describe_log
from rollout_backend.run.step.in_flight import InFlightLog
from rollout_backend.run.step.task_blocklist import TaskBlocklist


class StepRuntime(Protocol):
    """The part of a runtime that a step uses directly. See `AgentRuntime`."""

    def hold(self, payload: Mapping[str, Any]) -> AbstractContextManager[object]: ...

    async def wait_ready(self, payload: Mapping[str, Any], run_id: str) -> None: ...

    def log_location(self, session_id: str | None) -> str: ...


class ModelEndpoints(Protocol):
    """The gateways, as a step uses them. See `GatewayFleet`."""

    @property
    def identity(self) -> str: ...

    def endpoint(self, claims: SessionClaims) -> ModelEndpoint: ...

    async def revoke(self, session_ids: Iterable[str]) -> None: ...

    async def adopt(self, session_ids: Collection[str]) -> None: ...


class ResultArchive(Protocol):
    """Keeps the results of a run. See `RunArchive`."""

    def write_rollout(self, rollout: Rollout, data: bytes) -> Future[bool]: ...

    async def wait(self, *writes: Future[Any]) -> object: ...


class UrlSigner(Protocol):
    """Signs the URLs with which agents without credentials write their results. See `Presigner`."""

    async def urls(self, claims: SessionClaims) -> ResultUrls: ...


_STORE = wait_exponential_jitter(multiplier=0.5, max=10)
# The pauses are 5, 15, 45 and 135 s, so the default of five attempts outlasts an outage of three minutes.
_ATTEMPT = wait_exponential_jitter(multiplier=5, exp_base=3, max=300, jitter=1.0)
# The queue already paces the calls. This pause only keeps one conflicting rollout from taking every turn.
_REFUSAL = wait_exponential_jitter(multiplier=0.5, max=5, jitter=0.5)


@dataclass(frozen=True)
class Pauses:
    """The pauses between retries of a request to S3, between attempts of a rollout, and between refused invokes."""

    store: WaitBaseT = _STORE
    attempt: WaitBaseT = _ATTEMPT
    refusal: WaitBaseT = _REFUSAL


@dataclass(frozen=True)
class StepServices:
    """The services of a run that its steps use."""

    config: RolloutConfig
    runtime: StepRuntime
    dispatcher: Dispatcher
    gateways: ModelEndpoints
    buffer: RolloutBuffer
    manifests: ManifestStore
    blocklist: TaskBlocklist
    archive: ResultArchive
    breaker: CircuitBreaker
    in_flight: InFlightLog
    queue_url: str | None = None
    """The queue to which agents announce results. If None, S3 announces them, or nothing does."""
    presigner: UrlSigner | None = None
    """If None, agents write with their own credentials."""
    sealed_by: tuple[str, ...] = ()
    """Fingerprints of the secrets whose seals the buffer accepts, starting with the secret of new seals. If empty,
    the buffer checks no seals."""
    heartbeats: Heartbeats = field(default_factory=lambda: Heartbeats(math.inf))
    session_ends: SessionEnds = field(default_factory=SessionEnds)
    scorer: RolloutScorer | None = None
    """Computes the rewards. If None, the agents' own rewards count."""
    wall: Callable[[], float] = time.time
    """Returns unix seconds."""
    pauses: Pauses = field(default_factory=Pauses)

    def log_of(self, entry: LedgerEntry) -> str:
        """Describe the location of the log of a rollout's session."""
        return describe_log(self.config, entry, self.runtime.log_location)

    def payload(self, task: Task, claims: SessionClaims, remaining_s: float, urls: ResultUrls | None = None) -> bytes:
        """Return the payload of this session's invoke. The agent must return within `remaining_s`, and writes its
        result to `urls` or with its own credentials."""
        config = self.config
        request = RolloutRequest(
            run_id=claims.run_id,
            step=claims.step,
            task_id=task.task_id,
            rollout_id=claims.rollout_id,
            attempt=claims.attempt,
            session_id=claims.session_id,
            endpoint=self.gateways.endpoint(claims),
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
