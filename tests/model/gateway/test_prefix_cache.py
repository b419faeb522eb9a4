"""Sessions find their prefix at their engine, and at another one if it dies, which is counted as a cache break."""

import asyncio
from itertools import takewhile
from operator import eq

import pytest

from rollout_backend.config import RouterConfig
from rollout_backend.model.gateway.sessions.conversations import is_cache_break
from rollout_backend.model.serving.router import Router
from rollout_backend.workbench.local.scripted import ScriptedEngine


@pytest.mark.parametrize(
    ("known", "cached", "broken"),
    [
        (0, 0, False),  # a first call
        (255, 0, False),  # too short for an engine with large pages
        (256, 0, True),
        (1000, 999, False),
        (1000, 1200, False),  # another session has asked the same before
        (1000, 512, False),
        (1000, 499, True),  # the system prompt alone, say
    ],
)
def test_a_cache_break_is_the_loss_of_most_of_a_conversation(known, cached, broken):
    assert is_cache_break(known, cached) is broken


class CachingEngine(ScriptedEngine):
    """Reports the longest prefix of a prompt that it has seen as cached."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: "a long answer " * 30)
        self.sequences: list[list[int]] = []

    def _completion(self, text, body):
        completion = super()._completion(text, body)
        prompt = body["input_ids"]
        shared = [sum(1 for _ in takewhile(bool, map(eq, prompt, seen))) for seen in self.sequences]
        completion["meta_info"]["cached_tokens"] = max(shared, default=0)
        self.sequences.append(prompt + completion["output_ids"])
        return completion


@pytest.mark.parametrize("kind", ["sglang-router", "smg"])
async def test_a_session_continues_when_its_engine_dies(serve, tmp_path, kind):
    with CachingEngine() as first, CachingEngine() as second:
        async with Router(RouterConfig(kind=kind), tmp_path / "router.log", model_call_s=120) as router:
            await asyncio.gather(router.add(first.url), router.add(second.url))
            gateway = serve(router.url, engine_attempts=10)
            client = gateway.client()
            messages = []

            async def ask(question: str) -> None:
                messages.append({"role": "user", "content": question})
                reply = await asyncio.to_thread(client.chat.completions.create, model="scripted", messages=messages)
                messages.append({"role": "assistant", "content": reply.choices[0].message.content})

            await ask("How are you?")
            await ask("And now?")
            assert gateway.stats().cache_breaks == 0
            pinned, other = sorted((first, second), key=lambda engine: -len(engine.requests))
            assert (len(pinned.requests), len(other.requests)) == (2, 0)
            pinned.__exit__(None, None, None)
            await ask("Are you still there?")
            await ask("Good.")
            assert len(other.requests) == 2
            stats = gateway.stats()
            assert (stats.calls, stats.cache_breaks, stats.errors) == (4, 1, {})
            (segment,) = gateway.trajectory().segments  # to the trajectory it makes no difference
            assert [turn.cached_tokens > 0 for turn in segment.turns] == [False, True, False, True]


class SilentEngine(ScriptedEngine):
    """Does not report what was cached."""

    def _completion(self, text, body):
        completion = super()._completion(text, body)
        del completion["meta_info"]["cached_tokens"]
        return completion


def ask(client, text):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="scripted", messages=messages)


def test_what_no_engine_reports_is_unknown_and_not_zero(serve):
    with SilentEngine(("yes",)) as engine:
        gateway = serve(engine.url)
        usage = ask(gateway.client(), "Is it cached?").usage
        stats = gateway.stats()
        assert (stats.cache_unknown_tokens, stats.cached_tokens) == (usage.prompt_tokens, 0)
        assert stats.cache_hit is None
        [segment] = gateway.trajectory().segments
        assert [turn.cached_tokens for turn in segment.turns] == [None]


async def test_sessions_with_one_routing_key_share_an_engine_and_its_cache(serve, tmp_path):
    prompt = "the prompt of the group " * 20
    with CachingEngine() as first, CachingEngine() as second:
        async with Router(RouterConfig(), tmp_path / "router.log", model_call_s=120) as router:
            await asyncio.gather(router.add(first.url), router.add(second.url))
            gateway = serve(router.url)
            for session in "abc":
                await asyncio.to_thread(ask, gateway.client(session, routing_key="0/group"), f"{prompt}{session}")
            assert sorted((len(first.requests), len(second.requests))) == [0, 3]
            assert gateway.stats().cache_hit > 0.6  # all but the first session found the prompt
