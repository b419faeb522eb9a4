"""The `training_service` section."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from rollout_backend.config.section import HttpUrl, Seconds, Section, matching

if TYPE_CHECKING:
    from rollout_backend.config.rollout import RolloutConfig

EstimatorName = Literal["grpo", "rloo", "reinforce_plus_plus_baseline", "gpg", "opo", "grpo_passk"]
LossName = Literal["importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce"]
"""Those of Tinker's API with the inputs of `training.service.Datum`."""
LoggerName = Literal["tensorboard", "wandb"]

_HUB_MODEL = r"arn:aws[a-z-]*:sagemaker:([a-z0-9-]+):(\d{12}|aws):hub-content/[\w-]+/Model/[\w-]+(/\d+\.\d+\.\d+)?"
# The service's limits: it would refuse other values at the first training step, after its rollouts.
_SAGEMAKER_LIMITS = {
    "rank": (1, 256),
    "learning_rate": (0, 0.01),
    "beta1": (0, 0.999999),
    "beta2": (0, 0.999999),
    "eps": (1e-16, 0.01),
    "weight_decay": (0, 1),
    "grad_clip_norm": (0, 100),
}
_SAGEMAKER_LOSSES = ("importance_sampling", "ppo", "cispo")
_SAGEMAKER_LOSS_OPTIONS = {"clip_low_threshold": (0, 1), "clip_high_threshold": (1, 10)}


class SageMakerConfig(Section):
    """The training sessions of `kind: sagemaker`. Region and credentials are those of `aws`."""

    role_arn: Annotated[str, matching(r"arn:aws[a-z-]*:iam::\d{12}:role/\S+", "the ARN of a role")]
    """Role that the session assumes, with AWS's policy `AmazonSageMakerTrainingSessionFullAccess`."""
    model_package_group_arn: Annotated[
        str,
        matching(
            r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]+:\d{12}:model-package-group/\S+", "a model package group's ARN"
        ),
    ]
    """Model package group in `aws.region`, in which each checkpoint becomes a version."""
    output: Annotated[str, matching(r"s3://[^/\s]+(/\S*)?", "an S3 URI")]
    """Where the session writes checkpoints. Choose a prefix that no lifecycle rule empties."""
    alpha: int = Field(default=64, ge=1)
    """LoRA's scaling factor."""
    accept_eula: bool = False
    """Accept the licence of a gated model."""


class TrainingServiceConfig(Section):
    """How `rollout train` trains on a service. See [training-services.md](training-services.md)."""

    kind: Literal["tinker", "sagemaker"] = "tinker"
    """`tinker`: a service with Tinker's API. `sagemaker`: training sessions of SageMaker AI."""
    sagemaker: SageMakerConfig | None = None
    """What `kind: sagemaker` needs."""
    base_url: HttpUrl | None = None
    """URL of the service. Default: that of Thinking Machines, or of AWS in `aws.region`. The key of `kind: tinker` is
    `TINKER_API_KEY` in the environment."""
    base_model: str
    """Name of the base model on the service; with `kind: sagemaker`, its ARN in SageMaker's hub. `model.path` must
    hold its tokenizer."""
    sampler: str = ""
    """Path of saved weights of that model, from which a run with `serving.kind=tinker` samples. Default: the base
    model."""
    rank: int = Field(default=32, ge=1)
    """Rank of the LoRA adapter that is trained."""
    steps: int = Field(default=100, ge=1)
    """Training steps. A run that has fewer resumes; to train longer, raise this and start it again."""
    tasks_per_step: int = Field(default=16, ge=1)
    """Tasks of one step, each with `group.size` rollouts. All tasks are used once before one is repeated."""
    seed: int = 0
    """Seed of the order of tasks."""
    loss: LossName = "importance_sampling"
    """The service's loss function. Tinker adds up the losses of all trained tokens, SkyRL averages them. SkyRL and
    SageMaker have the first three."""
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
    overlap: bool = False
    """Collect the next step's rollouts while a step is trained. They come from the weights before that step; the loss
    corrects for this by their sampled logprobs. Default: each step waits for the newest weights."""
    keep_every: int = Field(default=10, ge=1)
    """Every this many steps, and after the last, the service keeps the weights for ever. Those of other steps, from
    which a killed run resumes, expire after 30 days. SageMaker keeps all until you delete their model packages."""
    evaluate_every: int | None = Field(default=None, ge=1)
    """Collect the tasks of `--held-out` before the first step, every this many steps, and after the last. Default:
    never."""
    loggers: tuple[LoggerName, ...] = ()
    """Where the curve and the service's metrics also go, if you have the package. `tensorboard`: the folder
    `tensorboard` in the run's folder. `wandb`: a run with this run's name, in the project of `WANDB_PROJECT`."""
    call_s: Seconds = 1800.0
    """Timeout of one call to the service."""
    retry_s: Seconds = 3600.0
    """Time for which a training step is repeated while the service fails or does not answer. Then the run stops, and
    can be resumed."""

    @model_validator(mode="after")
    def _fits_kind(self) -> Self:
        if self.kind == "tinker":
            if self.sagemaker is not None:
                raise ValueError("sagemaker is for kind: sagemaker: leave it out, or set kind")
            return self
        if self.sagemaker is None:
            raise ValueError("kind: sagemaker needs the section sagemaker, with role_arn, output and the group's ARN")
        if not re.fullmatch(_HUB_MODEL, self.base_model):
            raise ValueError(
                f"base_model {self.base_model!r} is no ARN of a model in SageMaker's hub, "
                "arn:aws:sagemaker:REGION:aws:hub-content/SageMakerPublicHub/Model/NAME"
            )
        if self.loss not in _SAGEMAKER_LOSSES:
            raise ValueError(f"SageMaker has no loss {self.loss}, only {', '.join(_SAGEMAKER_LOSSES)}")
        if unknown := self.loss_options.keys() - _SAGEMAKER_LOSS_OPTIONS:
            raise ValueError(f"SageMaker has no loss_options {', '.join(sorted(unknown))}")
        values = {name: getattr(self, name) for name in _SAGEMAKER_LIMITS} | self.loss_options
        for name, (low, high) in (_SAGEMAKER_LIMITS | _SAGEMAKER_LOSS_OPTIONS).items():
            if name in values and not low <= values[name] <= high:
                raise ValueError(f"SageMaker accepts a {name} from {low} to {high}, not {values[name]}")
        return self

    def check_run(self, run: RolloutConfig) -> None:
        if self.sagemaker is None:
            return
        group = self.sagemaker.model_package_group_arn
        for name, arn in (("base_model", self.base_model), ("sagemaker.model_package_group_arn", group)):
            if (region := arn.split(":")[3]) != run.aws.region:
                raise ValueError(
                    f"training_service.{name} is in {region}, and aws.region is {run.aws.region}: sessions need both "
                    "in one region"
                )
