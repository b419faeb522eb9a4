"""No input makes a decoder work more than an ordinary input of its size does, by more than a constant factor."""

import contextlib
import functools
import gzip
import io
import json
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgpack
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agent_wrapper.contract import Announcement, ContractError, Rollout, readable
from agent_wrapper.contract.codec import unpack
from agent_wrapper.shared.redaction import without_secrets
from agent_wrapper.shared.workspace import unpack_folder
from rollout_backend.core.model_call import ApiError
from rollout_backend.dialects.base import RequestMemo
from rollout_backend.dialects.registry import DIALECTS

SIZE = 64 * 1024
FACTOR = 100  # quadratic work would be thousands of times that of an ordinary input

JSON = [*'"\\[]{},: 1a-', '\\"', "\\\\", '"a":', '"a",', "[0],", "{},", "\\u0061"]
URLS = ["https://", "https://a?", "a", "?", "&", "X-Amz-Signature", "/k/", "/v1", "/k/a/v1", ".", " ", '"', "\u202e"]
PACKED = [b"\x91", b"\x81", b"\xa1a", b"\x90", b"\xdd\0\0\0\1", b"\xc4\x01a", b"\x01", b"\xdc\xff\xff", b"\xc0"]
TAR = [b"1", b"1 ", b"9 a=bcde\n", b"\0" * 512, b"a/", tarfile.TarInfo("d/d").tobuf()]
MESSAGE = {"role": "user", "content": [{"type": "text", "text": "word " * 20}]}


def unpacked(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        unpack_folder(gzip.compress(data), Path(folder), max_entries=1000)


def archive() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for i in range(SIZE // 1024):
            member = tarfile.TarInfo(f"file-{i}")
            member.size = 512
            tar.addfile(member, io.BytesIO(b"x" * 512))
    return packed.getvalue()


def asked(field: str) -> bytes:
    return json.dumps({"model": "m", "max_tokens": 9, field: [MESSAGE] * (SIZE // len(json.dumps(MESSAGE)))}).encode()


def framed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


LISTED = json.dumps({"a": [["x", 1]] * (SIZE // 10)}).encode()
NOTICE = json.loads(Announcement(bucket="b", key="k").encode())["Records"]
DECODERS: dict[str, tuple[Callable[[bytes], object], list[str] | list[bytes], bytes]] = {
    "JSON": (unpack, JSON, LISTED),
    "a result": (Rollout.decode, JSON, LISTED),
    "the compact form": (lambda data: unpack(framed(data)), PACKED, msgpack.packb({"a": [["x", 1]] * (SIZE // 4)})),
    "an announcement": (
        lambda data: Announcement.decode(data.decode()),
        JSON,
        json.dumps({"Records": NOTICE * (SIZE // 150)}).encode(),
    ),
    "an archive": (unpacked, TAR, archive()),
    "a log line": (lambda data: without_secrets(data.decode()), URLS, b"GET https://host/path?a=1\n" * (SIZE // 26)),
    "a shown text": (lambda data: readable(data.decode()), URLS, b"a text with words\n" * (SIZE // 18)),
} | {
    f"a body of {dialect.name}{' with a history' if memo else ''}": (
        (lambda data, dialect=dialect: RequestMemo().parse(dialect(), data)) if memo else dialect().parse,
        JSON,
        asked(dialect.appended_field or "input"),
    )
    for dialect in DIALECTS
    for memo in (False, True)
}  # fmt: skip


@functools.cache
def work_of_ordinary(decode: Callable[[bytes], object], data: bytes) -> float:
    return work(decode, data)


def work(decode: Callable[[bytes], object], data: bytes) -> float:
    """Return the CPU time of this thread, the least of three tries."""
    spent = []
    for _ in range(3):
        began = time.thread_time()
        with contextlib.suppress(ContractError, ApiError, ValueError):
            decode(data)
        spent.append(time.thread_time() - began)
    return min(spent)


@pytest.mark.parametrize(("decode", "fragments", "ordinary"), DECODERS.values(), ids=DECODERS)
@given(data=st.data())
def test_a_hostile_input_costs_as_much_as_an_ordinary_one(decode, fragments, ordinary, data):
    pieces = [piece.encode() if isinstance(piece, str) else piece for piece in fragments]
    some = st.lists(st.sampled_from(pieces), max_size=3).map(b"".join)
    runs = data.draw(st.lists(some.filter(bool), min_size=1, max_size=3))
    begin = data.draw(st.sampled_from([b"", b'{"a":', b'{"messages":[', b'{"a":"', ordinary[:100]]))
    hostile = begin + b"".join(run * (SIZE // len(runs) // len(run)) for run in runs)
    assert work(decode, hostile) <= FACTOR * max(work_of_ordinary(decode, ordinary), 1e-4)


@pytest.mark.parametrize(
    ("decode", "hostile"),
    [
        (unpack, b'{"a":"' + b'\\"' * 8_000 + b"[" * 250_001),
        (lambda data: without_secrets(data.decode()), b"https://a?" * 6_000),
        (unpacked, tarfile.TarInfo("x").tobuf()[:156] + b"x" + b"1" * 60_000),
    ],
    ids=["unterminated strings", "URLs in URLs", "digits"],
)
def test_what_was_slow_once(decode, hostile):
    ordinary = {unpack: LISTED, unpacked: archive()}
    assert work(decode, hostile) <= FACTOR * work(decode, ordinary.get(decode, b"a line of text\n" * 4_000))


INVALID = [None] * 1000
LISTS = ("messages", "input", "tools", "system", "include", "segments", "turn_rewards", "artifacts")
TURN = {"role": "assistant", "content": INVALID, "tool_calls": INVALID}
SEGMENT = dict.fromkeys(("turns", "messages", "images"), INVALID)


@pytest.mark.parametrize("decode", [Rollout.decode, *(dialect().parse for dialect in DIALECTS)])
@pytest.mark.parametrize(
    "fields", [dict.fromkeys(LISTS, INVALID), {"messages": [TURN], "input": [TURN], "segments": [SEGMENT]}]
)
def test_a_list_is_refused_at_its_first_invalid_item(decode, fields):
    """The errors of a million items would take seconds, and 900 MB."""
    with pytest.raises((ApiError, ContractError)) as refused:
        decode(json.dumps({"schema_version": 1, **fields}).encode())
    assert isinstance(refused.value.__context__, ValidationError)
    assert refused.value.__context__.error_count() < 20
