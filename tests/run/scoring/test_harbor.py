"""The tests of Harbor tasks as a scorer."""

import base64
import json
import os
import subprocess
import sys

import pytest

from agent_wrapper.shared.child_output import LOGGED_BYTES
from agent_wrapper.shared.harbor_tests import TestsFailed, read_reward, run_tests
from agent_wrapper.shared.workspace import WORKSPACE, pack_folder
from builders import is_running, processes_with, until
from rollout_backend.run.scoring.harbor import verify
from rollout_backend.run.scoring.scorer import ScoreInput, ScoringError
from rollouts import make_rollout


@pytest.fixture
def given(tmp_path):
    """Return the input of a rollout whose workspace has the file answer.txt, for a test.sh."""

    def given(script, *, answer="42\n", artifacts=True, **harbor):
        workspace, tests = tmp_path / "workspace", tmp_path / "tests"
        workspace.mkdir()
        tests.mkdir()
        (workspace / "answer.txt").write_text(answer)
        (tests / "test.sh").write_text(script)
        (tests / "expected").write_text("42\n")
        settings = {"tests": base64.b64encode(pack_folder(tests)).decode(), "timeout_s": 120.0, "env": {}}
        private = {"harbor": {**settings, "workdir": "/app", **harbor}}
        return ScoreInput(
            "t",
            {},
            private,
            make_rollout("t.0", reward=0.0),
            {WORKSPACE: pack_folder(workspace)} if artifacts else {},
        )

    return given


REWARDS = {
    "in the workspace": (
        "cmp answer.txt /tests/expected && cmp /app/answer.txt answer.txt && echo 0.5 >/logs/verifier/reward.txt",
        {"reward": 0.5},
    ),
    "the exit code is no reward": ("#!/bin/sh\necho 1 > /logs/verifier/reward.txt; exit 3", {"reward": 1}),
    "reward.json comes first and keeps other values": (
        """cd /logs/verifier; echo 0 > reward.txt; echo '{"reward": 0.75, "passed": 3}' > reward.json""",
        {"reward": 0.75, "passed": 3},
    ),
    "one value of reward.json": ("""echo '{"accuracy": 1}' > /logs/verifier/reward.json""", {"reward": 1}),
    "a byte order mark": (r"printf '\357\273\277.5' > /logs/verifier/reward.txt", {"reward": 0.5}),
    "a pipe is no file": ("mkfifo /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt", {"reward": 1}),
    "temporary files are in the tests' folder": (
        "touch $TMPDIR/x $HOME/x && case $TMPDIR in */rollout-verifier-*) echo 1 > /logs/verifier/reward.txt; esac",
        {"reward": 1},
    ),
}


@pytest.mark.parametrize(("script", "found"), REWARDS.values(), ids=REWARDS)
def test_what_the_tests_write_is_the_reward(given, script, found):
    assert verify(given(script)) == found


@pytest.mark.parametrize("workdir", ["/", "/work/tests"])
def test_the_paths_of_any_image_are_found(given, workdir):
    answer = "answer.txt" if workdir == "/" else f"{workdir}/answer.txt"
    assert verify(given(f"cmp /tests/expected {answer} && echo .5 > /logs/verifier/reward.txt", workdir=workdir)) == {
        "reward": 0.5
    }


def test_the_environment_is_the_tasks_and_not_the_trainers(given, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("JUDGE_KEY", "k")
    script = 'test "$AWS_SECRET_ACCESS_KEY-$KEY-$MODE" = -k-m && echo 1 > /logs/verifier/reward.txt'
    assert verify(given(script, env={"KEY": "${JUDGE_KEY}", "MODE": "${UNSET:-m}"})) == {"reward": 1}


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo broken >&2; exit 4", r"wrote no /logs/verifier/reward.json .*exited with 4: broken"),
        ("echo fine > /logs/verifier/reward.txt", "no number to reward.txt"),
        ("sleep 60 & sleep 60", "took longer than verifier.timeout_sec=0.5"),
    ],
)
def test_tests_without_a_reward_are_a_failure_and_never_a_zero(given, script, message):
    with pytest.raises(ScoringError, match=message):
        verify(given(script, timeout_s=0.5 if "sleep" in script else 120.0))


def test_servers_that_the_tests_start_in_the_background_end_with_the_call(given, tmp_path):
    pid = tmp_path / "pid"
    server = f"setsid sh -c 'echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 600'"
    script = f"{server} & until test -f {pid}; do :; done; echo 1 > /logs/verifier/reward.txt"
    assert verify(given(script)) == {"reward": 1}
    until(lambda: not is_running(int(pid.read_text())))


def test_output_and_reward_of_any_size_are_not_kept(tmp_path):
    script, output, reward = tmp_path / "test.sh", tmp_path / "output", tmp_path / "reward.json"
    script.write_text("head -c $SIZE /dev/zero; echo the end; exec >&- 2>&-; exit 3")
    for size, kept in ((10, 18), (3 * LOGGED_BYTES, LOGGED_BYTES + 70)):
        environ = {"PATH": os.defpath, "SIZE": str(size)}
        ended = run_tests(script, cwd=tmp_path, environ=environ, output=output, timeout_s=120)
        assert ended.startswith("tests/test.sh exited with 3: ")
        assert ended.endswith("the end")
        assert len(ended) < 3_000
        assert output.stat().st_size == kept
    with reward.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(TestsFailed, match=r"wrote no number to reward\.json"):
        read_reward(tmp_path, ended)


def test_tests_that_use_more_memory_than_the_task_has_are_killed(given):
    script = f"exec {sys.executable} -c 'x = bytes([1]) * 200_000_000; import time; time.sleep(60)'"
    with pytest.raises(ScoringError, match="used more than 104857600 bytes of memory"):
        verify(given(script, container={"memory_mb": 100}))


def test_what_is_missing_is_named(given):
    without = given("", artifacts=False)
    with pytest.raises(ScoringError, match=r"no artifact 'workspace.tar.gz'"):
        verify(without)
    with pytest.raises(ScoringError, match="is no Harbor task"):
        verify(ScoreInput("t", {}, {}, without.rollout))


def test_the_tests_end_with_the_process_that_runs_them(given, tmp_path):
    """A worker is killed if it takes longer than scoring.timeout_s, and with the trainer."""
    running = tmp_path / "running"
    task = given(f"echo $HOME > {running}.new; mv {running}.new {running}; sleep 600 & sleep 600")
    private = json.dumps(task.private)
    code = (
        "import json, sys; from pathlib import Path; from rollout_backend.run.scoring.harbor import verify; "
        "from rollout_backend.run.scoring.scorer import ScoreInput; given = json.loads(sys.argv[1]); "
        f"verify(ScoreInput('t', {{}}, given, None, {{{WORKSPACE!r}: Path(sys.argv[2]).read_bytes()}}))"
    )
    archive = tmp_path / "archive"
    archive.write_bytes(task.artifacts[WORKSPACE])
    with subprocess.Popen([sys.executable, "-c", code, private, str(archive)]) as worker:
        until(running.exists, what="the tests run")
        home = running.read_text().strip()
        assert processes_with(home)
        worker.kill()
    until(lambda: not processes_with(home), what="the tests have ended")
