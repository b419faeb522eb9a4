"""The gateway before a real SGLang or vLLM with the small model: behaviour that only a real engine has."""

import json
import math
import re
from typing import NamedTuple

import httpx
import pytest

from builders import until, user
from rollout_backend.config import ModelConfig
from rollout_backend.model.gateway import model_call_executor
from rollout_backend.model.rendering.renderer import load_renderer

pytestmark = [pytest.mark.engine, pytest.mark.slow]
USER = [user("Count from one to five in words.")]
STORY = [user("Write a very long story about a fox, with many chapters.")]


@pytest.fixture
def model(real_model) -> ModelConfig:
    return real_model.model_copy(update={"context_length": 1024})


class Engine(NamedTuple):
    name: str
    url: str

    def running(self) -> int:
        """Return the number of requests in its batch."""
        if self.name == "sglang":
            return httpx.get(f"{self.url}/v1/loads", timeout=120).json()["loads"][0]["num_running_reqs"]
        found = re.search(
            r"^vllm:num_requests_running\{.*\} (\S+)$", httpx.get(f"{self.url}/metrics", timeout=120).text, re.M
        )
        return int(float(found[1]))

    def update_weights(self, version: str) -> None:
        """Announce new weights as a trainer does, with the calls in flight aborted."""
        pause, resume = "pause_generation", "continue_generation"
        if self.name == "vllm":
            pause, resume = "pause?mode=abort", "resume"
        for path, body in (
            (pause, {"mode": "abort"}),
            ("update_weight_version", {"new_version": version, "abort_all_requests": False}),
            (resume, {}),
        ):
            httpx.post(f"{self.url}/{path}", json=body, timeout=120).raise_for_status()


@pytest.fixture(params=["sglang", "vllm"])
def engine(request) -> Engine:
    fixtures = {"sglang": "real_engine", "vllm": "real_vllm"}
    return Engine(request.param, request.getfixturevalue(fixtures[request.param]))


@pytest.fixture
def gateway(serve, engine, model):
    return serve(engine.url, engine_name=engine.name, model=model, bundle=load_renderer(model), model_call_s=120)


def ask(gateway, messages, session="s1", **more):
    client = gateway.client(session, max_tokens=more.pop("max_tokens", 8))
    return client.chat.completions.create(model="scripted", messages=messages, **more)


@pytest.fixture
def endless(monkeypatch, model) -> None:
    """The model never samples a special token, so each reply is text of `max_tokens` tokens."""
    never = {str(token): -100.0 for token in load_renderer(model).tokenizer.all_special_ids}
    original = model_call_executor.engine_params

    def without_end(*args, **more):
        params, overridden = original(*args, **more)
        return {**params, "logit_bias": never}, overridden

    monkeypatch.setattr(model_call_executor, "engine_params", without_end)


def test_a_stop_string_ends_the_reply(gateway, endless):
    answer = ask(gateway, STORY, stop=["e"], max_tokens=200)
    assert "e" not in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    (segment,) = gateway.trajectory().segments
    (turn,) = segment.turns
    assert [(span.start, span.end) for span in turn.weight_versions] == [(turn.start, turn.end)]


def test_a_stream_aborted_by_a_pause_continues(gateway, engine, endless):
    texts = []
    for chunk in ask(gateway, STORY, stream=True, max_tokens=100):
        texts.append(chunk.choices[0].delta.content or "")
        if len("".join(texts)) > 20 and len(texts) < 100:
            texts += [""] * 100
            engine.update_weights("8")
    (segment,) = gateway.trajectory().segments
    (turn,) = segment.turns
    assert turn.weight_versions[-1].version == "8"
    assert len(turn.weight_versions) == 2
    assert segment.messages[-1]["content"].strip() == "".join(texts).strip()


def test_a_disconnected_stream_frees_the_engine(gateway, engine, endless):
    with ask(gateway, [user("Write a very long novel.")], stream=True, max_tokens=900) as stream:
        next(iter(stream))
        until(lambda: engine.running() == 1)
    until(lambda: engine.running() == 0)
    assert gateway.trajectory().segments == ()


ADD = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {key: {"type": "integer", "minimum": 0, "maximum": 99} for key in ("a", "b")},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("router", [None, "sglang-router", "smg"], ids=lambda router: router or "at the engine")
def test_a_forced_tool_call_has_no_trained_logprobs(serve, engine, behind_router, model, router):
    if router and engine.name == "vllm":
        pytest.skip("no router forwards vLLM's token endpoint")
    url = behind_router(engine.url, router) if router else engine.url
    gateway = serve(url, engine_name=engine.name, model=model, bundle=load_renderer(model), model_call_s=120)
    tools = [{"type": "function", "function": ADD}, {"type": "function", "function": {"name": "other"}}]
    choice = {"type": "function", "function": {"name": "add"}}
    answer = ask(gateway, USER, tools=tools, tool_choice=choice, max_tokens=100)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "add"
    assert set(json.loads(call.function.arguments)) == {"a", "b"}
    (segment,) = gateway.trajectory().segments
    assert all(math.isnan(logprob) for logprob in segment.logprobs)
    assert gateway.stats().constrained == 1
