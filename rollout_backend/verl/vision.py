"""What a model that sees needs of a row beside its tokens: pixels and positions, as verl's own agent loop has them.

What must always hold: an image takes exactly the tokens that it had when the model sampled. Positions are made of
these places, and not of the tokens' ids, which the model may have sampled itself.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from rollout_backend.errors import ConfigError
from rollout_backend.gateway.vision import prepares_images

_PROCESSOR = "Qwen3VLProcessor"


@dataclass(frozen=True)
class SeenImage:
    """The bytes of an image and the tokens `[start, end)` of a row that stand for it."""

    start: int
    end: int
    data: bytes = field(repr=False)


class Vision:
    """Of one run. `processor` is verl's: it has the model's `image_processor`, `image_token_id` and, bound to it,
    `get_rope_index`."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self.image_token = int(processor.image_token_id)

    def inputs(self, ids: torch.Tensor, images: Sequence[SeenImage]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """`multi_modal_inputs` of a row of L tokens, and its positions [4, L]: by text, time, height and width.

        Raises:
            ValueError: an image takes another number of tokens.
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
                raise ValueError(f"an image takes {tokens} tokens, and the row has {image.end - image.start} for it")
        return {
            "pixel_values": made["pixel_values"],
            "image_grid_thw": grids,
            "images_seqlens": torch.repeat_interleave(grids[:, 1] * grids[:, 2], grids[:, 0]),
        }


def load_vision(model: Path, wanted: bool) -> Vision | None:
    """For rows of the model in this folder; None if it takes text only. `wanted` is whether images may come.

    Raises:
        ConfigError: they may, and verl cannot prepare them.
    """
    if not prepares_images(model):
        return None
    from verl.utils.tokenizer import hf_processor  # late: it loads transformers

    processor = hf_processor(str(model), local_files_only=True)
    if type(processor).__name__ == _PROCESSOR:
        return Vision(processor)
    if wanted:
        raise ConfigError(
            f"{model} takes images, and verl cannot load its processor, which makes training rows of them: install "
            "what that needs (torchvision, mostly; verl's warning says more), or set gateway.max_images=0"
        )
    return None
