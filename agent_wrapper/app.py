"""The agent's container: `POST /invocations` starts a rollout, `POST /stop` stops one, `GET /ping` reports the load.

- An invoke with the backend's block is answered immediately, and the rollout runs in the background. Each attempt has
  its own session id and runs once per process: a repeated invoke is answered from memory. The next attempt at the
  same rollout has a different session id, so it runs.
- With $ROLLOUT_PAYLOAD_FILE, the process runs the one payload in that file and exits: see `one_shot`.
- Every accepted rollout is published, with a reward or a failure reason, even if its session or the process is
  stopped.
- With $ROLLOUT_AGENT_TOKEN, invokes and stops need the header `Authorization: Bearer TOKEN`.
- An invoke without the block calls the same function directly and returns its return value.

`bedrock_agentcore` serves the same rollouts alongside the app of AWS's SDK.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import math
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from agent_wrapper.child_processes import OrphanReaper, prepare_process
from agent_wrapper.context import RolloutContext
from agent_wrapper.contract import (
    REQUEST_FIELD,
    ContractError,
    Outcome,
    Rollout,
    RolloutRequest,
    Trajectory,
)
from agent_wrapper.contract.codec import MAX_OBJECT_BYTES
from agent_wrapper.errors import EntrypointError
from agent_wrapper.model_endpoint import PROBE_S, SessionClosed, probe_endpoint, send_heartbeats
from agent_wrapper.one_shot import flush_output, payload_file, run_and_exit
from agent_wrapper.outcome import AgentResult, build_rollout, classify, describe, encode, failed, without_artifacts
from agent_wrapper.publish import Publisher, PublishError
from agent_wrapper.runner import Agent, Returned, traceback_of
from agent_wrapper.shared.json_values import plain_json
from agent_wrapper.shared.redaction import redact_logs
from agent_wrapper.shared.threads import in_thread
from agent_wrapper.shared.trajectory import TrajectoryUnavailable, fetch_trajectory

if TYPE_CHECKING:
    import socket

    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse

logger = logging.getLogger("agent_wrapper")

SESSION_HEADER = "X-Amzn-Bedrock-AgentCore-Runtime-Session-Id"
LOCAL_PORT = "ROLLOUT_LOCAL_PORT"
"""Environment variable that replaces AgentCore's port 8080 where several containers share a machine."""
# The environment variable that holds the token. If it is not set, anyone may call.
_TOKEN = "ROLLOUT_AGENT_TOKEN"  # noqa: S105
# Repeated invokes are answered for this many finished attempts.
_REMEMBERED = 10_000

# Limits after the agent's deadline: time to unwind, to fetch the trajectory and to write the artifacts. Each is also
# capped at a share of the backend's publish_grace_s, and the result has the rest, at least its own share. Before the
# deadline all but unwinding have more time: a restarting trainer also restarts its gateway.
# Each pair is the limit in seconds and the share.
_UNWIND, _FETCH, _ARTIFACTS, _PUBLISH = (2.0, 0.1), (20.0, 0.25), (15.0, 0.125), (60.0, 0.5)
# The same limits after a stop request or SIGTERM: SIGKILL follows SIGTERM within seconds.
_LAST_UNWIND_S, _LAST_FETCH_S, _LAST_PUBLISH_S = 0.5, 2.0, 4.0
# Open responses have this many seconds to finish before those limits start.
_LAST_REQUESTS_S = 2
_SHUTDOWN_S = 8.0
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Keep connections longer than any load balancer does, so that none reuses a closing connection.
_KEEP_ALIVE_S = 4200

_Function = TypeVar("_Function", bound=Callable[[RolloutContext], Any])


@dataclass
class _Job:
    """One accepted attempt at a rollout, in memory."""

    request: RolloutRequest
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    status: Literal["running", "finished", "unpublished"] = "running"
    outcome: Outcome | None = None
    reason: str | None = None
    max_result_bytes: int = MAX_OBJECT_BYTES
    publish_by: float = field(init=False)
    """Monotonic seconds."""

    def __post_init__(self) -> None:
        grace_s = self.request.publish_grace_s or 0.0
        self.publish_by = time.monotonic() + self.request.remaining_s + grace_s

    def limit_s(self, seconds: float, share: float) -> float:
        """Return a limit after the agent's deadline."""
        return min(seconds, share * (self.request.publish_grace_s or math.inf))

    @property
    def is_running(self) -> bool:
        return self.status == "running"

    def answer(self) -> dict[str, Any]:
        answer = {"status": self.status, "rollout_id": self.request.rollout_id}
        more = {"outcome": self.outcome, "reason": self.reason}
        return answer | {name: value for name, value in more.items() if value is not None}

    @contextlib.asynccontextmanager
    async def limit(self, usual_s: float, last_s: float) -> AsyncIterator[None]:
        """Interrupt the block after `usual_s`, or `last_s` after a stop request if that is earlier."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(None if usual_s == math.inf else usual_s) as limit:

            def shorten(_: asyncio.Future[Any]) -> None:
                with contextlib.suppress(RuntimeError):
                    # RuntimeError means that the block has ended.
                    if self.stopping.is_set():
                        limit.reschedule(min(loop.time() + last_s, limit.when() or math.inf))

            stopping = asyncio.create_task(self.stopping.wait())
            stopping.add_done_callback(shorten)
            try:
                yield
            finally:
                stopping.cancel()

    async def wait(self, future: asyncio.Future[Any], usual_s: float, last_s: float) -> bool:
        """Wait as long as `limit` says. Return whether `future` is done."""
        with contextlib.suppress(TimeoutError):
            async with self.limit(usual_s, last_s):
                await asyncio.wait({future})
        return future.done()


class RolloutApp:
    """Serves one agent.

        app = RolloutApp()

        @app.entrypoint
        async def agent(context: RolloutContext) -> float: ...

        if __name__ == "__main__":
            app.run()

    The function takes a `RolloutContext` and returns the reward, or a dict with `reward` and any JSON values; it may
    be sync or async. `asgi` is the same app for another ASGI server. If you mount it inside another application,
    await `shutdown` when that application's lifespan ends.
    """

    def __init__(self) -> None:
        self._agent: Agent | None = None
        self._publisher = Publisher()
        # By run, rollout and session.
        self._jobs: dict[tuple[str, str, str], _Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._reaper: tuple[OrphanReaper, asyncio.Task[None]] | None = None
        self._busy_since_change = (False, int(time.time()))

    def entrypoint(self, function: _Function) -> _Function:
        """Register the agent's function and return it unchanged.

        Raises:
            EntrypointError: an entrypoint is already registered, or the function does not take exactly one argument.
        """
        if self._agent is not None:
            raise EntrypointError("this app has its entrypoint already; make another RolloutApp for another agent")
        self._agent = Agent(function)
        return function

    def run(self, host: str | None = None, port: int | None = None) -> None:
        """Serve until the process is stopped. Default: $HOST or 0.0.0.0, $PORT or 8080. `::` serves IPv4, too.

        If $ROLLOUT_PAYLOAD_FILE is set, run the one rollout that this file requests, and exit.
        """
        # Build the application before anything else, so that a missing entrypoint is reported.
        asgi = self.asgi
        prepare_process()
        logging.basicConfig(format=LOG_FORMAT)
        logger.setLevel(logging.INFO)
        if (path := payload_file()) is not None:
            run_and_exit(self, path)
        import uvicorn

        host = host or os.environ.get("HOST") or "0.0.0.0"  # noqa: S104  a container's port is its own
        start_uvicorn_by_runner()
        try:
            uvicorn.run(
                asgi,
                # asyncio serves `::` over IPv6 alone, and takes several addresses.
                host=cast(str, ["::", "0.0.0.0"]) if host == "::" else host,  # noqa: S104
                port=port if port is not None else int(os.environ.get("PORT") or 8080),
                # Pings would fill the access log.
                access_log=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_LAST_REQUESTS_S,
            )
        finally:
            self.exit_if_stopped()

    def exit_if_stopped(self) -> None:
        """End the process after `shutdown`, if rollouts have run: an abandoned agent may hold threads that the
        interpreter would wait for."""
        if self._stopping.is_set() and self._jobs:
            logging.shutdown()
            os._exit(0)

    @cached_property
    def asgi(self) -> Starlette:
        """The ASGI application.

        Raises:
            EntrypointError: no entrypoint is registered.
        """
        if self._agent is None:
            raise EntrypointError("no entrypoint: put @app.entrypoint above the agent's function")
        from starlette.applications import Starlette
        from starlette.routing import Route

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            yield
            await self.shutdown()

        return Starlette(
            routes=[
                Route("/ping", self._ping, methods=["GET"]),
                Route("/invocations", self.invocations, methods=["POST"]),
                Route("/stop", self.stop, methods=["POST"]),
            ],
            lifespan=lifespan,
        )

    @property
    def is_busy(self) -> bool:
        """Whether a rollout is running or being published."""
        return bool(self._tasks)

    async def run_payload(self, payload: dict[str, Any]) -> bool:
        """Run the rollout of an invoke with this payload to its end. Return whether its result was published.

        Raises:
            ContractError: the payload does not request a rollout.
        """
        payload = dict(payload)
        request = RolloutRequest.parse(payload.pop(REQUEST_FIELD, None), f"{REQUEST_FIELD}.")
        job = self._accept(request, payload)
        await asyncio.gather(*self._tasks)
        return job.status == "finished"

    async def shutdown(self) -> None:
        """End every running rollout as a failure and publish it, within a few seconds."""
        self._stopping.set()
        for job in self._jobs.values():
            job.stopping.set()
        if self._tasks:
            logger.info("stopping: %d rollouts are running and will be published as failures", len(self._tasks))
            _, pending = await asyncio.wait(self._tasks, timeout=_SHUTDOWN_S)
            if pending:
                logger.error("%d rollouts could not be published before the end", len(pending))
        # The signal may end the process before the buffer is written.
        flush_output()

    # --- HTTP ---------------------------------------------------------------------------------------------

    async def _ping(self, _: Request) -> JSONResponse:
        busy, since = self._busy_since_change
        # The time of the last change, not of this ping: the runtime takes it for the start of an idle period.
        return _respond({"status": "HealthyBusy" if busy else "Healthy", "time_of_last_update": since})

    async def invocations(self, request: Request) -> JSONResponse:
        from pydantic_core import from_json

        if (refusal := _refuse_stranger(request)) is not None:
            return refusal
        try:
            payload = from_json(await request.body())
        except ValueError as error:
            return _refuse(400, "ValueError", f"the body is not JSON: {error}")
        if not isinstance(payload, dict):
            return _refuse(400, "ValueError", "the body is not a JSON object")
        if REQUEST_FIELD not in payload:
            return await self._serve(payload)
        try:
            wanted = RolloutRequest.parse(payload.pop(REQUEST_FIELD), f"{REQUEST_FIELD}.")
        except ContractError as error:
            return _refuse(400, "ContractError", str(error), field=error.field)
        job = self._jobs.get((wanted.run_id, wanted.rollout_id, wanted.session_id))
        if job is not None:
            return _respond(job.answer())
        if self._stopping.is_set():
            return _refuse(503, "Stopping", "this process is stopping")
        logger.info("rollout %s accepted in session %s", wanted.rollout_id, request.headers.get(SESSION_HEADER))
        self._accept(wanted, payload)
        return _respond({"status": "accepted", "rollout_id": wanted.rollout_id})

    async def stop(self, request: Request) -> JSONResponse:
        """Stop the session that the header names, as a runtime with one container per session would."""
        if (refusal := _refuse_stranger(request)) is not None:
            return refusal
        session_id = request.headers.get(SESSION_HEADER)
        jobs = [job for job in self._jobs.values() if job.request.session_id == session_id and job.is_running]
        if not jobs:
            return _refuse(404, "SessionNotFound", f"no rollout runs in session {session_id}")
        for job in jobs:
            logger.info("rollout %s: session %s is stopped", job.request.rollout_id, session_id)
            job.stopping.set()
        return _respond({"status": "stopping"})

    async def _serve(self, payload: dict[str, Any]) -> JSONResponse:
        assert self._agent is not None
        call = self._agent.start(RolloutContext.from_environment(payload))
        result = await asyncio.wrap_future(call.future)
        if isinstance(result, Returned):
            try:
                return _respond(plain_json(result.value))
            except (RecursionError, TypeError, ValueError) as error:
                return _refuse(500, type(error).__name__, f"what the agent returned is not JSON: {error}")
        logger.error("the agent raised", exc_info=result.error)
        return _refuse(500, type(result.error).__name__, str(result.error))

    # --- a rollout's life ---------------------------------------------------------------------------------

    def _accept(self, request: RolloutRequest, payload: dict[str, Any]) -> _Job:
        redact_logs()
        prepare_process()
        if os.getpid() == 1 and (self._reaper is None or self._reaper[1].done()):
            # The task ends with its event loop, so another loop needs another one.
            reaper = self._reaper[0] if self._reaper is not None else OrphanReaper()
            self._reaper = (reaper, asyncio.create_task(reaper.run(), name="reap-orphans"))
        if not self._jobs:
            # This process may have been restored from a snapshot.
            reseed(request.session_id)
        job = _Job(request)
        over = max(0, len(self._jobs) - _REMEMBERED)
        for key in [key for key, other in self._jobs.items() if not other.is_running][:over]:
            del self._jobs[key]
        self._jobs[request.run_id, request.rollout_id, request.session_id] = job
        task = asyncio.create_task(self._run_job(job, payload), name=f"rollout-{request.rollout_id}")
        self._tasks.add(task)
        self._update_busy()
        task.add_done_callback(self._on_task_done)
        return job

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._update_busy()

    def _update_busy(self) -> None:
        if self.is_busy != self._busy_since_change[0]:
            self._busy_since_change = (self.is_busy, int(time.time()))

    async def _run_job(self, job: _Job, payload: dict[str, Any]) -> None:
        heartbeats, began = asyncio.create_task(self._send_heartbeats(job)), time.monotonic()
        try:
            try:
                await self._publish(job, await self._run_rollout(job, payload))
            except PublishError:
                raise
            except Exception as error:
                # The wrapper has a bug, or no memory or thread is left.
                logger.exception("the wrapper failed in rollout %s", job.request.rollout_id)
                said, trace = f"the wrapper failed: {describe(error)}", traceback_of(error)
                lost = failed(Outcome.INFRA_ERROR, "wrapper_failed", said, trace)
                await self._publish(job, build_rollout(job.request, lost, None, *_times_since(began)))
        except Exception as error:
            message = str(error) if isinstance(error, PublishError) else describe(error)
            job.status, job.reason = "unpublished", message
            logger.error("rollout %s is lost: %s", job.request.rollout_id, message)  # noqa: TRY400
        else:
            job.status = "finished"
        finally:
            heartbeats.cancel()

    async def _send_heartbeats(self, job: _Job) -> None:
        """Send heartbeats until the result is published. Stop the agent if the gateway has closed its session."""
        endpoint, every_s = job.request.endpoint, job.request.heartbeat_s
        if endpoint.heartbeat_url is None or every_s is None:
            return
        try:
            await send_heartbeats(endpoint.heartbeat_url, endpoint.api_key, every_s)
        except Exception:
            # A heartbeat must never fail a rollout.
            logger.exception("rollout %s sends no more heartbeats", job.request.rollout_id)
        else:
            logger.info("rollout %s: the gateway has closed its session", job.request.rollout_id)
            job.stopping.set()

    async def _run_rollout(self, job: _Job, payload: dict[str, Any]) -> Rollout:
        request, began = job.request, time.monotonic()
        preparing = asyncio.create_task(self._prepare(request))
        context = RolloutContext.from_request(request, payload)
        if (failure := await self._probe_endpoint(job, context)) is not None:
            return build_rollout(request, failure, None, *_times_since(began))
        result = await self._run_agent(job, context)
        preparing.cancel()
        started_at, finished_at = _times_since(began)
        # A completed rollout is worth retrying until the agent's deadline. An agent may have failed because the
        # gateway is down.
        fetch_s = max(job.limit_s(*_FETCH), context.remaining_s if result.finished else 0.0)
        trajectory = await self._fetch_trajectory(job, fetch_s)
        rollout = build_rollout(request, result, trajectory, started_at, finished_at)
        return await self._publish_artifacts(job, rollout, context)

    async def _probe_endpoint(self, job: _Job, context: RolloutContext) -> AgentResult | None:
        """Return None if the agent can start, else the result of its failed rollout."""
        budget_s = min(PROBE_S, context.remaining_s)
        if not budget_s:
            return None
        beat = job.request.heartbeat_s is not None
        probe = asyncio.create_task(probe_endpoint(job.request.endpoint, budget_s, beat=beat))
        stopped = failed(Outcome.INFRA_ERROR, "terminated", "the session was stopped before its agent started")
        if not await job.wait(probe, math.inf, 0):
            probe.cancel()
            return stopped
        try:
            problem = probe.result()
        except SessionClosed:
            job.stopping.set()
            return stopped
        except Exception:
            # A bug in the probe must never fail a rollout.
            logger.exception("rollout %s: the model endpoint could not be probed", job.request.rollout_id)
            return None
        return None if problem is None else failed(Outcome.INFRA_ERROR, "model_unreachable", problem)

    async def _run_agent(self, job: _Job, context: RolloutContext) -> AgentResult:
        """Run the agent until it ends, its deadline passes, or its session is stopped."""
        assert self._agent is not None
        if not context.remaining_s:
            return failed(Outcome.TIMED_OUT, "agent_deadline", "the deadline had passed before the agent was started")
        call = self._agent.start(context)
        ended = asyncio.wrap_future(call.future)
        if await job.wait(ended, context.remaining_s, 0):
            return classify(ended.result(), job.request.endpoint.base_url)
        stopped = job.stopping.is_set()
        if call.cancel():
            await job.wait(ended, job.limit_s(*_UNWIND), _LAST_UNWIND_S)
        if stopped:
            what = "container" if self._stopping.is_set() else "session"
            message = f"the {what} was stopped before its agent finished"
            return failed(Outcome.INFRA_ERROR, "terminated", message, call.stack())
        message = "the agent had not returned by its deadline"
        return failed(Outcome.TIMED_OUT, "agent_deadline", message, call.stack())

    async def _fetch_trajectory(self, job: _Job, budget_s: float) -> Trajectory | TrajectoryUnavailable:
        limit = partial(setattr, job, "max_result_bytes")
        fetch = asyncio.create_task(fetch_trajectory(job.request.endpoint, budget_s, limit))
        if not await job.wait(fetch, budget_s, _LAST_FETCH_S):
            fetch.cancel()
            return TrajectoryUnavailable("the gateway did not hand out the trajectory in time")
        try:
            return fetch.result()
        except TrajectoryUnavailable as error:
            return error

    async def _prepare(self, request: RolloutRequest) -> None:
        """Load what the end of the rollout needs, in the background while the agent works."""

        def prepare() -> None:
            import tenacity  # noqa: F401  (the rest is loaded with the probe)

            self._publisher.prepare(request.result)

        try:
            await in_thread(prepare, "prepare")
        except Exception as error:
            # Publishing will hit and report the same error.
            logger.info("the clients could not be made ahead: %s", describe(error))

    async def _publish_artifacts(self, job: _Job, rollout: Rollout, context: RolloutContext) -> Rollout:
        """Publish the agent's artifacts before the result that lists them. Return the result to publish."""
        if not rollout.can_be_scored or not context.artifacts:
            return rollout
        request = job.request
        url = request.result.urls.artifacts if request.result.urls is not None else None
        limit = partial(job.limit, context.remaining_s + job.limit_s(*_ARTIFACTS), _LAST_PUBLISH_S / 2)
        body, listed = await in_thread(context.artifacts.pack, "pack")
        try:
            await self._publisher.write(request.result, request.artifacts_key, body, limit, url)
        except PublishError as error:
            return without_artifacts(rollout, str(error))
        return rollout.model_copy(update={"artifacts": listed})

    async def _publish(self, job: _Job, rollout: Rollout) -> None:
        request, (rollout, body) = job.request, encode(rollout, job.max_result_bytes)
        job.outcome, job.reason = rollout.outcome, rollout.failure.reason if rollout.failure else None
        left_s = max(job.publish_by - time.monotonic(), job.limit_s(*_PUBLISH))
        limit = partial(job.limit, left_s, _LAST_PUBLISH_S)
        key, url = request.key_for(rollout.outcome), request.url_for(rollout.outcome)
        await self._publisher.publish(request.result, key, body, limit, url)
        logger.info("rollout %s published as %s", rollout.rollout_id, rollout.outcome)


def start_uvicorn_by_runner() -> None:
    """Let uvicorn start its event loop by `asyncio.Runner`. It calls `asyncio.run` with `loop_factory`, and
    nest_asyncio, which many agents apply, replaces that function with one that lacks this argument."""
    import uvicorn

    def run(server: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(server.serve(sockets))

    # Older versions pass no `loop_factory`.
    if hasattr(uvicorn.Config, "get_loop_factory"):
        uvicorn.Server.run = run  # type: ignore[assignment, method-assign]


def _refuse_stranger(request: Request) -> JSONResponse | None:
    """Return the answer to a caller without the token, if this server requires one."""
    token, given = os.environ.get(_TOKEN), request.headers.get("Authorization", "")
    if not token or hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        return None
    return _refuse(401, "Unauthorized", f"the Authorization header is not `Bearer ${_TOKEN}`")


def _refuse(status: int, error: str, message: str, **more: str) -> JSONResponse:
    return _respond({"error": error, "message": message, **more}, status)


def _respond(content: Any, status: int = 200) -> JSONResponse:
    from starlette.responses import JSONResponse

    return JSONResponse(content, status)


def _times_since(began: float) -> tuple[float, float]:
    """Return the Unix times of a start on the monotonic clock, and of now.

    The clock may be set in between: a session that wakes from a snapshot has the snapshot's time at first.
    """
    now = time.time()
    return max(0.0, now - (time.monotonic() - began)), now


def reseed(session_id: str) -> None:
    """Seed `random` and, if it is imported, numpy's global generator from the session's id and the kernel.

    A runtime may restore sessions from a snapshot of a process that has already imported the agent. Without a new
    seed, all of them would draw the same numbers. The snapshot may include the kernel's generator, so the seed also
    contains the session's id.
    """
    seed = hashlib.sha256(session_id.encode() + os.urandom(16)).digest()
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(int.from_bytes(seed[:4], "little"))
