"""Folders as archives."""

import gzip
import io
import os
import tarfile

import pytest

from agent_wrapper.shared.workspace import MAX_UNPACKED_BYTES, pack_folder, unpack_folder


def archive(*members) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def link(name, target) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    return member


def test_a_folder_comes_back_with_modes_and_empty_folders_and_without_links(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "empty").mkdir(parents=True)
    (source / "run.sh").write_text("true")
    (source / "run.sh").chmod(0o755)
    (source / "link").symlink_to("run.sh")
    (source / "out").symlink_to("/etc/passwd")
    (source / "loop").symlink_to(".")
    (source / "same").hardlink_to(source / "run.sh")
    (source / ("long" * 40 + "\N{SNOWMAN}")).write_text("y")
    (source / "skipped").write_text("x")
    unpack_folder(pack_folder(source, skip={"skipped"}), target)
    content = {path.name: path.read_text() for path in target.iterdir() if path.is_file()}
    assert content == {"run.sh": "true", "link": "true", "same": "true", "long" * 40 + "\N{SNOWMAN}": "y"}
    assert (target / "empty").is_dir()
    assert os.access(target / "run.sh", os.X_OK)
    assert not any(path.is_symlink() for path in target.rglob("*"))


def test_equal_files_give_equal_archives(tmp_path):
    for name, when in (("a", 1), ("b", 1_000_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
        os.utime(tmp_path / name / "file", (when, when))
    one, other = (pack_folder(tmp_path / name, mtime=0) for name in "ab")
    assert one == other
    assert pack_folder(tmp_path / "a") != pack_folder(tmp_path / "b")  # a stale .pyc would match otherwise


def test_what_could_not_be_unpacked_is_not_packed(tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MAX_UNPACKED_BYTES + 1)
    with pytest.raises(ValueError, match="holds more than 1073741824 bytes or 100000 files"):
        pack_folder(tmp_path)


def test_nothing_is_written_outside_the_folder(tmp_path):
    device = tarfile.TarInfo("device")
    device.type = tarfile.CHRTYPE
    hostile = archive(
        (tarfile.TarInfo("../above"), b"x"),
        (link("out", "/etc"), b""),
        (tarfile.TarInfo("out/passwd"), b"x"),
        (link("up", "../.."), b""),
        (device, b""),
        (tarfile.TarInfo("good"), b"x"),
    )
    unpack_folder(hostile, tmp_path / "deep" / "folder")
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if not path.is_dir()}
    assert written == {"deep/folder/good", "deep/folder/out/passwd"}


def test_no_link_of_the_folder_is_followed(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "victim").write_text("before")
    (folder / "file").symlink_to(tmp_path / "victim")
    (folder / "up").symlink_to(tmp_path)
    unpack_folder(archive(*((tarfile.TarInfo(name), b"after") for name in ("file", "up/victim", "up/new"))), folder)
    assert (tmp_path / "victim").read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "victim"]
    assert (folder / "file").read_text() == "after"


def header(name="x", size=0, kind=tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


HOSTILE = {
    "one name many times": header("d", kind=tarfile.DIRTYPE) * 1001,
    "empty files": b"".join(header(str(i)) for i in range(1001)),
    "deep names": b"".join(header(f"{i}/" + "a/" * 400 + "x") for i in range(3)),
    "extended headers without a member": header(kind=tarfile.XHDTYPE) * 1001,
    "bytes": header(size=2_000_000) + bytes(2_000_000),
    "bytes of extended headers": (header(size=60_000, kind=tarfile.GNUTYPE_LONGNAME) + bytes(60_416)) * 20,
    "an extended header of any size": header(size=2**40, kind=tarfile.XHDTYPE),
    "a long name": header(size=1_000_000, kind=tarfile.GNUTYPE_LONGNAME) + b"a" * 1_000_000,
    "a negative size": header(size=-512) * 3,
    "a negative size of an extended header": header(size=-512, kind=tarfile.XHDTYPE) * 3,
    "a sparse file": header(size=0, kind=tarfile.GNUTYPE_SPARSE),
    "records that do not advance": header(size=8192, kind=tarfile.XHDTYPE) + b"1 " * 4096,
    "digits": header(size=32_768, kind=tarfile.XHDTYPE) + b"1" * 32_768,
}


@pytest.mark.parametrize("members", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_archive_is_refused_before_anything_is_written(tmp_path, members):
    with pytest.raises(ValueError, match=r"holds more than|cannot be unpacked"):
        unpack_folder(gzip.compress(members + bytes(1024)), tmp_path, max_bytes=1_000_000, max_entries=1000)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "data", [b"", b"text", pytest.param(archive((tarfile.TarInfo("a"), b"x" * 999))[:60], id="cut")]
)
def test_what_is_no_archive_is_refused(tmp_path, data):
    with pytest.raises(ValueError, match="cannot be unpacked"):
        unpack_folder(data, tmp_path)
