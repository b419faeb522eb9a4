"""verl's trainer is killed in the middle of a step and restarted, with and without its checkpoint."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainings import GROUP, SAME, grpo

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

# Agents outlive the restart of a trainer on a busy machine.
TIMEOUTS = {"model_call_s": 60, "agent_s": 300, "publish_grace_s": 10, "collection_s": 400, "session_key_s": 440}
EARLY, LATE = ("0", "1"), ("2", "3")


def task(number: int) -> dict[str, Any]:
    """Make a task: two sessions wait for "NAME-early", two for "NAME-late". Rewards differ between tasks."""
    name = f"task-{number}"
    waits = {**dict.fromkeys(EARLY, f"wait for {name}-early"), **dict.fromkeys(LATE, f"wait for {name}-late")}
    return {"name": name, "rewards": [2 * number + reward for reward in (0.0, 0.25, 0.5, 1.0)], "do": waits}


async def half_of_step_2(run: Any) -> tuple[set[str], set[str]]:
    """Run until four rollouts of the second step are done and four are running.

    Returns the names of the groups of the first and of the second step.
    """
    await run.start()
    await run.until(lambda: len(run.begun()) == 2 * GROUP, "at work in step 1")
    first = set(run.begun().values())
    run.say(*(f"{name}-{when}" for name in first for when in ("early", "late")))
    await run.until(lambda: len(run.begun()) == 4 * GROUP, "at work in step 2")
    second = set(run.begun().values()) - first
    assert len(second) == 2
    run.say(*(f"{name}-early" for name in second))
    await run.until(lambda: len(run.rollouts(2)) == 4, "half done with step 2")
    return first, second


def trained_as_one_step(run: Any, tasks: list[dict[str, Any]]) -> None:
    """Check that the gradient of step 2 has all rollouts of both processes once, all sampled by the same weights."""
    rows = [row for row in json.loads(run.spy_file.read_text().splitlines()[-1]) if row["trained"]]
    expected = {reward: advantage for task in tasks for reward, advantage in grpo(task["rewards"]).items()}
    assert sorted(row["reward"] for row in rows) == sorted(expected)
    for row in rows:
        assert row["advantages"] == pytest.approx([expected[row["reward"]]], abs=1e-5)
    [metrics] = run.metrics()
    assert metrics["training/global_step"] == 2
    assert metrics["training/rollout_probs_diff_max"] < SAME, "reused rollouts were sampled by other weights"
    assert metrics["actor/grad_norm"] > 0
    assert run.versions(2) == {"1"}


async def test_a_killed_trainer_resumes_from_its_checkpoint_with_finished_rollouts(tmp_path, training):
    """Rows of the second step come from two processes, all sampled by the weights that it trains."""
    tasks = [task(number) for number in range(4)]
    resumes = ("trainer.resume_mode=auto", "trainer.save_freq=1", "data.shuffle=True")
    async with training(tmp_path, tasks, 2, *resumes, timeouts=TIMEOUTS) as run:
        _, second = await half_of_step_2(run)
        finished = {rollout.rollout_id: rollout.encode() for rollout in run.rollouts(2)}
        begun = {rollout_id for rollout_id, name in run.begun().items() if name in second}
        await run.kill()

        run.forget()
        run.say(*(f"{name}-{when}" for name in second for when in ("early", "late")))
        await run.start_again()
        assert await run.ends() == 0, run.verl.log_tail()
        assert run.begun().keys() == begun - finished.keys(), "other rollouts than the unfinished ones ran again"
        again = {rollout.rollout_id: rollout.encode() for rollout in run.rollouts(2)}
        assert again.keys() == begun
        assert again.items() >= finished.items()
        report = run.report(2)
        assert report.resumed == 4
        assert report.trainable == report.planned == 2 * GROUP
        trained_as_one_step(run, [tasks[int(name.removeprefix("task-"))] for name in second])
        await run.leaves_nothing()


@pytest.mark.release
async def test_a_restarted_trainer_keeps_running_agents(tmp_path: Path, training: Any) -> None:
    """The trainer is back before the janitor closes the sessions, so no token is sampled again.

    With resume_mode=disable other weights are served, so nothing is reused; that process ends with its engine.
    """
    tasks = [task(number) for number in range(4)]
    resumes = ("trainer.resume_mode=auto", "trainer.save_freq=1", "data.shuffle=True")
    async with training(tmp_path, tasks, 2, *resumes, timeouts=TIMEOUTS) as run:
        run.own.write_text(yaml.safe_dump(yaml.safe_load(run.own.read_text()) | {"janitor": {"grace_s": 300}}))
        first, second = await half_of_step_2(run)
        begun = run.begun()
        await run.kill()
        run.say(*(f"{name}-late" for name in second))  # they call a gateway that is down
        await run.start_again()
        assert await run.ends() == 0, run.verl.log_tail()
        assert run.begun() == begun, "agents were started again"
        report = run.report(2)
        assert (report.resumed, report.reattached, report.attempts) == (4, 4, 0)
        assert report.trainable == report.planned == 2 * GROUP
        assert report.broken_histories == 0
        trained_as_one_step(run, [tasks[int(name.removeprefix("task-"))] for name in second])
        await run.leaves_nothing()

        updates, logged = len(run.spy_file.read_text().splitlines()), len(run.log)
        assert updates == 2
        run.forget()
        patience = {"serving": {"startup_timeout_s": 5, "max_restarts": 1}}
        run.own.write_text(yaml.safe_dump(yaml.safe_load(run.own.read_text()) | patience))
        await run.start_again("trainer.resume_mode=disable")
        await run.until(lambda: len(run.begun()) == 2 * GROUP, "running step 1 again from its beginning")
        assert set(run.begun().values()) == first
        [engine] = run.processes("launch_server.py")
        os.kill(engine, signal.SIGKILL)
        run.say(*(f"{name}-{when}" for name in first for when in ("early", "late")))
        assert await run.ends(within_s=250) != 0  # before the agents' deadline
        assert "a batch failed as a whole: engine-0 is gone" in run.log[logged:]
        assert len(run.spy_file.read_text().splitlines()) == updates, "a step whose engine died was trained"
        await run.leaves_nothing()
