"""Scorers as functions, as commands, and as verl's reward functions."""

import contextlib
import os
import signal
import sys
import tracemalloc
from typing import Any

import pytest

from rollout_backend.config import ScoringConfig
from rollout_backend.run.scoring.scorer import (
    ScoreInput,
    Scorer,
    ScoringError,
    command_scorer,
    load_scorer,
    pack_request,
)
from rollout_backend.run.scoring.worker_pool import WorkerPool
from rollouts import make_rollout, make_segment

MESSAGES = (
    {"role": "user", "content": "What is 3 + 4?"},
    {"role": "assistant", "content": [{"type": "text", "text": "It is 7."}]},
    {"role": "tool", "content": "ok"},
)
FUNCTIONS = """
def score(given):
    return given.private["answer"] in given.reply

def detailed(given):
    return {"reward": given.agent_reward / 2, "turn_rewards": [0.25] * given.private["turns"], "seen": given.task_id}

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **more):
    assert data_source == "sums"
    return {"score": float(ground_truth in solution_str), "acc": True, "extra_info": extra_info}

async def judge(given):
    return {"reward": float(given.private["answer"] in given.reply), "by": "judge"}

async def compute_score_async(data_source, solution_str, ground_truth, extra_info):
    if ground_truth is None:
        raise LookupError("no answer")
    return float(ground_truth in solution_str)

def wrong(given):
    return given.private["returned"]
"""


def given(private: dict[str, Any]) -> ScoreInput:
    segment = make_segment().model_copy(update={"messages": MESSAGES})
    rollout = make_rollout("t.0", reward=1.0, segments=[segment, segment], extras={"note": "x"})
    return ScoreInput("t", {"q": 1}, private, rollout)


@pytest.fixture
def load(tmp_path):
    file = tmp_path / "scorer.py"
    file.write_text(FUNCTIONS)

    def load(name: str) -> Scorer:
        return load_scorer(f"{file}:{name}")

    return load


def test_a_function_returns_rewards_of_turns_and_extras(load):
    turns = sum(len(segment.turns) for segment in given({}).rollout.segments)
    found = load("detailed").score(given({"turns": turns}))
    assert (found.reward, found.turn_rewards, found.extras) == (0.5, (0.25,) * turns, {"seen": "t"})
    with pytest.raises(ScoringError, match=rf"returned {turns + 1} turn_rewards for {turns} turns"):
        load("detailed").score(given({"turns": turns + 1}))


def test_a_reward_function_of_verl_is_a_scorer(load):
    private = {"data_source": "sums", "ground_truth": "7", "extra_info": {"split": "test"}}
    found = load("compute_score").score(given(private))
    of_verl = {"num_turns": 3, "rollout_reward_scores": {}}
    assert (found.reward, found.extras) == (1.0, {"acc": True, "extra_info": {"split": "test", **of_verl}})
    del private["extra_info"]
    assert load("compute_score").score(given(private)).extras == {"acc": True, "extra_info": of_verl}
    with pytest.raises(ScoringError, match="extra_info of the private part is a str, and must be an object"):
        load("compute_score").score(given(private | {"extra_info": "x"}))


@pytest.mark.parametrize(
    ("roles", "turns"),
    [
        ([], 0),
        (["user", "assistant"], 2),
        (["system", "user", "assistant", "tool", "tool", "assistant"], 4),
        (["user", "assistant", "tool", "assistant", "user", "assistant"], 6),
    ],
)
def test_turns_are_counted_as_in_verl(roles, turns, load):
    segment = make_segment().model_copy(update={"messages": tuple({"role": role} for role in roles)})
    rollout = make_rollout("t.0", segments=[segment])
    found = load("compute_score").score(ScoreInput("t", {}, {"data_source": "sums", "ground_truth": ""}, rollout))
    assert found.extras["extra_info"]["num_turns"] == turns


POOLED = """
import multiprocessing
from dataclasses import dataclass

@dataclass
class Graded:
    reward: float

def grade(text):
    return Graded(float(text))

def score(given):
    with multiprocessing.get_context("METHOD").Pool(1) as pool:
        return pool.apply(grade, ("0.5",)).reward
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("name", ["reward.py", "my-reward.py"])
async def test_a_scorers_file_can_be_imported_by_the_processes_of_multiprocessing(method, name, tmp_path):
    file = tmp_path / name
    file.write_text(POOLED.replace("METHOD", method))
    config = ScoringConfig.model_validate({"function": f"{file}:score", "timeout_s": 240, "processes": 1})
    pool = WorkerPool(config, tmp_path / "log")
    await pool.start()
    try:
        fields = {"task_id": "t", "payload": {}, "private": {}, "result": make_rollout().encode(), "artifacts": {}}
        assert (await pool.call(pack_request(fields))).get("reward") == 0.5, (tmp_path / "log").read_text()
    finally:
        await pool.close()


@pytest.mark.parametrize("name", ["json.py", "pytest.py", "v1.2.py"])
def test_a_scorers_file_takes_no_other_modules_name(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / name
    file.write_text("def score(given):\n    return 0.5\n")
    modules = dict(sys.modules)
    assert load_scorer(f"{file}:score").score(given({})).reward == 0.5
    assert all(sys.modules[each] is modules[each] for each in ("json", "pytest"))


def test_a_scorers_file_is_loaded_again_as_it_is_now(tmp_path):
    for reward in (0.25, 0.75):
        for folder in ("a", "b"):
            file = tmp_path / folder / "reward_of_test.py"
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"def score(given):\n    return {reward}{'  # another' * int(reward + 0.5)}\n")
            assert load_scorer(f"{file}:score").score(given({})).reward == reward


async def test_an_async_function_is_a_scorer(load):
    judge, of_verl = load("judge"), load("compute_score_async")
    assert (judge.is_async, of_verl.is_async, load("score").is_async) == (True, True, False)
    found = await judge.score_async(given({"answer": "7"}))
    assert (found.reward, found.extras) == (1.0, {"by": "judge"})
    assert (await of_verl.score_async(given({"ground_truth": "8"}))).reward == 0.0
    with pytest.raises(ScoringError, match=r"LookupError: no answer \(scorer.py, line 17, in compute_score_async\)"):
        await of_verl.score_async(given({}))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "the reward is None"),
        ("1", "the reward is '1', a str"),
        (float("inf"), "which is not finite"),
        ({"score": 1}, "a dict without 'reward'"),
        ({"reward": 1, "turn_rewards": ["a"]}, "the reward is 'a'"),
        ({"reward": 1, "what": {1, 2}}, "a set, is not JSON"),
        (1e39, "beyond float32"),
        ({"reward": 1, "turn_rewards": [3e38, 3e38]}, "beyond float32"),
        ({"reward": 1, "what": 2**64}, "'what' cannot be stored as JSON"),
        ({"reward": 1, "what": "\ud800"}, "half of a surrogate pair"),
        ({"reward": 1, "what": [[]] * 130_000}, "more than 125000 maps and lists"),
    ],
)
def test_anything_else_is_no_score(load, returned, message):
    with pytest.raises(ScoringError, match=message):
        load("wrong").score(given({"returned": returned}))


def test_the_output_of_a_command_takes_limited_memory():
    def peak(size: int) -> int:
        many = f"head -c {size} /dev/zero | tr '\\0' '\\n'"
        tracemalloc.start()
        try:
            assert command_scorer(["sh", "-c", f"{many}; {many} >&2; echo 0.5"], 120).score(given({})).reward == 0.5
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(160_000_000) < 2.5 * peak(40_000_000)


def test_a_daemon_of_a_command_that_keeps_its_output_open_does_not_hold_up_the_score(tmp_path):
    script = "sleep 300 & echo $! > pid; (while kill -0 $$; do :; done 2>&-; echo 0.5) &"
    try:
        with contextlib.chdir(tmp_path):
            assert command_scorer(["sh", "-c", script], 120).score(given({})).reward == 0.5
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_a_command_reads_json_and_prints_the_reward(tmp_path):
    script = tmp_path / "score.py"
    script.write_text(
        "import json, sys\nfields = json.load(sys.stdin)\nprint('about', fields['task_id'])\n"
        "if fields['private'] == {}: sys.exit('there is no answer')\n"
        "print(json.dumps({'reward': fields['private']['answer'] in fields['reply'], 'was': fields}))"
    )
    scorer = command_scorer([sys.executable, "-S", str(script)], 120)
    found = scorer.score(given({"answer": "7"}))
    assert found.reward == 1.0
    of_result = {"rollout_id": "t.0", "outcome": "completed", "extras": {"note": "x"}, "agent_reward": 1.0}
    assert {**of_result, "messages": [*MESSAGES], "reply": "It is 7."}.items() <= found.extras["was"].items()
    with pytest.raises(ScoringError, match="exited with 1: there is no answer"):
        scorer.score(given({}))
    script.write_text("print('good')")
    with pytest.raises(ScoringError, match="printed 'good' as its last line"):
        scorer.score(given({}))
    assert command_scorer([sys.executable, "-S", str(script)], 120).sha256 != scorer.sha256
    with pytest.raises(ScoringError, match="No such file"):
        command_scorer([str(tmp_path / "none")], 120).score(given({}))
