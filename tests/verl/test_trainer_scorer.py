"""verl's real trainer with a reward function of verl: it trains the function's rewards, not the agent's, in as many
optimizer steps as if each rollout had one row."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_wrapper.contract import Rollout
from rollout_backend.run.scoring.scorer import ScoreInput
from trainings import GROUP, grpo, normal, rollouts_of

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.release, pytest.mark.timeout(1800)]

FUNCTION = """
import hashlib

async def compute_score(data_source, solution_str, ground_truth, extra_info):
    assert ground_truth == "secret"
    of_reply = int(hashlib.sha256(solution_str.encode()).hexdigest()[:6], 16) / 2**24
    return {"score": 5.0 + of_reply, "turn_rewards": [0.25, 0.5][: extra_info["turns"]], "of_reply": of_reply}
"""


def score_of(rollout: Rollout) -> float:
    """Return what the function returns for a stored rollout."""
    reply = ScoreInput("", {}, {}, rollout).reply
    return 5.0 + int(hashlib.sha256(reply.encode()).hexdigest()[:6], 16) / 2**24


async def test_the_trained_rewards_are_those_of_the_reward_function(tmp_path: Path, training: Any) -> None:
    columns = {"reward_model": {"ground_truth": "secret"}}
    tasks = [
        normal("one", columns={**columns, "extra_info": {"turns": 1}}),
        normal("two", segments=2, columns={**columns, "extra_info": {"turns": 2}}),
    ]
    function = tmp_path / "reward.py"
    function.write_text(FUNCTION)
    settings = [
        f"reward.custom_reward_function.path={function}",
        "reward.custom_reward_function.name=compute_score",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",  # two steps; three for the 12 rows by verl alone
        "trainer.save_freq=1",
    ]
    async with training(tmp_path, tasks, len(tasks), *settings) as run:
        await run.start()
        assert await run.ends() == 0, run.verl.log_tail()

        rows = run.gradient(step=1)
        for name, of_turns, segments in (("one", 0.25, 1), ("two", 0.75, 2)):
            stored = rollouts_of(run, name)
            assert len(stored) == GROUP
            assert sorted(each.score.agent_reward for each in stored) == [0.0, 0.25, 0.5, 1.0]
            returns = [score_of(each) + of_turns for each in stored]
            assert [each.reward + sum(each.turn_rewards) for each in stored] == returns
            trained = [row["reward"] for row in rows[name]]
            assert sorted(trained) == pytest.approx(sorted(returns * segments), abs=1e-5)
            if len(set(returns)) == GROUP:
                advantages = sorted(value for row in rows[name] for value in row["advantages"])
                assert advantages == pytest.approx(sorted([*grpo(returns).values()] * segments), abs=1e-3)
        [report] = run.reports()
        assert report.outcomes["completed"] == 2 * GROUP
        assert run.metrics()[0]["rollouts/trained/sum"] == 2 * GROUP
        await run.leaves_nothing()
    [optimizer] = (tmp_path / "checkpoints").glob("global_step_1/actor/optim_world_size_1_rank_0.pt")
    state = torch.load(optimizer, weights_only=False)["state"]
    assert {int(parameter["step"]) for parameter in state.values()} == {2}
