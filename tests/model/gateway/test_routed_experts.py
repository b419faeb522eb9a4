"""Routed experts: each segment has those with which the engine processed its tokens, or the call fails."""

import base64
import json
import shutil
from contextlib import ExitStack

import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_wrapper.contract import Segment, Trajectory, VersionSpan
from gateway_fixtures import make_gateway
from rollout_backend.config import ExpertShape, ModelConfig
from rollout_backend.core.routed_experts import ExpertRows, pack, row_bytes, unpack
from rollout_backend.errors import ConfigError
from rollout_backend.model.gateway.sessions import journal_folder
from rollout_backend.model.rendering.segments import Completion, SegmentRecorder
from rollout_backend.workbench.local.scripted import BYTE_MODEL, Aborted, ScriptedEngine
from tests.emulators.scripted_experts import seeded_routing

SHAPE = ExpertShape(layers=3, topk=2, experts=8)
ROUTING = seeded_routing(SHAPE)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ModelConfig:
    return moe_model(tmp_path_factory.mktemp("moe") / "model", num_experts=8, num_experts_per_tok=2)


def moe_model(folder, **config) -> ModelConfig:
    shutil.copytree(BYTE_MODEL, folder)
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 3, **config}))
    return ModelConfig(path=folder, name="scripted", renderer="chatml", context_length=4096, routed_experts=True)


@pytest.fixture(scope="module")
def shared(model, byte_bundle):
    with (
        ScriptedEngine((), routing=ROUTING) as engine,
        make_gateway(engine.url, model, byte_bundle, engine=engine, engine_attempts=1) as gateway,
    ):
        yield gateway


@pytest.fixture
def start(shared):
    """Return a view of a gateway whose engine gives these replies."""
    with ExitStack() as stack:

        def start(replies):
            view = shared.view(replies)
            stack.callback(view.close)
            return view

        yield start


def ask(gateway, *said: str, **more):
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    return gateway.client().chat.completions.create(model="scripted", messages=messages, **more)


def is_routed(segment: Segment, routing=ROUTING) -> bool:
    """Whether the segment has the engine's routing of each token but the last, by the weights that sampled it."""
    assert segment.routed_experts is not None
    rows = unpack(segment.routed_experts)
    spans = [span for turn in segment.turns for span in turn.weight_versions]
    start, n = 0, len(segment.token_ids)
    for span in [*spans, VersionSpan(version=spans[-1].version, start=n, end=n)]:
        # The last token that a version samples is processed by the version that samples the next one.
        stop = min(span.end, n) - 1
        wanted = routing(segment.token_ids[:stop], span.version)[start:]
        if not np.array_equal(rows[start:stop], wanted):
            return False
        start = max(start, stop)
    return len(rows) == n - 1


@pytest.mark.parametrize("stream", [False, True])
def test_every_segment_of_a_branching_session_has_its_routing(start, stream):
    gateway = start(["one", "two", "three", "four", "five", "six"])
    for said in (["Hi"], ["Hi", "one", "More"], ["Hi", "one", "Again"], ["Hi", "one", "More", "two", "Go"], ["New"]):
        list(ask(gateway, *said, stream=True)) if stream else ask(gateway, *said)
    segments = gateway.trajectory().segments
    assert [(segment.split_reason, len(segment.turns)) for segment in segments] == [
        ("first_call", 3),
        ("branched", 1),
        ("new_conversation", 1),
    ]
    assert all(is_routed(segment) for segment in segments)
    assert not any(is_routed(segment, seeded_routing(SHAPE, seed=1)) for segment in segments)
    # Only the routing of new tokens is asked for.
    starts = [request["routed_experts_start_len"] for request in gateway.engine.requests]
    assert starts == [0, *[len(segments[0].token_ids[: segments[0].turns[0].end]) - 1] * 2, starts[3], 0]
    assert starts[3] == segments[0].turns[1].end - 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_reply_keeps_the_routing_of_its_weights(start, shared, monkeypatch, stream):
    def reply(prompt: str) -> str | Aborted:
        if not prompt.endswith("assistant\nOnce"):
            return Aborted("Once")
        monkeypatch.setattr(shared.engine, "weight_version", "1")
        return " upon"

    gateway = start(reply)
    answer = ask(gateway, "Hi", stream=stream)
    if stream:
        list(answer)
    [segment] = gateway.trajectory().segments
    assert [span.version for span in segment.turns[0].weight_versions] == ["0", "1"]
    assert is_routed(segment)
    assert len(gateway.engine.requests) == 2


def test_the_routing_of_a_reply_that_a_stop_string_ends_is_fetched(start):
    gateway = start(lambda _: "One. Two. Three.")
    assert ask(gateway, "Count", stop=[" Two"]).choices[0].message.content == "One."
    ask(gateway, "Count", "One.", "More", stop=[" Two"])
    [segment] = gateway.trajectory().segments
    assert is_routed(segment)
    sampling = [request["sampling_params"]["max_new_tokens"] for request in gateway.engine.requests]
    assert [n == 1 for n in sampling] == [False, True] * 2


def test_an_engine_that_returns_the_routing_of_all_tokens_is_understood(start, monkeypatch):
    routed = ScriptedEngine._routed
    monkeypatch.setattr(
        ScriptedEngine, "_routed", lambda self, ids, body: routed(self, ids, {**body, "routed_experts_start_len": 0})
    )
    gateway = start(["one", "two"])
    ask(gateway, "Hi")
    ask(gateway, "Hi", "one", "More")
    [segment] = gateway.trajectory().segments
    assert is_routed(segment)


def encoded(rows) -> dict[str, str]:
    return {"routed_experts": base64.b64encode(np.asarray(rows, dtype="<i4").tobytes()).decode()}


@pytest.mark.parametrize(
    ("routed", "message"),
    [
        ({}, "--enable-return-routed-experts"),
        (encoded([1, 2, 3, 4, 5]), "no multiple of 3 layers x 2 experts"),
        (encoded([[[0, 0]] * 3] * 9), "all 0"),
        (encoded([[[1, 8]] * 3] * 9), "1 to 8 are not among"),
    ],
)
def test_a_call_without_its_routing_fails_and_is_no_reward(start, monkeypatch, routed, message):
    monkeypatch.setattr(ScriptedEngine, "_routed", lambda *_: routed)
    gateway = start(lambda _: "one")
    with pytest.raises(openai.InternalServerError, match=message):
        ask(gateway, "Hi")
    trajectory = gateway.trajectory()
    assert (trajectory.segments, trajectory.unanswered_calls) == ((), 1)


def test_a_restarted_gateway_has_the_routing_of_the_calls_before(serve, model, tmp_path):
    journal_id = journal_folder.prepare(tmp_path / "journal")
    with ScriptedEngine(lambda _: "reply", routing=ROUTING) as engine:
        for said in (["Hi"], ["Hi", "reply", "More"]):
            gateway = serve(engine.url, model=model, journal=tmp_path / "journal")
            messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
            key = gateway.key(journal_id=journal_id)
            gateway.post({"model": "scripted", "messages": messages, "n": 2}, key=key).raise_for_status()
            gateway.stop()
        gateway = serve(engine.url, model=model, journal=tmp_path / "journal")
        response = gateway.post({}, path="/v1/rollout/trajectory", key=gateway.key(journal_id=journal_id))
        sealed = Trajectory.decode(response.content)
    assert [len(segment.turns) for segment in sealed.segments] == [2, 2]
    assert all(is_routed(segment) for segment in sealed.segments)


@pytest.mark.parametrize("router", ["sglang-router", "smg"])
def test_the_routing_is_recorded_behind_a_router(serve, behind_router, model, router):
    with ScriptedEngine(["one", "two", "three"], routing=ROUTING) as engine:
        gateway = serve(behind_router(engine.url, router), model=model, router=router)
        for said in (["Hi"], ["Hi", "one", "More"]):
            ask(gateway, *said)
        list(ask(gateway, "Hi", "one", "More", "two", "Go", stream=True))
        [segment] = gateway.trajectory().segments
        assert len(segment.turns) == 3
        assert is_routed(segment)
        # smg adds the model's name to the body of a call.
        passed = ["model" in request for request in engine.requests]
        assert passed == [router == "smg"] * 3


def test_a_segment_without_the_routing_of_some_token_has_none():
    recorder = SegmentRecorder(SHAPE)
    recorder.add([1, 2], Completion((3,), (-1.0,)))
    rows = pack(ROUTING([1, 2, 3, 4], "0"), SHAPE).tobytes()
    experts = ExpertRows(2, rows[2 * row_bytes(SHAPE) :])
    place = recorder.add([1, 2, 3, 4], Completion((5,), (-1.0,), experts=experts), continues=0)
    assert recorder.experts(place) is None
    [segment] = recorder.segments()
    assert segment.routed_experts is None


@given(st.integers(2, 400), st.integers(1, 4), st.integers(0, 5))
def test_packed_rows_are_the_engines(experts, layers, tokens):
    shape = ExpertShape(layers, 2, experts)
    ids = seeded_routing(shape)(range(tokens), "0")
    rows = pack(ids.reshape(-1), shape)
    assert rows.shape == (tokens, layers * 2 * (1 if experts <= 256 else 2))
    segment = Segment(
        token_ids=[0] * (tokens + 1),
        response_mask=[0] * (tokens + 1),
        logprobs=[None] * (tokens + 1),
        turns=(),
        routed_experts={
            "layers": layers,
            "topk": 2,
            "id_bytes": row_bytes(shape) // layers // 2,
            "ids": rows.tobytes(),
        },
    )
    assert segment.routed_experts is not None
    assert np.array_equal(unpack(segment.routed_experts), ids)
    [decoded] = Trajectory.decode(Trajectory(model="m", segments=(segment,)).to_json()).segments
    assert decoded.routed_experts == segment.routed_experts


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({"num_experts": 128, "num_experts_per_tok": 8}, (3, 8, 128)),
        ({"n_routed_experts": 384, "num_experts_per_tok": 8}, (3, 8, 384)),
        ({"text_config": {"num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 4}}, (4, 4, 16)),
        ({}, "needs a mixture of experts"),
        ({"num_local_experts": 16, "num_experts_per_tok": 1}, "at least 2 experts per token"),
    ],
)
def test_the_shape_is_that_of_the_models_config(tmp_path, config, shape):
    model = moe_model(tmp_path / "model", **config)
    if isinstance(shape, tuple):
        assert model.expert_shape == shape
    else:
        with pytest.raises(ConfigError, match=shape):
            _ = model.expert_shape
