"""verl lends the trainer's device to generation: a server leaves in the middle of a step and returns for the next."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import trainings
from agent_wrapper.contract import Outcome
from trainings import GROUP, rollouts_of, versions

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.release, pytest.mark.timeout(1800)]

normal = partial(trainings.normal, max_tokens=8)
TIMEOUTS = {"model_call_s": 60, "agent_s": 400, "publish_grace_s": 10, "collection_s": 450, "session_key_s": 600}


def asks(name: str) -> dict[str, Any]:
    """Return a task whose sessions keep calling the model until `go`."""
    return {**normal(name), "max_tokens": 32, "do": dict.fromkeys("0123", "ask until go")}


async def test_rollouts_complete_while_a_hybrid_server_leaves_and_returns(tmp_path: Path, training: Any) -> None:
    """In each step verl takes the trainer's server back as soon as two groups are complete, while "stays" continues.

    After the first two steps the server returns, with new weights.
    """
    tasks = [asks("stays"), *(normal(f"quick-{i}") for i in range(7))]
    settings = [
        "actor_rollout_ref.hybrid_engine=True",
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=1",
        "trainer.v1.separate_async.hybrid_rollout.enable_switch=True",
        "trainer.v1.separate_async.hybrid_rollout.switch_threshold_ratio=1.0",
        "trainer.v1.separate_async.hybrid_rollout.adaptive_switch_threshold=False",
        "trainer.total_training_steps=3",
        "data.max_response_length=32",
    ]
    async with training(tmp_path, tasks, 2, *settings, rollout_devices=1, timeouts=TIMEOUTS) as run:
        await run.start()
        await run.until(lambda: run.steps_done() >= 2, "done with step 2")
        run.say("go")
        assert await run.ends() == 0, run.verl.log_tail()

        metrics = run.metrics()
        assert ["timing_s/switch_to_trainer" in each for each in metrics] == [True, True, True]
        assert ["timing_s/switch_to_rollout" in each for each in metrics] == [True, True, False]
        for report in run.reports():
            assert report.outcomes[Outcome.COMPLETED] == report.planned == 2 * GROUP, report
        hybrid = (tmp_path / "sglang_cpu_0.log").read_text()
        _, first, second, third = hybrid.split("Weight version changed")  # to versions 0, 1 and 2
        assert all("Prefill batch" in served for served in (first, second, third)), hybrid

        for rollout in rollouts_of(run, "stays"):
            assert rollout.attempt == 1
            assert versions(rollout)[0] == 0
            assert versions(rollout)[-1] >= 2
            assert versions(rollout) == sorted(versions(rollout))
        # Each batch begins with the version of its step. The last batch may be incomplete when verl ends.
        for name, version in {
            "quick-0": 0,
            "quick-1": 0,
            "quick-3": 1,
            "quick-4": 1,
            "quick-5": 2,
            "quick-6": 2,
        }.items():
            sampled = [each for rollout in rollouts_of(run, name) for each in versions(rollout)]
            assert min(sampled, default=version) == version
            assert version == 2 or len(sampled) >= GROUP
        assert metrics[0]["rollouts/staleness/max"] == 0
        assert metrics[0]["training/rollout_probs_diff_max"] < 1e-3, (
            "sampled by other weights than those of version 0"
        )
        await run.leaves_nothing()
