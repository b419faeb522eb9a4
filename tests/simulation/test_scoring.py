"""Steps whose rewards a scorer computes, in virtual time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgpack
import pytest

from agent_wrapper.contract import REQUEST_FIELD, Failure, Outcome, Rollout
from rollout_backend.core.manifest import StepRequest
from rollout_backend.core.tasks import Task
from rollout_backend.errors import CircuitOpen
from rollout_backend.run.scoring.rollout_scorer import RolloutScorer
from rollout_backend.run.scoring.scorer import ScoringError
from rollout_backend.run.step.step import Step

SHA256 = "a" * 64


class Judge:
    """A scorer that fails `failures` times for each rollout, and then returns its next reward."""

    def __init__(self, failures: int = 0, rewards: Any = (3.0,) * 100) -> None:
        self.failures = failures
        self.rewards = iter(rewards)
        self.requests: list[dict[str, Any]] = []

    async def __call__(self, request: bytes) -> dict[str, Any]:
        fields = msgpack.unpackb(request)
        self.requests.append(fields)
        rollout_id = Rollout.decode(fields["result"]).rollout_id
        if sum(Rollout.decode(each["result"]).rollout_id == rollout_id for each in self.requests) <= self.failures:
            raise ScoringError("the judge is down")
        return {"scorer": "judge", "sha256": SHA256, "reward": next(self.rewards), "extras": {"verdict": "good"}}


def scored_step(run: Any, judge: Judge, tasks: int = 1, digest: str = SHA256) -> Step:
    """Return a step of tasks with a private part, whose rollouts `judge` scores."""
    scorer = RolloutScorer(run.store, run.config.run_id, judge, "judge", digest)
    services = {**vars(run.services), "scorer": scorer}
    made = tuple(Task(f"t{i}", {"q": f"{i}"}, private={"answer": f"secret-{i}"}) for i in range(tasks))
    return Step(StepRequest(0, made, run.config.sampling), type(run.services)(**services))


def test_the_scorer_replaces_the_agents_reward(play, make_run, make_config):
    async def work():
        run, judge = make_run(make_config(group={"size": 2})), Judge()
        invoked: list[bytes] = []
        invoke = run.runtime.invoke

        async def record(session_id: str, payload: bytes) -> bytes:
            invoked.append(payload)
            return await invoke(session_id, payload)

        run.runtime.invoke = record
        return await scored_step(run, judge, tasks=2).run(), judge, run, invoked

    result, judge, run, invoked = play(work())
    assert [rollout.reward for rollout in result.rollouts] == [3.0] * 4
    assert all(group.usable and {each.reward for each in group.rollouts} == {3.0} for group in result.groups)
    for rollout in result.rollouts:
        agents_own = run.world.agents.results[f"runs/simulated/steps/00000000/{rollout.rollout_id}"]
        assert rollout.score is not None
        assert (rollout.score.scorer, rollout.score.sha256) == ("judge", SHA256)
        assert rollout.score.agent_reward == agents_own.reward
        assert rollout.extras == {"verdict": "good"}
        assert Rollout.decode(rollout.encode()).encode() == rollout.encode()
    assert {each["private"]["answer"] for each in judge.requests} == {"secret-0", "secret-1"}
    # The private part leaves the trainer for the scorer only.
    assert len(invoked) == 4
    assert not [payload for payload in invoked if b"secret-" in payload]
    assert set(json.loads(invoked[0])) == {"q", REQUEST_FIELD}
    assert not [key for key, body in run.world.bucket.objects.items() if b"secret-" in body or "secret-" in key]


@pytest.mark.parametrize("has_scorer", [True, False])
def test_what_an_agent_left_unscored_is_trained_with_the_scorers_reward_only(play, make_run, make_config, has_scorer):
    async def work():
        run = make_run(make_config(group={"size": 1}))
        make_result = run.world.agents.make_result

        def leave_unscored(*args: Any, **more: Any) -> Rollout:
            failure = Failure(reason="no_reward", message="")
            update = {"outcome": Outcome.AGENT_ERROR, "reward": None, "failure": failure}
            return make_result(*args, **more).model_copy(update=update)

        run.world.agents.make_result = leave_unscored
        step = scored_step(run, Judge()) if has_scorer else run.step(1)
        return await step.run()

    result = play(work())
    rewards = [(rollout.outcome, rollout.reward) for rollout in result.rollouts]
    if has_scorer:
        assert rewards == [(Outcome.COMPLETED, 3.0)]
        assert [rollout.score.agent_reward for rollout in result.rollouts] == [None]
    else:
        assert result.report.reasons == {"agent_error: no_reward": 1}
        assert [group.rollouts for group in result.groups] == [()]


def test_a_failing_scorer_is_called_again_and_no_rollout_runs_again(play, make_run, make_config):
    async def work():
        run, judge = make_run(make_config(group={"size": 2, "policy": "replace"})), Judge(failures=3)
        return await scored_step(run, judge).run(), judge, run

    result, judge, run = play(work())
    assert [rollout.reward for rollout in result.rollouts] == [3.0, 3.0]
    assert len(judge.requests) == 8
    assert len(run.world.audit.started) == 2


@pytest.mark.parametrize(("retry_s", "why"), [(60, "scoring.retry_s"), (86400, "the step's time was up")])
def test_an_unscored_rollout_is_lost_and_never_0(play, make_run, make_config, retry_s, why):
    async def work():
        run = make_run(make_config(group={"size": 1, "policy": "replace"}, scoring={"retry_s": retry_s}))
        step = scored_step(run, Judge(failures=10**6), tasks=2)
        return await step.run(), step, run

    result, step, run = play(work())
    assert result.report.outcomes[Outcome.INFRA_ERROR] == 2
    assert [rollout.reward for rollout in result.rollouts] == [None, None]
    assert [group.rollouts for group in result.groups] == [(), ()]
    assert len(run.world.audit.started) == 2, "a new rollout does not help a broken scorer"
    for record in step.results.records.all():
        assert (record.outcome, record.reason, record.trainable) == (Outcome.INFRA_ERROR, "scorer_failed", False)
        assert why in record.message
        assert "the judge is down" in record.message
        assert record.result is not None


def test_a_scorer_that_ends_late_at_the_deadline_is_waited_for(play, make_run, make_config):
    class Slow(Judge):
        async def __call__(self, request: bytes) -> dict[str, Any]:
            try:
                await asyncio.sleep(10**6)
            finally:
                await asyncio.sleep(1)  # as while its process is killed
            raise AssertionError

    async def work():
        step = scored_step(make_run(make_config(group={"size": 1})), Slow())
        await step.run()
        return step.results.records.all()

    [record] = play(work())
    assert (record.outcome, record.reason) == (Outcome.INFRA_ERROR, "scorer_failed")
    assert "the step's time was up" in record.message


def test_a_broken_scorer_opens_the_breaker(play, make_run, make_config):
    async def work():
        breaker = {"max_failures": 3, "min_span_s": 0}
        run = make_run(make_config(group={"size": 4}, scoring={"retry_s": 10}, circuit_breaker=breaker))
        await scored_step(run, Judge(failures=10**6)).run()

    with pytest.raises(CircuitOpen, match=r"scorer_failed.*the judge is down.*scorer.log"):
        play(work())


def test_a_restarted_trainer_trains_the_recorded_score(play, make_run, make_config):
    async def work():
        config = make_config(group={"size": 2})
        first = make_run(config)
        before = await scored_step(first, Judge(rewards=(1.5, 2.5))).run()
        first.trainer.alive = False
        again = Judge(rewards=(7.0, 8.0))
        after = await scored_step(make_run(config, first.world, 2), again).run()
        other = await scored_step(make_run(config, first.world, 3), again, digest="b" * 64).run()
        return before, after, again, other

    before, after, again, other = play(work())
    rewards = {rollout.rollout_id: rollout.reward for rollout in before.rollouts}
    assert set(rewards.values()) == {1.5, 2.5}
    assert {rollout.rollout_id: rollout.reward for rollout in after.rollouts} == rewards
    assert {rollout.reward for rollout in other.rollouts} == {7.0, 8.0}, "another scorer scores anew"
    assert len(again.requests) == 2


def test_a_killed_scoring_is_resumed_without_another_rollout(play, make_run, make_config):
    async def work():
        config = make_config(group={"size": 2})
        first = make_run(config)
        await first.killed_at(scored_step(first, Judge(failures=10**6)), 120)
        result = await scored_step(make_run(config, first.world, 2), Judge()).run()
        return result, first.world

    result, world = play(work())
    assert [rollout.reward for rollout in result.rollouts] == [3.0, 3.0]
    assert result.report.resumed == 2
    assert len(world.audit.started) == 2
