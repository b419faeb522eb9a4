"""Log lines as text and as JSON."""

import io
import json
import logging
import os
import threading
from contextvars import ContextVar
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.logging import RichHandler
from typer.testing import CliRunner

from rollout_backend.base import logs
from rollout_backend.cli import app

log = logging.getLogger("test_logs")


@pytest.fixture
def lines(monkeypatch):
    """Log JSON for one test, without the fields that earlier tests have bound, and return a function that returns the
    lines."""
    monkeypatch.setattr(logs, "_fields", ContextVar("log_fields", default=logs._NO_FIELDS))
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.INFO)
    monkeypatch.setenv("ROLLOUT_LOG_FORMAT", "json")
    logs.configure_logs(logging.INFO)
    stream = io.StringIO()
    logging.root.handlers[0].setStream(stream)
    return lambda: [json.loads(line) for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize("handler", [None, RichHandler(console=Console(width=200))])
def test_a_line_of_text_controls_no_terminal(monkeypatch, handler):
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.INFO)
    monkeypatch.setenv("ROLLOUT_LOG_FORMAT", "")
    logs.configure_logs(logging.INFO, handler)
    [used] = logging.root.handlers
    record = logging.makeLogRecord({"msg": "the agent answered %s", "args": ("500\n\x1b]0;evil\x07\u202e \u4e2d",)})
    assert used.format(record).endswith("the agent answered 500\n\ufffd]0;evil\ufffd\ufffd \u4e2d")


def test_a_line_is_an_object_with_the_bound_fields(lines):
    fields = {"run": "r1", "step": 3, "rollout": "a"}
    with logs.log_fields(run="r1"):
        with logs.log_fields(step=3, rollout="a"):
            log.warning("lost %d of\n%s", 2, {"x"}, exc_info=ValueError("two\nlines"))
        log.info("later")
    inner, later = lines()
    assert inner.pop("time").endswith("+00:00")
    assert inner.pop("exception") == "ValueError: two\nlines"
    assert inner == {"level": "WARNING", "logger": "test_logs", "message": "lost 2 of\n{'x'}"} | fields
    assert later.keys() == {"time", "level", "logger", "message", "run"}


def test_the_option_selects_json_for_this_process_and_its_children(monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [logging.NullHandler()])
    monkeypatch.setenv("ROLLOUT_LOG_FORMAT", "")
    done = CliRunner().invoke(app, ["--log-json", "ls", "--help"])
    assert done.exit_code == 0, done.output
    assert logs.logs_json()
    assert isinstance(logging.root.handlers[0].formatter, logs.JsonFormatter)


def test_repeated_objects_are_counted_and_those_with_other_fields_are_not(lines):
    logs.configure_logs(logging.INFO, collapse=True)
    [repeats] = logging.root.handlers[0].filters

    def passes(text: str, session: int) -> bool:
        with logs.log_fields(session=session):
            return repeats.filter(logging.makeLogRecord({"name": "a", "msg": text, "created": 1000}))

    assert sum(passes("it cannot be rendered", 1) for _ in range(1000)) == 4
    assert all(passes(f"it cannot be rendered {i}", 1) for i in range(10))
    assert passes("it cannot be rendered", 2)


def test_repeated_lines_are_counted_and_other_ones_are_not():
    repeats, passed = logs.RepeatFilter(), []

    def warn(text: str, *args: object, at: float = 0.0) -> None:
        record = logging.makeLogRecord({"name": "a", "msg": text, "args": args, "created": 1000 + at})
        if repeats.filter(record):
            passed.append(record.getMessage())

    for number in range(120):
        warn("rollout %s: session s%d is lost\nits log: %d", f"t.{number}", number, number)
        warn("rollout %s: S3 fails", f"t.{number // 100}")
    warn("rollout %s: S3 fails", "t.9", at=61)
    ended = [line.partition("\n")[0] for line in passed]
    assert ended[:2] == ["rollout t.0: session s0 is lost", "rollout t.0: S3 fails"]
    assert passed[2].endswith("its log: 9 (the 10th like it)")
    assert ended[3:] == [
        "rollout t.0: S3 fails (the 10th like it)",
        "rollout t.99: session s99 is lost",
        "rollout t.0: S3 fails (the 100th like it)",
        "rollout t.9: S3 fails",
    ]


def test_lines_that_a_slow_or_full_disk_drops_are_counted_and_the_log_names_their_number(monkeypatch):
    written, called, free, named = [], threading.Event(), threading.Event(), threading.Event()

    def write(_: int, line: bytes) -> int:
        called.set()
        assert free.wait(120)
        if b"line 0" in line:
            raise OSError("No space left on device")
        written.append(line.decode().partition(": ")[2])
        if b"dropped" in line:
            named.set()
        return len(line)

    monkeypatch.setattr(logs, "os", SimpleNamespace(write=write, environ=os.environ))
    monkeypatch.setattr(logs, "_LINES_KEPT", 2)
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.INFO)
    monkeypatch.setenv("ROLLOUT_LOG_FORMAT", "")
    logs.configure_logs(logging.INFO, in_thread=True)
    log.info("line 0")
    assert called.wait(120)
    for number in range(1, 10):
        log.info("line %d", number)
    assert logs.dropped_lines() == 7
    free.set()
    assert named.wait(120)
    assert logs.dropped_lines() == 8
    full = "8 lines of this log were dropped: its disk was full or did not answer\n"
    assert written == ["line 1\n", "line 2\n", full]
