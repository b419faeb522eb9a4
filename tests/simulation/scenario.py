"""The settings and the tasks of a seed's run, drawn at random."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Self

from rollout_backend.config import RolloutConfig
from rollout_backend.core.tasks import Task
from tests.simulation.faults import Situation
from tests.simulation.gateway import HEARTBEAT_S
from tests.simulation.s3 import BUCKET
from tests.simulation.world import World


def planned_rollouts(seed: int) -> int | None:
    """Return how many rollouts a step of this seed's history plans; None for a small step of a random size.

    Large steps meet what small ones cannot: a backlog of announcements, listings of several pages, more sessions than
    a quota grants, and minutes of dispatching during which the trainer is killed.
    """
    if seed % 500 == 499:
        return 1024
    return 256 if seed % 25 == 24 else None


@dataclass(frozen=True)
class Scenario:
    """One run: its settings, and the tasks of each step."""

    config: RolloutConfig
    with_queue: bool
    steps: list[list[Task]]
    scored: bool  # by a scorer of the training side

    @classmethod
    def draw(cls, world: World, planned: int | None, *, scored: bool) -> Self:
        """`planned` is the number of rollouts of a large step."""
        config = _config(world.random, planned, world.situation)
        with_queue = not world.chance("queue_off") and config.uses_queue
        steps = range(max(world.situation.least_steps, world.random.randint(1, 3 if planned is None else 2)))
        tasks = [_tasks(world.random, planned, config.group.size, step) for step in steps]
        return cls(config, with_queue, tasks, scored)


def _tasks(draw: Random, planned: int | None, size: int, step: int) -> list[Task]:
    count = draw.randint(1, 4) if planned is None else -(-planned // size)
    # The same in each step, as in epochs.
    return [Task(f"t{step}-{i}", {"q": f"{i}"}, priority=i % 2) for i in range(count)]


def _config(draw: Random, planned: int | None, situation: Situation) -> RolloutConfig:
    size = draw.randint(1, 3) if planned is None else draw.choice([4, 8])
    policy = draw.choice(["strict", "min_viable", "replace"])
    # Before the first result of a large step, three of its invokes can fail in each life of the run.
    most_failures = [None, 20, 3 if planned is None else 20]
    settings: dict[str, Any] = {
        "run_id": "simulated",
        "model": {"path": Path("model")},
        "storage": {"bucket": BUCKET},
        "runtime": {
            "kind": "http",
            "url": "http://agents",
            "invoke_per_s": 10 if planned is None else 50,
            "max_attempts": draw.randint(1, 4),
            "max_sessions": draw.choice([2, 6, 64] if planned is None else [planned // 4, 2 * planned]),
            **situation.runtime,
        },
        "group": {
            "size": size,
            "policy": policy,
            "min_viable": draw.randint(1, size),
            "target_groups": draw.choice([None, None, 1]) if planned is None else None,
            "oversample": draw.choice([0, 0, 1, 2]),
            "straggler_after": draw.choice([None, None, 0.5, 0.9]),
            "straggler_factor": draw.choice([1.0, 2.0]),
            "block_task_after": draw.choice([None, 1, 1, 2]),
            **situation.group,
        },
        "circuit_breaker": {"max_failures": draw.choice(most_failures), "min_span_s": draw.choice([0.0, 0.0, 30.0])},
        "collect": {"list_after_idle_s": 10, "list_interval_s": 1 if situation.protocol == "rollout" else 20},
        "scoring": {"retry_s": 20 if policy == "replace" else 600},
        "timeouts": {
            "model_call_s": 20, "agent_s": 60, "publish_grace_s": 30,
            "collection_s": draw.choice([120, 300] if planned is None else [300, 600]),
            "session_key_s": 900, "heartbeat_s": HEARTBEAT_S,
        },
    }  # fmt: skip
    settings["group"]["min_viable"] = min(settings["group"]["min_viable"], settings["group"]["size"])
    return RolloutConfig.parse(settings)
