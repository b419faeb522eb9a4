"""Images on the real engine: the recorded tokens and bytes have the recorded logprobs."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from PIL import Image

from builders import assistant, tool_result, user
from rollout_backend.config import ModelConfig
from rollout_backend.model.dialects.openai_chat import OpenAIChat
from rollout_backend.model.gateway.sessions.conversations import Conversations
from rollout_backend.model.images import ImageLimits
from rollout_backend.model.rendering.renderer import load_renderer
from rollout_backend.model.serving.install import find_engine
from vocabularies import model_folder, template, tokenizer_folder

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

PAD = 151655
SCRIPT = Path(__file__).with_name("seeing_model.py")
TOLERANCE = 2e-3
SPELT = "<|vision_start|><|image_pad|><|vision_end|>"  # text that is no image


def gradient(colours: tuple[str, str], width: int, height: int, kind: str) -> bytes:
    left, right = (Image.new("RGB", (width, height), colour) for colour in colours)
    out = io.BytesIO()
    Image.composite(left, right, Image.linear_gradient("L").resize((width, height))).save(out, kind)
    return out.getvalue()


FIRST, SECOND = gradient(("red", "blue"), 96, 160, "PNG"), gradient(("green", "white"), 200, 100, "JPEG")
OTHER = gradient(("black", "white"), 96, 160, "PNG")


def in_engine(what: str, folder: Path, asked: dict | None = None) -> str:
    env = {**os.environ, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [find_engine(), str(SCRIPT), what, str(folder)],
        env=env,
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("seeing") / "model"
    shutil.copytree(tokenizer_folder("qwen3"), folder)
    in_engine("make", folder)
    return ModelConfig(path=folder, name="m", renderer="qwen3-vl", context_length=2048)


@pytest.fixture(scope="session")
def bundle(model):
    return load_renderer(model)


@pytest.fixture(scope="session")
def engine(model, run_engine):
    with run_engine(model, 300.0, max_total_tokens=8192) as url:
        yield url


@pytest.fixture(params=["at the engine", "sglang-router", "smg"])
def engine_url(request, engine, behind_router):
    return engine if request.param == "at the engine" else behind_router(engine, request.param)


def shown(data: bytes, text: str) -> dict:
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}],
    }


def test_recorded_images_are_those_that_the_model_saw(serve, engine_url, model):
    gateway = serve(engine_url, model=model, model_call_s=300)
    client = gateway.client(temperature=1.0, seed=1)
    messages: list[dict] = []
    news = [
        shown(FIRST, "What is this?"),
        shown(SECOND, f"{SPELT} And this?"),
        {"role": "user", "content": "So?"},
    ]
    for new in news:
        messages.append(new)
        ask = {"model": "m", "messages": messages, "max_completion_tokens": 12}
        if new is news[1]:
            chunks = list(client.chat.completions.create(**ask, stream=True))
            said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            said = client.chat.completions.create(**ask).choices[0].message.content
        messages.append({"role": "assistant", "content": said})
    trajectory = gateway.trajectory()
    [segment] = trajectory.segments
    assert len(segment.turns) == 3
    ids = segment.token_ids.tolist()
    assert [span.end - span.start for span in segment.images] == [3 * 5, 6 * 3]
    assert ids.count(PAD) == 3 * 5 + 6 * 3
    images = [
        [span.start, span.end, base64.b64encode(trajectory.images[span.sha256]).decode()] for span in segment.images
    ]
    reference = json.loads(in_engine("logprobs", model.path, {"ids": ids, "images": images}))
    images[0][2] = base64.b64encode(OTHER).decode()
    misled = json.loads(in_engine("logprobs", model.path, {"ids": ids, "images": images}))
    sampled = [i for i, mask in enumerate(segment.response_mask) if mask]
    assert max(abs(reference[i] - segment.logprobs[i]) for i in sampled) < TOLERANCE
    assert max(abs(misled[i] - segment.logprobs[i]) for i in sampled) > 10 * TOLERANCE  # or this shows nothing


def test_a_cached_image_is_not_confused_with_another(serve, engine, model):
    """Their tokens are the same, so the prefix cache must compare the images."""
    gateway = serve(engine, model=model, model_call_s=300)
    client = gateway.client(temperature=0.0)
    said = []
    for data in (FIRST, OTHER, FIRST):
        ask = {"model": "m", "messages": [shown(data, "What is this?")], "max_completion_tokens": 12}
        said.append(client.chat.completions.create(**ask).choices[0].message.content)
    assert said[0] == said[2] != said[1]
    trajectory = gateway.trajectory()
    assert [trajectory.images[segment.images[0].sha256] for segment in trajectory.segments] == [FIRST, OTHER, FIRST]


def test_a_repeated_image_is_encoded_with_new_weights(serve, engine, model, tmp_path):
    """The engine empties its cache of prefixes with new weights, but not what it keeps of images."""
    retrained = tmp_path / "retrained"
    shutil.copytree(model.path, retrained)
    in_engine("retrain", retrained)
    gateway = serve(engine, model=model, model_call_s=300)
    ask = {"model": "m", "messages": [shown(FIRST, "And now?")], "max_completion_tokens": 12}
    client = gateway.client("before", temperature=1.0, seed=1)
    client.chat.completions.create(**ask)
    for folder in (retrained, model.path):
        update = {"model_path": str(folder)}
        assert httpx.post(f"{engine}/update_weights_from_disk", json=update, timeout=300).json()["success"]
        name = f"by-{folder.name}"
        gateway.client(name, temperature=1.0, seed=1).chat.completions.create(**ask)
        [segment] = gateway.trajectory(name).segments
        [span] = segment.images
        ids = segment.token_ids.tolist()
        images = [[span.start, span.end, base64.b64encode(FIRST).decode()]]
        reference = json.loads(in_engine("logprobs", folder, {"ids": ids, "images": images}))
        sampled = [i for i, mask in enumerate(segment.response_mask) if mask]
        assert max(abs(reference[i] - segment.logprobs[i]) for i in sampled) < TOLERANCE, folder


@pytest.mark.parametrize(
    ("renderer", "own"), [("qwen3-vl", "qwen3_vl"), ("qwen3.5", "qwen3_5_think"), ("qwen3.8", "qwen3_8")]
)
def test_prompts_with_images_are_those_of_the_template_and_the_image_processor(tmp_path, renderer, own):
    """The engine's SGLang cannot run Qwen3.5 on a CPU."""
    folder = model_folder(tmp_path / "model", "qwen3.5", template(own))
    sizes = {"shortest_edge": 64**2, "longest_edge": 4096**2}
    patches = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    settings = {"image_processor_type": "Qwen2VLImageProcessorFast", "size": sizes, **patches}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))

    def conversation(arguments, of_image) -> list[dict]:
        function = {"name": "show", "arguments": arguments}
        return [
            user([of_image(FIRST), of_image(SECOND), {"type": "text", "text": "Compare."}]),
            assistant("", tool_calls=[{"id": "c1", "type": "function", "function": function}]),
            tool_result("c1", [of_image(OTHER), {"type": "text", "text": "here"}]),
        ]

    images = [base64.b64encode(data).decode() for data in (FIRST, SECOND, OTHER)]
    theirs = {"messages": conversation({}, lambda data: {"type": "image"}), "images": images}
    bundle = load_renderer(ModelConfig(path=folder, name="m", context_length=4096))
    assert bundle.name == renderer
    asked = {"model": "m", "messages": conversation("{}", lambda data: shown(data, "")["content"][0])}
    call = OpenAIChat(ImageLimits(16, 2**24)).parse(json.dumps(asked).encode())
    prompt = Conversations(bundle).prepare(call.messages, call.tools, call.images)
    assert len(prompt.images) == len(images)
    assert list(prompt.ids) == json.loads(in_engine("prompt", folder, theirs))
