"""A run's folder: it can be resumed, reproduced and shared."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from itsdangerous.encoding import base64_decode

from agent_wrapper.contract import Rollout
from builders import refused, run_config, until
from rollout_backend.core.harbor import CONTAINER_FIELD
from rollout_backend.core.tasks import Task
from rollout_backend.run.accounts.archive import RunArchive
from rollout_backend.run.accounts.run_info import RunStart, StartedBy
from rollout_backend.workbench.local.agentcore_emulator import ROLE
from rollout_backend.workbench.local.scripted import ScriptedEngine
from tests.emulators.ecr_emulator import REGISTRY

AWS_KEY = "aws-secret-access-key-of-the-trainer"
SIGNED = re.compile(rb"eyJ[\w-]+(?=\.[\w-]{43})")  # claims with their signature


def texts_of(folder: Path) -> dict[Path, bytes]:
    """Return the content of every file; results are compressed."""
    texts = {}
    for path in folder.rglob("*"):
        if path.is_file():
            try:
                texts[path] = path.read_bytes()
            except FileNotFoundError:  # the journal of a session that has just ended
                continue
            if path.parent.parent.name == "rollouts":
                texts[path] = Rollout.decode(texts[path]).model_dump_json().encode()
    return texts


def assert_shareable(folder: Path, *secrets: str) -> None:
    for path, text in texts_of(folder).items():
        for secret in secrets:
            assert secret.encode() not in text, f"{path} contains {secret}"
        for claims in SIGNED.findall(text):  # seals may be there, and have no end
            assert b"expires_at" not in base64_decode(claims), f"{path} contains a session key"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_is_resumed_from_its_folder_which_can_be_shared(
    rollout, settings, agent_server, here, monkeypatch, run_id, number
):
    """A killed run's agents still run. They are not started again."""
    killed = number == signal.SIGKILL
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", AWS_KEY)
    payloads = [{"question": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(3)]
    rows = [{"task_id": f"sum-{i}", "payload": payload} for i, payload in enumerate(payloads)]
    tasks = here / "tasks.jsonl"
    tasks.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    go = threading.Event()

    def reply(prompt: str) -> str:
        if "What is 2" in prompt:
            go.wait(600)
        return "1"

    folder = here / "runs" / run_id
    with ScriptedEngine(reply) as engine:
        serving = {"kind": "external", "urls": [engine.url]}
        runtime = {"kind": "http", "url": agent_server}
        config = settings(runtime=runtime, serving=serving, queue={"wait_s": 1}, run_id=run_id, output_dir="runs")
        argv = [sys.executable, "-m", "rollout_backend", "run", str(config), "--tasks", str(tasks)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                until(lambda: len([*folder.glob("rollouts/*/sum-*")]) == 2 or process.poll() is not None)
                secrets = AWS_KEY, (here / "runs" / ".secrets" / run_id).read_text()
                assert_shareable(folder, *secrets)
                os.kill(process.pid, number)
                output = process.communicate(timeout=240)[0]
            finally:
                process.kill()
                go.set()
        if not killed:
            assert process.returncode == 130, output
            assert "2 of 3 rollouts have a result (2 completed, 1 cancelled)" in output
            assert f"resume it with: rollout run --resume {run_id}\n" in output
            code, output = rollout("show", "sum-2.0")
            assert code == 0, output
            for part in ("cancelled, no result was stored", "aborted", "the step was cancelled from outside"):
                assert part in output
        assert RunArchive(folder).read_info().starts[0].current_state(0.0) == ("killed" if killed else "interrupted")

        tasks.unlink()
        asked = len(engine.requests)
        code, output = rollout("run", "--resume", run_id)
        assert code == 0, output
        words = (
            "it reconciles (each rollout ended once); 0 sessions open",
            "3 of 3 rollouts completed",
            "2 of 3 rollouts finished in an",
        )
        assert all(part in output for part in words), output
        assert len(engine.requests) == asked + 1
    report = json.loads((folder / "steps" / "00000000.json").read_text())
    assert (report["planned"], report["resumed"], report["reattached"]) == (3, 2, int(killed))
    assert_shareable(folder, *secrets)

    first, second = json.loads((folder / "run.json").read_text())["starts"]
    assert (second["state"], second["by"], first["versions"]) == ("ended", "run", second["versions"])
    assert {"python", "rollout-backend", "renderers"} <= second["versions"].keys()
    assert second["versions"]["engine"] == "scripted"
    assert second["agent"] == {"url": agent_server}
    kept = yaml.safe_load((folder / "config.yaml").read_text())
    assert (kept["run_id"], kept["runtime"]["url"], kept["timeouts"]["agent_s"]) == (run_id, agent_server, 1800.0)
    lines = (folder / "steps" / "00000000.tasks.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows


def started(here: Path, run_id: str, by: StartedBy, tasks: Sequence[Task] = (Task("a", {}),), **sections) -> Path:
    """Write the folder of a run as its manager leaves it."""
    config = run_config(run_id=run_id, output_dir=here / "runs", **sections)
    archive = RunArchive(config.run_dir)
    archive.write_start(config, RunStart.of(config, by, {}, None))
    archive.write_tasks(0, tasks)
    archive.close()
    return config.run_dir


@pytest.mark.parametrize(
    ("by", "words"),
    [("demo", "whose S3 ended with it"), ("verl", "start the trainer again"), ("python", "same run_id")],
)
def test_a_run_that_something_else_started_is_not_resumed(rollout, here, by, words):
    started(here, "other", by)
    refused(rollout("run", "--resume", "other"), words)


def test_a_run_that_cannot_be_resumed_is_refused(rollout, settings, tasks, here):
    (here / "runs" / "empty").mkdir(parents=True)
    started(here, "named", "run").rename(here / "runs" / "renamed")
    for arguments, words in (
        (["--resume", "none"], "there is no run 'none'"),
        (["--resume", "empty"], "it holds no tasks, so nothing was started"),
        (["--resume", "renamed"], "it holds run 'named'; rename it to that"),
        (["--resume", "empty", "--tasks", tasks], "leave out CONFIG, --tasks, --limit, --stack and --local"),
        ([settings()], "name the settings or --stack, and --tasks, or a run to --resume"),
    ):
        refused(rollout("run", *arguments), words)


@pytest.mark.parametrize("name", ["unfit", ".", "../latest"])
def test_a_task_that_has_become_unfit_stays_in_a_resumed_run(rollout, here, monkeypatch, name):
    image = f"{REGISTRY}/agent:1"
    runtime = {"kind": "agentcore", "image": image, "role": ROLE, "endpoint_url": "http://127.0.0.1:9"}
    tasks = [Task("a", {}), Task("odd", {CONTAINER_FIELD: 5})]
    folder = started(here, "unfit", "run", tasks, runtime=runtime, group={"size": 2})
    if name != "unfit":
        (here / "runs" / "latest").symlink_to("unfit")
        monkeypatch.chdir(folder)
    code, output = rollout("run", "--resume", name, "--min-completed", 5)
    assert code == 2
    assert "task 'odd' cannot run" in output
    assert "--min-completed=5 is more than the 4 rollouts that the run plans" in output


def test_secrets_are_not_kept_and_must_be_set_again_to_resume(rollout, here, monkeypatch):
    relay = {"url": "wss://relay.example.com", "key": "relay-key-" * 4}
    folder = started(here, "secret", "run", relay=relay, gateway={"secret": "gateway-secret-" * 4})
    assert_shareable(folder, "relay-key", "gateway-secret-gateway")
    code, output = rollout("run", "--resume", "secret")
    assert code == 2
    assert "relay.key: is missing" in output
    assert "gateway.secret (ROLLOUT__GATEWAY__SECRET), relay.key (ROLLOUT__RELAY__KEY)" in output
    monkeypatch.setenv("ROLLOUT__RELAY__KEY", relay["key"])
    code, output = rollout("run", "--resume", "secret")
    assert code == 2
    assert output.endswith("set these again in the environment: gateway.secret (ROLLOUT__GATEWAY__SECRET)")
