"""The root of the configuration tree."""

import difflib
import secrets
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Self, get_args

from pydantic import BaseModel, Field, ValidationError, model_validator

from agent_wrapper.contract import Sampling
from agent_wrapper.contract.keys import ID_PATTERN
from rollout_backend.config.gateway import GatewayConfig, RelayConfig
from rollout_backend.config.model import ModelConfig
from rollout_backend.config.results import (
    AwsConfig,
    CollectConfig,
    ObserveConfig,
    PriceConfig,
    QueueConfig,
    StorageConfig,
)
from rollout_backend.config.runtimes import RUNTIME_KINDS, AnyRuntimeConfig, RuntimeConfig
from rollout_backend.config.section import Section, matching
from rollout_backend.config.serving import RouterConfig, ServingConfig
from rollout_backend.config.step import (
    CircuitBreakerConfig,
    GroupConfig,
    JanitorConfig,
    ScoringConfig,
    TimeoutConfig,
    TrainingConfig,
)
from rollout_backend.errors import ConfigError

_ID_FORM = "an id of at most 128 letters, digits, '.', '_' and '-' that begins with a letter or a digit"


class RolloutConfig(Section):
    """All settings of a run. Only `model.path`, `storage.bucket` and `runtime` have no default."""

    run_id: Annotated[str, matching(ID_PATTERN, _ID_FORM)] = Field(
        default_factory=lambda: f"run-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    )
    """Name of the run in S3, in its queue and in its directory. Default: the time, and four letters."""
    model: ModelConfig
    storage: StorageConfig
    runtime: AnyRuntimeConfig
    aws: AwsConfig = AwsConfig()
    queue: QueueConfig = QueueConfig()
    serving: ServingConfig = ServingConfig()
    router: RouterConfig = RouterConfig()
    gateway: GatewayConfig = GatewayConfig()
    relay: RelayConfig | None = None
    sampling: Sampling = Sampling()
    group: GroupConfig = GroupConfig()
    circuit_breaker: CircuitBreakerConfig = CircuitBreakerConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
    collect: CollectConfig = CollectConfig()
    scoring: ScoringConfig = ScoringConfig()
    training: TrainingConfig = TrainingConfig()
    janitor: JanitorConfig = JanitorConfig()
    observe: ObserveConfig = ObserveConfig()
    prices: PriceConfig = PriceConfig()
    output_dir: Path = Path("runs")
    """Logs and step reports are written to OUTPUT_DIR/RUN_ID."""

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        for name in type(self).model_fields:
            if isinstance(section := getattr(self, name), Section):
                section.check_run(self)
        return self

    @classmethod
    def parse(cls, data: object, sources: Mapping[str, str] | None = None) -> Self:
        """Validate plain values. `sources` names the places where settings were set, such as `config.yaml:17`.

        Raises:
            ConfigError: names every invalid key.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ConfigError(_explain(error, sources or {})) from None

    @property
    def uses_queue(self) -> bool:
        """Return True if the run receives from a queue. Agents that announce nothing, and agents without credentials,
        cannot send to a queue that the run creates, so such a run has none."""
        if self.runtime.agent_protocol in ("agentcore-rl-toolkit", "agentcore-runtime-app"):
            return False
        return self.queue.enabled and not (self.storage.presigned and self.queue.url is None)

    @property
    def gpus(self) -> int | None:
        """Return how many GPUs the run pays for; None if the settings do not say."""
        serving = self.serving
        if self.prices.gpus or serving.kind not in ("process", "ray") or serving.servers == "auto":
            return self.prices.gpus
        return serving.servers * serving.gpus_per_server

    @property
    def run_dir(self) -> Path:
        return self.output_dir / self.run_id

    def priced_for(self, platform: str | None) -> Self:
        """Return the settings with the prices of the runtime's platform, unless they name a platform."""
        if platform is None or self.prices.platform is not None:
            return self
        known = "V1" if platform == "V1" else "V2"  # a later one is priced as the newest that is known
        return self.model_copy(update={"prices": self.prices.model_copy(update={"platform": known})})

    @property
    def run_runtime(self) -> RuntimeConfig:
        """Return the `runtime` section as this run opens it."""
        return self.runtime.for_run(self.run_dir, self.aws.agents_environment)


def _explain(error: ValidationError, sources: Mapping[str, str]) -> str:
    lines = ["the settings are invalid:"]
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"]) or "settings"
        match item["type"]:
            case "extra_forbidden":
                nearest = _nearest_setting(key)
                advice = f"did you mean {nearest}?" if nearest else "remove it, or correct its spelling"
                lines.append(f"  {key}: no such setting; {advice}")
            case "missing":
                lines.append(f"  {key}: is missing")
            case _:
                lines.append(f"  {key}: {item['msg'].removeprefix('Value error, ')}")
        path = key
        while path and path not in sources:
            path = path.rpartition(".")[0]
        if path and item["type"] != "missing":
            lines[-1] += f" ({sources[path]})"
    return "\n".join(lines)


def _nearest_setting(key: str) -> str | None:
    """Return the setting that a wrong key probably means: one with a similar path, or one of that name elsewhere."""
    settings = list(_setting_names(RolloutConfig))
    similar = difflib.get_close_matches(key, settings, 1, 0.75)
    name = key.rpartition(".")[2]
    same_name = [setting for setting in settings if setting.rpartition(".")[2] == name]
    return next(iter(same_name + similar), None)


def _setting_names(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        kinds = [*RUNTIME_KINDS.values()] if name == "runtime" else [field.annotation, *get_args(field.annotation)]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _setting_names(kind, f"{prefix}{name}.")
