"""The benchmark of token identity, smaller: an agent with a tool, on the real engine and on a script."""

import importlib
from pathlib import Path

import pytest

from rollout_backend.model.serving.install import find_model
from rollout_backend.workbench.local.scripted import ScriptedEngine

ROLLOUTS = 6
WORST_DIFFERENCE = 1e-4  # in probability: both sides compute in float32, with different orders of summation


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    return importlib.import_module("token_identity")


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(500)  # conversations on the real engine, then a plain forward pass
@pytest.mark.parametrize(("engine", "server"), [("sglang", "real_engine"), ("vllm", "real_vllm")])
async def test_the_trained_tokens_are_the_sampled_tokens(benchmark, request, engine, server):
    url = request.getfixturevalue(server)
    measured = await benchmark.measure(benchmark.BRIDGED, ROLLOUTS, url, find_model(), engine)
    assert measured.counts()["rows"] == ROLLOUTS
    assert measured.counts()["model calls"] >= ROLLOUTS * benchmark.QUESTIONS
    assert measured.tool_calls > 0
    benchmark.check_logprobs([measured], find_model())
    assert measured.worst_difference < WORST_DIFFERENCE
    turns = [turn for segment in measured.segments for turn in segment.turns]
    assert engine == "vllm" or any(turn.cached_tokens for turn in turns)


@pytest.mark.parametrize("bridged", [True, False])
async def test_a_call_that_no_template_writes_so(benchmark, byte_model, bridged):
    """It is parsed as the same call, but rendered again it has other tokens: a break, unless the tokens are kept."""
    odd = '<tool_call>{"name":"calculator","arguments":{"expression":"1 + 2"}}</tool_call>'
    limits = {"context_length": 16_384, "max_tokens": 500}  # in bytes
    with ScriptedEngine([odd, "Answer: 3", odd, "Answer: 3", "Answer: 4"]) as engine:
        renderer = benchmark.BRIDGED if bridged else benchmark.RERENDERED
        measured = await benchmark.measure(renderer, 1, engine.url, byte_model.path, **limits)
    assert [each.split_reason for each in measured.segments] == ["first_call"] + 2 * ["rerendered"] * (not bridged)
    assert measured.counts() == {
        "rollouts": 1,
        "model calls": 5,
        "of them with a tool call": 2,
        "rows": 1 if bridged else 3,
        "sampled tokens, each trained once": 2 * (len(odd) + 1) + 3 * (len("Answer: 3") + 1),
        "calls whose history, when re-rendered, has other tokens than were sampled": 2,
        "sampled tokens in those histories": 2 * (len(odd) + 1),
    }
    for segment in measured.segments:
        assert all(logprob == -0.5 for logprob, on in zip(segment.logprobs, segment.response_mask, strict=True) if on)
