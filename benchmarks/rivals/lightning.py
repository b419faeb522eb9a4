"""Run a step with agentlightning's store, in its environment.

The trainer's process serves the store and asks it as its verl daemon does, with that daemon's rules: a rollout with
a model call and without a reward is trained with the reward 0, one without a model call is missing. The daemon does
not use the store's retries; here they are on.

The runners are another process, which uses the store's client through the fault proxy as its runner does. They print
what is true of each attempt.
"""

import asyncio
import json
import random
import time
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import fields
from typing import Any

from agentlightning import InMemoryLightningStore, LightningStoreClient, LightningStoreServer
from agentlightning.types import OtelResource, RolloutConfig, Span, TraceStatus
from harness import Died, FailingAgents, Truth, Work, ended, hand_over, main, tokens_of

POLL_S = 5.0  # of the verl daemon and of a runner
ATTEMPTS = 3
RETRIED = ["failed", "timeout", "unresponsive"]
MODEL_CALL, REWARD = "openai.chat.completion", "reward"


async def step_with_faults(work: Work) -> None:
    store = LightningStoreServer(InMemoryLightningStore(thread_safe=True), host="127.0.0.1", port=work["port"])
    await store.start()
    limits = RolloutConfig(
        timeout_seconds=work["limit_s"],
        unresponsive_seconds=work["limit_s"],
        max_attempts=ATTEMPTS,
        retry_condition=RETRIED,
    )
    groups: dict[str, str] = {}
    for number in range(work["groups"] * work["group"]):
        group = f"t{number // work['group']}"
        rollout = await store.enqueue_rollout(input={"task": group}, mode="train", config=limits)
        groups[rollout.rollout_id] = group
    had: dict[str, str] = {}
    while len(had) < len(groups):
        for rollout in await store.wait_for_rollouts(rollout_ids=list(groups), timeout=0):
            had.setdefault(rollout.rollout_id, rollout.status)
        await asyncio.sleep(POLL_S)
    for rollout_id, group in groups.items():
        spans = await store.query_spans(rollout_id, attempt_id="latest")
        rewards = [span.attributes["reward"] for span in spans if span.name == REWARD]
        for span in spans:
            if span.name == MODEL_CALL:
                hand_over(group, rewards[-1] if rewards else 0.0, json.loads(span.attributes["token_ids"]))
    ended(Counter(status for status in had.values() if status != "succeeded"))
    await store.stop()


class Runners:
    def __init__(self, work: Work) -> None:
        self._fault = work["fault"]
        self._store = LightningStoreClient(work["url"])
        self._agents = FailingAgents(self._fault, say)

    async def run(self, name: str) -> None:
        """Be one of the runners, until a container dies."""
        with suppress(Died):
            while True:
                rollout = await self._store.dequeue_rollout(worker_id=name)
                if rollout is None:
                    await asyncio.sleep(POLL_S * random.uniform(0.9, 1.1) / 10)  # ten times as often as its default
                else:
                    await self._attempt(rollout)

    async def _attempt(self, rollout: Any) -> None:
        agent = self._agents.make(rollout.input["task"])
        status = "succeeded"
        try:
            ids = tokens_of(0) if agent.fault == "forged_tokens" else tokens_of(agent.proof)
            await self._add(rollout, 1, MODEL_CALL, {"token_ids": json.dumps(ids)})
            if agent.fault == "foreign_container":
                await self._write_for_another(rollout)
            reward = await agent.run()
            for _ in range(2 if self._fault == "published_twice" else 1):
                await self._add(rollout, 2, REWARD, {"reward": reward})
        except Died:
            raise
        except Exception:
            status = "failed"
        for _ in range(2 if self._fault == "published_twice" else 1):
            with suppress(Exception):  # its runner gives the update up, too
                await self._store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status=status)
        agent.end()

    async def _write_for_another(self, rollout: Any) -> None:
        """Write the reward of another rollout that is running, and end it."""
        running = await self._store.query_rollouts(status_in=["running", "preparing"])
        for other in running:
            if other.rollout_id != rollout.rollout_id and other.input["task"] == rollout.input["task"]:
                theirs = await self._store.get_latest_attempt(other.rollout_id)
                other = other.model_copy(update={"attempt": theirs}) if hasattr(other, "attempt") else other
                await self._add(other, 9, REWARD, {"reward": 7.0}, theirs.attempt_id)
                await self._store.update_attempt(other.rollout_id, theirs.attempt_id, status="succeeded")
                return

    async def _add(
        self, rollout: Any, sequence: int, name: str, attributes: dict[str, Any], attempt_id: str | None = None
    ) -> None:
        """Add a finished span to an attempt; `sequence` is its number there."""
        span = Span(
            rollout_id=rollout.rollout_id,
            attempt_id=attempt_id or rollout.attempt.attempt_id,
            sequence_id=sequence,
            trace_id=uuid.uuid4().hex,
            span_id=uuid.uuid4().hex[:16],
            parent_id=None,
            name=name,
            status=TraceStatus(status_code="OK"),
            attributes=attributes,
            events=[],
            links=[],
            start_time=time.time(),
            end_time=time.time(),
            context=None,
            parent=None,
            resource=OtelResource(attributes={}, schema_url=""),
        )
        await self._store.add_span(span)


def say(agent: Truth) -> None:
    print(json.dumps({field.name: getattr(agent, field.name) for field in fields(Truth)}), flush=True)


async def run_agents(work: Work) -> None:
    runners = Runners(work)
    await asyncio.gather(*(runners.run(f"runner-{number}") for number in range(work["groups"] * work["group"])))


if __name__ == "__main__":
    main(step_with_faults, run_agents)
