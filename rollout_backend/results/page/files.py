"""Write the report of a run to its directory."""

import functools
import logging
import os
import re
import time
from pathlib import Path
from typing import Any

import orjson
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from rollout_backend.atomic_file import write_file
from rollout_backend.core import formats
from rollout_backend.results.archive import CONFIG
from rollout_backend.results.page.step_page import step_context
from rollout_backend.results.page.token_text import TokenText
from rollout_backend.results.page.training_page import training_context
from rollout_backend.results.run_data import RUNS_S, StepData, read_run

log = logging.getLogger(__name__)

NAME, STEPS = "report.html", "report"
MAX_STEP_PAGES = 200
_token_text = functools.lru_cache(1)(TokenText.load)


def write_report(run_dir: Path, against: Path | None = None, known: dict[int, StepData] | None = None) -> Path:
    """Write RUN_DIR/report.html and return its path. `against` is the directory of a run to compare with.

    For a run of several steps, also write a page for each of its newest steps to RUN_DIR/report/. A page that is
    newer than its step's files and the settings is kept, except in a comparison. `known` caches the steps for the
    next call.

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
    links = {}
    for step in run.steps[-MAX_STEP_PAGES:]:
        links[step.step] = f"{STEPS}/{step.step:08d}.html"
        page = run_dir / links[step.step]
        if other is not None or not _is_current(page, step, run_dir):
            _write(page, "step.html", step_context(run, step, against=other, text=text, steps_link=f"../{NAME}"))
            os.utime(page, (began, began))  # later changes are not in it
    _write(path, "training.html", training_context(run, links, other))
    return path


def _is_current(page: Path, step: StepData, run_dir: Path) -> bool:
    settings = run_dir / CONFIG  # pages show the settings, and prices affect the numbers
    changed_at = max(step.changed_at, settings.stat().st_mtime if settings.is_file() else 0.0)
    if step.report is None and not step.runs:
        changed_at = max(changed_at, step.changed_at + RUNS_S)  # an older page says that the step is running
    return page.is_file() and page.stat().st_mtime > changed_at


def try_to_write_report(run_dir: Path) -> Path | None:
    """Write the report of a run. Log a warning and return None if that fails."""
    try:
        return write_report(run_dir)
    except Exception as error:  # a report must never end a run
        log.warning("the report of %s could not be written: %s", run_dir, error)
        return None


def _write(path: Path, template: str, context: dict[str, Any]) -> None:
    write_file(path, _environment().get_template(template).render(context).encode(errors="replace"))


@functools.cache
def _environment() -> Environment:
    """Return the template engine, which escapes every value."""
    engine = Environment(
        loader=PackageLoader("rollout_backend.results.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    engine.policies["json.dumps_function"] = _dumps
    for name in ("number", "signed", "percent", "seconds", "dollars"):
        engine.filters[name] = getattr(formats, name)
    engine.filters["code"] = _code
    return engine


def _dumps(value: Any, **options: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()


def _code(text: str) -> Markup:
    """Format text between backticks as code, and escape everything."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704
