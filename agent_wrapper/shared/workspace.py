"""Pack and unpack folders: the files that a task begins with, and the workspace that its agent leaves.

Invariants:

- Unpacking writes nothing outside the folder, and creates only plain files and folders. Links, devices and names that
  lead out of the folder are skipped.
- The numbers of entries and bytes are checked against limits before anything is written, in linear time.

This module parses archives itself, because tarfile is unsafe on Pythons in use: its filter can be evaded before
3.11.13, 3.12.11 and 3.13.4 (CVE-2025-4517), negative sizes make it loop (CVE-2025-8194), and its header patterns
backtrack (CVE-2024-6232).
"""

import gzip
import io
import tarfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

WORKSPACE = "workspace.tar.gz"
"""Name of the artifact that holds an agent's workspace."""
MAX_UNPACKED_BYTES = 1024**3
MAX_ENTRIES = 100_000
"""Maximum number of files and folders in an archive."""
_MAX_NAME = 1024
# An extended header holds a long name.
_MAX_HEADER_BYTES = 64 * 1024
_BLOCK = 512
_EXTENSIONS = frozenset(
    {tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK}
)


def pack_folder(folder: Path, *, skip: Collection[str] = (), mtime: int | None = None) -> bytes:
    """Return a folder as a .tar.gz, without the paths in `skip`. With `mtime`, equal files give equal bytes.

    A link to a file inside the folder becomes a copy of that file. Other links are left out.

    Raises:
        OSError: a file cannot be read.
        ValueError: it exceeds the limits of `unpack_folder`.
    """
    root = folder.resolve()

    def normalized(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mtime = int(member.mtime) if mtime is None else mtime
        return member

    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", dereference=True) as archive,
    ):
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            is_packed = not path.is_symlink() or (path.is_file() and path.resolve().is_relative_to(root))
            if is_packed and name not in skip:
                after = archive.offset + path.stat().st_size
                if after > MAX_UNPACKED_BYTES or len(archive.getmembers()) == MAX_ENTRIES:
                    raise ValueError(f"{folder} holds more than {MAX_UNPACKED_BYTES} bytes or {MAX_ENTRIES} files")
                archive.add(path, name, recursive=False, filter=normalized)
    return packed.getvalue()


def unpack_folder(
    data: bytes, folder: Path, *, max_bytes: int = MAX_UNPACKED_BYTES, max_entries: int = MAX_ENTRIES
) -> None:
    """Unpack a .tar.gz into a folder.

    Raises:
        ValueError: the data is no archive, or exceeds `max_bytes` or `max_entries`. Nothing was written.
    """
    try:
        for _ in _members(data, max_bytes, max_entries):
            pass
        folder.mkdir(parents=True, exist_ok=True)
        root = folder.resolve()
        for member, path, content in _members(data, max_bytes, max_entries):
            _write(member, root / path, content, root)
    except (tarfile.TarError, EOFError, OSError, zlib.error, RecursionError) as error:
        raise ValueError(f"the archive cannot be unpacked: {error}") from None


def _members(
    data: bytes, max_bytes: int, max_entries: int
) -> Iterator[tuple[tarfile.TarInfo, PurePosixPath, gzip.GzipFile]]:
    """Yield each file and folder of an archive with its path, and the archive positioned at the start of its content.

    Raises:
        ValueError: a limit is exceeded.
        tarfile.TarError: the data is not an archive.
    """
    size = entries = 0
    seen = {"."}
    extended: dict[bytes, bytes] = {}
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as archive:
        while (header := archive.read(_BLOCK)).strip(b"\0") or not entries:
            member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
            entries += 1
            long = member.type in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME)
            if not long:
                member.size = int(extended.get(b"size", member.size))
                member.name = extended.get(b"path", member.name.encode("utf-8", "surrogateescape")).decode(
                    "utf-8", "surrogateescape"
                )
            has_content = member.isreg() or member.type not in tarfile.SUPPORTED_TYPES or member.type in _EXTENSIONS
            here = archive.tell()
            there = here + (-(-member.size // _BLOCK) * _BLOCK if has_content else 0)
            size += there - here
            path = PurePosixPath(member.name.lstrip("/"))
            if member.size < 0 or member.type == tarfile.GNUTYPE_SPARSE or len(member.name) > _MAX_NAME:
                raise tarfile.ReadError("it has a member that no workspace has")
            for parent in path.parents:
                if str(parent) in seen:
                    break
                seen.add(str(parent))
                entries += 1
            if size > max_bytes:
                raise ValueError(f"the archive holds more than {max_bytes} bytes")
            if entries > max_entries:
                raise ValueError(f"the archive holds more than {max_entries} files and folders")
            if long:
                if member.size > _MAX_HEADER_BYTES:
                    raise tarfile.ReadError("it has a member with a very long header")
                text = archive.read(member.size)
                extended |= _records(text) if member.type == tarfile.XHDTYPE else {b"path": text.rstrip(b"\0")}
            else:
                extended = {}
                if (member.isreg() or member.isdir()) and path.parts and ".." not in path.parts:
                    yield member, path, archive
            if archive.seek(there) != there:
                raise tarfile.ReadError("it is cut short")


def _records(text: bytes) -> dict[bytes, bytes]:
    """Return the fields of an extended header: `LENGTH NAME=VALUE` lines."""
    found, at = {}, 0
    while at < len(text) and text[at]:
        length, _, _ = text[at : at + 20].partition(b" ")
        if not length.isdigit() or not len(length) < int(length) <= len(text) - at:
            raise tarfile.ReadError("it has a malformed header")
        name, _, value = text[at + len(length) + 1 : at + int(length) - 1].partition(b"=")
        found[name] = value
        at += int(length)
    return found


def _write(member: tarfile.TarInfo, path: Path, content: gzip.GzipFile, root: Path) -> None:
    if not path.parent.resolve().is_relative_to(root):
        # The folder already contained a link here.
        return
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        left = member.size
        while left:
            piece = content.read(min(left, 1024 * 1024))
            if not piece:
                raise tarfile.ReadError("it is cut short")
            left -= file.write(piece)
    path.chmod(member.mode & 0o755 | 0o600)
