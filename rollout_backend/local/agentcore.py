"""A stand-in for the data plane of AWS Bedrock AgentCore Runtime, for one agent on this machine.

It speaks the service's own REST protocol: a `bedrock-agentcore` client works against it with nothing but its
`endpoint_url` changed. Each session is one fresh process of the user's app, which sees what AWS shows a container:
PORT, the session's header, pings, SIGTERM. `sessions` says how sessions live and end.

What it does not do: check signatures (only that there is one), isolate sessions from the machine, know qualifiers.

    python -m rollout_backend.local.agentcore < settings.json

`GET /_local/sessions` shows what runs; AWS has no such call.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rollout_backend.local.sessions import SESSION_HEADER, Limits, ServiceError, Session, SessionPool, TokenBucket
from rollout_backend.local.spawner import CommandSpawner, PreforkSpawner, Spawner

_MAX_PAYLOAD_BYTES = 100_000_000
_CUSTOM_HEADER = "x-amzn-bedrock-agentcore-runtime-custom-"
_PASSED_HEADERS = ("content-type", "accept", "x-amzn-trace-id", "traceparent", "tracestate", "baggage")


class StandInSettings(BaseModel):
    """What the stand-in runs, and where. Read as JSON from stdin, since `env` may hold secrets."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    arn: str
    command: tuple[str, ...] = Field(min_length=1)
    """Starts the user's app; it listens on HOST:PORT of its environment."""
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


class DataPlane:
    """The two calls, and the one of the control plane that goes before them.

    Their checks come in the order of AWS: signature, name, form, rate, quota.
    """

    def __init__(self, settings: StandInSettings) -> None:
        self._settings = settings
        self._invokes = TokenBucket(settings.limits.invoke_per_s)
        self._stops = TokenBucket(settings.limits.stop_per_s)
        self._pool: SessionPool | None = None
        self._began = datetime.now(UTC)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/runtimes/{arn:path}/invocations", self._invoke, methods=["POST"]),
                Route("/runtimes/{arn:path}/stopruntimesession", self._stop, methods=["POST"]),
                Route("/runtimes/{runtime_id}/", self._describe),
                Route("/_local/sessions", self._sessions),
            ],
            exception_handlers={ServiceError: _service_error},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        spawner = _spawner(self._settings)
        self._pool = SessionPool(spawner, self._settings.limits, self._settings.log_dir)
        if isinstance(spawner, PreforkSpawner):
            spawner.warm()
        yield
        await self._pool.close()

    @property
    def pool(self) -> SessionPool:
        assert self._pool is not None, "before the app's lifespan"
        return self._pool

    async def _invoke(self, request: Request) -> Response:
        session_id = self._check(request, self._invokes)
        body = await request.body()
        if len(body) > _MAX_PAYLOAD_BYTES:
            raise ServiceError(
                "ValidationException", f"payload has {len(body)} bytes, more than {_MAX_PAYLOAD_BYTES}"
            )
        session = await self.pool.open(session_id)
        passed = {name: request.headers[name] for name in _PASSED_HEADERS if name in request.headers}
        passed |= {name: value for name, value in request.headers.items() if name.startswith(_CUSTOM_HEADER)}
        answer = await self.pool.request(session, body, passed | {SESSION_HEADER: session_id})
        kind = answer.headers.get("content-type", "application/octet-stream")
        headers = {SESSION_HEADER: session_id, "content-type": kind}
        if answer.content_type == "text/event-stream":
            return StreamingResponse(self._stream(session, answer), headers=headers)
        try:
            content = await answer.read()
        except aiohttp.ClientError as error:
            message = f"The runtime's answer broke off ({error}). {session.tail()}"
            raise ServiceError("RuntimeClientError", message) from None
        finally:
            self.pool.release(session)
        return Response(content, headers=headers)

    async def _stream(self, session: Session, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        try:
            async for chunk in answer.content.iter_any():
                yield chunk
        finally:
            answer.close()
            self.pool.release(session)

    async def _stop(self, request: Request) -> Response:
        session_id = self._check(request, self._stops)
        self.pool.stop(session_id)
        return JSONResponse({}, headers={SESSION_HEADER: session_id})

    async def _describe(self, request: Request) -> Response:
        """GetAgentRuntime, of the control plane: what a caller asks before its first invoke."""
        if request.path_params["runtime_id"] != (runtime_id := self._settings.arn.rsplit("/", 1)[1]):
            raise ServiceError("ResourceNotFoundException", f"No runtime {request.path_params['runtime_id']}")
        began = self._began.isoformat()
        return JSONResponse(
            {
                "agentRuntimeArn": self._settings.arn,
                "agentRuntimeName": runtime_id.rpartition("-")[0],
                "agentRuntimeId": runtime_id,
                "agentRuntimeVersion": "1",
                "createdAt": began,
                "lastUpdatedAt": began,
                "roleArn": "arn:aws:iam::000000000000:role/local",
                "networkConfiguration": {"networkMode": "PUBLIC"},
                "status": "READY",
                "lifecycleConfiguration": {
                    "idleRuntimeSessionTimeout": int(self._settings.limits.idle_timeout_s),
                    "maxLifetime": int(self._settings.limits.max_life_s),
                },
            }
        )

    async def _sessions(self, request: Request) -> Response:
        return JSONResponse(self.pool.snapshot())

    def _check(self, request: Request, rate: TokenBucket) -> str:
        """The session id of a request that is in order."""
        if not request.headers.get("authorization", "").startswith("AWS4-HMAC-SHA256 "):
            raise ServiceError("MissingAuthenticationTokenException", "The request carries no SigV4 signature")
        if (arn := request.path_params["arn"]) != self._settings.arn:
            raise ServiceError("ResourceNotFoundException", f"No runtime {arn}; this one is {self._settings.arn}")
        session_id = request.headers.get(SESSION_HEADER) or str(uuid.uuid4())
        if not 33 <= len(session_id) <= 256:
            raise ServiceError(
                "ValidationException", f"runtimeSessionId has {len(session_id)} characters; it must have 33 to 256"
            )
        if not rate.take():
            self.pool.counters["throttled"] += 1
            raise ServiceError("ThrottlingException", "Rate exceeded")
        return session_id


async def _service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    body = {"message": str(error)}
    if error.code == "ValidationException":
        body["reason"] = "FieldValidationFailed"
    return JSONResponse(body, error.status, headers={"x-amzn-errortype": error.code})


def _spawner(settings: StandInSettings) -> Spawner:
    if settings.preload is None:
        return CommandSpawner(settings.command, settings.env)
    python, script = settings.command
    log = settings.log_dir / "prefork.log"
    return PreforkSpawner(python, Path(script), settings.preload, settings.env, log)


def main(read: Callable[[], str] = sys.stdin.read) -> None:
    try:
        settings = StandInSettings.model_validate_json(read())
    except ValidationError as error:
        sys.exit(f"the stand-in's settings cannot be used: {error}")
    settings.log_dir.mkdir(parents=True, exist_ok=True)
    os.chdir(settings.cwd)  # sessions inherit it
    uvicorn.run(
        DataPlane(settings).app(),
        host=settings.host,
        port=settings.port,
        log_level="warning",
        timeout_graceful_shutdown=1,  # then an invoke that waits for its container is cut, and the sessions end
    )


if __name__ == "__main__":
    main()
