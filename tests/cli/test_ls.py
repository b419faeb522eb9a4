"""`rollout ls` and `rollout compare`."""

import json

from typer.testing import CliRunner

from builders import refused
from rollout_backend import cli
from rollout_backend.views.run_data import list_runs
from run_folders import write_run


def test_runs_are_listed_with_their_state_the_newest_first(rollout, here):
    runs = here / "runs"
    write_run(runs / "first", {"a": [0.0, 0.5], "b": [1.0, None]})
    write_run(runs / "second", {"a": [1.0]}, state="interrupted")
    running = write_run(runs / "third", {"a": [], "b": []}, state=None, group={"size": 4})
    (running / "rollouts" / "00000000").mkdir(parents=True)
    (running / "rollouts" / "00000000" / "a.0").touch()
    killed = write_run(runs / "fourth", {"a": []}, state=None)
    info = json.loads((killed / "run.json").read_text())
    info["starts"][0]["process"]["started"] = 1
    (killed / "run.json").write_text(json.dumps(info))
    (runs / "old" / "steps").mkdir(parents=True)
    (runs / ".secrets").mkdir()

    code, output = rollout("ls", "--json")
    assert code == 0
    keys = ("run_id", "state", "steps", "completed", "planned", "mean_reward")
    found = [json.loads(line) for line in output.split()]
    assert [tuple(run[key] for key in keys) for run in found] == [
        ("fourth", "killed", 1, 0, 1, None),
        ("third", "running", 1, 1, 8, None),
        ("second", "interrupted", 1, 1, 1, 1.0),
        ("first", "ended", 1, 3, 4, 0.5),
        ("old", "unknown", 0, 0, None, None),
    ]
    (runs / "[cut]" / "steps").mkdir(parents=True)
    (runs / "[cut]" / "steps" / "00000000.rollouts.jsonl").write_text('{"outcome": "compl')
    code, output = rollout("ls")
    assert code == 0
    for words in (
        "third",
        "running 1/8",
        "first",
        "ended 3/4, 0.500",
        "old unknown 0/?",
        "[cut] unknown 0/?, a record of step 0 cannot",
    ):
        assert words in output
    refused(rollout("ls", here), "there is no run in")


def test_80_columns_show_whole_ids_and_one_line_for_each_run(here, monkeypatch):
    for name, state in (
        ("run-20261127-142427-f183", "interrupted"),
        ("a-run-with-a-name-of-42-letters-for-a-test", "ended"),
    ):
        run = write_run(here / "runs" / name, {"a": [0.5]}, state=state)
        info = json.loads((run / "run.json").read_text())
        info["starts"][0]["error"] = "5 problems were found:\n" + "- credentials: AWS cannot be reached\n" * 5
        (run / "run.json").write_text(json.dumps(info))
    monkeypatch.setattr(cli.console, "width", 80)
    lines = CliRunner().invoke(cli.app, ["ls"]).output.rstrip().splitlines()
    assert len(lines) == 3
    [line] = [line for line in lines if line.startswith("run-20261127-142427-f183 ")]
    assert "1/1, 0.500, 5 prob" in line
    assert any(line.startswith("a-run-with-a-name-of-42") and "…" in line for line in lines)
    assert max(map(len, lines)) <= 80


def test_two_runs_are_compared_by_name(rollout, here):
    for name, rewards in (("a", [0.0]), ("b", [1.0])):
        write_run(here / "runs" / name, {f"t{i}": rewards for i in range(8)})
    code, output = rollout("compare", "a", here / "runs" / "b")
    assert code == 0, output
    assert "mean reward 0.000 and 1.000 over 8 tasks of both runs: +1.000" in output
    assert json.loads(rollout("compare", "a", "b", "--json")[1])["measures"][0]["change"]["value"] == 1.0
    refused(rollout("compare", "a", "none"), "there is no run 'none'")
    (here / "runs" / "b" / "config.yaml").write_text("")
    refused(rollout("compare", "a", "b"), "config.yaml must hold a map of settings")


def test_a_run_that_failed_to_start_is_listed_with_its_reason_and_is_not_the_newest(rollout, here, settings, tasks):
    write_run(here / "runs" / "good", {"a": [1.0]})
    runtime = {"kind": "process", "command": "python agent.py"}
    config = settings(run_id="late", storage={"bucket": "missing"}, runtime=runtime)
    for _ in range(2):  # the second one keeps what the first one has recorded
        refused(rollout("run", config, "--tasks", tasks), "missing")
    [failed, good] = list_runs(here / "runs")
    assert (failed.run_id, failed.state, good.error) == ("late", "failed", "")
    assert "missing" in failed.error
    assert "missing" in rollout("ls")[1]
    for command in ("show", "export"):
        code, output = rollout(command)
        assert (code, "good" in output) == (0, True), output
