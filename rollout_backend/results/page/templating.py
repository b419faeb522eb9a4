"""The template engine of the reports, with the formats of their numbers."""

from __future__ import annotations

import functools
import re
from typing import Any

import orjson
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from rollout_backend.results.cost import dollars


@functools.cache
def environment() -> Environment:
    """Return the engine. It escapes every value."""
    engine = Environment(
        loader=PackageLoader("rollout_backend.results.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    engine.policies["json.dumps_function"] = _dumps
    engine.filters.update(
        number=number,
        seconds=seconds,
        percent=percent,
        code=code,
        signed=signed,
        data_size=data_size,
        dollars=dollars,
    )
    return engine


def _dumps(value: Any, **options: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()


def number(value: float | None) -> str:
    """Write a number with three significant digits, or a whole one with thousands."""
    if value is None:
        return "–"  # noqa: RUF001
    if abs(value) >= 1e6:
        return f"{value / 1e6:,.3g} M" if abs(value) < 1e9 else f"{value / 1e9:,.4g} G"
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.1g}"


def signed(value: float) -> str:
    """Write a number with its sign."""
    return f"{'+' if value > 0 else '−' if value < 0 else '±'}{number(abs(value))}"  # noqa: RUF001


def seconds(value: float | None) -> str:
    """Write a duration in its natural unit."""
    if value is None:
        return "–"  # noqa: RUF001
    if value < 10:
        return f"{value:.2g} s"
    if value < 600:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:,.1f} h"


def percent(value: float | None) -> str:
    """Write a part of 1 as a percentage."""
    if value is None:
        return "–"  # noqa: RUF001
    return f"{100 * value:.0f} %" if value == 0 or value >= 0.01 else "<1 %"


def data_size(value: int) -> str:
    """Write a size in bytes."""
    return f"{value / 1e6:.1f} MB" if value >= 1e6 else f"{value / 1e3:.0f} kB"


def code(text: str) -> Markup:
    """Set what is between backticks as code; everything is escaped."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704
