"""No input makes a decoder work more than an ordinary input of its size does, by more than a constant factor."""

import contextlib
import functools
import gzip
import io
import json
import logging
import subprocess
import sys
import tarfile
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from renderers import ParsedResponse, ParsedToolCall

from agent_wrapper.contract import Announcement, ContractError, Rollout, readable
from agent_wrapper.contract.codec import unpack
from agent_wrapper.shared.redaction import without_secrets
from agent_wrapper.shared.workspace import unpack_folder
from rollout_backend.base.logs import RepeatFilter
from rollout_backend.model.dialects.base import RequestMemo
from rollout_backend.model.dialects.registry import DIALECTS
from rollout_backend.model.gateway.sessions.conversations import Conversations
from rollout_backend.model.model_call import ApiError, ModelCall
from rollout_backend.model.rendering.reply import read_reply
from rollout_backend.model.rendering.segments import Completion, SegmentRecorder
from rollout_backend.model.rendering.tool_call_reader import HERMES, read_calls

SIZE = 64 * 1024
CALL = ModelCall("m", (), tools=[{"type": "function", "function": {"name": "f"}}])
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


def work(decode: Callable[[Any], object], data: Any) -> float:
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


def repeated_line(n: int) -> None:
    RepeatFilter().filter(logging.makeLogRecord({"name": "a", "msg": "a" * n, "created": 1000.0}))


def malformed_calls(n: int) -> None:
    text = "".join(f"<tool_call>word {i:06}</tool_call>" for i in range(n))
    said, calls = read_calls(HERMES, text)
    assert len(calls) == n
    reply = ParsedResponse(content=said, tool_calls=calls)
    assert read_reply(reply, text, CALL, Completion((1,), (None,))).message["content"] == text


def dropped_calls(n: int) -> None:
    """As of a parser that leaves malformed calls out of the text."""
    text = "".join(f"<tool_call>word {i:06}</tool_call>" for i in range(n))
    reply = ParsedResponse(content="a " * n, tool_calls=read_calls(HERMES, text)[1])
    content = read_reply(reply, text, CALL, Completion((1,), (None,))).message["content"]
    assert content.count("</tool_call>") == n


def numbered_calls(n: int) -> None:
    """Of the numbers for new ids, which a model repeats, the conversation has the first."""
    calls = [ParsedToolCall(raw="{}", name="f", arguments={}, id="f:0")] * (n // 20)
    earlier = {"f:0", *(f"f:{i}" for i in range(n // 20, n // 10))}
    reply = read_reply(ParsedResponse(content="", tool_calls=calls), "", CALL, Completion((1,), (None,)), earlier)
    assert earlier.isdisjoint(call["id"] for call in reply.message["tool_calls"])


@pytest.mark.parametrize("cost", [repeated_line, malformed_calls, dropped_calls, numbered_calls])
def test_a_text_of_a_model_or_a_container_takes_linear_work(cost):
    """Quadratic work would be 400 times as much."""
    assert work(cost, 40_000) <= 100 * max(work(cost, 2_000), 1e-4)


@pytest.mark.parametrize("number", ["1e308", "1e20", "9" * 20, "9" * 30])
def test_numbers_in_arguments_are_cheap_to_digest(number):
    def digest(text: str) -> None:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        bundle = SimpleNamespace(renders_call_ids=False, needs_tool_names=False)
        Conversations(bundle).question(messages, None)  # type: ignore[arg-type]

    # A number of 309 digits, which is printed and digested, took 30 times the work.
    hostile, ordinary = ('{"a": [' + ", ".join([text] * 20_000) + "]}" for text in (number, "1.5"))
    assert work(digest, hostile) <= 10 * work(digest, ordinary)


@pytest.mark.parametrize("lengths", ["equal", "different"])
def test_a_call_takes_no_more_work_after_many_calls(lengths):
    def recorder(calls: int) -> SegmentRecorder:
        made = SegmentRecorder()
        for i in range(calls):
            more = [] if lengths == "equal" else [5] * (i % 500)
            made.add([1, 2, i + 10, *more, 4], Completion((7,), (-0.5,)))
        return made

    def call(made: SegmentRecorder) -> None:
        made.has_room(array("i", [1, 2, 3]), [], 1, 2**26)
        place = made.add([1, 2, 3], Completion((7,), (-0.5,)))
        assert made.drop(place)

    # Work proportional to the earlier calls would be 100 times as much.
    assert work(call, recorder(5_000)) <= 20 * work(call, recorder(50))


def test_a_reply_writes_no_warnings_to_the_log():
    read = 'ArgumentTypes().typed("[" + "1if 1else " * 2_000 + "1]", {"type": "array"}, None)'
    program = f"from rollout_backend.model.rendering.tool_call_reader import ArgumentTypes; {read}"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stderr
    assert "SyntaxWarning" not in said
