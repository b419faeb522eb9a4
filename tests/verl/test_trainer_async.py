"""verl's asynchronous trainers: rollouts continue while weights change, and stale ones are left out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import trainings
from rollout_backend.core.report import StepReport
from trainings import GROUP, rollouts_of, versions

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

normal = partial(trainings.normal, max_tokens=8)
TIMEOUTS = {"model_call_s": 60, "agent_s": 240, "publish_grace_s": 10, "collection_s": 300, "session_key_s": 360}


def waits(name: str, go: str) -> dict[str, Any]:
    """Return a task whose sessions call the model, wait for `go`, and call it again."""
    return {**normal(name), "do": dict.fromkeys("0123", f"wait for {go}")}


async def test_rollouts_span_weight_versions_and_stale_ones_are_dropped(tmp_path: Path, training: Any) -> None:
    """verl prefetches a batch. One group of the first batch ends with the next weights, and one much later."""
    tasks = [
        waits("spans", "go"),
        waits("too-old", "go-late"),
        normal("first-0"),
        normal("first-1"),
        waits("second-0", "go-second"),
        waits("second-1", "go-second"),
        normal("third-0"),
        normal("third-1"),
        waits("fourth-0", "go-last"),
        waits("fourth-1", "go-last"),
        *(normal(f"more-{i}") for i in range(6)),
    ]
    settings = [
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=1",
        "trainer.total_training_steps=4",
        "data.max_response_length=64",  # includes the messages between two turns
        "+trainer.v1.sampler.sampler_kwargs.max_staleness=2",
    ]
    async with training(tmp_path, tasks, 2, *settings, rollout_devices=1, timeouts=TIMEOUTS) as run:
        await run.start()
        await run.until(lambda: run.steps_done() >= 1, "done with step 1")
        run.say("go")  # the weights are of version 1 by now
        await run.until(lambda: len(rollouts_of(run, "spans")) == GROUP, "done with the group that spans")
        run.say("go-second")
        await run.until(lambda: run.steps_done() >= 3, "done with step 3")
        run.say("go-late")
        await run.until(lambda: len(rollouts_of(run, "too-old")) == GROUP, "done with the old group")
        run.say("go-last")
        assert await run.ends() == 0, run.verl.log_tail()

        for rollout in rollouts_of(run, "spans"):
            assert versions(rollout) == [0, 1]
        for rollout in rollouts_of(run, "too-old"):
            assert versions(rollout) == [0, 3]
        first, second, _, fourth = run.metrics()
        assert first["rollouts/staleness/max"] == 0
        assert set(run.gradient(step=2)) > {"spans"}
        assert second["rollouts/staleness/max"] == 1
        assert 0 < second["rollouts/staleness/mean"] < 1
        assert second["training/off_policy/trajectory_spans/max"] == 2, "verl's own metric"
        assert fourth["rollouts/left_out/too_old/sum"] == GROUP
        assert fourth["rollouts/groups_dropped/sum"] == 1
        assert fourth["rollouts/trained/sum"] == 2 * GROUP, "the group is not replaced"
        assert fourth["rollouts/staleness/max"] <= 2
        assert "too-old" not in {name for step in range(1, 5) for name in run.gradient(step)}
        for metrics in run.metrics():
            assert metrics["actor/grad_norm"] > 0
        spanning = run.reports()[0]
        assert isinstance(spanning, StepReport)
        assert set(spanning.weight_versions) == {"0", "1", "3"}
        assert spanning.staleness is not None
        assert spanning.staleness.max == 3
        await run.leaves_nothing()
