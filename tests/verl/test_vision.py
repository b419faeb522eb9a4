"""Rows with images get the same pixels and positions as in verl's own agent loop, or are refused."""

from __future__ import annotations

import hashlib
import io
import types
import warnings

import numpy as np
import pytest
import torch
from PIL import Image as PILImage
from transformers import Qwen3VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl import Qwen3VLModel
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.utils.model import extract_multi_modal_inputs
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from agent_wrapper.contract import ImageSpan, Rollout, Segment
from rollout_backend.core.rows import SeenImage, rows_of
from rollout_backend.errors import ConfigError
from rollout_backend.model.images import Image
from rollout_backend.model.rendering import image_positions as of_gateway
from rollout_backend.verl import row_images as of_verl
from rollout_backend.verl.row_formats import legacy_batch, v1_fields
from rollout_backend.verl.row_images import VisionInputs, load_vision_inputs
from rollouts import make_rollout, make_turn

PAD, VIDEO_PAD, START, END = 60, 61, 62, 63
CONFIG = Qwen3VLConfig(
    image_token_id=PAD, video_token_id=VIDEO_PAD, vision_start_token_id=START, vision_end_token_id=END
)


class Qwen3VLProcessor(types.SimpleNamespace):
    """The parts of a Qwen3-VL processor that rows need. verl's `hf_processor` would require torchvision."""


@pytest.fixture(scope="module")
def processor():
    made = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessorPil(
            patch_size=16, merge_size=2, size={"shortest_edge": 64 * 64, "longest_edge": 2**24}
        ),
        image_token_id=PAD,
        video_token_id=VIDEO_PAD,
        config=CONFIG,
    )
    made.get_rope_index = types.MethodType(Qwen3VLModel.get_rope_index, made)
    made.get_vision_position_ids = types.MethodType(Qwen3VLModel.get_vision_position_ids, made)
    return made


@pytest.fixture(scope="module")
def vision(processor):
    return VisionInputs(processor)


def picture(colour: str, width: int, height: int) -> bytes:
    out = io.BytesIO()
    PILImage.linear_gradient("L").resize((width, height)).convert("RGB").save(out, "PNG")
    PILImage.blend(PILImage.open(out), PILImage.new("RGB", (width, height), colour), 0.5).save(
        out := io.BytesIO(), "PNG"
    )
    return out.getvalue()


TALL, WIDE = picture("red", 64, 96), picture("blue", 160, 64)  # 2 x 3 and 5 x 2 tokens


def seen(*pieces, reward: float = 0.5) -> Rollout:
    """Make a rollout of one segment from ("given" | "sampled", ids) and (image bytes, number of tokens) pieces."""
    ids, mask, turns, spans, images = [], [], [], [], {}
    for what, content in pieces:
        start = len(ids)
        if isinstance(what, bytes):
            name = hashlib.sha256(what).hexdigest()
            images[name] = what
            spans.append(ImageSpan(start=start + 1, end=start + 1 + content, sha256=name, media_type="image/png"))
            content = [START, *[PAD] * content, END]
        ids += content
        mask += [int(what == "sampled")] * len(content)
        if what == "sampled":
            turns.append(make_turn(start, len(ids)))
    segment = Segment(
        token_ids=ids,
        response_mask=mask,
        logprobs=[-1.0 if sampled else None for sampled in mask],
        turns=turns,
        images=spans,
    )
    return make_rollout("t.0", reward=reward, segments=(segment,), images=images)


TWO = seen(("given", [1, 2]), (TALL, 6), ("given", [3]), ("sampled", [4, 5]), (WIDE, 10), ("sampled", [6, 7, 8]))
TEXT = seen(("given", [1, 2, 3]), ("sampled", [4, 5]))


def row_of(rollout: Rollout, lengths=(64, 64)):
    [row] = rows_of(rollout, *lengths, PAD)
    return row


def test_the_gateway_and_this_environments_processor_count_the_same_tokens(processor):
    gateway = of_gateway.Vision(PAD, (PAD, VIDEO_PAD), processor.image_processor)
    sizes = {TALL: (64, 96), WIDE: (160, 64)}
    images = [Image(data, "", "image/png", width, height) for data, (width, height) in sizes.items()]
    assert [gateway.tokens(image) for image in images] == [6, 10]


def test_pixels_and_positions_are_those_of_verls_own_agent_loop(vision, processor):
    fields = v1_fields(row_of(TWO), {}, vision=vision)
    ids = fields["input_ids"]
    opened = [PILImage.open(io.BytesIO(data)) for data in (TALL, WIDE)]
    wanted = dict(processor.image_processor(images=opened, return_tensors="pt"))
    found = fields["multi_modal_inputs"]
    assert set(found) == {"pixel_values", "image_grid_thw", "images_seqlens"}
    assert torch.equal(found["pixel_values"], wanted["pixel_values"])
    assert found["image_grid_thw"].tolist() == [[1, 6, 4], [1, 4, 10]]
    assert found["images_seqlens"].tolist() == [24, 40]
    worker = types.SimpleNamespace(processor=processor)
    theirs = AgentLoopWorker._compute_position_ids(
        worker, ids[None], torch.ones_like(ids)[None], {**wanted, "mm_token_type_ids": torch.ones(1)}, {}
    )
    assert torch.equal(fields["position_ids"], theirs[0])
    assert fields["position_ids"].shape == (4, len(ids))


def test_text_and_images_make_one_batch(vision):
    made = [v1_fields(row_of(rollout), {}, vision=vision) for rollout in (TWO, TEXT, TWO)]
    assert made[1]["multi_modal_inputs"] == {}
    assert made[1]["position_ids"].tolist() == [list(range(5))] * 4
    batch = list_of_dict_to_tensordict(made)
    inputs = extract_multi_modal_inputs(batch["multi_modal_inputs"])
    assert inputs["image_grid_thw"].shape == (4, 3)
    assert batch["position_ids"].is_nested


def test_the_legacy_batch_has_pixels_and_positions_too(vision):
    slots = [rows_of(TWO, 32, 32, PAD), None, rows_of(TEXT, 32, 32, PAD)]
    batch = legacy_batch(slots, 32, 32, pad_token_id=0, vision=vision)
    positions, attention = batch.tensors["position_ids"], batch.tensors["attention_mask"]
    assert positions.shape == (3, 4, 64)
    for i, rollout in ((0, TWO), (2, TEXT)):
        fields = v1_fields(row_of(rollout), {}, vision=vision)
        assert torch.equal(positions[i][:, attention[i].bool()], fields["position_ids"])
        found = batch.non_tensors["multi_modal_inputs"][i]
        assert set(found) == set(fields["multi_modal_inputs"])
    assert batch.non_tensors["multi_modal_inputs"][1] == {}


def test_a_row_has_the_images_before_its_end(vision):
    row = row_of(TWO, lengths=(64, 4))  # the second image and the tokens after it do not fit
    assert [image.data for image in row.images] == [TALL]
    assert row.truncated_tokens == 3
    fields = v1_fields(row, {}, vision=vision)
    assert fields["multi_modal_inputs"]["image_grid_thw"].tolist() == [[1, 6, 4]]
    assert int((fields["input_ids"] == PAD).sum()) == 6


def test_a_long_prompt_is_split_within_an_image(vision):
    row = row_of(TWO, lengths=(5, 64))
    assert len(row.prompt) == 5
    assert torch.equal(
        v1_fields(row, {}, vision=vision)["position_ids"], v1_fields(row_of(TWO), {}, vision=vision)["position_ids"]
    )


def test_an_image_token_that_the_model_sampled_ends_the_trained_tokens(vision):
    astray = seen((TALL, 6), ("given", [1]), ("sampled", [4, PAD, 5]), ("given", [1]), ("sampled", [6]))
    row = row_of(astray)
    assert (row.response.tolist(), row.truncated_tokens) == ([4], 3)
    assert v1_fields(row, {}, vision=vision)["multi_modal_inputs"]["image_grid_thw"].shape == (1, 3)
    assert len(rows_of(astray, 64, 64).rows[0].response) == 5  # for a text model it is an ordinary token


def test_an_image_of_another_length_is_refused(vision):
    wrong = seen((TALL, 5), ("given", [1]), ("sampled", [4]))
    with pytest.raises(ValueError, match="needs 6 tokens, but the row has 5"):
        v1_fields(row_of(wrong), {}, vision=vision)


def test_images_without_a_processor_are_refused():
    with pytest.raises(ConfigError, match=r"a row has 2 images.*gateway\.max_images=0"):
        v1_fields(row_of(TWO), {})
    with pytest.raises(ConfigError, match="a row has 2 images"):
        legacy_batch([rows_of(TWO, 64, 64)], 64, 64, pad_token_id=0)
    assert v1_fields(row_of(TEXT), {})["position_ids"].tolist() == list(range(5))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessorFast"}')
    return tmp_path


def test_a_processor_that_cannot_be_loaded_is_reported_at_start(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl's warnings
        with pytest.raises(ConfigError, match=r"cannot load the processor.*gateway\.max_images=0"):
            load_vision_inputs(folder, wanted=True)
        assert load_vision_inputs(folder, wanted=False) is None


def test_verls_processor_is_used(folder, processor, monkeypatch):
    monkeypatch.setattr("verl.utils.tokenizer.hf_processor", lambda path, **_: processor)
    found = load_vision_inputs(folder, wanted=True)
    assert found is not None
    assert found.image_token == PAD
    assert isinstance(found, of_verl.VisionInputs)
    ids = torch.tensor(np.array([1, START, *[PAD] * 6, END, 2]))
    inputs, positions = found.inputs(ids, [SeenImage(2, 8, TALL)])
    assert inputs["pixel_values"].shape[0] == 24
    assert positions[1:, 9].tolist() == [6, 6, 6]
