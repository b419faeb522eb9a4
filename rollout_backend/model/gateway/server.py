"""Serve a gateway over HTTP: model calls of agents, the wrapper's calls, and the trainer's controls.

    POST /v1/chat/completions       a model call in OpenAI's Chat Completions API     session key
    POST /v1/completions            a model call in OpenAI's Completions API          session key
    POST /v1/responses              a model call in OpenAI's Responses API            session key
    POST /v1/messages               a model call in Anthropic's Messages API          session key
    POST /v1/messages/count_tokens, /v1/responses/input_tokens  the length of its prompt  session key
    GET  /v1/models[/{id}]          the model                                         session key
    POST /v1/sample, /v1/sample-with-response-stream, /v1/complete-rollout, /v1/update-reward: see `job_runtime`
    HEAD, OPTIONS, GET of base URLs  probes of clients                                 no key
    POST /v1/rollout/trajectory     seals the session and returns its Trajectory      session key
                                    (as JSON with `Accept: application/json`)
    POST /v1/rollout/heartbeat      reports that the session's container is alive     session key
    POST /control/revoke            {"session_ids": [...]}: closes sessions           control key
    POST /control/adopt             {"session_ids": [...]}: lets sessions of an earlier trainer continue  control key
    POST /control/heartbeats             the sessions heard from since the last request    control key
    GET  /control/reports[/{id}]    what agents of `job_runtime` reported: of all sessions, without the rewards; of
                                    one session, or null                                control key
    POST /control/pause             holds model calls; returns once none is at an engine  control key
    POST /control/resume            releases them                                     control key
    POST /control/adapters          {"versions": {...}}: sets the version of each LoRA adapter  control key
    GET  /control/stats             GatewayStats                                      control key
    GET  /health

The dialects define the paths of model calls. One base URL, which ends in /v1, serves all clients. Anthropic's clients
append /v1/messages to it, so agents' paths are also served under /v1/v1, and without a prefix. With
`gateway.key_in_path`, everything under /v1 is also served under /k/KEY/v1, for a session key.

Invariants:

- A key gives access to its own session only. Keys, secrets, prompts and replies are never logged.
- A call is recorded, in the journal too, if and only if its answer is complete.
- Every response has the shape of the agent's API, and no request body causes a 500.
"""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agent_wrapper.contract import Trajectory
from agent_wrapper.contract.messages import RESULT_LIMIT_HEADER
from rollout_backend.base.logs import dropped_lines
from rollout_backend.base.retry import repeat
from rollout_backend.core.session_key import KeyRefused, SessionClaims
from rollout_backend.model.dialects.base import Dialect
from rollout_backend.model.dialects.registry import DIALECTS, dialect_of_client
from rollout_backend.model.gateway.access import PathKeys, keys_in
from rollout_backend.model.gateway.cpu_shares import CpuShare
from rollout_backend.model.gateway.gateway_settings import GatewaySettings
from rollout_backend.model.gateway.parts import GatewayParts
from rollout_backend.model.gateway.session_share import MAX_REQUESTS, SessionShare, read_body
from rollout_backend.model.model_call import ApiError
from rollout_backend.model.rendering.guarded_renderer import RendererBundle
from rollout_backend.model.rendering.renderer import load_renderer

SERVER_NAME = "rollout-backend"
"""Marker in the body of /health, by which a check recognizes a gateway behind a public address."""
_SWEEP_S = 5.0
# Answers with one session's trajectory at a time. As JSON, each holds the whole trajectory.
_FETCHES = 4
_PIECE_BYTES = 256 * 1024
_PROBE_PAUSE_S = 0.5
_PREFIXES = ("/v1", "/v1/v1", "")
_Body = TypeVar("_Body", bound=BaseModel)


class _SessionIds(BaseModel):
    model_config = ConfigDict(extra="forbid")

    session_ids: list[str] = Field(max_length=100_000)


class _Versions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    versions: dict[str, int]


def create_app(
    settings: GatewaySettings, bundle: RendererBundle | None = None, dialects: Sequence[type[Dialect]] = DIALECTS
) -> Starlette:
    """Create the application that serves these dialects. Loads the tokenizer unless `bundle` is given.

    Raises:
        ConfigError: the model's folder, its renderer or the journal cannot be used, or the extra `otel` is missing.
    """
    return Gateway(GatewayParts.build(settings, bundle or load_renderer(settings.model), dialects)).app


class Gateway:
    """Serves all routes of one gateway except the model calls."""

    def __init__(self, parts: GatewayParts) -> None:
        self._parts = parts
        self._created = int(time.time())
        self._strangers, self._probes = SessionShare(parts.registry.cpu), CpuShare(parts.registry.cpu)
        self.app = Starlette(
            routes=[
                *self._agent_routes(),
                Route("/v1/rollout/trajectory", self.trajectory, methods=["POST"]),
                Route("/v1/rollout/heartbeat", self.heartbeat, methods=["POST"]),
                Route("/control/heartbeats", self.heartbeats, methods=["POST"]),
                Route("/control/revoke", self.revoke, methods=["POST"]),
                Route("/control/adopt", self.adopt, methods=["POST"]),
                Route("/control/reports", self.reports, methods=["GET"]),
                Route("/control/reports/{session_id:path}", self.report_of, methods=["GET"]),
                Route("/control/pause", self.pause, methods=["POST"]),
                Route("/control/resume", self.resume, methods=["POST"]),
                Route("/control/adapters", self.set_adapters, methods=["POST"]),
                Route("/control/stats", self.stats, methods=["GET"]),
                *(Route(path, self.health, methods=["GET"]) for path in ("/health", "/", "/v1")),
            ],
            exception_handlers={
                ApiError: self._api_error,
                HTTPException: self._http_error,
                ClientDisconnect: self._client_disconnected,
                Exception: self._unexpected,
            },
            lifespan=self._lifespan,
            middleware=[Middleware(PathKeys, enabled=parts.settings.gateway.key_in_path)],
        )
        self.app.state.is_known = self._is_known

    def _agent_routes(self) -> list[Route]:
        routes = []

        async def handle(
            request: Request,
            dialect: Dialect,
            answer: Callable[[Request, Dialect, SessionClaims], Awaitable[ASGIApp]],
        ) -> ASGIApp:
            request.state.dialect = dialect
            return await answer(request, dialect, self._parts.authenticator.session(request))

        for prefix in _PREFIXES:
            for dialect in (*self._parts.dialects, *self._parts.job_runtime.dialects):
                for path, answer in (
                    (dialect.path, self._parts.calls.call),
                    (dialect.count_path, self._parts.calls.count),
                ):
                    if path is not None:
                        call = partial(handle, dialect=dialect, answer=answer)
                        routes.append(Route(prefix + path, call, methods=["POST"]))
            routes += self._parts.job_runtime.routes(prefix)
            routes.append(Route(f"{prefix}/models", self.models, methods=["GET"]))
            routes.append(Route(f"{prefix}/models/{{name:path}}", self.model, methods=["GET"]))
        return routes

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        await self._parts.engine_client.start()
        loads = partial(self._parts.engines.poll, self._parts.admission.observe, self._parts.settings.load_poll_s)
        background = [
            asyncio.create_task(repeat(self._sweep, "the removal of expired sessions")),
            asyncio.create_task(repeat(loads, "reading the engines' loads")),
        ]
        try:
            yield
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await self._parts.engine_client.close()
            self._parts.registry.close()
            if self._parts.traces is not None:
                await asyncio.to_thread(self._parts.traces.close)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            await self._parts.registry.sweep()
            self._parts.admission.serve()

    # --- routes -------------------------------------------------------------------------------------------

    async def _enter(self, request: Request) -> SessionClaims:
        """Return the claims of an agent's request once its session has paid for its earlier work."""
        claims = self._parts.authenticator.session(request)
        async with self._parts.registry.share(claims).entry():
            return claims

    async def models(self, request: Request) -> Response:
        await self._enter(request)
        name = self._parts.settings.model.served_name
        return JSONResponse(
            {"object": "list", "data": [self._model_card()], "first_id": name, "last_id": name, "has_more": False}
        )

    async def model(self, request: Request) -> Response:
        await self._enter(request)
        self._parts.calls.check_model(request.path_params["name"])
        return JSONResponse(self._model_card())

    async def trajectory(self, request: Request) -> ASGIApp:
        claims = await self._enter(request)
        sealed = await self._parts.registry.seal(claims)
        share, as_json = self._parts.registry.share(claims), "application/json" in request.headers.get("accept", "")

        def to_json() -> bytes:
            return Trajectory.decode(sealed).to_json()

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            with share.request(_FETCHES):
                await self._parts.registry.wait_turn(claims)
                data = await share.cpu.run(to_json, tokenizes=False) if as_json else sealed
                media_type = "application/json" if as_json else "application/octet-stream"
                headers = {
                    "Content-Length": str(len(data)),
                    RESULT_LIMIT_HEADER: str(self._parts.settings.max_result_bytes),
                }
                await StreamingResponse(_pieces(data), 200, headers, media_type)(scope, receive, send)

        return answer

    async def heartbeat(self, request: Request) -> Response:
        # The trainer needs one heartbeat for each time that it asks, so only further ones wait.
        if not self._parts.registry.record_heartbeat(self._parts.authenticator.session(request)):
            await self._enter(request)
        return Response(status_code=204)

    async def health(self, request: Request) -> Response:
        if not self._parts.authenticator.has_control_key(request):
            await self._pace_probe()
        content = {"status": "ok", "server": SERVER_NAME, "shard": self._parts.settings.shard}
        # Strangers must not hold connections.
        return JSONResponse(content, headers={"Connection": "close"})

    def _model_card(self) -> dict[str, object]:
        """Return the fields that OpenAI's and Anthropic's clients read."""
        created_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._created))
        return {
            "id": self._parts.settings.model.served_name,
            "object": "model",
            "created": self._created,
            "owned_by": "rollout-backend",
            "max_model_len": self._parts.settings.model.context_tokens,
            "type": "model",
            "display_name": self._parts.settings.model.served_name,
            "created_at": created_at,
        }

    # --- controls, which require the control key ---------------------------------------------------------------

    async def heartbeats(self, request: Request) -> Response:
        self._parts.authenticator.require_control_key(request)
        heard = self._parts.registry.take_heartbeats()
        return JSONResponse({"beats": sorted(heard.beats), "calls": sorted(heard.calls)})

    async def revoke(self, request: Request) -> Response:
        session_ids = await self._session_ids(request)
        await self._parts.registry.revoke(session_ids)
        return JSONResponse({"revoked": len(session_ids)})

    async def adopt(self, request: Request) -> Response:
        session_ids = await self._session_ids(request)
        self._parts.calls.adopt(session_ids)
        return JSONResponse({"adopted": len(session_ids)})

    async def reports(self, request: Request) -> Response:
        self._parts.authenticator.require_control_key(request)
        return JSONResponse({name: _summary(report) for name, report in self._parts.registry.reports.items()})

    async def report_of(self, request: Request) -> Response:
        self._parts.authenticator.require_control_key(request)
        report = self._parts.registry.reports.get(request.path_params["session_id"])
        found = report and {**_summary(report), "rewards": report.get("rewards")}
        # Rewards may be NaN.
        return Response(json.dumps(found), media_type="application/json")

    async def pause(self, request: Request) -> Response:
        self._parts.authenticator.require_control_key(request)
        await self._parts.engines.pause()
        return JSONResponse({"paused": True})

    async def resume(self, request: Request) -> Response:
        self._parts.authenticator.require_control_key(request)
        self._parts.engines.resume()
        return JSONResponse({"paused": False})

    async def set_adapters(self, request: Request) -> Response:
        versions = await self._parsed(request, _Versions, "{'versions': {...}}")
        self._parts.adapters.replace(versions.versions)
        return JSONResponse({"adapters": len(versions.versions)})

    async def stats(self, request: Request) -> Response:
        self._parts.authenticator.require_control_key(request)
        stats, registry, loads = self._parts.stats, self._parts.registry, self._parts.admission.loads
        if any(load.is_service for load in loads.values()):
            # A report at the end of a step names the calls that its last sessions have given up.
            await self._parts.engines.refresh()
            loads = self._parts.admission.loads
        stats.sessions_open, stats.sessions_closed = registry.open_count, registry.closed_count
        stats.calls_in_flight, stats.calls_waiting = self._parts.admission.in_flight, self._parts.admission.waiting
        stats.largest, stats.dropped_log_lines = registry.largest, dropped_lines()
        stats.engine_running = {url: load.running for url, load in loads.items()}
        stats.engine_waiting = {url: load.waiting for url, load in loads.items()}
        stats.engine_kv_used = {url: load.kv_used for url, load in loads.items()}
        stats.engine_kv_tokens = {url: load.kv_tokens for url, load in loads.items()}
        stats.engine_is_service = {url: int(load.is_service) for url, load in loads.items()}
        for load in loads.values():
            if load.given_up is not None:
                stats.engine_given_up = Counter(load.given_up)
        return JSONResponse(stats.model_dump())

    async def _session_ids(self, request: Request) -> list[str]:
        return (await self._parsed(request, _SessionIds, "{'session_ids': [...]}")).session_ids

    async def _parsed(self, request: Request, model: type[_Body], form: str) -> _Body:
        """Parse the body as a `model`. Raise ApiError (400), which names the expected `form`, if it fails."""
        self._parts.authenticator.require_control_key(request)
        body = await read_body(request, self._parts.settings.gateway.max_body_bytes, self._parts.settings.body_s)
        try:
            return model.model_validate_json(body)
        except ValidationError as error:
            raise ApiError(400, f"the body must be {form}: {error.errors()[0]['msg']}") from None

    def _is_known(self, head: bytes) -> bool:
        """Return whether a head has the trainer's key or that of a session that owes nothing. Charge the session."""
        for key in keys_in(head):
            if self._parts.authenticator.is_control_key(key):
                return True
            with contextlib.suppress(KeyRefused):
                return self._parts.registry.share(self._parts.authenticator.verify(key)).cpu.may_connect()
        return False

    # --- errors -------------------------------------------------------------------------------------------

    async def _api_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        self._parts.stats.errors[error.code] += 1
        await self._pace(request)
        dialect: Dialect | None = getattr(request.state, "dialect", None)
        dialect = dialect or dialect_of_client(self._parts.dialects, request.url.path, request.headers)
        return JSONResponse(dialect.error_body(error), status_code=error.status, headers=error.headers)

    async def _pace(self, request: Request) -> None:
        """Delay a refused request until its session has paid for its earlier work, because some agents repeat refused
        requests without a pause. All requests without a valid key share one session's part. The trainer's never wait.
        """
        if self._parts.authenticator.has_control_key(request):
            return
        share = self._strangers
        with contextlib.suppress(ApiError):
            share = self._parts.registry.share(self._parts.authenticator.session(request))
        try:
            async with share.entry():
                pass
        except ApiError:
            # Too many of its requests are open. More of them must not take up the connections of others.
            with contextlib.suppress(ApiError), share.request(2 * MAX_REQUESTS):
                await share.cpu.pace()

    async def _pace_probe(self) -> None:
        """Delay a probe if there are many. Load balancers give up after some seconds, so it never waits for long."""
        await self._probes.pace(_PROBE_PAUSE_S)

    async def _http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405 and request.method in ("HEAD", "OPTIONS"):
            await self._pace_probe()
            return Response(status_code=204, headers={**(error.headers or {}), "Connection": "close"})
        code = "not_found" if error.status_code == 404 else "bad_request"
        message = f"{request.method} {request.url.path}: {error.detail}"
        return await self._api_error(request, ApiError(error.status_code, message, code=code))

    async def _client_disconnected(self, _: Request, error: Exception) -> Response:
        self._parts.stats.client_disconnects += 1
        return Response(status_code=499)

    async def _unexpected(self, request: Request, error: Exception) -> Response:
        return await self._api_error(request, ApiError(500, "internal error of the gateway; its log says more"))


def _summary(report: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "status": report["status"],
        "has_rewards": "rewards" in report,
        "age_s": max(0.0, time.time() - report["at"]),
    }


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    """Yield parts of an answer, so that a client that reads slowly holds one of them and not the whole."""
    for start in range(0, len(data), _PIECE_BYTES):
        yield data[start : start + _PIECE_BYTES]
