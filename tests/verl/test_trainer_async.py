"""verl's asynchronous trainers: rollouts span weight versions, old ones are awaited, and a killed trainer resumes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import trainings
from trainings import GROUP, rollouts_of, versions

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

normal = partial(trainings.normal, max_tokens=8)
# Agents outlive the restart of a trainer, which took six minutes on a busy machine.
TIMEOUTS = {"model_call_s": 60, "agent_s": 1500, "publish_grace_s": 10, "collection_s": 1600, "session_key_s": 1700}
MODES = {"separate_async": 1, "colocate_async": 0}  # with how many devices of their own for rollouts


def waits(name: str, **sessions: str) -> dict[str, Any]:
    """Return a task of which these sessions call the model, wait for a file, and call it again."""
    return {**normal(name), "do": {number.strip("_"): f"wait for {file}" for number, file in sessions.items()}}


@pytest.mark.parametrize("mode", ["separate_async", pytest.param("colocate_async", marks=pytest.mark.release)])
async def test_a_killed_asynchronous_trainer_trains_each_group_once(tmp_path: Path, training: Any, mode: str) -> None:
    """verl is killed in step 2, with two groups in flight that its checkpoint holds and two that it does not."""
    tasks = [
        waits("first-0", _0="start"),
        normal("first-1"),
        waits("half", _1="go", _2="end", _3="end"),
        waits("none", **dict.fromkeys(("_0", "_1", "_2", "_3"), "end")),
        normal("whole"),
        waits("late", **dict.fromkeys(("_0", "_1", "_2", "_3"), "restart")),
        normal("last-0"),
        normal("last-1"),
    ]
    settings = [
        f"trainer.v1.trainer_mode={mode}",
        "trainer.v1.separate_async.parameter_sync_step=1",
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
        "trainer.resume_mode=auto",
        "data.max_response_length=64",  # includes the messages between two turns
        "+trainer.v1.sampler.sampler_kwargs.max_staleness=2",
    ]
    how = {"rollout_devices": MODES[mode], "timeouts": TIMEOUTS, "backend": {"janitor": {"grace_s": 1500}}}
    async with training(tmp_path, tasks, 2, *settings, **how) as run:
        await run.start()
        await run.until(lambda: len(run.begun()) == 4 * GROUP, "at work in step 1")
        run.say("start")
        await run.until(lambda: run.steps_done() == 1, "done with step 1")
        await run.until(lambda: len(run.begun()) == 6 * GROUP, "at work in step 2")
        run.say("go")  # the weights are of version 1 by now
        await run.until(lambda: len(run.finished()) == 3 * GROUP + 2, "done with half")
        begun = run.begun()
        [first] = run.metrics()
        await run.kill()
        run.say("restart")  # they call a gateway that is down
        await run.start_again()
        await run.until(lambda: len(run.finished()) == 6 * GROUP + 2, "done with all but the oldest groups")
        run.say("end")
        assert await run.ends() == 0, run.verl.log_tail()

        again = {name for rollout_id, name in run.begun().items() if rollout_id not in begun}
        assert again == {"last-0", "last-1"}, "agents were started again"
        trained = [run.gradient(step) for step in (1, 2, 3)]
        assert [of_step.keys() for of_step in trained] == [
            {"first-0", "first-1"},
            {"whole", "late"},
            {"half", "none"},  # and not the groups of step 3, although they were finished before
        ]
        assert all(len(rows) == GROUP for of_step in trained for rows in of_step.values())
        second, third = run.metrics()
        assert [each["rollouts/staleness/max"] for each in (first, second, third)] == [0, 0, 2]
        assert [each["rollouts/left_out/sum"] for each in (first, second, third)] == [0, 0, 0]
        assert all(each["actor/grad_norm"] > 0 for each in (first, second, third))
        assert sorted(map(versions, rollouts_of(run, "half"))) == [[0], [0, 1], [0, 2], [0, 2]]
        assert sum(report.resumed for report in run.reports()) == GROUP + 2
        assert sum(report.reattached for report in run.reports()) == 2 * GROUP + 2
        assert all(report.balanced and report.sessions_open == 0 for report in run.reports())
