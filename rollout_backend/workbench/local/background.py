"""Run a local cloud in the background, for a series of commands: S3, SQS, AgentCore and a scripted model, until
`stop_background_cloud`.

    python -m rollout_backend.workbench.local.background FOLDER

Invariants:

- The state file exists while the cloud is up, and names its process.
- After `stop_background_cloud`, no process of the cloud remains, and after `remove_folder`, no file.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rollout_backend.base.atomic_file import write_file
from rollout_backend.base.child_process import last_lines
from rollout_backend.errors import StartupError
from rollout_backend.run.lease import process_start
from rollout_backend.workbench.local.cloud import LocalCloud
from rollout_backend.workbench.local.scripted import BYTE_MODEL, ScriptedEngine, ScriptedSums

STATE = "cloud.json"
_LOG = "cloud.log"
_START_S, _STOP_S = 120.0, 30.0
_POLL_S = 0.1


@dataclass(frozen=True)
class BackgroundCloud:
    """The addresses of a running cloud. `folder` holds its state and its logs."""

    folder: str
    pid: int
    started: int
    """See `process_start`."""
    region: str
    bucket: str
    role: str
    endpoint_url: str
    runtime_endpoint_url: str
    engine_url: str
    session_logs: str

    def model_settings(self) -> dict[str, object]:
        """Return the settings of a run that uses the scripted model."""
        model = {"path": str(BYTE_MODEL), "name": "scripted", "renderer": "chatml", "context_length": 32_768}
        return {"model": model, "serving": {"kind": "external", "urls": [self.engine_url]}}


def read_background_cloud(folder: Path) -> BackgroundCloud | None:
    """Return the running cloud of this folder, or None."""
    try:
        cloud = BackgroundCloud(**json.loads((folder / STATE).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return cloud if _runs(cloud) else None


def has_ended(folder: Path) -> bool:
    """Return whether the cloud of this folder was killed, or ended with its machine."""
    return (folder / _LOG).is_file() and read_background_cloud(folder) is None


def _runs(cloud: BackgroundCloud) -> bool:
    with contextlib.suppress(ChildProcessError):
        # This reaps the cloud if this process started it.
        os.waitpid(cloud.pid, os.WNOHANG)
    return process_start(cloud.pid) == cloud.started


def start_background_cloud(folder: Path) -> BackgroundCloud:
    """Start a cloud, or return the running one.

    Raises:
        StartupError: the cloud did not start; the message includes the end of its log.
    """
    if (cloud := read_background_cloud(folder)) is not None:
        return cloud
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STATE).unlink(missing_ok=True)
    with (folder / _LOG).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "rollout_backend.workbench.local.background", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        if (cloud := read_background_cloud(folder)) is not None:
            return cloud
        time.sleep(_POLL_S)
    process.terminate()
    tail = "\n".join(last_lines(folder / _LOG, 15))
    raise StartupError(f"the local cloud did not start. Its log, {folder / _LOG}, ends:\n{tail}")


def stop_background_cloud(cloud: BackgroundCloud) -> None:
    """Stop the cloud. Its logs stay until `remove_folder`.

    Raises:
        StartupError: the cloud does not end.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(cloud.pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_S
    while _runs(cloud):
        if time.monotonic() > deadline:
            raise StartupError(f"the local cloud, process {cloud.pid}, has not ended {_STOP_S:g} s after SIGTERM")
        time.sleep(_POLL_S)


def remove_folder(folder: Path) -> None:
    """Delete the folder of a cloud that has ended."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        # This fails if the folder contains anything else.
        folder.parent.rmdir()


async def _serve(folder: Path) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        async with LocalCloud(None, run_dir=folder) as cloud:
            with ScriptedEngine(ScriptedSums()) as engine:
                state = BackgroundCloud(
                    folder=str(folder),
                    pid=os.getpid(),
                    started=process_start(os.getpid()) or 0,
                    region=cloud.storage.region,
                    bucket=cloud.storage.bucket,
                    role=cloud.runtime.role,
                    endpoint_url=cloud.storage.endpoint_url,
                    runtime_endpoint_url=cloud.runtime.endpoint_url,
                    engine_url=engine.url,
                    session_logs=str(cloud.runtime.session_logs),
                )
                write_file(folder / STATE, json.dumps(asdict(state)).encode(), private=True)
                ends = {asyncio.create_task(ended.wait()), asyncio.create_task(cloud.wait_lost())}
                done, pending = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for task in pending:
                    task.cancel()
                # This raises if a part of the cloud was lost.
                done.pop().result()
    finally:
        (folder / STATE).unlink(missing_ok=True)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]).absolute()))
