"""Write a file completely or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_file(path: Path, data: bytes, *, private: bool = False, keep: bool = False) -> None:
    """Replace a file atomically, and create its folder if needed.

    With `private` only the owner may read it. With `keep` an existing file stays: the first of several writers wins.

    Raises:
        OSError: the file could not be written; its previous content is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        if keep:
            with contextlib.suppress(FileExistsError):
                os.link(part, path)
        else:
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)
