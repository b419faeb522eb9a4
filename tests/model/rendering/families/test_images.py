"""Images through the gateway to a model that takes them: their positions, their bytes, and what is refused."""

from __future__ import annotations

import base64
import io
import json
import shutil
import struct
import zlib
from pathlib import Path

import openai
import pytest
from PIL import Image, ImageOps

from agent_wrapper.contract import ContractError, Outcome, Rollout, Trajectory
from builders import assistant, system, user
from rollout_backend.config import ModelConfig
from rollout_backend.core.seal import Sealer
from rollout_backend.model.gateway.sessions import journal_folder
from rollout_backend.model.gateway.sessions.conversations import Conversations
from rollout_backend.model.images import read_image
from rollout_backend.model.rendering.renderer import load_renderer
from rollout_backend.workbench.local.scripted import ScriptedEngine, ToolCall
from sdk_agents import AGENTS, MessagesAgent, data_url
from vocabularies import byte_vocabulary

SIDE = 32  # pixels of a token
SEAL_SECRET = "the seals of this run " * 2
SHOW = {"type": "object", "properties": {"page": {"type": "integer"}}}
SCRIPT = ["A red one.", ToolCall("show", {"page": 2}), "And a blue one.", "No more."]


def picture(colour: str, width: int, height: int, kind: str = "PNG", **more) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(out, kind, **more)
    return out.getvalue()


def tokens_of(data: bytes) -> int:
    """By the rule of the model's own processor, for sides that it need not change by more than rounding."""
    with Image.open(io.BytesIO(data)) as opened:
        return round(opened.width / SIDE) * round(opened.height / SIDE)


RED, BLUE = picture("red", 64, 96), picture("blue", 200, 100, "JPEG")
PLAIN_BLUE = read_image(BLUE, 2**24).data


def seeing_model(folder: Path, renderer: str, **options) -> ModelConfig:
    """Make a model with what a Qwen3-VL has for images."""
    byte_vocabulary(folder)
    settings = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 4 * SIDE**2, "longest_edge": 2**24},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return ModelConfig(path=folder, name="m", renderer=renderer, renderer_options=options, context_length=4096)


@pytest.fixture(scope="session")
def seeing(tmp_path_factory) -> ModelConfig:
    return seeing_model(tmp_path_factory.mktemp("seeing"), "qwen3-vl")


@pytest.fixture(scope="session")
def sees(seeing):
    return load_renderer(seeing)


@pytest.fixture(scope="session")
def bundle(sees):
    """Not one for each family."""
    return sees


@pytest.fixture
def engine(seeing):
    with ScriptedEngine(SCRIPT, seeing.path, image_tokens=tokens_of) as engine:
        yield engine


@pytest.fixture
def gateway(serve, engine, seeing, sees):
    return serve(engine.url, model=seeing)


def pads_of(engine: ScriptedEngine) -> list[int | None]:
    """Return the tokens that stand for images and videos."""
    return [engine.tokenizer.token_to_id(name) for name in ("<|image_pad|>", "<|video_pad|>")]


# --- three clients ----------------------------------------------------------------------------------------


def converse(agent) -> list[str]:
    """Have a conversation of four replies: an image, a tool whose result is another, and the first one again."""
    said = []
    for _ in range(4):
        reply = agent.turn()
        said.append(reply.text)
        more = [agent.image(RED)] if len(said) == 3 else "Go on."
        agent.answer(reply, lambda _: [agent.image(BLUE)], more)
    return said


@pytest.fixture(scope="module")
def prompts() -> list:
    """The prompts of that conversation, which are the same in every API."""
    return []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", AGENTS)
def test_a_conversation_with_images_is_one_row_of_what_the_engine_saw(gateway, engine, prompts, api, stream):
    agent = api(gateway, None, stream=stream, model="m", system=None, tool=("show", SHOW))
    agent.say([agent.text("What "), agent.text("is "), agent.image(RED), agent.text("this? <|image_pad|>")])
    assert converse(agent) == ["A red one.", "", "And a blue one.", "No more."]
    trajectory = gateway.trajectory()
    [segment] = trajectory.segments
    assert len(segment.turns) == 4
    ids = segment.token_ids.tolist()
    pads = pads_of(engine)
    lengths = [tokens_of(RED), tokens_of(BLUE), tokens_of(RED)]
    assert [span.end - span.start for span in segment.images] == lengths
    assert [span.media_type for span in segment.images] == ["image/png"] * 3
    for span in segment.images:
        assert set(ids[span.start : span.end]) == {pads[0]}
        around = engine.tokenizer.decode([ids[span.start - 1], ids[span.end]], skip_special_tokens=False)
        assert around == "<|vision_start|><|vision_end|>"
    assert ids.count(pads[0]) == sum(lengths)  # the words in the text made none
    assert [trajectory.images[span.sha256] for span in segment.images] == [RED, PLAIN_BLUE, RED]
    assert len(trajectory.images) == 2
    shown = [[RED], [RED], [RED, PLAIN_BLUE], [RED, PLAIN_BLUE, RED]]
    for request, turn, images in zip(engine.requests, segment.turns, shown, strict=True):
        assert [base64.b64decode(url.partition(",")[2]) for url in request["image_data"]] == images
        assert request["input_ids"].count(pads[0]) == len(images)
        assert engine._prompt(request) == ids[: turn.start]
        assert request["sampling_params"]["logit_bias"] == {str(pad): -100.0 for pad in pads}
    assert engine.tokenizer.decode(ids[: segment.images[0].start]).endswith("user\nWhat is ")
    assert "sha256:" in str(segment.messages[0]["content"])
    assert "base64" not in str(segment.messages)
    prompts.append([request["input_ids"] for request in engine.requests])
    assert prompts[-1] == prompts[0]


@pytest.mark.parametrize("renderer", ["qwen3.5", "qwen3.8"])
def test_several_images_and_images_of_tools_of_qwen3_5_and_later(serve, tmp_path, renderer):
    model = seeing_model(tmp_path / "model", renderer, enable_thinking=False)
    call = "<tool_call>\n<function=show>\n<parameter=page>\n2\n</parameter>\n</function>\n</tool_call>"
    with ScriptedEngine(["A red one.", call, *SCRIPT[2:]], model.path, image_tokens=tokens_of) as engine:
        gateway = serve(engine.url, model=model, bundle=load_renderer(model))
        agent = AGENTS[0](gateway, None, model="m", system=None, tool=("show", SHOW))
        agent.say([agent.text("Which? "), agent.image(RED), agent.image(BLUE)])
        assert converse(agent) == ["A red one.", "", "And a blue one.", "No more."]
    [segment] = gateway.trajectory().segments
    assert len(segment.turns) == 4
    lengths = [tokens_of(image) for image in (RED, BLUE, BLUE, RED)]
    assert [span.end - span.start for span in segment.images] == lengths
    pads = pads_of(engine)
    assert segment.token_ids.tolist().count(pads[0]) == sum(lengths)
    for request, turn in zip(engine.requests, segment.turns, strict=True):
        assert engine._prompt(request) == segment.token_ids.tolist()[: turn.start]
        assert request["sampling_params"]["logit_bias"] == {str(pad): -100.0 for pad in pads}


def test_the_tokens_of_images_are_counted(gateway):
    agent = MessagesAgent(gateway, None, model="m", system=None)
    agent.say([agent.text("What is "), agent.image(RED), agent.image(BLUE), agent.image(RED)])
    counted = agent.client.messages.count_tokens(**agent.asked).input_tokens
    assert counted > tokens_of(RED) * 2 + tokens_of(BLUE)


# --- rows -------------------------------------------------------------------------------------------------


def ask(data: bytes, text: str = "What is this?") -> dict:
    return user([{"type": "image_url", "image_url": {"url": data_url(data)}}, {"type": "text", "text": text}])


def create(gateway, *messages: dict, **more):
    return gateway.client().chat.completions.create(model="m", messages=messages, **more)


@pytest.mark.parametrize("asked_before", [True, False])
def test_another_image_of_the_same_size_is_another_conversation(gateway, engine, asked_before):
    """The tokens of both are the same. Only a history with the image that the model saw continues its row."""
    engine.replies = ["It is red."] * 3
    green = picture("green", 64, 96)
    for data in (RED, green) if asked_before else (RED,):
        create(gateway, ask(data))
    create(gateway, ask(green), assistant("It is red."), user("Sure?"))
    trajectory = gateway.trajectory()
    first, second = trajectory.segments
    assert [len(first.turns), len(second.turns)] == ([1, 2] if asked_before else [1, 1])
    assert first.token_ids == second.token_ids[: len(first.token_ids)]
    assert [trajectory.images[segment.images[0].sha256] for segment in (first, second)] == [RED, green]


def test_a_call_without_images_is_sent_as_to_any_model(gateway, engine):
    create(gateway, user("Hello."))
    [request] = engine.requests
    assert request.keys() == {"rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len"}
    assert "logit_bias" not in request["sampling_params"]


def test_text_is_rendered_as_without_images(sees):
    conversation = [system("Be brief."), user("Hello, you."), assistant("Hello."), user("Bye.")]
    prompt = Conversations(sees).prepare(conversation, None)
    assert prompt.ids.tolist() == sees.renderer.inner.render_ids(conversation, add_generation_prompt=True)
    assert prompt.images == ()


def test_image_lengths_equal_those_of_the_renderer(sees):
    """By the renderer's own way, which loads images and prepares their pixels."""
    pixels = [Image.open(io.BytesIO(data)) for data in (RED, BLUE)]
    sees.renderer.inner._processor = type("Processor", (), {"image_processor": sees.vision.processor})
    parts = [{"type": "image", "image": image} for image in pixels]
    rendered = sees.renderer.inner.render(
        [{"role": "user", "content": [*parts, {"type": "text", "text": "Compare."}]}], add_generation_prompt=True
    )
    found = rendered.multi_modal_data.mm_placeholders["image"]
    assert [place.length for place in found] == [tokens_of(RED), tokens_of(BLUE)]


def test_images_survive_restarts_of_the_gateway_and_are_sealed(serve, engine, seeing, sees, tmp_path):
    folder = tmp_path / "gateway" / "0-of-1"
    journal_id = journal_folder.prepare(folder)
    more = {"model": seeing, "journal": folder, "seal_secret": SEAL_SECRET}
    history: list[dict] = [ask(RED)]
    for data in (BLUE, RED, None):
        gateway = serve(engine.url, **more)
        client = gateway.client(journal_id=journal_id)
        message = client.chat.completions.create(model="m", messages=history).choices[0].message
        history += [message.model_dump(exclude_none=True), ask(data) if data else user("So?")]
        if data is not None:
            gateway.stop()
    sealed = gateway.post(b"", path="/v1/rollout/trajectory", key=gateway.key(journal_id=journal_id))
    trajectory = Trajectory.decode(sealed.raise_for_status().content)
    [segment] = trajectory.segments
    assert len(segment.turns) == 3
    assert [trajectory.images[span.sha256] for span in segment.images] == [RED, PLAIN_BLUE, RED]
    written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert written.count(RED) == 1

    def rollout(trajectory: Trajectory) -> Rollout:
        ids = {"run_id": "run", "step": 0, "task_id": "t", "rollout_id": "r", "attempt": 1, "session_id": "s1"}
        given = {name: getattr(trajectory, name) for name in ("segments", "seal", "images")}
        return Rollout(**ids, outcome=Outcome.COMPLETED, reward=1.0, model="m", **given)

    sealer = Sealer(SEAL_SECRET)
    whole = rollout(trajectory)
    for encoded in (whole.encode(), whole.to_json()):
        read = Rollout.decode(encoded)
        assert (read.images, read.segments[0].images) == (trajectory.images, segment.images)
        sealer.check(read)
    first, *others = segment.images
    moved = first.model_copy(update={"start": first.start + 1})
    altered = segment.model_copy(update={"images": (moved, *others)})
    with pytest.raises(ContractError, match="not what was sampled"):
        sealer.check(rollout(trajectory.model_copy(update={"segments": (altered,)})))


def _orientation(value: int) -> Image.Exif:
    exif = Image.Exif()
    exif[274] = value
    return exif


def _written(image: Image.Image, kind: str, **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


RAMP = Image.linear_gradient("L").resize((96, 64))
CLEAR = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
MORE = {"save_all": True, "append_images": [Image.new("RGB", (64, 64), "red")]}
GREEN = Image.new("RGB", (64, 64), "green")
SENT = {
    "plain": (_written(GREEN, "PNG"), GREEN),
    "JPEG": (_written(GREEN, "JPEG"), None),
    "JPEG with a second picture": (_written(GREEN, "MPO", **MORE), None),
    "grayscale JPEG": (_written(RAMP, "JPEG"), None),
    "CMYK JPEG": (_written(RAMP.convert("CMYK"), "JPEG"), None),
    "turned JPEG": (_written(RAMP.convert("RGB"), "JPEG", exif=_orientation(6)), None),
    "turned PNG": (
        _written(RAMP.convert("RGB"), "PNG", exif=_orientation(6)),
        RAMP.convert("RGB").rotate(-90, expand=True),
    ),
    "grayscale PNG": (_written(RAMP, "PNG"), RAMP.convert("RGB")),
    "bilevel PNG": (_written(RAMP.convert("1"), "PNG"), RAMP.convert("1").convert("RGB")),
    "palette": (_written(GREEN.convert("P"), "PNG"), GREEN.convert("P").convert("RGB")),
    "transparent": (_written(CLEAR, "PNG"), Image.new("RGB", (64, 64), "white")),
    "transparent palette": (
        _written(Image.new("P", (64, 64), 0), "PNG", transparency=0),
        Image.new("RGB", (64, 64), "white"),
    ),
    "transparent gray": (_written(Image.new("LA", (64, 64), (0, 0)), "PNG"), Image.new("RGB", (64, 64), "white")),
    "profile": (_written(GREEN, "PNG", icc_profile=b"any profile"), GREEN),
    "animated GIF": (_written(GREEN, "GIF", **MORE), GREEN),
    "animated PNG": (_written(GREEN, "PNG", **MORE), GREEN),
    "WebP": (_written(GREEN, "WEBP", lossless=True), GREEN),
}


@pytest.mark.parametrize(("data", "pixels"), SENT.values(), ids=SENT)
def test_an_image_becomes_a_plain_png_that_every_decoder_reads_alike(data, pixels):
    image = read_image(data, 2**24)
    plain = Image.open(io.BytesIO(image.data))
    plain.load()
    assert (plain.format, plain.mode, plain.size, plain.info) == ("PNG", "RGB", (image.width, image.height), {})
    assert (plain.n_frames, dict(plain.getexif())) == (1, {})
    if pixels is None:
        pixels = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert (plain.size, plain.tobytes()) == (pixels.size, pixels.tobytes())
    assert (image.data == data) == (data is SENT["plain"][0])
    assert read_image(image.data, 2**24) == image == read_image(data, 2**24)


def test_images_of_16_bits_are_refused():
    with pytest.raises(ValueError, match="8 bits per channel"):
        read_image(_written(Image.new("I;16", (64, 64), 300), "PNG"), 2**24)


def test_the_engine_gets_what_is_recorded(gateway, engine):
    engine.replies = ["Green."] * 2
    for number in range(2):
        create(gateway, ask(SENT["turned JPEG"][0], f"Number {number}?"))
    trajectory = gateway.trajectory()
    shown = {base64.b64decode(url.partition(",")[2]) for each in engine.requests for url in each["image_data"]}
    assert shown == {*trajectory.images.values()} == {read_image(SENT["turned JPEG"][0], 2**24).data}


def test_image_settings_are_read_from_newer_model_folders(seeing, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(seeing.path, folder)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").unlink()
    model = seeing.model_copy(update={"path": folder})
    assert load_renderer(model).vision is None
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    found = load_renderer(model).vision
    assert found is not None
    assert found.tokens(read_image(BLUE, 2**24)) == tokens_of(BLUE)


# --- refusals -------------------------------------------------------------------------------------------


def bomb() -> bytes:
    """A PNG of 50,000 x 50,000 pixels in few bytes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")
    )


def bmp() -> bytes:
    return picture("red", 64, 64, "BMP")


HOSTILE = {
    "bomb": (data_url(bomb()), "pixels"),
    "large": (data_url(picture("red", 4100, 4100)), "4100 x 4100 pixels"),
    "thin": (data_url(picture("red", 64, 2)), "at least 4 each way"),
    "long": (data_url(picture("red", 4000, 8)), "aspect ratio"),
    "bmp": (data_url(bmp()), "no PNG, JPEG, WebP or GIF"),
    "text": (data_url(b"root:x:0:0:root:/root:/bin/bash\n"), "no PNG, JPEG, WebP or GIF"),
    "svg": (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "no PNG, JPEG, WebP or GIF"),
    "empty": (data_url(b""), "no PNG, JPEG, WebP or GIF"),
    "cut": (data_url(picture("red", 640, 640, "JPEG")[:-600]), "cannot be read to its end"),
    "not base64": ("data:image/png;base64,***", "not base64"),
}
NOT_INLINE = ["{engine}/x.png", "file://{path}", "{path}", "data:image/png,x", "sha256:" + "0" * 64, ""]


def refusals(gateway, url: str) -> list[str]:
    """Return the errors of the three APIs for an image."""
    head, _, data = url.partition(";base64,")
    source = {"type": "base64", "media_type": head.removeprefix("data:"), "data": data}
    if not data and not head.startswith("data:image/png"):
        source = {"type": "url", "url": url}
    bodies = {
        "/v1/chat/completions": {"messages": [user([{"type": "image_url", "image_url": {"url": url}}])]},
        "/v1/responses": {"input": [user([{"type": "input_image", "image_url": url, "detail": "auto"}])]},
        "/v1/messages": {"messages": [user([{"type": "image", "source": source}])], "max_tokens": 9},
    }
    answers = [gateway.post({"model": "m", **body}, path=path) for path, body in bodies.items()]
    assert [answer.status_code for answer in answers] == [400] * 3
    return [answer.json()["error"]["message"] for answer in answers]


@pytest.mark.parametrize("name", HOSTILE)
def test_an_invalid_image_is_refused_with_the_reason(gateway, engine, name):
    url, why = HOSTILE[name]
    errors = refusals(gateway, url)
    assert [why in error for error in errors] == [True] * 3, errors
    assert engine.requests == []
    trajectory = gateway.trajectory()
    assert (trajectory.segments, trajectory.unanswered_calls) == ((), 0)


@pytest.mark.parametrize("url", NOT_INLINE)
def test_an_address_of_an_image_is_not_fetched_or_opened(gateway, engine, tmp_path, url):
    path = tmp_path / "secret.png"
    path.write_bytes(RED)
    url = url.format(engine=engine.url, path=path)
    for error in refusals(gateway, url):
        assert "send the image itself" in error or "no PNG" in error
    assert engine.requests == []


@pytest.mark.parametrize("role", ["system", "assistant", "developer"])
def test_only_user_messages_and_tool_results_hold_images(gateway, role):
    with pytest.raises(openai.BadRequestError, match=r"messages\.0\.content\.0: a \w+ message cannot hold an image"):
        create(gateway, {**ask(RED), "role": role}, user("?"))


def test_limits_on_the_number_of_images_and_their_bytes(serve, engine, seeing, sees):
    limits = {"max_images": 2, "session_image_bytes": 4096}
    gateway = serve(engine.url, model=seeing, gateway=limits)
    three = user([part for data in (RED, BLUE, RED) for part in ask(data)["content"]])
    with pytest.raises(openai.BadRequestError, match=r"messages\.0\.content\.4: more than 2 images"):
        create(gateway, three)
    noise = picture("red", 640, 640, compress_level=0)
    assert len(noise) > 4096
    with pytest.raises(openai.BadRequestError, match="more than 4096 bytes"):
        create(gateway, ask(noise))
    assert engine.requests == []
    assert create(gateway, ask(RED)).choices[0].message.content


def test_images_can_be_switched_off(serve, engine, seeing, sees):
    gateway = serve(engine.url, model=seeing, gateway={"max_images": 0})
    assert all("only" in error for error in refusals(gateway, data_url(RED)))


# --- an engine that builds another prompt -----------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_fails_if_the_engine_built_another_prompt(serve, seeing, sees, stream):
    with ScriptedEngine(["Well."], seeing.path, image_tokens=lambda data: tokens_of(data) + 1) as engine:
        gateway = serve(engine.url, model=seeing)
        with pytest.raises(openai.APIError, match="built a prompt of"):
            list(create(gateway, ask(RED), stream=stream))
        assert gateway.stats().errors == {"prompt_differs": 1}
        trajectory = gateway.trajectory()
    assert (trajectory.segments, dict(trajectory.images), trajectory.unanswered_calls) == ((), {}, 1)


@pytest.mark.parametrize("more", [0, 1])
def test_behind_a_router_the_length_of_the_prompt_is_compared(serve, seeing, sees, monkeypatch, more):
    """It does not ask the engine for the tokens."""
    monkeypatch.setattr("rollout_backend.workbench.local.scripted._prompt_ids", lambda body: {})
    with ScriptedEngine(["Well."] * 4, seeing.path, image_tokens=lambda data: tokens_of(data) + more) as engine:
        gateway = serve(engine.url, model=seeing)
        if more:
            with pytest.raises(openai.InternalServerError, match="built a prompt of"):
                create(gateway, ask(RED))
        else:
            assert create(gateway, ask(RED)).choices[0].message.content == "Well."
            # The sum of two lengths would not tell how it divides.
            with pytest.raises(openai.InternalServerError, match="prompt that it built from 2 images"):
                create(gateway, ask(RED), ask(BLUE))
