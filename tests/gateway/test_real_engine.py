"""The gateway before a real SGLang with the small model: what only a real engine can tell."""

import math
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from rollout_backend.config import ModelConfig, ServingConfig
from rollout_backend.gateway.renderer import load_renderer
from rollout_backend.process import free_port
from rollout_backend.serving.install import find_model
from rollout_backend.serving.sglang import engine_command

pytestmark = pytest.mark.engine
USER = [{"role": "user", "content": "Count from one to five in words."}]


@pytest.fixture(scope="module")
def real_model() -> ModelConfig:
    return ModelConfig(path=find_model(), name="scripted", renderer="auto", context_length=1024)


@pytest.fixture(scope="module")
def engine(real_model, tmp_path_factory):
    port = free_port()
    serving = ServingConfig(kind="process", device="cpu", threads=2, max_total_tokens=4096)
    argv, env = engine_command(real_model, serving, "127.0.0.1", port)
    log = tmp_path_factory.mktemp("engine") / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(argv, env=env, stdout=out, stderr=out, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 120
    while True:
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                break
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    yield url
    process.terminate()
    process.wait(30)


@pytest.fixture
def gateway(serve, engine, real_model):
    return serve(engine, model=real_model, bundle=load_renderer(real_model), model_call_s=120)


def ask(gateway, messages, session="s1", **more):
    client = gateway.client(session, max_tokens=more.pop("max_tokens", 8))
    return client.chat.completions.create(model="scripted", messages=messages, **more)


def test_a_conversation_is_one_segment_with_logprobs_and_versions(gateway):
    messages = list(USER)
    for _ in range(3):
        messages.append(ask(gateway, messages).choices[0].message.model_dump())
        messages.append({"role": "user", "content": "Go on."})
    (segment,) = gateway.trajectory().segments
    assert len(segment.turns) == 3
    for turn in segment.turns:
        assert turn.end > turn.start
        assert all(logprob <= 0 for logprob in segment.logprobs[turn.start : turn.end])  # no NaN among them
        assert [(span.start, span.end) for span in turn.weight_versions] == [(turn.start, turn.end)]
    assert segment.turns[1].cached_tokens >= segment.turns[0].start - 1  # the prefix cache held


def test_a_stop_string_is_honoured(gateway):
    answer = ask(gateway, USER, stop=["e"], max_tokens=100)
    assert "e" not in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def running(engine) -> int:
    return httpx.get(f"{engine}/v1/loads").json()["loads"][0]["num_running_reqs"]


def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def test_generation_that_a_pause_aborts_goes_on_under_the_new_version(gateway, engine):
    story = [{"role": "user", "content": "Write a very long story about a fox, with many chapters."}]
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, gateway, story, max_tokens=60)
        until(lambda: running(engine) == 1)
        for path, body in (
            ("pause_generation", {"mode": "abort"}),
            ("update_weight_version", {"new_version": "7", "abort_all_requests": False}),
            ("continue_generation", {}),
        ):
            httpx.post(f"{engine}/{path}", json=body, timeout=30).raise_for_status()
        usage = answer.result().usage
    (segment,) = gateway.trajectory().segments
    (turn,) = segment.turns
    # Aborted before its first token, a reply is of the new version alone.
    assert [span.version for span in turn.weight_versions] in (["default", "7"], ["7"])
    assert turn.end - turn.start == usage.completion_tokens
    assert not any(math.isnan(logprob) for logprob in segment.logprobs[turn.start : turn.end])


def test_a_client_that_hangs_up_frees_the_engine(gateway, engine):
    client = gateway.client(max_tokens=900).with_options(timeout=2.0)
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "Write a very long novel."}]
        )
    until(lambda: running(engine) == 0)
    assert gateway.trajectory().segments == ()
