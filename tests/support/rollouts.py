"""Segments, rollouts and claims for tests, with defaults for every field."""

import time
from collections.abc import Callable, Collection
from typing import Any

from agent_wrapper.contract import Failure, Outcome, Rollout, Sampling, Segment, Turn, VersionSpan
from rollout_backend.config import GroupConfig
from rollout_backend.core.ledger import Ledger
from rollout_backend.core.manifest import Manifest, StepRequest
from rollout_backend.core.policy import GroupState
from rollout_backend.core.session_key import SessionClaims
from rollout_backend.core.tasks import Task


class _Groups(dict[str, GroupState]):
    """Groups of any task, each usable with one trainable rollout."""

    def __missing__(self, task_id: str) -> GroupState:
        return self.setdefault(task_id, GroupState(task_id, needed=1))


def make_ledger(step: int = 0, now: Callable[[], float] = lambda: 0.0) -> Ledger:
    return Ledger(step, _Groups(), now)


def make_manifest(run_id: str = "r", *tasks: Task, before: Manifest | None = None, **more: Any) -> Manifest:
    """Return the manifest of step 0. Each task has two rollouts."""
    request = StepRequest(0, tasks, Sampling(), **more)
    return Manifest.plan(run_id, request, GroupConfig(size=2), now=0, deadline=1, before=before)


def make_turn(start: int, end: int, version: str | None = "7") -> Turn:
    spans = [VersionSpan(version=version, start=start, end=end)] if version is not None else []
    return Turn(start=start, end=end, finish_reason="stop", weight_versions=spans)


def make_segment(
    prompt: int = 3, sampled: int = 2, *, version: str | None = "7", logprob: float | None = -0.5
) -> Segment:
    """Return a segment of one turn. Its token ids count up from 0."""
    n = prompt + sampled
    return Segment(
        token_ids=list(range(n)),
        response_mask=[0] * prompt + [1] * sampled,
        logprobs=[None] * prompt + [logprob] * sampled,
        turns=[make_turn(prompt, n, version)],
    )


def segment_of(pieces: list[tuple[str, int]], version: str | None = "3", unknown: Collection[int] = ()) -> Segment:
    """Return a segment of ("given", n) and ("sampled", n) pieces. Its token ids count up from 100; the i-th sampled
    token has the logprob -i / 1000, and none if it is unknown."""
    turns, mask = [], []
    for kind, n in pieces:
        start = len(mask)
        mask += [int(kind == "sampled")] * n
        if kind == "sampled":
            turns.append(make_turn(start, start + n, version))
    return Segment(
        token_ids=[100 + i for i in range(len(mask))],
        response_mask=mask,
        logprobs=[-i / 1000 if sampled and i not in unknown else None for i, sampled in enumerate(mask)],
        turns=turns,
    )


def make_rollout(rollout_id: str = "task-a.0", outcome: Outcome = Outcome.COMPLETED, **more: Any) -> Rollout:
    """Return the result of a rollout. Unless it is completed, it has a failure and no reward."""
    fields: dict[str, Any] = {
        "run_id": "run",
        "step": 0,
        "task_id": rollout_id.rpartition(".")[0],
        "rollout_id": rollout_id,
        "attempt": 1,
        "session_id": f"session-{rollout_id}",
        "outcome": outcome,
        "started_at": 1.0,
        "finished_at": 2.0,
    }
    if outcome is Outcome.COMPLETED:
        fields["reward"] = 1.0
    else:
        fields["failure"] = Failure(reason="agent_exception", message="boom")
    if "segments" not in more:
        fields["segments"] = [make_segment()]
    return Rollout.parse({**fields, **more})


def make_claims(session: str = "s", **more: Any) -> SessionClaims:
    """Return the claims of a session key that is valid for ten minutes."""
    fields: dict[str, Any] = {
        "run_id": "r",
        "step": 0,
        "rollout_id": "x",
        "attempt": 1,
        "session_id": session,
        "sampling": Sampling(),
        "expires_at": time.time() + 600,
    }
    return SessionClaims.model_validate({**fields, **more})
