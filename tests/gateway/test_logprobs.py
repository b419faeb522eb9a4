"""Chat Completions logprobs: each entry has its token's bytes, and a stream sends entries with their text."""

import threading

import pytest

from rollout_backend.local.scripted import Pieces, ScriptedEngine, ToolCall

USER = [{"role": "user", "content": "Say."}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TEXT = "\u00e9, <b> \U0001f600\n\nend"


def chunks(gateway, **more):
    client = gateway.client()
    stream = client.chat.completions.create(
        model="scripted", messages=USER, logprobs=True, stream=True, tools=TOOLS, **more
    )
    return [
        (choice, choice.logprobs.content if choice.logprobs else []) for chunk in stream for choice in chunk.choices
    ]


def spelled(entries) -> bytes:
    return b"".join(bytes(entry.bytes) for entry in entries)


@pytest.mark.parametrize("stream", [False, True])
def test_the_bytes_of_each_token_are_its_own(serve, stream):
    with ScriptedEngine([TEXT]) as engine:
        gateway = serve(engine.url)
        if stream:
            entries = [entry for _, entries in chunks(gateway) for entry in entries]
        else:
            answer = gateway.client().chat.completions.create(model="scripted", messages=USER, logprobs=True)
            entries = answer.choices[0].logprobs.content
    assert spelled(entries) == f"{TEXT}<|im_end|>".encode()
    assert [bytes(entry.bytes) for entry in entries[:2]] == [b"\xc3", b"\xa9"]  # a token of the tests is a byte
    assert {entry.logprob for entry in entries} == {-0.5}


def test_streamed_logprobs_come_with_their_text(serve):
    steps = [threading.Event() for _ in TEXT]

    def parts():
        for step, character in zip(steps, TEXT, strict=True):
            step.wait(30)
            yield character

    with ScriptedEngine(lambda _: Pieces(parts())) as engine:
        gateway = serve(engine.url)
        for step in steps[:3]:
            step.set()
        found, text, told = [], "", b""
        stream = gateway.client().chat.completions.create(model="scripted", messages=USER, logprobs=True, stream=True)
        for chunk in stream:
            (choice,) = chunk.choices
            text += choice.delta.content or ""
            told += spelled(choice.logprobs.content if choice.logprobs else [])
            found.append((text, told, choice.finish_reason))
            if text == TEXT[:2]:
                for step in steps:
                    step.set()
    for text, told, reason in found:
        assert told == (text if reason is None else f"{TEXT}<|im_end|>").encode()
    assert len({text for text, _, _ in found}) > 2


@pytest.mark.parametrize(
    ("reply", "more"), [("a", {"n": 2}), (str(ToolCall("add")), {}), ("a STOP", {"stop": "STOP"})]
)
def test_a_stream_tells_each_logprob_once(serve, reply, more):
    with ScriptedEngine(lambda _: reply) as engine:
        found = chunks(serve(engine.url), **more)
    for index in range(more.get("n", 1)):
        entries = [entry for choice, entries in found if choice.index == index for entry in entries]
        assert spelled(entries) == (reply if "stop" in more else f"{reply}<|im_end|>").encode()


def test_a_forced_stream_has_its_logprobs_beside_its_call(serve):
    with ScriptedEngine([str(ToolCall("add"))]) as engine:
        found = chunks(serve(engine.url), tool_choice="required")
    (entries,) = [entries for choice, entries in found if choice.delta.tool_calls]
    assert spelled(entries).startswith(str(ToolCall("add")).encode())


def test_an_answer_streamed_again_has_its_logprobs(serve):
    with ScriptedEngine(["5"]) as engine:
        gateway = serve(engine.url)
        client = gateway.client().with_options(default_headers={"Idempotency-Key": "k"})
        for _ in range(2):
            stream = client.chat.completions.create(model="scripted", messages=USER, logprobs=True, stream=True)
            told = [choice.logprobs.content for chunk in stream for choice in chunk.choices if choice.logprobs]
            assert spelled(entry for entries in told for entry in entries) == b"5<|im_end|>"
