"""A stand-in for AWS Bedrock AgentCore Runtime, for agents on this machine.

It speaks the service's own REST protocol: `bedrock-agentcore` and `bedrock-agentcore-control` clients work against
it with nothing but their `endpoint_url` changed. Each session is one fresh process of the user's app, which sees what
AWS shows a container: PORT, the session's header, pings, SIGTERM. `sessions` says how sessions live and end, and
`control` how runtimes are made. One runtime is there from the start; others are made from `images`.

What it does not do: check signatures (only that there is one), isolate sessions from the machine, know qualifiers.

    python -m rollout_backend.local.agentcore < settings.json

`GET /_local/sessions` shows what runs; AWS has no such call.
"""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rollout_backend.local.control import ControlPlane, RuntimeRecord, check_signed
from rollout_backend.local.sessions import (
    COUNTERS,
    SESSION_HEADER,
    Limits,
    ServiceError,
    Session,
    SessionPool,
    TokenBucket,
)
from rollout_backend.local.spawner import CommandSpawner, PreforkSpawner, Spawner

ROLE = "arn:aws:iam::000000000000:role/local"
_MAX_PAYLOAD_BYTES = 100_000_000
_CUSTOM_HEADER = "x-amzn-bedrock-agentcore-runtime-custom-"
_PASSED_HEADERS = ("content-type", "accept", "x-amzn-trace-id", "traceparent", "tracestate", "baggage")


class StandInSettings(BaseModel):
    """What the stand-in runs, and where. Read as JSON from stdin, since `env` may hold secrets."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    arn: str
    command: tuple[str, ...] = Field(min_length=1)
    """Starts the user's app; it listens on HOST:PORT of its environment."""
    images: dict[str, tuple[str, ...]] = {}
    """What a runtime can be made from: an image's name, as in ECR, and the command that stands for it."""
    role: str = ROLE
    """The one execution role that there is."""
    transition_s: float = Field(default=0.2, ge=0)
    """How long a runtime is CREATING, UPDATING or DELETING. Its endpoint follows half as much later."""
    new_runtimes_require_mmdsv2: bool = False
    """False: a runtime must be updated once before it can be invoked, as AWS may have it."""
    cwd: Path
    env: dict[str, str]
    """The whole environment of a session's process, PORT and HOST aside."""
    log_dir: Path
    host: str = "127.0.0.1"
    port: int = Field(ge=1, le=65535)
    preload: tuple[str, ...] | None = None
    """With a command of the form [PYTHON, SCRIPT]: fork sessions from an interpreter that has imported the script's
    libraries and these modules. None: run the command each time."""
    limits: Limits = Limits()


class StandIn:
    """The two calls of the data plane, for every runtime of the control plane.

    Their checks come in the order of AWS: signature, name, form, rate, quota. The last counts for each runtime.
    """

    def __init__(self, settings: StandInSettings) -> None:
        self._settings = settings
        self._invokes = TokenBucket(settings.limits.invoke_per_s)
        self._stops = TokenBucket(settings.limits.stop_per_s)
        self._pools: dict[str, SessionPool] = {}  # by the runtime's ARN
        self._control = ControlPlane(
            region=settings.arn.split(":")[3],
            images=settings.images,
            role=settings.role,
            transition_s=settings.transition_s,
            new_ones_require_mmdsv2=settings.new_runtimes_require_mmdsv2,
            on_live=self._serve,
            on_gone=self._drop,
        )

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/runtimes/{arn:path}/invocations", self._invoke, methods=["POST"]),
                Route("/runtimes/{arn:path}/stopruntimesession", self._stop, methods=["POST"]),
                *self._control.routes(),
                Route("/_local/sessions", self._sessions),
            ],
            exception_handlers={ServiceError: _service_error},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        settings = self._settings
        spawner = _spawner(settings, settings.command, {})
        self._pools[settings.arn] = SessionPool(spawner, settings.limits, settings.log_dir)
        self._control.add(settings.arn, _first_definition(settings))
        if isinstance(spawner, PreforkSpawner):
            spawner.warm()
        yield
        await self._control.close()
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))

    def _serve(self, runtime: RuntimeRecord) -> None:
        """A new version is live: new sessions are of it."""
        definition, limits = runtime.live_definition, self._settings.limits
        command = self._settings.images[runtime.image]
        spawner = _spawner(self._settings, command, definition.get("environmentVariables", {}))
        lifetimes = definition["lifecycleConfiguration"]
        limits = limits.model_copy(
            update={
                "idle_timeout_s": min(limits.idle_timeout_s, lifetimes["idleRuntimeSessionTimeout"]),
                "max_life_s": min(limits.max_life_s, lifetimes["maxLifetime"]),
            }
        )
        if runtime.arn in self._pools:
            self._pools[runtime.arn].use(spawner, limits)
        else:
            self._pools[runtime.arn] = SessionPool(spawner, limits, self._settings.log_dir)

    async def _drop(self, runtime: RuntimeRecord) -> None:
        if pool := self._pools.pop(runtime.arn, None):
            await pool.close()

    @property
    def pool(self) -> SessionPool:
        """Of the runtime that is there from the start."""
        assert self._settings.arn in self._pools, "before the app's lifespan"
        return self._pools[self._settings.arn]

    async def _invoke(self, request: Request) -> Response:
        pool, session_id = self._check(request, self._invokes)
        body = await request.body()
        if len(body) > _MAX_PAYLOAD_BYTES:
            raise ServiceError(
                "ValidationException", f"payload has {len(body)} bytes, more than {_MAX_PAYLOAD_BYTES}"
            )
        session = await pool.open(session_id)
        passed = {name: request.headers[name] for name in _PASSED_HEADERS if name in request.headers}
        passed |= {name: value for name, value in request.headers.items() if name.startswith(_CUSTOM_HEADER)}
        answer = await pool.request(session, body, passed | {SESSION_HEADER: session_id})
        kind = answer.headers.get("content-type", "application/octet-stream")
        headers = {SESSION_HEADER: session_id, "content-type": kind}
        if answer.content_type == "text/event-stream":
            return StreamingResponse(_stream(pool, session, answer), headers=headers)
        try:
            content = await answer.read()
        except aiohttp.ClientError as error:
            message = f"The runtime's answer broke off ({error}). {session.tail()}"
            raise ServiceError("RuntimeClientError", message) from None
        finally:
            pool.release(session)
        return Response(content, headers=headers)

    async def _stop(self, request: Request) -> Response:
        pool, session_id = self._check(request, self._stops)
        pool.stop(session_id)
        return JSONResponse({}, headers={SESSION_HEADER: session_id})

    async def _sessions(self, request: Request) -> Response:
        snapshots = [pool.snapshot() for pool in self._pools.values()]
        return JSONResponse(
            {
                "sessions": [session for snapshot in snapshots for session in snapshot["sessions"]],
                "ending": sum(snapshot["ending"] for snapshot in snapshots),
                "counters": {name: sum(snapshot["counters"][name] for snapshot in snapshots) for name in COUNTERS},
            }
        )

    def _check(self, request: Request, rate: TokenBucket) -> tuple[SessionPool, str]:
        """The sessions of the runtime that is meant, and the session id of a request that is in order."""
        check_signed(request)
        arn = request.path_params["arn"]
        runtime, pool = self._control.runtimes.get(arn), self._pools.get(arn)
        if runtime is None or pool is None:
            raise ServiceError("ResourceNotFoundException", f"No runtime {arn} serves")
        if not runtime.live_definition.get("metadataConfiguration", {}).get("requireMMDSV2"):
            raise ServiceError("ValidationException", "This runtime is not MMDSv2-enabled")
        session_id = request.headers.get(SESSION_HEADER) or str(uuid.uuid4())
        if not 33 <= len(session_id) <= 256:
            raise ServiceError(
                "ValidationException", f"runtimeSessionId has {len(session_id)} characters; it must have 33 to 256"
            )
        if not rate.take():
            pool.counters["throttled"] += 1
            raise ServiceError("ThrottlingException", "Rate exceeded")
        return pool, session_id


async def _stream(pool: SessionPool, session: Session, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    try:
        async for chunk in answer.content.iter_any():
            yield chunk
    finally:
        answer.close()
        pool.release(session)


async def _service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    body = {"message": str(error)}
    if error.code == "ValidationException":
        body["reason"] = "FieldValidationFailed"
    return JSONResponse(body, error.status, headers={"x-amzn-errortype": error.code})


def _first_definition(settings: StandInSettings) -> dict[str, Any]:
    """Of the runtime that is there from the start: made by hand, as it were, from the first image."""
    limits, image = settings.limits, next(iter(settings.images), "none")
    return {
        "agentRuntimeArtifact": {"containerConfiguration": {"containerUri": image}},
        "roleArn": settings.role,
        "networkConfiguration": {"networkMode": "PUBLIC"},
        "lifecycleConfiguration": {
            "idleRuntimeSessionTimeout": int(limits.idle_timeout_s),
            "maxLifetime": int(limits.max_life_s),
        },
        "metadataConfiguration": {"requireMMDSV2": True},
    }


def _spawner(settings: StandInSettings, command: Sequence[str], env: Mapping[str, str]) -> Spawner:
    env = {**settings.env, **env}
    if settings.preload is None or len(command) != 2:
        return CommandSpawner(command, env)
    python, script = command
    log = settings.log_dir / "prefork.log"
    return PreforkSpawner(python, Path(script), settings.preload, env, log)


def main(read: Callable[[], str] = sys.stdin.read) -> None:
    try:
        settings = StandInSettings.model_validate_json(read())
    except ValidationError as error:
        sys.exit(f"the stand-in's settings cannot be used: {error}")
    settings.log_dir.mkdir(parents=True, exist_ok=True)
    os.chdir(settings.cwd)  # sessions inherit it
    uvicorn.run(
        StandIn(settings).app(),
        host=settings.host,
        port=settings.port,
        log_level="warning",
        timeout_graceful_shutdown=1,  # then an invoke that waits for its container is cut, and the sessions end
    )


if __name__ == "__main__":
    main()
