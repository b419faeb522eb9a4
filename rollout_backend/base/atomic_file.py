"""Write a file completely or not at all."""

import contextlib
import os
import secrets
from pathlib import Path

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def write_file(path: Path, data: bytes, *, private: bool = False, keep: bool = False) -> None:
    """Replace a file atomically, and create its folder if needed.

    With `private` only the owner may read it. With `keep` an existing file stays: the first of several writers wins.

    Raises:
        OSError: the file could not be written; its previous content is unchanged.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    mode = 0o600 if private else 0o666
    try:
        descriptor = os.open(part, _NEW, mode)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(part, _NEW, mode)
    try:
        # Opening a buffered file would also query its type.
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
        if not keep:
            part.replace(path)
            return
        with contextlib.suppress(FileExistsError):
            os.link(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    part.unlink(missing_ok=True)
