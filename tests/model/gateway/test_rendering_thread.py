"""Which work runs in the event loop, and which in the thread of the tokenizer."""

import asyncio
import threading
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from builders import Clock, assistant, user
from rollout_backend.model.gateway import cpu_shares
from rollout_backend.model.gateway.cpu_shares import CpuShare, CpuShares
from rollout_backend.model.gateway.model_call_executor import CallRenderer
from rollout_backend.model.gateway.sessions.conversations import Conversations
from rollout_backend.model.model_call import ModelCall
from rollout_backend.model.rendering.segments import Completion
from rollout_backend.model.rendering.text_encoder import accelerate
from vocabularies import tokenizer_folder


@pytest.fixture
def thread(bundle):
    return CallRenderer(bundle, 0, 4096)


@pytest.fixture
async def cpu():
    shares = CpuShares()
    yield CpuShare(shares)
    shares.close()


async def prompt(cpu, thread, conversations, call):
    return thread.brief_prompt(conversations, call) or await cpu.run(thread.prepare, conversations, call)


@pytest.fixture
def rendered(thread, monkeypatch) -> list[bool]:
    """For each prompt that the thread's `prepare` has made: whether that was in the event loop."""
    found: list[bool] = []
    prepare = thread.prepare

    def record(conversations, call):
        found.append(in_loop())
        return prepare(conversations, call)

    monkeypatch.setattr(thread, "prepare", record)
    return found


def in_loop() -> bool:
    return threading.current_thread() is threading.main_thread()


async def test_brief_work_runs_at_once_and_other_work_in_the_thread(cpu):
    assert await cpu.run(in_loop, brief=True)
    assert not await cpu.run(in_loop)
    assert await cpu.run(in_loop, brief=True)


async def test_others_go_first_between_the_pieces_of_a_long_text(monkeypatch):
    """Each session pays for its own work, and both get the tokenizer's tokens."""
    folder = str(tokenizer_folder("qwen3"))
    fast, plain = (AutoTokenizer.from_pretrained(folder, local_files_only=True) for _ in range(2))
    accelerate(fast)
    clock, spent_s, order = Clock(1000.0), [0.0], []
    monkeypatch.setattr(cpu_shares.time, "thread_time", lambda: spent_s[0])
    shares, going, go = CpuShares(clock=clock), threading.Event(), threading.Event()
    heavy, light = CpuShare(shares), CpuShare(shares)
    long, short = "many words " * 10_000, "a short text"

    def encode(name: str, text: str, cost_s: float) -> list[int]:
        if name == "heavy":
            going.set()
            assert go.wait(60)
        spent_s[0] += cost_s
        ids = fast.encode(text, add_special_tokens=False)
        order.append(name)
        return ids

    running = asyncio.create_task(heavy.run(encode, "heavy", long, 0.4))
    await asyncio.to_thread(going.wait)
    waiting = asyncio.create_task(light.run(encode, "light", short, 0.1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    go.set()
    assert await running == plain.encode(long, add_special_tokens=False)
    assert await waiting == plain.encode(short, add_special_tokens=False)
    shares.close()
    assert order == ["light", "heavy"]
    assert (heavy.used_s, light.used_s) == (pytest.approx(0.4), pytest.approx(0.1))


async def test_brief_work_waits_for_the_thread_even_if_its_call_was_cancelled(cpu):
    going, go = threading.Event(), threading.Event()

    def long():
        going.set()
        go.wait()

    call = asyncio.create_task(cpu.run(long))
    await asyncio.to_thread(going.wait)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert not cpu.is_free()
    brief = asyncio.create_task(cpu.run(in_loop, brief=True))
    await asyncio.sleep(0)
    assert not brief.done()
    go.set()
    assert not await brief


async def test_only_a_short_extension_of_a_conversation_is_rendered_in_the_loop(cpu, thread, bundle, rendered):
    conversations, question = Conversations(bundle), user("Hi")
    first = await prompt(cpu, thread, conversations, ModelCall("m", [question]))
    assert rendered == [False]
    said = tuple(bundle.tokenizer.encode("A<|im_end|>", add_special_tokens=False))
    conversations.record(first, Completion(said, (None,) * 2), assistant("A"))

    def extended(text: str) -> ModelCall:
        return ModelCall("m", [question, assistant("A"), user(text)])

    short = await prompt(cpu, thread, conversations, extended("and?"))
    assert rendered == [False]
    assert short == thread.prepare(conversations, extended("and?"))
    rendered.clear()
    await prompt(cpu, thread, conversations, extended("x" * 5000))
    await prompt(cpu, thread, conversations, ModelCall("m", [question, assistant("B"), user("and?")]))
    assert rendered == [False, False]


def test_names_that_the_template_does_not_show_are_left_out(thread):
    plain = ModelCall("m", [user("Hi"), user("and?")], ignored=frozenset({"user"}))
    named = replace(plain, messages=[{**message, "name": "Ann"} for message in plain.messages])
    assert thread.shown(named) == replace(plain, ignored=frozenset({"user", "name"}))
    assert thread.shown(plain) is plain
