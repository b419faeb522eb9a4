"""Serve the report of a running run, and update it in browsers.

Invariants:

- A page is the file that `write_report` writes, plus a script that polls for changes, which the file lacks.
- Only the report's own pages are served. Over loopback, requests must name this machine, because another site could
  point its name at 127.0.0.1 and read conversations (DNS rebinding).
"""

import asyncio
import html
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

from rollout_backend.errors import ConfigError
from rollout_backend.results.archive import RunArchive
from rollout_backend.results.page.files import NAME, STEPS, write_report
from rollout_backend.results.run_data import RUNS_S, StepData
from rollout_backend.serving.server_process import require_port

log = logging.getLogger(__name__)

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class ReportServer:
    """Renders the report of one run again when its files have changed and a browser requests it."""

    def __init__(self, run_dir: Path, against: Path | None = None, renew_s: float = 2.0, share: float = 0.1) -> None:
        """Render at most every `renew_s`, for at most a `share` of the time: a long training has a large page."""
        self._run_dir = run_dir
        self._against = against
        self._renew_s = renew_s
        self._share = share
        self._known: dict[int, StepData] = {}
        self._rendering = asyncio.Lock()
        self._version = ""
        self._error = ""  # why there is no page
        self._next_at = 0.0  # monotonic seconds

    async def version(self, request: web.Request) -> web.Response:
        """Return the version that a page would have now."""
        await self._renew()
        return web.Response(text=self._version, headers={"Cache-Control": "no-store"})

    async def page(self, request: web.Request) -> web.Response:
        """Return a page of the report."""
        await self._renew()
        version = self._version
        path = self._run_dir / (f"{STEPS}/{step}.html" if (step := request.match_info.get("step")) else NAME)
        text = f"<!doctype html><html><body><p>{html.escape(self._error)}</p></body></html>"
        if not self._error:
            try:
                text = await asyncio.to_thread(path.read_text)
            except FileNotFoundError:
                raise web.HTTPNotFound(text="this run has no such page") from None
        script = files(__package__).joinpath("templates/follow.js").read_text()
        for name, value in (("VERSION", f'"{version}"'), ("NOW", f"{time.time():.3f}")):
            script = script.replace(name, value)
        text = text.replace("default-src 'none';", "default-src 'none'; connect-src 'self';", 1)
        head, end, tail = text.rpartition("</body>")
        text = f"{head}<script>{script}</script>{end}{tail}"
        return web.Response(text=text, content_type="text/html", headers={"Cache-Control": "no-store"})

    async def _renew(self) -> None:
        """Write the report again if the run's files have changed, but not too often."""
        async with self._rendering:
            if time.monotonic() < self._next_at:
                return
            began = time.monotonic()
            version = await asyncio.to_thread(self._files)
            if version != self._version:
                try:
                    await asyncio.to_thread(write_report, self._run_dir, self._against, self._known)
                    self._error = ""
                except (ConfigError, OSError) as error:
                    self._error = f"{error}. This page renews itself."
                self._version = version
            ended = time.monotonic()
            self._next_at = ended + max(self._renew_s, (ended - began) * (1 / self._share - 1))

    def _files(self) -> str:
        """Return a digest of the files in the report, and of which steps are running."""
        found = [path for path in self._run_dir.glob("steps/*.json*") if not path.name.startswith(".")]
        state = []
        for path in sorted([*found, self._run_dir / "run.json"]):
            try:
                about = path.stat()
                state.append((path.name, about.st_mtime_ns, about.st_size))
            except FileNotFoundError:  # being replaced or removed at this moment
                continue
        written = RunArchive(self._run_dir).running_steps().values()
        runs = [time.time() < written_at + RUNS_S for written_at in written]
        return sha256(repr((state, runs)).encode()).hexdigest()[:16]


@asynccontextmanager
async def serve_report(server: ReportServer, host: str, port: int) -> AsyncIterator[str]:
    """Serve within this context, whose value is the URL. Raises StartupError if the port is taken."""
    port = require_port(host, port, "the report", "--port")

    @web.middleware
    async def only_this_machine(request: web.Request, handler: Handler) -> web.StreamResponse:
        if host in _LOOPBACK and request.url.host not in _LOOPBACK:
            raise web.HTTPForbidden(text="this report is served to this machine only: see --host")
        return await handler(request)

    app = web.Application(middlewares=[only_this_machine])
    app.router.add_get("/version", server.version)
    for path in ("/", f"/{NAME}", f"/{STEPS}/{{step:[0-9]{{8,}}}}.html"):
        app.router.add_get(path, server.page)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    finally:
        await runner.cleanup()
