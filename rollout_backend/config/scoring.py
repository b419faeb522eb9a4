"""The `scoring` section."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from rollout_backend.config.section import Seconds, Section, matching


class ScoringConfig(Section):
    """Compute rewards on the training side. Without `function` and `command`, the agent's own reward counts. See
    [rewards.md](rewards.md)."""

    function: Annotated[str, matching(r".+:[A-Za-z_]\w*", "of the form FILE.py:NAME or module:NAME")] | None = None
    """A Python function, as `FILE.py:NAME` or `module:NAME`. It returns the reward of one rollout."""
    command: tuple[str, ...] = ()
    """A program with its arguments, instead of a function. It reads one rollout as JSON from stdin, and the last line
    that it prints is the reward."""
    timeout_s: Seconds = 300.0
    """Timeout of one call. The scorer's process is killed when it passes."""
    retry_s: Seconds = 600.0
    """A scorer that fails is called again, with the same rollout, for this many seconds, and never beyond the step's
    deadline. Then the rollout ends as `scorer_failed`."""
    processes: int = Field(default=4, ge=1)
    """Rollouts that are scored at once, each in a separate process. Harbor tasks on Kubernetes: each in a Job, in
    addition to the `runtime.max_sessions` of agents. These Jobs count towards `runtime.invoke_per_s` and
    `runtime.stop_per_s`."""
    concurrency: int = Field(default=16, ge=1)
    """Calls of an `async` function at once, in each process. A plain function or a command has one."""

    @model_validator(mode="after")
    def _one_scorer(self) -> Self:
        if self.function is not None and self.command:
            raise ValueError("scoring.function and scoring.command exclude each other: leave one out")
        return self

    @property
    def enabled(self) -> bool:
        return self.function is not None or bool(self.command)
