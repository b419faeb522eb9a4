"""The agent's container: `POST /invocations` starts a rollout, `GET /ping` says whether one is running.

- An invoke that carries the backend's block is answered at once and worked on in the background. A rollout runs once
  in this process: an invoke sent again is answered from memory.
- Every rollout that was accepted is published, with a reward or with a reason, also when the process is told to stop.
- An invoke without that block is an ordinary call of the same function, answered with what it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from agent_wrapper.context import RolloutContext
from agent_wrapper.contract import REQUEST_FIELD, ContractError, Outcome, Rollout, RolloutRequest, Trajectory
from agent_wrapper.errors import EntrypointError
from agent_wrapper.outcome import Ending, conclude, describe, failed, judge
from agent_wrapper.publish import Publisher, PublishError
from agent_wrapper.runner import Agent, Returned
from agent_wrapper.trajectory import TrajectoryUnavailable, fetch_trajectory

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse

logger = logging.getLogger("agent_wrapper")

SESSION_HEADER = "X-Amzn-Bedrock-AgentCore-Runtime-Session-Id"
_REMEMBERED = 10_000  # finished rollouts that a repeated invoke is answered for

# After its deadline an agent has so long to unwind, the trajectory to arrive, the result to be written. Together
# with the start of the session they should fit the backend's publish_grace_s. Before it there is more time for the
# trajectory: a trainer that is started again takes its gateway along.
_UNWIND_S, _FETCH_S, _PUBLISH_S = 2.0, 20.0, 60.0
# The same once the process is told to stop: what follows SIGTERM comes soon.
_LAST_UNWIND_S, _LAST_FETCH_S, _LAST_PUBLISH_S = 0.5, 2.0, 4.0
_LAST_REQUESTS_S = 2  # for the answers still being written, before that
_SHUTDOWN_S = 8.0

_Function = TypeVar("_Function", bound=Callable[[RolloutContext], Any])
_T = TypeVar("_T")


@dataclass
class _Job:
    """One accepted rollout, in memory."""

    request: RolloutRequest
    status: Literal["running", "finished", "unpublished"] = "running"
    outcome: Outcome | None = None
    reason: str | None = None

    def answer(self) -> dict[str, Any]:
        answer = {"status": self.status, "rollout_id": self.request.rollout_id}
        more = {"outcome": self.outcome, "reason": self.reason}
        return answer | {name: value for name, value in more.items() if value is not None}


class RolloutApp:
    """Serves one agent.

        app = RolloutApp()

        @app.entrypoint
        async def agent(context: RolloutContext) -> float: ...

        if __name__ == "__main__":
            app.run()

    The function takes a `RolloutContext` and returns the reward, or a dict of `reward` and any JSON values; it may be
    sync or async. `asgi` is the same as an ASGI application, to serve otherwise; mounted inside another one, whose
    lifespan it does not see, `shutdown` must be awaited at the end of that.
    """

    def __init__(self) -> None:
        self._agent: Agent | None = None
        self._publisher = Publisher()
        self._jobs: dict[tuple[str, str], _Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._busy_since_change = (False, int(time.time()))

    def entrypoint(self, function: _Function) -> _Function:
        """Marks the agent's function, and returns it as it is.

        Raises:
            EntrypointError: there is one already, or it does not take one argument.
        """
        if self._agent is not None:
            raise EntrypointError("this app has its entrypoint already; make another RolloutApp for another agent")
        self._agent = Agent(function)
        return function

    def run(self, host: str | None = None, port: int | None = None) -> None:
        """Serves until the process is told to stop. Default: $HOST or 0.0.0.0, $PORT or 8080."""
        asgi = self.asgi  # first, so that a missing entrypoint is told before anything else
        import uvicorn

        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logger.setLevel(logging.INFO)
        try:
            uvicorn.run(
                asgi,
                host=host or os.environ.get("HOST") or "0.0.0.0",  # noqa: S104  a container's port is its own
                port=port if port is not None else int(os.environ.get("PORT") or 8080),
                access_log=False,  # pings
                timeout_graceful_shutdown=_LAST_REQUESTS_S,
            )
        finally:
            # An abandoned agent may hold threads that the interpreter would wait for.
            if self._stopping.is_set():
                logging.shutdown()
                os._exit(0)

    @cached_property
    def asgi(self) -> Starlette:
        """The ASGI application.

        Raises:
            EntrypointError: no function was marked.
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
                Route("/invocations", self._invocations, methods=["POST"]),
            ],
            lifespan=lifespan,
        )

    async def shutdown(self) -> None:
        """Ends every running rollout as a failure and publishes it. Takes a few seconds at most."""
        self._stopping.set()
        if self._tasks:
            logger.info("told to stop: %d rollouts are running and will be published as failures", len(self._tasks))
            _, pending = await asyncio.wait(self._tasks, timeout=_SHUTDOWN_S)
            if pending:
                logger.error("%d rollouts could not be published before the end", len(pending))
        sys.stdout.flush()  # the signal may end the process without another word

    # --- HTTP ---------------------------------------------------------------------------------------------

    async def _ping(self, _: Request) -> JSONResponse:
        from starlette.responses import JSONResponse

        busy, since = self._busy_since_change
        # The time of the last change, never of this ping: a runtime takes it for the start of idleness.
        return JSONResponse({"status": "HealthyBusy" if busy else "Healthy", "time_of_last_update": since})

    async def _invocations(self, request: Request) -> JSONResponse:
        from pydantic_core import from_json
        from starlette.responses import JSONResponse

        try:
            payload = from_json(await request.body())
        except ValueError as error:
            return JSONResponse(_error("ValueError", f"the body is not JSON: {error}"), 400)
        if not isinstance(payload, dict):
            return JSONResponse(_error("ValueError", "the body is not a JSON object"), 400)
        if REQUEST_FIELD not in payload:
            return await self._serve(payload)
        try:
            wanted = RolloutRequest.parse(payload.pop(REQUEST_FIELD), f"{REQUEST_FIELD}.")
        except ContractError as error:
            return JSONResponse(_error("ContractError", str(error)) | {"field": error.field}, 400)
        job = self._jobs.get((wanted.run_id, wanted.rollout_id))
        if job is not None:
            return JSONResponse(job.answer())
        if self._stopping.is_set():
            return JSONResponse(_error("Stopping", "this process has been told to stop"), 503)
        logger.info("rollout %s accepted in session %s", wanted.rollout_id, request.headers.get(SESSION_HEADER))
        self._accept(wanted, payload)
        return JSONResponse({"status": "accepted", "rollout_id": wanted.rollout_id})

    async def _serve(self, payload: dict[str, Any]) -> JSONResponse:
        from starlette.responses import JSONResponse

        assert self._agent is not None
        call = self._agent.start(RolloutContext.of_environment(payload))
        result = await asyncio.wrap_future(call.future)
        if isinstance(result, Returned):
            try:
                return JSONResponse(result.value)
            except (TypeError, ValueError) as error:
                message = f"what the agent returned is not JSON: {error}"
                return JSONResponse(_error(type(error).__name__, message), 500)
        logger.error("the agent raised", exc_info=result.error)
        return JSONResponse(_error(type(result.error).__name__, str(result.error)), 500)

    # --- a rollout's life ---------------------------------------------------------------------------------

    def _accept(self, request: RolloutRequest, payload: dict[str, Any]) -> None:
        job = _Job(request)
        self._forget_oldest()
        self._jobs[request.run_id, request.rollout_id] = job
        task = asyncio.create_task(self._live(job, payload), name=f"rollout-{request.rollout_id}")
        self._tasks.add(task)
        self._note_busy()
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._note_busy()

    def _note_busy(self) -> None:
        busy = bool(self._tasks)
        if busy != self._busy_since_change[0]:
            self._busy_since_change = (busy, int(time.time()))

    def _forget_oldest(self) -> None:
        over = len(self._jobs) - _REMEMBERED
        for key in [key for key, job in self._jobs.items() if job.status != "running"][: max(0, over)]:
            del self._jobs[key]

    async def _live(self, job: _Job, payload: dict[str, Any]) -> None:
        try:
            rollout = await self._roll_out(job.request, payload)
            job.outcome = rollout.outcome
            job.reason = rollout.failure.reason if rollout.failure else None
            await self._publish(job.request, rollout)
        except PublishError as error:
            job.status, job.reason = "unpublished", str(error)
            logger.error("rollout %s is lost: %s", job.request.rollout_id, error)  # noqa: TRY400
        except Exception as error:
            job.status, job.reason = "unpublished", describe(error)
            logger.exception("rollout %s is lost to a bug in the wrapper", job.request.rollout_id)
        else:
            job.status = "finished"

    async def _roll_out(self, request: RolloutRequest, payload: dict[str, Any]) -> Rollout:
        started_at = time.time()
        preparing = asyncio.create_task(self._prepare(request))
        ending = await self._play(request, RolloutContext.of_request(request, payload))
        preparing.cancel()
        finished_at = time.time()
        trajectory = await self._fetch(request, _fetch_s(ending, request.deadline - finished_at))
        return conclude(request, ending, trajectory, started_at, finished_at)

    async def _play(self, request: RolloutRequest, context: RolloutContext) -> Ending:
        """Runs the agent until it ends, its deadline passes, or the process is told to stop."""
        assert self._agent is not None
        if not context.remaining_s:
            return failed(Outcome.TIMED_OUT, "agent_deadline", "the deadline had passed before the agent was started")
        call = self._agent.start(context)
        ended = asyncio.wrap_future(call.future)
        if await self._wait(ended, context.remaining_s, 0):
            return judge(ended.result(), request.endpoint.base_url)
        stopped = self._stopping.is_set()
        if call.cancel():
            await self._wait(ended, _UNWIND_S, _LAST_UNWIND_S)
        if stopped:
            message = "the container was told to stop before its agent was done"
            return failed(Outcome.INFRA_ERROR, "terminated", message, call.stack())
        message = "the agent had not returned by its deadline"
        return failed(Outcome.TIMED_OUT, "agent_deadline", message, call.stack())

    async def _fetch(self, request: RolloutRequest, budget_s: float) -> Trajectory | TrajectoryUnavailable:
        fetch = asyncio.create_task(fetch_trajectory(request.endpoint, budget_s))
        if not await self._wait(fetch, budget_s, _LAST_FETCH_S):
            fetch.cancel()
            return TrajectoryUnavailable("the gateway did not hand out the trajectory in time")
        try:
            return fetch.result()
        except TrajectoryUnavailable as error:
            return error

    async def _wait(self, future: asyncio.Future[Any], usual_s: float, last_s: float) -> bool:
        """Waits at most `usual_s`, and from the word to stop at most `last_s`. Returns whether `future` is done."""
        stopping = asyncio.create_task(self._stopping.wait())
        both: set[asyncio.Future[Any]] = {future, stopping}
        await asyncio.wait(both, timeout=usual_s, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self._stopping.is_set() and not future.done() and last_s:
            await asyncio.wait({future}, timeout=last_s)
        return future.done()

    async def _prepare(self, request: RolloutRequest) -> None:
        try:
            await _in_thread(lambda: self._publisher.prepare(request.result), "prepare")
        except Exception as error:  # whatever it is, publishing will meet it again, and there it counts
            logger.info("the clients could not be made ahead: %s", describe(error))

    async def _publish(self, request: RolloutRequest, rollout: Rollout) -> None:
        body = rollout.encode()
        budget_s = _LAST_PUBLISH_S if self._stopping.is_set() else _PUBLISH_S
        written = await _in_thread(
            lambda: self._publisher.publish(
                request.result,
                request.key_for(rollout.outcome),
                body,
                budget_s,
                request.url_for(rollout.outcome),
            ),
            "publish",
        )
        logger.info("rollout %s published as %s (written: %s)", rollout.rollout_id, rollout.outcome, written)


def _fetch_s(ending: Ending, left_s: float) -> float:
    """How long the gateway is asked for the trajectory: what an agent has earned is worth waiting for until its
    deadline. One that failed may have failed for want of the gateway, and says so at once."""
    return max(_FETCH_S, left_s) if ending.failure is None else _FETCH_S


async def _in_thread(work: Callable[[], _T], name: str) -> _T:
    """Like asyncio.to_thread, in a thread that the process does not wait for when it ends."""
    future: Future[_T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(future)


def _error(name: str, message: str) -> dict[str, Any]:
    return {"error": name, "message": message}
