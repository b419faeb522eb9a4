"""Chat Completions logprobs: each entry has its token's bytes, and a stream sends entries with their text."""

import threading

import pytest

from builders import function_tool, user
from rollout_backend.workbench.local.scripted import Pieces, ToolCall

TOOLS = [function_tool("add")]
TEXT = "\u00e9, <b> \U0001f600\n\nend"


def ask(client, **more):
    return client.chat.completions.create(model="scripted", messages=[user("Say.")], logprobs=True, **more)


def streamed(gateway, **more) -> list:
    """Return each choice of a stream's chunks with its logprobs."""
    stream = ask(gateway.client(), stream=True, tools=TOOLS, **more)
    choices = [choice for chunk in stream for choice in chunk.choices]
    return [(choice, choice.logprobs.content if choice.logprobs else []) for choice in choices]


def spelled(entries) -> bytes:
    return b"".join(bytes(entry.bytes) for entry in entries)


def test_streamed_logprobs_come_with_their_text(play):
    steps = [threading.Event() for _ in TEXT]

    def parts():
        for step, character in zip(steps, TEXT, strict=True):
            step.wait(120)
            yield character

    gateway = play(lambda _: Pieces(parts()))
    for step in steps[:3]:
        step.set()
    found, text, sent = [], "", b""
    for chunk in ask(gateway.client(), stream=True):
        [choice] = chunk.choices
        text += choice.delta.content or ""
        sent += spelled(choice.logprobs.content if choice.logprobs else [])
        found.append((text, sent, choice.finish_reason))
        if text == TEXT[:2]:
            for step in steps:
                step.set()
    for text, sent, reason in found:
        assert sent == (text if reason is None else f"{TEXT}<|im_end|>").encode()
    assert len({text for text, _, _ in found}) > 2


@pytest.mark.parametrize(
    ("reply", "more"), [("a", {"n": 2}), (str(ToolCall("add")), {}), ("a STOP", {"stop": "STOP"})]
)
def test_a_stream_sends_each_logprob_once(play, reply, more):
    found = streamed(play(lambda _: reply), **more)
    for index in range(more.get("n", 1)):
        entries = [entry for choice, entries in found if choice.index == index for entry in entries]
        assert {entry.logprob for entry in entries} == {-0.5}
        assert spelled(entries) == (reply if "stop" in more else f"{reply}<|im_end|>").encode()


def test_a_repeated_stream_has_its_logprobs(play):
    client = play(["5"]).client().with_options(default_headers={"Idempotency-Key": "k"})
    for _ in range(2):
        sent = [choice.logprobs for chunk in ask(client, stream=True) for choice in chunk.choices if choice.logprobs]
        assert spelled(entry for logprobs in sent for entry in logprobs.content) == b"5<|im_end|>"
