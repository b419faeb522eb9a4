"""Base class and value types of all configuration sections."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0)]
Rate = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """An immutable section that refuses unknown keys. Field docstrings become the settings reference."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
