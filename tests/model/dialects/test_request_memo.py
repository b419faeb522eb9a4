"""A request gives the same call, however much of its conversation was parsed before."""

import base64
import hashlib
import io
import json
import random

import pytest
from PIL import Image as pillow

from rollout_backend.base.giving_way import giving_way
from rollout_backend.model.dialects.base import RequestMemo
from rollout_backend.model.dialects.openai_chat import OpenAIChat
from rollout_backend.model.dialects.openai_responses import OpenAIResponses
from rollout_backend.model.images import ImageLimits
from rollout_backend.model.model_call import ApiError

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SYSTEM, USER = {"role": "system", "content": "s"}, {"role": "user", "content": 'ünïcode ], "messages": [ \\ 🙂'}
ASKED = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "]"}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [ASKED]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "3]"}]}


class CountingChat(OpenAIChat):
    """Counts the bytes it has parsed."""

    parsed = 0

    def parse(self, body):
        self.parsed += len(body)
        return super().parse(body)


@pytest.fixture
def chat() -> CountingChat:
    return CountingChat(ImageLimits(2, 10_000))


def body(messages, *, compact=True, ascii_only=False, first=False, **more) -> bytes:
    fields = {"model": "m", "messages": messages} if first else {"messages": messages, "model": "m"}
    separators = (",", ":") if compact else (", ", ": ")
    return json.dumps(fields | more, separators=separators, ensure_ascii=ascii_only).encode()


def same(memo, dialect, request: bytes):
    found, digest = memo.parse(dialect, request)
    assert found == OpenAIChat(ImageLimits(2, 10_000)).parse(request)
    assert digest == hashlib.blake2b(request, digest_size=16).digest()
    return found


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_only_new_messages_are_parsed(chat, compact, ascii_only, first):
    memo, form = RequestMemo(), {"compact": compact, "ascii_only": ascii_only, "first": first, "tools": [TOOL]}
    long = {"role": "user", "content": "x" * 5000}
    opening = same(memo, chat, body([SYSTEM, long, USER], **form))
    parsed = chat.parsed
    second = same(memo, chat, body([SYSTEM, long, USER, CALLED, RESULT], **form))
    third = same(memo, chat, body([SYSTEM, long, USER, CALLED, RESULT, USER], **form))
    assert chat.parsed - parsed < 2000
    assert all(a is b is c for a, b, c in zip(opening.messages, second.messages, third.messages, strict=False))


def test_a_request_is_extended_only_if_what_is_new_is_brief(chat):
    memo, seen = RequestMemo(), []
    assert memo.extend(chat, body([SYSTEM, USER])) is None
    memo.parse(chat, body([SYSTEM, USER]))
    request, parsed = body([SYSTEM, USER, CALLED, RESULT]), chat.parsed
    assert memo.extend(chat, request, lambda rest: bool(seen.append(rest))) is None
    assert chat.parsed == parsed
    assert json.loads(seen[0])["messages"] == [CALLED, RESULT]
    found = memo.extend(chat, request, lambda rest: len(rest) == len(seen[0]))
    assert found == RequestMemo().parse(chat, request)
    # What cannot be parsed alone is parsed whole, by a caller who has time for it.
    assert memo.extend(chat, request) is None
    assert memo.extend(chat, body([SYSTEM, USER, CALLED, {**RESULT, "role": "robot"}])) is None


def test_every_other_field_is_read_from_each_request(chat):
    memo = RequestMemo()
    same(memo, chat, body([SYSTEM, USER], tools=[TOOL]))
    for more in ({}, {"tools": [TOOL], "stream": True}, {"temperature": 0.5}, {"tool_choice": "none"}):
        same(memo, chat, body([SYSTEM, USER, CALLED, RESULT], **more))


def test_a_conversation_that_was_changed_shortened_or_repeated_is_parsed_whole(chat):
    memo = RequestMemo()
    same(memo, chat, body([SYSTEM, USER, CALLED, RESULT]))
    for messages in (
        [SYSTEM, {**USER, "content": "other"}, CALLED, RESULT, USER],
        [{**SYSTEM, "content": "t"}, USER, CALLED, RESULT, USER],
        [SYSTEM, USER],
        [SYSTEM, USER, CALLED, RESULT],
        [SYSTEM, USER, CALLED, {**RESULT, "content": "4"}],
    ):
        same(memo, chat, body(messages))


def test_interleaved_conversations_are_not_confused(chat):
    numbers, memo = random.Random(5), RequestMemo()
    conversations = [[SYSTEM, {"role": "user", "content": str(i)}] for i in range(6)]
    for turn in range(60):
        conversation = numbers.choice(conversations)
        same(memo, chat, body(conversation))
        conversation += [CALLED, {**RESULT, "content": str(turn % 3)}]


def test_a_field_that_comes_twice_counts_as_the_parser_counts_it(chat):
    memo = RequestMemo()
    same(memo, chat, body([USER]))
    begin = body([USER, CALLED, RESULT])[:-1]
    for again in (b'"messages"', b'"\\u006dessages"'):
        request = begin + b"," + again + b':[{"role":"user","content":"last"}]}'
        assert len(same(memo, chat, request).messages) == 1
        same(memo, chat, request[:-2] + b',{"role":"user","content":"more"}]}')
    same(memo, chat, body([USER, CALLED, RESULT, USER]))


@pytest.mark.parametrize("wrong", [{"content": "x"}, {"role": "robot", "content": "x"}, 5])
def test_an_error_names_the_message_by_its_place_in_the_conversation(chat, wrong):
    memo = RequestMemo()
    memo.parse(chat, body([SYSTEM, USER]))
    with pytest.raises(ApiError, match=r"messages\.3"):
        memo.parse(chat, body([SYSTEM, USER, CALLED, wrong]))


def test_images_of_the_whole_request_count(chat):
    file = io.BytesIO()
    pillow.new("RGB", (8, 8)).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    shown = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    memo, messages = RequestMemo(), [SYSTEM, shown]
    assert len(same(memo, chat, body(messages)).images) == 1
    assert len(same(memo, chat, body([*messages, USER])).images) == 1
    with pytest.raises(ApiError, match="more than 2 images"):
        memo.parse(chat, body([*messages, USER, shown, shown]))


def test_others_go_first_after_each_image(chat):
    file, others = io.BytesIO(), []
    pillow.new("RGB", (8, 8)).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    shown = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    with giving_way(lambda: others.append("go")):
        chat.parse(body([shown, shown]))
    assert len(others) == 2


def test_a_dialect_whose_items_depend_on_each_other_is_parsed_whole():
    memo, dialect = RequestMemo(), OpenAIResponses()
    for items in ([USER], [USER, {"role": "assistant", "content": "a"}, USER]):
        request = json.dumps({"input": items, "model": "m"}).encode()
        assert memo.parse(dialect, request).call == dialect.parse(request)
