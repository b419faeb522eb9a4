"""Containers of the Kubernetes emulator with files of their own."""

from __future__ import annotations

import os

import pytest

from tests.emulators.kubernetes_images import FolderImage, can_make_containers, termination_file

pytestmark = pytest.mark.skipif(not can_make_containers(), reason="the kernel lets this user make no mount namespace")


async def test_a_container_has_its_own_files_and_volumes(tmp_path):
    image, volume, log = tmp_path / "image", tmp_path / "volume", tmp_path / "job.log"
    (image / "task-files").mkdir(parents=True)
    volume.mkdir()
    (image / "task-files" / "solve.py").write_text("print(1)")
    script = "pwd; ls; echo x > new; echo y > /input/new; ls /tests; echo why > /dev/termination-log; echo $NAME"
    container = {"command": ["sh", "-c", script]}
    env = {"PATH": os.environ["PATH"], "NAME": "image's"}
    process = await FolderImage(image, env, "/task-files").start(
        container, {"NAME": "pod's"}, {"/input": volume}, log
    )
    await process.wait()
    assert log.read_text().splitlines() == ["/task-files", "solve.py", "pod's"]
    assert termination_file(log).read_text() == "why\n"
    assert [path.name for path in volume.iterdir()] == ["new"]
    assert [path.name for path in (image / "task-files").iterdir()] == ["solve.py"]


async def test_a_folder_of_this_machine_is_no_working_directory(tmp_path):
    (tmp_path / "image").mkdir()
    image = FolderImage(tmp_path / "image", {})
    with pytest.raises(ValueError, match="the image has no folder /usr"):
        await image.start({"command": ["true"], "workingDir": "/usr/bin"}, {}, {}, tmp_path / "job.log")
