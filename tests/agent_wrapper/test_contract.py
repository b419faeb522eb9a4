"""What one side writes the other reads. Anything else raises a ContractError that names the field."""

import base64
import contextlib
import hashlib
import json
import math
from typing import Any
from urllib.parse import quote_plus

import msgpack
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from agent_wrapper.contract import (
    MAX_STEP,
    Announcement,
    ContractError,
    Outcome,
    Rollout,
    Segment,
    Trajectory,
    failure_marker_key,
    objects,
    parse_result_key,
    result_key,
    step_prefix,
)
from agent_wrapper.contract.codec import unpack
from rollout_backend.core.seal import digest_of
from rollout_backend.model.rendering.segments import Completion, SegmentRecorder

# --- strategies -------------------------------------------------------------------------------------------

identifiers = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
texts = st.text(max_size=8)
float32 = st.just(math.nan) | st.floats(width=32, allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)


def turn(start: int, end: int, *versions: tuple[int, int]) -> dict[str, Any]:
    spans = [{"version": "7", "start": a, "end": b} for a, b in versions]
    return {"start": start, "end": end, "finish_reason": "stop", "weight_versions": spans}


def make_segment(**changes: Any) -> dict[str, Any]:
    return {
        "token_ids": [5, 6, 7],
        "response_mask": [0, 1, 1],
        "logprobs": [None, -0.5, -1.5],
        "turns": [turn(1, 3)],
        **changes,
    }


def make_fields(**changes: Any) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "run_id": "run",
        "step": 0,
        "task_id": "task",
        "rollout_id": "rollout",
        "attempt": 1,
        "session_id": "session",
        "outcome": "completed",
        "reward": 1.0,
        "segments": [make_segment()],
        **changes,
    }


def make_rollout(**changes: Any) -> Rollout:
    return Rollout.parse(make_fields(**changes))


TRICK = "\x1b]52;c;ZXZpbA==\x07\n\u202e" * 10_000


def pack(fields: object) -> bytes:
    return zstandard.ZstdCompressor().compress(msgpack.packb(fields))


def as_json(fields: object) -> bytes:
    return json.dumps(fields).encode()


def refused(data: bytes, field: str, words: str) -> None:
    with pytest.raises(ContractError) as caught:
        Rollout.decode(data)
    assert caught.value.field.startswith(field)
    assert words in caught.value.reason


BOTH_INPUTS = pytest.mark.parametrize("encode", [pack, as_json])
BOTH_FORMS = pytest.mark.parametrize("form", [Rollout.encode, Rollout.to_json])


# --- round trips ------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=3, max_size=3),
    st.lists(float32, min_size=3, max_size=3),
    st.dictionaries(texts, json_values, max_size=3),
    texts,
)
def test_a_rollout_comes_back_from_either_form(token_ids, logprobs, values, text):
    fields = {"token_ids": token_ids, "logprobs": logprobs, "messages": [values], "split_reason": text}
    segments = [make_segment(turns=[turn(1, 3, (1, 2), (2, 3))], **fields), make_segment()]
    failure = {"reason": "some_reason", "message": text, "traceback": text}
    for changes in ({}, {"outcome": "agent_error", "failure": failure}):
        rollout = make_rollout(segments=segments, extras=values, model=text, started_at=1.5, **changes)
        packed = rollout.encode()
        for decoded in (Rollout.decode(packed), Rollout.decode(rollout.to_json())):
            # Bytes are compared, because NaN equals nothing: also not itself.
            assert decoded.encode() == packed
            assert decoded.extras == values
            assert decoded.segments[0].token_ids.tolist() == token_ids


# --- damage -----------------------------------------------------------------------------------------------


@BOTH_FORMS
def test_damaged_data_is_refused_or_read_as_a_rollout(form):
    data = form(make_rollout())
    for end in range(len(data)):
        with pytest.raises(ContractError):
            Rollout.decode(data[:end])
        for flip in (0x01, 0x20, 0x80, 0xFF):
            with contextlib.suppress(ContractError):
                Rollout.decode(data[:end] + bytes([data[end] ^ flip]) + data[end + 1 :])
    with pytest.raises(ContractError):
        Rollout.decode(data + b"x")


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


OF_ROLLOUT = [*make_fields(), "failure", "extras", "model", "extra_field"]
OF_SEGMENT = [*make_segment(), "messages", "split_reason", "extra_field"]


@given(st.sampled_from(OF_ROLLOUT), st.sampled_from(OF_SEGMENT), anything)
def test_any_value_in_any_field_is_read_or_refused(of_rollout, of_segment, value):
    for fields in (make_fields(**{of_rollout: value}), make_fields(segments=[make_segment(**{of_segment: value})])):
        with contextlib.suppress(ContractError):
            Rollout.decode(pack(fields))


@BOTH_INPUTS
@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"schema_version": 2}, "schema_version", "is 2, and this version reads 1"),
        ({"reward": None}, "rollout", "reward is missing"),
        ({"reward": math.nan}, "reward", "finite"),
        ({"reward": -3.41e38}, "rollout", "beyond float32"),
        ({"reward": 1.7e308, "turn_rewards": [1.7e308]}, "rollout", "beyond float32"),
        ({"started_at": 1e300}, "started_at", "less"),
        ({"step": MAX_STEP + 1}, "step", "less"),
        ({"rollout_id": "../other"}, "rollout_id", "pattern"),
        ({"rollout_id": "a\n"}, "rollout_id", "pattern"),
        ({"surplus": 1}, "surplus", "not permitted"),
        ({"segments": []}, "rollout", "no sampled token"),
        ({"failure": {"reason": "r", "message": ""}}, "rollout", "failure is set"),
        ({"outcome": "timed_out", "reward": None}, "rollout", "failure is missing"),
        ({"outcome": "infra_error", "failure": {"reason": "r", "message": ""}}, "rollout", "reward is set"),
        ({"extras": {"x": math.inf}}, "extras.x", "finite"),
    ],
)
def test_a_broken_rollout_names_its_field(encode, changes, field, words):
    refused(encode(make_fields(**changes)), field, words)


def test_a_rollout_of_messages_alone_is_refused():
    talk = [{"messages": [{"role": "assistant", "content": "!"}]}]
    for segments in ([], [make_segment()]):
        refused(as_json(make_fields(segments=segments, conversations=talk)), "conversations", "not permitted")


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**400])
def test_json_that_could_not_be_stored_in_the_compact_form_is_refused(number):
    with pytest.raises(ContractError, match="holds what cannot be stored"):
        Rollout.decode(as_json(make_fields(extras={"x": [number]})))


@BOTH_INPUTS
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"response_mask": [0, 1]}, "mask has 2 entries for 3 token_ids"),
        ({"logprobs": [0.0] * 4}, "logprobs has 4 entries for 3 token_ids"),
        ({"response_mask": [0, 1, 2]}, "other than 0 and 1"),
        ({"response_mask": [1, 1, 1]}, "not 1 exactly where the turns sampled"),
        ({"token_ids": [5, -6, 7]}, "negative id"),
        ({"token_ids": [5, 6, 2**31]}, "int32 token ids"),
        ({"token_ids": [5, 6, True]}, "not a number"),
        ({"token_ids": "567"}, "int32 token ids"),
        ({"logprobs": [0.0, "x", 0.0]}, "not a number"),
        ({"turns": [turn(1, 4)]}, "spans [1, 4) of 3 tokens"),
        ({"turns": [turn(1, 3), turn(2, 3)]}, "turns.1 spans [2, 3) of 3 tokens, after 3"),
        ({"turns": [turn(1, 3, (1, 2))]}, "do not cover its tokens"),
        ({"turns": [turn(1, 3, (2, 3))]}, "do not cover its tokens in order"),
        ({"turns": [turn(1, 3, (1, 4))]}, "do not cover its tokens in order"),
    ],
)
def test_a_broken_segment_is_refused_with_the_reason(encode, changes, words):
    refused(encode(make_fields(segments=[make_segment(**changes)])), "segments.0", words)


def test_raw_bytes_of_a_wrong_length_are_refused():
    with pytest.raises(ContractError, match="13 bytes are not a multiple of the size of int32 token ids"):
        Rollout.decode(pack(make_fields(segments=[make_segment(token_ids=b"\0" * 13)])))


# --- images -----------------------------------------------------------------------------------------------

SHOWN = b"\x89PNG, or so they say"
NAME = hashlib.sha256(SHOWN).hexdigest()
SPAN = {"start": 0, "end": 2, "sha256": NAME, "media_type": "image/png"}


def make_seen(**changes: Any) -> dict[str, Any]:
    """Fields of a rollout whose first two tokens are an image."""
    seen = make_segment(token_ids=[1, 1, 2], response_mask=[0, 0, 1], logprobs=[None, None, -1.0], turns=[turn(2, 3)])
    return make_fields(segments=[{**seen, "images": [SPAN]}], images={NAME: SHOWN}) | changes


@pytest.mark.parametrize("segments", [1, 3])
def test_json_is_written_in_pieces_so_that_other_threads_go_on(monkeypatch, segments):
    whole = Trajectory(model="m", segments=[Segment.parse(make_segment(messages=[])) for _ in range(segments)])
    pieces: list[bytes] = []
    write = objects.to_json
    monkeypatch.setattr(objects, "to_json", lambda value: pieces.append(write(value)) or pieces[-1])
    assert Trajectory.decode(whole.to_json()).encode() == whole.encode()
    assert len(pieces) > 1
    assert all(piece.count(b"[") <= 3 for piece in pieces)


def test_an_image_comes_back_from_either_form():
    rollout = Rollout.parse(make_seen())
    for form in (rollout.encode(), rollout.to_json()):
        read = Rollout.decode(form)
        assert read.images == {NAME: SHOWN}
        assert read.segments[0].images == rollout.segments[0].images
    assert json.loads(rollout.to_json())["images"] == {NAME: base64.b64encode(SHOWN).decode()}
    trajectory = Trajectory(model="m", segments=rollout.segments, images=rollout.images)
    assert Trajectory.decode(trajectory.encode()).images == {NAME: SHOWN}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"images": {}}, "not the 1 that the segments name"),
        ({"images": {NAME: SHOWN, "0" * 64: b""}}, "images hold 2"),
        ({"images": {NAME: b"another"}}, "does not match its SHA-256"),
    ],
)
def test_images_are_those_that_the_segments_name(changes, words):
    with pytest.raises(ContractError, match=words):
        Rollout.parse(make_seen(**changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"end": 4}, r"images.0 spans \[0, 4\) of 3 tokens"),
        ({"end": 0}, "images.0 spans"),
        ({"end": 3}, "tokens that the model sampled"),
    ],
)
def test_an_image_is_among_the_given_tokens(changes, words):
    fields = make_seen()
    fields["segments"][0]["images"] = [{**SPAN, **changes}]
    with pytest.raises(ContractError, match=words):
        Rollout.parse(fields)


def rewriting(turns: int, kept: int = 5) -> tuple[Segment, ...]:
    """Return the segments of an agent that masks all but its last tool results in each call."""
    recorder = SegmentRecorder()
    history: list[dict[str, Any]] = [{"role": "user", "content": "Fix it."}]
    for turn in range(turns):
        results = [i for i, message in enumerate(history) if message["role"] == "tool"]
        masked = {i: {**history[i], "content": "(omitted)"} for i in results[:-kept]}
        prompt = [j if j >= turn - kept else 10_000 + j for j in range(turn) for _ in range(20)]
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "run", "arguments": "{}"}}
        reply = {"role": "assistant", "content": "", "tool_calls": [call]}
        recorder.add(
            [1, 2, 3, *prompt],
            Completion((7, 8), (-0.5, None)),
            messages=json.loads(json.dumps([*(masked.get(i, each) for i, each in enumerate(history)), reply])),
            split_reason="history_rewritten",
        )
        history += [reply, {"role": "tool", "tool_call_id": f"c{turn}", "content": f"output {turn}"}]
    return recorder.segments()


@pytest.mark.parametrize("form", [Trajectory.encode, Trajectory.to_json])
def test_a_history_that_is_rewritten_with_each_call_is_stored_once(form):
    sizes = []
    for turns in (50, 100):
        trajectory = Trajectory(model="m", segments=rewriting(turns))
        data = form(trajectory)
        found = Trajectory.decode(data)
        assert [as_fields(each) for each in found.segments] == [as_fields(each) for each in trajectory.segments]
        assert digest_of(found.segments) == digest_of(trajectory.segments)
        assert form(found) == data
        assert sum(len(each.messages) for each in found.segments) == turns * (turns + 1)
        assert len({id(message) for each in found.segments for message in each.messages}) < 4 * turns
        [*stored] = unpack(data)["segments"]
        sizes.append(sum(len(each["messages"]) + len(each["token_ids"]) for each in stored))
    assert sizes[1] < 2.2 * sizes[0]


def as_fields(segment: Segment) -> tuple[object, ...]:
    arrays = (each.tobytes() for each in (segment.token_ids, segment.response_mask, segment.logprobs))
    return *arrays, segment.turns, segment.messages, segment.split_reason


SHARED = {"segment": 0, "tokens": 1, "messages": [0]}


@BOTH_INPUTS
@pytest.mark.parametrize(
    ("shared", "words"),
    [
        ([], "must have segment, tokens and messages"),
        ({"segment": 0}, "must have segment, tokens and messages"),
        ({**SHARED, "segment": 1}, "is 1, which is not an earlier segment"),
        ({**SHARED, "segment": -1}, "whole numbers"),
        ({**SHARED, "tokens": 4}, "is 4, and segment 0 has 3"),
        ({**SHARED, "messages": [2]}, "not among the first 2"),
        ({**SHARED, "messages": "0"}, "expected int32 numbers of messages"),
        ({**SHARED, "messages": [0] * 2_000_000}, "more than the cap of 9000000"),
    ],
)
def test_a_segment_that_shares_what_is_not_there_is_refused(encode, shared, words):
    one, other = (make_segment(messages=[{"role": "user", "content": text}]) for text in "ab")
    data = encode(make_fields(segments=[one, {**other, "shared": shared}]))
    with pytest.raises(ContractError) as caught:
        Rollout.decode(data, 9_000_000)
    assert caught.value.field == "segments.1"
    assert words in caught.value.reason
    with pytest.raises(ContractError):  # nor may segments in memory share
        Rollout.parse(make_fields(segments=[one, {**other, "shared": SHARED}]))


def test_shared_tokens_count_against_the_readers_cap():
    """A few bytes for each segment could otherwise claim gigabytes."""
    ids = bytes(4 * 100_000)
    first = {"token_ids": ids, "response_mask": bytes(100_000), "logprobs": ids, "turns": []}
    more = {"token_ids": b"", "response_mask": b"", "logprobs": b"", "turns": []}
    shared = {"segment": 1, "tokens": 100_000, "messages": b""}
    data = pack(make_fields(segments=[make_segment(), first, *[{**more, "shared": shared}] * 10_000]))
    with pytest.raises(ContractError, match="are shared so far, more than the cap of 64000000"):
        Rollout.decode(data, 64_000_000)


def test_the_encoded_forms_change_only_on_purpose():
    """The bytes of the compact form, before they are packed, and of the plain one."""
    fields = {
        "token_ids": [5, 6, 7, 8],
        "response_mask": [0, 0, 1, 1],
        "logprobs": [None, None, -0.25, -0.5],
        "turns": [turn(2, 4, (2, 4)) | {"cached_tokens": 0}],
        "messages": [{"role": "user", "content": "h"}],
    }
    segment = Segment.parse(fields)
    ids = {"run_id": "run", "step": 0, "task_id": "t", "rollout_id": "r", "attempt": 1, "session_id": "s"}
    rollout = Rollout(**ids, outcome=Outcome.COMPLETED, reward=1.0, model="m", segments=(segment,))
    unpacked = [
        zstandard.ZstdDecompressor().decompress(found.encode())
        for found in (Trajectory(model="m", segments=(segment,)), rollout)
    ]
    assert [hashlib.sha256(form).hexdigest() for form in (*unpacked, rollout.to_json())] == [
        "45694c70bc77bf5d6c1ccb605bdc1793bd57fd0f78ad21abb3a68768d46eea9e",
        "b470d89e36029f2f8321830fca3e0e3684f8b31665f95670cdcbe0052dea5c62",
        "6616146a1aaeb841847ef1d418ea55075f32afc07ec8a85eb21a808459880721",
    ]


@pytest.mark.parametrize(
    "data",
    [
        b'{"schema_version": 1, "x": ' + b"[" * 100_000,
        b'{"schema_version": 1, "run_id": "\\ud800"}',
        b'{"schema_version": 1, "run_id": "\xff"}',
        b'{"schema_version": 1, "step": ' + b"9" * 5_000 + b"}",
        pack({1: 2}),
        pack({b"\xff": 2, "schema_version": 1}),
    ],
)
def test_hostile_input_is_refused(data):
    with pytest.raises(ContractError):
        Rollout.decode(data)


def test_a_bomb_is_refused_unopened():
    bomb = zstandard.ZstdCompressor().compress(bytes(300 * 1024 * 1024))
    with pytest.raises(ContractError, match="more than the cap"):
        Rollout.decode(bomb[:20])  # its header, after which nothing can be decompressed


@BOTH_INPUTS
@pytest.mark.parametrize(
    "changes", [{TRICK: 1}, {"schema_version": TRICK}, {"images": {TRICK: ""}}, {"model": [TRICK]}]
)
def test_what_is_said_of_a_hostile_result_is_short_and_readable(encode, changes):
    with pytest.raises(ContractError) as caught:
        Rollout.decode(encode(make_fields(**changes)))
    assert len(str(caught.value)) < 1500
    assert str(caught.value).isprintable()


def test_a_frame_that_hides_its_size_is_refused():
    compressor = zstandard.ZstdCompressor(write_content_size=False)
    with pytest.raises(ContractError, match="is a zstd frame without a content size"):
        Rollout.decode(compressor.compress(msgpack.packb(make_fields())))


@BOTH_FORMS
def test_the_readers_cap_holds_for_either_form(form):
    data = form(make_rollout(extras={"x": "y" * 5_000}))
    assert Rollout.decode(data, max_bytes=10_000)
    with pytest.raises(ContractError, match="more than the cap of 5000"):
        Rollout.decode(data, max_bytes=5_000)


# --- keys -------------------------------------------------------------------------------------------------

prefixes = st.sampled_from(["", "p/", "team.a/exp_1/"])


@given(prefixes, identifiers, st.integers(0, MAX_STEP), identifiers)
def test_a_key_contains_its_step_and_rollout(prefix, run_id, step, rollout_id):
    key = result_key(prefix, run_id, step, rollout_id)
    assert key.startswith(step_prefix(prefix, run_id, step))
    assert parse_result_key(prefix, run_id, key) == (step, rollout_id, None)
    marker = failure_marker_key(prefix, run_id, step, rollout_id, 7)
    assert parse_result_key(prefix, run_id, marker) == (step, rollout_id, 7)


@pytest.mark.parametrize(
    "key",
    [
        "p/runs/run/steps/00000001/",
        "p/runs/run/steps/00000001/../x",
        "p/runs/run/steps/00000001/a/b",
        "p/runs/run/steps/00000001/a\n",
        "p/runs/run/steps/00000001/a%2Fb",
        "p/runs/run/steps/000000001/a",
        "p/runs/run/steps/\N{ARABIC-INDIC DIGIT ONE}0000000/a",
        "p/runs/run2/steps/00000001/a",
        "/p/runs/run/steps/00000001/a",
        "p/runs/run/steps/00000001/" + "a" * 129,
        "p/runs/run/steps/00000001/a~0",
        "p/runs/run/steps/00000001/a~01",
        "p/runs/run/steps/00000001/a~1000000000",
        "p/runs/run/steps/00000001/a~1~1",
        "p/runs/run/steps/00000001/~1",
        "",
    ],
)
def test_foreign_keys_and_path_tricks_are_refused(key):
    with pytest.raises(ContractError, match=r"^object\.key: "):
        parse_result_key("p/", "run", key)
    with pytest.raises(ContractError):  # a run's id is no pattern
        parse_result_key("p/", "r.n", "p/runs/run/steps/00000001/a")


# --- announcements ----------------------------------------------------------------------------------------


def record(bucket: object = "bucket", key: object = "key", **more: object) -> dict[str, object]:
    return {
        "eventVersion": "2.1",
        "s3": {"bucket": {"name": bucket, "arn": "x"}, "object": {"key": key, "size": 3}},
        **more,
    }


def test_s3s_own_notification_is_read():
    key = "a b/c+d=é"
    body = json.dumps({"Records": [record(key=quote_plus(key)), record("other", "k")], "surplus": 1})
    assert Announcement.decode(body) == [
        Announcement(bucket="bucket", key=key),
        Announcement(bucket="other", key="k"),
    ]


def test_s3s_test_event_names_nothing():
    assert Announcement.decode(json.dumps({"Service": "Amazon S3", "Event": "s3:TestEvent", "Bucket": "b"})) == []


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ("", "body"),
        ("[" * 100_000, "body"),
        ('{"Records": [{"s3": {"bucket": {"name": "\\ud800"}}}]}', "body"),
        ("{}", "Records"),
        ('{"Records": []}', "Records"),
        ('{"Records": [3]}', "Records.0.s3"),
        (json.dumps({"Records": [record(), {"s3": {}}]}), "Records.1.s3.bucket"),
        (json.dumps({"Records": [record(bucket=None)]}), "Records.0.s3.bucket.name"),
        (json.dumps({"Records": [record(key="")]}), "Records.0.s3.object.key"),
    ],
)
def test_a_broken_announcement_names_its_field(body, field):
    with pytest.raises(ContractError) as caught:
        Announcement.decode(body)
    assert caught.value.field == field
