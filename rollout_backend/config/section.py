"""Base class and value types of all configuration sections."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ImportString,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
)

if TYPE_CHECKING:
    from rollout_backend.config.rollout import RolloutConfig

Seconds = Annotated[float, Field(gt=0)]
Rate = Annotated[float, Field(gt=0)]


def check_matches(value: str, shape: str, what: str) -> str:
    """Return `value` if `shape` matches all of it. Otherwise, raise ValueError, which says that it is not `what`."""
    if not re.fullmatch(shape, value):
        raise ValueError(f"{value!r} is not {what}")
    return value


def matching(shape: str, what: str) -> AfterValidator:
    """Return a validator for a pattern. Unlike pydantic's `pattern`, its error shows no regular expression."""
    return AfterValidator(lambda value: check_matches(value, shape, what))


def check_address(url: str) -> str:
    """Return the URL unchanged. Raises ValueError if it has no valid host and port."""
    try:
        parts = urlsplit(url)
        # A look-up of the host name encodes it in the same way.
        if parts.port != 0 and parts.hostname and parts.hostname.encode("idna"):
            return url
    except ValueError:
        # The port is no number, brackets hold no IPv6 address, or a part of the name is empty.
        pass
    raise ValueError(f"{url!r} names no host, or no port from 1 to 65535")


HttpUrl = Annotated[
    str,
    matching(r"https?://\S+", "a URL that begins with http:// or https://"),
    AfterValidator(check_address),
]


class Section(BaseModel):
    """An immutable section that refuses unknown keys. Field docstrings become the settings reference."""

    # Each process imports all sections and uses a few. Reading docstrings, which only `docs/make_settings.py` needs,
    # and building all validators took two thirds of the import.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_as_number(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool) and not _accepts_truth(cls.model_fields[str(info.field_name)].annotation):
            raise ValueError(f"is {str(value).lower()} (YAML reads yes, no, on and off so), which belongs elsewhere")
        return value

    @field_validator("*")
    @classmethod
    def _expand_home(cls, value: object) -> object:
        try:
            return value.expanduser() if isinstance(value, Path) else value
        except RuntimeError:
            raise ValueError(f"{value} names the home of a user who does not exist") from None

    def check_run(self, run: RolloutConfig) -> None:
        """Raise ValueError if another section lacks something that this section needs."""


def _accepts_truth(annotation: object) -> bool:
    return annotation in (bool, Any, object) or any(map(_accepts_truth, get_args(annotation)))


def kind_choices(known: Iterable[str], base: str) -> str:
    """Describe the values of a `kind` setting: `known` names, or the import path of a subclass of `base`."""
    return f"{', '.join(known)}, or the import path of {base}"


def import_kind(kind: object, choices: str) -> Any:
    """Import the object that a `kind` setting names. Raises ValueError, which lists the choices."""
    try:
        return import_path(kind)
    except ValidationError as error:
        raise ValueError(f"kind {kind!r} is none of {choices}: {error.errors()[0]['msg']}") from None


def import_path(path: object) -> Any:
    """Import an object by a path such as `package.module.Class`. Raises ValidationError."""
    return TypeAdapter(ImportString[Any]).validate_python(path)
