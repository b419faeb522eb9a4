"""Rebuild the training rows of a step from the run directory, without any agent.

Invariant: a row is rebuilt only from a result that satisfies the contract, matches its record, and is sealed if the
run requires seals.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet

from agent_wrapper.contract import ContractError, Rollout
from rollout_backend.config import load_config
from rollout_backend.core.seal import Sealer, check_without_secret, digest_of
from rollout_backend.errors import ConfigError
from rollout_backend.model.serving.run_secret import revealed, run_secret, secret_file
from rollout_backend.run.accounts.archive import CONFIG, RunArchive
from rollout_backend.run.accounts.records import RolloutRecord
from rollout_backend.run.accounts.step_report import StepReport
from rollout_backend.views.run_data import find_step, step_namer

SealCheck = Callable[[Rollout], None]

_NUMBER = pyarrow.int32()
_VERSION_SPANS = pyarrow.list_(pyarrow.struct([("version", pyarrow.string()), ("start", _NUMBER), ("end", _NUMBER)]))
_ROUTED_EXPERTS = pyarrow.struct(
    [("layers", _NUMBER), ("topk", _NUMBER), ("id_bytes", _NUMBER), ("ids", pyarrow.large_binary())]
)


@dataclass(frozen=True)
class ReplayedStep:
    """The trained rollouts of a step, and the reasons why others cannot be rebuilt, by rollout id."""

    step: int
    name: str
    """Its number as the trainer counts it, or else that of its files."""
    rollouts: tuple[Rollout, ...]
    """The rollouts, in the order in which the trainer received them."""
    failures: dict[str, str]
    seals: str
    """Description of how they were checked."""


def replay_step(run_dir: Path, step: str | None = None) -> ReplayedStep:
    """Read the trained rollouts of the step with this name; by default, of the run's only step.

    Raises:
        ConfigError: the directory does not have that step, or cannot be read.
    """
    archive = RunArchive(run_dir)
    number = _choose_step(archive, step)
    check, seals = _seal_check(archive)
    rollouts, failures = list[Rollout](), dict[str, str]()
    for record in _trained_records(archive, number):
        try:
            rollout = archive.read_result(record)
            check(rollout)
        except ContractError as error:
            failures[record.rollout_id] = str(error)
        else:
            rollouts.append(rollout)
    return ReplayedStep(number, step_namer(archive)(number), tuple(rollouts), failures, seals)


def rows_as_parquet(rollouts: Sequence[Rollout]) -> bytes:
    """Return the rows of rollouts as a Parquet file, with one row per segment."""
    rows = [(rollout, i, segment) for rollout in rollouts for i, segment in enumerate(rollout.segments)]
    segments = [segment for _, _, segment in rows]
    columns = {
        "step": pyarrow.array([rollout.step for rollout, _, _ in rows], pyarrow.int64()),
        "task_id": pyarrow.array([rollout.task_id for rollout, _, _ in rows], pyarrow.string()),
        "rollout_id": pyarrow.array([rollout.rollout_id for rollout, _, _ in rows], pyarrow.string()),
        "segment": pyarrow.array([i for _, i, _ in rows], pyarrow.int32()),
        "reward": pyarrow.array([rollout.reward for rollout, _, _ in rows], pyarrow.float64()),
        "token_ids": _lists([segment.token_ids for segment in segments], np.int32),
        "response_mask": _lists([segment.response_mask for segment in segments], np.uint8),
        "logprobs": _lists([segment.logprobs for segment in segments], np.float32),
        "weight_versions": pyarrow.array(
            [[asdict(span) for turn in each.turns for span in turn.weight_versions] for each in segments],
            _VERSION_SPANS,
        ),
        "routed_experts": pyarrow.array(
            [each.routed_experts.model_dump() if each.routed_experts is not None else None for each in segments],
            _ROUTED_EXPERTS,
        ),
    }
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), sink)
    return bytes(sink.getvalue())


def _choose_step(archive: RunArchive, step: str | None) -> int:
    steps, name_of = archive.steps(), step_namer(archive)
    if not steps:
        raise ConfigError(f"{archive.run_dir} has no records: its run was killed, or has not ended a step")
    if step is None and len(steps) > 1:
        raise ConfigError(
            f"{archive.run_dir} has {len(steps)} steps, {name_of(steps[0])} to {name_of(steps[-1])}: choose a --step"
        )
    number = steps[0] if step is None else find_step(archive, step)
    if number not in steps:
        raise ConfigError(f"{archive.run_dir} has no records of step {step}, which has not ended or was killed")
    return number


def _trained_records(archive: RunArchive, step: int) -> list[RolloutRecord]:
    name = step_namer(archive)(step)
    try:
        report = archive.read_report(step)
        found = trained_records(report, archive.read_records(step)) if report is not None else []
    except ValueError as error:
        raise ConfigError(f"step {name} of {archive.run_dir} cannot be read: {error}") from None
    if report is None:
        raise ConfigError(f"step {name} of {archive.run_dir} has no report, because it was interrupted or failed")
    if not found:
        raise ConfigError(f"step {name} of {archive.run_dir} has no rollout that was trained")
    return found


def _seal_check(archive: RunArchive) -> tuple[SealCheck, str]:
    """Return the function that checks seals, and a description of it."""
    path = archive.run_dir / CONFIG
    try:
        info = archive.read_info()
        config = load_config(path, top={"output_dir": str(archive.run_dir.absolute().parent)})
    except ValueError as error:
        raise ConfigError(f"{archive.run_dir}/run.json cannot be read: {error}") from None
    if not config.gateway.require_seal:
        return lambda rollout: None, "the run has no seals (gateway.require_seal=false)"
    # Whether the user set the secret, which is then not stored.
    given = info is not None and "gateway.secret" in info.secrets
    if not (config.gateway.secret is not None if given else secret_file(config).is_file()):
        text = "seals match; their signatures were not verified, because the run's secret is not here"
        return check_without_secret, text
    sealer = Sealer(run_secret(config), revealed(config.gateway.previous_secret))
    return sealer.check, "seals verified with the run's secret"


def _lists(arrays: Sequence[Any], dtype: type) -> Any:
    """Return arrays as a column of lists with exactly the same bytes."""
    offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
    values = np.concatenate([np.zeros(0, dtype), *(np.asarray(each, dtype) for each in arrays)])
    return pyarrow.ListArray.from_arrays(pyarrow.array(offsets), pyarrow.array(values))


def trained_records(report: StepReport, records: Iterable[RolloutRecord]) -> list[RolloutRecord]:
    """Return the rollouts that a step gave to the trainer, in the trainer's order: trainable ones in usable groups.

    An oversampled group contributes the first rollouts that arrived, up to the group's size.

    Raises:
        ValueError: the report and the records belong to different steps.
    """
    by_task: dict[str, list[RolloutRecord]] = defaultdict(list)
    for record in records:
        by_task[record.task_id].append(record)
    found: list[RolloutRecord] = []
    for group in report.groups:
        if not group.usable:
            continue
        of_task = by_task[group.task_id]
        arrived = sorted((each for each in of_task if each.trainable), key=lambda each: each.result_at or 0.0)
        chosen = {record.rollout_id for record in arrived[: len(group.rewards)]}
        trained = [record for record in of_task if record.rollout_id in chosen]
        if [record.reward for record in trained] != list(group.rewards):
            raise ValueError(f"the report names other rewards of task {group.task_id!r} than the records")
        found += trained
    return found


def rollout_digest(rollout: Rollout) -> str:
    """Return the SHA-256 of a rollout's rows."""
    of_turns = f" {rollout.turn_rewards!r}" if rollout.turn_rewards else ""
    return _sha256(f"{digest_of(rollout.segments)} {rollout.reward!r}{of_turns}")


def step_digest(rollouts: Sequence[Rollout]) -> str:
    """Return the SHA-256 of the rows of a step."""
    return _sha256("\n".join(f"{rollout.rollout_id} {rollout_digest(rollout)}" for rollout in rollouts))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
