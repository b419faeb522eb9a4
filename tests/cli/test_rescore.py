"""`rollout rescore`: new rewards beside the old ones, which stay."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agent_wrapper.contract import Outcome, Rollout
from builders import refused
from rollout_backend import cli
from rollout_backend.core.tasks import Task
from rollout_backend.run.accounts.archive import RunArchive
from rollouts import make_rollout, make_segment
from run_folders import make_step

SCORER = """
import sys
from dataclasses import dataclass

@dataclass
class Answer:
    text: str

def score(given):
    print("this is no JSON")
    answer = Answer(given.messages[-1]["content"])
    given.payload.clear()
    if answer.text == "raise":
        raise LookupError("no number in the answer")
    if answer.text == "exit":
        sys.exit("bye")
    return {"nan": float("nan"), "text": "1", "none": None}.get(answer.text, 1 - given.agent_reward)

def narrow(given, more):
    return 1.0
"""


@pytest.fixture
def here(here):
    """Put a scorer there too."""
    (here / "scorer.py").write_text(SCORER)
    return here


def answered(rollout_id: str, text: str, reward: float, **more: Any) -> Rollout:
    messages = ({"role": "user", "content": "?"}, {"role": "assistant", "content": text})
    return make_rollout(
        rollout_id, reward=reward, segments=[make_segment().model_copy(update={"messages": messages})], **more
    )


def write_steps(folder: Path, *rollouts: Rollout) -> Path:
    """Write a run with these results, one step after another."""
    archive = RunArchive(folder)
    for step in {rollout.step for rollout in rollouts}:
        of_step = [rollout for rollout in rollouts if rollout.step == step]
        archive.write_tasks(step, [Task(task_id, {"id": task_id}) for task_id in {r.task_id for r in of_step}])
        archive.write_records(step, make_step({each.rollout_id: each for each in of_step}, step=step).records)
        for rollout in of_step:
            archive.write_rollout(rollout, rollout.encode())
    archive.close()
    return folder


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_new_rewards_are_written_beside_the_old_ones(rollout, here):
    rollouts = [answered(f"t{task}.{i}", "7", 0.0, step=task % 2) for task in range(5) for i in range(2)]
    failed = make_rollout("t0.9", Outcome.AGENT_ERROR, reward=0.5)
    run = write_steps(here / "runs" / "a", *rollouts, failed)
    before = content(run)

    code, output = rollout("rescore", "a", "--scorer", "scorer.py:score", "--name", "v2")
    assert code == 0, output
    assert "t0 0.000 1.000 +1.000" in output
    assert "10 of 10 completed rollouts scored, 10 with another reward" in output
    assert "mean reward 0.000 and 1.000 over 5 tasks of both versions: +1.000 (95% interval +1.000" in output

    after = content(run)
    assert {path: after[path] for path in before} == before
    version = run / "rescored" / "v2"
    new = {path.relative_to(version).name: after[path] for path in after.keys() - before.keys()}
    info = json.loads(new.pop("scorer.json"))
    assert (info["function"], info["sha256"]) == ("score", hashlib.sha256(SCORER.encode()).hexdigest())
    assert info["scored_at"].endswith("Z")
    rows = {name: [json.loads(line) for line in data.splitlines()] for name, data in new.items()}
    assert [len(rows[name]) for name in ("00000000.jsonl", "00000001.jsonl")] == [6, 4]
    expected = {"step": 0, "rollout_id": "t0.0", "task_id": "t0", "old": 0.0, "new": 1.0, "error": ""}
    assert rows["00000000.jsonl"][0] == expected

    refused(rollout("rescore", "a", "--scorer", "scorer.py:score", "--name", "v2"), "no version replaces another one")
    assert content(run) == after


def test_a_rollout_that_cannot_be_scored_has_no_reward(rollout, here):
    texts = ("7", "raise", "exit", "nan", "text", "none", "lost", "damaged")
    run = write_steps(here / "runs" / "a", *(answered(f"t.{i}", text, 0.0) for i, text in enumerate(texts)))
    stored = run / "rollouts" / "00000000"
    (stored / "t.6").unlink()
    (stored / "t.7").write_bytes(answered("t.7", "damaged", 1.0).encode())
    code, output = rollout("rescore", run, "--scorer", "scorer.py:score")
    assert code == 1
    for part in (
        "t.1, step 0: LookupError: no number in the answer (scorer.py, line 14, in score)",
        "t.2, step 0: SystemExit: bye (scorer.py, line 16, in score)",
        "t.3, step 0: the reward is nan, which is not finite",
        "t.4, step 0: the reward is '1', a str, not a number",
        "t.5, step 0: the reward is None, a NoneType, not a number",
        "t.6, step 0: result:",
        "t.7, step 0: result: is not the one that the record summarizes",
        "1 of 8 completed rollouts scored, 1 with another reward, 7 without a new reward",
        "mean reward 0.000 and 1.000 over 1 task of both versions",
    ):
        assert part in output
    arguments = ["rescore", str(run), "--scorer", "scorer.py:score", "--name", "json", "--json"]
    found = json.loads(CliRunner().invoke(cli.app, arguments).stdout)
    assert [each["new"] for each in found["rollouts"]] == [1.0, *[None] * 7]
    assert found["reward"]["change"]["value"] == 1.0


def test_a_module_or_an_async_function_can_be_the_scorer(rollout, here):
    (here / "own_scorer.py").write_text("async def score(given):\n    return True\n")
    write_steps(here / "runs" / "a", answered("t.0", "7", 1.0), answered("t.1", "8", 0.0))
    code, output = rollout("rescore", "a", "--scorer", "own_scorer:score")
    assert (code, "2 of 2 completed rollouts scored, 1 with another reward" in output) == (0, True), output


def test_unusable_input_is_refused(rollout, here):
    write_steps(here / "runs" / "a", answered("t.0", "7", 1.0))
    write_steps(here / "runs" / "failed", make_rollout("t.0", Outcome.INFRA_ERROR))
    (here / "broken.py").write_text("import no_such_module\n")
    for scorer, message in (
        ("scorer.py", "must look like FILE.py:function"),
        ("none.py:score", "there is no file none.py"),
        ("broken.py:score", "No module named 'no_such_module'"),
        ("no_such_scorer:score", "no_such_scorer cannot be imported"),
        ("scorer.py:none", "has no function 'none'"),
        ("scorer.py:narrow", "must accept one argument, a ScoreInput"),
    ):
        refused(rollout("rescore", "a", "--scorer", scorer), message)
    for run, name, message in (
        ("none", "x", "there is no run 'none'"),
        ("failed", "x", "has no completed rollout to score"),
        ("a", "../x", "--name '../x' must be"),
    ):
        refused(rollout("rescore", run, "--scorer", "scorer.py:score", "--name", name), message)
    (here / "runs" / "a" / "steps" / "00000000.tasks.jsonl").unlink()
    refused(rollout("rescore", "a", "--scorer", "scorer.py:score"), "does not have task 't'")
    assert not (here / "runs" / "a" / "rescored").exists()
