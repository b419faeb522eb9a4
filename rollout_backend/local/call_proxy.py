"""Proxy an agent's calls to the gateway, and report when each model call starts and ends."""

import contextlib
from collections.abc import Callable

import aiohttp
from aiohttp import web

from rollout_backend.core.api_error import ApiError
from rollout_backend.core.model_call import ModelCall
from rollout_backend.dialects.registry import DIALECTS
from rollout_backend.local.http_proxy import HOP_BY_HOP, HttpProxy

_MAX_ERROR = 1000  # bytes of an error response that are reported


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
        with contextlib.suppress(ApiError):  # the gateway refuses the call and says why
            self._started(dialect.parse(body))
        return await self._stream(request, body)

    async def _stream(self, request: web.Request, body: bytes) -> web.StreamResponse:
        assert self._http is not None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        error = last = b""  # the last chunk is sent after the report: the agent may call again at once
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
