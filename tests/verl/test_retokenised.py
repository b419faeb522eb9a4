"""Messages instead of tokens on verl's real trainer: rows that have no logprobs, and a batch in which none has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_wrapper.contract import Rollout

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]


async def test_retokenised_rows_are_trained_without_logprobs(tmp_path: Path, training: Any) -> None:
    told = {"name": "told", "rewards": [0.0, 1.0, 0.25, 0.5], "segments": 0, "do": dict.fromkeys("0123", "tell")}
    # One is lost, so that verl fills the batch up with rows of its own.
    sampled = {"name": "sampled", "rewards": [0.0, 1.0, 0.25, 0.5], "do": {"3": "raise"}}
    no_logprobs = "actor_rollout_ref.rollout.calculate_log_probs=False"
    async with training(tmp_path, [told, sampled], 2, no_logprobs) as run:
        tree = yaml.safe_load(run.own.read_text())
        run.own.write_text(yaml.safe_dump({**tree, "collect": {"retokenise": True}}))
        await run.start()
        assert await run.ends() == 0, run.verl.tail()

        [report] = run.reports()
        assert report.balanced
        assert (report.trainable, report.retokenised) == (7, 4)
        assert report.reasons == {"agent_error: agent_exception": 1}
        assert "7 trainable (4 re-tokenised)" in run.log

        kept = [Rollout.decode(file.read_bytes()) for file in run.run_dir.glob("rollouts/*/*")]
        guesses = [rollout for rollout in kept if rollout.retokenised]
        assert len(guesses) == 4
        rows = json.loads(run.spy_file.read_text().splitlines()[0])
        names = run.groups()
        trained = [row["trained"] for row in rows if names.get(row["uid"].partition("_")[0]) == "told"]
        assert sorted(trained) == sorted(min(8, rollout.sampled_tokens) for rollout in guesses)

        [metrics] = run.metrics()
        assert metrics["actor/grad_norm"] > 0
        assert not [name for name in metrics if "rollout_probs_diff" in name], "there is nothing to compare with"
        await run.leaves_nothing()
