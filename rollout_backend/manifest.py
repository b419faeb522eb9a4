"""What a step was going to do, written to S3 before its first dispatch, so that a trainer started again can go on.

What must always hold:

- a step is the same step if run, number, weights and tasks are the same: payloads, sampling and sizes of groups, in
  any order. The tasks' own ids do not count, for trainers draw them anew each time;
- whoever can read a manifest knows every session that may be open for it: session ids follow from it;
- no attempt's number, and so no session id, is used twice, however often the step is taken up again.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal, Self

from pydantic import Field

from agent_wrapper.contract import MAX_STEP, ContractObject, Identifier, Sampling
from rollout_backend.tasks import Task


class PlannedTask(ContractObject):
    """One group. `digest` is of what the agents are given; `rollouts` are the ids of the group, in order."""

    task_id: Identifier
    digest: str
    rollouts: tuple[Identifier, ...]


class Manifest(ContractObject):
    schema_version: Literal[1] = 1
    run_id: Identifier
    step: int = Field(ge=0, le=MAX_STEP)
    series: int = Field(default=0, ge=0)
    """Counts the different steps that have had this number in this run."""
    takes: int = Field(default=1, ge=1)
    """How often this step was begun."""
    nonce: str = Field(default_factory=lambda: secrets.token_hex(16))
    attempts_before: int = Field(default=0, ge=0)
    """Attempts that earlier takes may have made of each rollout."""
    attempts_closed: int = Field(default=0, ge=0)
    """So many first attempts of each rollout have surely no session left open."""
    attempts: int = Field(ge=1)
    """Attempts that this take may make of each rollout."""
    written_at: float
    deadline: float
    """Unix seconds when the step ends at the latest."""
    weights: str = ""
    """The model that was served when the step began, and its version if that is known."""
    sealed_by: str = ""
    """Fingerprint of the secret that seals what is sampled; empty where nothing is sealed."""
    gateway: str = ""
    """Names the addresses and the journals of the gateways; empty where no session can go on after this take."""
    tasks: tuple[PlannedTask, ...]

    @classmethod
    def plan(
        cls,
        run_id: str,
        step: int,
        tasks: Sequence[tuple[Task, int, Sampling]],
        *,
        attempts: int,
        now: float,
        deadline: float,
        weights: str = "",
        sealed_by: str = "",
        gateway: str = "",
        before: Manifest | None = None,
        same_weights: bool = True,
    ) -> Self:
        """The step's manifest. `tasks` with the size of each group and its sampling.

        `before` is what stands in S3 of a step of this number. If that is the same step, this is another take of
        it, with the rollouts that it planned; else the ids of the rollouts are such as it never used.
        If other `weights` were served then, or `same_weights` is False, what was sampled then is not used.
        """
        groups = [
            PlannedTask(
                task_id=task.task_id,
                digest=digest_of(task, size, sampling),
                rollouts=tuple(f"{task.task_id}.{i}" for i in range(size)),
            )
            for task, size, sampling in tasks
        ]
        fields = {
            "run_id": run_id,
            "step": step,
            "attempts": attempts,
            "written_at": now,
            "deadline": deadline,
            "weights": weights,
            "sealed_by": sealed_by,
            "gateway": gateway,
        }
        if before is None:
            return cls.model_validate({**fields, "tasks": groups})
        taken = before.matched(groups) if same_weights and before.weights == weights else None
        if taken is not None:
            return cls.model_validate(
                {
                    **fields,
                    "series": before.series,
                    "takes": before.takes + 1,
                    "nonce": before.nonce,
                    "attempts_before": before.attempts_before + before.attempts,
                    "attempts_closed": before.attempts_closed,
                    "tasks": taken,
                }
            )
        series = before.series + 1
        renamed = [
            group.model_copy(
                update={"rollouts": tuple(f"{group.task_id}.s{series}.{i}" for i in range(len(group.rollouts)))}
            )
            for group in groups
        ]
        return cls.model_validate({**fields, "series": series, "tasks": renamed})

    def matched(self, groups: Iterable[PlannedTask]) -> list[PlannedTask] | None:
        """For each group this manifest's rollouts of the same content; None if it is not the same step."""
        known: dict[str, list[PlannedTask]] = defaultdict(list)
        for task in self.tasks:
            known[task.digest].append(task)
        found = []
        for group in groups:
            if not known[group.digest]:
                return None
            found.append(group.model_copy(update={"rollouts": known[group.digest].pop(0).rollouts}))
        return None if any(known.values()) else found

    @property
    def resumed(self) -> bool:
        return self.takes > 1

    def with_rollout(self, task_id: str, rollout_id: str) -> Self:
        """With one more rollout of a task, planned in the place of one that was lost."""
        tasks = tuple(
            task.model_copy(update={"rollouts": (*task.rollouts, rollout_id)}) if task.task_id == task_id else task
            for task in self.tasks
        )
        return self.model_copy(update={"tasks": tasks})

    def next_rollout(self, task_id: str) -> str:
        """The id of a further rollout of the task."""
        [task] = (task for task in self.tasks if task.task_id == task_id)
        first = task.rollouts[0].rpartition(".")[0]
        return f"{first}.{len(task.rollouts)}"

    def session_id(self, rollout_id: str, attempt: int) -> str:
        """The session of an attempt; `attempt` counts from 1 over all takes. 40 characters: runtimes want 33."""
        text = f"{self.nonce}/{self.series}/{rollout_id}/{attempt}"
        return f"rollout-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"

    def earlier_sessions(self, rollout_id: str) -> list[str]:
        """The sessions that an earlier take may have left open, the last first."""
        attempts = range(self.attempts_before, self.attempts_closed, -1)
        return [self.session_id(rollout_id, attempt) for attempt in attempts]

    def with_closed(self, attempts: int) -> Self:
        """Once every session of the first so many attempts is closed."""
        return self.model_copy(update={"attempts_closed": attempts})


def digest_of(task: Task, size: int, sampling: Sampling) -> str:
    """Of everything that decides what a group's rollouts are: payload, sampling, how many."""
    content = {"payload": task.payload, "sampling": sampling.model_dump(mode="json"), "rollouts": size}
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def payload_digest(task: Task) -> str:
    """Of what the agent is given, however it is sampled: it names the task over the steps of a run."""
    text = json.dumps(task.payload, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def manifest_key(prefix: str, run_id: str, step: int) -> str:
    """Where it stands, apart from the step's results."""
    return f"{prefix}runs/{run_id}/manifests/{step:08d}.json"
