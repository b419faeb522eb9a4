"""`rollout show`: every planned rollout of the newest run can be shown, also a failed one."""

from __future__ import annotations

import json
import os

import pytest

from made_runs import MadeRun, make_run
from rollout_backend.local.scripted import ScriptedEngine
from stub_server import StubServer


@pytest.fixture
def here(monkeypatch, tmp_path):
    """Work in the folder that has `runs/`."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def over_http(url: str, engine: ScriptedEngine, **sections) -> dict:
    serving = {"kind": "external", "urls": [engine.url]}
    return {"runtime": {"kind": "http", "url": url}, "serving": serving, "queue": {"wait_s": 1}, **sections}


def test_a_newer_run_with_failures_alone_is_the_one_that_is_shown(rollout, settings, tasks, agent_server, here):
    with ScriptedEngine(["It is 7."]) as engine, StubServer(lambda request: (200, b'"hello"')) as no_agent:
        code, output = rollout("run", settings(**over_http(agent_server, engine, run_id="z-old")), "--tasks", tasks)
        assert code == 0, output
        assert "completed, reward 1" in rollout("show", "task-00000.0")[1]
        rollout("run", settings(**over_http(no_agent.url, engine, run_id="a-new")), "--tasks", tasks)
    code, output = rollout("show", "task-00000.0")
    assert code == 0, output
    for part in (
        "infra_error, no result was stored",
        "not_a_rollout_app",
        "the agent answered b'\"hello\"'",
        "see docs/troubleshooting.md#not_a_rollout_app",
        "attempts 1, group not usable",
        "sessions: rollout-",
        f"log: the log of the agent server at {no_agent.url}, session rollout-",
        "invoked +",
        "settled +",
    ):
        assert part in output
    assert "accepted" not in output
    record = json.loads(rollout("show", "task-00000.0", "--json")[1])
    assert (record["outcome"], record["reason"]) == ("infra_error", "not_a_rollout_app")
    output = rollout("show", "task-00000.0", "--run-dir", here / "runs" / "z-old")[1]
    for part in ("completed, reward 1", "attempts 1, group usable", "accepted +", "result +"):
        assert part in output
    assert rollout("show", "task-00000.0", "--run-dir", here / "runs" / "z-old", "--step", 0)[1] == output
    code, output = rollout("show", "task-00000.0", "--run-dir", here / "runs" / "z-old", "--step", 1)
    assert (code, "step 1 of" in output) == (2, True)


def test_there_is_no_run_to_show(rollout, here):
    for folder in ("events", "other/plots"):  # of other tools that write to ./runs
        (here / "runs" / folder).mkdir(parents=True)
    code, output = rollout("show", "task-00000.0")
    assert code == 2
    assert "there is no run in" in output
    assert "--run-dir" in output


def test_a_newer_run_without_that_rollout_hides_no_older_one(rollout, here):
    for name, at in (("old", 1e9), ("new", 2e9)):
        (here / "runs" / name / "logs").mkdir(parents=True)
        os.utime(here / "runs" / name / "logs", (at, at))
    code, output = rollout("show", "task-00000.0")
    assert code == 2
    assert "runs/new holds no rollout 'task-00000.0'" in output


@pytest.mark.parametrize(
    ("wanted", "nearest"),
    [("buy-3-plun.1", "buy-3-plum.1"), ("buy-3-plum", "buy-3-plum.0"), ("by-3-plum", "buy-3-plum.0")],
)
def test_the_rollout_that_a_wrong_id_means_is_suggested(rollout, here, wanted, nearest):
    run = make_run(here / "runs" / "r", MadeRun(tasks=4, group=2))
    for options in ((), ("--step", 0)):
        code, output = rollout("show", wanted, *options)
        assert (code, f"did you mean {nearest}? Or name another run" in output) == (2, True), output
    for options in (("zzz",), (wanted, "--step", 5)):
        code, output = rollout("show", *options, "--run-dir", run)
        assert (code, "did you mean" in output) == (2, False), output


def test_a_damaged_record_is_named(rollout, here):
    folder = here / "runs" / "a" / "steps"
    folder.mkdir(parents=True)
    (folder / "00000000.rollouts.jsonl").write_text('{"rollout_id": "task-00000.0"}\n')
    code, output = rollout("show", "task-00000.0")
    assert code == 2
    assert "a record in runs/a/steps cannot be read" in output
