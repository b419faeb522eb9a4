"""Read the configuration from YAML, the environment and overrides."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rollout_backend.config.rollout import RolloutConfig
from rollout_backend.config.section import Section
from rollout_backend.errors import ConfigError

ENV_PREFIX = "ROLLOUT__"
_PLACEHOLDER = re.compile(r"<yours, (.*)>")


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
    sources: dict[str, str] = {}  # of each setting: where it was set last
    if path is not None:
        merged, lines = _read_yaml(Path(path))
        _merge(tree, merged)
        sources |= {key: f"{path}:{line}" for key, line in lines.items()}
    for name, value in sorted((os.environ if env is None else env).items()):
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
        _merge(tree, _nest(key.split("."), value, override))


def _to_fill_in(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the settings that have the placeholder of a template, each with what the placeholder asks for."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _to_fill_in(value, f"{prefix}{name}.")
        elif isinstance(value, str) and (found := _PLACEHOLDER.fullmatch(value)):
            yield f"{prefix}{name}", found[1]


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a map of settings, without checking it. Raises ConfigError."""
    return _read_yaml(path)[0]


def _read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return a file's settings, and the line of each one, by its dotted name."""
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8-sig"))
        node = loader.get_single_node()
        lines = dict(_lines(node, path)) if node is not None else {}
        data = loader.construct_document(node) if node is not None else None
    except OSError as error:
        raise ConfigError(f"cannot read the settings {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a map of settings")
    return data, lines


def _lines(node: yaml.Node, path: Path, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield the line of each setting. Raises ConfigError if one is set twice, of which YAML would take the last."""
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
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of {where!r} is not YAML: {error}") from None
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
    """Return True if two sections are of different kinds, which share no settings: one then replaces the other."""
    return "kind" in below and "kind" in value and below["kind"] != value["kind"]
