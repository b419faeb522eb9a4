"""The `training_service` section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollout_backend.config.section import HttpUrl, Seconds, Section

EstimatorName = Literal["grpo", "rloo", "reinforce_plus_plus_baseline", "gpg", "opo", "grpo_passk"]


class TrainingServiceConfig(Section):
    """How `rollout train` trains on a service with Tinker's API. See [training-services.md](training-services.md)."""

    base_url: HttpUrl | None = None
    """URL of the service. Default: that of Thinking Machines. The key is `TINKER_API_KEY` in the environment."""
    base_model: str
    """Name of the base model on the service. `model.path` must hold its tokenizer."""
    rank: int = Field(default=32, ge=1)
    """Rank of the LoRA adapter that is trained."""
    steps: int = Field(default=100, ge=1)
    """Training steps. A run that has fewer resumes; to train longer, raise this and start it again."""
    tasks_per_step: int = Field(default=16, ge=1)
    """Tasks of one step, each with `group.size` rollouts. All tasks are used once before one is repeated."""
    seed: int = 0
    """Seed of the order of tasks."""
    loss: Literal["importance_sampling", "ppo", "cispo"] = "importance_sampling"
    """The service's loss function. It adds up the loss of all trained tokens."""
    loss_options: dict[str, float] = Field(default_factory=dict)
    """Options of the loss, such as `clip_low_threshold`, as the service names them."""
    estimator: EstimatorName = "grpo"
    """How advantages follow from the rewards of a group: the estimators of
    [training-internals.md](training-internals.md#estimators), without `_skip_missing`."""
    normalize_by_std: bool = True
    """Divide the advantages of `grpo` and `grpo_passk` by the standard deviation of the group's rewards."""
    learning_rate: float = Field(default=4e-5, gt=0)
    """Adam's learning rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Adam's decay of the gradient's mean."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Adam's decay of the squared gradient's mean."""
    eps: float = Field(default=1e-8, gt=0)
    """Adam's epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    grad_clip_norm: float = Field(default=0.0, ge=0)
    """Maximum norm of the gradient; 0 does not clip it."""
    optimizer_steps: int = Field(default=1, ge=1)
    """Optimizer steps in each training step, each on an equal share of its groups."""
    keep_every: int = Field(default=10, ge=1)
    """Every this many steps, and after the last, the service keeps the weights for ever. Those of other steps, from
    which a killed run resumes, expire after 30 days."""
    evaluate_every: int | None = Field(default=None, ge=1)
    """Collect the tasks of `--held-out` before the first step, every this many steps, and after the last. Default:
    never."""
    call_s: Seconds = 1800.0
    """Timeout of one call to the service."""
    retry_s: Seconds = 3600.0
    """Time for which a training step is repeated while the service fails or does not answer. Then the run stops, and
    can be resumed."""
