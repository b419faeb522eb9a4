"""The settings of a run that differ from their defaults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, SecretStr
from pydantic_core import PydanticUndefined


def changed_settings(config: BaseModel, prefix: str = "") -> list[tuple[str, str]]:
    """Return the names and values of settings that are required, or differ from their defaults. No secrets."""
    return list(_changed(config, prefix))


def _changed(config: BaseModel, prefix: str) -> Iterator[tuple[str, str]]:
    for name, field in type(config).model_fields.items():
        value: Any = getattr(config, name)
        if isinstance(value, BaseModel):
            yield from _changed(value, f"{prefix}{name}.")
            continue
        default = field.get_default(call_default_factory=False)
        if isinstance(value, SecretStr):
            yield prefix + name, "(secret)"
        elif name == "endpoint_url" and value is not None:  # the path of a local cloud's lets callers run code
            yield prefix + name, urlsplit(value)._replace(path="", query="").geturl()
        elif value != default and not (default is PydanticUndefined and not value) and name != "run_id":
            yield prefix + name, str(value)
