"""Train an agent that the bedrock-agentcore SDK serves: import its app from this module.

    from agent_wrapper.bedrock_agentcore import BedrockAgentCoreApp

- An invoke without the backend's block is handled by the SDK, unchanged.
- An invoke with the block is answered immediately. The entrypoint then runs in the background, with the task's
  payload and the SDK's context, as a rollout of `agent_wrapper.app`.
- In a rollout, the agent's model calls go to the model being trained: see `model_calls`. `RolloutContext.current()`
  has the endpoint for other clients.
- The reward is the entry `reward` of the returned dict, or of a generator's last value. Without that entry, a scorer
  on the training side computes the reward, and gets the returned values as `extras`.
- A rollout lasts until all background tasks that its entrypoint registered with the app are complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextvars import ContextVar
from typing import Any

from bedrock_agentcore import BedrockAgentCoreApp as _BedrockAgentCoreApp
from bedrock_agentcore.runtime import BedrockAgentCoreContext, PingStatus, RequestContext
from starlette.requests import Request
from starlette.responses import Response

from agent_wrapper import model_calls
from agent_wrapper.app import LOCAL_PORT, LOG_FORMAT, SESSION_HEADER, RolloutApp, start_uvicorn_by_runner
from agent_wrapper.child_processes import prepare_process
from agent_wrapper.context import RolloutContext
from agent_wrapper.contract import REQUEST_FIELD, RolloutRequest
from agent_wrapper.errors import AgentFailure
from agent_wrapper.one_shot import payload_file, run_and_exit
from agent_wrapper.outcome import Unscored
from agent_wrapper.runner import Agent
from agent_wrapper.shared.json_values import plain_json

_POLL_S = 0.05

_request_context: ContextVar[RequestContext | None] = ContextVar("rollout_request_context", default=None)
_background_tasks: ContextVar[set[int] | None] = ContextVar("rollout_background_tasks", default=None)

logger = logging.getLogger("agent_wrapper")


class BedrockAgentCoreApp(_BedrockAgentCoreApp):
    """The SDK's app, which also runs rollouts."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._rollouts = _Rollouts(self)
        lifespan, not_found = self.router.lifespan_context, self.router.default

        @contextlib.asynccontextmanager
        async def until_published(app: Any) -> AsyncIterator[Any]:
            async with lifespan(app) as state:
                yield state
                await self._rollouts.shutdown()

        async def stop_or_not_found(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http" and (scope["method"], scope["path"]) == ("POST", "/stop"):
                request = Request(scope, receive)
                if SESSION_HEADER in request.headers:
                    await (await self._rollouts.stop(request))(scope, receive, send)
                    return
            await not_found(scope, receive, send)

        self.router.lifespan_context = until_published
        self.router.default = stop_or_not_found

    @property
    def asgi(self) -> BedrockAgentCoreApp:
        """The ASGI application. Returns self, like `RolloutApp`."""
        return self

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        # Leave model calls unchanged until a rollout starts.
        model_calls.leave_unchanged()
        await super().__call__(scope, receive, send)

    def entrypoint(self, func: Any) -> Any:
        self._rollouts.serve(self._as_agent(func))
        return super().entrypoint(func)

    def ping(self, func: Callable[[], Any]) -> Callable[[], Any]:
        # The agent's own status knows nothing of rollouts, and AgentCore ends a session that stays Healthy.
        super().ping(lambda: PingStatus.HEALTHY_BUSY if self._rollouts.is_busy else func())
        return func

    def add_async_task(self, *args: Any, **more: Any) -> int:
        task_id: int = super().add_async_task(*args, **more)
        if (tasks := _background_tasks.get()) is not None:
            tasks.add(task_id)
        return task_id

    def run(self, port: int = 8080, host: str | None = None, **more: Any) -> None:
        """Serve until the process is stopped, as the SDK does.

        If $ROLLOUT_PAYLOAD_FILE is set, run the one rollout that this file requests, and exit.
        """
        prepare_process()
        if (path := payload_file()) is not None:
            _log_rollouts()
            run_and_exit(self._rollouts, path)
        start_uvicorn_by_runner()
        try:
            super().run(int(os.environ.get(LOCAL_PORT) or port), host, **more)
        finally:
            self._rollouts.exit_if_stopped()

    async def _handle_invocation(self, request: Request) -> Any:
        try:
            payload = await request.json()
        except ValueError:
            # The SDK reports the error.
            payload = None
        if not (isinstance(payload, dict) and REQUEST_FIELD in payload and "main" in self.handlers):
            return await super()._handle_invocation(request)
        _log_rollouts()
        _request_context.set(self._build_request_context(request))
        return await self._rollouts.invocations(request)

    def _as_agent(self, function: Callable[..., Any]) -> Callable[[RolloutContext], Any]:
        """Wrap the entrypoint as a function for `RolloutApp`."""

        def call(context: RolloutContext) -> Any:
            given = _request_context.get() or RequestContext()
            return function(context.payload, *([given] if self._takes_context(function) else []))

        async def finish(value: Any) -> Any:
            value = await _last_value(value)
            # Let a task that the agent created start and register itself.
            await asyncio.sleep(0)
            while any(task in self._active_tasks for task in [*(_background_tasks.get() or ())]):  # noqa: ASYNC110
                # The app has no event for the end of these tasks.
                await asyncio.sleep(_POLL_S)
            return self._reward_and_extras(value)

        async def async_agent(context: RolloutContext) -> Any:
            with model_calls.redirected(context):
                _background_tasks.set(set())
                return await finish(call(context))

        def sync_agent(context: RolloutContext) -> Any:
            with model_calls.redirected(context):
                _background_tasks.set(set())
                return asyncio.run(finish(_last(call(context))))

        return async_agent if _is_async(function) else sync_agent

    def _reward_and_extras(self, value: Any) -> Any:
        """Convert the agent's return value into a reward and extras."""
        if isinstance(value, Response):
            text = bytes(value.body).decode(errors="replace") if hasattr(value, "body") else ""
            if value.status_code >= 400:
                raise AgentFailure(f"the agent returned HTTP {value.status_code}: {text}")
            with contextlib.suppress(ValueError):
                text = json.loads(text)
            value = text
        if not isinstance(value, Mapping):
            return Unscored({"result": self._as_json(value)})
        rewards = {name: value[name] for name in ("reward", "turn_rewards") if name in value}
        extras = {str(name): self._as_json(item) for name, item in value.items() if name not in rewards}
        return {**rewards, **extras} if "reward" in rewards else Unscored(extras)

    def _as_json(self, value: Any) -> Any:
        try:
            return plain_json(value)
        except (RecursionError, TypeError, ValueError):
            return json.loads(self._safe_serialize_to_json_string(value))


class _Rollouts(RolloutApp):
    """The rollouts of a `BedrockAgentCoreApp`. While any of them runs, the app has one more background task."""

    def __init__(self, app: BedrockAgentCoreApp) -> None:
        super().__init__()
        self._app = app
        self._task_id: int | None = None

    def serve(self, function: Callable[[RolloutContext], Any]) -> None:
        """Run this function in later rollouts. As in the SDK, the last registered entrypoint counts."""
        self._agent = Agent(function)

    def _accept(self, request: RolloutRequest, payload: dict[str, Any]) -> Any:
        if _request_context.get() is None:
            # The rollout was started without HTTP.
            BedrockAgentCoreContext.set_request_context(request.rollout_id, request.session_id)
            _request_context.set(RequestContext(session_id=request.session_id))
        return super()._accept(request, payload)

    def _update_busy(self) -> None:
        super()._update_busy()
        if self.is_busy and self._task_id is None:
            self._task_id = self._app.add_async_task("rollouts")
        elif not self.is_busy and self._task_id is not None:
            self._app.complete_async_task(self._task_id)
            self._task_id = None


def _is_async(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return any(kind(each) for kind in kinds for each in (function, getattr(function, "__call__", None)))  # noqa: B004


async def _last_value(value: Any) -> Any:
    """Await an awaitable, or exhaust a generator, and return its last value."""
    if inspect.isawaitable(value):
        value = await value
    if inspect.isasyncgen(value):
        last = None
        async for each in value:
            last = each
        return last
    return _last(value)


def _last(value: Any) -> Any:
    """Exhaust a generator and return its last value. Return any other value unchanged."""
    return (deque(value, maxlen=1) or [None])[0] if inspect.isgenerator(value) else value


def _log_rollouts() -> None:
    """Show the wrapper's log lines, unless the agent's own logging already shows them."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(LOG_FORMAT))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
