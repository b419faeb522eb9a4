"""The container that runs the payload of one file and exits."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_wrapper.contract import PAYLOAD_VARIABLE, Outcome
from wrapper_containers import AGENT


def start(container: Any, folder: Path, payload: Any) -> subprocess.Popen[bytes]:
    """Start the container's app on a payload. `container` lends its cloud and gateway."""
    path = folder / "payload.json"
    path.write_text(payload if isinstance(payload, str) else json.dumps(payload))
    env = {**os.environ, **container.cloud.env, PAYLOAD_VARIABLE: str(path)}
    with (folder / "log").open("w") as log:
        return subprocess.Popen([sys.executable, str(AGENT), "sync"], env=env, stderr=log)


def test_one_payload_is_run_and_published_by_an_agent_that_may_close_its_output(sync_container, tmp_path):
    block = sync_container.request()
    body = "sys.stdout.close()\nsys.stderr = None\nreturn context.payload['x']"
    process = start(sync_container, tmp_path, {"_rollout": block, "body": body, "x": 0.5})
    rollout = sync_container.await_result(block)
    assert process.wait(120) == 0
    assert (rollout.outcome, rollout.reward) == (Outcome.COMPLETED, 0.5)


@pytest.mark.slow
def test_sigterm_publishes_the_rollout_as_a_failure(sync_container, make_signal, tmp_path):
    block, started = sync_container.request(), make_signal()
    body = "open(context.payload['started'], 'w').write('!')\ntime.sleep(600)"
    process = start(sync_container, tmp_path, {"_rollout": block, "body": body, "started": started.path})
    started.wait()
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0
    rollout = sync_container.await_result(block)
    assert (rollout.outcome, rollout.failure.reason) == (Outcome.INFRA_ERROR, "terminated")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ("{", "EOF while parsing"),
        ([], "it is not a JSON object"),
        ({"_rollout": {"run_id": "r"}}, "_rollout.step"),
    ],
)
def test_a_file_without_a_rollout_is_refused(sync_container, tmp_path, payload, message):
    process = start(sync_container, tmp_path, payload)
    assert process.wait(120) == 1
    errors = (tmp_path / "log").read_text()
    assert "payload.json holds no rollout to run" in errors
    assert message in errors


@pytest.mark.slow
def test_an_unpublished_rollout_exits_with_1(sync_container, dead_url, tmp_path):
    urls = {"result": f"{dead_url}/r", "failure_marker": f"{dead_url}/f", "artifacts": f"{dead_url}/a"}
    block = sync_container.request(result__urls=urls, remaining_s=4, publish_grace_s=1)
    process = start(sync_container, tmp_path, {"_rollout": block, "body": "return 1"})
    assert process.wait(120) == 1
    assert "is lost: cannot write" in (tmp_path / "log").read_text()
