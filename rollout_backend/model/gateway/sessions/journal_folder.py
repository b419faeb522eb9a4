"""Prepare the folder of a gateway's journal, and read its port.

    FOLDER/journal_id         names this journal; a key is valid for the journal that its session started in
    FOLDER/lock               held by the gateway that writes here
    FOLDER/port               the port of the last gateway

The trainer's process uses this module. It does not import `journal`, whose imports take half a second.
"""

import fcntl
import os
import secrets
import stat
import time
from pathlib import Path
from typing import Any

from rollout_backend.base.atomic_file import write_file
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.errors import ConfigError
from rollout_backend.model.model_call import session_lost

_PARTS = ("sessions", "closed", "journal_id")
# The previous gateway may need this long to send its last answers and exit.
_WAIT_S = 15.0
OPEN_FILES = 512


class JournalHeld(ConfigError):
    """Another gateway holds the journal."""


def check_journal(claims: SessionClaims, journal_id: str) -> None:
    """Raise ApiError (410) for a session of another journal, because this one lacks its earlier turns."""
    if claims.is_recorded and claims.journal_id != journal_id:
        raise session_lost()


def prepare(folder: Path, wait_s: float = _WAIT_S) -> str:
    """Create the folder if it does not exist, wait until no gateway holds it, and return its journal_id.

    Raises:
        ConfigError: the folder cannot be used, other users can read it, or a gateway still holds it.
    """
    try:
        for each in (folder.parent, folder):
            each.mkdir(parents=True, exist_ok=True, mode=0o700)
        with lock(folder, wait_s):
            # The folder is new, or incomplete and therefore lost.
            if not all((folder / each).exists() for each in _PARTS):
                (folder / "sessions").mkdir(exist_ok=True, mode=0o700)
                write_file(folder / "closed", b"", private=True)
                write_file(folder / "journal_id", secrets.token_hex(8).encode(), private=True)
            return (folder / "journal_id").read_text()
    except OSError as error:
        raise ConfigError(f"the gateway's journal cannot be kept in {folder}: {error.strerror}") from None


def read_port(folder: Path) -> int:
    """Return the port of the folder's last gateway; 0 if unknown."""
    try:
        return int((folder / "port").read_text())
    except (OSError, ValueError):
        return 0


def write_port(folder: Path, port: int) -> None:
    write_file(folder / "port", str(port).encode(), private=True)


def lock(folder: Path, wait_s: float) -> Any:
    """Lock the folder. The lock is held while the returned file is open.

    Raises:
        ConfigError: another process holds it, or other users can read the folder.
    """
    found = folder.stat()
    if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid != os.getuid():
        raise ConfigError(f"other users can read the gateway's journal {folder}: chmod 700 it, or delete it")
    file = os.fdopen(os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "wb")
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                file.close()
                raise JournalHeld(
                    f"another gateway uses {folder}: does this run already run elsewhere? Give it another run_id"
                ) from None
            time.sleep(0.05)
        else:
            return file
