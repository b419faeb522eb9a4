"""Serve the routes under /control, with which the trainer controls a gateway. All of them require the control key."""

from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollout_backend.core.adapter import AdapterVersions
from rollout_backend.core.api_error import ApiError
from rollout_backend.gateway.authentication import Authenticator
from rollout_backend.gateway.call_handler import CallHandler
from rollout_backend.gateway.engine.engines import EngineCalls
from rollout_backend.gateway.sessions.registry import SessionRegistry
from rollout_backend.gateway.sessions.share import read_body

_Body = TypeVar("_Body", bound=BaseModel)


class _SessionIds(BaseModel):
    model_config = ConfigDict(extra="forbid")

    session_ids: list[str] = Field(max_length=100_000)


class _Versions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    versions: dict[str, int]


class ControlApi:
    """The control routes of one gateway."""

    def __init__(
        self,
        authenticator: Authenticator,
        registry: SessionRegistry,
        calls: CallHandler,
        engine_calls: EngineCalls,
        adapters: AdapterVersions,
        max_body_bytes: int,
    ) -> None:
        self._authenticator = authenticator
        self._registry = registry
        self._calls = calls
        self._engine_calls = engine_calls
        self._adapters = adapters
        self._max_body_bytes = max_body_bytes
        self.routes = [
            Route("/control/heartbeats", self.heartbeats, methods=["POST"]),
            Route("/control/revoke", self.revoke, methods=["POST"]),
            Route("/control/adopt", self.adopt, methods=["POST"]),
            Route("/control/pause", self.pause, methods=["POST"]),
            Route("/control/resume", self.resume, methods=["POST"]),
            Route("/control/adapters", self.adapters, methods=["POST"]),
            Route("/control/stats", self.stats, methods=["GET"]),
        ]

    async def heartbeats(self, request: Request) -> Response:
        self._authenticator.require_control_key(request)
        heard = self._registry.take_heartbeats()
        return JSONResponse({"beats": sorted(heard.beats), "calls": sorted(heard.calls)})

    async def revoke(self, request: Request) -> Response:
        session_ids = await self._session_ids(request)
        await self._registry.revoke(session_ids)
        return JSONResponse({"revoked": len(session_ids)})

    async def adopt(self, request: Request) -> Response:
        session_ids = await self._session_ids(request)
        self._calls.adopt(session_ids)
        return JSONResponse({"adopted": len(session_ids)})

    async def pause(self, request: Request) -> Response:
        self._authenticator.require_control_key(request)
        await self._engine_calls.pause()
        return JSONResponse({"paused": True})

    async def resume(self, request: Request) -> Response:
        self._authenticator.require_control_key(request)
        self._engine_calls.resume()
        return JSONResponse({"paused": False})

    async def adapters(self, request: Request) -> Response:
        versions = await self._parsed(request, _Versions, "{'versions': {...}}")
        self._adapters.replace(versions.versions)
        return JSONResponse({"adapters": len(versions.versions)})

    async def stats(self, request: Request) -> Response:
        self._authenticator.require_control_key(request)
        return JSONResponse(self._calls.stats().model_dump())

    async def _session_ids(self, request: Request) -> list[str]:
        return (await self._parsed(request, _SessionIds, "{'session_ids': [...]}")).session_ids

    async def _parsed(self, request: Request, model: type[_Body], form: str) -> _Body:
        """Parse the body as a `model`. Raise ApiError (400), which names the expected `form`, if it fails."""
        self._authenticator.require_control_key(request)
        body = await read_body(request, self._max_body_bytes)
        try:
            return model.model_validate_json(body)
        except ValidationError as error:
            raise ApiError(400, f"the body must be {form}: {error.errors()[0]['msg']}") from None
