"""Images through the gateway, to a model that has them: where they stand, which bytes, and what is refused."""

from __future__ import annotations

import base64
import io
import json
import shutil
import struct
import zlib

import anthropic
import httpx
import openai
import pytest
from PIL import Image

from agent_wrapper.contract import ContractError, Outcome, Rollout, Trajectory
from rollout_backend.config import ModelConfig
from rollout_backend.core.images import read_image
from rollout_backend.core.seal import Sealer
from rollout_backend.gateway import journal as journals
from rollout_backend.gateway.conversations import Conversations
from rollout_backend.local.scripted import Fail, ScriptedEngine, ToolCall
from rollout_backend.rendering.renderer import load_renderer

PAD = 151655
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


def as_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def as_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{as_base64(data)}"


@pytest.fixture(scope="session")
def seeing(families, folder_of, tmp_path_factory) -> ModelConfig:
    """Qwen3's vocabulary, which is Qwen3-VL's, and what a Qwen3-VL has for images."""
    folder = tmp_path_factory.mktemp("seeing") / "model"
    shutil.copytree(folder_of(families[0]), folder)
    (folder / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "image_processor_type": "Qwen2VLImageProcessorFast",
                "size": {"shortest_edge": 4 * SIDE**2, "longest_edge": 2**24},
                "patch_size": 16,
                "temporal_patch_size": 2,
                "merge_size": 2,
            }
        )
    )
    return ModelConfig(path=folder, name="m", renderer="qwen3-vl", context_length=4096)


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


# --- three clients ----------------------------------------------------------------------------------------


def chat(gateway, stream: bool) -> list[str]:
    """A conversation of four replies: an image, a tool whose result is another, and the first one again."""
    client = gateway.client()
    tools = [{"type": "function", "function": {"name": "show", "parameters": SHOW}}]
    messages: list[dict] = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What "},
                {"type": "text", "text": "is "},
                {"type": "image_url", "image_url": {"url": as_url(RED), "detail": "high"}},
                {"type": "text", "text": "this? <|image_pad|>"},
            ],
        }
    ]
    said = []
    for _ in range(4):
        if stream:
            with client.chat.completions.stream(model="m", messages=messages, tools=tools) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(model="m", messages=messages, tools=tools).choices[0].message
        said.append(message.content or "")
        messages.append(message.model_dump(exclude={"parsed"}, exclude_none=True))
        for call in message.tool_calls or ():
            shown = [{"type": "image_url", "image_url": {"url": as_url(BLUE)}}]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": shown})
        if not message.tool_calls:
            messages.append({"role": "user", "content": "Go on."})
        if len(said) == 3:
            messages[-1]["content"] = [{"type": "image_url", "image_url": {"url": as_url(RED)}}]
    return said


def responses(gateway, stream: bool) -> list[str]:
    client = gateway.client()
    tools = [{"type": "function", "name": "show", "parameters": SHOW}]
    first = [
        {"type": "input_text", "text": "What is "},
        {"type": "input_image", "image_url": as_url(RED), "detail": "auto"},
        {"type": "input_text", "text": "this? <|image_pad|>"},
    ]
    items: list = [{"role": "user", "content": first}]
    said = []
    for _ in range(4):
        if stream:
            with client.responses.stream(model="m", input=items, tools=tools) as events:
                response = events.get_final_response()
        else:
            response = client.responses.create(model="m", input=items, tools=tools)
        said.append(response.output_text)
        items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        for call in calls:
            shown = [{"type": "input_image", "image_url": as_url(BLUE)}]
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": shown})
        if len(said) == 3:
            items.append({"role": "user", "content": [{"type": "input_image", "image_url": as_url(RED)}]})
        elif not calls:
            items.append({"role": "user", "content": "Go on."})
    return said


def block(data: bytes, kind: str = "image/png") -> dict:
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": as_base64(data)}}


def messages(gateway, stream: bool) -> list[str]:
    tools = [{"name": "show", "input_schema": SHOW}]
    first = [{"type": "text", "text": "What is "}, block(RED), {"type": "text", "text": "this? <|image_pad|>"}]
    history: list = [{"role": "user", "content": first}]
    said = []
    with anthropic.Anthropic(base_url=gateway.url, api_key=gateway.key(), max_retries=0) as client:
        for _ in range(4):
            ask = {"model": "m", "max_tokens": 99, "tools": tools, "messages": history}
            if stream:
                with client.messages.stream(**ask) as events:
                    message = events.get_final_message()
            else:
                message = client.messages.create(**ask)
            said.append("".join(part.text for part in message.content if part.type == "text"))
            history.append({"role": "assistant", "content": [part.model_dump() for part in message.content]})
            calls = [part for part in message.content if part.type == "tool_use"]
            results: list = [
                {"type": "tool_result", "tool_use_id": call.id, "content": [block(BLUE)]} for call in calls
            ]
            if len(said) == 3:
                results = [block(RED)]
            history.append({"role": "user", "content": results or "Go on."})
        ask.pop("max_tokens")
        counted = client.messages.count_tokens(**{**ask, "messages": history[:-2]}).input_tokens
    assert counted > tokens_of(RED) * 2 + tokens_of(BLUE)
    return said


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("converse", [chat, responses, messages])
def test_a_conversation_with_images_is_one_row_of_what_the_engine_saw(gateway, engine, converse, stream):
    assert converse(gateway, stream) == ["A red one.", "", "And a blue one.", "No more."]
    trajectory = gateway.trajectory()
    [segment] = trajectory.segments
    assert len(segment.turns) == 4
    ids = segment.token_ids.tolist()
    lengths = [tokens_of(RED), tokens_of(BLUE), tokens_of(RED)]
    assert [span.end - span.start for span in segment.images] == lengths
    assert [span.media_type for span in segment.images] == ["image/png", "image/jpeg", "image/png"]
    for span in segment.images:
        assert set(ids[span.start : span.end]) == {PAD}
        around = engine.tokenizer.decode([ids[span.start - 1], ids[span.end]], skip_special_tokens=False)
        assert around == "<|vision_start|><|vision_end|>"
    assert ids.count(PAD) == sum(lengths)  # the words in the text made none
    assert [trajectory.images[span.sha256] for span in segment.images] == [RED, BLUE, RED]
    assert len(trajectory.images) == 2
    shown = [[RED], [RED], [RED, BLUE], [RED, BLUE, RED]]
    for request, turn, images in zip(engine.requests, segment.turns, shown, strict=True):
        assert [base64.b64decode(url.partition(",")[2]) for url in request["image_data"]] == images
        assert request["input_ids"].count(PAD) == len(images)
        assert engine._prompt(request) == ids[: turn.start]
        assert request["sampling_params"]["logit_bias"] == {"151655": -100.0, "151656": -100.0}
    assert engine.tokenizer.decode(ids[: segment.images[0].start]).endswith("user\nWhat is ")
    assert "sha256:" in str(segment.messages[0]["content"])
    assert "base64" not in str(segment.messages)


def test_every_dialect_makes_the_same_tokens(serve, seeing, sees):
    found = []
    for converse in (chat, responses, messages):
        with ScriptedEngine(SCRIPT, seeing.path, image_tokens=tokens_of) as engine:
            converse(serve(engine.url, model=seeing), False)
            found.append([request["input_ids"] for request in engine.requests][:4])
    assert found[0] == found[1] == found[2]


# --- rows -------------------------------------------------------------------------------------------------


def ask(data: bytes, text: str = "What is this?") -> dict:
    image = {"type": "image_url", "image_url": {"url": as_url(data)}}
    return {"role": "user", "content": [image, {"type": "text", "text": text}]}


def test_another_image_of_the_same_size_is_another_conversation(gateway, engine):
    engine.replies = ["It is red."] * 3
    client = gateway.client()
    green = picture("green", 64, 96)
    for data in (RED, green):
        client.chat.completions.create(model="m", messages=[ask(data)])
    said = {"role": "assistant", "content": "It is red."}
    client.chat.completions.create(model="m", messages=[ask(green), said, {"role": "user", "content": "Sure?"}])
    trajectory = gateway.trajectory()
    assert [len(segment.turns) for segment in trajectory.segments] == [1, 2]
    assert (
        trajectory.segments[0].token_ids == trajectory.segments[1].token_ids[: len(trajectory.segments[0].token_ids)]
    )
    assert [[trajectory.images[span.sha256] for span in segment.images] for segment in trajectory.segments] == [
        [RED],
        [green],
    ]


def test_a_history_that_names_another_image_does_not_go_on_with_the_row(gateway, engine):
    engine.replies = ["It is red."] * 2
    client = gateway.client()
    client.chat.completions.create(model="m", messages=[ask(RED)])
    said = {"role": "assistant", "content": "It is red."}
    green = picture("green", 64, 96)  # the tokens are those of the first row, and the model did not see them
    client.chat.completions.create(model="m", messages=[ask(green), said, {"role": "user", "content": "Sure?"}])
    trajectory = gateway.trajectory()
    assert [len(segment.turns) for segment in trajectory.segments] == [1, 1]
    assert trajectory.images[trajectory.segments[1].images[0].sha256] == green


def test_a_call_of_text_is_sent_as_to_any_model(gateway, engine):
    gateway.client().chat.completions.create(model="m", messages=[{"role": "user", "content": "Hello."}])
    [request] = engine.requests
    assert request.keys() == {"rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len"}
    assert "logit_bias" not in request["sampling_params"]


def test_text_is_rendered_as_by_the_renderer_itself(sees):
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello, you."},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye."},
    ]
    prompt = Conversations(sees).prepare(conversation, None)
    assert prompt.ids == sees.renderer.inner.render_ids(conversation, add_generation_prompt=True)
    assert prompt.images == ()


def test_the_places_are_those_that_the_renderer_makes_of_images(sees):
    """By the renderer's own way, which loads images and prepares their pixels."""
    pixels = [Image.open(io.BytesIO(data)) for data in (RED, BLUE)]
    sees.renderer.inner._processor = type("Processor", (), {"image_processor": sees.vision.processor})
    parts = [{"type": "image", "image": image} for image in pixels]
    rendered = sees.renderer.inner.render(
        [{"role": "user", "content": [*parts, {"type": "text", "text": "Compare."}]}], add_generation_prompt=True
    )
    found = rendered.multi_modal_data.mm_placeholders["image"]
    assert [place.length for place in found] == [tokens_of(RED), tokens_of(BLUE)]


def test_a_call_sent_again_gets_the_first_answer(gateway, engine):
    body = json.dumps({"model": "m", "messages": [ask(RED)]}).encode()
    headers = {"Authorization": f"Bearer {gateway.key()}"}
    url = f"{gateway.url}/v1/chat/completions"
    first = httpx.post(url, content=body, headers=headers)
    again = httpx.post(url, content=body, headers={**headers, "x-stainless-retry-count": "1"})
    assert first.json() == again.json()
    assert len(engine.requests) == 1
    assert len(gateway.trajectory().images) == 1


def test_what_was_seen_outlives_the_gateway(serve, engine, seeing, sees, tmp_path):
    folder = tmp_path / "gateway" / "0-of-1"
    journal_id = journals.prepare(folder)
    more = {"model": seeing, "journal": folder, "seal_secret": SEAL_SECRET}
    history: list[dict] = [ask(RED)]
    for data in (BLUE, RED, None):
        gateway = serve(engine.url, **more)
        client = gateway.client(journal_id=journal_id)
        message = client.chat.completions.create(model="m", messages=history).choices[0].message
        history += [message.model_dump(exclude_none=True), ask(data) if data else {"role": "user", "content": "So?"}]
        if data is not None:
            gateway.stop()
    headers = {"Authorization": f"Bearer {gateway.key(journal_id=journal_id)}"}
    sealed = httpx.post(f"{gateway.url}/v1/rollout/trajectory", headers=headers).raise_for_status().content
    trajectory = Trajectory.decode(sealed)
    [segment] = trajectory.segments
    assert len(segment.turns) == 3
    assert [trajectory.images[span.sha256] for span in segment.images] == [RED, BLUE, RED]
    written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert written.count(RED) == 1

    def rollout(trajectory: Trajectory) -> Rollout:
        return Rollout(
            run_id="run",
            step=0,
            task_id="t",
            rollout_id="r",
            attempt=1,
            session_id="s1",
            outcome=Outcome.COMPLETED,
            reward=1.0,
            model="m",
            segments=trajectory.segments,
            seal=trajectory.seal,
            images=trajectory.images,
        )

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


def test_the_kinds_of_images_that_are_taken(gateway, engine):
    green = Image.new("RGB", (64, 64), "green")
    second = [Image.new("RGB", (64, 64), "red")]
    kinds = {
        "PNG": ("image/png", {}),
        "JPEG": ("image/jpeg", {}),
        "MPO": ("image/jpeg", {"save_all": True, "append_images": second}),
        "WEBP": ("image/webp", {}),
        "GIF": ("image/gif", {"save_all": True, "append_images": second}),
    }
    engine.replies = ["Green."] * len(kinds)
    for number, (kind, (_, more)) in enumerate(kinds.items()):
        out = io.BytesIO()
        green.save(out, kind, **more)
        gateway.client().chat.completions.create(model="m", messages=[ask(out.getvalue(), f"Number {number}?")])
    found = [segment.images[0].media_type for segment in gateway.trajectory().segments]
    assert found == [media_type for media_type, _ in kinds.values()]


def test_newer_folders_have_another_file(seeing, tmp_path):
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


# --- what is refused --------------------------------------------------------------------------------------


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
    "bomb": (as_url(bomb()), "pixels"),
    "large": (as_url(picture("red", 4100, 4100)), "4100 x 4100 pixels"),
    "thin": (as_url(picture("red", 64, 2)), "at least 4 each way"),
    "long": (as_url(picture("red", 4000, 8)), "aspect ratio"),
    "bmp": (as_url(bmp()), "no PNG, JPEG, WebP or GIF"),
    "text": (as_url(b"root:x:0:0:root:/root:/bin/bash\n"), "no PNG, JPEG, WebP or GIF"),
    "svg": (as_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "no PNG, JPEG, WebP or GIF"),
    "empty": (as_url(b""), "no PNG, JPEG, WebP or GIF"),
    "cut": (as_url(picture("red", 640, 640, "JPEG")[:-600]), "cannot be read to its end"),
    "not base64": ("data:image/png;base64,***", "not base64"),
}
NOT_INLINE = ["{engine}/x.png", "file://{path}", "{path}", "data:image/png,x", "sha256:" + "0" * 64, ""]


def refusals(gateway, url: str) -> list[str]:
    """What the three dialects' clients are told of an image."""
    client = gateway.client()
    told = []
    content: list = [{"type": "image_url", "image_url": {"url": url}}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}])
    told.append(refused.value.body["message"])
    item = {"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "auto"}]}
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="m", input=[item])
    told.append(refused.value.body["message"])
    head, _, data = url.partition(";base64,")
    source = {"type": "base64", "media_type": head.removeprefix("data:"), "data": data}
    if not data and not head.startswith("data:image/png"):
        source = {"type": "url", "url": url}
    content = [{"type": "image", "source": source}]
    with (
        anthropic.Anthropic(base_url=gateway.url, api_key=gateway.key(), max_retries=0) as other,
        pytest.raises(anthropic.BadRequestError) as wrong,
    ):
        other.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": content}])
    assert wrong.value.body["type"] == "error"
    assert wrong.value.body["error"]["type"] == "invalid_request_error"
    told.append(wrong.value.body["error"]["message"])
    return told


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_image_to_be_shown_is_refused(gateway, engine, name):
    url, why = HOSTILE[name]
    assert [why in told for told in refusals(gateway, url)] == [True] * 3, refusals(gateway, url)
    assert engine.requests == []
    trajectory = gateway.trajectory()
    assert (trajectory.segments, trajectory.unanswered_calls) == ((), 0)


@pytest.mark.parametrize("url", NOT_INLINE)
def test_nothing_is_fetched_or_opened(gateway, engine, tmp_path, url):
    path = tmp_path / "secret.png"
    path.write_bytes(RED)
    url = url.format(engine=engine.url, path=path)
    for told in refusals(gateway, url):
        assert "send the image itself" in told or "no PNG" in told
    assert engine.requests == []


@pytest.mark.parametrize("role", ["system", "assistant", "developer"])
def test_only_what_is_shown_to_the_model_holds_images(gateway, role):
    content = [{"type": "image_url", "image_url": {"url": as_url(RED)}}]
    told = [{"role": role, "content": content}, {"role": "user", "content": "?"}]
    with pytest.raises(openai.BadRequestError, match=r"messages\.0\.content\.0: a \w+ message cannot hold an image"):
        gateway.client().chat.completions.create(model="m", messages=told)


def test_images_are_counted_and_their_bytes_are(serve, engine, seeing, sees):
    limits = {"max_images": 2, "session_image_bytes": 4096}
    gateway = serve(engine.url, model=seeing, gateway=limits)
    three = {"role": "user", "content": [part for data in (RED, BLUE, RED) for part in ask(data)["content"]]}
    with pytest.raises(openai.BadRequestError, match=r"messages\.0\.content\.4: more than 2 images"):
        gateway.client().chat.completions.create(model="m", messages=[three])
    noise = picture("red", 640, 640, compress_level=0)
    assert len(noise) > 4096
    with pytest.raises(openai.BadRequestError, match="more than 4096 bytes"):
        gateway.client().chat.completions.create(model="m", messages=[ask(noise)])
    assert engine.requests == []
    assert gateway.client().chat.completions.create(model="m", messages=[ask(RED)]).choices[0].message.content


def test_they_can_be_switched_off(serve, engine, seeing, sees):
    gateway = serve(engine.url, model=seeing, gateway={"max_images": 0})
    for told in refusals(gateway, as_url(RED)):
        assert "only" in told


# --- an engine that makes something else of them ----------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_the_engine_made_otherwise_is_no_one_s_row(serve, seeing, sees, stream):
    with ScriptedEngine(["Well."], seeing.path, image_tokens=lambda data: tokens_of(data) + 1) as engine:
        gateway = serve(engine.url, model=seeing)
        create = gateway.client().chat.completions.create
        with pytest.raises(openai.APIError, match="built a prompt of"):
            list(create(model="m", messages=[ask(RED)], stream=stream))
        assert gateway.stats().errors == {"prompt_differs": 1}
        trajectory = gateway.trajectory()
    assert (trajectory.segments, dict(trajectory.images), trajectory.unanswered_calls) == ((), {}, 1)


@pytest.mark.parametrize("more", [0, 1])
def test_behind_a_router_the_length_of_the_prompt_counts(serve, seeing, sees, monkeypatch, more):
    """It does not ask the engine for the tokens."""
    monkeypatch.setattr("rollout_backend.local.scripted._prompt_ids", lambda body: {})
    with ScriptedEngine(["Well."], seeing.path, image_tokens=lambda data: tokens_of(data) + more) as engine:
        create = serve(engine.url, model=seeing).client().chat.completions.create
        if more:
            with pytest.raises(openai.InternalServerError, match="built a prompt of"):
                create(model="m", messages=[ask(RED)])
        else:
            assert create(model="m", messages=[ask(RED)]).choices[0].message.content == "Well."


def test_an_engine_that_fails_is_asked_again_with_the_images(gateway, engine):
    engine.replies = [Fail(503), "Red."]
    assert (
        gateway.client().chat.completions.create(model="m", messages=[ask(RED)]).choices[0].message.content == "Red."
    )
    first, second = engine.requests
    assert first["image_data"] == second["image_data"] == [as_url(RED)]
