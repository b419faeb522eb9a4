"""Base class and value types of all configuration sections."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ImportString, TypeAdapter, ValidationError

Seconds = Annotated[float, Field(gt=0)]
Rate = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """An immutable section that refuses unknown keys. Field docstrings become the settings reference."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


def kind_choices(known: Iterable[str], base: str) -> str:
    """Describe the values of a `kind` setting: `known` names, or the import path of a subclass of `base`."""
    return f"{', '.join(known)}, or the import path of {base}"


def import_kind(kind: object, choices: str) -> Any:
    """Import what a `kind` setting names by its import path. Raises ValueError, which lists the choices."""
    try:
        return TypeAdapter(ImportString[Any]).validate_python(kind)
    except ValidationError as error:
        raise ValueError(f"kind {kind!r} is none of {choices}: {error.errors()[0]['msg']}") from None
