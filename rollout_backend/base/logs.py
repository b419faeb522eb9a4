"""Configure the log lines of this package's processes: text, or one JSON object per line.

Invariants:

- `ROLLOUT_LOG_FORMAT` in the environment selects the format, so child processes log in the same format.
- A line has no control characters, because a container that it quotes could control a terminal with them.
- With `in_thread`, a log whose disk is full or does not answer blocks no event loop. Dropped lines are counted.
- A JSON line names the run, step, rollout and session that its code works on, as far as they are known.

It imports only the standard library, so that a janitor and a relay can use it.
"""

import json
import logging
import os
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

_VARIABLE = "ROLLOUT_LOG_FORMAT"
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

# Numbers and ids. Each attempt begins at the start of a word: otherwise a long word takes quadratic time.
_VARYING = re.compile(r"(?<!\S)[^\s\d]*+\d\S*+")
_KIND_CHARS = 2_000
_REPEAT_S = 60.0
_KINDS_KEPT = 1000
# What waits for the disk of a log.
_LINES_KEPT = 10_000
_FLUSH_S = 1.0

_SPACES = "\n\t\xa0\u3000"

_NO_FIELDS: Mapping[str, object] = {}
_fields: ContextVar[Mapping[str, object]] = ContextVar("log_fields", default=_NO_FIELDS)


def logs_json() -> bool:
    """Return whether this process and the processes that it starts log JSON."""
    return os.environ.get(_VARIABLE) == "json"


def select_json() -> None:
    """Log JSON in this process, once it calls `configure_logs`, and in the processes that it starts."""
    os.environ[_VARIABLE] = "json"


def configure_logs(
    level: int | str,
    handler: logging.Handler | None = None,
    text_format: str = _TEXT,
    *,
    collapse: bool = False,
    in_thread: bool = False,
) -> None:
    """Send this process's log to `handler`, by default standard error. JSON always goes to standard error. `collapse`
    counts repeated lines instead of printing each. `in_thread` is for processes whose standard error is a file."""
    if logs_json() or handler is None:
        handler = _ThreadedHandler() if in_thread else logging.StreamHandler()
        handler.setFormatter(JsonFormatter() if logs_json() else _TextFormatter(text_format))
    else:
        handler.setFormatter(_TextFormatter())
    if collapse:
        handler.addFilter(RepeatFilter(exact=logs_json()))
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


class _ThreadedHandler(logging.Handler):
    """Writes to standard error from a thread. While that takes long, further lines wait, and are dropped beyond
    `_LINES_KEPT`. Once the disk has taken the rest, a line has the number of those that were dropped."""

    def __init__(self) -> None:
        super().__init__()
        # How many lines found the queue full, how many could not be written, and how many of these it has reported.
        self._refused = self._failed = self._named = 0
        self._lines: queue.Queue[bytes] = queue.Queue(_LINES_KEPT)
        threading.Thread(target=self._write, name="log", daemon=True).start()

    @property
    def dropped(self) -> int:
        return self._refused + self._failed

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self._line(record))
        except queue.Full:
            self._refused += 1

    def flush(self) -> None:
        """Wait for the lines so far, but not for a disk that does not answer: this is also called at the exit."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, _FLUSH_S)

    def _line(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode(errors="backslashreplace")

    def _write(self) -> None:
        while True:
            if not _is_written(self._lines.get()):
                self._failed += 1
            elif self._lines.empty() and (dropped := self.dropped) > self._named:
                text = f"{dropped - self._named} lines of this log were dropped: its disk was full or did not answer"
                fields = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "msg": text}
                if _is_written(self._line(logging.makeLogRecord(fields))):
                    self._named = dropped
            self._lines.task_done()


def _is_written(line: bytes) -> bool:
    try:
        # `sys.stderr` has a lock, which a thread that hangs would hold at the exit.
        return os.write(2, line) == len(line)
    except OSError:
        return False


def dropped_lines() -> int:
    """Return the number of lines that the log of this process has dropped."""
    return sum(each.dropped for each in logging.root.handlers if isinstance(each, _ThreadedHandler))


class _TextFormatter(logging.Formatter):
    """Formats a record as text without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return "".join(
            each if each.isprintable() or each in _SPACES else "\N{REPLACEMENT CHARACTER}" for each in text
        )


class RepeatFilter(logging.Filter):
    """Passes the 1st, 10th, 100th ... of the lines that differ only in numbers and ids, the later ones with their
    count. After a minute without such a line, the count starts again.

    With `exact`, only lines with an equal beginning and equal bound fields are counted together: a program reads the
    log, but a container that repeats a line must not fill the disk.
    """

    def __init__(self, *, exact: bool = False) -> None:
        super().__init__()
        self._exact = exact
        # The count of lines, and the time of the last one.
        self._seen: dict[tuple[str, str, str], tuple[int, float]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if self._exact:
            kind = record.name, text[:_KIND_CHARS], repr(_fields.get())
        else:
            kind = record.name, _VARYING.sub("#", text[:_KIND_CHARS].partition("\n")[0]), ""
        count, last = self._seen.pop(kind, (0, 0.0))
        count = count + 1 if record.created - last < _REPEAT_S else 1
        self._seen[kind] = count, record.created
        if len(self._seen) > _KINDS_KEPT:
            del self._seen[next(iter(self._seen))]
        passes = str(count).strip("0") == "1"
        if passes and count > 1:
            record.msg, record.args = f"{text} (the {count}th like it)", ()
        return passes


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


def report_failure(what: str) -> Callable[[Any], None]:
    """Return a callback for `add_done_callback` of a task or future that is never awaited. It logs the error of the
    work, which would otherwise end silently."""

    def report(done: Any) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            logging.getLogger(__name__).error("%s has failed", what, exc_info=error)

    return report
