"""Run the tests of a Harbor task on an agent's workspace, in a container of the task's image: `python -m
agent_wrapper.verifier FOLDER`.

FOLDER holds `verifier.json`, a `VerifierOrder`, and `tests.tar.gz`. The agent's workspace replaces the content of the
working directory, and the tests run there. Their reward, or the reason why there is none, is written to the
container's termination message.

Invariants:

- Without a reward the exit code is 1, so that a failure is never taken for a reward of 0.
- Nothing is imported from the workspace: run this module with Python's option -I.
"""

import json
import os
import shutil
import sys
from pathlib import Path

from agent_wrapper.contract import ContractError, unpack_artifacts
from agent_wrapper.contract.messages import ORDER, TESTS, VerifierOrder
from agent_wrapper.publish import PublishError, Refused, download
from agent_wrapper.shared.harbor_tests import TestsFailed, read_reward, run_tests
from agent_wrapper.shared.workspace import WORKSPACE, unpack_folder

MAX_MESSAGE_BYTES = 4096
"""Size limit of a termination message."""
_DOWNLOAD_S = 120.0


def main(folder: Path, *, root: Path = Path("/"), message: Path = Path("/dev/termination-log")) -> int:
    """Run the tests, write the message, and return the exit code. `root` holds /tests and /logs."""
    try:
        text = json.dumps(_score(folder, root), allow_nan=False)
        code = 0
        if len(text.encode()) > MAX_MESSAGE_BYTES:
            raise TestsFailed(f"reward.json has more than {MAX_MESSAGE_BYTES} bytes, which a pod cannot report")
    except (TestsFailed, ContractError, PublishError, Refused, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        text = str(error)
        code = 1
    message.write_bytes(text.encode(errors="replace")[:MAX_MESSAGE_BYTES])
    return code


def _score(folder: Path, root: Path) -> dict[str, object]:
    order = VerifierOrder.parse(json.loads((folder / ORDER).read_bytes()))
    files = unpack_artifacts(download(order.artifacts_url, _DOWNLOAD_S), order.artifacts)
    if WORKSPACE not in files:
        raise TestsFailed(f"the agent has published no artifact {WORKSPACE!r}: run it with --workspace")
    if Path.cwd() == Path("/"):
        raise TestsFailed("the image's working directory is /: set WORKDIR in the Dockerfile, or environment.workdir")
    _clear(Path.cwd())
    unpack_folder(files[WORKSPACE], Path.cwd())
    tests, logs = root / "tests", root / "logs" / "verifier"
    for each in (tests, logs):
        each.mkdir(parents=True, exist_ok=True)
        _clear(each)
    unpack_folder((folder / TESTS).read_bytes(), tests)
    output = logs / "test-stdout.txt"
    try:
        ended = run_tests(
            tests / "test.sh",
            cwd=Path.cwd(),
            environ=os.environ | order.env,
            output=output,
            timeout_s=order.timeout_s,
        )
    finally:
        if output.exists():
            # Copy the output into the container's log.
            with output.open("rb") as file:
                shutil.copyfileobj(file, sys.stdout.buffer)
            sys.stdout.buffer.flush()
    return read_reward(logs, ended)


def _clear(folder: Path) -> None:
    for each in folder.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        else:
            each.unlink()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
