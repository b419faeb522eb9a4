"""Fork one fresh process per session from an interpreter that has imported the agent's libraries.

Importing an agent's libraries costs about a second of CPU; a fork after the import costs a few milliseconds.

Invariants:

- The agent's own files are never imported in this process. Each session runs them from the first line, as `__main__`.
- Each session is a separate process, leads a separate process group, and ends with this process.
- A module that cannot be preloaded is left to the session, which reports the error as it would without preloading.
- Modules of the standard library and of installed packages that the first session imports are also imported here for
  later sessions, if a trial process shows that the import starts no thread. A session of examples/tool_agent then
  takes 0.13 s of CPU instead of 0.92 s.

It runs as a program, by path, with the agent's interpreter, so it imports only the standard library. It does not use
`multiprocessing.forkserver`, which needs the same Python version and this package on both sides, cannot import
further modules once it serves, and does not refuse to fork after a preloaded library has started threads.

    stdin:  {"script": PATH, "preload": [MODULE, ...]}, then {"id": ID, "env": {...}, "log": PATH} for each session
    stdout: {"ready": true} or {"ready": false, "why": ...},
            then {"id": ID, "pid": PID} for each start and {"pid": PID, "code": CODE} for each end
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Any

# Modules that libraries import on first use, and that every agent needs.
DEFERRED = {
    "agent_wrapper": ("boto3", "httpx", "uvicorn", "uvicorn.protocols.http.h11_impl", "uvicorn.lifespan.on"),
    "boto3": ("boto3.s3.inject", "botocore.signers", "s3transfer.manager"),
    "openai": ("openai.resources.chat.completions", "openai.resources.responses", "openai.types.chat"),
}

SNAPSHOT = "ROLLOUT_LOCAL_SNAPSHOT"
"""Environment variable with which sessions start as if they woke from a snapshot, as on platform V2.

They have its state of `random` and numpy, and for this many seconds its time."""
_SNAPSHOT_AGE_S = 3600.0
_REPORT_S = 30.0
"""Seconds for which the first session reports its imports."""
_REPORT_INTERVAL_S = 0.2


def imported_by(script: Path) -> list[str]:
    """Return the modules that a script imports at its top level, except those in its folder; [] if broken."""
    try:
        tree = ast.parse(script.read_bytes())
    except (SyntaxError, ValueError, OSError):
        # The session reports the error.
        return []
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    own = {path.stem for path in script.parent.iterdir()}
    return [name for name in names if name.split(".")[0] not in own]


def preload(script: Path, modules: list[str]) -> None:
    names = [*imported_by(script), *modules]
    for name in names:
        # The session repeats the import and fails with a traceback.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
        names += [deferred for deferred in DEFERRED.get(name.split(".")[0], ()) if deferred not in names]
    # Otherwise each session would load the models that it needs to publish, which takes as long as an import.
    if "agent_wrapper" in sys.modules:
        # An agent's own environment may lack boto3, which only a session that publishes needs.
        with contextlib.suppress(Exception):
            importlib.import_module("agent_wrapper.publish").preload_models()


def serve() -> tuple[Path, dict[str, str]]:
    """Fork until stdin ends. Return only in a session's process, with the script to run and its environment."""
    lines = _Lines(sys.stdin.fileno())
    order = json.loads(lines.wait())
    script = Path(order["script"])
    sys.path[0] = str(script.parent)
    preload(script, order["preload"])
    # A lock that another thread holds would stay locked in the child.
    if threading.active_count() > 1:
        _write_message({"ready": False, "why": "a preloaded library runs threads, which do not survive a fork"})
        sys.exit(0)
    gc.collect()
    # Garbage collection in a child must not copy pages.
    gc.freeze()
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _write_message({"ready": True})
    drawn = random.getstate()
    # numpy creates its generator at the first access.
    getattr(sys.modules.get("numpy"), "random", None)
    sessions: set[int] = set()
    report_to: int | None
    reports, report_to = os.pipe()
    reported, waits_on = _Lines(reports), [lines.fd, awake, reports]
    while True:
        readable, _, _ = select.select(waits_on, [], [])
        if awake in readable:
            os.read(awake, 4096)
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    sessions.discard(ended[0])
                    _write_message({"pid": ended[0], "code": os.waitstatus_to_exitcode(ended[1])})
        if lines.fd in readable:
            for line in lines.read():
                order = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    for fd in (awake, wake, reports):
                        os.close(fd)
                    _start_session(order["log"], drawn if SNAPSHOT in os.environ else None)
                    if report_to is not None:
                        threading.Thread(
                            target=_report_imports, args=(report_to, set(sys.modules)), daemon=True
                        ).start()
                    return script, order["env"]
                sessions.add(pid)
                _write_message({"id": order["id"], "pid": pid})
                # Only the first session reports its imports.
                if report_to is not None:
                    os.close(report_to)
                    report_to = None
        if reports in readable:
            for line in reported.read():
                _import_safely(json.loads(line))
            if reported.ended:
                waits_on.remove(reports)
        if lines.ended:
            for pid in sessions:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGTERM)
            sys.exit(0)


def _start_session(log: str, drawn: tuple[Any, ...] | None) -> None:
    """Prepare a session's process. `drawn` is the state of `random` that it shares with the others."""
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG (1) sends SIGTERM when the parent process ends.
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for fd, place in ((null, 0), (out, 1), (out, 2)):
        os.dup2(fd, place)
    os.close(null)
    os.close(out)
    gc.unfreeze()
    # `random` reseeds itself after a fork; numpy would draw the same in every session.
    if drawn is not None:
        random.setstate(drawn)
        _keep_time_of_snapshot()
    elif "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _keep_time_of_snapshot() -> None:
    """Let `time.time` return the snapshot's time at first. Signatures of AWS's clients have the right time."""
    right, set_at = time.time, time.monotonic() + float(os.environ[SNAPSHOT])
    time.time = lambda: right() - (_SNAPSHOT_AGE_S if time.monotonic() < set_at else 0.0)


def _report_imports(fd: int, known: set[str]) -> None:
    """Report, from the first session, the modules that it imports."""
    installed = {str(Path(sysconfig.get_path(kind)).resolve()) for kind in ("stdlib", "purelib", "platlib")}
    end = time.monotonic() + _REPORT_S
    with contextlib.suppress(BrokenPipeError):
        while time.monotonic() < end:
            time.sleep(_REPORT_INTERVAL_S)
            new = [name for name in list(sys.modules) if name not in known]
            known.update(new)
            if names := [name for name in new if _is_installed(name, installed)]:
                os.write(fd, json.dumps(names).encode() + b"\n")
    os.close(fd)


def _is_installed(name: str, folders: set[str]) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    origin = Path(spec.origin or "") if spec else Path()
    return spec is not None and spec.name == name and any(str(parent) in folders for parent in origin.parents)


def _import_safely(names: list[str]) -> None:
    """Import the modules if a trial process shows that this starts no thread."""
    trial = os.fork()
    if trial == 0:
        _import(names)
        os._exit(threading.active_count() > 1)
    if os.waitpid(trial, 0)[1] == 0:
        _import(names)
        gc.collect()
        gc.freeze()


def _import(names: list[str]) -> None:
    for name in names:
        # A session repeats the import and fails with a traceback.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _write_message(message: dict[str, object]) -> None:
    os.write(_STDOUT, json.dumps(message).encode() + b"\n")


class _Lines:
    """Reads whole lines from a descriptor that is also passed to `select`, so no input may stay hidden."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.ended = False
        self._rest = b""

    def read(self) -> list[bytes]:
        data = os.read(self.fd, 65536)
        self.ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines

    def wait(self) -> bytes:
        while not (lines := self.read()):
            if self.ended:
                sys.exit(0)
        if len(lines) > 1:
            raise ValueError("a second order came before the first was answered")
        return lines[0]


if __name__ == "__main__":
    # Redirect the output of imports to the log, away from the messages.
    _STDOUT = os.dup(1)
    os.dup2(2, 1)
    agent, env = serve()
    os.close(_STDOUT)
    os.environ.update(env)
    sys.argv = [str(agent)]
    runpy.run_path(str(agent), run_name="__main__")
