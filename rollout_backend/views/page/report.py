"""Write the report of a run to its directory, and serve the report of a running run to browsers.

Invariants:

- A served page is the file that `write_report` writes, plus a script that polls for changes, which the file lacks.
- Only the report's own pages are served. Over loopback, requests must name this machine, because another site could
  point its name at 127.0.0.1 and read conversations (DNS rebinding).
"""

import asyncio
import functools
import html
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from rollout_backend.base import formats
from rollout_backend.base.addresses import host_port, is_loopback, listen_addresses
from rollout_backend.base.atomic_file import write_file
from rollout_backend.errors import ConfigError
from rollout_backend.model.rendering.token_bytes import TokenText
from rollout_backend.model.serving.server_process import require_port
from rollout_backend.run.accounts.archive import CONFIG, SUMMARY, RunArchive
from rollout_backend.run.accounts.run_info import RUNS_S
from rollout_backend.views.page.step_page import step_context
from rollout_backend.views.page.training_page import training_context
from rollout_backend.views.run_data import StepData, read_run, run_state
from rollout_backend.views.words import WORDS

log = logging.getLogger(__name__)

NAME, STEPS = "report.html", "report"
MAX_STEP_PAGES = 200
MAX_PAGE_ROLLOUTS = 8192
_token_text = functools.lru_cache(1)(TokenText.load)


def write_report(run_dir: Path, against: Path | None = None, known: dict[int, StepData] | None = None) -> Path:
    """Write RUN_DIR/report.html and return its path. `against` is the directory of a run to compare with.

    For a run of several steps, also write pages of its newest steps to RUN_DIR/report/, until they contain
    `MAX_PAGE_ROLLOUTS` rollouts. A page that is newer than its step's files and the settings is kept, except in a
    comparison. `known` caches the steps for the next call.

    Raises:
        ConfigError: a folder holds no step, or a file of another version.
        OSError: the disk refuses the file.
    """
    began = time.time()
    run = read_run(run_dir, known)
    if known is not None:
        known.update((step.step, step) for step in run.steps)
    other = read_run(against) if against is not None else None
    text = _token_text(run.config.model.path) if run.config is not None else None
    path = run_dir / NAME
    if len(run.steps) == 1:
        _write(path, "step.html", step_context(run, run.steps[0], against=other, text=text))
        return path
    links, left = {}, MAX_PAGE_ROLLOUTS
    for step in reversed(run.steps[-MAX_STEP_PAGES:]):
        link = f"{STEPS}/{step.step:08d}.html"
        page = run_dir / link
        if other is not None or not _is_current(page, step, run_dir):
            if left <= 0:
                continue
            left -= step.summary.planned
            _write(page, "step.html", step_context(run, step, against=other, text=text, steps_link=f"../{NAME}"))
            # The page lacks changes made after this time.
            os.utime(page, (began, began))
        links[step.step] = link
    _write(path, "training.html", training_context(run, links, other))
    return path


def _is_current(page: Path, step: StepData, run_dir: Path) -> bool:
    # Pages show the settings, and prices affect the numbers.
    settings = run_dir / CONFIG
    changed_at = max(step.changed_at, settings.stat().st_mtime if settings.is_file() else 0.0)
    if not step.overview.has_report and not step.runs:
        # An older page says that the step is running.
        changed_at = max(changed_at, step.changed_at + RUNS_S)
    return page.is_file() and page.stat().st_mtime > changed_at


def try_to_write_report(run_dir: Path) -> Path | None:
    """Write the report of a run. Log a warning and return None if that fails."""
    try:
        return write_report(run_dir)
    except Exception as error:
        # A report must never end a run.
        log.warning("the report of %s could not be written: %s", run_dir, error)
        return None


def _write(path: Path, template: str, context: dict[str, Any]) -> None:
    write_file(path, _environment().get_template(template).render(context).encode(errors="replace"))


@functools.cache
def _environment() -> Environment:
    """Return the template engine, which escapes every value."""
    engine = Environment(
        loader=PackageLoader("rollout_backend.views.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    engine.policies["json.dumps_function"] = _dumps
    for name in ("number", "signed", "percent", "seconds", "dollars"):
        engine.filters[name] = getattr(formats, name)
    engine.filters["code"] = _code
    engine.filters["explain"] = _explain
    engine.globals["words"] = WORDS
    return engine


def _dumps(value: Any, **options: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()


def _code(text: str) -> Markup:
    """Format text between backticks as code, and escape everything."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704


def _explain(text: str) -> Markup:
    """Return escaped text in which each explained word links to its explanation, and shows it as a tooltip."""

    def link(found: re.Match[str]) -> str:
        return f'<a class="word" href="#words" title="{escape(WORDS[found[0]])}">{found[0]}</a>'

    return Markup(re.sub(rf"\b({'|'.join(WORDS)})\b", link, str(escape(text))))  # noqa: S704


class ReportServer:
    """Renders the report of one run again when its files have changed and a browser requests it."""

    def __init__(
        self,
        run_dir: Path,
        against: Path | None = None,
        renew_s: float = 2.0,
        share: float = 0.1,
        newest: Callable[[], Path] | None = None,
    ) -> None:
        """Render at most every `renew_s`, for at most a `share` of the time: a long training has a large page.

        `newest` returns the newest run, which the pages then follow."""
        self._run_dir = run_dir
        self._newest = newest
        self._against = against
        self._renew_s = renew_s
        self._share = share
        self._known: dict[int, StepData] = {}
        self._rendering = asyncio.Lock()
        self._version = ""
        self._error = ""
        # In seconds of the monotonic clock.
        self._next_at = 0.0

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
                text = await asyncio.to_thread(path.read_text, "utf-8")
            except FileNotFoundError:
                raise web.HTTPNotFound(text="this run has no such page") from None
        script = files(__package__).joinpath("templates/follow.js").read_text()
        says = "This page follows the newest run." if self._newest is not None else ""
        for name, value in (("VERSION", f'"{version}"'), ("NOW", f"{time.time():.3f}"), ("FOLLOWS", f'"{says}"')):
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
            if self._newest is not None and (run_dir := await asyncio.to_thread(self._newest)) != self._run_dir:
                self._run_dir, self._known = run_dir, {}
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
        """Return a digest of the files in the report, of the run's state, and of which steps are running."""
        found = [path for path in self._run_dir.glob("steps/*.json*") if not path.name.startswith(".")]
        found = [path for path in found if not path.name.endswith(SUMMARY)]
        archive, state = RunArchive(self._run_dir), []
        for path in sorted(found):
            try:
                about = path.stat()
                state.append((path.name, about.st_mtime_ns, about.st_size))
            except FileNotFoundError:
                # The file is being replaced or removed.
                continue
        written = archive.running_steps().values()
        runs = [time.time() < written_at + RUNS_S for written_at in written]
        return sha256(repr((str(self._run_dir), state, run_state(archive), runs)).encode()).hexdigest()[:16]


@asynccontextmanager
async def serve_report(server: ReportServer, host: str, port: int) -> AsyncIterator[str]:
    """Serve within this context, whose value is the URL. Raises StartupError if the port is taken."""
    port = require_port(host, port, "the report", "--port")

    @web.middleware
    async def only_this_machine(request: web.Request, handler: Handler) -> web.StreamResponse:
        if is_loopback(host) and not is_loopback(request.url.host or ""):
            raise web.HTTPForbidden(text="this report is served to this machine only: see --host")
        return await handler(request)

    app = web.Application(middlewares=[only_this_machine])
    app.router.add_get("/version", server.version)
    for path in ("/", f"/{NAME}", f"/{STEPS}/{{step:[0-9]{{8,}}}}.html"):
        app.router.add_get(path, server.page)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        for address in listen_addresses(host):
            await web.TCPSite(runner, address, port).start()
        yield f"http://{host_port(host, port)}/"
    finally:
        await runner.cleanup()
