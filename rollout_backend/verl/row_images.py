"""The pixels and positions that a vision model needs with a row's tokens, in the form of verl's own agent loop.

Invariant: an image has exactly the tokens that it had when the model sampled. Positions follow from these token
ranges, not from token ids, because the model may sample an image token itself.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from rollout_backend.core.rows import SeenImage
from rollout_backend.errors import ConfigError
from rollout_backend.model.rendering.image_positions import prepares_images

_PROCESSOR = "Qwen3VLProcessor"


class VisionInputs:
    """Prepares the images of one run.

    `processor` is verl's: it has the model's `image_processor`, `image_token_id` and `get_rope_index`.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self.image_token = int(processor.image_token_id)

    def inputs(self, ids: torch.Tensor, images: Sequence[SeenImage]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return `multi_modal_inputs` of a row of L tokens and its positions [4, L] (text, time, height, width).

        Raises:
            ValueError: an image's size does not match its number of tokens.
        """
        seen = self._pixels(images) if images else {}
        kinds = torch.zeros_like(ids)
        for image in images:
            kinds[image.start : image.end] = 1
        positions, _ = self._processor.get_rope_index(
            input_ids=ids[None],
            attention_mask=torch.ones_like(ids)[None],
            mm_token_type_ids=kinds[None],
            image_grid_thw=seen.get("image_grid_thw"),
        )
        return seen, torch.cat([torch.arange(len(ids))[None], positions[:, 0]])

    def _pixels(self, images: Sequence[SeenImage]) -> dict[str, torch.Tensor]:
        prepare = self._processor.image_processor
        opened = [Image.open(io.BytesIO(image.data)).convert("RGB") for image in images]
        made = prepare(images=opened, return_tensors="pt")
        grids: torch.Tensor = made["image_grid_thw"]
        for image, grid in zip(images, grids, strict=True):
            tokens = int(grid.prod()) // prepare.merge_size**2
            if tokens != image.end - image.start:
                raise ValueError(f"an image needs {tokens} tokens, but the row has {image.end - image.start} for it")
        return {
            "pixel_values": made["pixel_values"],
            "image_grid_thw": grids,
            "images_seqlens": torch.repeat_interleave(grids[:, 1] * grids[:, 2], grids[:, 0]),
        }


def load_vision_inputs(model: Path, wanted: bool) -> VisionInputs | None:
    """Return the image preparation for the model in this folder; None if the model takes text only.

    Raises:
        ConfigError: images are `wanted`, and verl cannot load the model's processor.
    """
    if not prepares_images(model):
        return None
    # Imported late because the module loads transformers.
    from rollout_backend.verl.verl_api import hf_processor

    processor = hf_processor(str(model), local_files_only=True)
    if type(processor).__name__ == _PROCESSOR:
        return VisionInputs(processor)
    if wanted:
        raise ConfigError(
            f"{model} takes images, but verl cannot load the processor that prepares them for training: install its "
            "dependencies (usually torchvision; see verl's warning), or set gateway.max_images=0"
        )
    return None
