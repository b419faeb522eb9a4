"""Plan a step. Its manifest is in S3 before the first dispatch, so that a restarted trainer can resume the step.

Invariants:

- two plans are the same step if run, number, weights and tasks are equal: payloads, sampling and group sizes, in any
  order. Task ids are ignored, because trainers draw new ones each time;
- session ids are derived from the manifest, so it determines every session that may be open;
- no attempt number, and therefore no session id, is used twice, however often the step is resumed.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Self

from pydantic import Field

from agent_wrapper.contract import MAX_STEP, ContractObject, Identifier, Sampling
from rollout_backend.config import GroupConfig
from rollout_backend.core.harbor import container_key
from rollout_backend.core.tasks import Task, planned_rollouts, rollout_id, sibling_id


@dataclass(frozen=True)
class StepRequest:
    """The arguments of one step."""

    step: int
    tasks: tuple[Task, ...]
    sampling: Sampling
    """Used for tasks that set no sampling."""
    weights: str = ""
    """Name of the weights that are served now."""
    same_weights: bool = True
    """If False, results of an earlier trainer were sampled from other weights and are not used."""
    allow_subset: bool = False
    """The tasks may be some of those that an earlier trainer gave the step."""
    adapter: str = ""
    """The LoRA adapter that model calls name; empty for the model without an adapter."""
    weights_are_counted: bool = False
    """Whether `weights` includes this backend's count of updates. No later trainer of the run reuses such a name for
    other weights."""
    trainer_name: str = ""
    """How the trainer numbers the step, if not by `step`."""

    @property
    def name(self) -> str:
        """Return the step's number as the trainer counts it, or else `step`."""
        return self.trainer_name or str(self.step)


class PlannedTask(ContractObject):
    """One group. `digest` covers the agents' input; `rollouts` are the ids of the group in order."""

    task_id: Identifier
    digest: str
    container: str = ""
    """See `container_key`."""
    rollouts: tuple[Identifier, ...]


class Execution(ContractObject):
    """An earlier execution of a step, which made the attempts up to `last_attempt`."""

    fencing_token: int = Field(ge=0)
    last_attempt: int = Field(ge=0)


class Manifest(ContractObject):
    schema_version: Literal[1] = 1
    run_id: Identifier
    step: int = Field(ge=0, le=MAX_STEP)
    generation: int = Field(default=0, ge=0)
    """Number of earlier, different steps with this number in this run: a restarted trainer may plan other tasks."""
    resume_count: int = Field(default=0, ge=0)
    """Number of times that this step was resumed."""
    nonce: str = Field(default_factory=lambda: secrets.token_hex(16))
    executions: tuple[Execution, ...] = ()
    """The executions before this one that it resumes, in order."""
    attempts_before: int = Field(default=0, ge=0)
    """Number of attempts that earlier executions may have made of each rollout."""
    attempts_closed: int = Field(default=0, ge=0)
    """The sessions of this many first attempts of each rollout are known to be closed."""
    attempts: int = Field(default=1, ge=1)
    """Maximum number of attempts of each rollout in this execution. It is raised only before a rollout needs another
    attempt, because a trainer on another machine has no in-flight log and stops every session that this allows."""
    is_logged: bool = True
    """False if the in-flight log may lack sessions, because this execution or one that it resumes could not write
    it."""
    written_at: float
    deadline: float
    """Unix seconds at which the step ends at the latest."""
    weights: str = ""
    """The model served when the step began, with its version if known."""
    sealed_by: str = ""
    """Fingerprint of the secret that seals trajectories; empty without seals."""
    fencing_token: int = Field(default=0, ge=0)
    """Fencing token of the manager that wrote this. A manager with a smaller token has lost the run."""
    owner: str = ""
    """The manager that wrote this, for the message to a manager that has lost the run."""
    gateway: str = ""
    """Identifies the addresses and journals of the gateways. Empty if no session can outlive the trainer."""
    tasks: tuple[PlannedTask, ...]
    left_out: tuple[PlannedTask, ...] = ()
    """Tasks of earlier executions that the resumed step leaves out. Their results stay usable."""
    replaced: tuple[Manifest, ...] = ()
    """Manifests of earlier steps with this number whose sessions may be open."""

    @classmethod
    def plan(
        cls,
        run_id: str,
        request: StepRequest,
        group: GroupConfig,
        *,
        now: float,
        deadline: float,
        sealed_by: str = "",
        gateway: str = "",
        before: Manifest | None = None,
    ) -> Self:
        """Return the manifest of a step.

        `before` is the manifest in S3 under this step's number. If it describes the same step, the step is resumed
        with its rollouts. Otherwise the rollouts get unused ids, and the earlier results are not reused.
        """
        groups = []
        for task in request.tasks:
            size = planned_rollouts([task], group)
            groups.append(
                PlannedTask(
                    task_id=task.task_id,
                    digest=digest_of(task, size, task.sampling or request.sampling),
                    container=container_key(task.payload),
                    rollouts=tuple(rollout_id(task.task_id, i) for i in range(size)),
                )
            )
        fields = {
            "run_id": run_id,
            "step": request.step,
            "written_at": now,
            "deadline": deadline,
            "weights": request.weights,
            "sealed_by": sealed_by,
            "gateway": gateway,
        }
        if before is None:
            return cls.model_validate({**fields, "tasks": groups})
        fields["replaced"] = before.replaced
        same = request.same_weights and before.weights == request.weights
        matched = before.matched(groups, request.allow_subset) if same else None
        if matched is not None:
            taken, left_out = matched
            return cls.model_validate(
                {
                    **fields,
                    "generation": before.generation,
                    "resume_count": before.resume_count + 1,
                    "nonce": before.nonce,
                    "executions": (*before.executions, before.execution),
                    "attempts_before": before.attempts_before + before.attempts,
                    "attempts_closed": before.attempts_closed,
                    "is_logged": before.is_logged,
                    "tasks": taken,
                    "left_out": left_out,
                }
            )
        if before.attempts_closed < before.attempts_before + before.attempts:
            fields["replaced"] = (before.model_copy(update={"replaced": ()}), *before.replaced)
        generation = before.generation + 1
        renamed = []
        for planned in groups:
            ids = tuple(rollout_id(planned.task_id, i, generation) for i in range(len(planned.rollouts)))
            renamed.append(planned.model_copy(update={"rollouts": ids}))
        return cls.model_validate({**fields, "generation": generation, "tasks": renamed})

    def matched(
        self, groups: Iterable[PlannedTask], allow_subset: bool
    ) -> tuple[list[PlannedTask], list[PlannedTask]] | None:
        """Return each group with this manifest's rollouts of the same content, and the tasks of this manifest that no
        group matches; None if this is not the same step.

        Among several groups with the same content, one with the same task id is preferred.
        """
        known: dict[str, list[PlannedTask]] = defaultdict(list)
        for task in (*self.tasks, *self.left_out):
            known[task.digest].append(task)
        found = []
        for group in groups:
            same = known[group.digest]
            if not same:
                return None
            chosen = next((task for task in same if task.task_id == group.task_id), same[0])
            same.remove(chosen)
            # Session ids are derived from both.
            kept = {"rollouts": chosen.rollouts, "container": chosen.container}
            found.append(group.model_copy(update=kept))
        left_out = [task for same in known.values() for task in same]
        if not allow_subset and any(task in self.tasks for task in left_out):
            return None
        return found, left_out

    @property
    def execution(self) -> Execution:
        """Return this execution, as a later one records it."""
        return Execution(fencing_token=self.fencing_token, last_attempt=self.attempts_before + self.attempts)

    def token_of(self, attempt: int) -> int | None:
        """Return the fencing token of the trainer that made an attempt; None if a later execution made it."""
        made = (each for each in (*self.executions, self.execution) if attempt <= each.last_attempt)
        return next((each.fencing_token for each in made), None)

    @property
    def resumed(self) -> bool:
        return self.resume_count > 0

    def with_rollout(self, task_id: str, rollout_id: str) -> Self:
        """Return a copy with a replacement rollout of a task."""
        tasks = tuple(
            task.model_copy(update={"rollouts": (*task.rollouts, rollout_id)}) if task.task_id == task_id else task
            for task in self.tasks
        )
        copied = self.model_copy(update={"tasks": tasks})
        copied.__dict__.pop("_containers", None)
        return copied

    def next_rollout(self, task_id: str) -> str:
        """Return an id for the task's next replacement rollout."""
        [task] = (task for task in self.tasks if task.task_id == task_id)
        return sibling_id(task.rollouts[0], len(task.rollouts))

    def session_id(self, rollout_id: str, attempt: int) -> str:
        """Return the session id of an attempt, counted from 1 over all executions. It has at least 40 characters;
        AgentCore requires 33. If the task has a container, the id ends with the container's key, so that any process
        can tell which runtime has the session.

        The nonce makes it a secret of the attempt's container: agents cannot read manifests, and a result is accepted
        only if it names the session of its attempt.
        """
        text = f"{self.nonce}/{self.generation}/{rollout_id}/{attempt}"
        key = self._containers.get(rollout_id, "")
        return f"rollout-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}" + (f"-{key}" if key else "")

    @cached_property
    def _containers(self) -> dict[str, str]:
        """The container keys of tasks that have one, by rollout."""
        planned = [task for task in (*self.tasks, *self.left_out) if task.container]
        return {rollout_id: task.container for task in planned for rollout_id in task.rollouts}

    def open_sessions(self, besides: Container[int] = ()) -> list[str]:
        """Return the sessions that executions up to this one may have left open, without the sessions of the attempts
        in `besides`. Each rollout's last session comes first."""
        numbers = range(self.attempts_before + self.attempts, self.attempts_closed, -1)
        attempts = [attempt for attempt in numbers if attempt not in besides]
        rollouts = (rollout_id for task in (*self.tasks, *self.left_out) for rollout_id in task.rollouts)
        return [self.session_id(rollout_id, attempt) for rollout_id in rollouts for attempt in attempts]


def digest_of(task: Task, size: int, sampling: Sampling) -> str:
    """Return a digest of payload, sampling and group size."""
    return _digest({"payload": task.payload, "sampling": sampling.model_dump(mode="json"), "rollouts": size})


def payload_digest(task: Task) -> str:
    """Return a digest of the payload, which identifies the task across the steps of a run."""
    return _digest(task.payload)


def _digest(content: object) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
