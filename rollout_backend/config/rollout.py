"""The root of the configuration tree, which is read from YAML, the environment and overrides."""

import difflib
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Self, get_args

import yaml
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
from rollout_backend.config.training_service import TrainingServiceConfig
from rollout_backend.errors import ConfigError

_ID_FORM = "an id of at most 128 letters, digits, '.', '_' and '-' that begins with a letter or a digit"
ENV_PREFIX = "ROLLOUT__"
_PLACEHOLDER = re.compile(r"<yours, (.*)>")
# An address under a domain that RFC 2606 reserves for documentation.
_EXAMPLE = re.compile(r"https?://([^/:]+\.)?example\.(com|net|org)\b")
# Bytes that are not UTF-8 and numbers such as 0x_ raise ValueError.
_NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)


class _Loader(yaml.SafeLoader):
    """Reads dates as strings: no setting is a date, but names of runs look like one."""


_Loader.yaml_implicit_resolvers = {
    first: [each for each in resolvers if each[0] != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class RolloutConfig(Section):
    """All settings of a run. Only `model.path`, `storage.bucket` and `runtime` have no default."""

    run_id: Annotated[str, matching(ID_PATTERN, _ID_FORM)] = Field(
        default_factory=lambda: f"run-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    )
    """Name of the run in S3, in its queue and in its directory. Default: the time, and four hexadecimal digits."""
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
    training_service: TrainingServiceConfig | None = None
    janitor: JanitorConfig = JanitorConfig()
    observe: ObserveConfig = ObserveConfig()
    prices: PriceConfig = PriceConfig()
    output_dir: Path = Path("runs")
    """Logs and step reports are written to OUTPUT_DIR/RUN_ID."""

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        gateway = self.gateway.sized(self.runtime.max_sessions, len(os.sched_getaffinity(0)))
        if self.serving.kind == "tinker":
            gateway = gateway.without_formats_and_images()
        self.__dict__["gateway"] = gateway
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
        if self.runtime.agent_protocol not in ("rollout", "verl-4216"):
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
        # A later platform is priced as the newest known one.
        known = "V1" if platform == "V1" else "V2"
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
                if nearest == key:
                    advice = "another runtime.kind has it: remove it, or change the kind"
                lines.append(f"  {key}: no such setting; {advice}")
            case "model_type":
                lines.append(f"  {key}: must be a map of settings{', and is empty' if item['input'] is None else ''}")
            case "missing":
                verl = "; a training takes model.path from verl: add -o model.path=FOLDER" if key == "model" else ""
                lines.append(f"  {key}: is missing{verl}")
            case "string_type" | "path_type" if isinstance(item["input"], int | float):
                advice = "put it in quotes: '123', and in a shell \"'123'\""
                lines.append(f"  {key}: must be a string, and YAML reads it as a number: {advice}")
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
    return key if key in settings else next(iter(same_name + similar), None)


def _setting_names(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        kinds = [*RUNTIME_KINDS.values()] if name == "runtime" else [field.annotation, *get_args(field.annotation)]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _setting_names(kind, f"{prefix}{name}.")


def load_config(
    path: str | Path | None = None,
    overrides: Iterable[str] = (),
    env: Mapping[str, str] | None = None,
    base: Mapping[str, Any] | None = None,
    top: Mapping[str, Any] | None = None,
) -> RolloutConfig:
    """Read the settings from a YAML file, the environment and overrides of the form `a.b=value`.

    Values of the environment and of overrides are parsed as YAML, so `3` is a number and `[a, b]` a list. The file
    overrides `base`, and `top` overrides everything; the local cloud passes its defaults and its addresses this way.

    Raises:
        ConfigError: the file cannot be read, a value is still to be filled in, or a key is unknown, missing or
            invalid; each is named.
    """
    tree: dict[str, Any] = dict(base or {})
    # Where each setting was set last.
    sources: dict[str, str] = {}
    if path is not None:
        merged, lines = _read_yaml(Path(path))
        _merge(tree, merged)
        sources |= {key: f"{path}:{line}" for key, line in lines.items()}
    env = os.environ if env is None else env
    for name, value in sorted(env.items()):
        if name.startswith(ENV_PREFIX):
            keys = name.removeprefix(ENV_PREFIX).lower().split("__")
            _merge(tree, _nest(keys, value, name))
            _replace_source(sources, ".".join(keys), name)
        elif meant := _meant_setting(name):
            raise ConfigError(f"the variable {name} sets nothing: write {meant}, with two underscores")
    for override in overrides:
        merge_overrides(tree, [override])
        _replace_source(sources, override.partition("=")[0], f"-o {override}")
    _merge(tree, top or {})
    # botocore uses these variables, and the checks and presigned URLs must know them.
    for service in ("s3", "sqs"):
        aws, name, variable = tree.get("aws", {}), f"{service}_endpoint_url", f"AWS_ENDPOINT_URL_{service.upper()}"
        if env.get(variable) and isinstance(aws, Mapping) and not (aws.get("endpoint_url") or aws.get(name)):
            tree["aws"] = {**aws, name: env[variable]}
            sources[f"aws.{name}"] = variable
    if empty := [f"  {key}: {what}" for key, what in _to_fill_in(tree)]:
        raise ConfigError("\n".join(["fill in your values in the settings, in place of each <yours ...>:", *empty]))
    return RolloutConfig.parse(tree, sources)


def _replace_source(sources: dict[str, str], setting: str, source: str) -> None:
    for inner in [key for key in sources if key.startswith(f"{setting}.")]:
        del sources[inner]
    sources[setting] = source


def _meant_setting(variable: str) -> str | None:
    """Return the variable of a setting that this one misspells with single underscores."""
    words = variable.lower().removeprefix("rollout_")
    for section, field in RolloutConfig.model_fields.items():
        kind = field.annotation
        below = kind.model_fields if isinstance(kind, type) and issubclass(kind, Section) else ()
        if any(words == f"{section}_{name}" for name in below) and variable.startswith("ROLLOUT_"):
            return f"{ENV_PREFIX}{section.upper()}__{words.removeprefix(f'{section}_').upper()}"
    return None


def merge_overrides(tree: dict[str, Any], overrides: Iterable[str]) -> None:
    """Merge overrides of the form `a.b=value` into a map of settings. Raises ConfigError."""
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator:
            raise ConfigError(f"override {override!r} must look like key.key=value")
        _merge(tree, _nest(key.split("."), value, key))


def is_placeholder(value: object) -> bool:
    """Return whether the value is a placeholder, which users of a template or an example replace."""
    return isinstance(value, str) and bool(_PLACEHOLDER.fullmatch(value) or _EXAMPLE.match(value))


def _to_fill_in(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each setting that still has a template's placeholder, with the placeholder's description."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _to_fill_in(value, f"{prefix}{name}.")
        elif isinstance(value, str) and (found := _PLACEHOLDER.fullmatch(value)):
            yield f"{prefix}{name}", found[1]


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a map of settings, without checking it. Raises ConfigError."""
    return _read_yaml(path)[0]


def _read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return a file's settings, and the line of each one, by its dotted name. Keys with `x-` hold anchors."""
    try:
        loader = _Loader(path.read_text(encoding="utf-8-sig"))
        node = loader.get_single_node()
        lines = dict(_lines(node, path)) if node is not None else {}
        data = loader.construct_document(node) if node is not None else None
    except OSError as error:
        raise ConfigError(f"cannot read the settings {path}: {error.strerror}") from None
    except _NOT_YAML as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a map of settings")
    return {name: value for name, value in data.items() if not str(name).startswith("x-")}, lines


def _lines(node: yaml.Node, path: Path, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield the line of each setting. Raises ConfigError if one is set twice, because YAML would use the last."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in seen:
            raise ConfigError(f"{path}:{line}: {prefix}{name} is set a second time, after line {seen[name]}")
        seen[name] = line
        yield f"{prefix}{name}", line
        yield from _lines(value, path, f"{prefix}{name}.")


def _nest(keys: list[str], text: str, where: str) -> dict[str, Any]:
    try:
        # `_Loader` is a SafeLoader.
        value = yaml.load(text, _Loader)  # noqa: S506
    except _NOT_YAML:
        # The error's message shows the value, which may be a secret.
        raise ConfigError(f"the value of {where} is not YAML: put it in quotes, in a shell \"'...'\"") from None
    for key in reversed(keys):
        value = {key: value}
    return dict(value)


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        below = into.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping) and not _other_kind(below, value):
            into[key] = dict(below)
            _merge(into[key], value)
        else:
            into[key] = value


def _other_kind(below: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    """Return whether two sections differ in kind. Kinds share no settings, so one then replaces the other."""
    return "kind" in below and "kind" in value and below["kind"] != value["kind"]
