"""Decode the two encodings of an object into plain values, and refuse a hostile one before building anything.

Invariants:

- The decoder never allocates memory based only on a length in the input: it first checks sizes, maps, lists, values
  and depth against limits. Otherwise a few hundred bytes could claim gigabytes.
- Checking takes time proportional to the input's size, and stops at the first exceeded limit.
- Refused input raises `ContractError`.
"""

import functools
import re
import threading
from typing import Any, cast

import msgpack
import zstandard
from pydantic_core import from_json

# Limit for one unpacked object. Readers may set a lower one.
MAX_OBJECT_BYTES = 256 * 1024 * 1024
# Levels of maps and lists. JSON parsers have the same limit.
MAX_DEPTH = 200
# Limits on the maps and lists of one object, and on all its values, including keys.
MAX_CONTAINERS = 250_000
MAX_VALUES = 4_000_000
# Limits on the keys of one map, and on the byte strings of one object: validation reports each that is out of place.
MAX_KEYS, MAX_BYTE_STRINGS = 100_000, 100_000

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# Possessive, and a string without an end reaches to the end of the input: each byte is visited once.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_SOME_STRINGS = re.compile(rb"(?:[^\"]*+" + _STRING.pattern + rb"){1,256}+", re.DOTALL)
_MAX_FIELD_CHARS, _MAX_REASON_CHARS = 200, 1000

# The characters of the second line reorder or break lines, so a string can display as something else
# (CVE-2021-42574).
_UNREADABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"
    r"\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)


def readable(text: str) -> str:
    """Replace control characters other than tab and newline, which a terminal, a log or a browser would interpret.
    Line ends of Windows become newlines."""
    return _UNREADABLE.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


class ContractError(ValueError):
    """An object that violates the contract. `field` names the place, and `reason` says what is wrong.

    Both quote the object, so they are cut to a length and contain no control characters.
    """

    def __init__(self, field: str, reason: str) -> None:
        self.field = " ".join(readable(field[:_MAX_FIELD_CHARS]).split("\n"))
        self.reason = readable(reason[:_MAX_REASON_CHARS])
        super().__init__(f"{self.field}: {self.reason}")


class ExpandedBeyondCap(ContractError):
    """The expanded segments of an object (see `shared_prefixes`) exceed the reader's limit."""


def pack(fields: object) -> bytes:
    """Encode plain values in the compact form: msgpack in one zstd frame."""
    return zstandard.ZstdCompressor(level=3).compress(cast(bytes, msgpack.packb(fields)))


def unpacked_size(data: bytes) -> int:
    """Return the number of bytes to parse, as stated by the input. Nothing is unpacked."""
    if not data.startswith(_ZSTD_MAGIC):
        return len(data)
    try:
        return max(0, zstandard.frame_content_size(data))
    except zstandard.ZstdError:
        return 0


def unpack(data: bytes, max_bytes: int = MAX_OBJECT_BYTES) -> dict[str, Any]:
    """Decode the fields of one object from either form.

    Raises:
        ContractError: the object is empty, damaged, not a map of fields, or exceeds a limit.
    """
    if not data:
        raise ContractError("object", "has 0 bytes")
    if data.startswith(_ZSTD_MAGIC):
        fields = _read_packed(data, max_bytes)
    elif data.lstrip()[:1] == b"{":
        if len(data) > max_bytes:
            raise ContractError("object", f"has {len(data)} bytes, more than the cap of {max_bytes}")
        fields = read_json(data)
    else:
        raise ContractError("object", "is neither a zstd frame nor a JSON object")
    if not isinstance(fields, dict):
        raise ContractError("object", "is not a map of fields")
    return fields


def read_json(data: bytes) -> Any:
    """Decode JSON into plain values that the compact form can represent too.

    Raises:
        ContractError: the data is not JSON, is nested too deep, has an integer beyond 64 bits, or exceeds a limit.
    """
    check_json(data)
    try:
        fields = from_json(data)
    except ValueError as error:
        raise ContractError("object", f"is no JSON, or is cut short: {error}") from None
    try:
        packed = msgpack.packb(fields)
    except (ValueError, OverflowError) as error:
        raise ContractError("object", f"holds what cannot be stored: {error}") from None
    check_packed(packed)
    return fields


def check_json(data: bytes, max_containers: int = MAX_CONTAINERS, max_values: int = MAX_VALUES) -> None:
    """Refuse JSON that exceeds a limit. Counts its punctuation, before anything is built.

    Raises:
        ContractError: it has too many maps and lists, or too many values.
    """
    counts = _punctuation(data, 0, len(data))
    if counts[0] <= max_containers and counts[1] <= max_values:
        return
    # The punctuation may be inside strings, so count again without them. They are removed in batches: one expression
    # for the whole input would hold the GIL for long, and a match for each string takes three times as long.
    containers = values = strings = at = 0
    while some := _SOME_STRINGS.match(data, at):
        between, found = _STRING.subn(b"", some[0])
        more = _punctuation(between, 0, len(between))
        containers, values, strings, at = containers + more[0], values + more[1], strings + found, some.end()
        _check_counts(containers, max(values, strings), max_containers, max_values)
    more = _punctuation(data, at, len(data))
    _check_counts(containers + more[0], values + more[1], max_containers, max_values)


def _punctuation(data: bytes, start: int, end: int) -> tuple[int, int]:
    containers = data.count(b"[", start, end) + data.count(b"{", start, end)
    return containers, containers + data.count(b",", start, end) + data.count(b":", start, end)


def _check_counts(containers: int, values: int, max_containers: int, max_values: int) -> None:
    if containers > max_containers:
        raise ContractError("object", f"holds more than {max_containers} maps and lists")
    if values > max_values:
        raise ContractError("object", f"holds more than {max_values} values; arrays as bytes are one each")


def _read_packed(data: bytes, max_bytes: int) -> object:
    # The frame header states the unpacked size, so check it before decompressing.
    try:
        size = zstandard.frame_content_size(data)
        if size < 0:
            raise ContractError("object", "is a zstd frame without a content size")
        if size > max_bytes:
            raise ContractError("object", f"unpacks to {size} bytes, more than the cap of {max_bytes}")
        raw = _decompressor(threading.get_ident()).decompress(data, max_output_size=max_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ContractError("object", f"is damaged or cut short: {error}") from None
    if len(raw) != size:
        raise ContractError("object", "is damaged or cut short")
    check_packed(raw)
    try:
        return msgpack.unpackb(raw, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise ContractError("object", f"is no msgpack: {error}") from None


@functools.lru_cache(maxsize=8)
def _decompressor(thread: int) -> zstandard.ZstdDecompressor:
    """Return a thread's decompressor. Making one takes half as long as unpacking a result of 10 KB."""
    return zstandard.ZstdDecompressor()


def _first_bytes() -> list[tuple[int, int, int]]:
    """Return what each first byte of a msgpack value announces: bytes after it, bytes of a length, children per unit
    of it.

    A length without children counts bytes; no entry is the extension types, which no object of ours has.
    """
    # The default entry is that of small integers.
    table = [(0, 0, 0)] * 256
    # The first byte of a small map or list announces n units at once.
    table[0x80:0x90] = [(n, -1, 2) for n in range(16)]
    table[0x90:0xA0] = [(n, -1, 1) for n in range(16)]
    # Small strings.
    table[0xA0:0xC0] = [(n, 0, 0) for n in range(32)]
    for first, size in {
        0xCA: 4,
        0xCB: 8,
        0xCC: 1,
        0xCD: 2,
        0xCE: 4,
        0xCF: 8,
        0xD0: 1,
        0xD1: 2,
        0xD2: 4,
        0xD3: 8,
    }.items():
        table[first] = (size, 0, 0)
    for first, width in {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}.items():
        table[first] = (0, width, 0)
    for first, width, children in ((0xDC, 2, 1), (0xDD, 4, 1), (0xDE, 2, 2), (0xDF, 4, 2)):
        table[first] = (0, width, children)
    return table


_FIRST_BYTES = _first_bytes()
_REFUSED_BYTES = frozenset([0xC1, *range(0xC7, 0xCA), *range(0xD4, 0xD9)])
_BYTE_STRINGS = frozenset([0xC4, 0xC5, 0xC6])
# Sizes of values without a length or children, which are the majority; otherwise 0.
_SIZES = [
    0 if width or children or first in _REFUSED_BYTES else 1 + after
    for first, (after, width, children) in enumerate(_FIRST_BYTES)
]


def check_packed(raw: bytes, share: int = 1) -> None:
    """Walk msgpack without building anything, and refuse input that exceeds the limits divided by `share`.

    Raises:
        ContractError: it exceeds a limit, is truncated, or contains a type that JSON lacks.
    """
    at, containers, values, byte_strings = 0, 0, 1, 0
    max_containers, max_values = MAX_CONTAINERS // share, MAX_VALUES // share
    # The remaining values of this level, and of the levels above.
    to_come, above = 1, list[int]()
    try:
        while to_come or above:
            if not to_come:
                to_come = above.pop()
                continue
            to_come -= 1
            first = raw[at]
            if size := _SIZES[first]:
                at += size
                continue
            after, width, children = _FIRST_BYTES[first]
            at += 1
            if width > 0:
                after = int.from_bytes(raw[at : at + width], "big")
                at += width
            elif first in _REFUSED_BYTES:
                raise ContractError("object", "holds a value of a type that JSON does not have")
            if not children:
                at += after
                byte_strings += first in _BYTE_STRINGS
                if byte_strings > MAX_BYTE_STRINGS:
                    raise ContractError("object", f"holds more than {MAX_BYTE_STRINGS} byte strings")
                continue
            if children == 2 and after > MAX_KEYS:
                raise ContractError("object", f"holds more than {MAX_KEYS} keys in one map")
            containers += 1
            values += after * children
            _check_counts(containers, values, max_containers, max_values)
            if len(above) >= MAX_DEPTH:
                raise ContractError("object", f"is nested deeper than {MAX_DEPTH} levels")
            above.append(to_come)
            to_come = after * children
    except IndexError:
        raise ContractError("object", "is no msgpack: it is cut short") from None
