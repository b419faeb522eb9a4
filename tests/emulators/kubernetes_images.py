"""Images of the Kubernetes emulator that are folders: each container has its own files under the image's paths.

A container's root holds a copy of the folder, its volumes, and this machine's other files, of which only /tmp can be
written. It is a mount namespace, which needs Linux and the right to make one. Processes, network and users are this
machine's.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rollout_backend.model.serving.server_process import ServerProcess

_OWN = ("dev", "tests", "logs")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_ENTER = 'cd "$1" && shift && exec "$@"'


def termination_file(log: Path) -> Path:
    """Return the file that is /dev/termination-log in the container with this log."""
    return log.with_suffix(".termination")


@cache
def can_make_containers() -> bool:
    """Return whether this machine can run a `FolderImage`."""
    try:
        return subprocess.run([*_unshare(), "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


class FolderImage:
    """A spawner of containers whose root has the files of a folder, such as `app/solve.py` for /app/solve.py."""

    def __init__(self, files: Path, env: Mapping[str, str], workdir: str = "/") -> None:
        """`env` is the image's environment, and `workdir` the working directory that it names."""
        self._files = files
        self._env = dict(env)
        self._workdir = workdir

    async def spawn(self, name: str, env: Mapping[str, str], log: Path) -> ServerProcess:
        raise NotImplementedError("a container of this image needs a command")

    async def start(
        self, container: Mapping[str, Any], env: Mapping[str, str], mounts: Mapping[str, Path], log: Path
    ) -> ServerProcess:
        """Start a container of a pod. `mounts` are the folders of its volumes by path.

        Raises:
            StartupError: `unshare` cannot be executed.
        """
        workdir = container.get("workingDir", self._workdir)
        script = self._make_root(log.with_suffix(".root"), mounts, termination_file(log), workdir)
        argv = [*_unshare(), "sh", "-ec", script, "sh", workdir, *container["command"]]
        process = ServerProcess(f"container {log.stem}", argv, log, {**self._env, **env})
        await process.start()
        return process

    async def close(self) -> None: ...

    def _make_root(self, root: Path, mounts: Mapping[str, Path], message: Path, workdir: str) -> str:
        """Create a container's root. Return the script that mounts its files and enters it."""
        shutil.copytree(self._files, root, symlinks=True)
        own = {*_OWN, *(each.name for each in self._files.iterdir()), *(Path(each).parts[1] for each in mounts)}
        if workdir != "/" and Path(workdir).parts[1] not in own:  # it would be this machine's
            raise ValueError(f"the image has no folder {workdir}")
        lines = []
        for entry in Path("/").iterdir():
            if entry.name in own:
                continue
            target = root / entry.name
            if entry.is_symlink():
                target.symlink_to(os.readlink(entry))
            elif entry.is_dir():
                target.mkdir()
                lines.append(f"mount --rbind {entry} {shlex.quote(str(target))}")
                if entry.name not in ("proc", "tmp"):
                    lines.append(f"mount -o remount,bind,ro {shlex.quote(str(target))} || true")
        for name in _OWN:
            (root / name).mkdir(exist_ok=True)
        message.touch()
        files = {root / "dev" / name: Path("/dev", name) for name in _DEVICES}
        for target, source in {**files, root / "dev" / "termination-log": message}.items():
            target.touch()
            lines.append(f"mount --bind {shlex.quote(str(source))} {shlex.quote(str(target))}")
        for path, folder in mounts.items():
            target = root / path.lstrip("/")
            target.mkdir(parents=True, exist_ok=True)
            lines.append(f"mount --bind {shlex.quote(str(folder))} {shlex.quote(str(target))}")
        lines.append(f'exec chroot {shlex.quote(str(root))} sh -c {shlex.quote(_ENTER)} sh "$@"')
        return "\n".join(lines)


def _unshare() -> list[str]:
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", "--mount", *as_root]
