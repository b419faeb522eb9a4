"""Serve a proxy that passes bytes on and does nothing else: PORT and the engine's URL. A floor for gateways."""

import sys
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web


def make_app(engine: str) -> web.Application:
    async def client(app: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            app["http"] = http
            yield

    async def forward(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        async with request.app["http"].post(f"{engine}/vllm/v1/chat/completions", data=body) as answer:
            if answer.content_type != "text/event-stream":
                return web.Response(body=await answer.read(), status=answer.status, content_type="application/json")
            response = web.StreamResponse(headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response

    app = web.Application(client_max_size=2**26)
    app.cleanup_ctx.append(client)
    app.router.add_post("/v1/chat/completions", forward)
    return app


if __name__ == "__main__":
    web.run_app(make_app(sys.argv[2]), host="127.0.0.1", port=int(sys.argv[1]), backlog=4096, print=None)
