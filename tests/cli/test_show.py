"""`rollout show`: a run, a step, a task, every planned rollout of the newest run, also a failed one, and a turn."""

import io
import json
import os
import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from agent_wrapper.contract import Outcome
from builders import refused
from made_runs import MadeRun, make_run
from rollout_backend.cli import app
from rollout_backend.core.tasks import Task
from rollout_backend.model.gateway.stats import EngineUse
from rollout_backend.run.accounts.archive import RunArchive
from rollout_backend.views.terminal.run_view import RunView
from rollout_backend.views.terminal.view import TaskView
from run_folders import write_training


@pytest.fixture
def runs(here):
    """Two runs, of which the newest has three steps."""
    busy = EngineUse(engines=2, running=32, waiting=40, idle=0, full_batch=16)
    make_run(here / "runs" / "one", MadeRun(tasks=4, group=3, lost=0.5, engines=busy))
    make_run(here / "runs" / "two", MadeRun(tasks=4, group=3, steps=3))
    for name, at in (("one", 1e9), ("two", 2e9)):
        for folder in ("steps", "rollouts"):
            os.utime(here / "runs" / name / folder, (at, at))
    return here / "runs"


def as_objects(answer: tuple[int, str]) -> list[dict]:
    """Return the objects of `--json`, of which each has a line."""
    code, output = answer
    assert code == 0, output
    decoder, objects, at = json.JSONDecoder(), [], 0
    while at < len(output):
        found, at = decoder.raw_decode(output, at)
        objects.append(found)
        at += 1
    return objects


def test_a_run_says_what_to_look_at_first_and_where_to_look_next(rollout, runs):
    output = rollout("show", "one")[1]
    for part in (
        "run one",
        "step 0 12 planned = ",
        "rollouts lost to the infrastructure",
        "engines were the bottleneck: on average 2 engines ran 32 requests and 40 waited; 5 would run all",
        "outcome reason rollouts first message",
        "rollout report runs/one all of it, in your browser",
        "--run runs/one the task with the lowest mean reward",
    ):
        assert part in output
    assert rollout("show", runs / "one")[1] == output.replace("runs/one", str(runs / "one"))
    output = rollout("show")[1]  # the newest
    assert output.startswith("run two")
    assert "3 steps" in output
    assert "rollout show --step 2 one step, here the last" in output
    (runs / "two" / "steps" / "00000003.tasks.jsonl").touch()  # of a step that was killed
    assert "before; --json has all" not in rollout("show", "two")[1]
    [found] = as_objects(rollout("show", "--json"))
    assert (found["run_id"], [step["step"] for step in found["steps"]]) == ("two", [0, 1, 2])
    assert found["steps"][1]["outcomes"]["completed"] == found["steps"][1]["trained"]
    [failed] = as_objects(rollout("show", "one", "--json"))
    assert failed["steps"][0]["failures"][0]["see"].startswith("docs/troubleshooting.md#")
    output = rollout("show", "two", "--step", 1)[1]
    assert "step 1 12 planned = " in output
    assert re.search(r" - \d+ of 12 rollouts completed", output)  # what is no problem has no exclamation mark
    [found] = as_objects(rollout("show", "--step", 1, "--json"))
    assert (found["run_id"], found["step"], len(found["tasks"])) == ("two", 1, 4)


def test_at_80_columns_no_line_of_a_run_or_a_task_is_wider(runs):
    name, file = "run-20261129-120101-8b2f", io.StringIO()
    folder = (runs / "one").rename(runs / name).relative_to(runs.parent)
    console = Console(file=file, width=80, color_system=None, force_terminal=True)
    RunView.read(folder, None, f" --run {folder}").print(console)
    records = RunArchive(folder).find_task("buy-3-pear")
    TaskView(name, 0, "0", "buy-3-pear", None, tuple(records), f" --run {folder}").print(console)
    lines = file.getvalue().splitlines()
    assert [line for line in lines if len(line) > 80] == []
    assert f"  rollout report {folder}" in lines
    assert "    all of it, in your browser" in lines


def test_a_task_has_a_line_for_each_rollout(rollout, runs):
    output = rollout("show", "buy-3-pear", "--run", "one")[1]
    assert output.count("buy-3-pear  run") + output.count("buy-3-pear run one, step 0: 3 rollouts") == 1
    assert "container_error: 424: the container answered 500" in output
    assert "one of them: rollout show buy-3-pear." in output
    assert output.endswith("--run runs/one")
    moved = (runs / "one").rename(runs / "[old] one")
    assert rollout("show", "buy-3-pear", "--run", moved)[1].endswith(f"--run '{moved}'")
    found = as_objects(rollout("show", "buy-3-pear", "--json"))
    assert [(each["step"], each["task_id"], len(each["rollouts"])) for each in found] == [
        (step, "buy-3-pear", 3) for step in range(3)
    ]
    assert found[0]["mean_reward"] is not None


def test_a_turn_has_messages_tokens_and_log_probabilities(rollout, runs):
    shown = ("show", "buy-3-plum.0", "--step", 1, "--turn", 1)
    output = rollout(*shown)[1]
    for part in (
        "buy-3-plum.0 turn 1 run two, step 1, task buy-3-plum; turn 1 of segment 0 (first_call)",
        "after 3 earlier messages, which rollout show buy-3-plum.0 prints",
        "The answer is",
        "finish stop",
        "tokens/s",
        "weights ",
        "logprobs mean -",
        "below 10 %",
    ):
        assert part in output
    assert "I will look up" not in output
    [turn] = as_objects(rollout(*shown, "--json"))
    assert (turn["number"], turn["finish_reason"], len(turn["prompt"])) == (1, "stop", 4)
    assert turn["reply"]["role"] == "assistant"
    assert len(turn["token_ids"]) == len(turn["logprobs"]) == turn["sampled_tokens"]
    assert turn["mean_logprob"] == pytest.approx(sum(turn["logprobs"]) / len(turn["logprobs"]))


def test_a_turn_that_is_not_there(rollout, runs):
    lost = next(
        record.rollout_id
        for record in RunArchive(runs / "one").read_records(0)
        if record.outcome is Outcome.INFRA_ERROR
    )
    for options, words in (
        (("buy-3-plum.0", "--turn", 2, "--step", 1), "buy-3-plum.0 has no turn 2: its turns are 0 to 1"),
        (("two", "--turn", 0), "--turn shows a turn of one rollout: name the rollout"),
        (("buy-3-pear", "--turn", 1), "buy-3-pear is a task: name one of buy-3-pear.0, buy-3-pear.1"),
        ((lost, "--run", "one", "--turn", 0), f"no result was stored: rollout show {lost} --run runs/one says why"),
    ):
        refused(rollout("show", *options), words)
    output = rollout("show", lost, "--run", "one")[1]
    for part in ("424: the container answered 500", "log: CloudWatch, session"):
        assert part in output


def test_the_id_that_a_wrong_one_means_is_suggested(rollout, runs):
    for wanted, nearest in (("buy-3-plun.1", "buy-3-plum.1"), ("by-3-plum", "buy-3-plum")):
        for options in ((), ("--step", 0)):
            refused(rollout("show", wanted, *options), f"did you mean {nearest}? Or name another run")
    code, output = rollout("show", "zzz", "--run", "one")
    assert (code, "did you mean" in output) == (2, False), output
    refused(rollout("show", "--step", 7), "step 7 of runs/two has no records: it has those of steps 0 to 2")
    refused(rollout("show", ""), "the name of the run is empty")
    refused(rollout("report", runs / "three"), f"there is no run '{runs / 'three'}'")
    for name in (".", runs.parent):
        refused(rollout("show", name), f"{name} holds no run")


def test_steps_of_verl_have_its_numbers_everywhere(rollout, here):
    """The second batch of global step 15 and its validation have the numbers 15001 and 15500 in file names."""
    folder = write_training(here / "runs" / "a", *((number, [0.0, 1.0]) for number in (14000, 15000, 15001, 15500)))
    for name, task in (("15", "t0"), ("15.1", "t1"), ("15 validation", "t1.0"), ("015", "t1.0")):
        shown = [rollout("show", *arguments, "--step", name)[1] for arguments in ((), (task,))]
        for output in shown:
            assert re.search(rf"\bstep {name.lstrip('0')}\b", output), output
            assert not re.search(r"1[45][05]0[01]", output)
    table = rollout("show")[1]
    assert "rollout show --step '15 validation' one step, here the last" in table
    assert not re.search(r"1[45][05]0[01]", table)
    [found] = as_objects(rollout("show", "--step", "15.1", "--json"))
    assert (found["step"], found["name"]) == (15001, "15.1")
    held = "has no records: it has those of steps 14 to 15 validation"
    refused(rollout("show", "--step", 15000), f"step 15000 of runs/a {held}; the files 00015000 hold step 15")
    refused(rollout("show", "t0", "--step", 16), f"step 16 of runs/a {held}")
    refused(rollout("replay"), "runs/a has 4 steps, 14 to 15 validation: choose a --step")
    refused(rollout("replay", "--step", "15.1"), f"step 15.1 of {folder.relative_to(here)} has no report")


def test_the_beginning_of_an_id_is_enough(rollout, runs):
    assert rollout("show", "buy-3-pl")[1] == rollout("show", "buy-3-plum")[1]
    assert rollout("show", "on")[1] == rollout("show", "one")[1]
    refused(
        rollout("show", "buy-3"),
        "several ids begin with 'buy-3': name one of them buy-3-melon buy-3-pear buy-3-plum buy-3-kiwi",
    )
    assert "buy-3-plum.0 buy-3-plum.1 buy-3-plum.2" in rollout("show", "buy-3-plum.")[1]


def test_a_step_that_was_killed_has_tasks_and_results_only(rollout, runs):
    archive = RunArchive(runs / "two")
    archive.write_tasks(0, [Task("buy-3-plum", {"amount": 3}), Task("buy-3-fig", {"amount": 3})])
    archive.close()
    for path in (runs / "two" / "steps").glob("*.rollouts.jsonl"):
        path.unlink()
    assert "planned rollouts have completed" in rollout("show")[1]
    assert "attempt 1, session" in rollout("show", "buy-3-plum.0", "--step", 0)[1]
    code, output = rollout("show", "buy-3-plum", "--step", 0)
    assert code == 2
    assert "so step 0 of runs/two has no records of it. Its results so far" in output
    assert "prints: buy-3-plum.0" in output


def complete(words: str) -> list[str]:
    """Return what bash offers after `rollout` and these words, of which the last one is incomplete."""
    env = {"COMP_WORDS": f"rollout {words}", "COMP_CWORD": str(words.count(" ") + 1)}
    env["_ROLLOUT_COMPLETE"] = "complete_bash"
    return CliRunner().invoke(app, [], env=env, prog_name="rollout").stdout.split()


def test_the_shell_completes_ids(runs):
    assert complete("show o") == ["one"]
    assert complete("show buy-3-p") == ["buy-3-pear", "buy-3-plum"]
    assert complete("show buy-3-pl") == ["buy-3-plum", *(f"buy-3-plum.{i}" for i in range(3))]
    assert complete("show --run one buy-3-plum.1") == ["buy-3-plum.1"]
    assert complete("show --run no-such buy") == []
    for command in ("report", "compare one", "export", "replay", "rescore", "run --resume", "report --against"):
        assert complete(f"{command} ") == ["two", "one"], command


def test_a_damaged_record_is_named(rollout, here):
    folder = here / "runs" / "a" / "steps"
    folder.mkdir(parents=True)
    (folder / "00000000.rollouts.jsonl").write_text('{"rollout_id": "task-00000.0"}\n')
    for name in ("task-00000.0", "another"):
        refused(rollout("show", name), "a record in runs/a/steps cannot be read")
