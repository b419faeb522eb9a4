"""The sections on how a run proceeds: `timeouts`, `group`, `circuit_breaker`, `training`, `scoring` and `janitor`.

Where each timeout is enforced:

- `model_call_s`: `gateway.engine.client`
- `agent_s`: `agent_wrapper.app`
- `publish_grace_s`: `step.rollout_task`
- `collection_s`: `step.step`
- `session_key_s`: `core.session_key`
- `heartbeat_s`: `core.session_ends`
"""

from __future__ import annotations

import itertools
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rollout_backend.config.section import Seconds, Section, matching


class TimeoutConfig(Section):
    """Timeouts nest: model_call < agent, agent + publish_grace < collection < session_key; checked at start."""

    model_call_s: Seconds = 300.0
    """Timeout of one model call, including all its retries."""
    agent_s: Seconds = 1800.0
    """Timeout of an agent, from the arrival of its rollout at the container until it has returned."""
    publish_grace_s: Seconds = 120.0
    """Time after an agent's deadline after which a rollout without a result ends as timed out. The wrapper uses up to
    2 s of it to end the agent, 20 s to fetch the trajectory and 15 s to write the artifacts. Each is also capped at a
    share of this time: 1/10, 1/4 and 1/8. It uses the rest to write the result."""
    collection_s: Seconds = 3600.0
    """Timeout of a step. At this deadline it ends with the rollouts that have arrived."""
    session_key_s: Seconds = 5400.0
    """Lifetime of a session key, from the rollout's dispatch."""
    heartbeat_s: Seconds | None = 15.0
    """Interval of the heartbeats from the wrapper to the gateway. A container that misses three, while others arrive,
    is lost, and its rollout gets another attempt. Null: no heartbeats; a container that dies silently is noticed at
    its agent's deadline."""

    @model_validator(mode="after")
    def _ladder(self) -> Self:
        rungs = {
            "model_call_s": self.model_call_s,
            "agent_s": self.agent_s,
            "agent_s + publish_grace_s": self.session_s,
            "collection_s": self.collection_s,
            "session_key_s": self.session_key_s,
        }
        wrong = [
            f"{lower} ({rungs[lower]:g}) is not below {upper} ({rungs[upper]:g}): raise {upper} or lower {lower}"
            for lower, upper in itertools.pairwise(rungs)
            if not rungs[lower] < rungs[upper]
        ]
        if wrong:
            raise ValueError(f"timeouts must nest, and {'; '.join(wrong)}")
        return self

    @property
    def session_s(self) -> float:
        """Return the seconds that an agent and its result may take."""
        return self.agent_s + self.publish_grace_s


class GroupConfig(Section):
    size: int = Field(default=1, ge=1)
    """Rollouts per task."""
    policy: Literal["strict", "min_viable", "replace"] = "min_viable"
    """Which groups are usable. `strict`: those whose planned rollouts are all trainable. `min_viable`: those with at
    least `min_viable` trainable rollouts. `replace`: as min_viable, and the step starts a new rollout for each one
    lost to the infrastructure."""
    min_viable: int | None = Field(default=None, ge=1)
    """Trainable rollouts that make a group usable. Default: 2, or 1 if groups have one rollout."""
    max_replacements: int = Field(default=2, ge=0)
    """Maximum replacements in one group, under `replace`."""
    target_groups: int | None = Field(default=None, ge=1)
    """The step ends once this many groups are complete; the remaining rollouts are cancelled. Default: all groups."""
    oversample: int = Field(default=0, ge=0)
    """Additional rollouts per task. Once `size` rollouts of a group are trainable, its other rollouts are cancelled.
    Groups complete sooner, and are biased towards short rollouts: the report shows by how much."""
    straggler_after: float | None = Field(default=None, gt=0, le=1)
    """Once this fraction of a step's rollouts has finished, not counting lost and cancelled ones, the remaining
    rollouts have `straggler_factor` times the 95th percentile of the finished rollouts' durations. Default:
    `timeouts.agent_s` alone."""
    straggler_factor: float = Field(default=2.0, ge=1)
    """Factor on the 95th percentile of the finished rollouts' durations. A rollout that runs longer, from its own
    start, ends as a straggler."""
    block_task_after: int | None = Field(default=3, ge=1)
    """Block a task for the rest of the run after it lost all its rollouts to the infrastructure in this many
    consecutive steps or attempts at a step, while other tasks did not. Null: never block a task."""

    @model_validator(mode="after")
    def _viable(self) -> Self:
        if self.min_viable is not None and self.min_viable > self.size:
            raise ValueError(f"min_viable={self.min_viable} is more than size={self.size}")
        return self

    @property
    def needed(self) -> int:
        """Return the number of trainable rollouts that make a group usable."""
        if self.policy == "strict":
            return self.size
        return self.min_viable if self.min_viable is not None else min(2, self.size)


class CircuitBreakerConfig(Section):
    """Stop a run with a diagnosis instead of losing more rollouts for the same reason."""

    max_failures: int | None = Field(default=20, ge=1)
    """Consecutive infrastructure failures for one reason, or results without a reward, over all steps, that stop the
    run. If more rollouts than this are running, as many as are running must fail, because failures end sooner than
    successes. Null: never stop the run for this."""
    min_span_s: float = Field(default=30.0, ge=0)
    """Minimum time between the first and the last of these failures, so that a single burst does not stop the run."""


Mask = Literal["agent_error", "last_reply_cut", "row_cut"]


class LeftOut(Section):
    """Model calls that are answered and not trained. A call is left out if it matches all that is set."""

    model: str | None = None
    """The model that the call names. It is answered by the served model, under any name given here."""
    system: str | None = None
    """A text that the call's first system message contains."""
    header: str | None = None
    """A header of the request, as `name: value`; or `name`, with any value."""

    @model_validator(mode="after")
    def _is_set(self) -> Self:
        if not (self.model or self.system or self.header):
            raise ValueError("would leave out every call: set model, system or header")
        return self


class TrainingConfig(Section):
    """Leave rollouts and conversations out of training. See
    [training-options.md](training-options.md#mask-truncated-episodes)."""

    leave_out: tuple[LeftOut, ...] = ()
    """Conversations to leave out of training, such as the titles that a coding agent generates: a list of `model`,
    `system` and `header`. The report counts their calls. Default: none."""

    mask: tuple[Mask, ...] = ()
    """Rollouts to leave out of training and of every baseline, although they have a reward. `last_reply_cut`: those
    whose last reply ended at `max_tokens` or at the end of the context. `row_cut`: those with sampled tokens beyond
    `data.max_response_length`. `agent_error`: those whose agent failed and scored itself. Default: none."""


class ScoringConfig(Section):
    """Compute rewards on the training side. Without `function` and `command`, the agent's own reward counts. See
    [rewards.md](rewards.md)."""

    function: Annotated[str, matching(r".+:[A-Za-z_]\w*", "of the form FILE.py:NAME or module:NAME")] | None = None
    """A Python function, as `FILE.py:NAME` or `module:NAME`. It returns the reward of one rollout."""
    command: tuple[str, ...] = ()
    """A program with its arguments, instead of a function. It reads one rollout as JSON from stdin, and the last line
    that it prints is the reward."""
    timeout_s: Seconds = 300.0
    """Timeout of one call, after which the scorer's process is killed."""
    retry_s: Seconds = 600.0
    """Time for which a scorer that fails is called again with the same rollout, at most until the step's deadline.
    Then the rollout ends as `scorer_failed`."""
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


class JanitorConfig(Section):
    """A small process next to each run. If the run is killed, it deletes the queues that the run created and stops
    the open sessions. A run that ends normally does both, and ends its janitor."""

    enabled: bool = True
    """Start a janitor. If false, a killed run leaves its queues, and its sessions end at the runtime's idle
    timeout."""
    grace_s: Seconds = 300.0
    """Time from the death of the run until the janitor acts, unless the run has restarted under the same `run_id`."""
    lease_s: Seconds = 60.0
    """Duration of a manager's lease on its run, which it renews in the bucket every quarter of this. A start on
    another machine takes the run over only after the lease has expired; on the same machine a run whose process is
    dead restarts at once."""
