"""A hostile object is refused before anything is built of it, and every ordinary one is read."""

import json
import struct
from typing import Any

import msgpack
import pytest
import zstandard

from agent_wrapper.contract import codec
from agent_wrapper.contract.codec import (
    MAX_BYTE_STRINGS,
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_KEYS,
    MAX_VALUES,
    ContractError,
    pack,
    unpack,
    unpacked_size,
)


def frame(packed: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(packed)


def listed(count: int, each: bytes) -> bytes:
    """A map with one list, packed."""
    return b"\x81\xa1a\xdd" + struct.pack(">I", count) + each * count


@pytest.fixture
def nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was built")

    monkeypatch.setattr(msgpack, "unpackb", build)
    monkeypatch.setattr(codec, "from_json", build)


BOMBS = {
    "empty lists": frame(listed(8_000_000, b"\x90")),
    "empty maps": frame(listed(8_000_000, b"\x80")),
    "numbers": frame(listed(8_000_000, b"\x01")),
    "empty texts": frame(listed(8_000_000, b"\xa0")),
    "byte strings": frame(listed(MAX_BYTE_STRINGS + 1, b"\xc4\x00")),
    "keys": frame(msgpack.packb(dict.fromkeys(map(str, range(MAX_KEYS + 1))))),
    "a list that claims more than there is": frame(b"\x81\xa1a\xdd\xff\xff\xff\xff"),
    "a map that claims more than there is": frame(b"\x81\xa1a\xdf\xff\xff\xff\xff"),
    "nested claims": frame(b"\x81\xa1a" + b"\xdd\x00\x0f\x42\x40" * 100),
    "depth": frame(b"\x81\xa1a" + b"\x91" * MAX_DEPTH + b"\x90"),
    "lists in JSON": b'{"a":[' + b"[]," * MAX_CONTAINERS + b"0]}",
    "maps in JSON": b'{"a":[' + b"{}," * MAX_CONTAINERS + b"0]}",
    "numbers in JSON": b'{"a":[' + b"0," * MAX_VALUES + b"0]}",
    "lists in JSON between texts": b'{"a":[' + b'"\\"[",[],' * MAX_CONTAINERS + b"0]}",
}


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused_before_anything_is_built(data, nothing_is_built):
    with pytest.raises(ContractError, match=r"^object: (?:holds more than|is nested deeper than)"):
        unpack(data)


def test_as_much_as_is_allowed_is_read():
    assert len(unpack(frame(listed(MAX_CONTAINERS - 2, b"\x90")))["a"]) == MAX_CONTAINERS - 2
    nested = unpack(frame(b"\x81\xa1a" + b"\x91" * (MAX_DEPTH - 2) + b"\x90"))
    assert unpack(pack(nested)) == nested


def test_the_keys_of_json_are_limited():
    with pytest.raises(ContractError, match="more than 100000 keys in one map"):
        unpack(json.dumps(dict.fromkeys(map(str, range(MAX_KEYS + 1)))).encode())


def test_brackets_and_commas_inside_texts_do_not_count():
    text = '[{"\\,:' * MAX_VALUES
    assert unpack(b'{"a": "' + text.replace("\\", "\\\\").replace('"', '\\"').encode() + b'"}') == {"a": text}


@pytest.mark.parametrize(
    "packed",
    [
        b"\x81\xa1a",  # cut before a value
        b"\x81\xa1a\xdc\x00",  # in a length
        b"\x81\xa1a\xc5\xff\xff",  # in bytes
        b"\x81\xa1a\xc1",  # never used
        b"\x81\xa1a\xd4\x05\x00",  # an extension
        b"\x81\xa1a\xd6\xff\x00\x00\x00\x00",  # a timestamp
        b"\x81\xa1a\xc7\x01\x05\x00",
        b"\x80\x80",  # two objects
        b"",
    ],
)
def test_truncated_data_and_foreign_types_are_refused(packed):
    with pytest.raises(ContractError, match=r"^object: "):
        unpack(frame(packed))


@pytest.mark.parametrize("size", [0, 15, 16, 31, 32, 255, 256, 65_535, 65_536])
def test_every_width_of_a_length_is_read(size):
    fields = {"t": "x" * size, "b": b"x" * size, "l": [0] * size, "m": {str(i): i for i in range(size)}}
    fields |= {"i": [sign * 2**width for width in range(63) for sign in (1, -1)], "f": 0.1, "n": None}
    assert unpack(pack(fields)) == fields


def test_the_size_is_known_without_unpacking():
    assert unpacked_size(frame(bytes(5_000_000))) == 5_000_000
    assert unpacked_size(b'{"a": 1}') == 8
    assert unpacked_size(b"\x28\xb5\x2f\xfd") == 0
    assert unpacked_size(b"") == 0
