"""Each of the questions in docs/read-a-run.md is answered by the command that the page names."""

import re
from pathlib import Path

import pytest
import yaml

from made_runs import MadeRun, make_run
from rollout_backend.gateway.stats import EngineUse

PAGE = Path(__file__).parents[2] / "docs" / "read-a-run.md"
ROWS = re.findall(r"^\| ([A-Z][^|]*\?) \| ([^|]*) \|", PAGE.read_text(), flags=re.M)
COMMANDS = {question: re.findall(r"`rollout ([^`]*)`", cell) for question, cell in ROWS}
ANSWERS = {  # one per command
    "Why did a rollout fail?": [["container_error", "424: the container answered 500", "log: CloudWatch, session"]],
    "Which tasks are always wrong?": [
        ["lowest 5 of 16 tasks", "mean rewards"],
        ["rollout outcome reward", "mean reward"],
    ],
    "What did the model say in turn 3?": [["turn 1 run newest", "assistant", "logprobs mean"]],
    "Where did the step's time go?": [["rollouts spent", "% in model calls"]],
    "What did it cost, and what was wasted?": [["cost about $", "of it wasted"]],
    "Which session was slowest, and why?": [["the rollout that took longest"], ["sessions: rollout-", "invoked +"]],
    "Does the prefix cache work?": [["prompt, cache 8"], ["prompt tokens, cache 8"]],
    "Were engines or sessions the bottleneck?": [["engines were the bottleneck", "5 would run all of them"]],
    "How do two runs differ?": [["older", "newest"]],
    "Are rewards saturated?": [["always solved", "mixed"]],
    "What was trained, and what was left out?": [["planned = ", " trained", "outcome reason rollouts"]],
}

BUSY = EngineUse(engines=2, running=32, waiting=40, idle=0, full_batch=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with two runs of which the newest has prices and losses."""
    folder = tmp_path_factory.mktemp("work")
    make_run(folder / "runs" / "older", MadeRun(tasks=16, group=4, seed=3))
    newest = make_run(folder / "runs" / "newest", MadeRun(tasks=16, group=4, lost=0.3, engines=BUSY))
    settings = yaml.safe_load((newest / "config.yaml").read_text())
    (newest / "config.yaml").write_text(yaml.safe_dump(settings | {"prices": {"session_gb": 2, "session_vcpus": 1}}))
    return folder


def test_each_question_of_the_page_has_a_command():
    assert list(COMMANDS) == list(ANSWERS)
    assert {question: len(commands) for question, commands in COMMANDS.items()} == {
        question: len(answers) for question, answers in ANSWERS.items()
    }


ROLLOUTS = {  # what a question is asked about: a command, and where its output names it
    "Why did a rollout fail?": (("show",), r"container_error \d+ (\S+) "),
    "What did the model say in turn 3?": (("show", "buy-3-plum"), r"(buy-3-plum\.\d) completed"),
    "Does the prefix cache work?": (("show", "buy-3-plum"), r"(buy-3-plum\.\d) completed"),
    "Which session was slowest, and why?": (("show",), r"rollout show (\S+) +the rollout that took longest"),
}


@pytest.mark.parametrize("question", ANSWERS)
def test_a_question_is_answered(question, folder, rollout, monkeypatch):
    monkeypatch.chdir(folder)
    names = {"TASK": "buy-3-plum", "3": "1"}  # these conversations have two turns
    if question in ROLLOUTS:
        command, named = ROLLOUTS[question]
        names["ROLLOUT"] = re.search(named, rollout(*command)[1])[1]
    for command, words in zip(COMMANDS[question], ANSWERS[question], strict=True):
        runs = iter(("older", "newest"))
        code, output = rollout(*(next(runs) if each == "RUN" else names.get(each, each) for each in command.split()))
        assert code == 0, output
        for word in words:
            assert word in output, output
