"""Emulate AWS Bedrock AgentCore Runtime for agents on this machine.

It implements the service's REST protocol: `bedrock-agentcore` and `bedrock-agentcore-control` clients need only a
different `endpoint_url`. Each session is a fresh process of the user's app, with what AWS gives a container: PORT,
the session's header, pings, SIGTERM. `session_pool` runs the sessions and `control_plane` creates the runtimes. One
runtime exists from the start, unless `command` is empty; others are created from `images` or from code in S3.

It does not verify signatures (it only requires its `access_key`) or isolate sessions from the machine. With
`path_secret`, it only serves paths below that secret.

    python -m rollout_backend.workbench.local.agentcore_emulator < settings.json

`GET /_local/sessions` lists the sessions, and `GET /_local/ends?after=N` those that ended without a stop, except the
first N. AWS has no such calls.
"""

import asyncio
import os
import sys
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from agent_wrapper.shared.processes import describe_exit
from rollout_backend.agents.runtimes.http import SESSION_HEADER
from rollout_backend.run.dispatch.rate_limiter import TokenBucket
from rollout_backend.workbench.local.code_artifacts import CodeStore
from rollout_backend.workbench.local.control_plane import ControlLimits, ControlPlane, RuntimeRecord, check_signed
from rollout_backend.workbench.local.prefork import SNAPSHOT
from rollout_backend.workbench.local.session_pool import (
    COUNTERS,
    EmulatorLimits,
    RuntimeSession,
    ServiceError,
    SessionPool,
)
from rollout_backend.workbench.local.spawner import CommandSpawner, PreforkSpawner, Spawner

ROLE = "arn:aws:iam::000000000000:role/local"
_MAX_PAYLOAD_BYTES = 100_000_000
_ENDS_KEPT = 1000
# A shell returns a higher code if a signal killed its command.
_SIGNALLED = 128
_CUSTOM_HEADER = "x-amzn-bedrock-agentcore-runtime-custom-"
_PASSED_HEADERS = ("content-type", "accept", "x-amzn-trace-id", "traceparent", "tracestate", "baggage")


class EmulatorSettings(BaseModel, frozen=True, extra="forbid"):
    """The emulator's settings, read as JSON from stdin because `env` may hold secrets."""

    arn: str
    command: tuple[str, ...] = ()
    """Command of the user's app, which listens on HOST:PORT of its environment. If empty, no runtime exists yet."""
    images: dict[str, tuple[str, ...]] = {}
    """Images for new runtimes: the name in ECR's format, and the command that replaces the image."""
    role: str = ROLE
    """The only existing execution role."""
    control: ControlLimits = ControlLimits()
    cwd: Path
    env: dict[str, str]
    """Complete environment of a session's process, except PORT and HOST."""
    log_dir: Path
    host: str = "127.0.0.1"
    port: int = Field(ge=1, le=65535)
    path_secret: str = ""
    """Path below which it serves: every user of the machine can reach the port. Empty: none is required."""
    access_key: str = ""
    """Access key with which requests must be signed. Empty: any key."""
    preload: tuple[str, ...] | None = None
    """If the command is [PYTHON, SCRIPT], fork sessions from an interpreter that has imported the script's
    libraries and these modules. None: run the command each time."""
    limits: EmulatorLimits = EmulatorLimits()


class AgentCoreEmulator:
    """Serves the two calls of the data plane for every runtime of the control plane.

    Checks run in AWS's order: signature, name, format, rate, quota. The quota is per endpoint.
    """

    def __init__(self, settings: EmulatorSettings, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._clock = clock
        self._invokes = TokenBucket(settings.limits.invoke_per_s)
        self._stops = TokenBucket(settings.limits.stop_per_s)
        self._calls = TokenBucket(settings.limits.calls_per_s) if settings.limits.calls_per_s else None
        # The keys are the ARN of a runtime and the name of its endpoint.
        self._pools: dict[tuple[str, str], SessionPool] = {}
        self._ends: deque[dict[str, Any]] = deque(maxlen=_ENDS_KEPT)
        region = settings.arn.split(":")[3]
        self._code = CodeStore(settings.log_dir / "code", region, settings.env)
        self._control = ControlPlane(
            region=region,
            images=settings.images,
            code=self._code,
            role=settings.role,
            access_key=settings.access_key,
            limits=settings.control,
            on_live=self._serve,
            on_gone=self._drop,
            sessions_of=lambda arn: sum(
                len(pool.snapshot()["sessions"]) for (of, _), pool in self._pools.items() if of == arn
            ),
        )

    def app(self) -> Starlette:
        routes = [
            Route("/runtimes/{arn:path}/invocations", self._invoke, methods=["POST"]),
            Route("/runtimes/{arn:path}/stopruntimesession", self._stop, methods=["POST"]),
            *self._control.routes(),
            Route("/_local/sessions", self._sessions),
            Route("/_local/ends", self._list_ends),
        ]
        secret = self._settings.path_secret
        return Starlette(
            routes=[Mount(f"/{secret}", routes=routes)] if secret else routes,
            exception_handlers={ServiceError: _service_error},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        settings = self._settings
        if settings.command:
            spawner = _spawner(settings, settings.command, {})
            self._pools[settings.arn, "DEFAULT"] = self._pool(spawner, settings.limits)
            self._control.add(settings.arn, _first_definition(settings))
            if isinstance(spawner, PreforkSpawner):
                spawner.warm()
        yield
        await self._control.close()
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))

    async def _serve(self, runtime: RuntimeRecord, endpoint: str) -> None:
        """Run new sessions of an endpoint with the version that went live."""
        definition, limits = runtime.served(endpoint), self._settings.limits
        assert definition is not None
        more, artifact = dict(definition.get("environmentVariables", {})), definition["agentRuntimeArtifact"]
        if definition.get("platformVersion") == "V2":
            more[SNAPSHOT] = "2"
        if code := artifact.get("codeConfiguration"):
            command = self._code.command(await self._code.install(code))
            spawner: Spawner = CommandSpawner(command, {**self._code.env, **more})
        else:
            image = artifact["containerConfiguration"]["containerUri"]
            spawner = _spawner(self._settings, self._settings.images[image], more)
        lifetimes = definition["lifecycleConfiguration"]
        limits = limits.model_copy(
            update={
                "idle_timeout_s": min(limits.idle_timeout_s, lifetimes["idleRuntimeSessionTimeout"]),
                "max_life_s": min(limits.max_life_s, lifetimes["maxLifetime"]),
            }
        )
        if pool := self._pools.get((runtime.arn, endpoint)):
            pool.use(spawner, limits)
        else:
            self._pools[runtime.arn, endpoint] = self._pool(spawner, limits)

    def _pool(self, spawner: Spawner, limits: EmulatorLimits) -> SessionPool:
        return SessionPool(spawner, limits, self._settings.log_dir, self._clock, self._record_end)

    def _record_end(self, session: RuntimeSession, how: str) -> None:
        code = session.process.returncode if session.process is not None else None
        if how != "died" or code is None:
            text = f"session {session.id} was ended as {how} (see EmulatorLimits), before it published a result"
        else:
            text = f"the process of session {session.id} {describe_exit(code)} without a result"
        # The signal may come from outside, so another attempt is worthwhile.
        final = code is not None and 0 <= code <= _SIGNALLED
        number = self._ends[-1]["number"] + 1 if self._ends else 1
        end = {"id": session.id, "message": f"{text}. {session.log_tail()}", "final": final}
        self._ends.append({"number": number, **end})

    async def _list_ends(self, request: Request) -> Response:
        after = int(request.query_params["after"])
        return JSONResponse([end for end in self._ends if end["number"] > after])

    async def _drop(self, runtime: RuntimeRecord, endpoint: str) -> None:
        if pool := self._pools.pop((runtime.arn, endpoint), None):
            await pool.close()

    @property
    def pool(self) -> SessionPool:
        """Session pool of the runtime that exists from the start."""
        assert (self._settings.arn, "DEFAULT") in self._pools, "before the app's lifespan"
        return self._pools[self._settings.arn, "DEFAULT"]

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
            message = f"The runtime's answer broke off ({error}). {session.log_tail()}"
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
        """Check a request. Return the session pool of its endpoint, and its session id."""
        check_signed(request, self._settings.access_key)
        arn, endpoint = request.path_params["arn"], request.query_params.get("qualifier", "DEFAULT")
        runtime, pool = self._control.runtimes.get(arn), self._pools.get((arn, endpoint))
        definition = runtime.served(endpoint) if runtime is not None else None
        if definition is None or pool is None:
            raise ServiceError("ResourceNotFoundException", f"No endpoint {endpoint} of runtime {arn} serves")
        if not definition.get("metadataConfiguration", {}).get("requireMMDSV2"):
            raise ServiceError("ValidationException", "This runtime is not MMDSv2-enabled")
        session_id = request.headers.get(SESSION_HEADER) or str(uuid.uuid4())
        if not 33 <= len(session_id) <= 256:
            raise ServiceError(
                "ValidationException", f"runtimeSessionId has {len(session_id)} characters; it must have 33 to 256"
            )
        now = time.monotonic()
        if not (rate.try_take(now) and (self._calls is None or self._calls.try_take(now))):
            pool.counters["throttled"] += 1
            raise ServiceError("ThrottlingException", "Rate exceeded")
        return pool, session_id


async def _stream(pool: SessionPool, session: RuntimeSession, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
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


def _first_definition(settings: EmulatorSettings) -> dict[str, Any]:
    """Return the definition of the initial runtime, as if it had been created from the first image."""
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


def _spawner(settings: EmulatorSettings, command: Sequence[str], env: Mapping[str, str]) -> Spawner:
    env = {**settings.env, **env}
    if settings.preload is None or len(command) != 2:
        return CommandSpawner(command, env)
    python, script = command
    log = settings.log_dir / "prefork.log"
    return PreforkSpawner(python, Path(script), settings.preload, env, log)


def main(read: Callable[[], str] = sys.stdin.read) -> None:
    try:
        settings = EmulatorSettings.model_validate_json(read())
    except ValidationError as error:
        sys.exit(f"the emulator's settings are invalid: {error}")
    # The folder is private because agents may print their keys.
    settings.log_dir.mkdir(0o700, parents=True, exist_ok=True)
    # Sessions inherit the working directory.
    os.chdir(settings.cwd)
    uvicorn.run(
        AgentCoreEmulator(settings).app(),
        host=settings.host,
        port=settings.port,
        log_level="warning",
        # AWS keeps idle connections for the same time; aiobotocore keeps them for 12 s.
        timeout_keep_alive=20,
        # After this time, invokes that wait for a container are aborted, and the sessions end.
        timeout_graceful_shutdown=1,
    )


if __name__ == "__main__":
    main()
