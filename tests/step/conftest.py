"""Steps over real S3 and SQS, with agents that run in this process and do as each test tells them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from tenacity import wait_none

from agent_wrapper.contract import (
    Announcement,
    Failure,
    ModelEndpoint,
    Outcome,
    Rollout,
    RolloutRequest,
    Segment,
)
from rollout_backend import aws
from rollout_backend.collect.buffer import RolloutBuffer
from rollout_backend.collect.manifest_store import ManifestStore
from rollout_backend.collect.queue import AnnouncementQueue, queue_name
from rollout_backend.collect.retokenize import Retokenizer
from rollout_backend.collect.store import ResultStore
from rollout_backend.config import ModelConfig, RolloutConfig, load_config
from rollout_backend.core.circuit_breaker import CircuitBreaker, describe_log
from rollout_backend.core.tasks import Task
from rollout_backend.dispatch.call_queue import CallQueue
from rollout_backend.dispatch.dispatcher import Dispatcher
from rollout_backend.dispatch.session_closer import SessionCloser
from rollout_backend.local.cloud import LocalStorage
from rollout_backend.local.scripted import BYTE_MODEL
from rollout_backend.step.services import StepServices
from rollout_backend.step.step import Step
from rollout_backend.step.task_blocklist import TaskBlocklist

Behaviour = Callable[["Agents", RolloutRequest], Awaitable[None]]


class Agents:
    """An agent runtime whose sessions are tasks here; `behave` is what each agent does."""

    def __init__(self, s3: Any, sqs: Any, make_segment: Callable[..., Segment]) -> None:
        self.s3 = s3
        self.sqs = sqs
        self._make_segment = make_segment
        self.behave: Behaviour = Agents.complete
        self.before: Callable[[RolloutRequest], Awaitable[None]] | None = None  # may raise, as the runtime would
        self.requests: list[RolloutRequest] = []
        self.sessions: dict[str, asyncio.Task[None]] = {}
        self.stopped: list[str] = []
        self.finished = 0

    # --- the runtime --------------------------------------------------------------------------------------

    async def check(self) -> None: ...

    async def invoke(self, session_id: str, payload: bytes) -> bytes:
        request = RolloutRequest.parse(json.loads(payload)["_rollout"])
        assert request.session_id == session_id
        self.requests.append(request)
        if self.before is not None:
            await self.before(request)
        self.sessions[session_id] = asyncio.create_task(self._run(request))
        return b'{"status": "accepted"}'

    async def _run(self, request: RolloutRequest) -> None:
        await self.behave(self, request)
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

    async def fail(self, request: RolloutRequest, outcome: Outcome = Outcome.AGENT_ERROR, **more: Any) -> None:
        failure = Failure(reason="agent_exception", message="boom")
        await self.complete(request, outcome=outcome, reward=more.get("reward"), failure=failure)

    async def vanish(self, request: RolloutRequest) -> None:
        """Accepts, and is never heard of again."""

    def result(self, request: RolloutRequest, **more: Any) -> Rollout:
        fields: dict[str, Any] = {
            "run_id": request.run_id,
            "step": request.step,
            "task_id": request.task_id,
            "rollout_id": request.rollout_id,
            "attempt": request.attempt,
            "session_id": request.session_id,
            "outcome": Outcome.COMPLETED,
            "reward": 1.0,
            "segments": [self._make_segment()],
        }
        return Rollout.model_validate({**fields, **more})

    async def put(self, request: RolloutRequest, body: bytes, key: str = "") -> None:
        await self.s3.put_object(Bucket=request.result.bucket, Key=key or request.key, Body=body)

    async def announce(
        self, request: RolloutRequest, *, bucket: str | None = None, key: str | None = None, times: int = 1
    ) -> None:
        """All of them are sent at once: as soon as one is heard, the session may be stopped."""
        body = Announcement(bucket=bucket or request.result.bucket, key=key or request.key).encode()
        entries = [{"Id": str(n), "MessageBody": body} for n in range(times)]
        assert request.result.queue_url is not None
        await self.sqs.send_message_batch(QueueUrl=request.result.queue_url, Entries=entries)

    async def say(self, request: RolloutRequest, body: str) -> None:
        assert request.result.queue_url is not None
        await self.sqs.send_message(QueueUrl=request.result.queue_url, MessageBody=body)


class Bench:
    """One run's services, and steps over them."""

    def __init__(self, config: RolloutConfig, agents: Agents, services: StepServices) -> None:
        self.config = config
        self.agents = agents
        self.services = services
        self.kept: list[Rollout] = []
        self.revoked: list[str] = []
        self.verify: Callable[[Rollout], None] = lambda rollout: None  # the check of seals

    def step(self, *tasks: str, number: int = 0, **more: Any) -> Step:
        """Each task's payload is its id up to a colon, which is no part of the payload."""
        made = [Task(task.replace(":", "-"), {"q": task.partition(":")[0]}) for task in tasks or ("task-a",)]
        return Step(number, made, self.services, None, **more)

    async def objects(self, prefix: str) -> list[dict[str, Any]]:
        """The quarantine records, or whatever else is stored as JSON under the prefix."""
        listed = await self.agents.s3.list_objects_v2(Bucket=self.config.storage.bucket, Prefix=prefix)
        found = []
        for item in listed.get("Contents", ()):
            reply = await self.agents.s3.get_object(Bucket=self.config.storage.bucket, Key=item["Key"])
            found.append(json.loads(await reply["Body"].read()))
        return found

    async def quarantined(self) -> list[dict[str, Any]]:
        return await self.objects(f"runs/{self.config.run_id}/quarantine/")


@pytest.fixture
async def open_bench(
    local_aws: LocalStorage, run_id: str, tmp_path: Any, make_segment: Callable[..., Segment]
) -> AsyncIterator[Callable[..., Awaitable[Bench]]]:
    """Opens a run; arguments are overrides of its settings."""
    async with AsyncExitStack() as stack:

        async def open_(*overrides: str) -> Bench:
            base = {
                "run_id": run_id,
                "model": {"path": str(tmp_path)},
                "storage": {"bucket": local_aws.bucket},
                "aws": {"region": local_aws.region, "endpoint_url": local_aws.endpoint_url},
                "runtime": {"kind": "http", "url": "http://127.0.0.1:9", "invoke_per_s": 1000, "stop_per_s": 1000},
                "queue": {"wait_s": 1},
                "group": {"size": 2},
                "collect": {"list_after_idle_s": 60},
                "timeouts": {
                    "model_call_s": 5, "agent_s": 60, "publish_grace_s": 20, "collection_s": 120, "token_s": 300,
                },
            }  # fmt: skip
            config = load_config(base=base, overrides=overrides, env={})
            where = {"region": local_aws.region, "endpoint_url": local_aws.endpoint_url}
            s3 = await stack.enter_async_context(aws.client("s3", **where))
            sqs = await stack.enter_async_context(aws.client("sqs", **where))
            store = await ResultStore.open(config.storage, config.aws)
            stack.push_async_callback(store.aclose)
            queue = None
            if config.queue.enabled:
                queue = await AnnouncementQueue.open(
                    config.queue, config.aws, queue_name(config.storage, config.run_id)
                )
                stack.push_async_callback(queue.aclose)
            agents = Agents(s3, sqs, make_segment)
            stack.push_async_callback(agents.aclose)
            retokenizer = None
            if config.collect.retokenize:
                retokenizer = await Retokenizer.open(ModelConfig(path=BYTE_MODEL))
                stack.callback(retokenizer.close)
            buffer = RolloutBuffer(
                config.run_id,
                store,
                queue,
                config.collect.max_fetches,
                retokenizer,
                verify=lambda rollout: bench.verify(rollout),
                text_format=config.collect.text_format,
            )
            receiving = asyncio.create_task(buffer.run(config.queue.receivers))
            stack.push_async_callback(_end, receiving)
            bench: Bench

            manifests = ManifestStore(store, config.run_id)

            async def revoke(sessions: Any) -> None:
                bench.revoked += sessions

            calls = CallQueue(invoke_per_s=1000, stop_per_s=1000)
            services = StepServices(
                config=config,
                dispatcher=Dispatcher(
                    agents,
                    calls,
                    max_sessions=config.runtime.max_sessions,
                    max_attempts=config.runtime.max_attempts,
                    wait=wait_none(),
                    wait_refused=wait_none(),
                ),
                closer=SessionCloser(agents, calls, wait=wait_none()),
                buffer=buffer,
                queue_url=queue.url if queue is not None else None,
                endpoint=lambda claims: ModelEndpoint(
                    base_url="http://gateway/v1", api_key="key", name="m", trajectory_url="http://gateway/t"
                ),
                revoke=revoke,
                archive=lambda rollout: bench.kept.append(rollout) or True,
                read_manifest=manifests.read,
                write_manifest=manifests.write,
                breaker=CircuitBreaker(
                    config.circuit_breaker,
                    lambda entry: describe_log(config, entry, lambda session: config.runtime.url),
                ),
                blocklist=TaskBlocklist(store, config.run_id, config.group.block_task_after or 10**6),
            )
            bench = Bench(config, agents, services)
            return bench

        yield open_


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
