"""Train on a service: collect a step's rollouts, train on them, sample the next step from the new weights.

Step n trains weights n from rollouts that weights n - 1 sampled. With `training_service.overlap` they are those of
weights n - 2, and are collected while step n - 1 is trained. After each step, a record in S3 names the step and its
checkpoint. A loop that was killed begins at the record's step with the record's checkpoint.

Invariants:

- No weights are trained twice on a step: what a killed loop trained after its last record is never sampled from and
  never trained further.
- Rollouts that finished before a kill are reused for the same weights only: a step's weights are named by the path of
  their sampler.
- The record is written only over the version that was read, so a loop that has lost its run writes nothing.
- A fault of the service costs time: the step's training is repeated from the record's checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Protocol, TypeVar

from pydantic import Field
from pydantic_core import from_json
from tenacity import wait_random_exponential

from agent_wrapper.contract import ContractObject, Identifier
from agent_wrapper.contract.keys import training_key
from rollout_backend.base.retry import log_retry, retry_until
from rollout_backend.config import RolloutConfig
from rollout_backend.config.training_service import TrainingServiceConfig
from rollout_backend.core.earlier_batches import batch_number
from rollout_backend.core.staleness import staleness
from rollout_backend.core.tasks import Task
from rollout_backend.errors import (
    ConfigError,
    ManifestError,
    ResultMissing,
    RunHeld,
    StoreError,
    TrainingServiceError,
    WriteConflict,
)
from rollout_backend.run.accounts.step_report import StepResult
from rollout_backend.run.collect.store import ObjectStore
from rollout_backend.training.service import Checkpoint, TrainingData, TrainingService, training_data

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_PAUSES = wait_random_exponential(multiplier=1, max=30)


class TrainingRecord(ContractObject):
    """How far a run has trained, and from which weights it resumes."""

    schema_version: Literal[1] = 1
    run_id: Identifier
    base_model: str
    rank: int
    trained: int = Field(ge=0)
    """The last step that was trained."""
    state: str
    """Path of its weights and optimizer on the service."""
    sampler: str
    """Path of its weights for sampling."""
    sampler_before: str
    """The sampler of the step before it, which may have begun the next step's rollouts."""
    evaluated: int = Field(default=-1, ge=-1)
    """The last step whose weights were evaluated; -1 if none were."""


class Rollouts(Protocol):
    """Collects rollouts: a `RolloutManager`."""

    async def collect(self, tasks: Sequence[Task], *, step: int, weights: str) -> StepResult:
        """See `RolloutManager.collect`."""
        ...


class TrainingLoop:
    """Trains `training_service.steps` steps, in one life or several."""

    def __init__(
        self,
        config: RolloutConfig,
        rollouts: Rollouts,
        serve: Callable[[str, int], Awaitable[None]],
        service: TrainingService,
        store: ObjectStore,
        tasks: Sequence[Task],
        held_out: Sequence[Task] = (),
        *,
        on_trained: Callable[[int, StepResult, TrainingData, dict[str, float]], None] = lambda *step: None,
        on_evaluated: Callable[[int, StepResult], None] = lambda *step: None,
    ) -> None:
        """`serve` lets further model calls sample from the weights at this path, and names them by this version.
        `on_trained` is called with the number, the result, the data and the service's metrics of each trained
        step, and `on_evaluated` with the number and the result of each evaluation.

        Raises ConfigError if the settings do not fit the tasks.
        """
        self._settings = self.check(config, tasks, held_out)
        self._config = config
        self._rollouts = rollouts
        self._serve_weights = serve
        self._service = service
        self._store = store
        self._tasks = tasks
        self._held_out = held_out
        self._on_trained = on_trained
        self._on_evaluated = on_evaluated
        self._key = training_key(config.storage.prefix, config.run_id)
        self._etag: str | None = None
        # The checkpoint whose weights the service's model has; empty if they are unknown.
        self._loaded = ""
        self._served = ""

    @staticmethod
    def check(config: RolloutConfig, tasks: Sequence[Task], held_out: Sequence[Task]) -> TrainingServiceConfig:
        """Return the section `training_service`. Raises ConfigError if it does not fit the tasks."""
        if config.training_service is None:
            raise ConfigError("training_service is not set: set at least training_service.base_model")
        settings = config.training_service
        if settings.sampler:
            raise ConfigError(
                "training_service.sampler: a training samples from the weights that it trains: leave it out"
            )
        if settings.tasks_per_step > len(tasks):
            raise ConfigError(
                f"training_service.tasks_per_step is {settings.tasks_per_step}, and there are {len(tasks)} "
                "tasks: lower it, or add tasks"
            )
        if config.group.size < 2:
            raise ConfigError("group.size is 1, and advantages compare the rollouts of a task: set 2 or more")
        for where, sampling in (("sampling", config.sampling), *((task.task_id, task.sampling) for task in tasks)):
            if sampling and (sampling.temperature, sampling.top_p, sampling.top_k) != (1.0, 1.0, -1):
                raise ConfigError(
                    f"{where}: a service's logprobs are those before temperature, top_p and top_k, so rollouts that "
                    "are sampled with them cannot be trained: leave them out, except for held-out tasks"
                )
        if changed := config.gateway.agent_sampling_overrides & {"temperature", "top_p", "top_k"}:
            raise ConfigError(
                f"gateway.agent_sampling_overrides: leave out {', '.join(sorted(changed))}: a service's logprobs are "
                "those before them"
            )
        if (settings.evaluate_every is None) != (not held_out):
            raise ConfigError("training_service.evaluate_every and held-out tasks need each other: give both or none")
        return settings

    async def run(self) -> TrainingRecord:
        """Train the steps that are left. Return the last record.

        Raises:
            ConfigError: the service refuses a call permanently, or the record has another base model or rank.
            TrainingServiceError: the service failed for `training_service.retry_s`.
            ManifestError: the record cannot be read.
            RunHeld: another trainer has written the record.
            RolloutBackendError: as `RolloutManager.collect`.
        """
        record = await self._read()
        if record is None:
            saved = await self._repeat("creating the model", self._create)
            record = await self._write(self._record(trained=0, saved=saved))
        elif record.trained < self._settings.steps:
            log.info("resuming after step %d", record.trained)
        if record.trained >= self._settings.steps and not self._evaluation_due(record):
            return record
        result: StepResult | None = None
        if self._settings.overlap and record.trained < self._settings.steps:
            # An earlier life may have begun it before the record's step was trained.
            await self._serve(record.sampler_before, max(0, record.trained - 1))
            result = await self._collect(record.trained + 1, record.sampler_before)
        while True:
            await self._serve(record.sampler, record.trained)
            record = await self._evaluate(record)
            if record.trained >= self._settings.steps:
                return record
            record, result = await self._step(record, result)

    async def _step(
        self, record: TrainingRecord, result: StepResult | None
    ) -> tuple[TrainingRecord, StepResult | None]:
        """Train the next step, and collect its rollouts if they were not. Return its record and, with
        `training_service.overlap`, the rollouts of the step after it."""
        number = record.trained + 1
        if result is None:
            result = await self._collect(number, record.sampler)
        if not self._settings.overlap or number >= self._settings.steps:
            return await self._train(record, result), None
        following = asyncio.create_task(self._collect(number + 1, record.sampler))
        try:
            return await self._train(record, result), await following
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _collect(self, number: int, sampler: str) -> StepResult:
        step = batch_number(number, validate=False, position=0)
        return await self._rollouts.collect(self._tasks_of(number), step=step, weights=sampler)

    async def _train(self, record: TrainingRecord, result: StepResult) -> TrainingRecord:
        number = record.trained + 1
        # Thousands of rollouts take many seconds, in which the run's lease must be renewed.
        data = await asyncio.to_thread(training_data, result, self._config, self._settings)
        metrics: dict[str, float] = {}
        saved = Checkpoint(record.state, record.sampler)
        if data.groups:

            async def train() -> Checkpoint:
                if self._loaded != record.state:
                    await self._service.begin(record.state)
                # Until the step is saved, nobody knows what the service has trained.
                self._loaded = ""
                metrics.update(await self._service.train(data.batches(self._settings.optimizer_steps)))
                return await self._save(number)

            saved = await self._repeat(f"training step {number}", train)
        else:
            log.warning("step %d trains nothing: no group has rollouts with different rewards", number)
        changes = {"trained": number, "sampler_before": record.sampler, **vars(saved)}
        found = await self._write(record.model_copy(update=changes))
        # A step without a group to train has sampled, too.
        metrics |= await self._service.usage()
        if self._settings.overlap:
            metrics |= staleness(data.versions, number - 1)
        self._on_trained(number, result, data, metrics)
        return found

    async def _evaluate(self, record: TrainingRecord) -> TrainingRecord:
        """Collect the held-out tasks with the record's weights, if they are due and were not."""
        if not self._evaluation_due(record):
            return record
        number = record.trained
        step = batch_number(number, validate=True, position=0)
        result = await self._rollouts.collect(self._held_out, step=step, weights=record.sampler)
        self._on_evaluated(number, result)
        return await self._write(record.model_copy(update={"evaluated": number}))

    def _evaluation_due(self, record: TrainingRecord) -> bool:
        every, number = self._settings.evaluate_every, record.trained
        due = every is not None and (number % every == 0 or number >= self._settings.steps)
        return due and record.evaluated < number

    def _tasks_of(self, number: int) -> list[Task]:
        """Return the tasks of a step, which follow from its number alone: an epoch has each task once."""
        count, first = len(self._tasks), (number - 1) * self._settings.tasks_per_step
        last = first + self._settings.tasks_per_step
        drawn: list[int] = []
        for epoch in range(first // count, (last - 1) // count + 1):
            order = random.Random(f"{self._settings.seed}/{epoch}").sample(range(count), count)  # noqa: S311
            drawn += order[max(0, first - epoch * count) : last - epoch * count]
        # A step that spans two epochs must not have a task twice.
        return [self._tasks[index] for index in dict.fromkeys(drawn)]

    async def _create(self) -> Checkpoint:
        self._loaded = ""
        await self._service.begin(None)
        return await self._save(0)

    async def _save(self, number: int) -> Checkpoint:
        keep = number % self._settings.keep_every == 0 or number >= self._settings.steps
        saved = await self._service.save(f"{self._config.run_id}-{number:06d}", keep=keep)
        self._loaded = saved.state
        return saved

    async def _serve(self, sampler: str, version: int) -> None:
        if sampler != self._served:
            await self._repeat("serving the weights", lambda: self._serve_weights(sampler, version))
            self._served = sampler

    async def _repeat(self, what: str, call: Callable[[], Awaitable[_T]]) -> _T:
        until = asyncio.get_running_loop().time() + self._settings.retry_s
        warn = log_retry(log, what)
        return await retry_until(until, call, TrainingServiceError, _PAUSES, before_sleep=warn)

    async def _in_time(self, call: Callable[[], Awaitable[_T]], what: str) -> _T:
        """Call the store until it answers, for `timeouts.collection_s` at most."""
        until = asyncio.get_running_loop().time() + self._config.timeouts.collection_s
        return await retry_until(until, call, StoreError, _PAUSES, before_sleep=log_retry(log, what))

    def _record(self, *, trained: int, saved: Checkpoint) -> TrainingRecord:
        return TrainingRecord(
            run_id=self._config.run_id,
            base_model=self._settings.base_model,
            rank=self._settings.rank,
            trained=trained,
            state=saved.state,
            sampler=saved.sampler,
            sampler_before=saved.sampler,
        )

    async def _read(self) -> TrainingRecord | None:
        """Return the record of the run; None if it has not begun."""

        async def fetch() -> tuple[bytes, str] | None:
            try:
                stored = await self._store.fetch(self._key)
            except ResultMissing:
                return None
            return stored.body, stored.etag

        found = await self._in_time(fetch, "reading the record of the training")
        if found is None:
            return None
        body, self._etag = found
        try:
            record = TrainingRecord.parse(from_json(body))
        except ValueError as error:
            raise ManifestError(
                f"s3://{self._store.config.bucket}/{self._key} is no record of a training of this version ({error}): "
                "finish the run with the version that began it, or set another run_id"
            ) from None
        wanted = self._settings
        if (record.base_model, record.rank) != (wanted.base_model, wanted.rank):
            raise ConfigError(
                f"run {self._config.run_id!r} trains {record.base_model!r} with rank {record.rank}, and the settings "
                f"have {wanted.base_model!r} with rank {wanted.rank}: set these again, or another run_id"
            )
        return record

    async def _write(self, record: TrainingRecord) -> TrainingRecord:
        body = record.model_dump_json(indent=1).encode()

        async def put() -> str:
            return await self._store.put_if_match(self._key, body, self._etag)

        try:
            self._etag = await self._in_time(put, "writing the record of the training")
        except WriteConflict:
            raise RunHeld(
                f"run {self._config.run_id!r} was trained by another process at the same time: this one stops. Run "
                "only one of them, or set another run_id for one"
            ) from None
        return record
