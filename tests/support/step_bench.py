"""A run's services over real S3 and SQS, with agents that run in this process and behave as a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, create_autospec

from tenacity import wait_none

from agent_wrapper.contract import Announcement, ModelEndpoint, Outcome, Rollout, RolloutRequest, manifest_key
from builders import background
from rollout_backend.base import aws
from rollout_backend.config import RolloutConfig
from rollout_backend.core.ledger import Ledger
from rollout_backend.core.manifest import StepRequest
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.core.tasks import Task
from rollout_backend.errors import ServingError
from rollout_backend.manager import RolloutManager
from rollout_backend.run.accounts.step_report import GroupResult, StepResult
from rollout_backend.run.collect.buffer import RolloutBuffer
from rollout_backend.run.collect.manifest_store import ManifestStore
from rollout_backend.run.collect.queue import AnnouncementQueue, queue_name
from rollout_backend.run.collect.store import ResultStore
from rollout_backend.run.dispatch.call_queue import CallQueue
from rollout_backend.run.dispatch.dispatcher import Dispatcher
from rollout_backend.run.lease import RunLease
from rollout_backend.run.step.circuit_breaker import CircuitBreaker
from rollout_backend.run.step.in_flight import InFlightLog
from rollout_backend.run.step.services import Pauses, StepServices
from rollout_backend.run.step.step import Step
from rollout_backend.run.step.task_blocklist import TaskBlocklist
from rollouts import make_rollout

Behaviour = Callable[["Agents", RolloutRequest], Awaitable[None]]


class Agents:
    """An agent runtime whose sessions are tasks of this process. Each agent does what `behave` does."""

    def __init__(self, s3: Any, sqs: Any) -> None:
        self.s3 = s3
        self.sqs = sqs
        self.behave: Behaviour = Agents.complete
        self.before: Callable[[RolloutRequest], Awaitable[None]] | None = None  # may raise, as the runtime would
        self.requests: list[RolloutRequest] = []
        self.sessions: dict[str, asyncio.Task[None]] = {}
        self.stopped: list[str] = []
        self.finished = 0

    @property
    def invoked(self) -> set[str]:
        """The ids of the invoked sessions."""
        return {request.session_id for request in self.requests}

    @property
    def rollouts(self) -> list[str]:
        """The ids of the invoked rollouts, sorted."""
        return sorted(request.rollout_id for request in self.requests)

    # --- the runtime --------------------------------------------------------------------------------------

    def hold(self, payload: Mapping[str, Any]) -> AbstractContextManager[object]:
        return nullcontext()

    async def wait_ready(self, payload: Mapping[str, Any], run_id: str) -> None: ...

    def log_location(self, session_id: str | None) -> str:
        return "the agents' log"

    def adopt(self, session_id: str, payload: Callable[[], bytes]) -> None: ...

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        request = RolloutRequest.parse(json.loads(payload)["_rollout"])
        assert request.session_id == session_id
        self.requests.append(request)
        if self.before is not None:
            await self.before(request)
        self.sessions[session_id] = asyncio.create_task(self._run(request))
        return b'{"status": "accepted"}'

    async def _run(self, request: RolloutRequest) -> None:
        try:
            await self.behave(self, request)
        finally:  # a session may be stopped as soon as its result can be read
            self.finished += 1

    async def stop(self, session_id: str) -> None:
        self.stopped.append(session_id)
        session = self.sessions.pop(session_id, None)
        if session is not None:
            session.cancel()

    async def aclose(self) -> None:
        for session in self.sessions.values():
            session.cancel()

    # --- what an agent may do -----------------------------------------------------------------------------

    async def complete(self, request: RolloutRequest, **more: Any) -> None:
        result = self.result(request, **more)
        key = request.key_for(result.outcome)
        await self.put(request, result.encode(), key)
        await self.announce(request, key=key)

    async def fail(self, request: RolloutRequest, **more: Any) -> None:
        await self.complete(request, **{"outcome": Outcome.AGENT_ERROR, **more})

    async def lose(self, request: RolloutRequest) -> None:
        """Report that the infrastructure lost the attempt."""
        await self.complete(request, outcome=Outcome.INFRA_ERROR)

    async def vanish(self, request: RolloutRequest) -> None:
        """Accept the invoke, and do nothing else."""

    async def hang(self, request: RolloutRequest) -> None:
        await asyncio.Event().wait()

    async def write_unannounced(self, request: RolloutRequest) -> None:
        await self.put(request, self.result(request).encode())

    def result(self, request: RolloutRequest, **more: Any) -> Rollout:
        names = ("run_id", "step", "task_id", "rollout_id", "attempt", "session_id")
        fields = {name: getattr(request, name) for name in names}
        return make_rollout(**{**fields, "started_at": 0, "finished_at": 0, **more})

    async def put(self, request: RolloutRequest, body: bytes, key: str = "") -> None:
        await self.s3.put_object(Bucket=request.result.bucket, Key=key or request.key, Body=body)

    async def announce(
        self, request: RolloutRequest, *, bucket: str | None = None, key: str | None = None, times: int = 1
    ) -> None:
        """Send all announcements at once: as soon as one is received, the session may be stopped."""
        body = Announcement(bucket=bucket or request.result.bucket, key=key or request.key).encode()
        entries = [{"Id": str(n), "MessageBody": body} for n in range(times)]
        assert request.result.queue_url is not None
        await self.sqs.send_message_batch(QueueUrl=request.result.queue_url, Entries=entries)

    async def send(self, request: RolloutRequest, body: str) -> None:
        assert request.result.queue_url is not None
        await self.sqs.send_message(QueueUrl=request.result.queue_url, MessageBody=body)


def only(name: str, special: Behaviour, others: Behaviour = Agents.complete) -> Behaviour:
    """Return a behaviour in which the task or rollout of this name behaves differently from the others."""

    async def behave(agents: Agents, request: RolloutRequest) -> None:
        await (special if name in (request.task_id, request.rollout_id) else others)(agents, request)

    return behave


class Gateways:
    """The gateways of a run, and what a step asked of them. Without an identity, no session outlives its trainer."""

    def __init__(self) -> None:
        self.identity = ""
        self.revoked: list[str] = []
        self.adopted: list[str] = []

    def endpoint(self, claims: SessionClaims) -> ModelEndpoint:
        place = {"base_url": "http://gateway/v1", "trajectory_url": "http://gateway/t"}
        return ModelEndpoint(api_key="key", name="m", **place)

    async def revoke(self, session_ids: Iterable[str]) -> None:
        self.revoked += session_ids

    async def adopt(self, session_ids: Iterable[str]) -> None:
        self.adopted += session_ids


class NoLines:
    """Keeps no records, as a machine that was lost: every session that a manifest names may be open."""

    async def append(self, step: int, lines: str) -> None: ...

    async def read(self, step: int) -> list[str]:
        return []

    async def delete(self, step: int) -> None: ...


class Bench:
    """One run's services, and steps over them."""

    def __init__(self, config: RolloutConfig, agents: Agents) -> None:
        self.config = config
        self.agents = agents
        self.services: StepServices
        self.kept: list[Rollout] = []
        self.gateways = Gateways()
        self.verify: Callable[[Rollout], None] = lambda rollout: None  # the check of seals
        self.ledger: Ledger  # of the step that was made last

    @classmethod
    async def open(cls, config: RolloutConfig, stack: AsyncExitStack) -> Bench:
        where = {"region": config.aws.region, "endpoint_url": config.aws.endpoint_url}
        clients = [await stack.enter_async_context(aws.client(name, **where)) for name in ("s3", "sqs")]
        bench = cls(config, Agents(*clients))
        stack.push_async_callback(bench.agents.aclose)
        store = await ResultStore.open(config.storage, config.aws)
        stack.push_async_callback(store.aclose)
        buffer, queue_url = await bench._receive(store, stack)
        agents, no_wait = bench.agents, wait_none()
        calls = CallQueue(invoke_per_s=1000, stop_per_s=1000)
        bench.services = StepServices(
            config=config,
            runtime=agents,
            dispatcher=Dispatcher(agents, calls, max_sessions=config.runtime.max_sessions, stop_wait=no_wait),
            gateways=bench.gateways,
            buffer=buffer,
            manifests=ManifestStore(store, config.run_id),
            blocklist=TaskBlocklist(store, config.run_id, config.group.block_task_after),
            archive=bench,
            queue_url=queue_url,
            breaker=CircuitBreaker(config.circuit_breaker),
            in_flight=InFlightLog(NoLines()),
            pauses=Pauses(no_wait, no_wait, no_wait),
        )
        return bench

    async def _receive(self, store: ResultStore, stack: AsyncExitStack) -> tuple[RolloutBuffer, str | None]:
        """Return a buffer that receives until the stack is closed, and the URL of its queue."""
        config, queue = self.config, None
        if config.queue.enabled:
            name = queue_name(config.storage, config.run_id)
            queue = await AnnouncementQueue.open(config.queue, config.aws, name)
            stack.push_async_callback(queue.aclose)
        buffer = RolloutBuffer(
            config.run_id,
            store,
            queue,
            config.collect.max_fetches,
            verify=lambda rollout: self.verify(rollout),
        )
        await stack.enter_async_context(background(buffer.run(config.queue.receivers)))
        return buffer, queue.url if queue is not None else None

    @property
    def revoked(self) -> list[str]:
        return self.gateways.revoked

    def write_rollout(self, rollout: Rollout, data: bytes) -> Future[bool]:
        """Keep a result, as the run's archive."""
        self.kept.append(rollout)
        written: Future[bool] = Future()
        written.set_result(True)
        return written

    async def wait(self, *writes: Future[Any]) -> None:
        """Wait for no write, as the run's archive: each is complete."""

    def replace(self, **services: Any) -> None:
        self.services = replace(self.services, **services)

    def forget(self) -> None:
        """Forget which sessions were invoked, stopped and revoked."""
        for names in (self.agents.requests, self.agents.stopped, self.revoked):
            names.clear()

    # --- steps --------------------------------------------------------------------------------------------

    def step(
        self,
        *tasks: str | Task,
        number: int = 0,
        behave: Behaviour | None = None,
        before: Any = None,
        on_group: Callable[[GroupResult], None] = lambda group: None,
        **more: Any,
    ) -> Step:
        """Make a step of tasks, or of their ids. A task's payload is its id up to a colon."""
        if behave is not None:
            self.agents.behave = behave
        if before is not None:
            self.agents.before = before
        made = tuple(
            task if isinstance(task, Task) else Task(task.replace(":", "-"), {"q": task.partition(":")[0]})
            for task in tasks or ("task-a",)
        )
        request = StepRequest(number, made, self.config.sampling, **more)
        step = Step(request, self.services, on_group)
        self.ledger = step.ledger
        return step

    def start(self, *tasks: str | Task, **more: Any) -> asyncio.Task[StepResult]:
        return asyncio.create_task(self.step(*tasks, **more).run())

    async def run(self, *tasks: str | Task, **more: Any) -> StepResult:
        """Run a step, and check what holds at the end of any step."""
        result = await self.step(*tasks, **more).run()
        self.check_ended(result)
        return result

    def check_ended(self, result: StepResult) -> None:
        assert sum(result.report.outcomes.values()) == result.report.planned
        assert result.report.balanced
        assert not self.ledger.open_sessions
        assert set(self.agents.stopped) >= set(self.agents.sessions)
        grouped = {rollout.rollout_id for group in result.groups for rollout in group.rollouts}
        trainable = {rollout.rollout_id for rollout in result.rollouts if rollout.trainable}
        assert grouped == trainable if result.report.surplus == 0 else grouped < trainable

    def manager(self) -> RolloutManager:
        """Return a manager of these services, as if it was entered. Its gateways report no counts."""
        manager = RolloutManager(self.config)
        gateways = SimpleNamespace(stats=AsyncMock(side_effect=ServingError("gone")))
        run: Any = SimpleNamespace(
            for_steps=self.services,
            serving=SimpleNamespace(
                weight_version=None, weights_name="", named_adapter=lambda name: None, gateways=gateways
            ),
            lease=create_autospec(RunLease, instance=True, lost=None),
            limits=self.config.runtime,
            background=[],
        )
        manager._run = run
        return manager

    # --- what S3 holds ------------------------------------------------------------------------------------

    async def objects(self, prefix: str) -> list[dict[str, Any]]:
        """Return the JSON objects under a prefix."""
        listed = await self.agents.s3.list_objects_v2(Bucket=self.config.storage.bucket, Prefix=prefix)
        found = []
        for item in listed.get("Contents", ()):
            reply = await self.agents.s3.get_object(Bucket=self.config.storage.bucket, Key=item["Key"])
            found.append(json.loads(await reply["Body"].read()))
        return found

    async def put(self, key: str, body: bytes, **more: Any) -> None:
        await self.agents.s3.put_object(Bucket=self.config.storage.bucket, Key=key, Body=body, **more)

    async def quarantined(self) -> list[dict[str, Any]]:
        return await self.objects(f"runs/{self.config.run_id}/quarantine/")

    @property
    def manifest_key(self) -> str:
        return manifest_key("", self.config.run_id, 0)

    async def manifest(self) -> dict[str, Any]:
        [manifest] = await self.objects(self.manifest_key)
        return manifest
