"""Check whether a session is open, and stop it, from any process on this machine.

Invariant: a session is identified by the pipe that its supervisor holds open, not by its process id, which may be
reused.
"""

import errno
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SESSION_ID = re.compile(r"[A-Za-z0-9._-]{1,200}")
_POLL_S = 0.05
# Time for a killed process to exit.
KILL_S = 10.0


def pipe_of(folder: Path, session_id: str) -> Path:
    """Return the path of the pipe that stops a session."""
    return folder / f"{session_id}.stop"


def send_stop(pipe: Path) -> bool:
    """Make the supervisor end its session. Return False if the session does not exist.

    Raises:
        OSError: the pipe cannot be written.
    """
    try:
        writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno != errno.ENXIO:
            # The pipe has a reader. ENXIO means that the supervisor was killed.
            raise
        pipe.unlink(missing_ok=True)
        return False
    try:
        os.write(writer, b".")
    except (BrokenPipeError, BlockingIOError):
        # The session just ended, or was stopped 65,536 times.
        pass
    finally:
        os.close(writer)
    return True


def open_sessions(folder: Path) -> list[str]:
    """Return the open sessions in a folder."""
    return [pipe.stem for pipe in folder.glob("*.stop") if is_open(pipe)]


def is_open(pipe: Path) -> bool:
    """Return whether the session of this pipe is open."""
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def stop_all(folder: Path) -> None:
    """Make every session in a folder end."""
    for pipe in folder.glob("*.stop"):
        send_stop(pipe)


def session_stopper(options: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return a function that stops one session and returns False if it did not exist. See `CleanupSpec`."""
    folder, wait_s = Path(options["folder"]), float(options["grace_s"]) + KILL_S

    def stop(session_id: str) -> bool:
        pipe = pipe_of(folder, session_id)
        if not SESSION_ID.fullmatch(session_id) or not send_stop(pipe):
            return False
        end = time.monotonic() + wait_s
        while send_stop(pipe):
            if time.monotonic() > end:
                raise TimeoutError(f"it has not ended within {wait_s:g} s")
            time.sleep(_POLL_S)
        return True

    return stop
