"""Build and parse the names that follow from a rollout's ids: its keys in the result bucket, and its trace ids.

    PREFIXruns/RUN/steps/STEP/ROLLOUT               a result
    PREFIXruns/RUN/steps/STEP/ROLLOUT~ATTEMPT       a failure marker
    PREFIXruns/RUN/artifacts/STEP/ROLLOUT~ATTEMPT   the files that an attempt published with its result
    PREFIXruns/RUN/manifests/STEP.json              a step's manifest
    PREFIXruns/RUN/manifests/lineage.json           the trainers of the run, and where each one began
    PREFIXruns/RUN/manifests/training.json          the last step of a training on a service, and its checkpoint
    PREFIXruns/RUN/scores/STEP/ROLLOUT~DIGEST       a score that the training side computed
    PREFIXruns/RUN/quarantine/DIGEST.json           a refused object
    PREFIXruns/RUN/task-blocklist/DIGEST.json       the consecutive losses of a task
    PREFIXruns/RUN/lease                            the manager that holds the run
    PREFIXruns/RUN/agents/STEP/...                  objects that agents of another protocol write
    PREFIXruns/preflight/...                        what the checks before a run write and delete

`prefix` is empty or ends in a slash. The policies in `infra/template.yaml` depend on these keys.
"""

import hashlib
import re
from typing import NamedTuple

from agent_wrapper.contract.codec import ContractError

ID_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
MAX_STEP = 10**15 - 1
_RESULT = re.compile(rf"([0-9]{{8}}|[1-9][0-9]{{8,14}})/({ID_PATTERN})(?:~([1-9][0-9]{{0,8}}))?")


def step_prefix(prefix: str, run_id: str, step: int) -> str:
    """Return the prefix of a step's results and failure markers."""
    return f"{_run_prefix(prefix, run_id)}steps/{step:08d}/"


def result_key(prefix: str, run_id: str, step: int, rollout_id: str) -> str:
    """Return the key of a rollout's result, which is the same for all its attempts."""
    return step_prefix(prefix, run_id, step) + rollout_id


def failure_marker_key(prefix: str, run_id: str, step: int, rollout_id: str, attempt: int) -> str:
    """Return the key of the marker that an attempt writes when the infrastructure failed it."""
    return f"{result_key(prefix, run_id, step, rollout_id)}~{attempt}"


def artifacts_key(prefix: str, run_id: str, step: int, rollout_id: str, attempt: int) -> str:
    """Return the key of the files that an attempt published with its result."""
    return f"{_run_prefix(prefix, run_id)}artifacts/{step:08d}/{rollout_id}~{attempt}"


class ResultName(NamedTuple):
    """The parts of a result's or failure marker's key. `attempt` is None for a result."""

    step: int
    rollout_id: str
    attempt: int | None


def parse_result_key(prefix: str, run_id: str, key: str) -> ResultName:
    """Parse a key of this run.

    Raises:
        ContractError: the key does not belong to this run, or is neither a result's nor a failure marker's.
    """
    folder = f"{_run_prefix(prefix, run_id)}steps/"
    match = _RESULT.fullmatch(key, len(folder)) if key.startswith(folder) else None
    if match is None:
        raise ContractError("object.key", f"{key!r} is not a result of run {run_id!r} under {prefix!r}")
    return ResultName(int(match[1]), match[2], int(match[3]) if match[3] else None)


def manifest_key(prefix: str, run_id: str, step: int) -> str:
    """Return the key of a step's manifest."""
    return f"{_run_prefix(prefix, run_id)}manifests/{step:08d}.json"


def lineage_key(prefix: str, run_id: str) -> str:
    """Return the key of the record of the run's trainers."""
    return f"{_run_prefix(prefix, run_id)}manifests/lineage.json"


def training_key(prefix: str, run_id: str) -> str:
    """Return the key of the record of a training on a service."""
    return f"{_run_prefix(prefix, run_id)}manifests/training.json"


def score_key(prefix: str, run_id: str, step: int, rollout_id: str, digest: str) -> str:
    """Return the key of a rollout's score. `digest` identifies the scorer and the private part of the task."""
    return f"{_run_prefix(prefix, run_id)}scores/{step:08d}/{rollout_id}~{digest}"


def quarantine_prefix(prefix: str, run_id: str) -> str:
    """Return the prefix of the records of refused objects."""
    return f"{_run_prefix(prefix, run_id)}quarantine/"


def blocklist_prefix(prefix: str, run_id: str) -> str:
    """Return the prefix of the records of tasks that are lost repeatedly."""
    return f"{_run_prefix(prefix, run_id)}task-blocklist/"


def agents_prefix(prefix: str, run_id: str, step: int) -> str:
    """Return the prefix under which agents of another protocol write in a step."""
    return f"{_run_prefix(prefix, run_id)}agents/{step:08d}/"


def lease_key(prefix: str, run_id: str) -> str:
    """Return the key of the record of the manager that holds the run."""
    return f"{_run_prefix(prefix, run_id)}lease"


def probe_key(prefix: str, name: str, *, agents: bool = False) -> str:
    """Return a key that the trainer, or an agent, may write in a preflight check."""
    return f"{_run_prefix(prefix, 'preflight')}{'steps' if agents else 'manifests'}/probe-{name}.json"


def _run_prefix(prefix: str, run_id: str) -> str:
    return f"{prefix}runs/{run_id}/"


def trace_ids(run_id: str, step: int, rollout_id: str) -> tuple[int, int]:
    """Return the id of a rollout's OpenTelemetry trace, and of the span that is the parent of all its other spans.

    Both are derived from the rollout's ids, so that no request carries them.
    """
    digest = hashlib.sha256(f"trace of {run_id}/{step}/{rollout_id}".encode()).digest()
    return int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:24], "big")


def traceparent(run_id: str, step: int, rollout_id: str) -> str:
    """Return the W3C Trace Context header that makes a span a child of the rollout's span."""
    trace_id, span_id = trace_ids(run_id, step, rollout_id)
    return f"00-{trace_id:032x}-{span_id:016x}-01"
