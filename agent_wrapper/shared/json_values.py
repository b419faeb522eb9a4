"""Check that a value survives the way to an agent and back as JSON. Pure.

Python's json module accepts more than JSON: NaN, half of a surrogate pair, a thousand levels. Parsers on the other
side refuse these, so a value accepted here would be lost there.
"""

import json
import math
import numbers
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import msgpack

from agent_wrapper.contract.codec import MAX_DEPTH, check_packed

# Extras are nested some levels deep in the result.
_EXTRAS_DEPTH = MAX_DEPTH - 10
# Parsers stop at 4,300 digits.
_MAX_INTEGER_BITS = 10_000


def check_json_value(value: object, where: str, max_depth: int) -> None:
    """Check a value of dicts, lists, tuples, strings, finite numbers, booleans and None.

    Raises:
        ValueError: it contains another type, or more than `max_depth` levels; names the place, beginning with
            `where`.
    """
    todo = [(value, where, 1)]
    while todo:
        item, place, depth = todo.pop()
        if isinstance(item, (dict, list, tuple)) and depth > max_depth:
            raise ValueError(
                f"{where} is nested deeper than {max_depth} levels: flatten it, or put the inner part in as JSON text"
            )
        match item:
            case dict():
                for key, each in item.items():
                    if not isinstance(key, str):
                        raise ValueError(f"{place} has the key {short(key)}, which is not a string")  # noqa: TRY004
                    _check_text(key, f"a key of {place}")
                    todo.append((each, f"{place}.{key}", depth + 1))
            case list() | tuple():
                todo += [(each, f"{place}.{i}", depth + 1) for i, each in enumerate(item)]
            case str():
                _check_text(item, place)
            case float() if not math.isfinite(item):
                raise ValueError(
                    f"{place} is {item}, which JSON does not know: leave it out, or write it as a string"
                )
            case int() if item.bit_length() > _MAX_INTEGER_BITS:
                raise ValueError(f"{place} is a whole number of {item.bit_length()} bits: write it as a string")
            case None | bool() | int() | float():
                pass
            case _:
                raise ValueError(
                    f"{place} is {short(item)}, a {type(item).__name__}, which JSON does not know: write it as a "
                    "string or a number"
                )


def _check_text(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place} holds {text[error.start]!r}, half of a surrogate pair, which is no character: remove it"
        ) from None


def read_extras(values: Mapping[Any, object]) -> dict[str, Any]:
    """Return the values as a result stores them. Raises ValueError, which names the value that is not JSON."""
    extras = {key: _json(key, value) for key, value in values.items()}
    # The other half is reserved for the sampled tokens.
    check_packed(msgpack.packb(extras), share=2)
    return extras


def finite_number(value: object) -> float:
    """Convert a number of Python, NumPy or PyTorch. True is 1 and False is 0, so `return answer == wanted` is a
    reward, even if NumPy or PyTorch compared them."""
    if isinstance(value, Decimal):
        # numbers.Real does not include Decimal.
        value = float(value)
    if getattr(value, "shape", None) == () and not isinstance(value, numbers.Real):
        value = getattr(value, "item", lambda: value)()
    if not isinstance(value, numbers.Real):
        raise ValueError(f"the reward is {short(value)}, a {type(value).__name__}, not a number")  # noqa: TRY004
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"the reward is {short(value)}, which is not finite")
    return number


def plain_json(value: object) -> Any:
    """Return the value as JSON stores it, with the numbers and arrays of NumPy and PyTorch as those of Python.

    Raises:
        TypeError, ValueError, RecursionError: it is not JSON.
    """
    return json.loads(json.dumps(value, allow_nan=False, default=_plain))


def _plain(value: Any) -> object:
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, (numbers.Real, Decimal)):
        return float(value)
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        # NumPy, PyTorch, JAX and pandas have these attributes.
        return value.tolist()
    raise TypeError(f"{short(value)}, a {type(value).__name__}, is not JSON: write it as a string or a number")


def _json(key: object, value: object) -> Any:
    if not isinstance(key, str):
        raise ValueError(f"the key {short(key)} is not a string")  # noqa: TRY004
    try:
        plain = plain_json(value)
        check_json_value(plain, "it", _EXTRAS_DEPTH)
        # msgpack has no integers over 64 bits.
        msgpack.packb([key, plain])
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{key!r} cannot be stored as JSON: {error}") from None
    return plain


def decode_text(data: bytes) -> str:
    """Decode a number or JSON that a program of any system wrote: in UTF-8, UTF-16 or UTF-32, with or without a byte
    order mark."""
    return data.decode(json.detect_encoding(data), errors="replace")


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
