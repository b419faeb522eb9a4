"""Configure the log lines of this package's processes: text, or one JSON object per line.

Invariants:

- `ROLLOUT_LOG_FORMAT` in the environment selects the form, so child processes log in the same form.
- A JSON line names the run, step, rollout and session that its code works on, as far as they are known.

It imports only the standard library, so that a janitor and a relay can use it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime

_VARIABLE = "ROLLOUT_LOG_FORMAT"
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_NO_FIELDS: Mapping[str, object] = {}
_fields: ContextVar[Mapping[str, object]] = ContextVar("log_fields", default=_NO_FIELDS)


def logs_json() -> bool:
    """Return whether this process and the processes that it starts log JSON."""
    return os.environ.get(_VARIABLE) == "json"


def select_json() -> None:
    """Log JSON in this process, once it calls `configure_logs`, and in the processes that it starts."""
    os.environ[_VARIABLE] = "json"


def configure_logs(level: int | str, handler: logging.Handler | None = None, text_format: str = _TEXT) -> None:
    """Send this process's log to `handler`, by default standard error. JSON always goes to standard error."""
    if logs_json() or handler is None:
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter() if logs_json() else logging.Formatter(text_format))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def bind_log_fields(**fields: object) -> None:
    """Add fields to the JSON log lines of the current asyncio task, and of the tasks that it creates from now on."""
    _fields.set({**_fields.get(), **fields})


@contextmanager
def log_fields(**fields: object) -> Iterator[None]:
    """Add fields to the JSON log lines of this block, and of the tasks that it creates."""
    before = _fields.set({**_fields.get(), **fields})
    try:
        yield
    finally:
        _fields.reset(before)


class JsonFormatter(logging.Formatter):
    """Formats a record as one line with a JSON object: time (UTC), level, logger, message, the bound fields, and
    `exception` with the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields.get(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return json.dumps(line, default=str)
