"""Run one rollout of an agent, end to end: invoke, gateway, S3, and back.

Only the model is scripted; the agent's app, the contract, the gateway with its session keys, and the result in S3 are
real. One harness serves many rollouts; each has a separate session, and possibly its own script.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from unittest.mock import patch

import aiohttp
import httpx
import yarl
from aiohttp import web
from botocore.exceptions import ClientError

from agent_wrapper.contract import (
    REQUEST_FIELD,
    ModelEndpoint,
    Outcome,
    ResultTarget,
    Rollout,
    RolloutRequest,
    Sampling,
    artifacts_key,
    unpack_artifacts,
)
from agent_wrapper.shared.threads import in_thread
from rollout_backend.base import aws
from rollout_backend.config import RolloutConfig
from rollout_backend.core.seal import Sealer
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.errors import RolloutBackendError
from rollout_backend.model.dialects.registry import DIALECTS
from rollout_backend.model.gateway.sessions import journal as journals
from rollout_backend.model.gateway.sessions.conversations import RecordedTurn
from rollout_backend.model.gateway.sessions.journal import read_session
from rollout_backend.model.model_call import ApiError, ModelCall
from rollout_backend.model.serving.gateway_fleet import GatewayFleet
from rollout_backend.run.scoring.rollout_scorer import scored
from rollout_backend.run.scoring.scorer import ScoreInput, Scorer
from rollout_backend.workbench.local.cloud import ARN, LocalRuntime, LocalStorage
from rollout_backend.workbench.local.http_proxy import HOP_BY_HOP, HttpProxy
from rollout_backend.workbench.local.scripted import BYTE_MODEL, Script, ScriptedEngine

if TYPE_CHECKING:
    from agent_wrapper import RolloutApp
    from agent_wrapper.bedrock_agentcore import BedrockAgentCoreApp

_RUN_ID = "test"
_POLL_S, _MAX_POLL_S = 0.02, 0.5
# A poll delays a result by at most this fraction of the rollout's time so far.
_POLL_PART = 0.05
_CHECK_EVERY_S = 1.0
# After its deadline, the wrapper has this time to end the agent and write the result.
_AFTER_DEADLINE_S = 60.0
# A log is read at this interval, at most this many bytes at a time.
_FOLLOW_S, _FOLLOWED_BYTES = 0.1, 65_536
# An error reports at most this many bytes of the response.
_MAX_ERROR = 1000


@dataclass(frozen=True)
class Watcher:
    """Callbacks for a rollout's model calls, called in the event loop."""

    started: Callable[[ModelCall], object]
    ended: Callable[[list[RecordedTurn], str], object]
    """Receives the recorded turns, and the error of a failed call."""
    output: Callable[[str], object] = lambda line: None
    """Receives each line that the agent's process writes."""


class AgentRunError(RolloutBackendError):
    """The agent's app could not be started, refused the task, or published no result. The message says which."""

    def __init__(self, message: str, log: Path | None = None) -> None:
        """`log` is the log of the agent's process, if it ran in a separate one."""
        super().__init__(message)
        self.log = log


class AgentHarness:
    """Runs rollouts of agents, as an async context manager. Logs go to RUN_DIR.

        async with AgentHarness(run_dir=Path("runs/test")) as harness:
            rollout = await harness.run(app, {"question": "What is 2 + 2?", "answer": "4"}, replies=["4"])

    By default the model is scripted. For another model, pass a `config`, whose sections `model`, `gateway` and
    `timeouts` apply, and an engine's `engine_url`; its rollouts take no `replies`.
    """

    def __init__(self, *, run_dir: Path, config: RolloutConfig | None = None, engine_url: str | None = None) -> None:
        self._run_dir = run_dir
        self._storage = LocalStorage(run_dir=run_dir)
        self._engine = ScriptedEngine([]) if engine_url is None else None
        journals = run_dir / "journal"
        self._journal = journals / "0-of-1"
        config = config or self._config()
        # `_watch` reads only one journal.
        one = config.gateway.model_copy(update={"kind": "process", "processes": 1})
        seal_secret = secrets.token_urlsafe(48)
        self.sealer = Sealer(seal_secret)
        """Verifies the seals of this harness's rollouts."""
        self._gateways = GatewayFleet(
            config.model_copy(update={"gateway": one}),
            self._engine.url if self._engine is not None else engine_url or "",
            run_dir,
            seal_secret=seal_secret,
            journals=journals,
        )
        self._environ = {**self._storage.environ, "AWS_ENDPOINT_URL": self._storage.endpoint_url}
        self._runtimes: dict[tuple[Path, frozenset[tuple[str, str]]], LocalRuntime] = {}
        self._numbers = itertools.count(1)
        self._stack = AsyncExitStack()
        self._s3: Any = None

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            if self._engine is not None:
                stack.enter_context(self._engine)
            for part in (self._storage, self._gateways):
                stack.push_async_callback(part.stop)
            await asyncio.gather(self._storage.start(), self._gateways.start())
            self._s3 = await stack.enter_async_context(self._storage.s3())
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    async def endpoint(self, replies: Script, *, sampling: Sampling | None = None) -> ModelEndpoint:
        """Return the endpoint of a new session, which is valid for an hour. The engine answers it with `replies`."""
        return self._endpoint(self._session(sampling, 3600.0), replies)

    async def run(
        self,
        agent: RolloutApp | BedrockAgentCoreApp | Path | str,
        task: Mapping[str, Any],
        replies: Script | None,
        *,
        sampling: Sampling | None = None,
        timeout_s: float = 240.0,
        watcher: Watcher | None = None,
        before_stop: Callable[[str], Awaitable[object]] | None = None,
    ) -> Rollout:
        """Run one rollout of `agent` on `task`, and return its result from S3.

        An app object runs in this process. A path to a Python file runs in a separate process, as in its container.
        `replies` are the model's answers, in order. `timeout_s` limits the agent's time. If the agent fails or takes
        longer, the rollout's `outcome` and `failure` report it. `watcher` is called for each model call, and
        `before_stop` with the session's id once the result is in S3.

        Raises:
            AgentRunError: the app could not be started, refused the task, or published no result.
            ConfigError: the file does not exist.
        """
        claims = self._session(sampling, timeout_s + _AFTER_DEADLINE_S)
        endpoint = self._endpoint(claims, replies)
        async with AsyncExitStack() as stack:
            if watcher is not None:
                endpoint = await stack.enter_async_context(self._watch(endpoint, claims.session_id, watcher))
            request = RolloutRequest(
                run_id=_RUN_ID,
                step=0,
                task_id="task",
                rollout_id=claims.rollout_id,
                attempt=1,
                session_id=claims.session_id,
                endpoint=endpoint,
                sampling=claims.sampling,
                deadline=time.time() + timeout_s,
                remaining_s=timeout_s,
                result=ResultTarget(bucket=self._storage.bucket, region=self._storage.region),
            )
            payload = {**task, REQUEST_FIELD: request.model_dump(mode="json")}
            stack.enter_context(patch.dict(os.environ, self._environ))
            if isinstance(agent, (Path, str)):
                invoked = self._in_session(Path(agent), request.session_id, payload, watcher)
            else:
                invoked = self._in_this_process(agent, payload)
            rollout = await self._result(request, await stack.enter_async_context(invoked))
            if before_stop is not None:
                await before_stop(request.session_id)
            return rollout

    async def score(
        self, rollout: Rollout, scorer: Scorer, task: Mapping[str, Any], private: Mapping[str, Any] | None = None
    ) -> Rollout:
        """Return the rollout of `task` with the scorer's reward, if it can be scored.

        Raises:
            ScoringError: the scorer failed.
        """
        if not rollout.can_be_scored:
            return rollout
        given = ScoreInput("task", dict(task), dict(private or {}), rollout, await self.artifacts(rollout))
        if scorer.is_async:
            return scored(rollout, await scorer.score_async(given))
        return scored(rollout, await in_thread(lambda: scorer.score(given), "scorer"))

    async def artifacts(self, rollout: Rollout) -> dict[str, bytes]:
        """Return the files that a rollout published."""
        if not rollout.artifacts:
            return {}
        key = artifacts_key("", _RUN_ID, rollout.step, rollout.rollout_id, rollout.attempt)
        reply = await self._s3.get_object(Bucket=self._storage.bucket, Key=key)
        return unpack_artifacts(await reply["Body"].read(), rollout.artifacts)

    async def sessions(self, script: Path) -> dict[str, Any]:
        """Return `LocalRuntime.sessions` for the runtime of this script."""
        # A runtime is identified by the environment in which it was started.
        with patch.dict(os.environ, self._environ):
            runtime = await self._runtime(script)
        return await runtime.sessions()

    def _config(self) -> RolloutConfig:
        return RolloutConfig.parse(
            {
                "run_id": _RUN_ID,
                "model": {"path": BYTE_MODEL, "name": "scripted", "renderer": "chatml", "context_length": 65_536},
                "storage": {"bucket": self._storage.bucket},
                "runtime": {"kind": "agentcore", "arn": ARN.format(region=self._storage.region)},
                "aws": {"region": self._storage.region, "endpoint_url": self._storage.endpoint_url},
                # The first import on a busy machine is slow.
                "gateway": {"startup_timeout_s": 240},
                "output_dir": self._run_dir,
            }
        )

    def _session(self, sampling: Sampling | None, lifetime_s: float) -> SessionClaims:
        number = next(self._numbers)
        return SessionClaims(
            run_id=_RUN_ID,
            step=0,
            rollout_id=f"rollout-{number}",
            attempt=1,
            session_id=f"test-{number}-{uuid.uuid4()}",
            sampling=sampling or Sampling(),
            expires_at=time.time() + lifetime_s,
        )

    def _endpoint(self, claims: SessionClaims, replies: Script | None) -> ModelEndpoint:
        if replies is not None:
            assert self._engine is not None, "replies are for the scripted model"
            self._engine.script(claims.session_id, replies)
        return self._gateways.endpoint(claims)

    @asynccontextmanager
    async def _watch(
        self, endpoint: ModelEndpoint, session_id: str, watcher: Watcher
    ) -> AsyncIterator[ModelEndpoint]:
        """Yield an endpoint that forwards the calls of a session and reports them."""
        known = 0

        def ended(error: str) -> None:
            nonlocal known
            # The gateway records a call before it answers.
            records = read_session(self._journal, session_id)[known:]
            known += len(records)
            watcher.ended([turn for record in records for turn in journals.turns(record)], error)

        url = yarl.URL(endpoint.base_url)
        async with CallProxy(str(url.origin()), watcher.started, ended) as proxy:
            yield endpoint.model_copy(update={"base_url": proxy.url + url.path})

    async def _result(self, request: RolloutRequest, check: Callable[[], Awaitable[None]]) -> Rollout:
        began = time.time()
        next_check = began + _CHECK_EVERY_S
        keys = (request.key, request.key_for(Outcome.INFRA_ERROR))
        while True:
            for key in keys:
                try:
                    answer = await self._s3.get_object(Bucket=request.result.bucket, Key=key)
                    return Rollout.decode(await answer["Body"].read())
                except ClientError as error:
                    if aws.code_of(error) != "NoSuchKey":
                        raise
            now = time.time()
            if now > request.deadline + _AFTER_DEADLINE_S:
                raise AgentRunError(f"the agent published no result within {_AFTER_DEADLINE_S:g} s of its deadline")
            if now > next_check:
                await check()
                next_check = now + _CHECK_EVERY_S
            await asyncio.sleep(min(max(_POLL_S, _POLL_PART * (now - began)), _MAX_POLL_S))

    @asynccontextmanager
    async def _in_this_process(
        self, app: RolloutApp | BedrockAgentCoreApp, payload: dict[str, Any]
    ) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        if not hasattr(app, "asgi"):
            raise AgentRunError(
                f"{app!r} runs no rollouts: make a RolloutApp, or import BedrockAgentCoreApp from "
                "agent_wrapper.bedrock_agentcore"
            )
        transport = httpx.ASGITransport(app.asgi)
        async with httpx.AsyncClient(transport=transport, base_url="http://agent", timeout=None) as http:  # noqa: S113

            async def invoke() -> None:
                answer = await http.post("/invocations", json=payload)
                if answer.is_error:
                    raise AgentRunError(f"the app refused the task with {answer.status_code}: {answer.text}")
                if answer.json()["status"] == "unpublished":
                    # A repeated invoke returns the state of the first one.
                    raise AgentRunError(f"the app could not publish its rollout: {answer.json().get('reason')}")

            await invoke()
            yield invoke

    @asynccontextmanager
    async def _in_session(
        self, script: Path, session_id: str, payload: dict[str, Any], watcher: Watcher | None
    ) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        runtime = await self._runtime(script)
        session = {"agentRuntimeArn": runtime.arn, "runtimeSessionId": session_id}

        async def check() -> None:
            if session_id not in {session["id"] for session in (await runtime.sessions())["sessions"]}:
                ended = [end["message"] for end in await runtime.ends() if end["id"] == session_id]
                raise AgentRunError((ended or [f"the session was stopped. Its log: {log}"])[-1], log)

        log = runtime.session_logs / f"{session_id}.log"
        following: asyncio.Task[None] | None = None
        async with aws.client(
            "bedrock-agentcore", region=self._storage.region, endpoint_url=runtime.endpoint_url, read_timeout_s=150.0
        ) as agentcore:
            try:
                answer = await agentcore.invoke_agent_runtime(**session, payload=json.dumps(payload).encode())
                await answer["response"].read()
                # If the app does not accept the task, the error includes the end of the log.
                if watcher is not None:
                    following = asyncio.create_task(_follow(log, watcher.output))
                yield check
            except ClientError as error:
                raise AgentRunError(f"the app did not accept the task: {aws.message_of(error)}", log) from None
            finally:
                if following is not None:
                    following.cancel()
                    await asyncio.wait({following})
                # The session may have ended.
                with contextlib.suppress(agentcore.exceptions.ResourceNotFoundException):
                    await agentcore.stop_runtime_session(**session)

    async def _runtime(self, script: Path) -> LocalRuntime:
        # A runtime inherits this process's environment, which tests may change.
        environ = frozenset((k, v) for k, v in os.environ.items() if not k.startswith("PYTEST_"))
        # `absolute` reads only the name of the current folder.
        key = script.absolute(), environ  # noqa: ASYNC240
        if key not in self._runtimes:
            runtime = LocalRuntime(
                script,
                run_dir=self._run_dir / f"agent-{len(self._runtimes)}",
                env=self._environ,
                access_key=self._storage.access_key,
            )
            self._runtimes[key] = await self._stack.enter_async_context(runtime)
        return self._runtimes[key]


async def _follow(log: Path, on_line: Callable[[str], object]) -> None:
    """Pass each line of a log to `on_line` until cancelled, then the rest. The log may not exist yet."""
    position, rest, running = 0, b"", True
    while running:
        try:
            await asyncio.sleep(_FOLLOW_S)
        except asyncio.CancelledError:
            running = False
        with contextlib.suppress(FileNotFoundError), log.open("rb") as file:
            file.seek(position)
            new = file.read(_FOLLOWED_BYTES)
            position += len(new)
            *lines, rest = (rest + new).split(b"\n")
            if len(rest) > _FOLLOWED_BYTES or not running:
                lines, rest = [*lines, rest], b""
            for line in lines:
                on_line(line.decode(errors="replace"))


class CallProxy(HttpProxy):
    """An async context manager that forwards every request to the gateway at `upstream`, and streams the response."""

    def __init__(self, upstream: str, started: Callable[[ModelCall], object], ended: Callable[[str], object]) -> None:
        """`ended` gets the error of a failed call, or an empty string. The agent gets its answer afterwards."""
        super().__init__()
        self._upstream = upstream
        self._started = started
        self._ended = ended
        self._dialects = [dialect() for dialect in DIALECTS]

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        dialect = next((each for each in self._dialects if request.path.endswith(each.path)), None)
        if dialect is None or request.method != "POST":
            return await self._forward(self._upstream, request, body)
        # The gateway refuses an invalid call and says why.
        with contextlib.suppress(ApiError):
            self._started(dialect.parse(body))
        return await self._stream(request, body)

    async def _stream(self, request: web.Request, body: bytes) -> web.StreamResponse:
        assert self._http is not None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        # The last chunk is sent after the report, because the agent may call again immediately.
        error = last = b""
        try:
            async with self._http.post(self._upstream + request.path_qs, headers=headers, data=body) as reply:
                answer = web.StreamResponse(status=reply.status)
                answer.headers.update({k: v for k, v in reply.headers.items() if k.lower() not in HOP_BY_HOP})
                await answer.prepare(request)
                async for piece in reply.content.iter_any():
                    if reply.status >= 400:
                        error += piece[: _MAX_ERROR - len(error)]
                    await answer.write(last)
                    last = piece
        except aiohttp.ClientError as failure:
            self._ended(f"the gateway did not answer: {failure}")
            raise
        self._ended(f"{reply.status} {error.decode(errors='replace')}" if reply.status >= 400 else "")
        await answer.write_eof(last)
        return answer
